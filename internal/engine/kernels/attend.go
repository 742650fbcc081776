package kernels

// Span is the number of positions that attention takes at a time: softmax
// blocks begin at its multiples, whatever the page size, chunk or batch.
const Span = 64

// State is attention of one query of one head over the blocks so far: the
// largest score, and the sum of exp(score - Max).
type State struct{ Max, Sum float32 }

// Run is N neighbouring positions of one head as they lie in a page: rows of K
// and of V, which may go on behind them.
type Run struct {
	N    int
	K, V []byte
}

// Attention is the memory of one goroutine that attends.
type Attention struct {
	k, v    []float32 // a block, widened
	scratch []float32
}

// NewAttention is for heads of dim values.
func NewAttention(dim int) *Attention {
	return &Attention{make([]float32, Span*dim), make([]float32, Span*dim), make([]float32, together*(2+Span+2*dim))}
}

// together is how many queries a routine takes at a time.
const together = 4

// Block takes positions of a block, runs of rows of type t, into the state and
// result of each of some queries: q and out are rows too. Query i sees the first
// n[i] of Span positions; n never falls from one query to the next. The first
// block overwrites; each later one is merged in, in index order:
//
//	out = Σ p v in position order, p = exp(score - max), of this block alone;
//	then out' = out' × exp(Max' - M) + out × exp(max - M), M the larger maximum.
//
// A block's part does not depend on the ones before it, so a split at any
// block boundary gives the same bits. Queries that share a call share what is
// read of K and V.
func (a *Attention) Block(t Type, s []State, out, q []float32, runs []Run, n []int, scale float32, first bool) {
	dim := len(q) / len(s)
	b := block{a, dim, nil}
	if straight(t, dim, runs, n) {
		b.halves = runs
	} else {
		a.widen(t, runs, dim)
	}
	for len(s) > 0 {
		few := 1
		if now.float != nil {
			few = min(together, len(s))
		}
		b.attend(s[:few], out[:few*dim], q[:few*dim], n[:few], scale, first)
		s, out, q, n = s[few:], out[few*dim:], q[few*dim:], n[few:]
	}
}

// straight says whether a block is computed with as it is stored: halves, for so
// few queries that widening them each time costs less than to write them down,
// which all see the same positions.
func straight(t Type, dim int, runs []Run, n []int) bool {
	if t != F16 || raced || now.float == nil || now.float.dots4x4h == nil || len(n) > together || n[0] != n[len(n)-1] {
		return false
	}
	for i, r := range runs {
		rows := sixteens(r.N)
		if len(r.K) < rows*t.RowBytes(dim) || rows != r.N && i < len(runs)-1 {
			return false
		}
	}
	return true
}

// sixteens rounds up: scores are made for so many positions at a time.
func sixteens(n int) int { return (n + lanes - 1) / lanes * lanes }

func (a *Attention) widen(t Type, runs []Run, dim int) {
	k, v := a.k, a.v
	for _, r := range runs {
		t.Widen(k[:r.N*dim], r.K)
		t.Widen(v[:r.N*dim], r.V)
		k, v = k[r.N*dim:], v[r.N*dim:]
	}
}

// block is one block of K and V of heads of dim values: widened, or as halves.
type block struct {
	*Attention
	dim    int
	halves []Run
}

// attend is Block for up to four queries. Two or three are made four: what
// comes of the others is left in scratch.
func (b *block) attend(s []State, out, q []float32, n []int, scale float32, first bool) {
	dim, few := b.dim, 1
	tops, sums, scratch := b.scratch[:together], b.scratch[together:2*together], b.scratch[2*together:]
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
	b.scores(p, q, n[len(n)-1])
	softmax(p, n, scale, tops, sums)
	b.mix(part, p, n)
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
func (b *block) scores(p, q []float32, n int) {
	f, dim := now.float, b.dim
	switch {
	case f == nil:
		for i := range n {
			p[i] = Dot(q, b.k[i*dim:][:dim])
		}
	case b.halves == nil:
		f.dots(p, Span, q, b.k[:sixteens(n)*dim], dim)
	default:
		at := 0
		for _, r := range b.halves {
			f.dotsHalves(p[at:], Span, q, r.K[:sixteens(r.N)*F16.RowBytes(dim)], dim)
			at += r.N
		}
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
func (b *block) mix(out, p []float32, n []int) {
	f, all, dim := now.float, n[0], b.dim
	switch {
	case f == nil:
		mixOne(out, p[:all], b.v)
		return
	case b.halves != nil:
		clear(out)
		at := 0
		for _, r := range b.halves {
			f.mixHalves(out, p[at:], r.V, dim, r.N)
			at += r.N
		}
		return
	}
	four, one := f.mix4x64, f.mix4x16
	if len(p) == Span {
		four, one = f.mix1x64, f.mix1x16
	}
	d := 0
	for ; d+64 <= dim; d += 64 {
		four(&out[d], 4*dim, &p[0], 4*Span, &b.v[d], 4*dim, all)
	}
	for ; d < dim; d += 16 {
		one(&out[d], 4*dim, &p[0], 4*Span, &b.v[d], 4*dim, all)
	}
	for i, n := range n {
		for j := all; j < n; j++ {
			merge(out[i*dim:(i+1)*dim], b.v[j*dim:(j+1)*dim], 1, p[i*Span+j])
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
