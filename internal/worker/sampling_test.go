package worker

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/metronome-serve/metronome/internal/engine"
)

const vocab = 1000

func TestSamplingTravels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := func(name string, low, high float32) float32 { return rapid.Float32Range(low, high).Draw(t, name) }
		s := engine.Sampling{
			Temperature: f("temperature", 0, 2), TopP: f("top_p", 0, 1), MinP: f("min_p", 0, 1), TopK: rapid.IntRange(-1, 1000).Draw(t, "top_k"),
			Seed: rapid.Uint64().Draw(t, "seed"), Choice: rapid.IntRange(0, 9).Draw(t, "choice"),
			Presence: f("presence", -2, 2), Frequency: f("frequency", -2, 2), Repetition: f("repetition", 0.01, 2),
			Logprobs: rapid.IntRange(-1, 128).Draw(t, "logprobs"),
		}
		for range rapid.IntRange(0, 5).Draw(t, "biases") {
			s.LogitBias = append(s.LogitBias, engine.Bias{ID: rapid.Int32Range(0, vocab-1).Draw(t, "id"), Add: f("bias", -100, 100)})
		}
		got, err := decodeSampling(encodeSampling(&s), vocab)
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Fatalf("got %+v, %v; want %+v", got, err, s)
		}
	})
}

func TestSamplingRefuses(t *testing.T) {
	good := engine.Sampling{Temperature: 1, LogitBias: []engine.Bias{{ID: 3, Add: 1}}}
	for name, c := range map[string]struct {
		change func(s *engine.Sampling)
		cut    func(b []byte) []byte
		has    string
	}{
		"empty":       {cut: func([]byte) []byte { return nil }, has: "0 bytes"},
		"short":       {cut: func(b []byte) []byte { return b[:len(b)-1] }, has: "cannot hold 1"},
		"long":        {cut: func(b []byte) []byte { return append(b, 0) }, has: "cannot hold 1"},
		"version":     {cut: func(b []byte) []byte { b[0] = 9; return b }, has: "version 9"},
		"nan":         {change: func(s *engine.Sampling) { s.TopP = float32(math.NaN()) }, has: "not a finite"},
		"infinite":    {change: func(s *engine.Sampling) { s.Frequency = float32(math.Inf(1)) }, has: "not a finite"},
		"bias id":     {change: func(s *engine.Sampling) { s.LogitBias[0].ID = vocab }, has: "token 1000"},
		"bias nan":    {change: func(s *engine.Sampling) { s.LogitBias[0].Add = float32(math.NaN()) }, has: "NaN"},
		"cold":        {change: func(s *engine.Sampling) { s.Temperature = -1 }, has: "temperature -1"},
		"choice":      {change: func(s *engine.Sampling) { s.Choice = -1 }, has: "choice -1"},
		"logprobs":    {change: func(s *engine.Sampling) { s.Logprobs = 5000 }, has: "5000 log-probabilities"},
		"penalty":     {change: func(s *engine.Sampling) { s.Repetition = 0.009 }, has: "repetition penalty 0.009"},
		"many biases": {cut: func(b []byte) []byte { b[samplingHead-1] = 0xff; return b }, has: "cannot hold"},
	} {
		s := good
		s.LogitBias = append([]engine.Bias(nil), good.LogitBias...)
		if c.change != nil {
			c.change(&s)
		}
		b := encodeSampling(&s)
		if c.cut != nil {
			b = c.cut(b)
		}
		if _, err := decodeSampling(b, vocab); err == nil || !strings.Contains(err.Error(), c.has) {
			t.Errorf("%s: %v, want %q in it", name, err, c.has)
		}
	}
}

// Whatever a peer sends: no panic, and what is taken passes the engine's checks.
func FuzzDecodeSampling(f *testing.F) {
	f.Add(encodeSampling(&engine.Sampling{Temperature: 1, LogitBias: []engine.Bias{{ID: 3, Add: 1}}}))
	f.Add([]byte{samplingVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeSampling(b, vocab)
		if err == nil && s.Check(vocab) != nil {
			t.Errorf("took %+v", s)
		}
	})
}
