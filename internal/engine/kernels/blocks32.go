package kernels

import (
	"encoding/binary"
	"math"
)

// The types with blocks of 32 weights. Nibbles: byte i has weight i in its low
// half and weight i+16 in its high half. Fifth bits: bit i of the 32 is that of
// weight i.

// Q8_0: w = d q.
type blockQ8_0 struct {
	d half
	q [Block]byte // int8
}

func widenQ8_0(dst []float32, row []byte) {
	if f, n := now.float, len(dst)/Block; f != nil && !raced && n > 0 {
		f.widenQ8_0(&dst[0], &row[:n*size[blockQ8_0]()][0], n)
		return
	}
	for b, k := range cast[blockQ8_0](row)[:len(dst)/Block] {
		d, out := k.d.float(), (*[Block]float32)(dst[b*Block:])
		for i, q := range &k.q {
			out[i] = float32(d * float32(int8(q)))
		}
	}
}

// putQ8_0 rounds the scale first, so that q makes up for what it lost: d = half
// of amax ÷ 127, q = x × (1 ÷ d) rounded half to even, at most 127 in size. A
// block with an infinity or NaN gets a NaN scale, one that is too large for a
// half an infinite one with q = 0: both are read as NaN.
func putQ8_0(dst []byte, src []float32) {
	if f, n := now.float, len(src)/Block; f != nil && !raced && n > 0 {
		f.roundQ8_0(&dst[:n*size[blockQ8_0]()][0], &src[0], n)
		return
	}
	for b := range cast[blockQ8_0](dst)[:len(src)/Block] {
		k, v := &cast[blockQ8_0](dst)[b], (*[Block]float32)(src[b*Block:])
		var top uint32
		for _, f := range v {
			top = max(top, math.Float32bits(f)&0x7fffffff)
		}
		h := F32ToF16(float32(math.Float32frombits(top) / 127))
		if top >= 0x7f800000 {
			h = 0x7e00
		}
		binary.LittleEndian.PutUint16(k.d[:], h)
		if h == 0 || h >= 0x7c00 {
			k.q = [Block]byte{}
			continue
		}
		const round = 3 << 22 // as in quantise
		inv := 1 / F16ToF32(h)
		for i, f := range v {
			n := int32(math.Float32bits(float32(f*inv)+round) - 0x4b400000)
			k.q[i] = byte(min(max(n, -127), 127))
		}
	}
}

//go:norace
func unpackQ8_0(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ8_0](row) {
		k, w := &cast[blockQ8_0](row)[b], &s.w[b][j]
		s.d[b][j], s.m[b][j] = k.d.float(), 0
		for i, q := range &k.q {
			w[i] = int64(int8(q))
		}
	}
}

// dotQ8_0 makes weights unsigned by adding 128 and takes off 128 times the sum
// of activations.
//
//go:norace
func dotQ8_0(row []byte, x *vector) (y float32) {
	const sign = 0x8080_8080_8080_8080
	src, words, lane := cast[blockQ8_0](row), cast[[16]int64](x.words), x.lane&3
	words, blocks := words[:len(src)], x.blocks[:len(src)]
	for b := range src {
		q, p, k := &src[b].q, &words[b], &blocks[b]
		isum := twos(word(q[:])^sign, p[:]) + twos(word(q[8:])^sign, p[4:]) + twos(word(q[16:])^sign, p[8:]) + twos(word(q[24:])^sign, p[12:])
		y += float32(float32(top(isum)-128*k.q[lane]) * float32(src[b].d.float()*k.scale[lane]))
	}
	return y
}

// Q4_0: w = d (q - 8).
type blockQ4_0 struct {
	d half
	q [Block / 2]byte
}

func widenQ4_0(dst []float32, row []byte) {
	for b, k := range cast[blockQ4_0](row) {
		d, out := k.d.float(), (*[Block]float32)(dst[b*Block:])
		for i, q := range &k.q {
			out[i] = float32(d * float32(int32(q&15)-8))
			out[i+16] = float32(d * float32(int32(q>>4)-8))
		}
	}
}

//go:norace
func unpackQ4_0(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ4_0](row) {
		k, w := &cast[blockQ4_0](row)[b], &s.w[b][j]
		s.d[b][j], s.m[b][j] = k.d.float(), 0
		for i, q := range &k.q {
			w[i], w[i+16] = int64(q&15)-8, int64(q>>4)-8
		}
	}
}

//go:norace
func dotQ4_0(row []byte, x *vector) (y float32) {
	src, words, lane := cast[blockQ4_0](row), cast[[8]int64](x.words), x.lane&3
	words, blocks := words[:len(src)], x.blocks[:len(src)]
	for b := range src {
		q, p, k := &src[b].q, &words[b], &blocks[b]
		isum := int32(fours(word(q[:]), p[:])+fours(word(q[8:]), p[4:])) - 8*k.q[lane]
		y += float32(float32(isum) * float32(src[b].d.float()*k.scale[lane]))
	}
	return y
}

// Q4_1: w = d q + m.
type blockQ4_1 struct {
	d, m half
	q    [Block / 2]byte
}

func widenQ4_1(dst []float32, row []byte) {
	for b, k := range cast[blockQ4_1](row) {
		d, m, out := k.d.float(), k.m.float(), (*[Block]float32)(dst[b*Block:])
		for i, q := range &k.q {
			out[i] = float32(d*float32(q&15)) + m
			out[i+16] = float32(d*float32(q>>4)) + m
		}
	}
}

//go:norace
func unpackQ4_1(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ4_1](row) {
		k, w := &cast[blockQ4_1](row)[b], &s.w[b][j]
		s.d[b][j], s.m[b][j] = k.d.float(), k.m.float()
		for i, q := range &k.q {
			w[i], w[i+16] = int64(q&15)-8, int64(q>>4)-8
		}
	}
}

//go:norace
func dotQ4_1(row []byte, x *vector) (y float32) {
	src, words, lane := cast[blockQ4_1](row), cast[[8]int64](x.words), x.lane&3
	words, blocks := words[:len(src)], x.blocks[:len(src)]
	for b := range src {
		q, p, k := &src[b].q, &words[b], &blocks[b]
		isum := int32(fours(word(q[:]), p[:]) + fours(word(q[8:]), p[4:]))
		y += float32(float32(isum)*float32(src[b].d.float()*k.scale[lane])) + float32(src[b].m.float()*k.sum[lane])
	}
	return y
}

// Q5_0: w = d (q - 16).
type blockQ5_0 struct {
	d half
	h [4]byte // fifth bits
	q [Block / 2]byte
}

// fifths are the eight bits of h as the fifth bits of eight bytes.
func fifths(h byte) uint64 {
	const ones = 0x0101_0101_0101_0101
	v := uint64(h) * ones & 0x8040_2010_0804_0201 // each bit in its byte
	return (v + 0x7f*ones) >> 7 & ones << 4
}

// fives are the 32 weights of a block, one a byte.
func fives(h *[4]byte, q *[Block / 2]byte) (v0, v1, v2, v3 uint64) {
	const mask = 0x0f0f_0f0f_0f0f_0f0f
	a, b := word(q[:]), word(q[8:])
	return a&mask | fifths(h[0]), b&mask | fifths(h[1]), a>>4&mask | fifths(h[2]), b>>4&mask | fifths(h[3])
}

func widenQ5_0(dst []float32, row []byte) {
	for b := range cast[blockQ5_0](row) {
		k, out := &cast[blockQ5_0](row)[b], (*[Block]float32)(dst[b*Block:])
		d := k.d.float()
		v0, v1, v2, v3 := fives(&k.h, &k.q)
		for i := range 8 {
			s := 8 * i
			out[i], out[i+8] = float32(d*float32(int32(v0>>s&31)-16)), float32(d*float32(int32(v1>>s&31)-16))
			out[i+16], out[i+24] = float32(d*float32(int32(v2>>s&31)-16)), float32(d*float32(int32(v3>>s&31)-16))
		}
	}
}

//go:norace
func unpackQ5_0(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ5_0](row) {
		k := &cast[blockQ5_0](row)[b]
		s.d[b][j], s.m[b][j] = k.d.float(), 0
		unpackFives(&s.w[b][j], &k.h, &k.q, 16)
	}
}

//go:norace
func unpackFives(w *[Block]int64, h *[4]byte, q *[Block / 2]byte, less int64) {
	v0, v1, v2, v3 := fives(h, q)
	for i := range 8 {
		s := 8 * i
		w[i], w[i+8] = int64(v0>>s&31)-less, int64(v1>>s&31)-less
		w[i+16], w[i+24] = int64(v2>>s&31)-less, int64(v3>>s&31)-less
	}
}

//go:norace
func dotQ5_0(row []byte, x *vector) (y float32) {
	src, words, lane := cast[blockQ5_0](row), cast[[16]int64](x.words), x.lane&3
	words, blocks := words[:len(src)], x.blocks[:len(src)]
	for b := range src {
		p, k := &words[b], &blocks[b]
		v0, v1, v2, v3 := fives(&src[b].h, &src[b].q)
		isum := twos(v0, p[:]) + twos(v1, p[4:]) + twos(v2, p[8:]) + twos(v3, p[12:])
		y += float32(float32(top(isum)-16*k.q[lane]) * float32(src[b].d.float()*k.scale[lane]))
	}
	return y
}

// Q5_1: w = d q + m.
type blockQ5_1 struct {
	d, m half
	h    [4]byte // fifth bits
	q    [Block / 2]byte
}

func widenQ5_1(dst []float32, row []byte) {
	for b := range cast[blockQ5_1](row) {
		k, out := &cast[blockQ5_1](row)[b], (*[Block]float32)(dst[b*Block:])
		d, m := k.d.float(), k.m.float()
		v0, v1, v2, v3 := fives(&k.h, &k.q)
		for i := range 8 {
			s := 8 * i
			out[i], out[i+8] = float32(d*float32(v0>>s&31))+m, float32(d*float32(v1>>s&31))+m
			out[i+16], out[i+24] = float32(d*float32(v2>>s&31))+m, float32(d*float32(v3>>s&31))+m
		}
	}
}

//go:norace
func unpackQ5_1(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ5_1](row) {
		k := &cast[blockQ5_1](row)[b]
		s.d[b][j], s.m[b][j] = k.d.float(), k.m.float()
		unpackFives(&s.w[b][j], &k.h, &k.q, 0)
	}
}

//go:norace
func dotQ5_1(row []byte, x *vector) (y float32) {
	src, words, lane := cast[blockQ5_1](row), cast[[16]int64](x.words), x.lane&3
	words, blocks := words[:len(src)], x.blocks[:len(src)]
	for b := range src {
		p, k := &words[b], &blocks[b]
		v0, v1, v2, v3 := fives(&src[b].h, &src[b].q)
		isum := twos(v0, p[:]) + twos(v1, p[4:]) + twos(v2, p[8:]) + twos(v3, p[12:])
		y += float32(float32(top(isum))*float32(src[b].d.float()*k.scale[lane])) + float32(src[b].m.float()*k.sum[lane])
	}
	return y
}
