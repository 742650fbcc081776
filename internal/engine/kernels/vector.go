package kernels

import "math"

// RMSNorm is dst = x ÷ rms(x) × w, with rms(x)² = mean of squares + eps.
func RMSNorm(dst, x, w []float32, eps float32) {
	n := len(x)
	dst, w = dst[:n], w[:n]
	mean := Dot(x, x) / float32(n)
	inv := 1 / float32(math.Sqrt(float64(mean+eps)))
	for i, v := range x {
		dst[i] = float32(float32(v*inv) * w[i])
	}
}

// Add is dst += x.
func Add(dst, x []float32) {
	dst = dst[:len(x)]
	for i, v := range x {
		dst[i] += v
	}
}

// SwiGLU is dst = gate ÷ (1 + exp(-gate)) × up.
func SwiGLU(dst, gate, up []float32) {
	dst, up = dst[:len(gate)], up[:len(gate)]
	for i, g := range gate {
		dst[i] = float32(g / (1 + Exp(-g)) * up[i])
	}
}

// RopeTable is cosines and sines for positions [0, n): entry p*(dim/2)+i is
// that of p × base^(-2i/dim), computed in float64.
type RopeTable struct {
	half     int
	cos, sin []float32
}

// NewRopeTable makes the table; dim is even, base positive.
func NewRopeTable(n, dim int, base float32) *RopeTable {
	t := &RopeTable{dim / 2, make([]float32, n*dim/2), make([]float32, n*dim/2)}
	log := Log64(float64(base))
	for i := range t.half {
		freq := Exp64(float64(-2 * float64(i) / float64(dim) * log))
		for p := range n {
			s, c := SinCos(float64(float64(p) * freq))
			t.cos[p*t.half+i], t.sin[p*t.half+i] = float32(c), float32(s)
		}
	}
	return t
}

// Apply rotates neighbouring pairs of the first dim values of v for position p
// (ggml's NORM layout).
func (t *RopeTable) Apply(v []float32, p int) {
	cos, sin := t.cos[p*t.half:][:t.half], t.sin[p*t.half:][:t.half]
	v = v[:2*t.half]
	for i, c := range cos {
		s, a, b := sin[i], v[2*i], v[2*i+1]
		v[2*i] = float32(a*c) - float32(b*s)
		v[2*i+1] = float32(a*s) + float32(b*c)
	}
}
