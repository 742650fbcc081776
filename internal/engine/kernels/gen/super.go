package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/ir"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Products of types with blocks of 256 weights: parts of 32 or 16 have integer
// scales, and the sum over the block is exact. Rows are lanes, as in int8.go.

// Layouts, see packedSuper and superRecord.
const (
	superScale  = 64 * 64
	superMin    = superScale + 16*64
	superD      = superMin + 4*64
	superM      = superD + 64
	superBytes  = superM + 64
	inScale     = 64 * 16
	inPairs     = inScale + 16
	inBias      = inPairs + 4*16
	inSuperSize = inBias + 16*16 + 48
)

// superForm is a block of 256 weights as it lies in the file.
type superForm struct {
	name   string
	bytes  int
	parts  int // with a scale each
	min    bool
	unpack func(a *asm, r *rows, to *unpacked)
}

// unpacked takes what a block of 16 rows, or 8, holds: first d, m and pairs of
// minima, then word g of each part. Scales come when a part's words are there, or
// before all of them unless late: registers need not keep them then.
type unpacked struct {
	head    func(d, m reg.VecVirtual, n []reg.VecVirtual)
	weights func(part, g int, v reg.VecVirtual)
	scale   func(part int, v reg.VecVirtual)
	late    bool
}

// andTo and or are named apart in the two register widths.
func (a *asm) andTo(m operand.Mem, v, to reg.VecVirtual) {
	if a.lanes == 16 {
		a.VPANDD(m, v, to)
	} else {
		a.VPAND(m, v, to)
	}
}

func (a *asm) or(x, y, to reg.VecVirtual) {
	if a.lanes == 16 {
		a.VPORD(x, y, to)
	} else {
		a.VPOR(x, y, to)
	}
}

var superForms = []superForm{
	{"Q4_K", 144, 8, true, unpackNibbles(16, 0)},
	{"Q5_K", 176, 8, true, unpackNibbles(48, 16)},
	{"Q6_K", 210, 16, false, unpackSixes},
}

// words is how many words of four weights a part has.
func (f *superForm) words() int { return 64 / f.parts }

// halves widens the halves in the lower words of v.
func (a *asm) halves(v reg.VecVirtual) reg.VecVirtual {
	f := a.vec()
	if a.lanes == 8 {
		a.VPAND(a.constant(0xffff), v, f)
		a.VPACKUSDW(f, f, f)
		a.VPERMQ(operand.U8(0x08), f, f)
		a.VCVTPH2PS(f.AsX(), f)
		return f
	}
	a.VPMOVDW(v, f.AsY())
	a.VCVTPH2PS(f.AsY(), f)
	return f
}

// bytesTo spreads chosen bytes of each word of v: byte i of the result is byte
// from[i], or 0 when that is 0x80.
func (a *asm) bytesTo(v reg.VecVirtual, from [4]uint32) reg.VecVirtual {
	to := a.vec()
	name := fmt.Sprintf("bytes%02x%02x%02x%02x", from[0], from[1], from[2], from[3])
	a.VPSHUFB(a.table(name, func(lane int) (w uint32) {
		for i, b := range from {
			if b != 0x80 {
				b += uint32(lane%4) * 4
			}
			w |= b << (8 * i)
		}
		return w
	}), v, to)
	return to
}

// six are the scales, and the minima, of parts 0 to 3 and 4 to 7, a byte each:
// see sixes in blocks256.go. b is the three words that hold them.
func (a *asm) six(b []reg.VecVirtual) (s, n [2]reg.VecVirtual) {
	low := func(v reg.VecVirtual) reg.VecVirtual {
		t := a.vec()
		a.andTo(a.constant(0x3f3f3f3f), v, t)
		return t
	}
	high := func(four, two reg.VecVirtual, shift uint64) reg.VecVirtual {
		t, u := a.vec(), a.vec()
		a.VPSRLD(operand.U8(shift), four, t)
		a.andTo(a.constant(0x0f0f0f0f), t, t)
		a.VPSRLD(operand.U8(2), two, u)
		a.andTo(a.constant(0x30303030), u, u)
		a.or(u, t, t)
		return t
	}
	return [2]reg.VecVirtual{low(b[0]), high(b[2], b[0], 0)}, [2]reg.VecVirtual{low(b[1]), high(b[2], b[1], 4)}
}

// unpackNibbles unpacks Q4_K and Q5_K: 32 bytes are the nibbles of two parts,
// the low ones first. fifths is where fifth bits are, bit i of a byte for part i.
func unpackNibbles(weights, fifths int) func(*asm, *rows, *unpacked) {
	return func(a *asm, r *rows, to *unpacked) {
		words := r.quads(a, 0)
		d := a.halves(words[0])
		a.VPSRLD(operand.U8(16), words[0], words[0])
		m, n := a.halves(words[0]), []reg.VecVirtual{}
		s, least := a.six(words[1:])
		for _, v := range least {
			n = append(n, a.bytesTo(v, [4]uint32{0, 0x80, 1, 0x80}), a.bytesTo(v, [4]uint32{2, 0x80, 3, 0x80}))
		}
		to.head(d, m, n)
		scale := func(part int) { to.scale(part, a.bytesTo(s[part/4], a.scaleOf(uint32(part%4)))) }
		for part := 0; part < 8 && !to.late; part++ {
			scale(part)
		}
		for c := range 4 {
			for half := range 2 {
				var h []reg.VecVirtual
				if fifths > 0 {
					h = r.quads(a, fifths+16*half)
				}
				for g, v := range r.quads(a, weights+32*c+16*half) {
					high := a.vec()
					a.VPSRLW(operand.U8(4), v, high)
					for i, w := range []reg.VecVirtual{v, high} {
						a.andTo(a.constant(0x0f0f0f0f), w, w)
						if h != nil {
							a.or(a.bitTo4(h[g], 2*c+i), w, w)
						}
						to.weights(2*c+i, 4*half+g, w)
					}
				}
			}
			for i := 0; i < 2 && to.late; i++ {
				scale(2*c + i)
			}
		}
	}
}

// scaleOf spreads byte b of a word: to a number where a product takes that, and
// to both halves on AVX2, whose product is of pairs of words.
func (a *asm) scaleOf(b uint32) [4]uint32 {
	if a.lanes == 8 {
		return [4]uint32{b, 0x80, b, 0x80}
	}
	return [4]uint32{b, 0x80, 0x80, 0x80}
}

// bitTo4 is bit b of each byte as its bit 4.
func (a *asm) bitTo4(v reg.VecVirtual, b int) reg.VecVirtual {
	t := a.vec()
	switch {
	case b < 4:
		a.VPSLLW(operand.U8(4-b), v, t)
	default:
		a.VPSRLW(operand.U8(b-4), v, t)
	}
	a.andTo(a.constant(0x10101010), t, t)
	return t
}

// unpackSixes unpacks Q6_K: of each 128 weights, byte i of 64 has the low bits
// of weight i in its low half and of weight i+64 in its high half; byte i of 32
// has two more bits of weights i, i+32, i+64 and i+96.
func unpackSixes(a *asm, r *rows, to *unpacked) {
	v := r.words(a, 206) // d is the last two bytes
	a.VPSRLD(operand.U8(16), v, v)
	to.head(a.halves(v), nil, nil)
	scales := r.quads(a, 192) // signed bytes
	scale := func(part int) {
		s := a.vec()
		a.VPSLLD(operand.U8(24-part%4*8), scales[part/4], s)
		a.VPSRAD(operand.U8(24), s, s)
		if a.lanes == 8 { // see scaleOf
			t := a.vec()
			a.VPSLLD(operand.U8(16), s, t)
			a.VPBLENDW(operand.U8(0xaa), t, s, s)
		}
		to.scale(part, s)
	}
	for part := 0; part < 16 && !to.late; part++ {
		scale(part)
	}
	for half := range 2 {
		for p := range 2 {
			h := r.quads(a, 128+32*half+16*p)
			for second := range 2 { // weights i and i+64, then i+32 and i+96
				for g, v := range r.quads(a, 64*half+32*second+16*p) {
					high, two := a.vec(), [2]reg.VecVirtual{a.vec(), a.vec()}
					a.VPSRLW(operand.U8(4), v, high)
					if second == 0 {
						a.VPSLLW(operand.U8(4), h[g], two[0])
						a.andTo(a.constant(0x30303030), h[g], two[1])
					} else {
						a.VPSLLW(operand.U8(2), h[g], two[0])
						a.VPSRLW(operand.U8(2), h[g], two[1])
						a.andTo(a.constant(0x30303030), two[1], two[1])
					}
					a.andTo(a.constant(0x30303030), two[0], two[0])
					for i, w := range []reg.VecVirtual{v, high} {
						a.andTo(a.constant(0x0f0f0f0f), w, w)
						a.or(two[i], w, w)
						to.weights(8*half+p+2*(second+2*i), g, w)
					}
				}
				for i := 0; i < 2 && to.late; i++ {
					scale(8*half + p + 2*(second+2*i))
				}
			}
		}
	}
}

func packSuper(a *asm, f *superForm) {
	name := a.name("pack" + f.name)
	a.function(name, packSignature, name+" packs 16 rows, stride bytes apart, of so many blocks of 256.")
	dst, r, n := a.param("dst"), newRows(a, a.param("src"), a.param("stride")), a.param("blocks")
	ahead := r.ahead(a)
	a.loop("block", n, func() {
		a.prefetch(f.bytes, ahead)
		f.unpack(a, &r, f.stores(a, dst, 0))
		r.next(a, f.bytes)
		a.ADDQ(operand.I32(superBytes), dst)
	})
	a.done()
}

// stores writes what is unpacked to a packedSuper, from byte disp of each of its
// arrays of 16 rows on.
func (f *superForm) stores(a *asm, dst reg.Register, disp int) *unpacked {
	return &unpacked{
		head: func(d, m reg.VecVirtual, n []reg.VecVirtual) {
			a.VMOVUPS(d, at(dst, superD+disp))
			if f.min {
				a.VMOVUPS(m, at(dst, superM+disp))
			}
			for i, v := range n {
				a.VMOVUPS(v, at(dst, superMin+64*i+disp))
			}
		},
		weights: func(part, g int, v reg.VecVirtual) { a.VMOVUPS(v, at(dst, 64*(part*f.words()+g)+disp)) },
		scale:   func(part int, v reg.VecVirtual) { a.VMOVUPS(v, at(dst, superScale+64*part+disp)) },
	}
}

// vpdpwssd adds to each 32-bit lane of acc the two products of signed words of
// w and of x, which is a pair for all lanes.
func (a *asm) vpdpwssd(x operand.Mem, w, acc reg.VecVirtual) {
	a.Instruction(&ir.Instruction{
		Opcode: "VPDPWSSD", Suffixes: []string{"BCST"},
		Operands: []operand.Op{x, w, acc}, Inputs: []operand.Op{x, w, acc}, Outputs: []operand.Op{acc},
		ISA: []string{"AVX512VNNI"},
	})
}

// addSuper adds a block's sums to those of 16 rows and some vectors. d, m and n
// are the rows' scale, scale of minima and minima; x is the vectors' record.
func (a *asm) addSuper(sum, isum []reg.VecVirtual, d, m operand.Op, n []operand.Op, x reg.Register) {
	for c, v := range isum {
		t := a.ZMM()
		a.VCVTDQ2PS(v, v)
		a.VBROADCASTSS(at(x, inScale+4*c), t)
		if n != nil {
			low, u := a.ZMM(), a.ZMM()
			a.VPXORD(low, low, low)
			for i, mins := range n {
				w, ok := mins.(reg.VecVirtual)
				if !ok {
					w = a.ZMM()
					a.VMOVDQU32(mins, w)
				}
				a.vpdpwssd(at(x, inPairs+16*i+4*c), w, low)
			}
			a.VCVTDQ2PS(low, low)
			a.VMULPS(m, t, u)
			a.VMULPS(u, low, low)
			a.VMULPS(d, t, t)
			a.VMULPS(t, v, v)
			a.VSUBPS(low, v, v)
		} else {
			a.VMULPS(d, t, t)
			a.VMULPS(t, v, v)
		}
		a.VADDPS(v, sum[c], sum[c])
	}
}

// mulSuper is 16 packed rows times cols vectors of a group of four, over all
// blocks. Without a minimum weights are 32 too large, which bias takes off.
func mulSuper(a *asm, cols, parts int) {
	min := parts == 8
	name := fmt.Sprintf("mulParts%dx%d", parts, cols)
	a.function(name, "func(y *float32, stride int, w, x *byte, group, blocks int)",
		fmt.Sprintf("%s multiplies 16 packed rows, with scales for each %d weights, by %d vectors: y[c][0:16], stride bytes apart.", name, 256/parts, cols))
	y, stride, w, x, n := a.param("y"), a.param("stride"), a.param("w"), a.param("x"), a.param("blocks")
	sum := a.zmms(cols)
	for _, s := range sum {
		a.VPXORD(s, s, s)
	}
	a.loop("block", n, func() {
		isum, q, in, scale, bias, left := a.zmms(cols), a.GP64(), a.GP64(), a.GP64(), a.GP64(), a.GP64()
		for _, v := range isum {
			a.VPXORD(v, v, v)
		}
		a.MOVQ(w, q)
		a.MOVQ(x, in)
		a.LEAQ(at(w, superScale), scale)
		if !min {
			a.LEAQ(at(x, inBias), bias)
		}
		a.MOVQ(operand.I32(parts), left)
		a.loop("part", left, func() {
			acc := a.zmms(cols)
			for c, v := range acc {
				if min {
					a.VPXORD(v, v, v)
				} else {
					a.VPBROADCASTD(at(bias, 4*c), v)
				}
			}
			for g := range 64 / parts {
				v := a.ZMM()
				a.VMOVDQU32(at(q, 64*g), v)
				for c, s := range acc {
					a.vpdpbusd(at(in, 16*g+4*c), v, s)
				}
			}
			for c, v := range acc {
				a.VPMULLD(at(scale, 0), v, v)
				a.VPADDD(v, isum[c], isum[c])
			}
			a.ADDQ(operand.I32(64*64/parts), q)
			a.ADDQ(operand.I32(16*64/parts), in)
			a.ADDQ(operand.I32(64), scale)
			if !min {
				a.ADDQ(operand.I32(16), bias)
			}
		})
		var mins []operand.Op
		for i := 0; min && i < 4; i++ {
			mins = append(mins, at(w, superMin+64*i))
		}
		a.addSuper(sum, isum, at(w, superD), at(w, superM), mins, x)
		a.ADDQ(operand.I32(superBytes), w)
		a.ADDQ(operand.I32(inSuperSize), x)
	})
	for c, s := range sum {
		a.VMOVUPS(s, at(y, 0))
		if c < cols-1 {
			a.ADDQ(stride, y)
		}
	}
	a.done()
}

// directSuper is direct for blocks of 256 and one vector: registers do not
// suffice for more.
func directSuper(a *asm, f *superForm) {
	name := "direct" + f.name + "x1"
	a.function(name, directSignature, name+" multiplies 16 rows, wStride bytes apart, by a vector: y[0:16].")
	x, n, r := a.param("x"), a.param("blocks"), newRows(a, a.param("w"), a.param("wStride"))
	ahead, sum := r.ahead(a), a.ZMM()
	a.VPXORD(sum, sum, sum)
	a.loop("block", n, func() {
		a.prefetch(f.bytes, ahead)
		isum, acc := a.ZMM(), map[int]reg.VecVirtual{}
		a.VPXORD(isum, isum, isum)
		var d, m reg.VecVirtual
		var least []operand.Op
		f.unpack(a, &r, &unpacked{
			late: true,
			head: func(scale, min reg.VecVirtual, n []reg.VecVirtual) {
				d, m = scale, min
				for _, v := range n {
					least = append(least, v)
				}
			},
			weights: func(part, g int, v reg.VecVirtual) {
				s, begun := acc[part]
				if !begun {
					s = a.ZMM()
					acc[part] = s
					if f.min {
						a.VPXORD(s, s, s)
					} else {
						a.VPBROADCASTD(at(x, inBias+16*part), s)
					}
				}
				a.vpdpbusd(at(x, 16*(part*f.words()+g)), v, s)
			},
			scale: func(part int, scale reg.VecVirtual) {
				a.VPMULLD(scale, acc[part], acc[part])
				a.VPADDD(acc[part], isum, isum)
			},
		})
		a.addSuper([]reg.VecVirtual{sum}, []reg.VecVirtual{isum}, d, m, least, x)
		r.next(a, f.bytes)
		a.ADDQ(operand.I32(inSuperSize), x)
	})
	y := a.param("y")
	a.VMOVUPS(sum, at(y, 0))
	a.done()
}

// quantiseSuper makes the int8 form of one vector of a record of four.
func quantiseSuper(a *asm) {
	a.function("quantise256", "func(dst *byte, src *float32, blocks int)",
		"quantise256 makes the int8 form of so many blocks of 256 of one vector of a group of four.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("blocks")
	abs := a.broadcast(0x7fffffff)
	a.loop("block", n, func() {
		top := a.ZMM()
		a.VPANDD(at(src, 0), abs, top)
		for i := 1; i < 16; i++ {
			t := a.ZMM()
			a.VPANDD(at(src, 64*i), abs, t)
			a.VPMAXSD(t, top, top)
		}
		max := a.largest(top)
		scale, inv, none := a.scale127(max)
		a.VMOVSS(scale.AsX(), at(dst, inScale))
		a.VBROADCASTSS(inv.AsX(), inv)
		a.VPBROADCASTD(none.AsX(), none)
		for i := range 4 {
			s := a.zmms(4)
			for j := range s {
				v, q := s[j], a.XMM()
				a.VMULPS(at(src, 256*i+64*j), inv, v)
				a.VCVTPS2DQ(v, v)
				a.VPANDND(v, none, v)
				a.VPMOVDB(v, q)
				a.words4(q, dst, 64*(4*i+j))
			}
			sums := a.reduce4(s, func(x, y reg.VecVirtual) { a.VPADDD(x.AsX(), y.AsX(), y.AsX()) }, func(x, y reg.VecVirtual) { a.VPADDD(x.AsY(), y.AsY(), y.AsY()) })
			pairs, bias, zero := a.XMM(), a.XMM(), a.XMM()
			a.VPHADDD(sums.AsX(), sums.AsX(), pairs)
			a.VPACKSSDW(pairs, pairs, pairs)
			a.VMOVD(pairs, at(dst, inPairs+16*i))
			a.VPSLLD(operand.U8(5), sums.AsX(), bias)
			a.VPXOR(zero, zero, zero)
			a.VPSUBD(bias, zero, bias)
			a.words4(bias, dst, inBias+64*i)
		}
		a.ADDQ(operand.I32(1024), src)
		a.ADDQ(operand.I32(inSuperSize), dst)
	})
	a.done()
}

// words4 stores the four words of v, 16 bytes apart.
func (a *asm) words4(v reg.VecVirtual, to reg.Register, disp int) {
	a.VMOVD(v, at(to, disp))
	for i := 1; i < 4; i++ {
		a.VPEXTRD(operand.U8(i), v, at(to, disp+16*i))
	}
}
