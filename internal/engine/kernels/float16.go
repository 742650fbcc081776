package kernels

import (
	"encoding/binary"
	"math"
)

// F16ToF32 widens an IEEE 754 half. It is exact.
func F16ToF32(h uint16) float32 {
	if h&0x7c00 == 0x7c00 {
		return notFinite(h)
	}
	return scaled(int16(h))
}

// scaled moves sign, exponent and fraction to their places in a float32, whose
// exponent is then 112 too small. Multiplying by 2^112 is exact, and does for
// zeros and subnormals too.
func scaled(h int16) float32 {
	return float32(math.Float32frombits(uint32(int32(h)<<13)&0x8fffe000) * 0x1p112)
}

func notFinite(h uint16) float32 {
	return math.Float32frombits(uint32(h&0x8000)<<16 | 0x7f800000 | uint32(h&0x3ff)<<13)
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

// WidenF16 widens len(dst) halves, four at a time as long as all are finite.
func WidenF16(dst []float32, src []byte) {
	if f := now.float; f != nil && !raced && len(dst) >= lanes {
		n := len(dst) / lanes * lanes
		f.widenF16(&dst[0], &src[:2*len(dst)][0], n/lanes)
		dst, src = dst[n:], src[2*n:]
	}
	const exponents, signs = 0x7c00_7c00_7c00_7c00, 0x8000_8000_8000_8000
	for len(dst) >= 4 && len(src) >= 8 {
		d, v := (*[4]float32)(dst), binary.LittleEndian.Uint64(src)
		if ((v&exponents^exponents)+exponents)&signs != signs { // some exponent is the largest
			break
		}
		d[0], d[1], d[2], d[3] = scaled(int16(v)), scaled(int16(v>>16)), scaled(int16(v>>32)), scaled(int16(v>>48))
		dst, src = dst[4:], src[8:]
	}
	src = src[:2*len(dst)]
	for i := range dst {
		dst[i] = F16ToF32(uint16(src[2*i]) | uint16(src[2*i+1])<<8)
	}
}

func widenBF16(dst []float32, src []byte) {
	src = src[:2*len(dst)]
	if f := now.float; f != nil && !raced && len(dst) >= lanes {
		n := len(dst) / lanes * lanes
		f.widenBF16(&dst[0], &src[0], n/lanes)
		dst, src = dst[n:], src[2*n:]
	}
	for i := range dst {
		dst[i] = math.Float32frombits(uint32(src[2*i])<<16 | uint32(src[2*i+1])<<24)
	}
}

func putF16(dst []byte, src []float32) {
	dst = dst[:2*len(src)]
	if f := now.float; f != nil && !raced && len(src) >= lanes {
		n := len(src) / lanes * lanes
		f.roundF16(&dst[:2*n][0], &src[0], n/lanes)
		dst, src = dst[2*n:], src[n:]
	}
	for i, v := range src {
		binary.LittleEndian.PutUint16(dst[2*i:], F32ToF16(v))
	}
}

func putF32(dst []byte, src []float32) {
	dst = dst[:4*len(src)]
	if now.float != nil { // a processor whose floats lie in memory as they do in files
		copy(dst, cast[byte](src))
		return
	}
	for i, v := range src {
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
	}
}

func widenF32(dst []float32, src []byte) {
	src = src[:4*len(dst)]
	if now.float != nil {
		copy(cast[byte](dst), src)
		return
	}
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
	}
}
