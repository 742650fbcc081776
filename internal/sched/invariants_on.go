//metronome:pure

//go:build race || invariants

package sched

// invariants: Check after every Step and Ready.
const invariants = true
