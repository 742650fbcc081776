package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
)

// TestGolden holds every bit of some results. It must pass on every machine,
// with every kernel. A change that breaks it changes answers: it needs a new
// Revision, and then new values here.
func TestGolden(t *testing.T) {
	defer kernels.Use(kernels.Path())
	for _, path := range kernels.Paths() {
		if err := kernels.Use(path); err != nil {
			t.Fatal(err)
		}
		t.Run(path, testGolden)
	}
}

func testGolden(t *testing.T) {
	want := map[string]string{
		"F32 f16":  "f694c729623c4eaf",
		"F16 f32":  "d628c174992a6028",
		"BF16 f16": "7856a6e6d47579ab",
		"Q4_0 f16": "4569f82dca97d703",
		"Q4_1 f16": "c7091a7e009c45f1",
		"Q4_1 f32": "de58be0172ab49c9",
		"Q5_0 f16": "307ed79b53ad768e",
		"Q5_1 f16": "be1137193a566335",
		"Q4_K f16": "9a042f3cbf4c6985",
		"Q5_K f16": "e42f3969e100414e",
		"Q6_K f16": "50a37e4c77706b28",
		"Q8_0 f16": "0ddf39e9fa62f11b",
		"Q6_K q8":  "f3f1304bd13e85f2",
		"qwen2":    "ae0628b853608961",
		"qwen3":    "246228131c06fd78",
		"tiny f16": "7d6222f3bae9ff7d",
		"draws":    "608c55defb4b3b74",
	}
	got := map[string]string{
		"F16 f32":  golden(t, smallWeights(kernels.F16), "f32"),
		"Q4_1 f32": golden(t, smallWeights(kernels.Q4_1), "f32"),
		"Q6_K q8":  golden(t, smallWeights(kernels.Q6_K), "q8_0"),
		"qwen2":    golden(t, smallWeights(kernels.Q8_0).as("qwen2"), "f16"),
		"qwen3":    golden(t, smallWeights(kernels.Q4_1).as("qwen3"), "f16"),
		"tiny f16": golden(t, builtin(t), "f16"),
		"draws":    goldenDraws(t),
	}
	for _, typ := range weightTypes {
		if typ != kernels.F16 {
			got[typ.String()+" f16"] = golden(t, smallWeights(typ), "f16")
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d results, want %d", len(got), len(want))
	}
	for name, w := range want {
		if got[name] != w {
			t.Errorf("%s: %s, want %s (revision %d)", name, got[name], w, Revision)
		}
	}
}

// golden is a digest of the log-probabilities of all targets of a sequence, and
// of the last position's best.
func golden(t *testing.T, w *Weights, dtype string) string {
	s := newSequence(rand.New(rand.NewPCG(11, 12)), 150)
	s = alone(t, w, dtype, "native", s)
	var b []byte
	for _, f := range s.scores {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	for _, l := range s.all {
		b = binary.LittleEndian.AppendUint32(b, uint32(l.ID))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(l.Logprob))
	}
	return digest(b)
}

func goldenDraws(t *testing.T) string {
	logits := make([]float32, 300)
	for i := range logits {
		logits[i] = float32(i*i%97) / 12
	}
	s := newSampler(len(logits))
	var b []byte
	for i := range 400 {
		w := Sampling{
			Temperature: float32(i%5) / 2, TopK: i % 3 * 50, TopP: float32(i%4) / 4, MinP: float32(i%2) / 50,
			Presence: 0.5, Frequency: 0.25, Repetition: 1.25, Seed: uint64(i), Choice: i % 2,
		}
		r := Row{Tokens: []int32{1}, Start: i, Sample: &w, History: []int32{3, 5, 7, 5}, Index: 2}
		s.draw(logits, &r)
		b = binary.LittleEndian.AppendUint32(b, uint32(r.Out.Token))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(r.Out.Logprob))
	}
	return digest(b)
}

func digest(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b))[:16] }

// TestPathsSmolLM2: every path gives the same bits of all logits of a real model.
func TestPathsSmolLM2(t *testing.T) {
	if raced {
		t.Skip("whole models are left to the plain tests")
	}
	w := openModel(t, smolLM2(t))
	defer kernels.Use(kernels.Path())
	var want []float32
	paths := kernels.Paths()
	for _, path := range paths {
		if err := kernels.Use(path); err != nil {
			t.Fatal(err)
		}
		e := newCPU(t, w, Config{Pages: 4, PageSize: 16})
		run(t, e, Row{Tokens: text(9, 1), Pages: pages(0, 4), Sample: &Sampling{}})
		run(t, e, Row{Tokens: []int32{7}, Start: 9, Pages: pages(0, 4), Sample: &Sampling{}, Index: 1})
		got := e.logits[:e.Vocab()]
		if want == nil {
			want = got
		} else if !sameBits(got, want) {
			t.Errorf("the logits of %s are not those of %s", path, paths[0])
		}
	}
}
