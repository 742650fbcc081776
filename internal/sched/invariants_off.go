//metronome:pure

//go:build !(race || invariants)

package sched

// invariants: Check only where a test calls it.
const invariants = false
