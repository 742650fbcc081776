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
	d := len(q)
	i := 0
	for ; i+2 <= len(p); i += 2 {
		a, b := Dot2(q, k[i*d:][:d], k[(i+1)*d:][:d])
		p[i], p[i+1] = float32(a*scale), float32(b*scale)
	}
	if i < len(p) {
		p[i] = float32(Dot(q, k[i*d:][:d]) * scale)
	}
}

// mix is out[d] = Σ p[i] v[i][d], in index order from +0, eight d at a time:
// eight chains of additions in registers. len(out) is a multiple of 16.
func mix(out, p, v []float32) {
	dim := len(out)
	for d := 0; d+8 <= dim; d += 8 {
		var o0, o1, o2, o3, o4, o5, o6, o7 float32
		at := d
		for _, w := range p {
			r := (*[8]float32)(v[at:])
			o0 += float32(w * r[0])
			o1 += float32(w * r[1])
			o2 += float32(w * r[2])
			o3 += float32(w * r[3])
			o4 += float32(w * r[4])
			o5 += float32(w * r[5])
			o6 += float32(w * r[6])
			o7 += float32(w * r[7])
			at += dim
		}
		*(*[8]float32)(out[d:]) = [8]float32{o0, o1, o2, o3, o4, o5, o6, o7}
	}
}
