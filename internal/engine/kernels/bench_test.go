package kernels

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// plain is the loop that everybody writes first, blocked for the cache: int8
// activations, one multiplication a product. Mul must not be slower than it.
func plain(y []float32, m *Matrix, q []int8, scale, sum []float32, n int) {
	f := formats[m.Type]
	blocks := m.Cols / f.block
	w := make([]int16, f.block)
	for r := range m.Rows {
		for t := range n {
			y[t*m.Rows+r] = 0
		}
		row := m.row(r)
		for b := range blocks {
			d, lo := plainBlock(w, m.Type, row[b*f.bytes:][:f.bytes])
			for t := range n {
				x := q[t*m.Cols+b*f.block:][:len(w)]
				var isum int32
				for i := range x {
					isum += int32(x[i]) * int32(w[i])
				}
				k := t*blocks + b
				y[t*m.Rows+r] += float32(float32(isum)*float32(d*scale[k])) + float32(lo*sum[k])
			}
		}
	}
}

// plainBlock takes one block apart.
func plainBlock(w []int16, typ Type, src []byte) (d, m float32) {
	half := func(at int) float32 { return F16ToF32(binary.LittleEndian.Uint16(src[at:])) }
	switch typ {
	case Q4_0:
		for i, v := range src[2:] {
			w[i], w[i+16] = int16(v&15)-8, int16(v>>4)-8
		}
		return half(0), 0
	case Q4_1:
		for i, v := range src[4:] {
			w[i], w[i+16] = int16(v&15), int16(v>>4)
		}
		return half(0), half(2)
	case Q5_0:
		h := binary.LittleEndian.Uint32(src[2:])
		for i, v := range src[6:] {
			w[i], w[i+16] = int16(v&15|byte(h>>i&1)<<4)-16, int16(v>>4|byte(h>>(i+16)&1)<<4)-16
		}
		return half(0), 0
	case Q5_1:
		h := binary.LittleEndian.Uint32(src[4:])
		for i, v := range src[8:] {
			w[i], w[i+16] = int16(v&15|byte(h>>i&1)<<4), int16(v>>4|byte(h>>(i+16)&1)<<4)
		}
		return half(0), half(2)
	case Q8_0:
		for i, v := range src[2:] {
			w[i] = int16(int8(v))
		}
		return half(0), 0
	case Q4_K, Q5_K:
		s, _ := sixes((*[12]byte)(src[4:]))
		h, q := make([]byte, 32), src[16:]
		if typ == Q5_K {
			h, q = q[:32], q[32:]
		}
		for i := range w {
			w[i] = int16(s>>(i/32*8)&63) * int16(q[i/64*32+i%32]>>(i/32%2*4)&15|h[i%32]>>(i/32)&1<<4)
		}
		return half(0), half(2)
	case Q6_K:
		k := &cast[blockQ6_K](src)[0]
		for i := range w {
			w[i] = int16(int8(k.s[i/16])) * int16(k.at(i))
		}
		return half(208), 0
	}
	panic("no such type")
}

// TestNotSlower holds the products against the plain loop. The best of many
// short runs is what the machine can do, however busy it is.
func TestNotSlower(t *testing.T) {
	if testing.Short() {
		t.Skip("takes its time, and says nothing under the race detector")
	}
	rnd := seeded(t, 7)
	best := func(f func()) time.Duration {
		d := time.Hour
		for range 30 {
			begin := time.Now()
			f()
			d = min(d, time.Since(begin))
		}
		return d
	}
	for _, typ := range weightTypes() {
		if formats[typ].form == floats {
			continue
		}
		for _, n := range []int{1, 8, 96} {
			const rows, cols = 16, 768
			m := randomMatrix(t, rnd, typ, rows, cols)
			x, s, y := NewInput(n, cols, false, typ), NewScratch(cols), make([]float32, n*rows)
			x.N = n
			fill(rnd, x.f)
			q := make([]int8, n*cols)
			scale := make([]float32, len(q)/Block)
			ours := best(func() {
				x.Prepare(0, n)
				m.Mul(y, rows, x, 0, n, 0, rows, s)
			})
			theirs := best(func() { plain(y, &m, q, scale, scale, n) })
			t.Logf("%v, %d inputs: %v, a plain loop %v", typ, n, ours, theirs)
			if float64(theirs) < 0.8*float64(ours) {
				t.Errorf("%v, %d inputs: %v is less than 0.8 times as fast as a plain loop, %v", typ, n, ours, theirs)
			}
		}
	}
}

var shapes = []struct {
	typ           Type
	rows, cols, n int
}{
	{Q4_1, 1536, 768, 96}, {Q4_1, 768, 1536, 96}, {Q4_1, 1536, 768, 8}, {Q4_1, 1536, 768, 1},
	{Q8_0, 1536, 768, 96}, {Q8_0, 4096, 768, 8}, {Q8_0, 4096, 768, 1}, {Q8_0, 65536, 768, 1}, {Q4_1, 65536, 768, 1},
	{Q4_0, 1536, 768, 96}, {Q4_0, 1536, 768, 1}, {Q5_0, 1536, 768, 96}, {Q5_0, 1536, 768, 1}, {Q5_1, 1536, 768, 96}, {Q5_1, 1536, 768, 1},
	{Q4_K, 1536, 768, 96}, {Q4_K, 1536, 768, 1}, {Q5_K, 1536, 768, 96}, {Q5_K, 1536, 768, 1}, {Q6_K, 1536, 768, 96}, {Q6_K, 1536, 768, 1},
	{F16, 512, 256, 96}, {F16, 512, 256, 1},
}

// best is the shortest of the runs: what the machine can do, however busy.
func best(b *testing.B, run func()) time.Duration {
	best := time.Hour
	for b.Loop() {
		begin := time.Now()
		run()
		best = min(best, time.Since(begin))
	}
	return best
}

func BenchmarkMul(b *testing.B) {
	defer Use(Path())
	rnd := rand.New(rand.NewPCG(1, 1))
	for _, s := range shapes {
		m := randomMatrix(b, rnd, s.typ, s.rows, s.cols)
		name := fmt.Sprintf("%v/%dx%dx%d", s.typ, s.rows, s.cols, s.n)
		y := make([]float32, s.n*s.rows)
		report := func(b *testing.B, best time.Duration) {
			per := best.Seconds()
			b.ReportMetric(float64(s.rows)*float64(s.cols)*float64(s.n)/per/1e9, "Gmac/s")
			b.ReportMetric(float64(m.Bytes())/per/1e9, "weightGB/s")
			b.ReportMetric(0, "ns/op")
		}
		for _, path := range Paths() {
			b.Run(name+"/"+path, func(b *testing.B) {
				if err := Use(path); err != nil {
					b.Fatal(err)
				}
				x, sc := NewInput(s.n, s.cols, false, s.typ), NewScratch(s.cols)
				x.N = s.n
				fill(rnd, x.f)
				b.ReportAllocs()
				best := best(b, func() {
					x.Prepare(0, s.n)
					m.Mul(y, s.rows, x, 0, s.n, 0, s.rows, sc)
				})
				report(b, best)
			})
		}
		if formats[s.typ].form == floats {
			continue
		}
		b.Run(name+"/plain", func(b *testing.B) {
			q := make([]int8, s.n*s.cols)
			scale, sum := make([]float32, len(q)/Block), make([]float32, len(q)/Block)
			for i := range q {
				q[i] = int8(rnd.IntN(255) - 127)
			}
			best := best(b, func() { plain(y, &m, q, scale, sum, s.n) })
			report(b, best)
		})
	}
}

// BenchmarkStream reads memory as fast as a plain loop can: the bound of
// products with one input, whose weights come from memory.
func BenchmarkStream(b *testing.B) {
	data, sum := make([]float32, 64<<20/4), float32(0)
	for i := range data {
		data[i] = float32(i % 7)
	}
	best := best(b, func() {
		for part := data; len(part) > 0; part = part[1<<16:] { // 16 lanes at a time where the path has them
			sum += Dot(part[:1<<15], part[1<<15:1<<16])
		}
	})
	if sum == 0 {
		b.Fatal("no sum")
	}
	b.ReportMetric(64<<20/1e9/best.Seconds(), "GB/s")
}

func BenchmarkAttend(b *testing.B) {
	defer Use(Path())
	rnd := rand.New(rand.NewPCG(2, 1))
	const dim = 64
	k, v := make([]float32, Span*dim), make([]float32, Span*dim)
	fill(rnd, k)
	fill(rnd, v)
	runs := runsOf(F16, k, v, dim, 16, Span)
	for _, queries := range []int{1, 3, 4, 12} {
		q := make([]float32, queries*dim)
		fill(rnd, q)
		out, a, s := make([]float32, queries*dim), NewAttention(dim), make([]State, queries)
		n := slices.Repeat([]int{Span}, queries)
		for _, path := range Paths() {
			b.Run(fmt.Sprintf("%d/%s", queries, path), func(b *testing.B) {
				if err := Use(path); err != nil {
					b.Fatal(err)
				}
				best := best(b, func() { a.Block(F16, s, out, q, runs, n, 0.125, false) })
				b.ReportMetric(float64(2*queries*Span*dim)/best.Seconds()/1e9, "Gmac/s")
				b.ReportMetric(2*2*Span*dim/best.Seconds()/1e9, "GB/s")
			})
		}
	}
}

func BenchmarkPrepare(b *testing.B) {
	rnd := rand.New(rand.NewPCG(3, 1))
	x := NewInput(Group, 1536, false, Q4_1)
	x.N = Group
	fill(rnd, x.f)
	for b.Loop() {
		x.Prepare(0, Group)
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/Group/1536, "ns/value")
}

func BenchmarkExp(b *testing.B) {
	x := float32(-3)
	var y float32
	for b.Loop() {
		for i := range 1000 {
			y += Exp(x + float32(i)/1000)
		}
	}
	if y == 0 {
		b.Fatal("no sum")
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e6/float64(b.N), "ns/exp")
}
