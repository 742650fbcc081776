package modeltest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
)

// A format is how ggml stores weights: blocks of so many values in so many
// bytes, of which nearly all may be any bits at all. Only the block's scale and
// minimum, halves at fixed places, have to be chosen.
type format struct {
	name          string
	kind          uint32
	values, bytes int
	scale         int     // offset of the scale
	min           int     // offset of the minimum; 0: none
	offset        int     // binary logarithm of minimum ÷ scale
	spread        float64 // standard deviation of the weights that random bits make, for scale 1
	fallback      string  // takes its place where rows do not divide into blocks, as in llama.cpp's files
}

// formats are computed from their definition in ggml-common.h. The minimum of
// a format that has one is taken such that the mean of the weights is about 0.
var formats = []format{
	{name: "F32", kind: 0, values: 1, bytes: 4},
	{name: "F16", kind: 1, values: 1, bytes: 2},
	{name: "BF16", kind: 30, values: 1, bytes: 2},
	{name: "Q8_0", kind: 8, values: 32, bytes: 34, spread: 74},
	{name: "Q4_0", kind: 2, values: 32, bytes: 18, spread: 4.6},
	{name: "Q4_1", kind: 3, values: 32, bytes: 20, min: 2, offset: 3, spread: 4.6},
	{name: "Q5_0", kind: 6, values: 32, bytes: 22, spread: 9.2},
	{name: "Q5_1", kind: 7, values: 32, bytes: 24, min: 2, offset: 4, spread: 9.2},
	{name: "Q4_K", kind: 12, values: 256, bytes: 144, min: 2, offset: 3, spread: 260, fallback: "Q5_0"},
	{name: "Q5_K", kind: 13, values: 256, bytes: 176, min: 2, offset: 4, spread: 526, fallback: "Q5_1"},
	{name: "Q6_K", kind: 14, values: 256, bytes: 210, scale: 208, spread: 1365, fallback: "Q8_0"},
}

// named is the format of that name, or what takes its place for such rows.
func named(name string, cols int) *format {
	for i := range formats {
		if f := &formats[i]; f.name == name {
			if cols%f.values != 0 {
				return named(f.fallback, cols)
			}
			return f
		}
	}
	panic("modeltest: no format " + name)
}

// weights are n random values with about that standard deviation. They are made
// of random bits without float arithmetic that could differ between machines.
func (f *format) weights(rnd *rand.Rand, n int, deviation float64) []byte {
	var b []byte
	le, even := binary.LittleEndian, power(deviation*math.Sqrt(3))
	switch f.name {
	case "F32":
		for range n {
			b = le.AppendUint32(b, uniform(rnd, even, 8, 23))
		}
		return b
	case "F16":
		for range n {
			b = le.AppendUint16(b, uint16(uniform(rnd, even, 5, 10)))
		}
		return b
	case "BF16":
		for range n {
			b = le.AppendUint16(b, uint16(uniform(rnd, even, 8, 7)))
		}
		return b
	}
	size := n / f.values * f.bytes
	for len(b) < size {
		b = le.AppendUint64(b, rnd.Uint64())
	}
	b = b[:size]
	mean := half(deviation / f.spread)
	for i := 0; i < size; i += f.bytes {
		d := max(mean+uint16(rnd.Uint32())&1023, 513) - 512 // from half the mean to twice it
		le.PutUint16(b[i+f.scale:], d)
		if f.min > 0 {
			m := half(math.Ldexp(widen(d), f.offset)) ^ uint16(rnd.Uint32())&15
			if f.values == 32 {
				m |= 1 << 15 // added; in K-quants it is taken off
			}
			le.PutUint16(b[i+f.min:], m)
		}
	}
	return b
}

// half is 0 < x < 65504 as an IEEE half, rounded down: below 2^-14 a subnormal
// one, as K-quants of real models have them. All of its arithmetic is exact.
func half(x float64) uint16 {
	frac, exp := math.Frexp(x)
	if exp < -13 {
		return uint16(math.Ldexp(x, 24))
	}
	return uint16(exp+14)<<10 + uint16(frac*2048) - 1024
}

// widen is a positive half.
func widen(h uint16) float64 {
	if h < 1024 {
		return math.Ldexp(float64(h), -24)
	}
	return math.Ldexp(float64(h&1023+1024), int(h>>10)-25)
}

// power is the binary logarithm, rounded.
func power(x float64) int {
	frac, exp := math.Frexp(x) // exact
	if frac < math.Sqrt2/2 {
		exp--
	}
	return exp
}

// uniform is the bits of a float with that many bits of exponent and mantissa,
// spread evenly from -2^p to 2^p: its deviation is 2^p ÷ √3.
func uniform(rnd *rand.Rand, p, exponent, mantissa int) uint32 {
	r := rnd.Uint64()
	down := 1 // each power of two below has half as many
	for k := r >> 40; k&1 == 1 && down < 8; k >>= 1 {
		down++
	}
	bias := 1<<(exponent-1) - 1
	sign := uint32(r>>63) << (exponent + mantissa)
	return sign | uint32(bias+p-down)<<mantissa | uint32(r)&(1<<mantissa-1)
}
