package kernels

import "math"

// RMSNorm is dst = x ÷ rms(x) × w, with rms(x)² = mean of squares + eps. The
// length is a multiple of 16.
func RMSNorm(dst, x, w []float32, eps float32) {
	n := len(x)
	dst, w = dst[:n], w[:n]
	mean := Dot(x, x) / float32(n)
	inv := 1 / float32(math.Sqrt(float64(mean+eps)))
	if f := now.float; f != nil {
		f.scale(&dst[0], &x[0], &w[0], n/lanes, inv)
		return
	}
	for i, v := range x {
		dst[i] = float32(float32(v*inv) * w[i])
	}
}

// Add is dst += x.
func Add(dst, x []float32) {
	dst = dst[:len(x)]
	if f := now.float; f != nil && len(x) >= lanes {
		f.add(&dst[0], &x[0], len(x)/lanes)
		n := len(x) / lanes * lanes
		dst, x = dst[n:], x[n:]
	}
	for i, v := range x {
		dst[i] += v
	}
}

// SwiGLU is dst = gate ÷ (1 + exp(-gate)) × up.
func SwiGLU(dst, gate, up []float32) {
	dst, up = dst[:len(gate)], up[:len(gate)]
	if f := now.float; f != nil && len(gate) >= lanes {
		f.swiglu(&dst[0], &gate[0], &up[0], len(gate)/lanes)
		n := len(gate) / lanes * lanes
		dst, gate, up = dst[n:], gate[n:], up[n:]
	}
	for i, g := range gate {
		dst[i] = float32(g / (1 + Exp(-g)) * up[i])
	}
}

// RopeTable is cosines and sines for positions [0, n): entry p*pairs+i is that
// of p × freqs[i], computed in float64, times a magnitude.
type RopeTable struct {
	pairs    int
	halves   bool
	cos, sin []float32
}

// NewRopeTable makes the table. With halves, pair i is values i and i+len(freqs)
// of a head (ggml's NEOX layout), else neighbours 2i and 2i+1 (NORM).
// n × freqs[i] is at most 2^21.
func NewRopeTable(n int, freqs []float64, magnitude float64, halves bool) *RopeTable {
	t := &RopeTable{len(freqs), halves, make([]float32, n*len(freqs)), make([]float32, n*len(freqs))}
	for i, freq := range freqs {
		for p := range n {
			s, c := SinCos(float64(float64(p) * freq))
			t.cos[p*t.pairs+i], t.sin[p*t.pairs+i] = float32(c*magnitude), float32(s*magnitude)
		}
	}
	return t
}

// Apply rotates the first two values for each pair of v for position p.
func (t *RopeTable) Apply(v []float32, p int) {
	cos, sin := t.cos[p*t.pairs:][:t.pairs], t.sin[p*t.pairs:][:t.pairs]
	if t.halves {
		x, y := v[:t.pairs], v[t.pairs:][:t.pairs]
		if f := now.float; f != nil && t.pairs%lanes == 0 {
			f.halves(&x[0], &y[0], &cos[0], &sin[0], t.pairs/lanes)
			return
		}
		for i, c := range cos {
			s, a, b := sin[i], x[i], y[i]
			x[i] = float32(a*c) - float32(b*s)
			y[i] = float32(a*s) + float32(b*c)
		}
		return
	}
	v = v[:2*t.pairs]
	if f := now.float; f != nil && f.rope != nil && len(v)%lanes == 0 {
		f.rope(&v[0], &cos[0], &sin[0], len(v)/lanes)
		return
	}
	for i, c := range cos {
		s, a, b := sin[i], v[2*i], v[2*i+1]
		v[2*i] = float32(a*c) - float32(b*s)
		v[2*i+1] = float32(a*s) + float32(b*c)
	}
}
