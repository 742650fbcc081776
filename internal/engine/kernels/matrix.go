package kernels

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Type is the storage form of weights, as ggml defines it. All values are
// little-endian; quantised rows are blocks of 32 weights.
type Type uint8

// The types with products.
const (
	F32  Type = iota + 1
	F16       // IEEE half
	Q8_0      // f16 scale d, 32 int8 q: w = d q
	Q4_1      // f16 scale d, f16 minimum m, 16 bytes: low nibbles are q 0-15, high ones 16-31: w = d q + m
)

// Block is how many weights, and activations, share a scale.
const Block = 32

const (
	q8Bytes = 2 + Block
	q4Bytes = 2 + 2 + Block/2
)

// RowBytes is the size of one row of cols weights.
func (t Type) RowBytes(cols int) int {
	switch t {
	case F32:
		return 4 * cols
	case F16:
		return 2 * cols
	case Q8_0:
		return cols / Block * q8Bytes
	case Q4_1:
		return cols / Block * q4Bytes
	}
	panic("kernels: unknown weight type")
}

// Matrix is Rows rows of Cols weights in their storage form: y = W x takes Cols
// values and gives Rows. It looks into the bytes of the model file.
type Matrix struct {
	Type       Type
	Rows, Cols int
	data       []byte
}

// NewMatrix looks at data as a matrix. Cols is a multiple of 32.
func NewMatrix(t Type, rows, cols int, data []byte) (Matrix, error) {
	if cols < Block || cols%Block != 0 || rows < 1 {
		return Matrix{}, fmt.Errorf("a matrix of %d rows of %d weights: rows must be a multiple of %d long", rows, cols, Block)
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

// Row widens row r to float32: exactly for F32 and F16; d q, and d q + m with
// two roundings, for the quantised types.
func (m *Matrix) Row(dst []float32, r int) {
	src := m.row(r)
	dst = dst[:m.Cols]
	switch m.Type {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F16:
		WidenF16(dst, src)
	case Q8_0:
		for b, k := range cast[q8Block](src) {
			d, out := k.d.float(), (*[Block]float32)(dst[b*Block:])
			for i, q := range &k.q {
				out[i] = float32(d * float32(int8(q)))
			}
		}
	case Q4_1:
		for b, k := range cast[q4Block](src) {
			d, lo, out := k.d.float(), k.m.float(), (*[Block]float32)(dst[b*Block:])
			for i, q := range &k.q {
				out[i] = float32(d*float32(q&15)) + lo
				out[i+16] = float32(d*float32(q>>4)) + lo
			}
		}
	}
}

// Scratch is the memory of one goroutine that multiplies.
type Scratch struct {
	w    []tile       // four rows of weights, per block
	d, m [][4]float32 // their scales and minima, per block
	f    []float32    // rowTile rows of float weights
}

// NewScratch is enough for matrices of up to cols columns.
func NewScratch(cols int) *Scratch {
	return &Scratch{
		w: make([]tile, cols/Block), d: make([][4]float32, cols/Block), m: make([][4]float32, cols/Block),
		f: make([]float32, cols),
	}
}

// Mul computes rows [r0, r1) of y = W x for inputs [t0, t1) of x: y[t*stride+r]
// for input t and row r. t0 is a multiple of Group.
//
// Quantised weights meet the int8 form of x, float ones its float form; with
// x.Float all weights are widened and meet the float form.
func (m *Matrix) Mul(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	switch {
	case m.Type == F32 || m.Type == F16 || x.Float:
		m.mulFloat(y, stride, x, t0, t1, r0, r1, s)
	case m.Type == Q8_0 && x.N <= narrow:
		m.mulQ8(y, stride, x, t0, t1, r0, r1)
	case m.Type == Q8_0:
		m.mulQ8Wide(y, stride, x, t0, t1, r0, r1, s)
	case x.N <= narrow:
		m.mulQ4(y, stride, x, t0, t1, r0, r1)
	default:
		m.mulQ4Wide(y, stride, x, t0, t1, r0, r1, s)
	}
}

// mulFloat: a row of weights is widened once and meets all inputs.
func (m *Matrix) mulFloat(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	w := s.f[:m.Cols]
	for r := r0; r < r1; r++ {
		m.Row(w, r)
		for t := t0; t < t1; t++ {
			y[t*stride+r] = Dot(w, x.Row(t))
		}
	}
}
