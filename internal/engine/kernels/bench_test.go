package kernels

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// plain is the loop that everybody writes first, blocked for the cache: int8
// activations, one multiplication a product. Mul must not be slower than it.
func plain(y []float32, m *Matrix, q []int8, scale, sum []float32, n int) {
	blocks := m.Cols / Block
	var w [Block]int8
	for r := range m.Rows {
		for t := range n {
			y[t*m.Rows+r] = 0
		}
		row := m.row(r)
		for b := range blocks {
			var d, lo float32
			if m.Type == Q4_1 {
				src := row[b*q4Bytes:]
				d, lo = F16ToF32(binary.LittleEndian.Uint16(src)), F16ToF32(binary.LittleEndian.Uint16(src[2:]))
				for i, v := range src[4:q4Bytes] {
					w[i], w[i+16] = int8(v&15), int8(v>>4)
				}
			} else {
				src := row[b*q8Bytes:]
				d = F16ToF32(binary.LittleEndian.Uint16(src))
				for i, v := range src[2:q8Bytes] {
					w[i] = int8(v)
				}
			}
			for t := range n {
				x := (*[Block]int8)(q[t*m.Cols+b*Block:])
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

// TestNotSlower holds the products against the plain loop. The best of many
// short runs is what the machine can do, however busy it is.
func TestNotSlower(t *testing.T) {
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
	for _, typ := range []Type{Q4_1, Q8_0} {
		for _, n := range []int{1, 8, 96} {
			const rows, cols = 64, 576
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
			t.Logf("type %d, %d inputs: %v, a plain loop %v", typ, n, ours, theirs)
			if float64(theirs) < 0.8*float64(ours) {
				t.Errorf("type %d, %d inputs: %v is less than 0.8 times as fast as a plain loop, %v", typ, n, ours, theirs)
			}
		}
	}
}

var shapes = []struct {
	typ           Type
	name          string
	rows, cols, n int
}{
	{Q4_1, "q4_1", 1536, 576, 512}, {Q4_1, "q4_1", 576, 1536, 512}, {Q4_1, "q4_1", 1536, 576, 8}, {Q4_1, "q4_1", 1536, 576, 1},
	{Q8_0, "q8_0", 1536, 576, 512}, {Q8_0, "q8_0", 4096, 576, 8}, {Q8_0, "q8_0", 4096, 576, 1},
	{F16, "f16", 512, 256, 512}, {F16, "f16", 512, 256, 1},
}

func BenchmarkMul(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for _, s := range shapes {
		m := randomMatrix(b, rnd, s.typ, s.rows, s.cols)
		name := fmt.Sprintf("%s/%dx%dx%d", s.name, s.rows, s.cols, s.n)
		y := make([]float32, s.n*s.rows)
		report := func(b *testing.B) {
			per := b.Elapsed().Seconds() / float64(b.N)
			b.ReportMetric(float64(s.rows)*float64(s.cols)*float64(s.n)/per/1e9, "Gmac/s")
			b.ReportMetric(float64(m.Bytes())/per/1e9, "weightGB/s")
			b.ReportMetric(0, "ns/op")
		}
		b.Run(name+"/kernel", func(b *testing.B) {
			x, sc := NewInput(s.n, s.cols, false, s.typ), NewScratch(s.cols)
			x.N = s.n
			fill(rnd, x.f)
			b.ReportAllocs()
			for b.Loop() {
				x.Prepare(0, s.n)
				m.Mul(y, s.rows, x, 0, s.n, 0, s.rows, sc)
			}
			report(b)
		})
		if s.typ != Q8_0 && s.typ != Q4_1 {
			continue
		}
		b.Run(name+"/plain", func(b *testing.B) {
			q := make([]int8, s.n*s.cols)
			scale, sum := make([]float32, len(q)/Block), make([]float32, len(q)/Block)
			for i := range q {
				q[i] = int8(rnd.IntN(255) - 127)
			}
			for b.Loop() {
				plain(y, &m, q, scale, sum, s.n)
			}
			report(b)
		})
	}
}

// BenchmarkStream reads memory as fast as a plain loop can: the bound of
// products with one input, whose weights come from memory.
func BenchmarkStream(b *testing.B) {
	data := make([]uint64, 64<<20/8)
	for i := range data {
		data[i] = uint64(i)
	}
	var s0, s1, s2, s3 uint64
	for b.Loop() {
		for i := 0; i+4 <= len(data); i += 4 {
			p := (*[4]uint64)(data[i:])
			s0 += p[0]
			s1 += p[1]
			s2 += p[2]
			s3 += p[3]
		}
	}
	data[0] = s0 + s1 + s2 + s3
	b.ReportMetric(64<<20/1e9*float64(b.N)/b.Elapsed().Seconds(), "GB/s")
}

func BenchmarkAttend(b *testing.B) {
	rnd := rand.New(rand.NewPCG(2, 1))
	const dim = 64
	q, k, v := make([]float32, dim), make([]float32, Span*dim), make([]float32, Span*dim)
	fill(rnd, q)
	fill(rnd, k)
	fill(rnd, v)
	out, scratch := make([]float32, dim), make([]float32, Span+dim)
	var s State
	for b.Loop() {
		Attend(&s, out, q, k, v, Span, 0.125, false, scratch)
	}
	b.ReportMetric(2*Span*dim*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gmac/s")
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
