package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/gotypes"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Float routines. Products are rounded before they are added; see
// docs/numerics.md. Routines that treat each value alike are written once, for
// registers of 16 values (AVX-512) and of 8 (AVX2).

func floats(a *asm) {
	merge(a)
	exps(a)
	swiglu(a)
	norm(a)
	add(a)
	widen(a)
	widenBrain(a)
	widenBlocks(a)
	round(a)
	roundBlocks(a)
	ropeHalves(a)
}

// sums512 are the routines with sums: a register is the 16 lanes of a sum.
func sums512(a *asm) {
	for _, half := range []bool{false, true} {
		dots4x4(a, half)
		dots16x1(a, half)
		for _, queries := range []int{4, 1} {
			for _, width := range []int{4, 1} {
				mix(a, queries, width, half)
			}
		}
	}
	dot(a)
	softmax(a)
	rope(a)
}

// tree adds the lanes of each of 16 registers, halves first, and gives sum i in
// lane i. What is all -0 becomes +0, as in a sum from +0.
func (a *asm) tree(v []reg.VecVirtual) reg.VecVirtual {
	pair := func(shuffle func(high bool, x, y, to reg.VecVirtual), x, y reg.VecVirtual) reg.VecVirtual {
		low, high := a.ZMM(), a.ZMM()
		shuffle(false, x, y, low)
		shuffle(true, x, y, high)
		a.VADDPS(high, low, low)
		return low
	}
	lanes := func(low, high uint8) func(bool, reg.VecVirtual, reg.VecVirtual, reg.VecVirtual) {
		return func(h bool, x, y, to reg.VecVirtual) {
			imm := low
			if h {
				imm = high
			}
			a.VSHUFF32X4(operand.U8(imm), y, x, to)
		}
	}
	eights, fours := lanes(0x44, 0xee), lanes(0x88, 0xdd)
	twos := func(h bool, x, y, to reg.VecVirtual) {
		if h {
			a.VUNPCKHPD(y, x, to)
		} else {
			a.VUNPCKLPD(y, x, to)
		}
	}
	ones := func(h bool, x, y, to reg.VecVirtual) {
		imm := uint8(0x88)
		if h {
			imm = 0xdd
		}
		a.VSHUFPS(operand.U8(imm), y, x, to)
	}
	u := make([]reg.VecVirtual, 4)
	for j := range u {
		u[j] = pair(fours, pair(eights, v[j], v[4+j]), pair(eights, v[8+j], v[12+j]))
	}
	s := pair(ones, pair(twos, u[0], u[1]), pair(twos, u[2], u[3]))
	zero := a.zero()
	a.VADDPS(zero, s, s)
	return s
}

func (a *asm) zero() reg.VecVirtual {
	v := a.ZMM()
	a.VPXORD(v, v, v)
	return v
}

// stored tells routines apart whose rows w or v are halves: their name, the type
// of a pointer to them, and the bytes of 16 values.
func stored(name string, half bool) (full, pointer, what string, bytes int) {
	if half {
		return name + "h", "*byte", "halves", 32
	}
	return name, "*float32", "floats", 64
}

// values loads 16 values that are stored as halves or floats.
func (a *asm) values(half bool, m operand.Mem, to reg.VecVirtual) {
	if half {
		a.VCVTPH2PS(m, to)
	} else {
		a.VMOVUPS(m, to)
	}
}

func dots4x4(a *asm, half bool) {
	name, pointer, what, bytes := stored("dots4x4", half)
	a.function(name, "func(y *float32, yStride int, x *float32, xStride int, w "+pointer+", wStride, fours, steps int)",
		name+" is y[i][j] = x[i] w[j] for 4 vectors x and so many fours of rows w of "+what+", each of 16 steps values. Strides are in bytes.")
	y, ys, x, xs, w, ws, fours, steps := a.param("y"), a.param("yStride"), a.param("x"), a.param("xStride"), a.param("w"), a.param("wStride"), a.param("fours"), a.param("steps")
	rx, rw := rows{stride: xs, s3: a.triple(xs)}, rows{stride: ws, s3: a.triple(ws)}
	rx.p[0], rw.p[0] = x, w
	back := a.GP64()
	a.MOVQ(steps, back)
	a.SHLQ(operand.U8(6), back)
	a.loop("rows", fours, func() {
		acc, k := a.zmms(16), a.GP64()
		step := func(first bool) {
			v := a.zmms(4)
			for j := range v {
				a.values(half, rw.row(0, j, 0), v[j])
			}
			for i := range 4 {
				in := a.ZMM()
				a.VMOVUPS(rx.row(0, i, 0), in)
				for j := range v {
					if first {
						a.VMULPS(v[j], in, acc[4*i+j])
						continue
					}
					t := a.ZMM()
					a.VMULPS(v[j], in, t)
					a.VADDPS(t, acc[4*i+j], acc[4*i+j])
				}
			}
			a.ADDQ(operand.U8(64), x)
			a.ADDQ(operand.U8(bytes), w)
		}
		step(true)
		a.MOVQ(steps, k)
		a.DECQ(k)
		a.JZ(operand.LabelRef("sums"))
		a.loop("steps", k, func() { step(false) })
		a.Label("sums")
		s := a.tree(acc)
		to := a.GP64()
		a.MOVQ(y, to)
		for i := range 4 {
			if i == 0 {
				a.VMOVUPS(s.AsX(), at(to, 0))
			} else {
				a.VEXTRACTF32X4(operand.U8(i), s, at(to, 0))
			}
			a.ADDQ(ys, to)
		}
		a.ADDQ(operand.U8(16), y)
		a.SUBQ(back, x)
		a.backBy(back, half, w)
		a.LEAQ(operand.Mem{Base: w, Index: ws, Scale: 4}, w)
	})
	a.done()
}

func (a *asm) triple(r reg.GPVirtual) reg.GPVirtual {
	t := a.GP64()
	a.LEAQ(operand.Mem{Base: r, Index: r, Scale: 2}, t)
	return t
}

// backBy takes back what 16 steps values advanced p.
func (a *asm) backBy(floats reg.GPVirtual, half bool, p reg.GPVirtual) {
	if !half {
		a.SUBQ(floats, p)
		return
	}
	a.SHRQ(operand.U8(1), floats)
	a.SUBQ(floats, p)
	a.SHLQ(operand.U8(1), floats)
}

func dots16x1(a *asm, half bool) {
	name, pointer, what, bytes := stored("dots16x1", half)
	a.function(name, "func(y, x *float32, w "+pointer+", wStride, sixteens, steps int)",
		name+" is y[j] = x w[j] for so many sixteens of rows w of "+what+", each of 16 steps values. The stride is in bytes.")
	y, x, ws, sixteens, steps := a.param("y"), a.param("x"), a.param("wStride"), a.param("sixteens"), a.param("steps")
	r := rows{stride: ws, s3: a.triple(ws)}
	r.p[0] = a.param("w")
	for i := 1; i < 4; i++ {
		r.p[i] = a.GP64()
		a.LEAQ(operand.Mem{Base: r.p[i-1], Index: ws, Scale: 4}, r.p[i])
	}
	back, ahead := a.GP64(), a.GP64()
	a.MOVQ(steps, back)
	a.SHLQ(operand.U8(6), back)
	a.MOVQ(ws, ahead)
	a.SHLQ(operand.U8(4), ahead)
	a.backBy(back, half, ahead)
	a.loop("rows", sixteens, func() {
		acc, k := a.zmms(16), a.GP64()
		step := func(first bool) {
			in := a.ZMM()
			a.VMOVUPS(at(x, 0), in)
			for j := range acc {
				t := acc[j]
				if !first {
					t = a.ZMM()
				}
				if half {
					a.values(half, r.row(j/4, j%4, 0), t)
					a.VMULPS(t, in, t)
				} else {
					a.VMULPS(r.row(j/4, j%4, 0), in, t)
				}
				if !first {
					a.VADDPS(t, acc[j], acc[j])
				}
			}
			a.ADDQ(operand.U8(64), x)
			r.next(a, bytes)
		}
		step(true)
		a.MOVQ(steps, k)
		a.DECQ(k)
		a.JZ(operand.LabelRef("sums"))
		a.loop("steps", k, func() { step(false) })
		a.Label("sums")
		a.VMOVUPS(a.tree(acc), at(y, 0))
		a.ADDQ(operand.U8(64), y)
		a.SUBQ(back, x)
		for _, p := range r.p {
			a.ADDQ(ahead, p)
		}
	})
	a.done()
}

// sum adds the lanes of one register, halves first, into its first lane.
func (a *asm) sum(v reg.VecVirtual) {
	t := a.ZMM()
	a.VEXTRACTF64X4(operand.U8(1), v, t.AsY())
	a.VADDPS(t.AsY(), v.AsY(), v.AsY())
	a.VEXTRACTF32X4(operand.U8(1), v.AsY(), t.AsX())
	a.VADDPS(t.AsX(), v.AsX(), v.AsX())
	a.VPERMILPS(operand.U8(0x0e), v.AsX(), t.AsX())
	a.VADDPS(t.AsX(), v.AsX(), v.AsX())
	a.VPERMILPS(operand.U8(0x01), v.AsX(), t.AsX())
	a.VADDPS(t.AsX(), v.AsX(), v.AsX())
}

func dot(a *asm) {
	a.function("dot16", "func(x, y *float32, steps int) float32", "dot16 is the sum of x y over 16 steps values.")
	x, y, n, acc := a.param("x"), a.param("y"), a.param("steps"), a.zero()
	a.loop("steps", n, func() {
		t := a.ZMM()
		a.VMOVUPS(at(x, 0), t)
		a.VMULPS(at(y, 0), t, t)
		a.VADDPS(t, acc, acc)
		a.ADDQ(operand.U8(64), x)
		a.ADDQ(operand.U8(64), y)
	})
	a.sum(acc)
	a.give(a.ReturnIndex(0), acc)
	a.done()
}

// expNumbers are the numbers of Exp, see funcs.go: in registers where there are
// enough.
type expNumbers struct {
	log2e, round, ln2, rest, one, low, high, inf operand.Op
	p                                            []operand.Op
}

func (a *asm) float(f float64) operand.Op {
	bits := math.Float32bits(float32(f))
	if a.lanes == 16 {
		return a.broadcast(bits)
	}
	return a.constant(bits)
}

func (a *asm) expNumbers() expNumbers {
	n := expNumbers{
		log2e: a.float(1 / math.Ln2), round: a.float(3 << 22), ln2: a.float(0.693359375), rest: a.float(-2.12194440e-4),
		one: a.float(1), low: a.float(-87.33), high: a.float(88.72), inf: a.float(math.Inf(1)),
	}
	for _, f := range []float64{1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		n.p = append(n.p, a.float(f))
	}
	return n
}

// exp is Exp of each lane of x.
func (a *asm) exp(c *expNumbers, x reg.VecVirtual) reg.VecVirtual {
	t, n, r, p, u := a.vec(), a.vec(), a.vec(), a.vec(), a.vec()
	a.VMULPS(c.log2e, x, t)
	a.VADDPS(c.round, t, t)
	a.VSUBPS(c.round, t, n)
	a.VMULPS(c.ln2, n, u)
	a.VSUBPS(u, x, r)
	a.VMULPS(c.rest, n, u)
	a.VSUBPS(u, r, r)
	a.VMULPS(c.p[0], r, p)
	for _, f := range c.p[1:] {
		a.VADDPS(f, p, p)
		a.VMULPS(r, p, p)
	}
	a.VMULPS(r, p, p)
	a.VADDPS(r, p, p)
	a.VADDPS(c.one, p, p)
	a.VPSUBD(c.round, t, t)
	a.VPSLLD(operand.U8(23), t, t)
	a.VPADDD(t, p, p)
	const unordered, notLess, greater = 0x03, 0x15, 0x1e
	if a.lanes == 8 {
		a.VCMPPS(operand.U8(greater), c.high, x, u)
		a.VBLENDVPS(u, c.inf, p, p)
		a.VCMPPS(operand.U8(unordered), x, x, u)
		a.VBLENDVPS(u, x, p, p)
		a.VCMPPS(operand.U8(notLess), c.low, x, u)
		a.VANDPS(u, p, p)
		return p
	}
	k := a.K()
	a.VCMPPS(operand.U8(greater), c.high, x, k)
	a.VMOVAPS(c.inf, k, p)
	a.VCMPPS(operand.U8(unordered), x, x, k)
	a.VMOVAPS(x, k, p)
	a.VCMPPS(operand.U8(notLess), c.low, x, k) // or unordered
	a.VMOVAPS_Z(p, k, p)
	return p
}

func softmax(a *asm) {
	a.function("softmax64", "func(p *float32, n *int, top, sum *float32, queries int, scale float32)",
		"softmax64 scales p[:n], n at most 64, takes exp(p - top), and sums that, for so many rows p. It writes all 64.")
	p, n, top, sum, queries := a.param("p"), a.param("n"), a.param("top"), a.param("sum"), a.param("queries")
	scale := a.ZMM()
	a.VBROADCASTSS(a.mustAddr("scale"), scale)
	c := a.expNumbers()
	minus := a.broadcast(math.Float32bits(float32(math.Inf(-1))))
	a.loop("query", queries, func() {
		// Lanes from n on are -inf, so that exp gives 0.
		mask, shift, best := a.GP64(), a.GP64(), a.ZMM()
		a.MOVQ(operand.I32(-1), mask)
		a.MOVQ(operand.I32(64), shift)
		a.SUBQ(at(n, 0), shift)
		a.SHRXQ(shift, mask, mask)
		v := a.zmms(4)
		for i := range v {
			k := a.K()
			a.KMOVW(mask.As32(), k)
			if i < 3 {
				a.SHRQ(operand.U8(16), mask)
			}
			t := a.ZMM()
			a.VMOVAPS(minus, v[i])
			a.VMOVUPS(at(p, 64*i), t)
			a.VMULPS(scale, t, k, v[i])
			if i == 0 {
				a.VMOVAPS(v[i], best)
			} else {
				a.VMAXPS(v[i], best, best)
			}
		}
		t := a.ZMM()
		for _, imm := range []uint8{0x4e, 0xb1} {
			a.VSHUFF32X4(operand.U8(imm), best, best, t)
			a.VMAXPS(t, best, best)
		}
		for _, imm := range []uint8{0x4e, 0xb1} {
			a.VPERMILPS(operand.U8(imm), best, t)
			a.VMAXPS(t, best, best)
		}
		a.VMOVSS(best.AsX(), at(top, 0))
		acc := a.zero()
		for i := range v {
			a.VSUBPS(best, v[i], v[i])
			e := a.exp(&c, v[i])
			a.VMOVUPS(e, at(p, 64*i))
			a.VADDPS(e, acc, acc)
		}
		a.sum(acc)
		a.VMOVSS(acc.AsX(), at(sum, 0))
		a.ADDQ(operand.I32(256), p)
		a.ADDQ(operand.U8(8), n)
		a.ADDQ(operand.U8(4), top)
		a.ADDQ(operand.U8(4), sum)
	})
	a.done()
}

// mustAddr is a parameter in memory.
func (a *asm) mustAddr(name string) operand.Mem { return address(a.Param(name)) }

func address(c gotypes.Component) operand.Mem {
	b, err := c.Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// give stores the first lane of v as a result.
func (a *asm) give(result gotypes.Component, v reg.VecVirtual) { a.VMOVSS(v.AsX(), address(result)) }

func mix(a *asm, queries, width int, half bool) {
	name, pointer, what, bytes := stored(fmt.Sprintf("mix%dx%d", queries, 16*width), half)
	more := "="
	if half {
		more = "+="
	}
	a.function(name, "func(out *float32, outStride int, p *float32, pStride int, v "+pointer+", vStride, n int)",
		fmt.Sprintf("%s is out[i][:%d] %s Σ p[i][j] v[j] over j < n, in index order, for %d rows p, v of %s. Strides are in bytes.", name, 16*width, more, queries, what))
	out, os, p, ps, v, vs, n := a.param("out"), a.param("outStride"), a.param("p"), a.param("pStride"), a.param("v"), a.param("vStride"), a.param("n")
	r := rows{stride: ps, s3: a.triple(ps)}
	r.p[0] = p
	acc := make([][]reg.VecVirtual, queries)
	to := out
	if half && queries > 1 {
		to = a.GP64()
		a.MOVQ(out, to)
	}
	for i := range acc {
		for d := range width {
			acc[i] = append(acc[i], a.ZMM())
			if half { // the sum goes on: what came before lies in another page
				a.VMOVUPS(at(to, 64*d), acc[i][d])
			} else {
				a.VPXORD(acc[i][d], acc[i][d], acc[i][d])
			}
		}
		if half && i < queries-1 {
			a.ADDQ(os, to)
		}
	}
	a.loop("rows", n, func() {
		w := a.zmms(width)
		for d := range w {
			a.values(half, at(v, bytes*d), w[d])
		}
		for i := range acc {
			f := a.ZMM()
			a.VBROADCASTSS(r.row(0, i, 0), f)
			for d := range w {
				t := a.ZMM()
				a.VMULPS(f, w[d], t)
				a.VADDPS(t, acc[i][d], acc[i][d])
			}
		}
		a.ADDQ(operand.U8(4), p)
		a.ADDQ(vs, v)
	})
	for i := range acc {
		for d, s := range acc[i] {
			a.VMOVUPS(s, at(out, 64*d))
		}
		if i < queries-1 {
			a.ADDQ(os, out)
		}
	}
	a.done()
}

// each emits a loop over values at the pointers, whose number is in sixteens.
func (a *asm) each(n reg.GPVirtual, body func(), pointers ...reg.GPVirtual) {
	if a.lanes == 8 {
		a.ADDQ(n, n)
	}
	a.loop("values", n, func() {
		body()
		for _, p := range pointers {
			a.ADDQ(operand.U8(4*a.lanes), p)
		}
	})
	a.done()
}

func merge(a *asm) {
	a.function(a.name("merge"), "func(out, part *float32, sixteens int, f, h float32)", a.name("merge")+" is out = out f + part h.")
	out, part, n, f, h := a.param("out"), a.param("part"), a.param("sixteens"), a.vec(), a.vec()
	a.VBROADCASTSS(a.mustAddr("f"), f)
	a.VBROADCASTSS(a.mustAddr("h"), h)
	a.each(n, func() {
		s, t := a.vec(), a.vec()
		a.VMULPS(at(out, 0), f, s)
		a.VMULPS(at(part, 0), h, t)
		a.VADDPS(t, s, s)
		a.VMOVUPS(s, at(out, 0))
	}, out, part)
}

func exps(a *asm) {
	a.function(a.name("exp"), "func(dst, src *float32, sixteens int, top, divisor float32)", a.name("exp")+" is dst = exp((src - top) ÷ divisor).")
	dst, src, n, top, div := a.param("dst"), a.param("src"), a.param("sixteens"), a.vec(), a.vec()
	a.VBROADCASTSS(a.mustAddr("top"), top)
	a.VBROADCASTSS(a.mustAddr("divisor"), div)
	c := a.expNumbers()
	a.each(n, func() {
		x := a.vec()
		a.VMOVUPS(at(src, 0), x)
		a.VSUBPS(top, x, x)
		a.VDIVPS(div, x, x)
		a.VMOVUPS(a.exp(&c, x), at(dst, 0))
	}, dst, src)
}

func swiglu(a *asm) {
	a.function(a.name("swiglu"), "func(dst, gate, up *float32, sixteens int)", a.name("swiglu")+" is dst = gate ÷ (1 + exp(-gate)) × up.")
	dst, gate, up, n := a.param("dst"), a.param("gate"), a.param("up"), a.param("sixteens")
	c, sign := a.expNumbers(), a.float(math.Copysign(0, -1))
	a.each(n, func() {
		g, x := a.vec(), a.vec()
		a.VMOVUPS(at(gate, 0), g)
		a.VXORPS(sign, g, x)
		e := a.exp(&c, x)
		a.VADDPS(c.one, e, e)
		a.VDIVPS(e, g, g)
		a.VMULPS(at(up, 0), g, g)
		a.VMOVUPS(g, at(dst, 0))
	}, dst, gate, up)
}

func norm(a *asm) {
	a.function(a.name("scale"), "func(dst, x, w *float32, sixteens int, f float32)", a.name("scale")+" is dst = (x f) w.")
	dst, x, w, n, f := a.param("dst"), a.param("x"), a.param("w"), a.param("sixteens"), a.vec()
	a.VBROADCASTSS(a.mustAddr("f"), f)
	a.each(n, func() {
		v := a.vec()
		a.VMULPS(at(x, 0), f, v)
		a.VMULPS(at(w, 0), v, v)
		a.VMOVUPS(v, at(dst, 0))
	}, dst, x, w)
}

func add(a *asm) {
	a.function(a.name("add"), "func(dst, x *float32, sixteens int)", a.name("add")+" is dst += x.")
	dst, x, n := a.param("dst"), a.param("x"), a.param("sixteens")
	a.each(n, func() {
		v := a.vec()
		a.VMOVUPS(at(dst, 0), v)
		a.VADDPS(at(x, 0), v, v)
		a.VMOVUPS(v, at(dst, 0))
	}, dst, x)
}

func widen(a *asm) {
	a.function(a.name("widenHalves"), "func(dst *float32, src *byte, sixteens int)", a.name("widenHalves")+" widens halves.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("sixteens")
	a.each(n, func() {
		v := a.vec()
		a.VCVTPH2PS(at(src, 0), v)
		a.VMOVUPS(v, at(dst, 0))
		a.ADDQ(operand.U8(2*a.lanes), src)
	}, dst)
}

func widenBrain(a *asm) {
	a.function(a.name("widenBrain"), "func(dst *float32, src *byte, sixteens int)", a.name("widenBrain")+" widens upper halves of floats.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("sixteens")
	a.each(n, func() {
		v := a.vec()
		a.VPMOVZXWD(at(src, 0), v)
		a.VPSLLD(operand.U8(16), v, v)
		a.VMOVUPS(v, at(dst, 0))
		a.ADDQ(operand.U8(2*a.lanes), src)
	}, dst)
}

func widenBlocks(a *asm) {
	a.function(a.name("widenBlocks"), "func(dst *float32, src *byte, blocks int)", a.name("widenBlocks")+" widens blocks of Q8_0.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("blocks")
	a.loop("block", n, func() {
		d, half := a.vec(), a.GP32()
		a.MOVWLZX(at(src, 0), half)
		a.VMOVD(half, d.AsX())
		a.VCVTPH2PS(d.AsX(), d.AsX())
		a.VBROADCASTSS(d.AsX(), d)
		for i := 0; i < 32; i += a.lanes {
			v := a.vec()
			a.VPMOVSXBD(at(src, 2+i), v)
			a.VCVTDQ2PS(v, v)
			a.VMULPS(d, v, v)
			a.VMOVUPS(v, at(dst, 4*i))
		}
		a.ADDQ(operand.U8(34), src)
		a.ADDQ(operand.U8(128), dst)
	})
	a.done()
}

// roundBlocks does what putQ8_0 does.
func roundBlocks(a *asm) {
	a.function(a.name("roundBlocks"), "func(dst *byte, src *float32, blocks int)", a.name("roundBlocks")+" rounds to blocks of Q8_0.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("blocks")
	nan := a.GP32()
	a.MOVL(operand.U32(0x7e00), nan)
	a.loop("block", n, func() {
		var v []reg.VecVirtual
		top, t := a.vec(), a.vec()
		for i := 0; i < 32; i += a.lanes {
			v = append(v, a.vec())
			a.VMOVUPS(at(src, 4*i), v[len(v)-1])
			if i == 0 {
				a.VANDPS(a.constant(0x7fffffff), v[0], top)
				continue
			}
			a.VANDPS(a.constant(0x7fffffff), v[len(v)-1], t)
			a.VPMAXSD(t, top, top)
		}
		a.largest(top)
		bits, h, valid := a.GP32(), a.GP32(), a.GP32()
		a.VMOVD(top.AsX(), bits)
		a.VDIVPS(a.constant(0x42fe0000), top.AsX(), t.AsX())
		a.VCVTPS2PH(operand.U8(0), t.AsX(), t.AsX())
		a.VMOVD(t.AsX(), h)
		a.MOVWLZX(h.As16(), h)
		a.CMPL(bits, operand.U32(0x7f800000))
		a.CMOVLCC(nan, h)
		a.MOVW(h.As16(), at(dst, 0))
		inv, keep := a.vec(), a.vec()
		a.VMOVD(h, inv.AsX())
		a.VCVTPH2PS(inv.AsX(), inv.AsX())
		a.VMOVUPS(a.constant(0x3f800000), t.AsX())
		a.VDIVPS(inv.AsX(), t.AsX(), inv.AsX())
		a.VBROADCASTSS(inv.AsX(), inv)
		a.DECL(h) // 0 has no q, nor has what is not finite
		a.XORL(valid, valid)
		a.CMPL(h, operand.U32(0x7bff))
		a.SBBL(valid, valid)
		a.VMOVD(valid, keep.AsX())
		a.VPBROADCASTD(keep.AsX(), keep)
		for _, q := range v {
			a.VMULPS(inv, q, q)
			a.VCVTPS2DQ(q, q)
			a.VPMAXSD(a.constant(0xffffff81), q, q)
			a.VPMINSD(a.constant(127), q, q)
			a.VANDPS(keep, q, q)
		}
		a.storeBytes(v, at(dst, 2))
		a.ADDQ(operand.U8(34), dst)
		a.ADDQ(operand.U8(128), src)
	})
	a.done()
}

// storeBytes stores the lanes of v, 32 in all, as bytes.
func (a *asm) storeBytes(v []reg.VecVirtual, to operand.Mem) {
	if a.lanes == 16 {
		for _, q := range v {
			a.VPMOVDB(q, to)
			to.Disp += 16
		}
		return
	}
	a.VPACKSSDW(v[1], v[0], v[0])
	a.VPACKSSDW(v[3], v[2], v[2])
	a.VPACKSSWB(v[2], v[0], v[0])
	order := a.vec()
	a.VMOVDQU(a.table("fours", func(lane int) uint32 { return uint32(lane/2 + lane%2*4) }), order)
	a.VPERMD(v[0], order, v[0])
	a.VMOVDQU(v[0], to)
}

// largest is the largest lane of v, in the first lane.
func (a *asm) largest(v reg.VecVirtual) reg.VecVirtual {
	t := a.vec()
	if a.lanes == 16 {
		a.VEXTRACTI64X4(operand.U8(1), v, t.AsY())
		a.VPMAXSD(t.AsY(), v.AsY(), v.AsY())
	}
	a.VEXTRACTI128(operand.U8(1), v.AsY(), t.AsX())
	a.VPMAXSD(t.AsX(), v.AsX(), v.AsX())
	for _, imm := range []uint8{0x4e, 0xb1} {
		a.VPSHUFD(operand.U8(imm), v.AsX(), t.AsX())
		a.VPMAXSD(t.AsX(), v.AsX(), v.AsX())
	}
	return v
}

func round(a *asm) {
	a.function(a.name("roundHalves"), "func(dst *byte, src *float32, sixteens int)", a.name("roundHalves")+" rounds to halves, ties to even.")
	dst, src, n := a.param("dst"), a.param("src"), a.param("sixteens")
	a.each(n, func() {
		v := a.vec()
		a.VMOVUPS(at(src, 0), v)
		a.VCVTPS2PH(operand.U8(0), v, at(dst, 0))
		a.ADDQ(operand.U8(2*a.lanes), dst)
	}, src)
}

func rope(a *asm) {
	a.function("rope16", "func(v, cos, sin *float32, sixteens int)", "rope16 rotates neighbouring pairs.")
	v, cos, sin, n := a.param("v"), a.param("cos"), a.param("sin"), a.param("sixteens")
	twice := a.StaticGlobal("twice")
	a.DataAttributes(rodata)
	for i := range 16 {
		a.AppendDatum(operand.U32(i / 2))
	}
	index, even, k := a.ZMM(), a.GP32(), a.K()
	a.VMOVDQU32(twice, index)
	a.MOVL(operand.U32(0x5555), even)
	a.KMOVW(even, k)
	a.each(n, func() {
		x, y, c, s := a.ZMM(), a.ZMM(), a.ZMM(), a.ZMM()
		a.VMOVUPS(at(v, 0), x)
		a.VMOVUPS(at(cos, 0), c.AsY())
		a.VMOVUPS(at(sin, 0), s.AsY())
		a.VPERMPS(c, index, c)
		a.VPERMPS(s, index, s)
		a.VPERMILPS(operand.U8(0xb1), x, y)
		a.VMULPS(c, x, x)
		a.VMULPS(s, y, y)
		a.VADDPS(y, x, c)
		a.VSUBPS(y, x, k, c)
		a.VMOVUPS(c, at(v, 0))
		a.ADDQ(operand.U8(32), cos)
		a.ADDQ(operand.U8(32), sin)
	}, v)
}

func ropeHalves(a *asm) {
	a.function(a.name("ropeHalves"), "func(x, y, cos, sin *float32, sixteens int)", a.name("ropeHalves")+" rotates pairs of x and y.")
	x, y, cos, sin, n := a.param("x"), a.param("y"), a.param("cos"), a.param("sin"), a.param("sixteens")
	a.each(n, func() {
		u, v, c, s, t := a.vec(), a.vec(), a.vec(), a.vec(), a.vec()
		a.VMOVUPS(at(x, 0), u)
		a.VMOVUPS(at(y, 0), v)
		a.VMOVUPS(at(cos, 0), c)
		a.VMOVUPS(at(sin, 0), s)
		a.VMULPS(s, v, t)
		a.VMULPS(s, u, s)
		a.VMULPS(c, u, u)
		a.VMULPS(c, v, v)
		a.VSUBPS(t, u, u)
		a.VADDPS(v, s, s)
		a.VMOVUPS(u, at(x, 0))
		a.VMOVUPS(s, at(y, 0))
	}, x, y, cos, sin)
}
