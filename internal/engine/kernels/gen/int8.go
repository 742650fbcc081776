package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Products of quantised weights. A lane is an output: 16 rows of weights are
// laid out by a pack function so that 16 lanes hold four neighbouring weights
// of 16 rows, and meet the four activations that belong to them, broadcast.
// See simd.go for the layouts.

const (
	packedBytes = 8*64 + 64 + 64 // one block of 16 rows: weights, d, m
	recordBytes = 192            // one block of 4 vectors
	offScale    = 128
	offSum      = offScale + 16
	offBias     = offSum + 16
)

func avx512(a *asm) {
	for i := range blockForms {
		pack(a, &blockForms[i])
	}
	for i := range blockForms {
		for _, cols := range []int{1, 2, 4} {
			direct(a, &blockForms[i], cols)
		}
	}
	for _, cols := range []int{12, 4, 1} {
		mul(a, cols, false)
		mul(a, cols, true)
	}
	quantise(a)
	for i := range superForms {
		packSuper(a, &superForms[i])
		directSuper(a, &superForms[i])
	}
	for _, cols := range []int{4, 1} {
		mulSuper(a, cols, 8)
		mulSuper(a, cols, 16)
	}
	quantiseSuper(a)
	sums512(a)
	floats(a)
}

// rows addresses the current block of 16 rows.
type rows struct {
	p          [4]reg.GPVirtual // rows 0, 4, 8, 12
	stride, s3 reg.GPVirtual
	lane       [3]reg.OpmaskVirtual // lanes 1, 2, 3
	index      reg.VecVirtual       // AVX2, where there are 8 rows: their distances
}

func newRows(a *asm, src, stride reg.GPVirtual) rows {
	r := rows{stride: stride, s3: a.triple(stride)}
	r.p[0] = src
	for i := 1; i < 4; i++ {
		r.p[i] = a.GP64()
		a.LEAQ(operand.Mem{Base: r.p[i-1], Index: r.stride, Scale: 4}, r.p[i])
	}
	for i := range r.lane {
		bit := a.GP32()
		r.lane[i] = a.K()
		a.MOVL(operand.U32(2<<i), bit)
		a.KMOVW(bit, r.lane[i])
	}
	return r
}

// row is byte disp of the current block of row 4 l + j.
func (r *rows) row(l, j, disp int) operand.Mem {
	m := operand.Mem{Base: r.p[l], Disp: disp}
	switch j {
	case 1:
		m.Index, m.Scale = r.stride, 1
	case 2:
		m.Index, m.Scale = r.stride, 2
	case 3:
		m.Index, m.Scale = r.s3, 1
	}
	return m
}

func (r *rows) next(a *asm, bytes int) {
	for _, p := range r.p {
		a.ADDQ(operand.I32(bytes), p)
	}
}

// ahead is where the next 16 rows begin.
func (r *rows) ahead(a *asm) reg.GPVirtual {
	p := a.GP64()
	a.MOVQ(r.stride, p)
	a.SHLQ(operand.U8(4), p)
	a.ADDQ(r.p[0], p)
	return p
}

// quads loads 16 bytes of each row, and gives four registers: register g has
// bytes 4g to 4g+3 of all rows, one row a lane.
func (r *rows) quads(a *asm, disp int) []reg.VecVirtual {
	if a.lanes == 8 {
		return quads256(a, r, disp)
	}
	v := a.zmms(4)
	for j := range v {
		a.VBROADCASTI32X4(r.row(0, j, disp), v[j])
		a.VINSERTI32X4(operand.U8(1), r.row(1, j, disp), v[j], v[j])
		a.VINSERTI32X4(operand.U8(2), r.row(2, j, disp), v[j], v[j])
		a.VINSERTI32X4(operand.U8(3), r.row(3, j, disp), v[j], v[j])
	}
	t, out := a.zmms(4), a.zmms(4)
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

// words loads four bytes of each row, one row a lane. A gather would cost three
// times as much: it is one of the instructions that processors were made slow
// in, to keep secrets.
func (r *rows) words(a *asm, disp int) reg.VecVirtual {
	if a.lanes == 8 {
		return gather256(a, r, disp)
	}
	v := a.ZMM()
	for l := range r.p {
		four := a.XMM()
		if l == 0 {
			four = v.AsX().(reg.VecVirtual)
		}
		a.VPBROADCASTD(r.row(l, 0, disp), four)
		for j, k := range r.lane {
			a.VPBROADCASTD(r.row(l, j+1, disp), k, four)
		}
		if l > 0 {
			a.VINSERTI32X4(operand.U8(l), four, v, v)
		}
	}
	return v
}

// scales are d, and m where the format has it, of each row's block.
func (r *rows) scales(a *asm, min bool) (d, m reg.VecVirtual) {
	v := r.words(a, 0)
	d, m = a.ZMM(), a.ZMM()
	a.VPMOVDW(v, d.AsY())
	a.VCVTPH2PS(d.AsY(), d)
	if min {
		a.VPSRLD(operand.U8(16), v, v)
		a.VPMOVDW(v, m.AsY())
		a.VCVTPH2PS(m.AsY(), m)
	}
	return d, m
}

const (
	packSignature   = "func(dst, src *byte, stride, blocks int)"
	directSignature = "func(y *float32, stride int, w *byte, wStride int, x *byte, blocks int)"
)

// blockForm is a block of 32 weights as it lies in the file: d, then m where
// there is one, fifth bits where there are any, and weights of a nibble or a
// byte. What is packed is the weight plus add.
type blockForm struct {
	name    string
	bytes   int
	min     bool
	fifths  int // where they are, or 0
	weights int // where they are
	add     uint8
	wide    bool // a byte a weight
}

var blockForms = []blockForm{
	{name: "Q4_0", bytes: 18, weights: 2, add: 128 - 8},
	{name: "Q4_1", bytes: 20, weights: 4, min: true},
	{name: "Q5_0", bytes: 22, weights: 6, fifths: 2, add: 128 - 16},
	{name: "Q5_1", bytes: 24, weights: 8, fifths: 4, min: true},
	{name: "Q8_0", bytes: 34, weights: 2, add: 128, wide: true},
}

// prefetch asks for a block's share of the next 16 rows, which memory delivers
// while these are computed: sixteen streams are more than a processor foresees.
func (a *asm) prefetch(blockBytes int, ahead reg.GPVirtual) {
	for line := 0; line < 16*blockBytes; line += 64 {
		a.PREFETCHT1(at(ahead, line))
	}
	a.ADDQ(operand.I32(16*blockBytes), ahead)
}

// lack is what unpacked weights have more than those of the file, where there
// is no minimum.
func (f *blockForm) lack() int {
	if f.wide || f.min {
		return 0
	}
	return 128 - int(f.add)
}

func pack(a *asm, f *blockForm) {
	a.function(a.name("pack"+f.name), packSignature, a.name("pack"+f.name)+" packs 16 rows, stride bytes apart, of so many blocks.")
	dst, r, n := a.param("dst"), newRows(a, a.param("src"), a.param("stride")), a.param("blocks")
	ahead := r.ahead(a)
	a.loop("block", n, func() {
		a.prefetch(f.bytes, ahead)
		f.unpack(a, &r, func(g int, v reg.VecVirtual) { f.store(a, v, g, at(dst, 0)) })
		d, m := r.scales(a, f.min)
		a.VMOVUPS(d, at(dst, 512))
		if f.min {
			a.VMOVUPS(m, at(dst, 576))
		}
		r.next(a, f.bytes)
		a.ADDQ(operand.I32(packedBytes), dst)
	})
	a.done()
}

// unpack gives the words of the current block of 16 rows to use: weights as
// they are in the file.
func (f *blockForm) unpack(a *asm, r *rows, use func(g int, v reg.VecVirtual)) {
	if f.wide {
		for half := range 2 {
			for g, v := range r.quads(a, f.weights+16*half) {
				use(4*half+g, v)
			}
		}
		return
	}
	var h reg.VecVirtual
	if f.fifths > 0 {
		h = r.words(a, f.fifths)
	}
	f.nibbles(a, r.quads(a, f.weights), h, use)
}

// direct is 16 rows times cols vectors of one group of four, over all blocks,
// straight from the file: for so few vectors, writing packed blocks and reading
// them again would cost more than the products.
func direct(a *asm, f *blockForm, cols int) {
	name := fmt.Sprintf("direct%sx%d", f.name, cols)
	a.function(name, directSignature,
		fmt.Sprintf("%s multiplies 16 rows, wStride bytes apart, by %d vectors: y[c][0:16], stride bytes apart.", name, cols))
	x, n, r := a.param("x"), a.param("blocks"), newRows(a, a.param("w"), a.param("wStride"))
	ahead := r.ahead(a)
	sum, chains := a.zmms(cols), 1
	for _, s := range sum {
		a.VPXORD(s, s, s)
	}
	if cols < 4 {
		chains = 2 // sums of integers, to be added: one would have to wait for itself
	}
	a.loop("block", n, func() {
		a.prefetch(f.bytes, ahead)
		acc := a.zmms(cols * chains)
		for i, v := range acc {
			a.VPXORD(v, v, v)
			if i < cols && !f.min {
				a.VPBROADCASTD(at(x, offBias+4*i), v)
				switch f.lack() {
				case 8:
					a.VPSRAD(operand.U8(4), v, v)
				case 16:
					a.VPSRAD(operand.U8(3), v, v)
				}
			}
		}
		f.unpack(a, &r, func(g int, v reg.VecVirtual) {
			if f.wide {
				a.VPADDB(a.constant(uint32(f.add)*0x01010101), v, v)
			}
			for c := range cols {
				a.vpdpbusd(at(x, 16*g+4*c), v, acc[g%chains*cols+c])
			}
		})
		for i := cols; i < len(acc); i++ {
			a.VPADDD(acc[i], acc[i-cols], acc[i-cols])
		}
		d, m := r.scales(a, f.min)
		a.addBlock(sum, acc[:cols], d, m, f.min, func(c, disp int) operand.Mem { return at(x, disp+4*c) })
		r.next(a, f.bytes)
		a.ADDQ(operand.I32(recordBytes), x)
	})
	y, stride := a.param("y"), a.param("stride")
	for c, s := range sum {
		a.VMOVUPS(s, at(y, 0))
		if c < cols-1 {
			a.ADDQ(stride, y)
		}
	}
	a.done()
}

// addBlock adds a block's sums to those of 16 rows and some vectors. d and m
// are the rows'; of finds the numbers of a vector.
func (a *asm) addBlock(sum, isum []reg.VecVirtual, d, m reg.VecVirtual, min bool, of func(c, disp int) operand.Mem) {
	t, u := a.ZMM(), a.ZMM()
	for c, v := range isum {
		a.VCVTDQ2PS(v, v)
		a.VMULPS_BCST(of(c, offScale), d, t)
		a.VMULPS(t, v, v)
		if min {
			a.VMULPS_BCST(of(c, offSum), m, u)
			a.VADDPS(u, v, v)
		}
		a.VADDPS(v, sum[c], sum[c])
	}
}

// nibbles gives the weights of four words of nibbles a row to use: low ones are
// weights 0 to 15. h is the fifth bits of each row.
func (f *blockForm) nibbles(a *asm, v []reg.VecVirtual, h reg.VecVirtual, use func(g int, v reg.VecVirtual)) {
	var up reg.VecVirtual
	if h != nil {
		up = a.vec() // a byte's first four bits in place of its last
		a.VPSLLW(operand.U8(4), h, up)
	}
	for g, v := range v {
		high := a.vec()
		a.VPSRLW(operand.U8(4), v, high)
		for i, w := range []reg.VecVirtual{v, high} {
			a.and(a.constant(0x0f0f0f0f), w)
			if h != nil {
				from, bits := up, a.vec()
				if g%2 == 1 {
					from = h
				}
				a.VPSHUFB(a.byteOf(uint32(2*i+g/2)), from, bits)
				a.and(a.constant(0x80402010), bits)
				a.VPMINUB(a.constant(0x10101010), bits, bits)
				a.VPADDB(bits, w, w)
			}
			use(g+4*i, w)
		}
	}
}

// store adds and stores word g of a packed block.
func (f *blockForm) store(a *asm, v reg.VecVirtual, g int, to operand.Mem) {
	if f.add != 0 {
		a.VPADDB(a.constant(uint32(f.add)*0x01010101), v, v)
	}
	to.Disp += 64 * g
	if a.lanes == 16 {
		a.VMOVDQU32(v, to)
	} else {
		a.VMOVDQU(v, to)
	}
}

func (a *asm) and(m operand.Mem, v reg.VecVirtual) {
	if a.lanes == 16 {
		a.VPANDD(m, v, v)
	} else {
		a.VPAND(m, v, v)
	}
}

// mul is 16 packed rows times cols vectors, over all blocks.
func mul(a *asm, cols int, min bool) {
	name := fmt.Sprintf("mulBias%d", cols)
	if min {
		name = fmt.Sprintf("mulMin%d", cols)
	}
	a.function(name, "func(y *float32, stride int, w, x *byte, group, blocks int)",
		fmt.Sprintf("%s multiplies 16 packed rows by %d vectors: y[c][0:16], stride bytes apart; groups of 4 vectors are group bytes apart.", name, cols))
	y, stride, w, group, n := a.param("y"), a.param("stride"), a.param("w"), a.param("group"), a.param("blocks")
	x := []reg.GPVirtual{a.param("x")}
	for len(x) < (cols+3)/4 {
		p := a.GP64()
		a.LEAQ(operand.Mem{Base: x[len(x)-1], Index: group, Scale: 1}, p)
		x = append(x, p)
	}
	of := func(c, disp int) operand.Mem { return at(x[c/4], disp+c%4*4) }
	sum, acc := a.zmms(cols), a.zmms(cols)
	for _, s := range sum {
		a.VPXORD(s, s, s)
	}
	a.loop("block", n, func() {
		for c, v := range acc {
			if min {
				a.VPXORD(v, v, v)
			} else {
				a.VPBROADCASTD(of(c, offBias), v)
			}
		}
		for g := range 8 {
			q := a.ZMM()
			a.VMOVDQU32(at(w, 64*g), q)
			for c, v := range acc {
				a.vpdpbusd(of(c, 16*g), q, v)
			}
		}
		d, m := a.ZMM(), a.ZMM()
		a.VMOVUPS(at(w, 512), d)
		if min {
			a.VMOVUPS(at(w, 576), m)
		}
		a.addBlock(sum, acc, d, m, min, of)
		for _, p := range x {
			a.ADDQ(operand.I32(recordBytes), p)
		}
		a.ADDQ(operand.I32(packedBytes), w)
	})
	for _, s := range sum {
		a.VMOVUPS(s, at(y, 0))
		a.ADDQ(stride, y)
	}
	a.done()
}

// quantise makes records of four vectors.
func quantise(a *asm) {
	a.function("quantise4", "func(dst *byte, src *float32, stride, blocks int)",
		"quantise4 makes the int8 form of so many blocks of four vectors, stride bytes apart.")
	dst, r, n := a.param("dst"), rows{}, a.param("blocks")
	r.p[0], r.stride, r.s3 = a.param("src"), a.param("stride"), a.GP64()
	a.LEAQ(operand.Mem{Base: r.stride, Index: r.stride, Scale: 2}, r.s3)
	abs := a.broadcast(0x7fffffff)
	a.loop("block", n, func() {
		v, top := a.zmms(8), a.zmms(4)
		for c := range 4 {
			t := a.ZMM()
			a.VMOVUPS(r.row(0, c, 0), v[2*c])
			a.VMOVUPS(r.row(0, c, 64), v[2*c+1])
			a.VPANDD(abs, v[2*c], top[c])
			a.VPANDD(abs, v[2*c+1], t)
			a.VPMAXSD(t, top[c], top[c])
		}
		m := a.reduce4(top, func(x, y reg.VecVirtual) { a.VPMAXSD(x.AsX(), y.AsX(), y.AsX()) }, func(x, y reg.VecVirtual) { a.VPMAXSD(x.AsY(), y.AsY(), y.AsY()) })
		scale, inv, small := a.scale127(m)
		a.VMOVUPS(scale.AsX(), at(dst, offScale))
		isum, q := a.zmms(4), a.xmms(8)
		for c := range 4 {
			f, keep := a.ZMM(), a.ZMM()
			a.VPSHUFD(operand.U8(c*0x55), inv.AsX(), f.AsX())
			a.VBROADCASTSS(f.AsX(), f)
			a.VPSHUFD(operand.U8(c*0x55), small.AsX(), keep.AsX())
			a.VPBROADCASTD(keep.AsX(), keep)
			for h := range 2 {
				u := v[2*c+h]
				a.VMULPS(f, u, u)
				a.VCVTPS2DQ(u, u)
				a.VPANDND(u, keep, u)
				a.VPMOVDB(u, q[c+4*h])
			}
			a.VPADDD(v[2*c], v[2*c+1], isum[c])
		}
		s := a.reduce4(isum, func(x, y reg.VecVirtual) { a.VPADDD(x.AsX(), y.AsX(), y.AsX()) }, func(x, y reg.VecVirtual) { a.VPADDD(x.AsY(), y.AsY(), y.AsY()) })
		f, zero := a.XMM(), a.XMM()
		a.VCVTDQ2PS(s.AsX(), f)
		a.VMULPS(scale.AsX(), f, f)
		a.VMOVUPS(f, at(dst, offSum))
		a.VPSLLD(operand.U8(7), s.AsX(), f)
		a.VPXORD(zero, zero, zero)
		a.VPSUBD(f, zero, f)
		a.VMOVUPS(f, at(dst, offBias))
		for h := range 2 {
			for g, x := range a.transpose(q[4*h : 4*h+4]) {
				a.VMOVUPS(x, at(dst, 64*h+16*g))
			}
		}
		a.ADDQ(operand.I32(128), r.p[0])
		a.ADDQ(operand.I32(recordBytes), dst)
	})
	a.done()
}

// scale127 is top ÷ 127 and 1 ÷ that, for four vectors. none is set for those
// that have no q: their scale is 0 or NaN.
func (a *asm) scale127(top reg.VecVirtual) (scale, inv, none reg.VecVirtual) {
	scale, inv, none = a.ZMM(), a.ZMM(), a.ZMM()
	x := func(v reg.VecVirtual) reg.Register { return v.AsX() }
	large, t, k := a.ZMM(), a.ZMM(), a.K()
	a.VDIVPS(a.constant(0x42fe0000), x(top), x(scale))
	a.VCMPPS(operand.U8(1), a.constant(0x00800000), x(scale), k) // less than
	a.VPMOVM2D(k, x(none))
	a.VPCMPGTD(a.constant(0x7f7fffff), x(top), k)
	a.VPMOVM2D(k, x(large))
	a.VPANDND(x(scale), x(none), x(scale))
	a.VMOVUPS(a.constant(0x3f800000), x(t))
	a.VDIVPS(x(scale), x(t), x(inv))
	a.VPANDD(a.constant(0x7fc00000), x(large), x(t))
	a.VPANDND(x(scale), x(large), x(scale))
	a.VPORD(x(t), x(scale), x(scale))
	a.VPORD(x(large), x(none), x(none))
	return scale, inv, none
}

// transpose transposes four registers of four words.
func (a *asm) transpose(v []reg.VecVirtual) []reg.VecVirtual {
	t, out := a.xmms(4), a.xmms(4)
	a.VPUNPCKLDQ(v[1].AsX(), v[0].AsX(), t[0])
	a.VPUNPCKHDQ(v[1].AsX(), v[0].AsX(), t[1])
	a.VPUNPCKLDQ(v[3].AsX(), v[2].AsX(), t[2])
	a.VPUNPCKHDQ(v[3].AsX(), v[2].AsX(), t[3])
	a.VPUNPCKLQDQ(t[2], t[0], out[0])
	a.VPUNPCKHQDQ(t[2], t[0], out[1])
	a.VPUNPCKLQDQ(t[3], t[1], out[2])
	a.VPUNPCKHQDQ(t[3], t[1], out[3])
	return out
}

// reduce4 combines the 16 lanes of each of four registers, in any order, and
// gives the results in one.
func (a *asm) reduce4(v []reg.VecVirtual, x, y func(from, into reg.VecVirtual)) reg.VecVirtual {
	for _, r := range v {
		t := a.ZMM()
		a.VEXTRACTI64X4(operand.U8(1), r, t.AsY())
		y(t, r)
		a.VEXTRACTI32X4(operand.U8(1), r.AsY(), t.AsX())
		x(t, r)
	}
	t := a.transpose(v)
	x(t[1], t[0])
	x(t[3], t[2])
	x(t[2], t[0])
	return t[0]
}
