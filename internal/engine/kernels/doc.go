// Package kernels holds the arithmetic of the engine: matrix products over
// quantised and float weights, attention inside one block of positions, norms,
// rope, and the few functions of one number that they need.
//
// Every function has one result, bit for bit, on every machine and every path;
// docs/numerics.md states the rules, and a test reads the source for breaches (a
// product that an arm64 compiler could fuse with a sum, a function of package
// math that is not exact). A path is the instructions that the work is done
// with, chosen once for the process: see Use. The portable one is plain loops
// over slices; the others call assembly from the same functions, which check
// lengths first, so that no routine reads outside of a slice.
//
// Nothing here starts a goroutine, allocates, or keeps state. The caller cuts
// the work and brings the memory. One call of a routine lasts microseconds: Go
// cannot preempt it.
//
// The innermost loops are marked go:norace: under the race detector they would
// be fifty times slower, and all that they touch is the caller's scratch.
// Widening and rounding of KV, where another part might race, are not marked.
package kernels
