package kernels

import "encoding/binary"

// Products of quantised weights. Within a block of 32 the sum of q_w q_x is an
// exact integer, however it is computed; so these loops, and vector units, may
// take it in any order. Then, for each output, blocks are added in index order:
//
//	Q8_0: y += float32(isum) × (d × scale)
//	Q4_1: y += float32(isum) × (d × scale) + m × sum
//
// A general register is used as a small vector: a 64-bit word holds several
// integers q at fixed distances, and one multiplication multiplies them all.
//
// Wide (more inputs): lane l of a word is a value of input l, all at
// the same index. Word times weight is the product for each input. A block's
// sum must fit its lane, sign included:
//
//	Q4_1: weights less 8 are -8 … 7; 8 × 127 × 32 = 32512 < 2^15: four lanes of 16 bits
//	Q8_0: 128 × 127 × 32 = 520192 < 2^20: three lanes of 21 bits
//
// Narrow (up to three inputs): lanes of a word are weights as they lie in the
// file, lanes of the other word are the activations of the same indexes in
// reverse, and the top lane of their product is the sum of products, as in the
// multiplication of polynomials. Lower lanes must stay below half of the top
// lane's unit; rounding takes them off.
//
// So one multiplication does 4 (Q4_1) or 3 (Q8_0, narrow: 2) products, where a
// plain loop does one. That is the limit of these loops: one multiplication a
// cycle.

// Blocks as they lie in the file.
type q8Block struct {
	d half
	q [Block]byte
}

type q4Block struct {
	d, m half
	q    [Block / 2]byte
}

type half [2]byte

func (h half) float() float32 { return F16ToF32(binary.LittleEndian.Uint16(h[:])) }

// tile is a block of four rows of weights, widened: the compiler loads and
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

// mulQ4Wide: four rows at a time are unpacked once and meet all inputs.
func (m *Matrix) mulQ4Wide(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	blocks := m.Cols / Block
	w, d, lo := s.w[:blocks], s.d[:blocks], s.m[:blocks]
	for ; r0 < r1; r0 += 4 {
		rows := min(4, r1-r0)
		for j := range rows {
			unpackQ4(w, d, lo, m.row(r0+j), j)
		}
		for t := t0; t < t1; t += 4 {
			var acc [4][4]float32
			g := t / 4
			words, blk := x.four[g*m.Cols:][:m.Cols], x.blk4[g*blocks:][:blocks]
			for b := range blk {
				a0, a1, a2, a3 := dot4((*[Block]int64)(words[b*Block:]), &w[b])
				foldQ4(&acc, [4]int64{a0, a1, a2, a3}, &blk[b], &d[b], &lo[b])
			}
			for i := range min(4, t1-t) {
				out := y[(t+i)*stride+r0:][:rows]
				for j := range out {
					out[j] = acc[j&3][i&3]
				}
			}
		}
	}
}

// unpackQ4 puts one row into row j of the tiles.
//
//go:norace
func unpackQ4(w []tile, d, lo [][4]float32, row []byte, j int) {
	j &= 3
	src := cast[q4Block](row)[:len(w)]
	for b := range w {
		d[b][j], lo[b][j] = src[b].d.float(), src[b].m.float()
		dst := &w[b][j]
		for i, q := range &src[b].q {
			dst[i] = int64(q&15) - 8
			dst[i+16] = int64(q>>4) - 8
		}
	}
}

// foldQ4 adds a block's sums of four rows to their outputs for four inputs. The
// constant makes every lane non-negative, so that none borrows from the next;
// bias takes it off again, and adds back 8 times the sum of activations for the
// weights' 8.
//
//go:norace
func foldQ4(acc *[4][4]float32, a [4]int64, k *block4, d, lo *[4]float32) {
	for r := range a {
		u, y, d, lo := uint64(a[r])+0x8000_8000_8000_8000, &acc[r], d[r], lo[r]
		y[0] += float32(float32(int32(u&0xffff)+k.bias[0])*float32(d*k.scale[0])) + float32(lo*k.sum[0])
		y[1] += float32(float32(int32(u>>16&0xffff)+k.bias[1])*float32(d*k.scale[1])) + float32(lo*k.sum[1])
		y[2] += float32(float32(int32(u>>32&0xffff)+k.bias[2])*float32(d*k.scale[2])) + float32(lo*k.sum[2])
		y[3] += float32(float32(int32(u>>48)+k.bias[3])*float32(d*k.scale[3])) + float32(lo*k.sum[3])
	}
}

func (m *Matrix) mulQ8Wide(y []float32, stride int, x *Input, t0, t1, r0, r1 int, s *Scratch) {
	blocks := m.Cols / Block
	w, d := s.w[:blocks], s.d[:blocks]
	for ; r0 < r1; r0 += 4 {
		rows := min(4, r1-r0)
		for j := range rows {
			unpackQ8(w, d, m.row(r0+j), j)
		}
		for t := t0; t < t1; t += 3 {
			var acc [4][3]float32
			g := t / 3
			words, blk := x.three[g*m.Cols:][:m.Cols], x.blk3[g*blocks:][:blocks]
			for b := range blk {
				a0, a1, a2, a3 := dot4((*[Block]int64)(words[b*Block:]), &w[b])
				foldQ8(&acc, [4]int64{a0, a1, a2, a3}, &blk[b], &d[b])
			}
			for i := range min(3, t1-t) {
				out := y[(t+i)*stride+r0:][:rows]
				for j := range out {
					out[j] = acc[j&3][i]
				}
			}
		}
	}
}

//go:norace
func unpackQ8(w []tile, d [][4]float32, row []byte, j int) {
	j &= 3
	src := cast[q8Block](row)[:len(w)]
	for b := range w {
		d[b][j] = src[b].d.float()
		dst := &w[b][j]
		for i, q := range &src[b].q {
			dst[i] = int64(int8(q))
		}
	}
}

//go:norace
func foldQ8(acc *[4][3]float32, a [4]int64, k *block3, d *[4]float32) {
	const one, mask = 1 << 20, 1<<21 - 1
	for r := range a {
		u, y, d := uint64(a[r])+(one+one<<21+one<<42), &acc[r], d[r]
		y[0] += float32(float32(int32(u&mask)-one) * float32(d*k.scale[0]))
		y[1] += float32(float32(int32(u>>21&mask)-one) * float32(d*k.scale[1]))
		y[2] += float32(float32(int32(u>>42)-one) * float32(d*k.scale[2]))
	}
}

// mulQ4 multiplies inputs one by one, straight from the file's nibbles.
func (m *Matrix) mulQ4(y []float32, stride int, x *Input, t0, t1, r0, r1 int) {
	for t := t0; t < t1; t++ {
		words, blk := cast[[8]int64](x.four[t*m.Cols/4:][:m.Cols/4]), x.blk4[:m.Cols/Block]
		for r := r0; r < r1; r++ {
			y[t*stride+r] = dotQ4(cast[q4Block](m.row(r)), words, blk, t)
		}
	}
}

// layQ4 lays out a block for dotQ4: eight words of four activations each. With
// a word of eight bytes, masking gives the low nibbles of bytes 0, 2, 4, 6; a
// shift by 8 those of bytes 1, 3, 5, 7; by 4 and 12 the high nibbles likewise.
func layQ4(words []int64, q *[Block]int64) {
	for i := range 8 {
		k := i&1 + i>>1&1*16 + i>>2*8 // index of the word's first activation
		words[i] = q[k]<<48 + q[k+2]<<32 + q[k+4]<<16 + q[k+6]
	}
}

// dotQ4 sums four words at a time: below the top lane there are then at most
// 15 × 127 × 3 × 4 = 22860 units of 2^32, less than half of 2^48, and in it at
// most 15 × 127 × 16 = 30480.
//
//go:norace
func dotQ4(row []q4Block, words [][8]int64, blk []block4, t int) float32 {
	const mask, half = 0x000f_000f_000f_000f, 1 << 47
	var y float32
	t &= 3
	words, blk = words[:len(row)], blk[:len(row)]
	for b := range row {
		src, x, k := &row[b], &words[b], &blk[b]
		v := binary.LittleEndian.Uint64(src.q[:])
		s := int64(v&mask)*x[0] + int64(v>>8&mask)*x[1] + int64(v>>4&mask)*x[2] + int64(v>>12&mask)*x[3]
		v = binary.LittleEndian.Uint64(src.q[8:])
		u := int64(v&mask)*x[4] + int64(v>>8&mask)*x[5] + int64(v>>4&mask)*x[6] + int64(v>>12&mask)*x[7]
		isum := (s+half)>>48 + (u+half)>>48
		y += float32(float32(int32(isum))*float32(src.d.float()*k.scale[t])) + float32(src.m.float()*k.sum[t])
	}
	return y
}

func (m *Matrix) mulQ8(y []float32, stride int, x *Input, t0, t1, r0, r1 int) {
	for t := t0; t < t1; t++ {
		words, blk := cast[[16]int64](x.three[t*m.Cols/2:][:m.Cols/2]), x.blk3[:m.Cols/Block]
		for r := r0; r < r1; r++ {
			y[t*stride+r] = dotQ8(cast[q8Block](m.row(r)), words, blk, t)
		}
	}
}

// layQ8: word 4i+j has the activations of bytes j and j+4 of eight bytes.
func layQ8(words []int64, q *[Block]int64) {
	for i := range 16 {
		k := i>>2*8 + i&3
		words[i] = q[k]<<32 + q[k+4]
	}
}

// dotQ8 makes weights unsigned by adding 128 and takes off 128 times the sum of
// activations. The lower lane holds at most 255 × 127 × 16 = 518160 < 2^31.
//
//go:norace
func dotQ8(row []q8Block, words [][16]int64, blk []block3, t int) float32 {
	const mask, half, sign = 0x0000_00ff_0000_00ff, 1 << 31, 0x8080_8080_8080_8080
	var y float32

	words, blk = words[:len(row)], blk[:len(row)]
	for b := range row {
		src, x, k := &row[b], &words[b], &blk[b]
		v := binary.LittleEndian.Uint64(src.q[:]) ^ sign
		s := int64(v&mask)*x[0] + int64(v>>8&mask)*x[1] + int64(v>>16&mask)*x[2] + int64(v>>24&mask)*x[3]
		v = binary.LittleEndian.Uint64(src.q[8:]) ^ sign
		s += int64(v&mask)*x[4] + int64(v>>8&mask)*x[5] + int64(v>>16&mask)*x[6] + int64(v>>24&mask)*x[7]
		v = binary.LittleEndian.Uint64(src.q[16:]) ^ sign
		s += int64(v&mask)*x[8] + int64(v>>8&mask)*x[9] + int64(v>>16&mask)*x[10] + int64(v>>24&mask)*x[11]
		v = binary.LittleEndian.Uint64(src.q[24:]) ^ sign
		s += int64(v&mask)*x[12] + int64(v>>8&mask)*x[13] + int64(v>>16&mask)*x[14] + int64(v>>24&mask)*x[15]
		isum := int32((s+half)>>32) - 128*k.sum[t]
		y += float32(float32(isum) * float32(src.d.float()*k.scale[t]))
	}
	return y
}
