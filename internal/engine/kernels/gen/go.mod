// A module of its own: avo takes a minute to compile, which only those who
// change or check the assembly should wait for.
module github.com/metronome-serve/metronome/internal/engine/kernels/gen

go 1.26.0

require github.com/mmcloughlin/avo v0.5.0

require (
	golang.org/x/mod v0.6.0 // indirect
	golang.org/x/sys v0.1.0 // indirect
	golang.org/x/tools v0.2.0 // indirect
)
