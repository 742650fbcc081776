//go:build race

package engine

// raced says that the race detector runs: whole models are left to the plain
// tests then, for they take it minutes and show it nothing that TestInvariance
// does not.
const raced = true
