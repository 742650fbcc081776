package kernels

import "golang.org/x/sys/cpu"

// Pause waits for some tens of nanoseconds, and leaves what the core can do to
// whoever shares it.
func Pause() { pause(1) }

// detect says which paths this processor and its operating system support.
func detect() []*path {
	var paths []*path
	x := &cpu.X86
	if x.HasAVX512F && x.HasAVX512BW && x.HasAVX512VL && x.HasAVX512DQ && x.HasAVX512VNNI {
		paths = append(paths, avx512)
	}
	if x.HasAVX2 && x.HasFMA { // FMA came with halves; it is not used
		paths = append(paths, avx2)
	}
	return paths
}

var avx512 = &path{
	name: "avx512",
	int8: &int8Routines{
		of: map[Type]packRoutines{
			Q4_0: {packQ4_0512, &bias512, [3]directRoutine{directQ4_0x1, directQ4_0x2, directQ4_0x4}},
			Q4_1: {packQ4_1512, &min512, [3]directRoutine{directQ4_1x1, directQ4_1x2, directQ4_1x4}},
			Q5_0: {packQ5_0512, &bias512, [3]directRoutine{directQ5_0x1, directQ5_0x2, directQ5_0x4}},
			Q5_1: {packQ5_1512, &min512, [3]directRoutine{directQ5_1x1, directQ5_1x2, directQ5_1x4}},
			Q8_0: {packQ8_0512, &bias512, [3]directRoutine{directQ8_0x1, directQ8_0x2, directQ8_0x4}},
			Q4_K: {packQ4_K512, &eights512, [3]directRoutine{directQ4_Kx1}},
			Q5_K: {packQ5_K512, &eights512, [3]directRoutine{directQ5_Kx1}},
			Q6_K: {packQ6_K512, &sixteens512, [3]directRoutine{directQ6_Kx1}},
		},
		quantise:      quantise4,
		quantiseSuper: quantise256,
	},
	float: &floatRoutines{
		dots4x4: dots4x4, dots16x1: dots16x1, dot: dot16, softmax: softmax64,
		mix4x64: mix4x64, mix4x16: mix4x16, mix1x64: mix1x64, mix1x16: mix1x16, merge: merge512,
		dots4x4h: dots4x4h, dots16x1h: dots16x1h, mix4x64h: mix4x64h, mix4x16h: mix4x16h, mix1x64h: mix1x64h, mix1x16h: mix1x16h,
		exp: exp512, swiglu: swiglu512, scale: scale512, add: add512,
		widenF16: widenHalves512, roundF16: roundHalves512,
		widenBF16: widenBrain512, widenQ8_0: widenBlocks512, roundQ8_0: roundBlocks512,
		rope: rope16, halves: ropeHalves512,
	},
}

var avx2 = &path{
	name: "avx2",
	int8: &int8Routines{
		of: map[Type]packRoutines{
			Q4_0: {pack: packQ4_0256, mul: &bias256}, Q4_1: {pack: packQ4_1256, mul: &min256},
			Q5_0: {pack: packQ5_0256, mul: &bias256}, Q5_1: {pack: packQ5_1256, mul: &min256}, Q8_0: {pack: packQ8_0256, mul: &bias256},
			Q4_K: {pack: packQ4_K256, mul: &eights256}, Q5_K: {pack: packQ5_K256, mul: &eights256}, Q6_K: {pack: packQ6_K256, mul: &sixteens256},
		},
		quantise: quantiseRecords, quantiseSuper: quantiseSuperRecords,
	},
	float: &floatRoutines{
		dots4x4: dots4x4x2, dots16x1: dots16x1x2, dot: dot16x2, softmax: eachSoftmax(softmax64x2),
		mix4x64: fourTimes(mix1x64x2), mix4x16: fourTimes(mix1x16x2), mix1x64: mix1x64x2, mix1x16: mix1x16x2, merge: merge256,
		exp: exp256, swiglu: swiglu256, scale: scale256, add: add256,
		widenF16: widenHalves256, roundF16: roundHalves256,
		widenBF16: widenBrain256, widenQ8_0: widenBlocks256, roundQ8_0: roundBlocks256,
		halves: ropeHalves256,
	},
}

// Products of packed weights: without a minimum, with one, with scales for
// each eighth or sixteenth of a block.
var (
	bias512     = [len(widths)]mulRoutine{mulBias12, mulBias4, mulBias1}
	min512      = [len(widths)]mulRoutine{mulMin12, mulMin4, mulMin1}
	eights512   = [len(widths)]mulRoutine{thrice(mulParts8x4), mulParts8x4, mulParts8x1}
	sixteens512 = [len(widths)]mulRoutine{thrice(mulParts16x4), mulParts16x4, mulParts16x1}
	bias256     = [len(widths)]mulRoutine{thrice(mulBias4x2), mulBias4x2, mulBias1x2}
	min256      = [len(widths)]mulRoutine{thrice(mulMin4x2), mulMin4x2, mulMin1x2}
	eights256   = [len(widths)]mulRoutine{thrice(mulParts8x4x2), mulParts8x4x2, mulParts8x1x2}
	sixteens256 = [len(widths)]mulRoutine{thrice(mulParts16x4x2), mulParts16x4x2, mulParts16x1x2}
)

// thrice multiplies 12 vectors by a routine for 4.
func thrice(four mulRoutine) mulRoutine {
	return func(y *float32, stride int, w, x *byte, group, blocks int) {
		for i := range 3 {
			four(ahead(y, 4*i*stride), stride, w, ahead(x, i*group), group, blocks)
		}
	}
}

// eachSoftmax does some queries by a routine for one.
func eachSoftmax(one func(p *float32, n int, scale float32) (top, sum float32)) func(p *float32, n *int, top, sum *float32, queries int, scale float32) {
	return func(p *float32, n *int, top, sum *float32, queries int, scale float32) {
		for i := range queries {
			*ahead(top, 4*i), *ahead(sum, 4*i) = one(ahead(p, 4*Span*i), *ahead(n, size[int]()*i), scale)
		}
	}
}

// fourTimes mixes for 4 queries by a routine for one.
func fourTimes(one mixRoutine) mixRoutine {
	return func(out *float32, outStride int, p *float32, pStride int, v *float32, vStride, n int) {
		for i := range 4 {
			one(ahead(out, i*outStride), outStride, ahead(p, i*pStride), pStride, v, vStride, n)
		}
	}
}
