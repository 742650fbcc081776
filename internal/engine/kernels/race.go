//go:build race

package kernels

// raced says that the race detector runs: it does not see into assembly, so what
// reads and writes KV is Go then.
const raced = true
