package kernels

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestUse: a path that the processor lacks is refused by name, and nothing
// changes.
func TestUse(t *testing.T) {
	had, was := better, now
	defer func() { better, now = had, was }()
	better = nil
	if err := Use("auto"); err != nil || Path() != "portable" {
		t.Errorf("auto without better paths: %s, %v", Path(), err)
	}
	if err := Use("avx512"); err == nil || !strings.Contains(err.Error(), "avx512") || Path() != "portable" {
		t.Errorf("avx512 on a processor without: %s, %v", Path(), err)
	}
	better = []*path{{name: "best"}, {name: "good"}}
	for _, c := range [][2]string{{"auto", "best"}, {"good", "good"}, {"portable", "portable"}} {
		if err := Use(c[0]); err != nil || Path() != c[1] {
			t.Errorf("Use(%q): %s, %v, want %s", c[0], Path(), err, c[1])
		}
	}
}

// agree runs a computation on the portable path and on every other, and compares
// all bits of the results; any NaN equals any other.
func agree(t *testing.T, what string, compute func() []float32) {
	t.Helper()
	was := now
	defer func() { now = was }()
	now = portable
	want := compute()
	for _, p := range better {
		now = p
		got := compute()
		for i, w := range want {
			if math.Float32bits(got[i]) != math.Float32bits(w) && (w == w || got[i] == got[i]) {
				t.Fatalf("%s: %s has %v (%x) at %d of %d, portable %v (%x)", what, p.name, got[i], math.Float32bits(got[i]), i, len(want), w, math.Float32bits(w))
			}
		}
	}
}

// rounds are fewer in a short run, which the race detector slows down.
func rounds(n int) int {
	if testing.Short() {
		return n / 5
	}
	return n
}

// awkward fills x with numbers of all sizes, and with some chance of the ones
// that are special.
func awkward(rnd *rand.Rand, x []float32, special bool) {
	odd := []float32{
		0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()), 1e-45, -1e-42,
		math.MaxFloat32, -math.MaxFloat32, 0x1p-126, 88.72, 88.73, -87.33, -87.34, 65504, 65520, 0x1p-24, 0x1p-25, 0x1.8p-25,
	}
	for i := range x {
		x[i] = float32(rnd.NormFloat64() * math.Pow(10, float64(rnd.IntN(5)-2)))
		if special && rnd.IntN(8) == 0 {
			x[i] = odd[rnd.IntN(len(odd))]
		}
	}
}

// TestPathsAgree: every path gives the bits of the portable one, in every
// function, for any length and whatever the numbers.
func TestPathsAgree(t *testing.T) {
	rnd := seeded(t, 21)
	for i := range rounds(400) {
		special, n := i%2 == 1, 16*(1+rnd.IntN(12))
		x, y, z := make([]float32, n), make([]float32, n), make([]float32, n)
		for _, v := range [][]float32{x, y, z} {
			awkward(rnd, v, special)
		}
		fresh := func(f func(dst []float32)) func() []float32 {
			return func() []float32 { dst := slices.Clone(z); f(dst); return dst }
		}
		some := n - rnd.IntN(16) // a length that is not whole sixteens
		agree(t, "Dot", func() []float32 { return []float32{Dot(x, y), Dot(x, x)} })
		agree(t, "RMSNorm", fresh(func(dst []float32) { RMSNorm(dst, x, y, 1e-5) }))
		agree(t, "Add", fresh(func(dst []float32) { Add(dst[:some], x[:some]) }))
		agree(t, "SwiGLU", fresh(func(dst []float32) { SwiGLU(dst[:some], x[:some], y[:some]) }))
		agree(t, "Exps", fresh(func(dst []float32) { Exps(dst[:some], x[:some], y[0], 0.7) }))
		for _, halves := range []bool{false, true} {
			freqs := make([]float64, (n-rnd.IntN(n/2))/2)
			for i := range freqs {
				freqs[i] = rnd.Float64()
			}
			table := NewRopeTable(3, freqs, 1, halves)
			agree(t, "Apply", fresh(func(dst []float32) { table.Apply(dst, 2) }))
		}
		small := slices.Clone(x) // scales that are zero or subnormal halves, or too large
		for i := range small {
			small[i] *= float32(math.Pow(10, float64(i/Block%20-10)))
		}
		for _, kept := range []Type{F32, F16, Q8_0} { // forms of K and V
			whole := n / formats[kept].block * formats[kept].block
			agree(t, kept.String(), fresh(func(dst []float32) {
				row := make([]byte, kept.RowBytes(whole))
				kept.Put(row, small[:whole])
				kept.Widen(dst[:whole], row)
			}))
		}
		agree(t, "BF16", fresh(func(dst []float32) { widenBF16(dst[:some], cast[byte](x)[:2*some]) }))
		agree(t, "halves", fresh(func(dst []float32) {
			half := make([]byte, 2*n)
			F16.Put(half[:2*some], x[:some])
			WidenF16(dst[:some], half)
		}))
	}
	all := make([]byte, 2<<16)
	for i := range 1 << 16 {
		binary.LittleEndian.PutUint16(all[2*i:], uint16(i))
	}
	agree(t, "WidenF16", func() []float32 { dst := make([]float32, 1<<16); WidenF16(dst, all); return dst })
}

// TestPathsAttend: likewise attention, for odd numbers of heads and positions, of
// halves and floats, in pages of any size.
func TestPathsAttend(t *testing.T) {
	rnd := seeded(t, 22)
	for i := range rounds(300) {
		dim, queries, n := 16*(1+rnd.IntN(9)), 1+rnd.IntN(9), 1+rnd.IntN(Span)
		q, k, v := make([]float32, queries*dim), make([]float32, Span*dim), make([]float32, Span*dim)
		for _, x := range [][]float32{q, k, v} {
			awkward(rnd, x, i%3 == 2)
		}
		all, seen := slices.Repeat([]int{Span}, queries), slices.Repeat([]int{n}, queries)
		for i := 1; i < queries && queries%2 == 0; i++ { // later queries may see more
			seen[i] = min(seen[i-1]+rnd.IntN(3), Span)
		}
		typ, page := []Type{F32, F16, F16}[rnd.IntN(3)], []int{1, 5, 16, 16, 32, 64, 100}[rnd.IntN(7)]
		whole, some := runsOf(typ, k, v, dim, page, Span), runsOf(typ, v, k, dim, page, seen[queries-1])
		agree(t, fmt.Sprintf("%d queries of %d, %v positions of %v in pages of %d", queries, dim, seen, typ, page), func() []float32 {
			s, out, a := make([]State, queries), make([]float32, queries*dim), NewAttention(dim)
			a.Block(typ, s, out, q, whole, all, 0.01, true)
			a.Block(typ, s, out, q, some, seen, 0.3, false)
			for i := range s {
				s[i].Finish(out[i*dim : (i+1)*dim])
			}
			return out
		})
	}
}

// TestPathsMul: likewise products of all types, with bytes of weights that are
// random (scales may be infinite or NaN), any number of rows and inputs.
func TestPathsMul(t *testing.T) {
	rnd := seeded(t, 23)
	for i := range rounds(240) {
		typ := weightTypes()[i%len(weightTypes())]
		cols, rows, n := (1+rnd.IntN(3))*max(formats[typ].block, Block), 1+rnd.IntN(40), 1+rnd.IntN(30)
		if i%2 == 0 { // few inputs have routines of their own
			n = 1 + rnd.IntN(5)
		}
		m := randomMatrix(t, rnd, typ, rows, cols)
		if i%3 == 0 {
			for b := range m.data {
				m.data[b] = byte(rnd.Uint32())
			}
		}
		values := make([]float32, n*cols)
		awkward(rnd, values, i%4 == 1)
		for _, float := range []bool{false, true} {
			agree(t, fmt.Sprintf("%v, %d rows of %d, %d inputs", typ, rows, cols, n), func() []float32 {
				x, y, s := NewInput(n, cols, float, typ), make([]float32, n*rows), NewScratch(cols)
				x.N = n
				copy(x.f, values)
				x.Prepare(0, n)
				most := min(n, Group)
				m.Mul(y, rows, x, 0, most, 0, rows, s)
				if n > most {
					m.Mul(y, rows, x, most, n, 0, rows, s)
				}
				return y
			})
		}
	}
}
