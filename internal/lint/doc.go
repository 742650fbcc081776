// Package lint holds the rules of this repository that no general linter
// knows, as tests: which package may import which, what a pure file may use,
// how long a function may be, which goroutines there are. Each failure names
// the place and what would be right.
package lint
