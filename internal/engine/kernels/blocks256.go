package kernels

import "encoding/binary"

// The types with blocks of 256 weights ("K"). A block has a float scale d, and
// each 32 or 16 of its weights an integer scale s: the integer s q is what
// activations are multiplied with, so that the sum over all 256 is exact.

// Super is how many activations share a scale where weights come in blocks of
// so many.
const Super = 256

// sixes are the scales s and minima n of Q4_K and Q5_K, 6 bits each, one a
// byte: byte i of both is for weights 32i to 32i+31. In the file the first four
// of each are the low 6 bits of bytes 0-3 and 4-7; the others are the nibbles
// of bytes 8-11, s low and n high, below the top 2 bits of bytes 0-3 and 4-7.
func sixes(b *[12]byte) (s, n uint64) {
	const six, four, two = 0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303
	b0, b1, b2 := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	s = uint64(b2&four|b0>>6&two<<4)<<32 | uint64(b0&six)
	n = uint64(b2>>4&four|b1>>6&two<<4)<<32 | uint64(b1&six)
	return s, n
}

// least is the sum of n times the sum of activations, over each 32.
//
//go:norace
func least(n uint64, sums *[Super / 16]int32) (sum int32) {
	for i := range 8 {
		sum += int32(n>>(8*i)&63) * (sums[2*i] + sums[2*i+1])
	}
	return sum
}

// block256 is what a block of Q4_K or Q5_K adds to a product.
//
//go:norace
func block256(isum int32, n uint64, d, m half, scale float32, sums *[Super / 16]int32) float32 {
	return float32(float32(isum)*float32(d.float()*scale)) - float32(float32(least(n, sums))*float32(m.float()*scale))
}

// Q4_K: w = d s q - m n. Byte 32i+j of q has weight 64i+j in its low half and
// weight 64i+32+j in its high half.
type blockQ4_K struct {
	d, m half
	s    [12]byte
	q    [Super / 2]byte
}

func widenQ4_K(dst []float32, row []byte) {
	for b := range cast[blockQ4_K](row) {
		k, out := &cast[blockQ4_K](row)[b], (*[Super]float32)(dst[b*Super:])
		d, m := k.d.float(), k.m.float()
		s, n := sixes(&k.s)
		for i := range 4 {
			d0, m0 := float32(d*float32(s>>(16*i)&63)), float32(m*float32(n>>(16*i)&63))
			d1, m1 := float32(d*float32(s>>(16*i+8)&63)), float32(m*float32(n>>(16*i+8)&63))
			for j, q := range k.q[32*i:][:32] {
				out[64*i+j] = float32(d0*float32(q&15)) - m0
				out[64*i+32+j] = float32(d1*float32(q>>4)) - m1
			}
		}
	}
}

//go:norace
func unpackQ4_K(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ4_K](row) {
		k, w := &cast[blockQ4_K](row)[b], (*[8]tile)(s.w[8*b:])
		sc, n := sixes(&k.s)
		s.d[b][j], s.m[b][j], s.n[b][j] = k.d.float(), k.m.float(), n
		for i := range 4 {
			s0, s1, w0, w1 := int64(sc>>(16*i)&63), int64(sc>>(16*i+8)&63), &w[2*i][j], &w[2*i+1][j]
			for l, q := range (*[32]byte)(k.q[32*i:]) {
				w0[l], w1[l] = s0*int64(q&15), s1*int64(q>>4)
			}
		}
	}
}

//go:norace
func dotQ4_K(row []byte, x *vector) (y float32) {
	const mask = 0x0f0f_0f0f_0f0f_0f0f
	src, words, lane := cast[blockQ4_K](row), cast[[4][32]int64](x.words), x.lane&1
	words, blocks, sums := words[:len(src)], x.blocks[:len(src)], x.sums[:len(src)]
	for b := range src {
		k := &src[b]
		s, n := sixes(&k.s)
		sum := int64(0)
		for i := range 4 {
			q, p := (*[32]byte)(k.q[32*i:]), &words[b][i]
			v0, v1, v2, v3 := word(q[:]), word(q[8:]), word(q[16:]), word(q[24:])
			lo := twos(v0&mask, p[:]) + twos(v1&mask, p[4:]) + twos(v2&mask, p[8:]) + twos(v3&mask, p[12:])
			hi := twos(v0>>4&mask, p[16:]) + twos(v1>>4&mask, p[20:]) + twos(v2>>4&mask, p[24:]) + twos(v3>>4&mask, p[28:])
			sum += int64(s>>(16*i)&63)*lo + int64(s>>(16*i+8)&63)*hi
		}
		y += block256(top(sum), n, k.d, k.m, blocks[b].scale[lane], &sums[b][lane])
	}
	return y
}

// Q5_K: w = d s q - m n. As Q4_K, and bit 2i of byte j of h is the fifth bit of
// weight 64i+j, bit 2i+1 that of weight 64i+32+j.
type blockQ5_K struct {
	d, m half
	s    [12]byte
	h    [32]byte
	q    [Super / 2]byte
}

func widenQ5_K(dst []float32, row []byte) {
	for b := range cast[blockQ5_K](row) {
		k, out := &cast[blockQ5_K](row)[b], (*[Super]float32)(dst[b*Super:])
		d, m := k.d.float(), k.m.float()
		s, n := sixes(&k.s)
		for i := range 4 {
			d0, m0 := float32(d*float32(s>>(16*i)&63)), float32(m*float32(n>>(16*i)&63))
			d1, m1 := float32(d*float32(s>>(16*i+8)&63)), float32(m*float32(n>>(16*i+8)&63))
			for j, q := range k.q[32*i:][:32] {
				h := k.h[j] >> (2 * i)
				out[64*i+j] = float32(d0*float32(q&15|h&1<<4)) - m0
				out[64*i+32+j] = float32(d1*float32(q>>4|h>>1&1<<4)) - m1
			}
		}
	}
}

//go:norace
func unpackQ5_K(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ5_K](row) {
		k, w := &cast[blockQ5_K](row)[b], (*[8]tile)(s.w[8*b:])
		sc, n := sixes(&k.s)
		s.d[b][j], s.m[b][j], s.n[b][j] = k.d.float(), k.m.float(), n
		for i := range 4 {
			s0, s1, w0, w1 := int64(sc>>(16*i)&63), int64(sc>>(16*i+8)&63), &w[2*i][j], &w[2*i+1][j]
			for l, q := range (*[32]byte)(k.q[32*i:]) {
				h := k.h[l] >> (2 * i)
				w0[l], w1[l] = s0*int64(q&15|h&1<<4), s1*int64(q>>4|h>>1&1<<4)
			}
		}
	}
}

//go:norace
func dotQ5_K(row []byte, x *vector) (y float32) {
	const mask, one = 0x0f0f_0f0f_0f0f_0f0f, 0x0101_0101_0101_0101
	src, words, lane := cast[blockQ5_K](row), cast[[4][32]int64](x.words), x.lane&1
	words, blocks, sums := words[:len(src)], x.blocks[:len(src)], x.sums[:len(src)]
	for b := range src {
		k := &src[b]
		s, n := sixes(&k.s)
		h := [4]uint64{word(k.h[:]), word(k.h[8:]), word(k.h[16:]), word(k.h[24:])}
		sum := int64(0)
		for i := range 4 {
			q, p := (*[32]byte)(k.q[32*i:]), &words[b][i]
			lo, hi := int64(0), int64(0)
			for c := range 4 {
				v, h := word(q[8*c:]), h[c]>>(2*i)
				lo += twos(v&mask|h&one<<4, p[4*c:])
				hi += twos(v>>4&mask|h>>1&one<<4, p[16+4*c:])
			}
			sum += int64(s>>(16*i)&63)*lo + int64(s>>(16*i+8)&63)*hi
		}
		y += block256(top(sum), n, k.d, k.m, blocks[b].scale[lane], &sums[b][lane])
	}
	return y
}

// Q6_K: w = d s (q - 32), s a signed byte for each 16 weights. Each half of the
// block has 128 weights: bytes j and 32+j of its q have in their low halves
// weights j and 32+j, in their high halves 64+j and 96+j; byte j of its h has
// the top 2 bits of these four, lowest first.
type blockQ6_K struct {
	q [Super / 2]byte
	h [Super / 4]byte
	s [Super / 16]byte
	d half
}

func widenQ6_K(dst []float32, row []byte) {
	for b := range cast[blockQ6_K](row) {
		k, out := &cast[blockQ6_K](row)[b], (*[Super]float32)(dst[b*Super:])
		d := k.d.float()
		var ds [Super / 16]float32
		for i, s := range k.s {
			ds[i] = float32(d * float32(int8(s)))
		}
		for i := range Super {
			out[i] = float32(ds[i/16] * float32(k.at(i)))
		}
	}
}

// at is q - 32 of weight i.
func (k *blockQ6_K) at(i int) int32 {
	n, l, part := i>>7, i&31, i>>5&3
	q, h := k.q[64*n+part&1*32+l]>>(part>>1*4)&15, k.h[32*n+l]>>(2*part)&3
	return int32(q|h<<4) - 32
}

//go:norace
func unpackQ6_K(s *Scratch, row []byte, j int) {
	j &= 3
	for b := range cast[blockQ6_K](row) {
		k := &cast[blockQ6_K](row)[b]
		s.d[b][j] = k.d.float()
		for n := range 2 {
			q, h, sc, w := (*[64]byte)(k.q[64*n:]), (*[32]byte)(k.h[32*n:]), (*[8]byte)(k.s[8*n:]), (*[4]tile)(s.w[8*b+4*n:])
			for l, h := range h {
				i := l >> 4
				w[0][j][l] = int64(int8(sc[i])) * (int64(q[l]&15|h&3<<4) - 32)
				w[1][j][l] = int64(int8(sc[2+i])) * (int64(q[32+l]&15|h>>2&3<<4) - 32)
				w[2][j][l] = int64(int8(sc[4+i])) * (int64(q[l]>>4|h>>4&3<<4) - 32)
				w[3][j][l] = int64(int8(sc[6+i])) * (int64(q[32+l]>>4|h>>6<<4) - 32)
			}
		}
	}
}

// dotQ6_K takes q as it lies there and takes off 32 times the sums of
// activations. In the lower lane are at most 63 × 128 × 127 × 128 < 2^31.
//
//go:norace
func dotQ6_K(row []byte, x *vector) (y float32) {
	const four, two = 0x0f0f_0f0f_0f0f_0f0f, 0x0303_0303_0303_0303
	src, words, lane := cast[blockQ6_K](row), cast[[2][4][16]int64](x.words), x.lane&1
	words, blocks, sums := words[:len(src)], x.blocks[:len(src)], x.sums[:len(src)]
	for b := range src {
		k := &src[b]
		sum, less := int64(0), int32(0)
		for n := range 2 {
			q, h, s, p := (*[64]byte)(k.q[64*n:]), (*[32]byte)(k.h[32*n:]), (*[8]byte)(k.s[8*n:]), &words[b][n]
			for c := range 4 {
				u, v, h, at := word(q[8*c:]), word(q[32+8*c:]), word(h[8*c:]), 4*c
				sum += int64(int8(s[c>>1])) * twos(u&four|h&two<<4, p[0][at:])
				sum += int64(int8(s[2+c>>1])) * twos(v&four|h>>2&two<<4, p[1][at:])
				sum += int64(int8(s[4+c>>1])) * twos(u>>4&four|h>>4&two<<4, p[2][at:])
				sum += int64(int8(s[6+c>>1])) * twos(v>>4&four|h>>6&two<<4, p[3][at:])
			}
		}
		for i, s := range &k.s {
			less += int32(int8(s)) * sums[b][lane][i]
		}
		y += float32(float32(top(sum)-32*less) * float32(k.d.float()*blocks[b].scale[lane]))
	}
	return y
}
