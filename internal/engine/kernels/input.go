package kernels

import (
	"math"
)

// Input is up to a fixed number of activation vectors, all of one length, in
// the forms that products take.
//
// An int8 form has a scale per block of values: scale = amax ÷ 127, q = x × (1
// ÷ scale) rounded half to even. What is stored is not q but words that hold
// several q, see quantised.go.
type Input struct {
	N, Cols int  // vectors in use, and their length
	Float   bool // products take the float form whatever the weights

	f       []float32 // whole groups of four vectors
	forms   [len(layouts)]form
	path    *path
	records []record // for packed weights
	supers  []superRecord
}

// Block is how many activations share a scale where weights come in blocks of
// so many.
const Block = 32

// formKind says how many vectors lie in one word of the wide layout, and with
// that, how large a block's sum may be.
type formKind uint8

const (
	floats  formKind = iota // no words: the float form
	quads                   // four sums of 16 bits
	triples                 // three of 21 bits
	pairs                   // two of 32 bits
)

var layouts = [...]struct {
	vectors, bits int
	narrow        int // values in one word of the narrow layout
	block         int // values that share a scale
}{
	quads:   {4, 16, 4, Block},
	triples: {3, 21, 2, Block},
	pairs:   {2, 32, 2, Super},
}

// form is one int8 form of all vectors; without words nobody wants it.
type form struct {
	words  []int64
	blocks []quants
	sums   [][2][Super / 16]int32 // pairs: of q, over each 16
}

// quants is what a product needs to know of one block of the vectors that lie
// in one word. Lanes without a vector are zero.
type quants struct {
	scale, sum [4]float32 // sum is scale times the sum of q
	q          [4]int32   // the sum of q
}

// vector is one vector in a form's narrow layout.
type vector struct {
	words  []int64
	blocks []quants
	sums   [][2][Super / 16]int32
	lane   int
}

// narrow is the number of vectors up to which they are multiplied one by one.
const narrow = 3

// Group is the number of vectors that Prepare can be divided by: a multiple of
// what lies in one word.
const Group = 12

// NewInput has room for n vectors of cols values. The types are those of the
// matrices that it will meet.
func NewInput(n, cols int, float bool, types ...Type) *Input {
	n = (n + Group - 1) / Group * Group
	x := &Input{Cols: cols, Float: float, f: make([]float32, n*cols), path: now}
	for _, t := range types {
		kind := formats[t].form
		f, l := &x.forms[kind], layouts[kind]
		switch {
		case float:
			continue
		case x.path.packs(t):
			if kind == pairs && x.supers == nil {
				x.supers = make([]superRecord, n/4*cols/Super)
			} else if kind != pairs && x.records == nil {
				x.records = make([]record, n/4*cols/Block)
			}
			continue
		case kind == floats || f.words != nil:
			continue
		}
		words := n / l.vectors
		f.words, f.blocks = make([]int64, words*cols), make([]quants, words*cols/l.block)
		if kind == pairs {
			f.sums = make([][2][Super / 16]int32, len(f.blocks))
		}
	}
	return x
}

// Row is vector t in its float form, to be read and written.
func (x *Input) Row(t int) []float32 { return x.f[t*x.Cols : (t+1)*x.Cols : (t+1)*x.Cols] }

// Prepare makes the int8 forms of vectors [t0, t1) from the float form. t0 is a
// multiple of Group, and so is t1 unless it is N.
func (x *Input) Prepare(t0, t1 int) {
	if x.records != nil {
		x.record(t0, t1)
	}
	if x.supers != nil {
		x.recordSuper(t0, t1)
	}
	end := t1
	if t1 == x.N && x.N > narrow { // empty lanes of the last words
		end = (t1 + Group - 1) / Group * Group
	}
	for t := t0; t < end; t++ {
		if x.forms[quads].words != nil || x.forms[triples].words != nil {
			x.blocks32(t, t < t1)
		}
		if x.forms[pairs].words != nil {
			x.blocks256(t, t < t1)
		}
	}
}

// blocks32 makes the forms with blocks of 32 of vector t, or of a zero one.
func (x *Input) blocks32(t int, there bool) {
	var row []float32
	if there {
		row = x.Row(t)
	}
	for b := range x.Cols / Block {
		var q [Block]int64
		var scale float32
		var sum int32
		if there {
			scale, sum = quantise(q[:], row[b*Block:][:Block])
		}
		for kind := quads; kind <= triples; kind++ {
			if x.forms[kind].words != nil {
				x.lay(kind, t, b, &q, scale, sum)
			}
		}
	}
}

// blocks256 makes the form with blocks of 256 of vector t, or of a zero one.
func (x *Input) blocks256(t int, there bool) {
	f, g, lane := &x.forms[pairs], t/2, t%2
	for b := range x.Cols / Super {
		var q [Super]int64
		k := g*(x.Cols/Super) + b
		f.blocks[k].scale[lane] = 0
		if there {
			f.blocks[k].scale[lane], _ = quantise(q[:], x.Row(t)[b*Super:][:Super])
		}
		for i, part := range cast[[16]int64](q[:]) {
			sum := int64(0)
			for _, v := range part {
				sum += v
			}
			f.sums[k][lane][i] = int32(sum)
		}
		for i := range cast[[Block]int64](q[:]) {
			at, part := b*Super+i*Block, &cast[[Block]int64](q[:])[i]
			if x.N > narrow {
				spread(f.words[g*x.Cols+at:], part, lane, layouts[pairs].bits)
			} else {
				layTwos(f.words[(t*x.Cols+at)/2:], part)
			}
		}
	}
}

// quantise rounds v to q, q × scale being about v, and sums q. A block with an
// infinity or NaN gets a NaN scale, so that the damage reaches the logits and is
// seen there.
//
//go:norace
func quantise(q []int64, v []float32) (scale float32, sum int32) {
	var top uint32 // as bits: for non-negative floats their order is that of the values
	for _, f := range v {
		top = max(top, math.Float32bits(f)&0x7fffffff)
	}
	scale = float32(math.Float32frombits(top) / 127)
	if top >= 0x7f800000 {
		clear(q)
		return float32(math.NaN()), 0
	}
	if scale < 0x1p-126 { // 1 ÷ scale may be infinite: such a block is zero
		clear(q)
		return 0, 0
	}
	const round = 3 << 22 // adding it leaves an integer in the last bits, ties to even
	inv := 1 / scale
	q = q[:len(v)]
	for i, f := range v {
		n := int32(math.Float32bits(float32(f*inv)+round) - 0x4b400000)
		q[i] = int64(n)
		sum += n
	}
	return scale, sum
}

// lay puts block b of vector t into the words of a form with blocks of 32.
func (x *Input) lay(kind formKind, t, b int, q *[Block]int64, scale float32, sum int32) {
	f, l := &x.forms[kind], &layouts[kind]
	g, lane := t/l.vectors, t%l.vectors
	k := &f.blocks[g*(x.Cols/Block)+b]
	k.scale[lane], k.q[lane], k.sum[lane] = scale, sum, float32(float32(sum)*scale)
	switch {
	case x.N > narrow:
		spread(f.words[g*x.Cols+b*Block:], q, lane, l.bits)
	case kind == quads:
		layFours(f.words[(t*x.Cols+b*Block)/4:], q)
	default:
		layTwos(f.words[(t*x.Cols+b*Block)/2:], q)
	}
}

// vector is vector t of a form in the narrow layout.
func (x *Input) vector(kind formKind, t int) vector {
	f, l := &x.forms[kind], &layouts[kind]
	n, blocks := x.Cols/l.narrow, x.Cols/l.block
	v := vector{words: f.words[t*n:][:n], blocks: f.blocks[t/l.vectors*blocks:][:blocks], lane: t % l.vectors}
	if kind == pairs {
		v.sums = f.sums[t/l.vectors*blocks:][:blocks]
	}
	return v
}

// spread puts q into lane l of words with lanes of so many bits. Lane 0 comes
// first and clears what was there.
//
//go:norace
func spread(words []int64, q *[Block]int64, lane, bits int) {
	w := (*[Block]int64)(words)
	if lane == 0 {
		*w = *q
		return
	}
	s := uint(lane*bits) & 63
	for i := range w {
		w[i] += q[i] << s
	}
}
