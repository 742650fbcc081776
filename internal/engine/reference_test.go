package engine

import (
	"cmp"
	"encoding/json"
	"flag"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/model"
	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// These tests compare whole models with what other engines computed from the
// same files (testdata/tiny-model, testdata/smollm2).

var nllTokens = flag.Int("nll-tokens", 512, "tokens of the SmolLM2 text to score in f32, at most 2012")

type decoded struct {
	IDs []int32
	Top [][][2]float64
}

type tinyReference struct {
	Prompts []struct {
		Name string
		IDs  []int32
		F16  decoded `json:"torch_f16_weights"`
		Q8   decoded `json:"llama_cpp_q8_0"`
	}
}

func readJSON(t testing.TB, path string, into any) {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatal(err)
	}
}

func builtin(t testing.TB) *Weights {
	f, err := model.OpenBytes("tiny", model.Builtin())
	if err != nil {
		t.Fatal(err)
	}
	return load(t, f)
}

func openModel(t testing.TB, path string) *Weights {
	f, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return load(t, f)
}

func load(t testing.TB, f *model.File) *Weights {
	w, err := LoadWeights(f)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func newCPU(t testing.TB, w *Weights, cfg Config) *CPU {
	e, err := New(w, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// pages is a block table of n pages, first … first+n-1.
func pages(first, n int) []kv.Page {
	p := make([]kv.Page, n)
	for i := range p {
		p[i] = kv.Page(first + i)
	}
	return p
}

// greedy runs a prompt and then n tokens, one batch each.
func greedy(t testing.TB, e Engine, prompt []int32, table []kv.Page, n int) (ids []int32, top [][]TokenLogprob) {
	tokens, start := prompt, 0
	for i := range n {
		b := &Batch{Rows: []Row{{Tokens: tokens, Start: start, Pages: table, Index: i, Sample: &Sampling{Logprobs: 10}}}}
		if err := pass(e, b); err != nil {
			t.Fatal(err)
		}
		out := b.Rows[0].Out
		ids, top = append(ids, out.Token), append(top, out.Top)
		start += len(tokens)
		tokens = []int32{out.Token}
	}
	return ids, top
}

func TestTinyF16(t *testing.T) {
	if raced {
		t.Skip("slow under the race detector")
	}
	var ref tinyReference
	readJSON(t, "../../testdata/tiny-model/reference.json", &ref)
	w := openModel(t, "../../testdata/tiny-model/tiny-f16.gguf")
	e := newCPU(t, w, Config{Pages: 24, PageSize: 16, KVDType: "f32"})
	for _, p := range ref.Prompts {
		ids, top := greedy(t, e, p.IDs, pages(0, 24), len(p.F16.IDs))
		if !slices.Equal(ids, p.F16.IDs) {
			t.Errorf("%s: tokens %v\nwant %v", p.Name, ids, p.F16.IDs)
			continue
		}
		compareTop(t, p.Name, top, p.F16.Top, 1e-4)
	}
	if len(ref.Prompts) == 0 {
		t.Error("the reference has no prompts")
	}
}

// compareTop looks up each expected token among the best: neighbours closer
// than the tolerance may have changed places.
func compareTop(t *testing.T, name string, top [][]TokenLogprob, want [][][2]float64, within float64) {
	for i, best := range want {
		for _, w := range best {
			j := slices.IndexFunc(top[i], func(l TokenLogprob) bool { return l.ID == int32(w[0]) })
			if j < 0 || math.Abs(float64(top[i][j].Logprob)-w[1]) > within {
				t.Errorf("%s: position %d: token %v with %v is not among %v", name, i, w[0], w[1], top[i])
			}
		}
	}
}

// TestTinyQ8 compares with llama.cpp, which rounds activations to int8 as we
// do, but scales them by an f16: tokens may part where the two best are close.
func TestTinyQ8(t *testing.T) {
	var ref tinyReference
	readJSON(t, "../../testdata/tiny-model/reference.json", &ref)
	e := newCPU(t, builtin(t), Config{Pages: 24, PageSize: 16, KVDType: "f32"})
	for _, p := range ref.Prompts {
		ids, top := greedy(t, e, p.IDs, pages(0, 24), len(p.Q8.IDs))
		n := 0
		for n < len(ids) && ids[n] == p.Q8.IDs[n] {
			n++
		}
		if n < len(ids) {
			gap := top[n][0].Logprob - top[n][1].Logprob
			t.Logf("%s: parts at token %d, where the two best are %.4f apart", p.Name, n, gap)
			if gap >= 0.1 {
				t.Errorf("%s: token %d is %d, want %d", p.Name, n, ids[n], p.Q8.IDs[n])
			}
		}
		compareTop(t, p.Name, top, p.Q8.Top[:min(n, len(p.Q8.Top))], 0.1)
	}
}

// TestKVQ8 scores a text with K and V in eight bits: another result than with
// f32, by a small error.
func TestKVQ8(t *testing.T) {
	var ref tinyReference
	readJSON(t, "../../testdata/tiny-model/reference.json", &ref)
	w := builtin(t)
	var ids []int32
	for _, p := range ref.Prompts {
		ids = append(append(ids, p.IDs...), p.F16.IDs...)
	}
	ids = ids[:min(len(ids), 256)]
	nll := func(dtype string) []float64 {
		return score(t, newCPU(t, w, Config{Pages: 24, PageSize: 16, KVDType: dtype}), ids)
	}
	mean, p99, worst := differences(nll("q8_0"), nll("f32"))
	t.Logf("against KV in f32: mean %.4f, p99 %.4f, largest %.4f nats", mean, p99, worst)
	if !(mean < 0.02 && mean > 1e-4) {
		t.Errorf("nll differs from that with KV in f32 by %.4f in the mean", mean)
	}
}

// smolLM2 is the path of a real model, which is not part of the repository.
func smolLM2(t testing.TB) string {
	if raced {
		t.Skip("slow under the race detector")
	}
	return modeltest.SmolLM2(t)
}

type smolReference struct {
	Perplexity struct {
		IDs []int32                 `json:"token_ids"`
		Q4  struct{ NLL []float64 } `json:"q4_1"`
		F32 struct{ NLL []float64 }
	}
	Prompts []struct {
		Name string
		IDs  []int32 `json:"prompt_ids"`
		F32  struct {
			IDs     []int32
			Logprob []float64
		}
	}
}

// score is the negative log-likelihood of all tokens of each text but its first,
// in chunks of 512.
func score(t testing.TB, e *CPU, texts ...[]int32) []float64 {
	var nll []float64
	for _, ids := range texts {
		table := pages(0, e.Geometry().PagesFor(len(ids)))
		for from := 0; from < len(ids)-1; from += 512 {
			n := min(512, len(ids)-1-from)
			r := Row{Tokens: ids[from : from+n], Start: from, Pages: table, Targets: ids[from+1 : from+n+1], Scores: make([]float32, n)}
			if err := pass(e, &Batch{Rows: []Row{r}}); err != nil {
				t.Fatal(err)
			}
			for _, s := range r.Scores {
				nll = append(nll, -float64(s))
			}
		}
	}
	return nll
}

func differences[F float32 | float64](got []float64, want []F) (mean, p99, worst float64) {
	var d []float64
	for i, g := range got {
		d = append(d, math.Abs(g-float64(want[i])))
		mean += d[i] / float64(len(got))
	}
	slices.SortFunc(d, cmp.Compare)
	return mean, d[len(d)*99/100], d[len(d)-1]
}

// affordable is how many of n tokens a test run can compute: few without
// vector units.
func affordable(n, portable int) int {
	if kernels.Path() == "portable" {
		return min(n, portable)
	}
	return n
}

// comparePerplexity: over the whole text it is that of the f32 record.
func comparePerplexity(t *testing.T, nll []float64, within float64) {
	t.Helper()
	sum := 0.0
	for _, x := range nll {
		sum += x
	}
	got := math.Exp(sum / float64(len(nll)))
	t.Logf("perplexity of %d tokens %.4f", len(nll), got)
	if len(nll) == 2011 && !(math.Abs(got-37.081) <= within) {
		t.Errorf("perplexity %.4f, want 37.081 ± %.4f", got, within)
	}
}

// TestSmolLM2 scores a text with int8 activations. Their rounding is worth
// 0.05 to 0.07 nats a token, whoever does it; the class is that of llama.cpp.
func TestSmolLM2(t *testing.T) {
	w := openModel(t, smolLM2(t))
	var ref smolReference
	readJSON(t, "../../testdata/smollm2/reference.json", &ref)
	e := newCPU(t, w, Config{Pages: 130, PageSize: 16, Context: 2048})
	nll := score(t, e, ref.Perplexity.IDs[:affordable(2012, 256)])
	mean, p99, worst := differences(nll, ref.Perplexity.F32.NLL)
	t.Logf("against f32: mean %.4f, p99 %.4f, largest %.4f nats", mean, p99, worst)
	if !(mean <= 0.06 && p99 <= 0.26) {
		t.Errorf("nll differs from the f32 record by %.4f (mean), %.4f (p99), want at most 0.06, 0.26", mean, p99)
	}
	comparePerplexity(t, nll, 37.081*0.005)
}

// TestSmolLM2Precise computes in f32 throughout, where engines agree to the
// rounding of float sums.
func TestSmolLM2Precise(t *testing.T) {
	w := openModel(t, smolLM2(t))
	var ref smolReference
	readJSON(t, "../../testdata/smollm2/reference.json", &ref)
	e := newCPU(t, w, Config{Pages: 130, PageSize: 16, Context: 2048, KVDType: "f32", Precision: "f32"})
	nll := score(t, e, ref.Perplexity.IDs[:affordable(*nllTokens, 64)])
	mean, p99, worst := differences(nll, ref.Perplexity.F32.NLL)
	t.Logf("against f32: mean %.3g, p99 %.3g, largest %.3g nats", mean, p99, worst)
	if !(worst <= 1e-3) {
		t.Errorf("nll differs from the f32 record by %.3g, want at most 1e-3", worst)
	}
	comparePerplexity(t, nll, 0.005)
	b := &Batch{}
	for i, p := range ref.Prompts {
		b.Rows = append(b.Rows, Row{Tokens: p.IDs, Pages: pages(10*i, 10), Sample: &Sampling{}})
	}
	for at := range affordable(48, 8) {
		if err := pass(e, b); err != nil {
			t.Fatal(err)
		}
		for i := range b.Rows {
			r, want := &b.Rows[i], &ref.Prompts[i]
			if r.Out.Token != want.F32.IDs[at] || math.Abs(float64(r.Out.Logprob)-want.F32.Logprob[at]) > 1e-3 {
				t.Fatalf("%s: token %d is %d with %v, want %d with %v", want.Name, at, r.Out.Token, r.Out.Logprob, want.F32.IDs[at], want.F32.Logprob[at])
			}
			r.Start += len(r.Tokens)
			r.Tokens = []int32{r.Out.Token}
		}
	}
}
