package kernels

// Span is the number of positions that attention takes at a time: softmax
// blocks begin at its multiples, whatever the page size, chunk or batch.
const Span = 64

// State is attention of one query of one head over the blocks so far: the
// largest score, and the sum of exp(score - Max).
type State struct{ Max, Sum float32 }

// AttendScratch is how many values Attend needs for queries of dim values.
func AttendScratch(dim int) int { return together * (2 + Span + 2*dim) }

// together is how many queries a routine takes at a time.
const together = 4

// Attend takes positions of a block, rows of k and v, into the state and result
// of each of some queries: q and out are rows too. Query i sees the first n[i]
// of Span positions; n never falls from one query to the next. The first block
// overwrites; each later one is merged in, in index order:
//
//	out = Σ p v in position order, p = exp(score - max), of this block alone;
//	then out' = out' × exp(Max' - M) + out × exp(max - M), M the larger maximum.
//
// A block's part does not depend on the ones before it, so a split at any
// block boundary gives the same bits. Queries that share a call share what is
// read of k and v.
func Attend(s []State, out, q, k, v []float32, n []int, scale float32, first bool, scratch []float32) {
	dim := len(q) / len(s)
	for len(s) > 0 {
		few := 1
		if now.float != nil {
			few = min(together, len(s))
		}
		attend(s[:few], out[:few*dim], q[:few*dim], k[:Span*dim], v[:Span*dim], n[:few], scale, first, scratch)
		s, out, q, n = s[few:], out[few*dim:], q[few*dim:], n[few:]
	}
}

// attend is Attend for up to four queries. Two or three are made four: what
// comes of the others is left in scratch.
func attend(s []State, out, q, k, v []float32, n []int, scale float32, first bool, scratch []float32) {
	dim, few := len(q)/len(s), 1
	tops, sums, scratch := scratch[:together], scratch[together:2*together], scratch[2*together:]
	part := scratch[together*Span:][:len(q)]
	if len(s) > 1 {
		few = together
		part = scratch[together*Span:][:few*dim]
	}
	if few > len(s) {
		q = scratch[together*(Span+dim):][:copy(scratch[together*(Span+dim):], q)]
		q = q[:few*dim]
	} else if first {
		part = out
	}
	p := scratch[:few*Span]
	scores(p, q, k, n[len(n)-1])
	softmax(p, n, scale, tops, sums)
	mix(part, p, v, dim, n)
	for i := range s {
		to, from, block := out[i*dim:(i+1)*dim], part[i*dim:(i+1)*dim], State{tops[i], sums[i]}
		if !first {
			s[i].Merge(to, block, from)
			continue
		}
		s[i] = block
		if few > len(n) {
			copy(to, from)
		}
	}
}

// Merge takes in the next block's part, whose state is t.
func (s *State) Merge(out []float32, t State, part []float32) {
	m := max(s.Max, t.Max)
	a, b := Exp(s.Max-m), Exp(t.Max-m)
	s.Max, s.Sum = m, float32(s.Sum*a)+float32(t.Sum*b)
	merge(out, part, a, b)
}

// Finish divides by the sum of weights.
func (s *State) Finish(out []float32) {
	inv := 1 / s.Sum
	for i := range out {
		out[i] = float32(out[i] * inv)
	}
}

// scores is p[i*Span+j] = q[i] k[j] for j < n, and whatever beyond.
func scores(p, q, k []float32, n int) {
	dim := len(q) * Span / len(p)
	if f := now.float; f != nil {
		f.dots(p, Span, q, k[:(n+15)/16*16*dim], dim)
		return
	}
	for i := range n {
		p[i] = Dot(q, k[i*dim:][:dim])
	}
}

// softmax is p = exp(p × scale - top) for each query, top the largest p × scale,
// and the sum of that, of its first n positions. It may write all of p.
func softmax(p []float32, n []int, scale float32, tops, sums []float32) {
	if f := now.float; f != nil {
		p = p[:len(n)*Span]
		f.softmax(&p[0], &n[0], &tops[0], &sums[0], len(n), scale)
		return
	}
	tops[0], sums[0] = softmaxOne(p[:n[0]], scale)
}

func softmaxOne(p []float32, scale float32) (top, l float32) {
	for i := range p {
		p[i] = float32(p[i] * scale)
	}
	top = p[0]
	for _, f := range p {
		if f > top {
			top = f
		}
	}
	for i, f := range p {
		p[i] = Exp(f - top)
	}
	return top, sum(p)
}

// mix is out[i][d] = Σ p[i][j] v[j][d] over j < n[i], in index order from +0.
// Positions that not all queries see come after those that all see: a term at
// a time.
func mix(out, p, v []float32, dim int, n []int) {
	f, all := now.float, n[0]
	if f == nil {
		mixOne(out, p[:all], v)
		return
	}
	four, one := f.mix4x64, f.mix4x16
	if len(p) == Span {
		four, one = f.mix1x64, f.mix1x16
	}
	d := 0
	for ; d+64 <= dim; d += 64 {
		four(&out[d], 4*dim, &p[0], 4*Span, &v[d], 4*dim, all)
	}
	for ; d < dim; d += 16 {
		one(&out[d], 4*dim, &p[0], 4*Span, &v[d], 4*dim, all)
	}
	for i, n := range n {
		for j := all; j < n; j++ {
			merge(out[i*dim:(i+1)*dim], v[j*dim:(j+1)*dim], 1, p[i*Span+j])
		}
	}
}

// mixOne takes four positions at a time: sums of different d do not wait for
// each other, and four terms pay for one load and store of the sum.
//
//go:norace
func mixOne(out, p, v []float32) {
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

// merge is out = out a + part b.
func merge(out, part []float32, a, b float32) {
	if f := now.float; f != nil {
		part = part[:len(out)]
		f.merge(&out[0], &part[0], len(out)/lanes, a, b)
		return
	}
	for i, f := range part {
		out[i] = float32(out[i]*a) + float32(f*b)
	}
}
