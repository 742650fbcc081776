package engine

import (
	"fmt"
	"testing"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
)

// benchPrefill computes a prompt of n tokens in chunks of 512.
func benchPrefill(b *testing.B, w *Weights, n int) {
	e := newCPU(b, w, Config{Pages: n/16 + 1, PageSize: 16})
	ids, table := text(n, 1), pages(0, n/16+1)
	for b.Loop() {
		for from := 0; from < n; from += 512 {
			r := Row{Tokens: ids[from:min(from+512, n)], Start: from, Pages: table}
			if from+512 >= n {
				r.Sample = &Sampling{Logprobs: -1}
			}
			run(b, e, r)
		}
	}
	b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "tokens/s")
}

// benchDecode computes one token of each of some sequences, which hold 256.
func benchDecode(b *testing.B, w *Weights, seqs int) {
	const held = 256
	e := newCPU(b, w, Config{Pages: seqs * (held/16 + 1), PageSize: 16})
	batch := &Batch{}
	for i := range seqs {
		table := pages(i*(held/16+1), held/16+1)
		run(b, e, Row{Tokens: text(held, 1), Pages: table})
		batch.Rows = append(batch.Rows, Row{Tokens: []int32{5}, Start: held, Index: 1, Pages: table, Sample: &Sampling{Logprobs: -1}})
	}
	for b.Loop() {
		if err := pass(e, batch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(seqs*b.N)/b.Elapsed().Seconds(), "tokens/s")
}

func BenchmarkTiny(b *testing.B) { benchModel(b, builtin(b)) }

func BenchmarkSmolLM2(b *testing.B) { benchModel(b, openModel(b, smolLM2(b))) }

// benchModel compares all paths in one run.
func benchModel(b *testing.B, w *Weights) {
	defer kernels.Use(kernels.Path())
	for _, path := range kernels.Paths() {
		if err := kernels.Use(path); err != nil {
			b.Fatal(err)
		}
		b.Run(path, func(b *testing.B) { benchPath(b, w) })
	}
}

func benchPath(b *testing.B, w *Weights) {
	for _, n := range []int{128, 512, 1024} {
		b.Run(fmt.Sprintf("prefill/%d", n), func(b *testing.B) { benchPrefill(b, w, n) })
	}
	for _, n := range []int{1, 4, 8, 16} {
		b.Run(fmt.Sprintf("decode/%d", n), func(b *testing.B) { benchDecode(b, w, n) })
	}
}
