package kernels

import "golang.org/x/sys/cpu"

// detect says which paths this processor and its operating system support.
func detect() []*path {
	var paths []*path
	x := &cpu.X86
	if x.HasAVX512F && x.HasAVX512BW && x.HasAVX512VL && x.HasAVX512DQ && x.HasAVX512VNNI {
		paths = append(paths, avx512)
	}
	return paths
}

var avx512 = &path{
	name: "avx512",
	int8: &int8Routines{
		pack:     map[Type]packRoutine{Q8_0: {packQ8_0, false}, Q4_1: {packQ4_1, true}},
		bias:     [3]mulRoutine{mulBias12, mulBias4, mulBias1},
		min:      [3]mulRoutine{mulMin12, mulMin4, mulMin1},
		quantise: quantise4,
	},
	float: &floatRoutines{
		dots4x4: dots4x4, dots16x1: dots16x1, dot: dot16, softmax: softmax64,
		mix4x64: mix4x64, mix4x16: mix4x16, mix1x64: mix1x64, mix1x16: mix1x16, merge: merge16,
		exp: exp16, swiglu: swiglu16, scale: scale16, add: add16,
		widenF16: widenF16x16, roundF16: roundF16x16, rope: rope16, halves: ropeHalves16,
	},
}
