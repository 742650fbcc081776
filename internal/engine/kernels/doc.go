// Package kernels holds the arithmetic of the engine: matrix products over
// quantised and float weights, attention inside one block of positions, norms,
// rope, and the few functions of one number that they need.
//
// Everything here is a plain loop over slices: no goroutine, no allocation, no
// state. The caller cuts the work and brings the memory. Every function has one
// result, bit for bit, on every machine; docs/numerics.md states the rules, and
// a test reads the source for breaches (a product that an arm64 compiler could
// fuse with a sum, a function of package math that is not exact).
//
// The innermost loops are marked go:norace: under the race detector they would
// be fifty times slower, and all that they touch is the caller's scratch.
// Widening and rounding of KV, where another part might race, are not marked.
package kernels
