package kernels

import "math"

// F16ToF32 widens an IEEE 754 half. It is exact.
func F16ToF32(h uint16) float32 {
	if e := h & 0x7c00; e-0x0400 < 0x7800 { // normal: neither 0 nor the largest exponent
		return math.Float32frombits(uint32(h&0x8000)<<16 | (uint32(h&0x7fff)<<13 + 112<<23))
	}
	return rareF16(h)
}

// rareF16 widens zeros, subnormals, infinities and NaN.
func rareF16(h uint16) float32 {
	sign, frac := uint32(h&0x8000)<<16, uint32(h&0x3ff)
	if h&0x7c00 != 0 {
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	f := float32(float32(frac) * (1.0 / (1 << 24))) // exact: 10 bits times a power of two
	return math.Float32frombits(sign | math.Float32bits(f))
}

// F32ToF16 rounds to the nearest half, ties to even; what is too large becomes
// infinite, NaN stays NaN.
func F32ToF16(f float32) uint16 {
	b := math.Float32bits(f)
	sign, abs := uint16(b>>16&0x8000), b&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00
	case abs >= 0x477ff000: // 65520 and more round to infinity
		return sign | 0x7c00
	case abs >= 0x38800000: // 2^-14: a normal half
		abs += 0xfff + abs>>13&1
		return sign | uint16((abs-112<<23)>>13)
	}
	// A subnormal half counts units of 2^-24. Adding 0.5 puts that unit at the
	// last bit of the sum, so that the addition does the rounding.
	return sign | uint16(math.Float32bits(math.Float32frombits(abs)+0.5)-0x3f000000)
}
