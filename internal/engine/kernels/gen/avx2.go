package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The AVX2 path. Layouts are those of the AVX-512 path; 16 rows or lanes are
// two registers.

func avx2(a *asm) {
	for i := range blockForms {
		pack256(a, &blockForms[i])
	}
	for _, cols := range []int{4, 1} {
		mul256(a, cols, false)
		mul256(a, cols, true)
	}
	for i := range superForms {
		packSuper256(a, &superForms[i])
	}
	for _, cols := range []int{4, 1} {
		mulSuper256(a, cols, 8)
		mulSuper256(a, cols, 16)
	}
	dots256(a)
	dots256x1(a)
	dot256(a)
	softmax256(a)
	mix256(a, 8)
	mix256(a, 2)
	floats(a)
	pause(a)
}

// pause needs no more than any amd64 has.
func pause(a *asm) {
	a.function("pause", "func(n int)", "pause waits for so many PAUSE instructions.")
	n := a.param("n")
	a.loop("again", n, func() { a.PAUSE() })
	a.RET()
}

func (a *asm) ymms(n int) []reg.VecVirtual {
	v := make([]reg.VecVirtual, n)
	for i := range v {
		v[i] = a.YMM()
	}
	return v
}

// eights goes through blocks of 16 rows, eight rows at a time: body gets them,
// and where the outputs of the first of them lie.
func (a *asm) eights(block, packed int, body func(r *rows, dst reg.Register, disp int)) {
	dst, src, stride, n := a.param("dst"), a.param("src"), a.param("stride"), a.param("blocks")
	r := rows{stride: stride, s3: a.triple(stride), index: a.YMM()}
	for i := range 2 {
		r.p[i] = a.GP64()
	}
	a.VMOVD(stride.As32(), r.index.AsX())
	a.VPBROADCASTD(r.index.AsX(), r.index)
	a.VPMULLD(a.iota(), r.index, r.index)
	a.MOVQ(src, r.p[0])
	ahead := r.ahead(a)
	a.loop("block", n, func() {
		a.prefetch(block, ahead)
		a.MOVQ(src, r.p[0])
		for rows8 := range 2 {
			a.LEAQ(operand.Mem{Base: r.p[0], Index: stride, Scale: 4}, r.p[1])
			body(&r, dst, 32*rows8)
			a.LEAQ(operand.Mem{Base: r.p[1], Index: stride, Scale: 4}, r.p[0])
		}
		a.ADDQ(operand.I32(block), src)
		a.ADDQ(operand.I32(packed), dst)
	})
	a.done()
}

func pack256(a *asm, f *blockForm) {
	a.function(a.name("pack"+f.name), packSignature, a.name("pack"+f.name)+" packs 16 rows, stride bytes apart, of so many blocks.")
	a.eights(f.bytes, packedBytes, func(r *rows, dst reg.Register, disp int) {
		f.unpack(a, r, func(g int, v reg.VecVirtual) { f.store(a, v, g, at(dst, disp)) })
		scales256(a, r, at(dst, 512+disp), f.min)
	})
}

func packSuper256(a *asm, f *superForm) {
	name := a.name("pack" + f.name)
	a.function(name, packSignature, name+" packs 16 rows, stride bytes apart, of so many blocks of 256.")
	a.eights(f.bytes, superBytes, func(r *rows, dst reg.Register, disp int) { f.unpack(a, r, f.stores(a, dst, disp)) })
}

// eightByEight is a product of 16 packed rows, eight at a time: body adds a
// block's part to the sums of some vectors.
func (a *asm) eightByEight(cols, packed, record int, body func(w, x reg.GPVirtual, sum []reg.VecVirtual)) {
	y, stride, w0, x0, blocks, rows8 := a.param("y"), a.param("stride"), a.param("w"), a.param("x"), a.param("blocks"), a.GP64()
	a.MOVQ(operand.I32(2), rows8)
	a.loop("half", rows8, func() {
		w, x, n, to := a.GP64(), a.GP64(), a.GP64(), a.GP64()
		a.MOVQ(w0, w)
		a.MOVQ(x0, x)
		a.MOVQ(blocks, n)
		sum := a.ymms(cols)
		for _, s := range sum {
			a.VXORPS(s, s, s)
		}
		a.loop("block", n, func() {
			body(w, x, sum)
			a.ADDQ(operand.I32(record), x)
			a.ADDQ(operand.I32(packed), w)
		})
		a.MOVQ(y, to)
		for _, s := range sum {
			a.VMOVUPS(s, at(to, 0))
			a.ADDQ(stride, to)
		}
		a.ADDQ(operand.U8(32), y)
		a.ADDQ(operand.U8(32), w0)
	})
	a.done()
}

// mulSuper256 is mulSuper, eight rows at a time. Weights are below 32, or below
// 64: so many pairs of products fit 16 bits, and meet the scale, twice in each
// lane, when they become 32.
func mulSuper256(a *asm, cols, parts int) {
	min, together := parts == 8, 2
	if min {
		together = 4
	}
	name := fmt.Sprintf("mulParts%dx%dx2", parts, cols)
	a.function(name, "func(y *float32, stride int, w, x *byte, group, blocks int)",
		fmt.Sprintf("%s multiplies 16 packed rows, with scales for each %d weights, by %d vectors: y[c][0:16], stride bytes apart.", name, 256/parts, cols))
	a.eightByEight(cols, superBytes, inSuperSize, func(w, x reg.GPVirtual, sum []reg.VecVirtual) {
		isum, q, in, scale, bias, left := a.ymms(cols), a.GP64(), a.GP64(), a.GP64(), a.GP64(), a.GP64()
		for _, v := range isum {
			a.VPXOR(v, v, v)
		}
		a.MOVQ(w, q)
		a.MOVQ(x, in)
		a.LEAQ(at(w, superScale), scale)
		if !min {
			a.LEAQ(at(x, inBias), bias)
		}
		a.MOVQ(operand.I32(parts), left)
		a.loop("part", left, func() {
			short, v, t := a.ymms(cols), a.YMM(), a.YMM()
			for g := range 64 / parts {
				a.VMOVDQU(at(q, 64*g), v)
				for c, s := range short {
					a.VPBROADCASTD(at(in, 16*g+4*c), t)
					if g%together == 0 {
						a.VPMADDUBSW(t, v, s)
					} else {
						a.VPMADDUBSW(t, v, t)
						a.VPADDW(t, s, s)
					}
					if g%together == together-1 {
						a.VPMADDWD(at(scale, 0), s, s)
						a.VPADDD(s, isum[c], isum[c])
					}
				}
			}
			if !min {
				a.VMOVDQU(at(scale, 0), v)
				a.VPSRAD(operand.U8(16), v, v)
				for c := range isum {
					a.VPBROADCASTD(at(bias, 4*c), t)
					a.VPMULLD(v, t, t)
					a.VPADDD(t, isum[c], isum[c])
				}
				a.ADDQ(operand.U8(16), bias)
			}
			a.ADDQ(operand.I32(64*64/parts), q)
			a.ADDQ(operand.I32(16*64/parts), in)
			a.ADDQ(operand.U8(64), scale)
		})
		addSuper256(a, sum, isum, w, x, min)
	})
}

// addSuper256 is addSuper for eight rows.
func addSuper256(a *asm, sum, isum []reg.VecVirtual, w, x reg.Register, min bool) {
	for c, v := range isum {
		t, low, u := a.YMM(), a.YMM(), a.YMM()
		a.VCVTDQ2PS(v, v)
		a.VBROADCASTSS(at(x, inScale+4*c), t)
		if min {
			for i := range 4 {
				a.VPBROADCASTD(at(x, inPairs+16*i+4*c), u)
				a.VPMADDWD(at(w, superMin+64*i), u, u)
				if i == 0 {
					a.VMOVDQA(u, low)
				} else {
					a.VPADDD(u, low, low)
				}
			}
			a.VCVTDQ2PS(low, low)
			a.VMULPS(at(w, superM), t, u)
			a.VMULPS(u, low, low)
		}
		a.VMULPS(at(w, superD), t, t)
		a.VMULPS(t, v, v)
		if min {
			a.VSUBPS(low, v, v)
		}
		a.VADDPS(v, sum[c], sum[c])
	}
}

// gather256 gathers four bytes of the current block of eight rows.
func gather256(a *asm, r *rows, disp int) reg.VecVirtual {
	mask, v := a.YMM(), a.YMM()
	a.VPCMPEQD(mask, mask, mask)
	a.VPXOR(v, v, v)
	a.VPGATHERDD(mask, operand.Mem{Base: r.p[0], Index: r.index, Scale: 1, Disp: disp}, v)
	return v
}

// quads256 is rows.quads for eight rows.
func quads256(a *asm, r *rows, disp int) []reg.VecVirtual {
	v, t, out := a.ymms(4), a.ymms(4), a.ymms(4)
	for j := range v {
		a.VBROADCASTI128(r.row(0, j, disp), v[j])
		a.VINSERTI128(operand.U8(1), r.row(1, j, disp), v[j], v[j])
	}
	a.VPUNPCKLDQ(v[1], v[0], t[0])
	a.VPUNPCKHDQ(v[1], v[0], t[1])
	a.VPUNPCKLDQ(v[3], v[2], t[2])
	a.VPUNPCKHDQ(v[3], v[2], t[3])
	a.VPUNPCKLQDQ(t[2], t[0], out[0])
	a.VPUNPCKHQDQ(t[2], t[0], out[1])
	a.VPUNPCKLQDQ(t[3], t[1], out[2])
	a.VPUNPCKHQDQ(t[3], t[1], out[3])
	return out
}

// scales256 gathers d, and m, of eight rows.
func scales256(a *asm, r *rows, to operand.Mem, min bool) {
	v, w := gather256(a, r, 0), a.YMM()
	widen := func(to operand.Mem) { // words in w
		a.VPACKUSDW(w, w, w)
		a.VPERMQ(operand.U8(0x08), w, w)
		a.VCVTPH2PS(w.AsX(), w)
		a.VMOVUPS(w, to)
	}
	a.VPAND(a.constant(0xffff), v, w)
	widen(to)
	if min {
		a.VPSRLD(operand.U8(16), v, w)
		to.Disp += 64
		widen(to)
	}
}

// mul256 is 16 packed rows, eight at a time, times cols vectors. Weights with a
// minimum are below 32: sums of four pairs of products fit 16 bits. For others
// the sign goes to the activations: two products of |w| ≤ 128 and 127 do.
func mul256(a *asm, cols int, min bool) {
	name := fmt.Sprintf("mulBias%dx2", cols)
	if min {
		name = fmt.Sprintf("mulMin%dx2", cols)
	}
	a.function(name, "func(y *float32, stride int, w, x *byte, group, blocks int)",
		fmt.Sprintf("%s multiplies 16 packed rows by %d vectors: y[c][0:16], stride bytes apart.", name, cols))
	a.eightByEight(cols, packedBytes, recordBytes, func(w, x reg.GPVirtual, sum []reg.VecVirtual) {
		acc := isums256(a, w, x, cols, min)
		d, t := a.YMM(), a.YMM()
		a.VMOVUPS(at(w, 512), d)
		for c, v := range acc {
			a.VCVTDQ2PS(v, v)
			a.VBROADCASTSS(at(x, offScale+4*c), t)
			a.VMULPS(t, d, t)
			a.VMULPS(t, v, v)
			if min {
				a.VBROADCASTSS(at(x, offSum+4*c), t)
				a.VMULPS(at(w, 576), t, t)
				a.VADDPS(t, v, v)
			}
			a.VADDPS(v, sum[c], sum[c])
		}
	})
}

// isums256 are the sums of products of one block.
func isums256(a *asm, w, x reg.Register, cols int, min bool) []reg.VecVirtual {
	acc, short, q, t := a.ymms(cols), a.ymms(cols), a.YMM(), a.YMM()
	ones := a.constant(0x00010001)
	for g := range 8 {
		a.VMOVDQU(at(w, 64*g), q)
		abs := a.YMM()
		if !min {
			a.VPXOR(a.constant(0x80808080), q, q)
			a.VPABSB(q, abs)
		}
		for c := range acc {
			a.VPBROADCASTD(at(x, 16*g+4*c), t)
			if !min {
				a.VPSIGNB(q, t, t)
				a.VPMADDUBSW(t, abs, t)
				a.VPMADDWD(ones, t, t)
				if g == 0 {
					a.VMOVDQA(t, acc[c])
				} else {
					a.VPADDD(t, acc[c], acc[c])
				}
				continue
			}
			if g%4 == 0 {
				a.VPMADDUBSW(t, q, short[c])
			} else {
				a.VPMADDUBSW(t, q, t)
				a.VPADDW(t, short[c], short[c])
			}
			switch g {
			case 3:
				a.VPMADDWD(ones, short[c], acc[c])
			case 7:
				a.VPMADDWD(ones, short[c], t)
				a.VPADDD(t, acc[c], acc[c])
			}
		}
	}
	return acc
}

// tree256 adds the 16 lanes of each of four pairs of registers, halves first.
func tree256(a *asm, v []reg.VecVirtual) reg.Register {
	for i := range 4 {
		t := a.XMM()
		a.VADDPS(v[2*i+1], v[2*i], v[2*i])
		a.VEXTRACTF128(operand.U8(1), v[2*i], t)
		a.VADDPS(t, v[2*i].AsX(), v[2*i].AsX())
	}
	twos := func(p, q reg.VecVirtual) reg.VecVirtual {
		low, high := a.XMM(), a.XMM()
		a.VUNPCKLPD(q.AsX(), p.AsX(), low)
		a.VUNPCKHPD(q.AsX(), p.AsX(), high)
		a.VADDPS(high, low, low)
		return low
	}
	p, q := twos(v[0], v[2]), twos(v[4], v[6])
	even, odd, zero := a.XMM(), a.XMM(), a.XMM()
	a.VSHUFPS(operand.U8(0x88), q, p, even)
	a.VSHUFPS(operand.U8(0xdd), q, p, odd)
	a.VADDPS(odd, even, even)
	a.VXORPS(zero, zero, zero)
	a.VADDPS(zero, even, even)
	return even
}

// steps256 emits the loop of four dot products: of rows w with one x, or of one
// w with rows x.
func steps256(a *asm, many *rows, one, steps reg.GPVirtual) reg.Register {
	acc, k, p := a.ymms(8), a.GP64(), a.GP64()
	for _, v := range acc {
		a.VXORPS(v, v, v)
	}
	a.MOVQ(steps, k)
	a.MOVQ(one, p)
	begin := many.p[0]
	many.p[0] = a.GP64()
	a.MOVQ(begin, many.p[0])
	a.loop("steps", k, func() {
		in := a.ymms(2)
		a.VMOVUPS(at(p, 0), in[0])
		a.VMOVUPS(at(p, 32), in[1])
		for i := range 4 {
			for h := range 2 {
				t := a.YMM()
				a.VMULPS(many.row(0, i, 32*h), in[h], t)
				a.VADDPS(t, acc[2*i+h], acc[2*i+h])
			}
		}
		a.ADDQ(operand.U8(64), p)
		a.ADDQ(operand.U8(64), many.p[0])
	})
	many.p[0] = begin
	return tree256(a, acc)
}

func dots256(a *asm) {
	a.function("dots4x4x2", "func(y *float32, yStride int, x *float32, xStride int, w *float32, wStride, fours, steps int)",
		"dots4x4x2 is y[i][j] = x[i] w[j] for 4 vectors x and so many fours of rows w, each of 16 steps values. Strides are in bytes.")
	y, ys, x, xs, w, ws, n, steps := a.param("y"), a.param("yStride"), a.param("x"), a.param("xStride"), a.param("w"), a.param("wStride"), a.param("fours"), a.param("steps")
	r, to := rows{stride: xs, s3: a.triple(xs)}, rows{stride: ys, s3: a.triple(ys)}
	r.p[0], to.p[0] = x, y
	a.SHLQ(operand.U8(2), n)
	a.loop("rows", n, func() {
		s := steps256(a, &r, w, steps)
		for i := range 4 {
			a.VEXTRACTPS(operand.U8(i), s, to.row(0, i, 0))
		}
		a.ADDQ(operand.U8(4), y)
		a.ADDQ(ws, w)
	})
	a.done()
}

func dots256x1(a *asm) {
	a.function("dots16x1x2", "func(y, x, w *float32, wStride, sixteens, steps int)",
		"dots16x1x2 is y[j] = x w[j] for so many sixteens of rows w, each of 16 steps values. The stride is in bytes.")
	y, x, ws, n, steps := a.param("y"), a.param("x"), a.param("wStride"), a.param("sixteens"), a.param("steps")
	r := rows{stride: ws, s3: a.triple(ws)}
	r.p[0] = a.param("w")
	a.SHLQ(operand.U8(2), n)
	a.loop("rows", n, func() {
		a.VMOVUPS(steps256(a, &r, x, steps), at(y, 0))
		a.ADDQ(operand.U8(16), y)
		a.LEAQ(operand.Mem{Base: r.p[0], Index: ws, Scale: 4}, r.p[0])
	})
	a.done()
}

// sum256 adds 16 lanes in two registers into the first lane of the first.
func sum256(a *asm, v []reg.VecVirtual) {
	t := a.XMM()
	a.VADDPS(v[1], v[0], v[0])
	a.VEXTRACTF128(operand.U8(1), v[0], t)
	x := v[0].AsX()
	a.VADDPS(t, x, x)
	a.VPERMILPS(operand.U8(0x0e), x, t)
	a.VADDPS(t, x, x)
	a.VPERMILPS(operand.U8(0x01), x, t)
	a.VADDPS(t, x, x)
}

func dot256(a *asm) {
	a.function("dot16x2", "func(x, y *float32, steps int) float32", "dot16x2 is the sum of x y over 16 steps values.")
	x, y, n, acc := a.param("x"), a.param("y"), a.param("steps"), a.ymms(2)
	for _, v := range acc {
		a.VXORPS(v, v, v)
	}
	a.loop("steps", n, func() {
		for h, v := range acc {
			t := a.YMM()
			a.VMOVUPS(at(x, 32*h), t)
			a.VMULPS(at(y, 32*h), t, t)
			a.VADDPS(t, v, v)
		}
		a.ADDQ(operand.U8(64), x)
		a.ADDQ(operand.U8(64), y)
	})
	sum256(a, acc)
	a.give(a.ReturnIndex(0), acc[0])
	a.done()
}

func softmax256(a *asm) {
	a.function("softmax64x2", "func(p *float32, n int, scale float32) (top, sum float32)",
		"softmax64x2 scales p[:n], n at most 64, takes exp(p - top), and sums that. It writes all 64.")
	p, scale, count, best := a.param("p"), a.YMM(), a.YMM(), a.YMM()
	a.VBROADCASTSS(a.mustAddr("scale"), scale)
	a.VPBROADCASTD(a.mustAddr("n"), count)
	minus := a.constant(math.Float32bits(float32(math.Inf(-1))))
	a.VMOVUPS(minus, best)
	c := a.expNumbers()
	number, k := a.YMM(), a.GP64()
	a.VMOVDQU(a.iota(), number)
	for i := range 8 { // lanes from n on are -inf, so that exp gives 0
		v, mask := a.YMM(), a.YMM()
		a.VMULPS(at(p, 32*i), scale, v)
		a.VPCMPGTD(number, count, mask)
		a.VPADDD(a.constant(8), number, number)
		t := a.YMM()
		a.VMOVUPS(minus, t)
		a.VBLENDVPS(mask, v, t, v)
		a.VMAXPS(v, best, best)
		a.VMOVUPS(v, at(p, 32*i))
	}
	t := a.YMM()
	a.VPERM2F128(operand.U8(1), best, best, t)
	a.VMAXPS(t, best, best)
	for _, imm := range []uint8{0x4e, 0xb1} {
		a.VPERMILPS(operand.U8(imm), best, t)
		a.VMAXPS(t, best, best)
	}
	a.give(a.Return("top"), best)
	acc := a.ymms(2)
	for _, v := range acc {
		a.VXORPS(v, v, v)
	}
	a.MOVQ(operand.I32(4), k)
	a.loop("sixteens", k, func() {
		for h, s := range acc {
			v := a.YMM()
			a.VMOVUPS(at(p, 32*h), v)
			a.VSUBPS(best, v, v)
			e := a.exp(&c, v)
			a.VMOVUPS(e, at(p, 32*h))
			a.VADDPS(e, s, s)
		}
		a.ADDQ(operand.U8(64), p)
	})
	sum256(a, acc)
	a.give(a.Return("sum"), acc[0])
	a.done()
}

func mix256(a *asm, width int) {
	name := fmt.Sprintf("mix1x%dx2", 8*width)
	a.function(name, "func(out *float32, outStride int, p *float32, pStride int, v *float32, vStride, n int)",
		fmt.Sprintf("%s is out[:%d] = Σ p[j] v[j] over j < n, in index order. The stride is in bytes.", name, 8*width))
	out, p, v, vs, n, acc := a.param("out"), a.param("p"), a.param("v"), a.param("vStride"), a.param("n"), a.ymms(width)
	for _, s := range acc {
		a.VXORPS(s, s, s)
	}
	a.loop("rows", n, func() {
		f := a.YMM()
		a.VBROADCASTSS(at(p, 0), f)
		for d, s := range acc {
			t := a.YMM()
			a.VMULPS(at(v, 32*d), f, t)
			a.VADDPS(t, s, s)
		}
		a.ADDQ(operand.U8(4), p)
		a.ADDQ(vs, v)
	})
	for d, s := range acc {
		a.VMOVUPS(s, at(out, 32*d))
	}
	a.done()
}
