package kernels

import "math"

// Exp is e^x in float32, within 1e-7 of it (relative). Below -87.33 it is 0:
// no result is subnormal. Above 88.72 it is infinite.
//
// x = n ln 2 + r with |r| ≤ ln 2 ÷ 2; ln 2 is split in two so that n times the
// first part is exact (Cody and Waite). The polynomial is that of expf in
// Moshier's Cephes library.
func Exp(x float32) float32 {
	if !(x >= -87.33) {
		if x != x {
			return x
		}
		return 0
	}
	if x > 88.72 {
		return float32(math.Inf(1))
	}
	const round = 3 << 22 // adding it leaves an integer in the last bits, ties to even
	t := float32(x*(1/math.Ln2)) + round
	n := t - round
	r := x - float32(n*0.693359375)
	r = r - float32(n*-2.12194440e-4)
	p := float32(1.9875691500e-4*r) + 1.3981999507e-3
	p = float32(p*r) + 8.3334519073e-3
	p = float32(p*r) + 4.1665795894e-2
	p = float32(p*r) + 1.6666665459e-1
	p = float32(p*r) + 5.0000001201e-1
	y := (float32(float32(p*r)*r) + r) + 1
	return math.Float32frombits(math.Float32bits(y) + (math.Float32bits(t)-math.Float32bits(round))<<23)
}

// Exps is dst = exp((src - top) ÷ divisor).
func Exps(dst, src []float32, top, divisor float32) {
	dst = dst[:len(src)]
	if f := now.float; f != nil && len(src) >= lanes {
		f.exp(&dst[0], &src[0], len(src)/lanes, top, divisor)
		n := len(src) / lanes * lanes
		dst, src = dst[n:], src[n:]
	}
	for i, v := range src {
		dst[i] = Exp((v - top) / divisor)
	}
}

// The float64 functions below serve tables and log-probabilities. They are
// within 1e-15 of the truth (relative; SinCos: absolute), which is far more
// than their users keep.

// Exp64 is e^x for |x| ≤ 700.
func Exp64(x float64) float64 {
	n := math.RoundToEven(float64(x * (1 / math.Ln2)))
	r := x - float64(n*6.93147180369123816490e-01)
	r = r - float64(n*1.90821492927058770002e-10)
	// Taylor: |r| ≤ 0.35, so the term after r^13 ÷ 13! is below 1e-17.
	p := 1.0
	for k := 13; k >= 1; k-- {
		p = float64(p*r)/float64(k) + 1
	}
	return float64(p * math.Float64frombits(uint64(1023+int64(n))<<52))
}

// Log64 is the natural logarithm of a normal x > 0.
func Log64(x float64) float64 {
	b := math.Float64bits(x)
	k := int64(b>>52) - 1023
	f := math.Float64frombits(b&(1<<52-1) | 1023<<52) // 1 ≤ f < 2
	if f > math.Sqrt2 {
		f = float64(f / 2)
		k++
	}
	// ln f = 2 atanh s; |s| ≤ 0.172, so the term after s^21 ÷ 21 is below 1e-18.
	s := (f - 1) / (f + 1)
	z := float64(s * s)
	p := 0.0
	for i := 21; i >= 1; i -= 2 {
		p = float64(p*z) + 1/float64(i)
	}
	return float64(float64(k)*math.Ln2) + float64(2*float64(s*p))
}

// SinCos is sine and cosine of x, 0 ≤ x ≤ 2^21.
//
// x = n π/2 + r; π/2 is split in three parts of which the first two have 33
// bits, so that their products with n are exact.
func SinCos(x float64) (sin, cos float64) {
	n := math.RoundToEven(float64(x * (2 / math.Pi)))
	r := x - float64(n*1.57079632673412561417e+00)
	r = r - float64(n*6.07710050630396597660e-11)
	r = r - float64(n*2.02226624879595063154e-21)
	// Taylor: |r| ≤ π/4, so the terms after r^19 ÷ 19! are below 1e-18.
	z := float64(r * r)
	s, c := 1.0, 1.0
	for k := 18; k >= 2; k -= 2 {
		s = 1 - float64(s*z)/float64(k*(k+1))
		c = 1 - float64(c*z)/float64(k*(k-1))
	}
	s = float64(s * r)
	switch int64(n) & 3 {
	case 1:
		return c, -s
	case 2:
		return -s, -c
	case 3:
		return -c, s
	}
	return s, c
}
