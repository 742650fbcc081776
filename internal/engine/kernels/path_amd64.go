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
}
