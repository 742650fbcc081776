package bench

import "golang.org/x/sys/cpu"

// read512 and read256 read n bytes, a multiple of 256 above 0.
//
//go:noescape
func read512(p *byte, n int) uint64

//go:noescape
func read256(p *byte, n int) uint64

// dots512 does n × 12 × 64 products of int8 and their sums, by VNNI.
func dots512(n int)

// dots256 does n × 6 × 32 of them, by AVX2.
func dots256(n int)

// best are the routines for this processor.
func best() routines {
	x := &cpu.X86
	switch {
	case x.HasAVX512F && x.HasAVX512VNNI:
		return routines{read: read512, dots: dots512, macs: 12 * 64}
	case x.HasAVX2:
		return routines{read: read256, dots: dots256, macs: 6 * 32}
	}
	return routines{read: readWords}
}
