package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// smallWeights is a random model with every weight type in it: the block's
// matrices in the given one, the rest in others.
func smallWeights(typ kernels.Type) *Weights {
	h := model.Hyper{
		Layers: 2, Dim: 64, Heads: 8, KVHeads: 4, HeadDim: 16, FF: 96, Vocab: 101, Context: 700,
		Eps: 1e-5, Rope: model.Rope{Dim: 12, Theta: 10000, Scale: 1},
	}
	embed := kernels.F16
	if typ == kernels.Q4_K || typ == kernels.Q5_K || typ == kernels.Q6_K {
		h.Dim, h.HeadDim, h.FF = 256, 32, 256
		embed = typ
	}
	rnd := rand.New(rand.NewPCG(uint64(typ), 7))
	vector := func(n int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(1 + rnd.NormFloat64()/4)
		}
		return v
	}
	matrix := func(typ kernels.Type, rows, cols int) kernels.Matrix { return smallMatrix(rnd, typ, rows, cols) }
	w := &Weights{
		hyper: h, print: func() string { return "small" }, norm: vector(h.Dim),
		embed: matrix(embed, h.Vocab, h.Dim), output: matrix(kernels.Q8_0, h.Vocab, h.Dim),
	}
	q, kv := h.Heads*h.HeadDim, h.KVHeads*h.HeadDim
	for range h.Layers {
		w.blocks = append(w.blocks, block{
			attnNorm: vector(h.Dim), ffnNorm: vector(h.Dim),
			q: matrix(typ, q, h.Dim), k: matrix(kernels.Q8_0, kv, h.Dim), v: matrix(typ, kv, h.Dim),
			attnOut: matrix(typ, h.Dim, q), gate: matrix(typ, h.FF, h.Dim), up: matrix(kernels.F32, h.FF, h.Dim),
			down: matrix(typ, h.Dim, h.FF),
		})
	}
	return w
}

// weightTypes are the weight types that small models are made of.
var weightTypes = []kernels.Type{kernels.F32, kernels.F16, kernels.BF16, kernels.Q4_0, kernels.Q4_1, kernels.Q5_0, kernels.Q5_1,
	kernels.Q8_0, kernels.Q4_K, kernels.Q5_K, kernels.Q6_K}

// smallMatrix has random weights of about the size that keeps a signal's.
func smallMatrix(rnd *rand.Rand, typ kernels.Type, rows, cols int) kernels.Matrix {
	data := make([]byte, typ.RowBytes(cols)*rows)
	scale := 1 / math.Sqrt(float64(cols))
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	half := func(b []byte, f float64) { binary.LittleEndian.PutUint16(b, kernels.F32ToF16(float32(f))) }
	// blocks sets the scale of each block of n weights to about d, and where
	// there is a minimum sets it to so many scales.
	blocks := func(n int, d float64, at int, min float64) {
		n = typ.RowBytes(n)
		for b := data; len(b) > 0; b = b[n:] {
			d := scale * d * rnd.Float64()
			half(b[at:], d)
			if min != 0 {
				half(b[at+2:], min*d)
			}
		}
	}
	switch typ {
	case kernels.F32:
		for i := 0; i < len(data); i += 4 {
			binary.LittleEndian.PutUint32(data[i:], math.Float32bits(float32(rnd.NormFloat64()*scale)))
		}
	case kernels.F16:
		for i := 0; i < len(data); i += 2 {
			half(data[i:], rnd.NormFloat64()*scale)
		}
	case kernels.BF16:
		for i := 0; i < len(data); i += 2 {
			binary.LittleEndian.PutUint16(data[i:], uint16(math.Float32bits(float32(rnd.NormFloat64()*scale))>>16))
		}
	case kernels.Q4_0:
		blocks(32, 1./4, 0, 0)
	case kernels.Q4_1:
		blocks(32, 1./4, 0, -7.5)
	case kernels.Q5_0:
		blocks(32, 1./8, 0, 0)
	case kernels.Q5_1:
		blocks(32, 1./8, 0, -15.5)
	case kernels.Q8_0:
		blocks(32, 1./64, 0, 0)
	case kernels.Q4_K:
		blocks(256, 1./200, 0, 7.5)
	case kernels.Q5_K:
		blocks(256, 1./400, 0, 15.5)
	case kernels.Q6_K:
		blocks(256, 1./500, 208, 0)
	}
	m, err := kernels.NewMatrix(typ, rows, cols, data)
	if err != nil {
		panic(err)
	}
	return m
}

// architectures are the ways in which the forward pass may go.
var architectures = []string{"llama", "qwen2", "qwen3"}

// as gives a small Llama what qwen2 and qwen3 have beside its arithmetic.
func (w *Weights) as(arch string) *Weights {
	if arch == "llama" {
		return w
	}
	rnd := rand.New(rand.NewPCG(5, 5))
	vector := func(n int, mean float64) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(mean + rnd.NormFloat64()/2)
		}
		return v
	}
	h := &w.hyper
	h.Bias, h.QKNorm = arch == "qwen2", arch == "qwen3"
	h.Rope.Halves, h.Rope.Scale, h.Rope.YaRN = true, 4, model.YaRN{Context: 50, Fast: 32, Slow: 1}
	for i := range w.blocks {
		b := &w.blocks[i]
		if h.Bias {
			b.qBias, b.kBias, b.vBias = vector(b.q.Rows, 0), vector(b.k.Rows, 0), vector(b.v.Rows, 0)
		} else {
			b.qNorm, b.kNorm = vector(h.HeadDim, 1), vector(h.HeadDim, 1)
		}
	}
	return w
}

// sequence is what a test computes: ids with a target after each, and the
// log-probabilities of the whole vocabulary after the last.
type sequence struct {
	ids, targets []int32
	scores       []float32
	tops         [][]TokenLogprob
	all          []TokenLogprob
}

func newSequence(rnd *rand.Rand, n int) *sequence {
	s := &sequence{scores: make([]float32, n), tops: make([][]TokenLogprob, n)}
	for range n {
		s.ids, s.targets = append(s.ids, rnd.Int32N(101)), append(s.targets, rnd.Int32N(101))
	}
	return s
}

// row is tokens [from, to) of the sequence.
func (s *sequence) row(table []kv.Page, from, to int) Row {
	r := Row{Tokens: s.ids[from:to], Start: from, Pages: table, Targets: s.targets[from:to], Scores: s.scores[from:to], Top: 3, Tops: s.tops[from:to]}
	if to == len(s.ids) {
		r.Sample = &Sampling{Logprobs: 101}
	}
	return r
}

// alone is the sequence in one chunk in an engine of its own.
func alone(t testing.TB, w *Weights, dtype, precision string, ids *sequence) *sequence {
	e := newCPU(t, w, Config{Pages: 50, PageSize: 16, KVDType: dtype, Precision: precision, Threads: 1, MaxBatchTokens: 700})
	s := &sequence{ids: ids.ids, targets: ids.targets, scores: make([]float32, len(ids.ids)), tops: make([][]TokenLogprob, len(ids.ids))}
	s.all = run(t, e, s.row(pages(0, 50), 0, len(s.ids)))[0].Out.Top
	return s
}

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// TestInvariance computes sequences under every condition that must not matter,
// chosen at random: neighbours in the batch, chunks, threads, page size, TP,
// pages, and a prefix that another sequence computed.
func TestInvariance(t *testing.T) {
	type key struct {
		typ                    kernels.Type
		arch, dtype, precision string
		n                      int
	}
	weights := map[string]*Weights{}
	for _, typ := range weightTypes {
		for _, arch := range architectures {
			weights[arch+typ.String()] = smallWeights(typ).as(arch)
		}
	}
	known := map[key]*sequence{}
	rapid.Check(t, func(rt *rapid.T) {
		k := key{
			rapid.SampledFrom(weightTypes).Draw(rt, "type"), rapid.SampledFrom(architectures).Draw(rt, "architecture"),
			rapid.SampledFrom([]string{"f16", "f32", "q8_0"}).Draw(rt, "dtype"), rapid.SampledFrom([]string{"native", "native", "f32"}).Draw(rt, "precision"),
			rapid.SampledFrom([]int{1, 2, 15, 16, 17, 63, 64, 65, 128, 150, 257}).Draw(rt, "length"),
		}
		w := weights[k.arch+k.typ.String()]
		if w.hyper.HeadDim%kernels.Block != 0 && k.dtype == "q8_0" {
			k.dtype = "f16"
		}
		rnd := rand.New(rand.NewPCG(1, uint64(k.n)))
		s := newSequence(rnd, k.n)
		want := known[k]
		if want == nil {
			want = alone(t, w, k.dtype, k.precision, s)
			known[k] = want
		}
		size := rapid.SampledFrom([]int{1, 3, 16, 64, 100}).Draw(rt, "page size")
		per := kv.PagesFor(700, size)
		e, err := New(w, Config{
			Pages: 10 * per, PageSize: size, KVDType: k.dtype, Precision: k.precision, MaxBatchTokens: 700,
			Threads: rapid.IntRange(1, 3).Draw(rt, "threads"), TP: rapid.SampledFrom([]int{1, 2, 4}).Draw(rt, "tp"),
		})
		if err != nil {
			rt.Fatal(err)
		}
		defer e.Close()
		table, from := pages(0, per), 0
		rand.New(rand.NewPCG(2, 2)).Shuffle(len(table), func(i, j int) { table[i], table[j] = table[j], table[i] })
		if shared := (k.n - 1) / size; shared > 0 && rapid.Bool().Draw(rt, "prefix") {
			from = rapid.IntRange(1, shared).Draw(rt, "shared") * size
			other := newSequence(rnd, from+5)
			copy(other.ids, s.ids[:from])
			run(t, e, other.row(append(slices.Clone(table[:from/size]), pages(per, per)...), 0, from+5))
		}
		compute(t, rt, e, s, table, from, per)
		if !sameBits(s.scores[from:], want.scores[from:]) || len(s.all) != 101 || !slices.Equal(s.all, want.all) ||
			!slices.EqualFunc(s.tops[from:], want.tops[from:], slices.Equal) {
			rt.Fatalf("%+v: bits differ", k)
		}
	})
}

// compute runs the sequence in chunks, each beside some other rows.
func compute(t *testing.T, rt *rapid.T, e *CPU, s *sequence, table []kv.Page, from, per int) {
	rnd := rand.New(rand.NewPCG(3, uint64(len(s.ids))))
	for from < len(s.ids) {
		to := from + rapid.IntRange(1, len(s.ids)-from).Draw(rt, "chunk")
		at := rapid.IntRange(0, 6).Draw(rt, "place")
		var rows []Row
		for i := range rapid.IntRange(at, 6).Draw(rt, "neighbours") {
			n := rapid.SampledFrom([]int{1, 1, 2, 5, 40}).Draw(rt, "tokens")
			rows = append(rows, newSequence(rnd, n).row(pages((2+i)*per, per), 0, n))
		}
		rows = slices.Insert(rows, at, s.row(table, from, to))
		s.all = run(t, e, rows...)[at].Out.Top
		from = to
	}
}

// TestDividedAttention computes the last tokens of long sequences, one at a time,
// on threads enough to divide their attention by blocks.
func TestDividedAttention(t *testing.T) {
	for _, typ := range []kernels.Type{kernels.Q8_0, kernels.Q4_K} {
		w := smallWeights(typ)
		for _, threads := range []int{2, 3, 7} {
			e := newCPU(t, w, Config{Pages: 90, PageSize: 16, Threads: threads, MaxBatchTokens: 700})
			long, short := newSequence(rand.New(rand.NewPCG(6, 1)), 690), newSequence(rand.New(rand.NewPCG(6, 2)), 513)
			tables := [][]kv.Page{pages(0, 45), pages(45, 45)}
			run(t, e, long.row(tables[0], 0, 680))
			run(t, e, short.row(tables[1], 0, 503))
			for i := range 10 {
				rows := []Row{long.row(tables[0], 680+i, 681+i), short.row(tables[1], 503+i, 504+i)}
				if i < 5 { // alone: the more of it is divided
					run(t, e, rows[1])
					rows = rows[:1]
				}
				run(t, e, rows...)
				if len(e.folds) == 0 {
					t.Fatalf("%d threads, %d rows: nothing was divided", threads, len(rows))
				}
			}
			for _, s := range []*sequence{long, short} {
				if want := alone(t, w, "f16", "native", s); !sameBits(s.scores, want.scores) {
					t.Errorf("%v, %d threads, %d tokens: bits differ", typ, threads, len(s.ids))
				}
			}
		}
	}
}

// TestPromptTops: the most probable tokens in the place of a prompt token are
// those that a draw there tells of, and a list that nobody asked for stays nil.
func TestPromptTops(t *testing.T) {
	w := smallWeights(kernels.Q8_0)
	e := newCPU(t, w, Config{Pages: 50, PageSize: 16, Threads: 2})
	s := newSequence(rand.New(rand.NewPCG(4, 4)), 70)
	s.targets[9] = -1
	run(t, e, s.row(pages(0, 50), 0, len(s.ids)))
	for n := 1; n <= len(s.ids); n++ {
		r := Row{Tokens: s.ids[:n], Pages: pages(0, 50), Sample: &Sampling{Logprobs: 3}}
		want := run(t, e, r)[0].Out.Top
		if n-1 == 9 {
			want = nil
		}
		if got := s.tops[n-1]; !slices.Equal(got, want) || len(got) != len(want) {
			t.Fatalf("after %d tokens: %v, want %v", n, got, want)
		}
	}
}

// TestDecodeEqualsPrefill feeds the built-in model a text token by token, and
// at once.
func TestDecodeEqualsPrefill(t *testing.T) {
	w := builtin(t)
	e := newCPU(t, w, Config{Pages: 40, PageSize: 16, Threads: 2})
	ids := text(100, 5)
	var one []float32
	for i := range ids {
		run(t, e, Row{Tokens: ids[i : i+1], Start: i, Pages: pages(0, 10), Sample: &Sampling{Logprobs: -1}})
		one = slices.Clone(e.logits[:e.Vocab()])
	}
	run(t, e, Row{Tokens: ids, Pages: pages(20, 10), Sample: &Sampling{Logprobs: -1}})
	if !sameBits(one, e.logits[:e.Vocab()]) {
		t.Error("the logits differ")
	}
	for l := range 4 {
		for i := range 6 { // whole pages
			if !bytes.Equal(e.Memory(0).Extent(l, kv.Page(i), 0, 4), e.Memory(0).Extent(l, kv.Page(20+i), 0, 4)) {
				t.Errorf("layer %d, page %d: KV differs", l, i)
			}
		}
	}
}

// TestLayerDone: when a layer is announced, its KV is final, and attention is
// still to come.
func TestLayerDone(t *testing.T) {
	e := newCPU(t, smallWeights(kernels.Q4_1), Config{Pages: 4, PageSize: 16, TP: 2, Threads: 2})
	var then [][]byte
	b := &Batch{Rows: []Row{{Tokens: []int32{1, 2, 3, 4, 5}, Pages: pages(1, 1)}}}
	b.LayerDone = func(l int) {
		if l != len(then)/2 {
			t.Errorf("layer %d is done after %d others", l, len(then)/2)
		}
		for rank := range 2 {
			then = append(then, slices.Clone(e.Memory(rank).Extent(l, 1, 0, 2)))
		}
	}
	if err := pass(e, b); err != nil {
		t.Fatal(err)
	}
	if len(then) != 4 {
		t.Fatalf("%d layers announced, want 2", len(then)/2)
	}
	for i, was := range then {
		if !bytes.Equal(was, e.Memory(i%2).Extent(i/2, 1, 0, 2)) || bytes.Count(was, []byte{0}) == len(was) {
			t.Errorf("layer %d, rank %d: KV was not final when it was announced", i/2, i%2)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	e := newCPU(t, smallWeights(kernels.Q8_0), Config{Pages: 8, PageSize: 16, Context: 100, MaxBatchTokens: 40})
	ok := func() Row { return Row{Tokens: []int32{1, 2}, Pages: pages(0, 8), Sample: &Sampling{}} }
	for name, c := range map[string]struct {
		change func(r *Row)
		want   string
	}{
		"no tokens":            {func(r *Row) { r.Tokens = nil }, "no tokens"},
		"past the context":     {func(r *Row) { r.Start = 99 }, "positions 99 to 101, the context has 100"},
		"far past the context": {func(r *Row) { r.Start = math.MaxInt }, "the context has 100"},
		"before the start":     {func(r *Row) { r.Start = -1 }, "positions -1"},
		"too few pages":        {func(r *Row) { r.Start, r.Pages = 15, pages(0, 1) }, "1 pages of 16 tokens, too few for 17 positions"},
		"page out of range":    {func(r *Row) { r.Pages = pages(1, 8) }, "page 8, there are 8"},
		"negative page":        {func(r *Row) { r.Pages = pages(-1, 8) }, "page -1"},
		"token out of range":   {func(r *Row) { r.Tokens = []int32{101} }, "token 101, the vocabulary has 101"},
		"too many tokens":      {func(r *Row) { r.Tokens = make([]int32, 41) }, "batch of 41 tokens, at most 40"},
		"top":                  {func(r *Row) { r.Top = -1 }, "-1 most probable tokens"},
		"top without lists":    {func(r *Row) { r.Targets, r.Scores, r.Top = []int32{1, 1}, make([]float32, 2), 2 }, "2 targets and 0 lists"},
		"targets":              {func(r *Row) { r.Targets = []int32{1} }, "1 targets and 0 scores for 2 tokens"},
		"temperature":          {func(r *Row) { r.Sample.Temperature = float32(math.NaN()) }, "not a finite number"},
		"negative temperature": {func(r *Row) { r.Sample.Temperature = -1 }, "temperature -1"},
		"min_p":                {func(r *Row) { r.Sample.MinP = 2 }, "min_p 2"},
		"repetition":           {func(r *Row) { r.Sample.Repetition = -1 }, "repetition penalty -1"},
		"no history":           {func(r *Row) { r.Sample.Presence, r.Index = 1, 1 }, "history of 0 tokens, 1 of them output"},
		"bias":                 {func(r *Row) { r.Sample.LogitBias = []Bias{{101, 1}} }, "token 101"},
		"infinite bias":        {func(r *Row) { r.Sample.LogitBias = []Bias{{1, float32(math.Inf(-1))}} }, "bias -Inf"},
		"log-probabilities":    {func(r *Row) { r.Sample.Logprobs = 1000 }, "1000 log-probabilities"},
	} {
		r := ok()
		c.change(&r)
		err := pass(e, &Batch{Rows: []Row{r}})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, c.want)
		}
		r = ok()
		run(t, e, r) // the engine goes on
	}
	run(t, e) // no work is no error
}

// A row that cannot be computed is left out, wherever it stands and on both
// engines: the others have what they have without it, and its pages are as they were.
func TestBadRowIsLeftOut(t *testing.T) {
	cfg := Config{Pages: 8, PageSize: 16}
	sim, err := NewSim(fast(cfg))
	if err != nil {
		t.Fatal(err)
	}
	for name, e := range map[string]Engine{"cpu": newCPU(t, smallWeights(kernels.Q8_0), cfg), "sim": sim} {
		good := func(at int) Row {
			return Row{Tokens: []int32{1, 2, int32(at)}, Pages: pages(at, 1), Sample: &Sampling{Logprobs: 2}}
		}
		want := []Output{run(t, e, good(0))[0].Out, run(t, e, good(1))[0].Out}
		bad := Row{Tokens: []int32{3, int32(e.Vocab())}, Pages: pages(5, 1), Sample: &Sampling{}}
		before := slices.Clone(e.Memory(0).Extent(0, 5, 0, 1))
		for at := range 3 {
			rows := slices.Insert([]Row{good(0), good(1)}, at, bad)
			if err := e.Run(&Batch{Rows: rows, LayerDone: func(int) {
				if rows[at].Err == nil {
					t.Errorf("%s: a layer is done, and the bad row is not marked", name)
				}
			}}); err != nil || rows[at].Err == nil || !strings.Contains(rows[at].Err.Error(), "the vocabulary has") {
				t.Errorf("%s, bad row at %d: %v, %v", name, at, err, rows[at].Err)
			}
			rows = slices.Delete(rows, at, at+1)
			for i := range rows {
				if rows[i].Err != nil || !reflect.DeepEqual(rows[i].Out, want[i]) {
					t.Errorf("%s, bad row at %d: row %d has %+v (%v), alone %+v", name, at, i, rows[i].Out, rows[i].Err, want[i])
				}
			}
		}
		if !bytes.Equal(before, e.Memory(0).Extent(0, 5, 0, 1)) {
			t.Errorf("%s: the bad row's page was written to", name)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	w := smallWeights(kernels.Q8_0)
	for _, c := range []Config{
		{Pages: 0, PageSize: 16}, {Pages: 1, PageSize: 0}, {Pages: 1, PageSize: 16, TP: 3}, {Pages: 1, PageSize: 16, TP: -1},
		{Pages: 1, PageSize: 16, KVDType: "q8_0"}, {Pages: 1, PageSize: 16, Context: 701}, {Pages: 1, PageSize: 16, Threads: -1},
		{Pages: 1, PageSize: 16, Precision: "f64"}, {Pages: math.MaxInt32, PageSize: 4096}, {Pages: 1, PageSize: 16, MaxBatchTokens: 1 << 30},
	} {
		if e, err := New(w, c); err == nil {
			e.Close()
			t.Errorf("New took %+v", c)
		}
	}
}

// TestFormatsAgree: what a file may hold is what can be computed, in the same
// number of bytes.
func TestFormatsAgree(t *testing.T) {
	known := 0
	for n := range 256 {
		values, bytes := model.Type(n).Block()
		size := 256
		if values > 0 {
			known++
			size = 256 / values * bytes
		}
		if _, err := kernels.NewMatrix(kernels.Type(n), 1, 256, make([]byte, size)); (err == nil) != (values > 0) {
			t.Errorf("%v: %d values in %d bytes, but %v", model.Type(n), values, bytes, err)
		}
	}
	if known != len(weightTypes) {
		t.Errorf("%d types, %d are tested", known, len(weightTypes))
	}
}

// TestDamage: KV that is not a number ends the row that reads it, by name.
func TestDamage(t *testing.T) {
	e := newCPU(t, smallWeights(kernels.Q4_1), Config{Pages: 8, PageSize: 16})
	run(t, e, Row{Tokens: []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, Pages: pages(0, 4)})
	v := e.Memory(0).Extent(1, 0, 2, 1)
	binary.LittleEndian.PutUint16(v[16*16*2:], 0x7e00)
	b := &Batch{Rows: []Row{
		{Tokens: []int32{1}, Pages: pages(4, 1), Sample: &Sampling{}},
		{Tokens: []int32{1}, Start: 10, Pages: pages(0, 1), Sample: &Sampling{}},
	}}
	if err := e.Run(b); err != nil || b.Rows[0].Err != nil || b.Rows[1].Err == nil || !strings.Contains(b.Rows[1].Err.Error(), "NaN") {
		t.Errorf("error %v, rows %v and %v, want NaN in row 1 alone", err, b.Rows[0].Err, b.Rows[1].Err)
	}
}

// TestBadScales: a file may hold scales that are infinite or no numbers. They
// end the rows that meet them, by name, and never give a token.
func TestBadScales(t *testing.T) {
	for _, typ := range weightTypes {
		for _, precision := range []string{"native", "f32"} {
			w := smallWeights(typ)
			// All bits set are a NaN in floats and halves alike.
			down := &w.blocks[1].down
			bad, err := kernels.NewMatrix(typ, down.Rows, down.Cols, bytes.Repeat([]byte{0xff}, down.Bytes()))
			if err != nil {
				t.Fatal(err)
			}
			*down = bad
			e := newCPU(t, w, Config{Pages: 8, PageSize: 16, Precision: precision})
			for _, n := range []int{1, 20} {
				b := &Batch{Rows: []Row{{Tokens: make([]int32, n), Pages: pages(0, 4), Sample: &Sampling{}}}}
				if err := e.Run(b); err != nil || b.Rows[0].Err == nil || !strings.Contains(b.Rows[0].Err.Error(), "NaN") {
					t.Errorf("%v, %s, %d tokens: %v, %v, want NaN in row 0", typ, precision, n, err, b.Rows[0].Err)
				}
			}
		}
	}
}

// TestKVTokenBytes: what a token takes in each dtype, and which heads do not fit.
func TestKVTokenBytes(t *testing.T) {
	for _, c := range []struct {
		dtype    string
		dim, n   int
		complain string
	}{
		{"f32", 80, 640, ""}, {"f16", 80, 320, ""}, {"q8_0", 64, 136, ""}, {"q8_0", 128, 272, ""},
		{"q8_0", 80, 0, "blocks of 32 values, the model's heads have 80"}, {"q4_0", 64, 0, `"q4_0"; f16, f32 and q8_0`},
	} {
		n, err := KVTokenBytes(c.dtype, c.dim)
		if n != c.n || (err == nil) != (c.complain == "") || err != nil && !strings.Contains(err.Error(), c.complain) {
			t.Errorf("%s with heads of %d: %d bytes, %v", c.dtype, c.dim, n, err)
		}
	}
}

func TestFingerprint(t *testing.T) {
	w := smallWeights(kernels.Q6_K) // its heads have 32 values
	base := Config{Pages: 8, PageSize: 16}
	print := func(c Config) string { return newCPU(t, w, c).Fingerprint() }
	if print(base) != print(Config{Pages: 9, PageSize: 32, TP: 2, Threads: 2, MaxBatchTokens: 9}) {
		t.Error("it depends on what changes no bit")
	}
	for _, c := range []Config{{Pages: 8, PageSize: 16, Context: 5}, {Pages: 8, PageSize: 16, KVDType: "f32"}, {Pages: 8, PageSize: 16, KVDType: "q8_0"}, {Pages: 8, PageSize: 16, Precision: "f32"}} {
		if print(base) == print(c) {
			t.Errorf("%+v has the same", c)
		}
	}
}

func TestAllocates(t *testing.T) {
	for _, typ := range []kernels.Type{kernels.F16, kernels.Q4_1} {
		e := newCPU(t, smallWeights(typ), Config{Pages: 30, PageSize: 16, Threads: 2})
		b := &Batch{Rows: []Row{
			{Tokens: text(80, 1)[:1], Start: 40, Index: 3, Pages: pages(0, 10), Sample: &Sampling{
				Temperature: 1, TopK: 20, TopP: 0.9, Logprobs: 5, Presence: 1, Repetition: 1.1, LogitBias: []Bias{{3, 1}},
			}, History: []int32{1, 2, 3, 4}},
			{Tokens: make([]int32, 70), Pages: pages(10, 10), Sample: &Sampling{Logprobs: -1}},
		}, LayerDone: func(int) {}}
		long := &Batch{Rows: []Row{{Tokens: []int32{1}, Start: 400, Pages: pages(0, 26), Sample: &Sampling{Logprobs: -1}}}} // its attention is divided
		for _, b := range []*Batch{b, long} {
			if n := testing.AllocsPerRun(20, func() {
				if err := pass(e, b); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("a batch allocates %v times", n)
			}
		}
	}
}

// TestClose closes an engine that is running, from another goroutine.
func TestClose(t *testing.T) {
	e := newCPU(t, smallWeights(kernels.Q8_0), Config{Pages: 8, PageSize: 16, Threads: 3})
	var wg sync.WaitGroup
	b := &Batch{Rows: []Row{{Tokens: []int32{1}, Pages: pages(0, 1)}}}
	b.LayerDone = func(l int) {
		if l == 0 {
			wg.Go(e.Close)
			for !e.closed.Load() { // Close has begun
			}
		}
	}
	if err := e.Run(b); !errors.Is(err, ErrClosed) {
		t.Errorf("Run ended with %v", err)
	}
	wg.Wait()
	e.Close()
	if err := e.Run(b); !errors.Is(err, ErrClosed) {
		t.Errorf("Run after Close ended with %v", err)
	}
}

func TestExtentPanics(t *testing.T) {
	e := newCPU(t, smallWeights(kernels.Q8_0), Config{Pages: 8, PageSize: 16, TP: 2})
	if n := len(e.Memory(1).Extent(1, 7, 0, 2)); n != 2*16*64 {
		t.Errorf("extent of %d bytes", n)
	}
	for _, c := range [][4]int{{2, 0, 0, 1}, {-1, 0, 0, 1}, {0, 8, 0, 1}, {0, -1, 0, 1}, {0, 0, 1, 2}, {0, 0, -1, 1}, {0, 0, 0, 0}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("extent %v exists", c)
				}
			}()
			e.Memory(0).Extent(c[0], kv.Page(c[1]), c[2], c[3])
		}()
	}
}
