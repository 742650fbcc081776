package transfer

import "golang.org/x/sys/cpu"

// folds: the processor multiplies polynomials in whole vector registers.
var folds = cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42

// fold adds n bytes, a multiple of folded and not 0, to the state of a checksum:
// that is the checksum with all bits turned.
//
//go:noescape
func fold(state uint32, p *byte, n int) uint32

// fetch begins to bring n bytes into the cache, and claim likewise for writing;
// neither waits for them. Any address will do.
//
//go:noescape
func fetch(p *byte, n int)

//go:noescape
func claim(p *byte, n int)
