package kernels

// Span is the number of positions that attention takes at a time: softmax
// blocks begin at its multiples, whatever the page size, chunk or batch.
const Span = 64

// State is attention of one query of one head over the blocks so far: the
// largest score, and the sum of exp(score - Max).
type State struct{ Max, Sum float32 }

// Attend takes one block of n ≤ Span positions into (s, out): k and v are n
// rows of len(q) values, scratch has room for n + len(q). The first block
// overwrites; each later one is merged in, in index order:
//
//	out = Σ p v in position order, p = exp(score - max), of this block alone;
//	then out' = out' × exp(Max' - M) + out × exp(max - M), M the larger maximum.
//
// A block's part does not depend on the ones before it, so a split at any
// block boundary gives the same bits.
func Attend(s *State, out, q, k, v []float32, n int, scale float32, first bool, scratch []float32) {
	dim := len(q)
	p, part := scratch[:n], scratch[n:][:dim]
	if first {
		part = out
	}
	scores(p, q, k, scale)
	top := p[0]
	for _, f := range p {
		if f > top {
			top = f
		}
	}
	for i, f := range p {
		p[i] = Exp(f - top)
	}
	l := sum(p)
	mix(part, p, v)
	if first {
		*s = State{top, l}
		return
	}
	m := max(s.Max, top)
	a, b := Exp(s.Max-m), Exp(top-m)
	s.Max, s.Sum = m, float32(s.Sum*a)+float32(l*b)
	for i, f := range part {
		out[i] = float32(out[i]*a) + float32(f*b)
	}
}

// Finish divides by the sum of weights.
func (s *State) Finish(out []float32) {
	inv := 1 / s.Sum
	for i := range out {
		out[i] = float32(out[i] * inv)
	}
}

func scores(p, q, k []float32, scale float32) {
	for i := range p {
		p[i] = float32(Dot(q, k[i*len(q):][:len(q)]) * scale)
	}
}

// mix is out[d] = Σ p[i] v[i][d], in index order from +0, four positions at a
// time: sums of different d do not wait for each other, and four terms pay for
// one load and store of the sum.
//
//go:norace
func mix(out, p, v []float32) {
	dim := len(out)
	clear(out)
	for ; len(p) >= 4; p, v = p[4:], v[4*dim:] {
		p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
		v0, v1, v2, v3 := v[:dim], v[dim:][:dim], v[2*dim:][:dim], v[3*dim:][:dim]
		for d := range out {
			out[d] = (((out[d] + float32(p0*v0[d])) + float32(p1*v1[d])) + float32(p2*v2[d])) + float32(p3*v3[d])
		}
	}
	for i, w := range p {
		for d, f := range v[i*dim:][:dim] {
			out[d] += float32(w * f)
		}
	}
}
