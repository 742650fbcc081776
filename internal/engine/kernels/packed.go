package kernels

import (
	"encoding/binary"
	"math"
	"unsafe"
)

// Products by vector units, where a lane is an output: 16 rows of weights are
// packed for them, and meet 12, 4 or 1 vectors at a time. Blocks of a row are
// added in index order in its lane, so the bits are those of the loops of
// quantised.go.
//
// The physical limit with many vectors is arithmetic: for 16 rows, 32 columns
// and a vector, eight int8 instructions of 64 products each, and five or six
// more for scales and sums. With one vector it is the reading of the weights.

// packed is one block of 16 rows. Word w[g][r] holds weights 4g to 4g+3 of row
// r, unsigned: formats with a minimum as they are, others plus 128.
//
//lint:ignore U1000 its fields are written and read by assembly
type packed struct {
	w    [8][packRows][4]byte
	d, m [packRows]float32
}

const packRows = 16

// record is one block of four vectors: q[g][v] holds values 4g to 4g+3 of
// vector v. bias is -128 times the sum of q, for the 128 in weights without a
// minimum; sum is scale times the sum of q.
type record struct {
	q          [8][4][4]int8
	scale, sum [4]float32
	bias       [4]int32
	_          [16]byte // to whole cache lines
}

// packedSuper is likewise one block of 256, whose parts of 32 or 16 have
// integer scales. n is pairs of minima. Without a minimum weights are 32 too
// large.
//
//lint:ignore U1000 its fields are written and read by assembly
type packedSuper struct {
	w    [64][packRows][4]byte
	s    [16][packRows]int32
	n    [4][packRows][2]int16
	d, m [packRows]float32
}

// superRecord is one block of 256 of four vectors: q as in record, sums of q
// over each 32, in pairs, and -32 times the sum over each 16.
//
//lint:ignore U1000 its fields are written and read by assembly
type superRecord struct {
	q     [64][4][4]int8
	scale [4]float32
	sums  [4][4][2]int16
	bias  [16][4]int32
	_     [48]byte // to whole cache lines
}

// int8Routines are the products of a path.
type int8Routines struct {
	of            map[Type]packRoutines
	quantise      func(dst *byte, src *float32, stride, blocks int) // into records
	quantiseSuper func(dst *byte, src *float32, blocks int)         // into superRecords, one vector
}

// packRoutines are the products of one type. pack packs so many blocks of 16
// rows, which are stride bytes apart; mul multiplies with them; direct, where
// there is one, multiplies without.
type packRoutines struct {
	pack   func(dst, src *byte, stride, blocks int)
	mul    *[len(widths)]mulRoutine
	direct [len(fews)]directRoutine
}

// directRoutine multiplies 16 rows as they lie in the file, wStride bytes
// apart, by the first vectors of a group of four: y[v][0:16], stride bytes
// apart.
type directRoutine func(y *float32, stride int, w *byte, wStride int, x *byte, blocks int)

// fews are the numbers of vectors that a directRoutine exists for, where the
// path has them. With more, it pays to pack.
var fews = [...]int{1, 2, 4}

// mulRoutine multiplies 16 packed rows by some vectors: y[v][0:16], stride
// bytes apart. Groups of four vectors are group bytes apart in x.
type mulRoutine func(y *float32, stride int, w, x *byte, group, blocks int)

// widths are the numbers of vectors that a mulRoutine exists for.
var widths = [...]int{12, 4, 1}

// packs says whether the path packs weights of this type.
func (p *path) packs(t Type) bool {
	return p.int8 != nil && p.int8.of[t].pack != nil
}

// record makes the records of vectors [t0, t1), t0 a multiple of 4. The float
// form has whole groups of four: what is behind the last vector does no harm.
func (x *Input) record(t0, t1 int) {
	blocks := x.Cols / Block
	for t := t0; t < t1; t += 4 {
		rows := x.f[t*x.Cols : (t+4)*x.Cols]
		x.path.int8.quantise(bytesOf(x.records[t/4*blocks:][:blocks]), &rows[0], 4*x.Cols, blocks)
	}
}

// recordSuper likewise makes records of blocks of 256.
func (x *Input) recordSuper(t0, t1 int) {
	blocks := x.Cols / Super
	for t := t0; t < t1; t++ {
		to := bytesOf(x.supers[t/4*blocks:][:blocks])
		x.path.int8.quantiseSuper(ahead(to, t%4*4), &x.Row(t)[0], blocks)
	}
}

// recordsOf is where the records of vector t for a type begin, and the bytes
// from its group of four to the next.
func (x *Input) recordsOf(t Type, vector, groups int) (first *byte, group int) {
	if formats[t].block == Super {
		blocks := x.Cols / Super
		first, group = bytesOf(x.supers[vector/4*blocks:][:groups*blocks]), blocks*size[superRecord]()
	} else {
		blocks := x.Cols / Block
		first, group = bytesOf(x.records[vector/4*blocks:][:groups*blocks]), blocks*size[record]()
	}
	return ahead(first, vector%4*4), group
}

// mulPacked is Mul with packed weights.
func (m *Matrix) mulPacked(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	routines, rowBytes, blocks := x.path.int8.of[m.Type], m.Type.RowBytes(m.Cols), m.Cols/formats[m.Type].block
	if m.mulDirect(y, stride, x, t0, t1, r0, r1, s) {
		return
	}
	w := s.packedFor(m)
	for ; r0 < r1; r0 += packRows {
		rows := min(packRows, r1-r0)
		routines.pack(w, m.sixteen(r0, rows, s), rowBytes, blocks)
		for t := t0; t < t1; {
			i := 0
			for widths[i] > t1-t || t%4+widths[i] > max(widths[i], 4) {
				i++
			}
			n := widths[i]
			in, group := x.recordsOf(m.Type, t, (n+3)/4)
			if rows == packRows {
				out := y[t*stride+r0 : (t+n-1)*stride+r0+packRows]
				routines.mul[i](&out[0], 4*stride, w, in, group, blocks)
			} else {
				routines.mul[i](&s.out[0], 4*packRows, w, in, group, blocks)
				for c := range n {
					copy(y[(t+c)*stride+r0:][:rows], s.out[c*packRows:])
				}
			}
			t += n
		}
	}
}

// packedFor is room for 16 packed rows.
func (s *Scratch) packedFor(m *Matrix) *byte {
	if formats[m.Type].block == Super {
		return bytesOf(s.supers[:m.Cols/Super])
	}
	return bytesOf(s.packed[:m.Cols/Block])
}

// mulDirect is Mul with few vectors, which begin a group, if there is a routine
// for so few.
func (m *Matrix) mulDirect(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) bool {
	n, i, rowBytes, blocks := t1-t0, 0, m.Type.RowBytes(m.Cols), m.Cols/formats[m.Type].block
	for i < len(fews) && fews[i] < n {
		i++
	}
	if i == len(fews) || x.path.int8.of[m.Type].direct[i] == nil {
		return false
	}
	mul := x.path.int8.of[m.Type].direct[i]
	in, _ := x.recordsOf(m.Type, t0, 1)
	for ; r0 < r1; r0 += packRows {
		rows := min(packRows, r1-r0)
		w := m.sixteen(r0, rows, s)
		if rows == packRows && fews[i] == n {
			out := y[t0*stride+r0 : (t1-1)*stride+r0+packRows]
			mul(&out[0], 4*stride, w, rowBytes, in, blocks)
			continue
		}
		mul(&s.out[0], 4*packRows, w, rowBytes, in, blocks)
		for c := range n {
			copy(y[(t0+c)*stride+r0:][:rows], s.out[c*packRows:])
		}
	}
	return true
}

// sixteen is where 16 rows from r0 on begin. Of a matrix's last ones, when they
// are fewer, it is a copy, whose other rows give outputs that nobody looks at.
func (m *Matrix) sixteen(r0, rows int, s *Scratch) *byte {
	n := m.Type.RowBytes(m.Cols)
	src := m.data[r0*n : (r0+rows)*n]
	if rows < packRows {
		copy(s.tail, src)
		src = s.tail[:packRows*n]
	}
	return &src[0]
}

// ahead is a pointer so many bytes ahead.
func ahead[T any](p *T, bytes int) *T { return (*T)(unsafe.Add(unsafe.Pointer(p), bytes)) }

// bytesOf is where the bytes of a slice begin.
func bytesOf[T any](s []T) *byte { return (*byte)(unsafe.Pointer(&s[0])) }

// quantiseRecords is the quantise of paths without a routine for it.
func quantiseRecords(dst *byte, src *float32, stride, blocks int) {
	records := unsafe.Slice((*record)(unsafe.Pointer(dst)), blocks)
	var q [Block]int64
	for v := range 4 {
		row := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(src), v*stride)), blocks*Block)
		for b := range records {
			r := &records[b]
			scale, sum := quantise(q[:], row[b*Block:][:Block])
			r.scale[v], r.sum[v], r.bias[v] = scale, float32(float32(sum)*scale), -128*sum
			for i, f := range q {
				r.q[i/4][v][i%4] = int8(f)
			}
		}
	}
}

// quantiseSuperRecords likewise makes superRecords of one vector. dst is where the
// vector's first values lie: all others of a record are as far from its begin.
func quantiseSuperRecords(dst *byte, src *float32, blocks int) {
	var q [Super]int64
	var r superRecord
	for b := range blocks {
		to := unsafe.Slice(ahead(dst, b*size[superRecord]()), size[superRecord]()-12)
		put := func(at uintptr, v uint32) { binary.LittleEndian.PutUint32(to[at:], v) }
		scale, _ := quantise(q[:], unsafe.Slice(ahead(src, 4*b*Super), Super))
		put(unsafe.Offsetof(r.scale), math.Float32bits(scale))
		for g, v := range cast[[4]int64](q[:]) {
			put(unsafe.Offsetof(r.q)+uintptr(16*g), uint32(uint8(v[0]))|uint32(uint8(v[1]))<<8|uint32(uint8(v[2]))<<16|uint32(uint8(v[3]))<<24)
		}
		var pairs [8]int64
		for i, v := range cast[[16]int64](q[:]) {
			sum := int64(0)
			for _, f := range v {
				sum += f
			}
			pairs[i/2] += sum
			put(unsafe.Offsetof(r.bias)+uintptr(16*i), uint32(int32(-32*sum)))
		}
		for i, p := range cast[[2]int64](pairs[:]) {
			put(unsafe.Offsetof(r.sums)+uintptr(16*i), uint32(uint16(p[0]))|uint32(uint16(p[1]))<<16)
		}
	}
}
