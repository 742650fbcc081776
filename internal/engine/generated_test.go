package engine

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/metronome-serve/metronome/internal/model"
	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// recorded is what llama.cpp gave for model files: see scripts/llamacpp/record.py.
type recorded struct {
	Prompt    int
	Positions []int
	Models    map[string]*recordedModel
}

type recordedModel struct {
	SHA256     string
	NLL        floats // f32 arithmetic
	Logits     floats // of recorded.Positions, f32 arithmetic
	Perplexity float64
	Native     struct{ Mean, P99, Max, Perplexity float64 } // |nll - NLL| of llama.cpp's own native mode
}

// floats are float32 in base64.
type floats []float32

func (f *floats) UnmarshalText(b []byte) error {
	raw, err := base64.StdEncoding.AppendDecode(nil, b)
	for ; len(raw) >= 4; raw = raw[4:] {
		*f = append(*f, math.Float32frombits(binary.LittleEndian.Uint32(raw)))
	}
	return err
}

// TestGenerated compares every architecture in every format with llama.cpp.
func TestGenerated(t *testing.T) {
	if raced {
		t.Skip("slow under the race detector")
	}
	var ref recorded
	modeltest.JSON(t, "llamacpp/generated.json", &ref)
	for _, m := range modeltest.Models() {
		t.Run(m.Name, func(t *testing.T) {
			t.Parallel()
			r := ref.Models[m.Name]
			if r == nil {
				t.Fatal("no record: make references writes it")
			}
			b := m.GGUF()
			if sum := fmt.Sprintf("%x", sha256.Sum256(b)); sum != r.SHA256 {
				t.Fatalf("the generated file has sha256 %s, the recorded one %s", sum, r.SHA256)
			}
			f, err := model.OpenBytes(m.Name, b)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := model.NewTokenizer(f); err != nil {
				t.Error(err)
			}
			w, texts := load(t, f), m.Texts()
			compareLogits(t, w, &ref, r, texts[0])
			compareExact(t, w, r, texts[:1])
			compareNative(t, w, r, texts)
		})
	}
}

// compareLogits: with --precision f32, whole rows of log-probabilities are
// those of llama.cpp's f32 arithmetic, in the prompt and decoding after it.
func compareLogits(t *testing.T, w *Weights, ref *recorded, r *recordedModel, ids []int32) {
	t.Helper()
	e := newCPU(t, w, Config{Pages: 128, PageSize: 16, KVDType: "f32", Precision: "f32"})
	n := e.Vocab()
	if len(r.Logits) != n*len(ref.Positions) {
		t.Fatalf("%d recorded logits", len(r.Logits))
	}
	at := 0
	sampler := newSampler(n)
	compare := func(from, to int) {
		row := Row{Tokens: ids[from:to], Start: from, Pages: pages(0, 64), Targets: make([]int32, to-from), Scores: make([]float32, to-from)}
		positions := ref.Positions[at:]
		for i := range row.Targets {
			row.Targets[i] = -1
			if slices.Contains(positions, from+i) {
				row.Targets[i] = 0
			}
		}
		run(t, e, row)
		for i := 0; at < len(ref.Positions) && ref.Positions[at] < to; i++ {
			got, want := e.logits[i*n:][:n], r.Logits[at*n:][:n]
			a, b, worst := sampler.logNorm(got), sampler.logNorm(want), 0.0
			for id := range got {
				worst = max(worst, math.Abs(float64(logprob(got, int32(id), a))-float64(logprob(want, int32(id), b))))
			}
			if !(worst <= 1e-3) {
				t.Errorf("position %d: log-probabilities differ by %.3g, want at most 1e-3", ref.Positions[at], worst)
			}
			at++
		}
	}
	compare(0, ref.Prompt)
	for pos := ref.Prompt; at < len(ref.Positions); pos++ {
		compare(pos, pos+1)
	}
}

// compareExact: with --precision f32 the nll of a text is that of llama.cpp's
// f32 arithmetic.
func compareExact(t *testing.T, w *Weights, r *recordedModel, texts [][]int32) {
	t.Helper()
	e := newCPU(t, w, Config{Pages: 128, PageSize: 16, KVDType: "f32", Precision: "f32"})
	mean, _, worst := differences(score(t, e, texts...), []float32(r.NLL))
	t.Logf("f32: nll differs by %.2g, at most %.2g", mean, worst)
	if !(worst <= 1e-3) {
		t.Errorf("f32: nll differs by %.3g, want at most 1e-3", worst)
	}
}

// compareNative: native mode is no further from exact arithmetic than
// llama.cpp's own, within the noise of the mean over a text.
func compareNative(t *testing.T, w *Weights, r *recordedModel, texts [][]int32) {
	t.Helper()
	e := newCPU(t, w, Config{Pages: 128, PageSize: 16})
	mean, p99, worst := differences(score(t, e, texts...), []float32(r.NLL))
	t.Logf("native: mean %.4f, p99 %.4f, largest %.4f nats from f32; llama.cpp's own %+v", mean, p99, worst, r.Native)
	if !(mean <= 1.1*r.Native.Mean) {
		t.Errorf("native: nll is %.4f (mean) from f32, llama.cpp's own %.4f", mean, r.Native.Mean)
	}
}
