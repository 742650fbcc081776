package kernels

import (
	"math"
)

// Input is up to a fixed number of activation vectors, all of one length, in
// the forms that products take.
//
// The int8 form has a scale per 32 values: scale = amax ÷ 127, q = x × (1 ÷
// scale) rounded half to even. What is stored is not q but q laid out for the
// products, see quantised.go.
type Input struct {
	N, Cols int  // vectors in use, and their length
	Float   bool // products take the float form whatever the weights

	f     []float32
	forms forms
	four  []int64 // Q4_1: q of four vectors, or (narrow) of four values, a word
	blk4  []block4
	three []int64 // Q8_0: q of three vectors, or (narrow) of two values, a word
	blk3  []block3
}

type forms struct{ q4, q8 bool }

// block4 and block3 are what a product needs of one block of the vectors that
// lie in one word. Lanes without a vector are zero.
type block4 struct {
	scale, sum [4]float32 // sum is scale times the sum of q
	bias       [4]int32   // 8 times the sum of q, less 2^15
}

type block3 struct {
	scale [3]float32
	sum   [3]int32 // of q
}

// narrow is the number of vectors up to which they are multiplied one by one.
const narrow = 3

// Group is the number of vectors that Prepare can be divided by: a multiple of
// what lies in one word.
const Group = 12

// NewInput has room for n vectors of cols values. The types are those of the
// matrices that it will meet.
func NewInput(n, cols int, float bool, types ...Type) *Input {
	x := &Input{Cols: cols, Float: float, f: make([]float32, n*cols)}
	groups := (n + Group - 1) / Group
	for _, t := range types {
		switch {
		case float:
		case t == Q4_1 && !x.forms.q4:
			x.forms.q4 = true
			x.four = make([]int64, groups*Group/4*cols)
			x.blk4 = make([]block4, groups*Group/4*cols/Block)
		case t == Q8_0 && !x.forms.q8:
			x.forms.q8 = true
			x.three = make([]int64, groups*Group/3*cols)
			x.blk3 = make([]block3, groups*Group/3*cols/Block)
		}
	}
	return x
}

// Row is vector t in its float form, to be read and written.
func (x *Input) Row(t int) []float32 { return x.f[t*x.Cols : (t+1)*x.Cols : (t+1)*x.Cols] }

// Prepare makes the int8 form of vectors [t0, t1) from the float form. t0 is a
// multiple of Group, and so is t1 unless it is N.
func (x *Input) Prepare(t0, t1 int) {
	if !x.forms.q4 && !x.forms.q8 {
		return
	}
	for t := t0; t < t1; t++ {
		row := x.Row(t)
		for b := range x.Cols / Block {
			x.block(t, b, (*[Block]float32)(row[b*Block:]))
		}
	}
	if t1 == x.N && x.N > narrow { // empty lanes of the last words
		for t := t1; t%Group != 0; t++ {
			for b := range x.Cols / Block {
				x.lay(t, b, &[Block]int64{}, 0, 0)
			}
		}
	}
}

// block quantises block b of vector t. A block with an infinity or NaN gets a
// NaN scale, so that the damage reaches the logits and is seen there.
func (x *Input) block(t, b int, v *[Block]float32) {
	var top uint32 // as bits: for non-negative floats their order is that of the values
	for _, f := range v {
		top = max(top, math.Float32bits(f)&0x7fffffff)
	}
	var q [Block]int64
	scale := float32(math.Float32frombits(top) / 127)
	if top >= 0x7f800000 {
		x.lay(t, b, &q, float32(math.NaN()), 0)
		return
	}
	if scale < 0x1p-126 { // 1 ÷ scale may be infinite: such a block is zero
		x.lay(t, b, &q, 0, 0)
		return
	}
	const round = 3 << 22 // adding it leaves an integer in the last bits, ties to even
	inv, sum := 1/scale, int32(0)
	for i, f := range v {
		n := int32(math.Float32bits(float32(f*inv)+round) - 0x4b400000)
		q[i] = int64(n)
		sum += n
	}
	x.lay(t, b, &q, scale, sum)
}

func (x *Input) lay(t, b int, q *[Block]int64, scale float32, sum int32) {
	blocks := x.Cols / Block
	if x.forms.q4 {
		g, l := t/4, t%4
		k := &x.blk4[g*blocks+b]
		k.scale[l], k.sum[l], k.bias[l] = scale, float32(float32(sum)*scale), 8*sum-1<<15
		if x.N <= narrow {
			layQ4(x.four[t*x.Cols/4+b*Block/4:], q)
		} else {
			spread(x.four[g*x.Cols+b*Block:], q, l, 16)
		}
	}
	if x.forms.q8 {
		g, l := t/3, t%3
		k := &x.blk3[g*blocks+b]
		k.scale[l], k.sum[l] = scale, sum
		if x.N <= narrow {
			layQ8(x.three[t*x.Cols/2+b*Block/2:], q)
		} else {
			spread(x.three[g*x.Cols+b*Block:], q, l, 21)
		}
	}
}

// spread puts q into lane l of words with lanes of so many bits. Lane 0 comes
// first and clears what was there.
func spread(words []int64, q *[Block]int64, l int, bits uint) {
	w := (*[Block]int64)(words)
	if l == 0 {
		*w = *q
		return
	}
	s := uint(l) * bits & 63
	for i := range w {
		w[i] += q[i] << s
	}
}
