//metronome:pure

package transfer

// MaxTop is how many of the likeliest tokens FIRST can carry.
const MaxTop = 1024
