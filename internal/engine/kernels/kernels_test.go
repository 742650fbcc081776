package kernels

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// The references below are the rules of docs/numerics.md in their plainest
// form; kernels must give their bits.

func refDot(a, b []float32) float32 {
	var s [16]float32
	for i := range a {
		s[i%16] += float32(a[i] * b[i])
	}
	for n := 8; n > 0; n /= 2 {
		for i := range n {
			s[i] += s[i+n]
		}
	}
	return s[0]
}

func refQuantise(x []float32) (q []int32, scale float32) {
	var amax float32
	for _, v := range x {
		amax = max(amax, float32(math.Abs(float64(v))))
	}
	scale = amax / 127
	if scale < 0x1p-126 {
		return make([]int32, len(x)), 0
	}
	inv := 1 / scale
	for _, v := range x {
		q = append(q, int32(math.RoundToEven(float64(float32(v*inv)))))
	}
	return q, scale
}

// refBlock is one block of weights in plain numbers: w[i] = d q[i] + m for
// blocks of 32, d q[i] - m n[i/32] for those of 256, q with their scales.
type refBlock struct {
	q    []int32
	d, m float32
	n    []int32
}

// refDecode follows the layouts of ggml, one weight at a time.
func refDecode(typ Type, b []byte) (k refBlock) {
	half := func(at int) float32 { return F16ToF32(binary.LittleEndian.Uint16(b[at:])) }
	nibble := func(at, i int) int32 { return int32(b[at+i%16]>>(i/16*4)) & 15 }
	fifth := func(at, i int) int32 { return int32(b[at+i/8]>>(i%8)&1) << 4 }
	k.d = half(0)
	for i := range formats[typ].block {
		switch typ {
		case Q8_0:
			k.q = append(k.q, int32(int8(b[2+i])))
		case Q4_0:
			k.q = append(k.q, nibble(2, i)-8)
		case Q4_1:
			k.q, k.m = append(k.q, nibble(4, i)), half(2)
		case Q5_0:
			k.q = append(k.q, (nibble(6, i)|fifth(2, i))-16)
		case Q5_1:
			k.q, k.m = append(k.q, nibble(8, i)|fifth(4, i)), half(2)
		case Q4_K:
			s, n := refSixes(b[4:16], i/32)
			k.q, k.n, k.m = append(k.q, s*int32(b[16+i/64*32+i%32]>>(i/32%2*4)&15)), append(k.n, n), half(2)
		case Q5_K:
			s, n := refSixes(b[4:16], i/32)
			q := b[48+i/64*32+i%32]>>(i/32%2*4)&15 | b[16+i%32]>>(i/32)&1<<4
			k.q, k.n, k.m = append(k.q, s*int32(q)), append(k.n, n), half(2)
		case Q6_K:
			part := i / 32 % 4
			q := b[i/128*64+part%2*32+i%32]>>(part/2*4)&15 | b[128+i/128*32+i%32]>>(2*part)&3<<4
			k.q, k.d = append(k.q, int32(int8(b[192+i/16]))*(int32(q)-32)), half(208)
		}
	}
	return k
}

// refSixes are scale and minimum i of Q4_K and Q5_K.
func refSixes(b []byte, i int) (s, n int32) {
	if i < 4 {
		return int32(b[i] & 63), int32(b[4+i] & 63)
	}
	return int32(b[4+i]&15 | b[i-4]>>6<<4), int32(b[4+i]>>4 | b[i]>>6<<4)
}

// refProduct is row r times x in the arithmetic of docs/numerics.md, and in
// float64 with a bound for what float32 may be off.
func refProduct(m *Matrix, r int, x []float32) (y float32, exact, bound float64) {
	f, row := formats[m.Type], m.row(r)
	for b := 0; b < m.Cols; b += f.block {
		q, scale := refQuantise(x[b : b+f.block])
		k := refDecode(m.Type, row[b/f.block*f.bytes:][:f.bytes])
		var isum, sum int32
		for i := range q {
			isum += q[i] * k.q[i]
			sum += q[i]
		}
		add := float32(k.m * float32(float32(sum)*scale))
		one, two := float64(isum)*float64(k.d)*float64(scale), float64(k.m)*float64(sum)*float64(scale)
		if f.block == Super {
			sum = 0
			for i := range k.n {
				sum += q[i] * k.n[i]
			}
			add, two = -float32(float32(sum)*float32(k.m*scale)), -float64(sum)*float64(k.m)*float64(scale)
		}
		y += float32(float32(isum)*float32(k.d*scale)) + add
		exact += one + two
		bound += math.Abs(one) + math.Abs(two)
	}
	return y, exact, bound * float64(m.Cols/f.block+4) * 0x1p-24
}

// weightTypes are all types, in ggml's order.
func weightTypes() (all []Type) {
	for t := range formats {
		if formats[t].block > 0 {
			all = append(all, Type(t))
		}
	}
	return all
}

// halves says where in a block of quantised weights its f16 scales lie.
var halves = map[Type][]int{Q8_0: {0}, Q4_0: {0}, Q4_1: {0, 2}, Q5_0: {0}, Q5_1: {0, 2}, Q4_K: {0, 2}, Q5_K: {0, 2}, Q6_K: {208}}

func randomMatrix(t testing.TB, rnd *rand.Rand, typ Type, rows, cols int) Matrix {
	data := make([]byte, typ.RowBytes(cols)*rows)
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	half := func(b []byte) {
		binary.LittleEndian.PutUint16(b, F32ToF16(float32(rnd.NormFloat64()/50)))
	}
	switch typ {
	case F32:
		for i := 0; i < len(data); i += 4 {
			binary.LittleEndian.PutUint32(data[i:], math.Float32bits(float32(rnd.NormFloat64())))
		}
	case BF16:
		for i := 0; i < len(data); i += 2 {
			binary.LittleEndian.PutUint16(data[i:], uint16(math.Float32bits(float32(rnd.NormFloat64()))>>16))
		}
	case F16:
		for i := 0; i < len(data); i += 2 {
			half(data[i:])
		}
	default:
		for i := 0; i < len(data); i += formats[typ].bytes {
			for _, at := range halves[typ] {
				half(data[i+at:])
			}
		}
	}
	m, err := NewMatrix(typ, rows, cols, data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func fill(rnd *rand.Rand, x []float32) {
	for i := range x {
		x[i] = float32(rnd.NormFloat64())
	}
}

// eachPath runs a test on every path that this processor has.
func eachPath(t *testing.T, test func(*testing.T)) {
	was := now
	defer func() { now = was }()
	for _, name := range Paths() {
		if err := Use(name); err != nil {
			t.Fatal(err)
		}
		t.Run(name, test)
	}
}

func seeded(t testing.TB, seed uint64) *rand.Rand {
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// TestMul compares each product with the plain reference, bit for bit, and with
// float64, for one input and many, and for blocks at the edges: zeros, tiny and
// huge values, and the largest sums that a lane must hold.
func TestMul(t *testing.T) {
	rnd := seeded(t, 1)
	for _, typ := range weightTypes() {
		for _, blocks := range []int{1, 2, 5, 9} {
			const rows, most = 21, 26
			cols := blocks * max(formats[typ].block, Block)
			if blocks > 5 && formats[typ].block > Block {
				continue // five are as good, and the reference is slow
			}
			m := randomMatrix(t, rnd, typ, rows, cols)
			input := NewInput(most, cols, false, typ)
			fill(rnd, input.f)
			edges(input, m)
			want := make([]float32, most*rows)
			for i := range want {
				want[i] = refMul(t, &m, i%rows, input.Row(i/rows))
			}
			eachPath(t, func(t *testing.T) {
				x := NewInput(most, cols, false, typ)
				copy(x.f, input.f)
				for _, n := range []int{26, 1, 2, 3, 4, 5, 12, 13, 25} {
					mulAndCompare(t, &m, x, n, want)
				}
			})
		}
	}
}

// refMul is row r times x by the plain reference, which is held against float64.
func refMul(t *testing.T, m *Matrix, r int, x []float32) float32 {
	t.Helper()
	if formats[m.Type].form == floats {
		w := make([]float32, m.Cols)
		m.Row(w, r)
		return refDot(w, x)
	}
	y, exact, bound := refProduct(m, r, x)
	if math.Abs(float64(y)-exact) > bound {
		t.Fatalf("%v, %d columns: row %d is %v, exactly %v", m.Type, m.Cols, r, y, exact)
	}
	return y
}

func mulAndCompare(t *testing.T, m *Matrix, x *Input, n int, want []float32) {
	t.Helper()
	s := NewScratch(m.Cols)
	x.N = n
	for g := 0; g < n; g += Group {
		x.Prepare(g, min(g+Group, n))
	}
	y := make([]float32, n*m.Rows)
	for t := 0; t < n; t += Group {
		m.Mul(y, m.Rows, x, t, min(t+Group, n), 0, 4, s)
		m.Mul(y, m.Rows, x, t, min(t+Group, n), 4, m.Rows, s)
	}
	for i := range y {
		if math.Float32bits(y[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%v, %d columns, %d inputs: row %d of input %d is %v, want %v", m.Type, m.Cols, n, i%m.Rows, i/m.Rows, y[i], want[i])
		}
	}
}

// edges puts the largest and smallest activations into some inputs, and weights
// of all zero and all one bits into two rows.
func edges(x *Input, m Matrix) {
	for i := range x.Cols {
		x.Row(3)[i], x.Row(4)[i] = 0, 1e-42
		x.Row(5)[i], x.Row(6)[i] = 1e30, -3 // all q are 127 and -127
		x.Row(7)[i] = float32(1 - i%2*2)
	}
	x.Row(8)[0] = 1e9 // the rest rounds to 0
	f := formats[m.Type]
	if f.form == floats {
		return
	}
	for r, bits := range []byte{0, 0xff, 0x80, 0x7f} {
		for row := m.row(r); len(row) > 0; row = row[f.bytes:] {
			for i := range f.bytes {
				if !slices.Contains(halves[m.Type], i&^1) {
					row[i] = bits
				}
			}
		}
	}
}

// TestMulPrecise: with Float, quantised weights meet the activations as they are.
func TestMulPrecise(t *testing.T) { eachPath(t, testMulPrecise) }

func testMulPrecise(t *testing.T) {
	rnd := seeded(t, 2)
	for _, typ := range weightTypes() {
		cols := 3 * max(formats[typ].block, Block)
		m := randomMatrix(t, rnd, typ, 5, cols)
		x := NewInput(3, cols, true, typ)
		x.N = 3
		fill(rnd, x.f)
		x.Prepare(0, 3)
		y, w := make([]float32, 15), make([]float32, cols)
		m.Mul(y, 5, x, 0, 3, 0, 5, NewScratch(cols))
		for i, got := range y {
			m.Row(w, i%5)
			if want := refDot(w, x.Row(i/5)); got != want {
				t.Fatalf("%v: %v, want %v", typ, got, want)
			}
		}
	}
}

// TestNotFinite: an infinity or NaN among the activations reaches every output
// of that input and no other.
func TestNotFinite(t *testing.T) { eachPath(t, testNotFinite) }

func testNotFinite(t *testing.T) {
	rnd := seeded(t, 3)
	for _, typ := range weightTypes() {
		cols := 2 * max(formats[typ].block, Block)
		for _, n := range []int{2, 5} {
			for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
				m := randomMatrix(t, rnd, typ, 3, cols)
				x := NewInput(n, cols, false, typ)
				x.N = n
				fill(rnd, x.f)
				x.Row(1)[40] = float32(bad)
				x.Prepare(0, n)
				y := make([]float32, 3*n)
				m.Mul(y, 3, x, 0, n, 0, 3, NewScratch(cols))
				for i, f := range y {
					finite := f-f == 0
					if finite != (i/3 != 1) {
						t.Fatalf("%v, %v in input 1: output of input %d is %v", typ, bad, i/3, f)
					}
				}
			}
		}
	}
}

func TestNewMatrix(t *testing.T) {
	for _, c := range []struct {
		typ               Type
		rows, cols, bytes int
	}{{Q8_0, 2, 33, 72}, {Q8_0, 0, 32, 0}, {Q8_0, 2, 32, 67}, {Q8_0, 2, 32, 69}, {Q8_0, 1, 0, 0}, {F32, 1, 24, 96}, {4, 1, 32, 32}, {99, 1, 32, 32}, {255, 1, 32, 32}} {
		if _, err := NewMatrix(c.typ, c.rows, c.cols, make([]byte, c.bytes)); err == nil {
			t.Errorf("NewMatrix took %+v", c)
		}
	}
}

func TestDot(t *testing.T) { eachPath(t, testDot) }

func testDot(t *testing.T) {
	rnd := seeded(t, 4)
	for n := 16; n <= 640; n += 16 {
		a, b := make([]float32, n), make([]float32, n)
		fill(rnd, a)
		fill(rnd, b)
		if got, want := Dot(a, b), refDot(a, b); got != want {
			t.Fatalf("length %d: %v, want %v", n, got, want)
		}
	}
	zero := make([]float32, 64)
	for i := range zero {
		zero[i] = float32(math.Copysign(0, -1))
	}
	if got, want := Dot(zero, slices.Repeat([]float32{1}, 64)), refDot(zero, slices.Repeat([]float32{1}, 64)); math.Float32bits(got) != math.Float32bits(want) {
		t.Fatalf("sum of -0: %v, want %v", got, want)
	}
	for n := range 70 {
		a, one := make([]float32, n), make([]float32, n)
		fill(rnd, a)
		for i := range one {
			one[i] = 1
		}
		if got, want := sum(a), refDot(a, one); got != want {
			t.Fatalf("sum of %d: %v, want %v", n, got, want)
		}
	}
}

// runsOf stores n positions of K and V as an engine does, in pages of so many.
func runsOf(t Type, k, v []float32, dim, page, n int) (runs []Run) {
	row := t.RowBytes(dim)
	for from := 0; from < n; from += page {
		r := Run{min(page, n-from), make([]byte, page*row), make([]byte, page*row)}
		for i := range r.N {
			t.Put(r.K[i*row:], k[(from+i)*dim:][:dim])
			t.Put(r.V[i*row:], v[(from+i)*dim:][:dim])
		}
		runs = append(runs, r)
	}
	return runs
}

// TestAttend compares with softmax attention in float64, for any number of
// positions in the last block.
func TestAttend(t *testing.T) { eachPath(t, testAttend) }

func testAttend(t *testing.T) {
	rnd := seeded(t, 5)
	for _, dim := range []int{16, 32, 64, 128} {
		for _, n := range []int{1, 2, 63, 64, 65, 129, 200} {
			whole := (n + Span - 1) / Span * Span
			q, k, v := make([]float32, dim), make([]float32, whole*dim), make([]float32, whole*dim)
			fill(rnd, q)
			fill(rnd, k)
			fill(rnd, v)
			scale := float32(1 / math.Sqrt(float64(dim)))
			out, a, s := make([]float32, dim), NewAttention(dim), make([]State, 1)
			for p := 0; p < n; p += Span {
				few := min(Span, n-p)
				a.Block(F32, s, out, q, runsOf(F32, k[p*dim:], v[p*dim:], dim, 16, few), []int{few}, scale, p == 0)
			}
			s[0].Finish(out)
			want, total := make([]float64, dim), 0.0
			for i := range n {
				score := 0.0
				for d := range dim {
					score += float64(q[d]) * float64(k[i*dim+d])
				}
				w := math.Exp(score * float64(scale))
				total += w
				for d := range dim {
					want[d] += w * float64(v[i*dim+d])
				}
			}
			for d := range dim {
				if e := math.Abs(float64(out[d]) - want[d]/total); e > 2e-6 {
					t.Fatalf("head %d, %d positions: %v at %d, want %v", dim, n, out[d], d, want[d]/total)
				}
			}
		}
	}
}

func TestVectors(t *testing.T) { eachPath(t, testVectors) }

func testVectors(t *testing.T) {
	rnd := seeded(t, 6)
	const n = 64
	x, w, y := make([]float32, n), make([]float32, n), make([]float32, n)
	fill(rnd, x)
	fill(rnd, w)
	RMSNorm(y, x, w, 1e-5)
	ss := 0.0
	for _, v := range x {
		ss += float64(v) * float64(v)
	}
	for i := range y {
		want := float64(x[i]) / math.Sqrt(ss/n+1e-5) * float64(w[i])
		if math.Abs(float64(y[i])-want) > 1e-6 {
			t.Fatalf("RMSNorm: %v, want %v", y[i], want)
		}
	}
	SwiGLU(y, x, w)
	for i := range y {
		want := float64(x[i]) / (1 + math.Exp(-float64(x[i]))) * float64(w[i])
		if math.Abs(float64(y[i])-want) > 1e-6 {
			t.Fatalf("SwiGLU: %v, want %v", y[i], want)
		}
	}
	SwiGLU(y[:2], []float32{-200, 200}, []float32{1, 1})
	if y[0] != 0 || y[1] != 200 {
		t.Fatalf("SwiGLU of ±200: %v", y[:2])
	}
}

// TestRope turns vectors in both layouts, by twice a rotation.
func TestRope(t *testing.T) {
	const n, p = 16, 8191
	x := make([]float32, 2*n+1)
	for i := range x {
		x[i] = float32(i%7) - 3
	}
	var freqs []float64
	for i := range n {
		freqs = append(freqs, math.Pow(1e5, -float64(i)/n))
	}
	for _, halves := range []bool{false, true} {
		y := slices.Clone(x)
		NewRopeTable(9000, freqs, 2, halves).Apply(y, p)
		for i := range n {
			j, k := 2*i, 2*i+1
			if halves {
				j, k = i, i+n
			}
			s, c := math.Sincos(p * freqs[i])
			a, b := 2*float64(x[j]), 2*float64(x[k])
			if math.Abs(float64(y[j])-(a*c-b*s)) > 2e-6 || math.Abs(float64(y[k])-(a*s+b*c)) > 2e-6 {
				t.Fatalf("halves %v: pair %d is %v %v, want %v %v", halves, i, y[j], y[k], a*c-b*s, a*s+b*c)
			}
		}
		if y[2*n] != x[2*n] {
			t.Fatal("rope turned more than its dimension")
		}
	}
}
