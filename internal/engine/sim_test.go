package engine

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

func newSim(t testing.TB, cfg SimConfig) *Sim {
	s, err := NewSim(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// fast is a sim that takes no time.
func fast(cfg Config) SimConfig {
	return SimConfig{PrefillRate: 1e12, DecodeBase: -1, DecodePerSeq: -1, Config: cfg}
}

func run(t testing.TB, e Engine, rows ...Row) []Row {
	t.Helper()
	if err := pass(e, &Batch{Rows: rows}); err != nil {
		t.Fatal(err)
	}
	return rows
}

// pass runs a batch of which every row must do well.
func pass(e Engine, b *Batch) error {
	if err := e.Run(b); err != nil {
		return err
	}
	for i := range b.Rows {
		if err := b.Rows[i].Err; err != nil {
			return fmt.Errorf("row %d: %w", i, err)
		}
	}
	return nil
}

func text(n int, seed int32) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = (int32(i)*7919 + seed) % 256
	}
	return ids
}

// answer decodes n tokens after a prompt whose KV is in table, the first of
// them drawn already.
func answer(t testing.TB, e Engine, prompt []int32, first int32, table []kv.Page, n int, s Sampling) []int32 {
	t.Helper()
	out := []int32{first}
	for len(out) < n {
		at := len(prompt) + len(out) - 1
		out = append(out, run(t, e, Row{Tokens: out[len(out)-1:], Start: at, Pages: table, Index: len(out), Sample: &s})[0].Out.Token)
	}
	return out
}

func TestSimFollowsRefToken(t *testing.T) {
	for _, pageSize := range []int{1, 16, 24} {
		for _, tp := range []int{1, 2, 8} {
			for _, w := range []Sampling{{}, {Seed: 5}, {Temperature: 1, Seed: 5}, {Temperature: 1, Seed: 5, Choice: 1}} {
				e := newSim(t, fast(Config{Pages: 300, PageSize: pageSize, TP: tp}))
				prompt, table := text(77, 3), pages(5, 200)
				slices.Reverse(table)
				run(t, e, Row{Tokens: prompt[:40], Pages: table})
				first := run(t, e, Row{Tokens: prompt[40:], Start: 40, Pages: table, Sample: &w})[0].Out.Token
				got := answer(t, e, prompt, first, table, 30, w)
				for i, token := range got {
					if want := RefToken(prompt, got[:i], SimSeed(&w)); token != want || token < ' ' || token > '~' {
						t.Fatalf("page size %d, TP %d, %+v: token %d is %d, want %d", pageSize, tp, w, i, token, want)
					}
				}
			}
		}
	}
	a, b := RefToken(text(9, 1), nil, 0), RefToken(text(9, 1), nil, 0)
	if a != b {
		t.Errorf("RefToken is no function: %d, %d", a, b)
	}
	one, two := Sampling{Temperature: 1, Seed: 1}, Sampling{Temperature: 1, Seed: 1, Choice: 1}
	if SimSeed(&one) == SimSeed(&two) || SimSeed(&Sampling{Seed: 7}) != 0 {
		t.Error("choices share a seed, or greedy has one")
	}
}

// copyPages moves KV as transfer does: by extents of heads, between ranks.
func copyPages(from, to *Sim, table, dest []kv.Page, skip func(layer int, page int, head int) bool) {
	g := from.Geometry()
	hf, ht := g.Heads/from.cfg.TP, g.Heads/to.cfg.TP
	for layer := range g.Layers {
		for i := range table {
			for h := range g.Heads {
				if skip == nil || !skip(layer, i, h) {
					copy(to.Memory(h/ht).Extent(layer, dest[i], h%ht, 1), from.Memory(h/hf).Extent(layer, table[i], h%hf, 1))
				}
			}
		}
	}
}

// TestSimSeesFaults moves a prompt to another engine, with one fault each time,
// and expects other tokens: at once for what is there at the first batch.
func TestSimSeesFaults(t *testing.T) {
	const n, size = 100, 16
	prompt, src, dst := text(n, 9), pages(0, 10), pages(20, 10)
	p := newSim(t, fast(Config{Pages: 40, PageSize: size, TP: 2}))
	first := run(t, p, Row{Tokens: prompt, Pages: src, Sample: &Sampling{}})[0].Out.Token
	want := []int32{first}
	for len(want) < 12 {
		want = append(want, RefToken(prompt, want, 0))
	}
	moved := src[:kv.PagesFor(n, size)]
	wrong := func(d *Sim, table []kv.Page) int {
		got := answer(t, d, prompt, first, table, len(want), Sampling{})
		for i := 1; i < len(got); i++ {
			if got[i] != want[i] {
				return i
			}
		}
		return 0
	}
	at := func(l, i, h int) func(int, int, int) bool {
		return func(layer, page, head int) bool { return layer == l && page == i && head == h }
	}
	for name, c := range map[string]struct {
		skip   func(int, int, int) bool
		spoil  func(d *Sim, table []kv.Page)
		latest int // 0: no fault
	}{
		"none":                 {},
		"an extent is missing": {skip: at(2, 3, 5), latest: 3},
		"the first is missing": {skip: at(0, 0, 0), latest: 3},
		"the last is missing":  {skip: at(3, 6, 7), latest: 3},
		"pages are swapped":    {spoil: func(_ *Sim, table []kv.Page) { table[1], table[4] = table[4], table[1] }, latest: 3},
		"one bit is wrong":     {spoil: func(d *Sim, table []kv.Page) { d.Memory(0).Extent(1, table[2], 3, 1)[17] ^= 1 }, latest: 3},
		"a page of another":    {spoil: func(_ *Sim, table []kv.Page) { table[2] = 39 }, latest: 3},
	} {
		// The pages have had another life: what is known of them is stale.
		d := newSim(t, fast(Config{Pages: 40, PageSize: size}))
		table := slices.Clone(dst)
		run(t, d, Row{Tokens: text(150, 77), Pages: table, Sample: &Sampling{}})
		copyPages(p, d, moved, table, c.skip)
		if c.spoil != nil {
			c.spoil(d, table)
		}
		if got := wrong(d, table); (got != 0) != (c.latest != 0) || got > c.latest {
			t.Errorf("%s: first wrong token at %d, want it by %d", name, got, c.latest)
		}
	}
}

// TestSimSeesLateWrites changes a page behind the engine's back, long after it
// was read.
func TestSimSeesLateWrites(t *testing.T) {
	e := newSim(t, fast(Config{Pages: 40, PageSize: 16}))
	prompt, table := text(200, 1), pages(0, 40)
	kept := e.Memory(0).Extent(2, table[5], 1, 1)
	out := []int32{run(t, e, Row{Tokens: prompt, Pages: table, Sample: &Sampling{}})[0].Out.Token}
	out = answer(t, e, prompt, out[0], table, 20, Sampling{})
	kept[100] ^= 0x40
	for range 40 {
		at := len(prompt) + len(out) - 1
		got := run(t, e, Row{Tokens: out[len(out)-1:], Start: at, Pages: table, Index: len(out), Sample: &Sampling{}})[0].Out.Token
		if got != RefToken(prompt, out, 0) {
			return
		}
		out = append(out, got)
	}
	t.Error("forty tokens did not show a changed page")
}

// TestSimTime: a batch takes what the model says, layers are done at even
// distances, and Close ends a sleep.
func TestSimTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newSim(t, SimConfig{Config: Config{Pages: 512, PageSize: 16}})
		begin := time.Now()
		var layers []time.Duration
		b := &Batch{
			Rows: []Row{
				{Tokens: text(400, 1), Pages: pages(0, 32)},
				{Tokens: []int32{1}, Start: 3, Index: 2, Pages: pages(40, 1), Sample: &Sampling{}},
				{Tokens: []int32{1}, Start: 3, Index: 2, Pages: pages(41, 1), Sample: &Sampling{}},
			},
			LayerDone: func(int) { layers = append(layers, time.Since(begin)) },
		}
		if err := e.Run(b); err != nil {
			t.Fatal(err)
		}
		const total = 20*time.Millisecond + 8*time.Millisecond + 200*time.Microsecond
		if want := []time.Duration{total / 4, total / 2, total * 3 / 4, total}; !slices.Equal(layers, want) {
			t.Errorf("layers done at %v, want %v", layers, want)
		}
		go func() {
			time.Sleep(3 * time.Millisecond)
			e.Close()
		}()
		begin = time.Now()
		if err := e.Run(b); !errors.Is(err, ErrClosed) || time.Since(begin) != 3*time.Millisecond {
			t.Errorf("Run ended with %v after %v, want ErrClosed after 3ms", err, time.Since(begin))
		}
	})
}

// TestSimLateTimer: what one sleep is late comes off the next.
func TestSimLateTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newSim(t, SimConfig{Config: Config{Pages: 4, PageSize: 16}})
		e.late = 700 * time.Microsecond
		begin := time.Now()
		run(t, e, Row{Tokens: []int32{1}, Start: 3, Index: 2, Pages: pages(0, 1), Sample: &Sampling{}})
		if took := time.Since(begin); took != 8100*time.Microsecond-700*time.Microsecond {
			t.Errorf("took %v", took)
		}
	})
}

func TestSimRefuses(t *testing.T) {
	for _, c := range []SimConfig{
		{KVBytes: 1000, Config: Config{Pages: 1, PageSize: 1}},
		{PrefillRate: -1, Config: Config{Pages: 1, PageSize: 1}},
		{Config: Config{Pages: 1, PageSize: 1, TP: 3}},
		{Config: Config{Pages: 1, PageSize: 1, Context: 1 << 18}},
		{Config: Config{Pages: 1 << 31, PageSize: 4096}},
	} {
		if _, err := NewSim(c); err == nil {
			t.Errorf("NewSim took %+v", c)
		}
	}
}

func TestSimAllocates(t *testing.T) {
	e := newSim(t, fast(Config{Pages: 40, PageSize: 16}))
	b := &Batch{Rows: []Row{{Tokens: []int32{1}, Start: 100, Index: 1, Pages: pages(0, 40), Sample: &Sampling{Logprobs: 4}}}}
	run(t, e) // no work is no error
	if n := testing.AllocsPerRun(20, func() {
		if err := e.Run(b); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("a batch allocates %v times", n)
	}
}

// BenchmarkSim is a batch of 64 sequences of 8192 tokens.
func BenchmarkSim(b *testing.B) {
	const n, seqs = 8192, 64
	e := newSim(b, fast(Config{Pages: seqs * (n/16 + 1), PageSize: 16, MaxBatchTokens: n}))
	batch := &Batch{}
	for i := range seqs {
		table := pages(i*(n/16+1), n/16+1)
		run(b, e, Row{Tokens: text(n, int32(i)), Pages: table, Sample: &Sampling{}})
		batch.Rows = append(batch.Rows, Row{Tokens: []int32{1}, Start: n, Index: 1, Pages: table, Sample: &Sampling{}})
	}
	for b.Loop() {
		if err := e.Run(batch); err != nil {
			b.Fatal(err)
		}
	}
}
