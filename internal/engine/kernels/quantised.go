package kernels

import (
	"encoding/binary"
	"unsafe"
)

// Products of quantised weights. Within a block the sum of w q, integers both,
// is exact, however it is computed; so these loops, and vector units, may take
// it in any order. Then, for each output, blocks are added in index order:
//
//	y += float32(isum) × (d × scale)                  types without a minimum
//	y += float32(isum) × (d × scale) + m × sum        blocks of 32 with one
//	y += float32(isum) × (d × scale) - float32(Σ n sum) × (m × scale)    of 256
//
// A general register is used as a small vector: a 64-bit word holds several
// integers q at fixed distances, and one multiplication multiplies them all.
//
// Wide (more inputs): lane l of a word is a value of input l, all at the same
// index. Word times weight is the product for each input. A block's sum must
// fit its lane, sign included:
//
//	4 bits, as -8 … 7:          8 × 127 × 32 =  32512 < 2^15: four lanes of 16 bits
//	8 bits, as -128 … 127:    128 × 127 × 32 = 520192 < 2^20: three lanes of 21 bits
//	scale × 6 bits: 128 × 32 × 127 × 256 = 133169152 < 2^31: two lanes of 32 bits
//
// Narrow (up to three inputs): lanes of a word are weights as they lie in the
// file, lanes of the other word are the activations of the same indexes in
// reverse, and the top lane of their product is the sum of products, as in the
// multiplication of polynomials. Lower lanes must stay below half of the top
// lane's unit; rounding takes them off.
//
// So one multiplication does 4, 3 or 2 (narrow: 4 or 2) products, where a plain loop
// does one. That is the limit of these loops: one multiplication a cycle.

type half [2]byte

func (h half) float() float32 { return F16ToF32(binary.LittleEndian.Uint16(h[:])) }

func word(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

func size[T any]() int {
	var t T
	return int(unsafe.Sizeof(t))
}

// tile is 32 columns of four rows of weights, widened: the compiler loads and
// sign-extends in two instructions, which costs more than the larger tile.
type tile [4][Block]int64

// dot4 is a word of inputs at each index, times four weights there, summed: the
// innermost loop of all wide products, and nothing else, so that everything in
// it has a register.
//
//go:noinline
//go:norace
func dot4(x *[Block]int64, w *tile) (a0, a1, a2, a3 int64) {
	for k, p := range x {
		a0 += p * w[0][k]
		a1 += p * w[1][k]
		a2 += p * w[2][k]
		a3 += p * w[3][k]
	}
	return a0, a1, a2, a3
}

// mulWide: four rows at a time are unpacked once and meet all inputs.
func (m *Matrix) mulWide(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	f := &formats[m.Type]
	in, l := &x.forms[f.form], &layouts[f.form]
	n := m.Cols / l.block
	for ; r0 < r1; r0 += 4 {
		rows := min(4, r1-r0)
		for j := range rows {
			f.unpack(s, m.row(r0+j), j)
		}
		for t := t0; t < t1; t += l.vectors {
			s.acc = [4][4]float32{}
			g := t / l.vectors
			words, blocks := in.words[g*m.Cols:][:m.Cols], in.blocks[g*n:][:n]
			switch f.form {
			case quads:
				sweepQuads(s, words, blocks, f.lack, m.Type.minimum())
			case triples:
				sweepTriples(s, words, blocks, m.Type.minimum())
			case pairs:
				sweepPairs(s, words, blocks, in.sums[g*n:][:n], m.Type.minimum())
			}
			for i := range min(l.vectors, t1-t) {
				out := y[(t+i)*stride+r0:][:rows]
				for j := range out {
					out[j] = s.acc[j&3][i&3]
				}
			}
		}
	}
}

// sweepQuads multiplies four rows with four inputs. The constant makes every
// lane non-negative, so that none borrows from the next; bias takes it off
// again, and adds what the weights lack times the sum of activations.
//
//go:norace
func sweepQuads(s *Scratch, words []int64, blocks []quants, lack int32, minimum bool) {
	w, d, m := s.w[:len(blocks)], s.d[:len(blocks)], s.m[:len(blocks)]
	x := cast[[Block]int64](words)[:len(blocks)]
	for b := range blocks {
		k, d, m := &blocks[b], &d[b], &m[b]
		a0, a1, a2, a3 := dot4(&x[b], &w[b])
		const half = 1 << 15
		b0, b1, b2, b3 := lack*k.q[0]-half, lack*k.q[1]-half, lack*k.q[2]-half, lack*k.q[3]-half
		for r, a := range [4]int64{a0, a1, a2, a3} {
			u, y, d, m := uint64(a)+(half+half<<16+half<<32+half<<48), &s.acc[r], d[r], m[r]
			p0, p1 := float32(float32(int32(u&0xffff)+b0)*float32(d*k.scale[0])), float32(float32(int32(u>>16&0xffff)+b1)*float32(d*k.scale[1]))
			p2, p3 := float32(float32(int32(u>>32&0xffff)+b2)*float32(d*k.scale[2])), float32(float32(int32(u>>48)+b3)*float32(d*k.scale[3]))
			if minimum {
				p0, p1 = p0+float32(m*k.sum[0]), p1+float32(m*k.sum[1])
				p2, p3 = p2+float32(m*k.sum[2]), p3+float32(m*k.sum[3])
			}
			y[0], y[1], y[2], y[3] = y[0]+p0, y[1]+p1, y[2]+p2, y[3]+p3
		}
	}
}

// sweepTriples multiplies four rows with three inputs.
//
//go:norace
func sweepTriples(s *Scratch, words []int64, blocks []quants, minimum bool) {
	w, d, m := s.w[:len(blocks)], s.d[:len(blocks)], s.m[:len(blocks)]
	x := cast[[Block]int64](words)[:len(blocks)]
	for b := range blocks {
		k, d, m := &blocks[b], &d[b], &m[b]
		a0, a1, a2, a3 := dot4(&x[b], &w[b])
		const half, mask = 1 << 20, 1<<21 - 1
		for r, a := range [4]int64{a0, a1, a2, a3} {
			u, y, d, m := uint64(a)+(half+half<<21+half<<42), &s.acc[r], d[r], m[r]
			p0, p1 := float32(float32(int32(u&mask)-half)*float32(d*k.scale[0])), float32(float32(int32(u>>21&mask)-half)*float32(d*k.scale[1]))
			p2 := float32(float32(int32(u>>42)-half) * float32(d*k.scale[2]))
			if minimum {
				p0, p1, p2 = p0+float32(m*k.sum[0]), p1+float32(m*k.sum[1]), p2+float32(m*k.sum[2])
			}
			y[0], y[1], y[2] = y[0]+p0, y[1]+p1, y[2]+p2
		}
	}
}

// sweepPairs multiplies four rows with two inputs, over blocks of 256.
//
//go:norace
func sweepPairs(s *Scratch, words []int64, blocks []quants, sums [][2][Super / 16]int32, minimum bool) {
	w, x := cast[[8]tile](s.w)[:len(blocks)], cast[[8][Block]int64](words)[:len(blocks)]
	d, m, n, sums := s.d[:len(blocks)], s.m[:len(blocks)], s.n[:len(blocks)], sums[:len(blocks)]
	for b := range blocks {
		k, d, m := &blocks[b], &d[b], &m[b]
		var a [4]int64
		for i := range 8 {
			a0, a1, a2, a3 := dot4(&x[b][i], &w[b][i])
			a[0], a[1], a[2], a[3] = a[0]+a0, a[1]+a1, a[2]+a2, a[3]+a3
		}
		for r, a := range a {
			y, lo := &s.acc[r], int32(a)
			hi := int32((a - int64(lo)) >> 32)
			p0, p1 := float32(float32(lo)*float32(d[r]*k.scale[0])), float32(float32(hi)*float32(d[r]*k.scale[1]))
			if minimum {
				p0 -= float32(float32(least(n[b][r], &sums[b][0])) * float32(m[r]*k.scale[0]))
				p1 -= float32(float32(least(n[b][r], &sums[b][1])) * float32(m[r]*k.scale[1]))
			}
			y[0] += p0
			y[1] += p1
		}
	}
}

// mulNarrow multiplies inputs one by one, straight from the bytes of the file.
func (m *Matrix) mulNarrow(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	f := &formats[m.Type]
	for t := t0; t < t1; t++ {
		s.x = x.vector(f.form, t)
		for r := r0; r < r1; r++ {
			y[t*stride+r] = f.dot(m.row(r), &s.x)
		}
	}
}

// layFours lays out a block for fours. With a word of eight bytes, masking
// gives the low nibbles of bytes 0, 2, 4, 6; a shift by 8 those of bytes 1, 3,
// 5, 7; by 4 and 12 the high nibbles, which are the weights 16 later.
func layFours(words []int64, q *[Block]int64) {
	for i := range 8 {
		k := i&1 + i>>1&1*16 + i>>2*8 // index of the word's first activation
		words[i] = q[k]<<48 + q[k+2]<<32 + q[k+4]<<16 + q[k+6]
	}
}

// fours is the sum of products of the 16 nibbles of v: below the top lane there
// are at most 15 × 127 × 3 × 4 = 22860 units of 2^32, less than half of 2^48,
// and in it at most 15 × 127 × 16 = 30480.
//
//go:norace
func fours(v uint64, x []int64) int64 {
	const mask, half = 0x000f_000f_000f_000f, 1 << 47
	_ = x[3]
	return (int64(v&mask)*x[0] + int64(v>>8&mask)*x[1] + int64(v>>4&mask)*x[2] + int64(v>>12&mask)*x[3] + half) >> 48
}

// layTwos lays out a block for twos: word 4i+j has the activations of bytes j
// and j+4 of eight bytes.
func layTwos(words []int64, q *[Block]int64) {
	for i := range 16 {
		k := i>>2*8 + i&3
		words[i] = q[k]<<32 + q[k+4]
	}
}

// twos multiplies the eight bytes of v, taken as unsigned. The sum of products
// is in the upper half of the result, which top takes: bytes of 8 bits over a
// block leave at most 255 × 127 × 16 = 518160 in the lower one.
//
//go:norace
func twos(v uint64, x []int64) int64 {
	const mask = 0x0000_00ff_0000_00ff
	_ = x[3]
	return int64(v&mask)*x[0] + int64(v>>8&mask)*x[1] + int64(v>>16&mask)*x[2] + int64(v>>24&mask)*x[3]
}

func top(sum int64) int32 { return int32((sum + 1<<31) >> 32) }
