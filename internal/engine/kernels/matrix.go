package kernels

import "fmt"

// Type is the storage form of weights, with ggml's numbers. All values are
// little-endian.
type Type uint8

// The types with products. formats has their sizes and functions; blocks32.go
// and blocks256.go have the layouts.
const (
	F32  Type = 0
	F16  Type = 1 // IEEE half
	Q4_0 Type = 2
	Q4_1 Type = 3
	Q5_0 Type = 6
	Q5_1 Type = 7
	Q8_0 Type = 8
	Q4_K Type = 12
	Q5_K Type = 13
	Q6_K Type = 14
	BF16 Type = 30 // the upper half of a float32
)

// format is what this package knows of a type. Another type is another entry
// here, and its functions.
type format struct {
	name         string
	block, bytes int // weights in a block and its size; a row is whole blocks
	widen        func(dst []float32, row []byte)
	put          func(dst []byte, src []float32) // for rows of K and V; nil where none are kept so

	// Products of quantised weights; float ones are widened.
	form   formKind                            // int8 form of the inputs
	dot    func(row []byte, x *vector) float32 // one row, one input in the narrow layout
	unpack func(s *Scratch, row []byte, j int) // makes a row row j of the tiles, for the wide layout
	lack   int32                               // what unpack takes off every weight
}

var formats = [...]format{
	F32:  {name: "F32", block: lanes, bytes: 4 * lanes, widen: widenF32, put: putF32},
	F16:  {name: "F16", block: lanes, bytes: 2 * lanes, widen: WidenF16, put: putF16},
	BF16: {name: "BF16", block: lanes, bytes: 2 * lanes, widen: widenBF16},
	Q4_0: {"Q4_0", Block, size[blockQ4_0](), widenQ4_0, nil, quads, dotQ4_0, unpackQ4_0, 0},
	Q4_1: {"Q4_1", Block, size[blockQ4_1](), widenQ4_1, nil, quads, dotQ4_1, unpackQ4_1, 8},
	Q5_0: {"Q5_0", Block, size[blockQ5_0](), widenQ5_0, nil, triples, dotQ5_0, unpackQ5_0, 0},
	Q5_1: {"Q5_1", Block, size[blockQ5_1](), widenQ5_1, nil, triples, dotQ5_1, unpackQ5_1, 0},
	Q8_0: {"Q8_0", Block, size[blockQ8_0](), widenQ8_0, putQ8_0, triples, dotQ8_0, unpackQ8_0, 0},
	Q4_K: {"Q4_K", Super, size[blockQ4_K](), widenQ4_K, nil, pairs, dotQ4_K, unpackQ4_K, 0},
	Q5_K: {"Q5_K", Super, size[blockQ5_K](), widenQ5_K, nil, pairs, dotQ5_K, unpackQ5_K, 0},
	Q6_K: {"Q6_K", Super, size[blockQ6_K](), widenQ6_K, nil, pairs, dotQ6_K, unpackQ6_K, 0},
}

// known is the type's entry, or nil.
func (t Type) known() *format {
	if int(t) < len(formats) && formats[t].block > 0 {
		return &formats[t]
	}
	return nil
}

// String is ggml's name of the type.
func (t Type) String() string {
	if f := t.known(); f != nil {
		return f.name
	}
	return fmt.Sprintf("type %d", uint8(t))
}

// minimum says whether a product has a second term, of the blocks' minima.
func (t Type) minimum() bool { return t == Q4_1 || t == Q5_1 || t == Q4_K || t == Q5_K }

// RowBytes is the size of one row of cols weights.
func (t Type) RowBytes(cols int) int { return cols / formats[t].block * formats[t].bytes }

// Widen reads len(dst) values from a row: exactly for float types, else by the
// rounded operations that docs/numerics.md states for each type.
func (t Type) Widen(dst []float32, row []byte) { formats[t].widen(dst, row) }

// Put rounds src to a row of F32, F16 or Q8_0, the types that K and V are kept in.
func (t Type) Put(row []byte, src []float32) { formats[t].put(row, src) }

// Matrix is Rows rows of Cols weights in their storage form: y = W x takes Cols
// values and gives Rows. It looks into the bytes of the model file.
type Matrix struct {
	Type       Type
	Rows, Cols int
	data       []byte
}

// NewMatrix looks at data as a matrix, whose rows are whole blocks of the type.
// Rows of float weights are multiples of 16 long.
func NewMatrix(t Type, rows, cols int, data []byte) (Matrix, error) {
	f := t.known()
	switch {
	case f == nil:
		return Matrix{}, fmt.Errorf("%v cannot be computed with", t)
	case cols < f.block || cols%f.block != 0 || rows < 1:
		return Matrix{}, fmt.Errorf("%d rows of %d weights; rows of %v must be a multiple of %d long", rows, cols, t, f.block)
	}
	if want := t.RowBytes(cols) * rows; len(data) != want {
		return Matrix{}, fmt.Errorf("%d bytes for %d rows of %d weights, want %d", len(data), rows, cols, want)
	}
	return Matrix{t, rows, cols, data}, nil
}

// Bytes is the size of the matrix: what a product with one input has to read.
func (m *Matrix) Bytes() int { return len(m.data) }

func (m *Matrix) row(r int) []byte {
	n := m.Type.RowBytes(m.Cols)
	return m.data[r*n : (r+1)*n]
}

// Row widens row r.
func (m *Matrix) Row(dst []float32, r int) { m.Type.Widen(dst[:m.Cols], m.row(r)) }

// Scratch is the memory of one goroutine that multiplies.
type Scratch struct {
	w    []tile       // four rows of weights, per 32 columns
	d, m [][4]float32 // their scales and minima, per block
	n    [][4]uint64  // Q4_K and Q5_K: bytes that m is multiplied with, see sixes
	acc  [4][4]float32
	x    vector
	f    []float32 // 16 rows of float weights

	packed []packed // 16 rows, per block
	supers []packedSuper
	tail   []byte // the last rows of a matrix, when they are fewer than 16
	out    []float32
}

// NewScratch is enough for matrices of up to cols columns.
func NewScratch(cols int) *Scratch {
	n := (cols + Block - 1) / Block
	return &Scratch{
		w: make([]tile, n), d: make([][4]float32, n), m: make([][4]float32, n), n: make([][4]uint64, cols/Super),
		f:      make([]float32, packRows*cols),
		packed: make([]packed, n), supers: make([]packedSuper, cols/Super), tail: make([]byte, packRows*2*cols), out: make([]float32, packRows*widths[0]),
	}
}

// Mul computes rows [r0, r1) of y = W x for inputs [t0, t1) of x: y[t*stride+r]
// for input t and row r. t0 is a multiple of Group.
//
// Quantised weights meet the int8 form of x, float ones its float form; with
// x.Float all weights are widened and meet the float form.
func (m *Matrix) Mul(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	switch {
	case x.Float || formats[m.Type].form == floats:
		m.mulFloat(y, stride, x, t0, t1, r0, r1, s)
	case x.path.packs(m.Type):
		m.mulPacked(y, stride, x, t0, t1, r0, r1, s)
	case x.N <= narrow:
		m.mulNarrow(y, stride, x, t0, t1, r0, r1, s)
	default:
		m.mulWide(y, stride, x, t0, t1, r0, r1, s)
	}
}

// mulFloat: a row of weights is widened once and meets all inputs.
func (m *Matrix) mulFloat(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	if now.float != nil {
		m.mulFloat16(y, stride, x, t0, t1, r0, r1, s)
		return
	}
	w := s.f[:m.Cols]
	for r := r0; r < r1; r++ {
		m.Row(w, r)
		for t := t0; t < t1; t++ {
			y[t*stride+r] = Dot(w, x.Row(t))
		}
	}
}

// mulFloat16 is mulFloat for 16 rows at a time. Of the last ones, outputs that
// have no row stay in s.out.
func (m *Matrix) mulFloat16(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	w := s.f[:packRows*m.Cols]
	for ; r0 < r1; r0 += packRows {
		rows := min(packRows, r1-r0)
		for r := range rows {
			m.Row(w[r*m.Cols:(r+1)*m.Cols], r0+r)
		}
		if rows == packRows {
			now.float.dots(y[t0*stride+r0:], stride, x.f[t0*x.Cols:t1*x.Cols], w, m.Cols)
			continue
		}
		for t := t0; t < t1; t++ {
			now.float.dots(s.out, packRows, x.Row(t), w, m.Cols)
			copy(y[t*stride+r0:][:rows], s.out)
		}
	}
}
