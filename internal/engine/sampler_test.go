package engine

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestPhilox uses the known answers of the authors' Random123 library.
func TestPhilox(t *testing.T) {
	for _, c := range []struct {
		key       uint64
		ctr, want [4]uint32
	}{
		{0, [4]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{math.MaxUint64, [4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{0x299f31d0a4093822, [4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		if got := philox(c.key, c.ctr); got != c.want {
			t.Errorf("philox(%x, %x) = %x, want %x", c.key, c.ctr, got, c.want)
		}
	}
}

// candidate is a token of the reference sampler.
type candidate struct {
	id int
	p  float64
}

// refCandidates is docs/numerics.md in float64, by sorting: the tokens that the
// filters keep, in order, with their probabilities.
func refCandidates(logits []float64, w *Sampling) []candidate {
	var all []candidate
	top := slices.Max(logits)
	for id, l := range logits {
		all = append(all, candidate{id, math.Exp((l - top) / float64(w.Temperature))})
	}
	if (w.TopK <= 0 || w.TopK >= len(logits)) && (w.TopP <= 0 || w.TopP >= 1) && w.MinP == 0 {
		return all
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Compare(logits[b.id], logits[a.id]) })
	if w.TopK > 0 && w.TopK < len(all) {
		all = all[:w.TopK]
	}
	total, sum := 0.0, 0.0
	for _, c := range all {
		total += c.p
	}
	n := 0
	for n < len(all) && (n == 0 || w.TopP <= 0 || w.TopP >= 1 || sum < float64(w.TopP)*total) && all[n].p >= float64(w.MinP) {
		sum += all[n].p
		n++
	}
	return all[:n]
}

// refAdjust rounds where the rule says float32: with a large bias that decides
// which tokens are equal.
func refAdjust(logits []float32, w *Sampling, history, output []int32) []float64 {
	l := make([]float64, len(logits))
	for id := range l {
		v := logits[id]
		if r := w.Repetition; r != 0 && slices.Contains(history, int32(id)) {
			if v > 0 {
				v = float32(float64(v) / float64(r))
			} else {
				v = float32(float64(v) * float64(r))
			}
		}
		n := 0
		for _, o := range output {
			if o == int32(id) {
				n++
			}
		}
		if n > 0 {
			v = float32(float64(v) - float64(float32(float64(n)*float64(w.Frequency))))
			v = float32(float64(v) - float64(w.Presence))
		}
		for _, b := range w.LogitBias {
			if int(b.ID) == id {
				v = float32(float64(v) + float64(b.Add))
			}
		}
		l[id] = float64(v)
	}
	return l
}

// drawLogits are the kinds of distribution that a sampler could stumble over.
func drawLogits(t *rapid.T, vocab int) []float32 {
	logits := make([]float32, vocab)
	kind := rapid.SampledFrom([]string{"ties", "equal", "spread", "one above all", "huge"}).Draw(t, "kind")
	for i := range logits {
		switch kind {
		case "ties": // few values
			logits[i] = float32(rapid.IntRange(-8, 8).Draw(t, "logit")) / 2
		case "equal":
			logits[i] = -3.25
		case "spread":
			logits[i] = float32(rapid.Float64Range(-30, 30).Draw(t, "logit"))
		case "one above all":
			logits[i] = -20
		case "huge":
			logits[i] = float32(rapid.IntRange(-2, 2).Draw(t, "logit")) * 1e37
		}
	}
	if kind == "one above all" {
		logits[rapid.IntRange(0, vocab-1).Draw(t, "top")] = 20
	}
	return logits
}

// drawSampling is any combination of all parameters.
func drawSampling(t *rapid.T, vocab int) *Sampling {
	w := &Sampling{
		Temperature: rapid.SampledFrom([]float32{0, 1e-38, 1e-6, 0.01, 0.7, 1, 3, 100}).Draw(t, "temperature"),
		TopK:        rapid.SampledFrom([]int{0, 1, 3, vocab - 1, vocab, 100}).Draw(t, "top_k"),
		TopP:        rapid.SampledFrom([]float32{0, 1e-9, 0.1, 0.5, 0.9, 1}).Draw(t, "top_p"),
		MinP:        rapid.SampledFrom([]float32{0, 0.05, 0.3, 1}).Draw(t, "min_p"),
		Presence:    rapid.SampledFrom([]float32{0, 0.5, -1}).Draw(t, "presence"),
		Frequency:   rapid.SampledFrom([]float32{0, 0.25, -2}).Draw(t, "frequency"),
		Repetition:  rapid.SampledFrom([]float32{0, 1, 2, 0.5}).Draw(t, "repetition"),
		Seed:        rapid.Uint64().Draw(t, "seed"), Choice: rapid.IntRange(0, 3).Draw(t, "choice"), Logprobs: rapid.IntRange(-1, 50).Draw(t, "logprobs"),
	}
	for range rapid.IntRange(0, 3).Draw(t, "biases") {
		w.LogitBias = append(w.LogitBias, Bias{rapid.Int32Range(0, int32(vocab)-1).Draw(t, "biased"), rapid.SampledFrom([]float32{2, -100, 100, 1e6, -1e6}).Draw(t, "bias")})
	}
	return w
}

// TestDraw compares with the reference: what is drawn must be what the
// reference draws with the same random number, or its neighbour where that
// number falls on the border of two.
func TestDraw(t *testing.T) {
	samplers := map[int]*sampler{}
	rapid.Check(t, func(t *rapid.T) {
		vocab := rapid.SampledFrom([]int{1, 2, 7, 40}).Draw(t, "vocabulary")
		if samplers[vocab] == nil {
			samplers[vocab] = newSampler(vocab)
		}
		s := samplers[vocab]
		logits, w := drawLogits(t, vocab), drawSampling(t, vocab)
		history := rapid.SliceOfN(rapid.Int32Range(0, int32(vocab)-1), 0, 12).Draw(t, "history")
		index := rapid.IntRange(0, len(history)).Draw(t, "index")
		r := &Row{Tokens: []int32{1}, Start: 7, Index: index, History: history, Sample: w}
		was := slices.Clone(logits)
		s.draw(logits, r)
		if !slices.Equal(was, logits) {
			t.Fatal("the model's logits were changed")
		}
		l := refAdjust(logits, w, history, history[len(history)-index:])
		if w.Temperature == 0 {
			if want := slices.Index(l, slices.Max(l)); int(r.Out.Token) != want {
				t.Fatalf("greedy token %d, want %d", r.Out.Token, want)
			}
		} else {
			checkDrawn(t, int(r.Out.Token), refCandidates(l, w), uniform(w.Seed, w.Choice, 8))
		}
		checkLogprobs(t, logits, r)
	})
}

func checkDrawn(t *rapid.T, token int, kept []candidate, u float64) {
	total, sum := 0.0, 0.0
	for _, c := range kept {
		total += c.p
	}
	for _, c := range kept {
		if c.id == token {
			if u*total < sum-1e-5*total || u*total > sum+c.p+1e-5*total {
				t.Fatalf("token %d has [%v, %v) of %v, the draw is %v", token, sum, sum+c.p, total, u*total)
			}
			return
		}
		sum += c.p
	}
	t.Fatalf("token %d is not among the kept %v", token, kept)
}

func checkLogprobs(t *rapid.T, logits []float32, r *Row) {
	if r.Sample.Logprobs < 0 {
		if r.Out.Logprob != 0 || len(r.Out.Top) != 0 {
			t.Fatalf("log-probabilities that nobody asked for: %+v", r.Out)
		}
		return
	}
	sum, top := 0.0, float64(slices.Max(logits))
	order := make([]int32, len(logits))
	for i, l := range logits {
		sum += math.Exp(float64(l) - top)
		order[i] = int32(i)
	}
	near := func(got float32, id int32) bool {
		want := float64(logits[id]) - top - math.Log(sum)
		return math.Abs(float64(got)-want) <= 1e-5*max(1, -want)+1e-15*math.Abs(top) // a float64 beside the largest logit
	}
	if !near(r.Out.Logprob, r.Out.Token) {
		t.Fatalf("log-probability %v of token %d", r.Out.Logprob, r.Out.Token)
	}
	slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(logits[b], logits[a]) })
	if len(r.Out.Top) != min(r.Sample.Logprobs, len(logits)) {
		t.Fatalf("%d of the most probable, want %d", len(r.Out.Top), r.Sample.Logprobs)
	}
	for i, top := range r.Out.Top {
		if top.ID != order[i] || !near(top.Logprob, top.ID) {
			t.Fatalf("place %d is %+v, want token %d", i, top, order[i])
		}
	}
}

// TestDistribution draws 40,000 times with fixed seeds and measures how far the
// counts are from the reference's probabilities: Pearson's chi-square stays
// below the value that chance passes once in 10^6, for its degrees of freedom
// (kept tokens less one). All other tokens never come.
func TestDistribution(t *testing.T) {
	bound := []float64{0, 23.93, 27.63, 30.66, 33.38, 35.89} // of chi-square with 0 to 5 degrees, upper tail 1e-6
	logits := []float32{0, 1, 2, -1, 0.5, 2}
	history := []int32{2, 2, 0, 5, 2}
	s := newSampler(len(logits))
	for _, w := range []Sampling{
		{Temperature: 1}, {Temperature: 2, TopK: 4}, {Temperature: 0.5, TopP: 0.95}, {Temperature: 1, MinP: 0.2}, {Temperature: 100}, {Temperature: 0.1},
		{Temperature: 1, Choice: 3}, {Temperature: 1.5, TopK: 5, TopP: 0.9, MinP: 0.05}, {Temperature: 1, Presence: 1, Frequency: 0.5, Repetition: 1.5},
		{Temperature: 0.8, LogitBias: []Bias{{3, 3}, {2, -100}}, TopK: 3},
	} {
		const n = 40000
		count := make([]float64, len(logits))
		for i := range n {
			w.Seed, w.Logprobs = uint64(i/100), -1
			r := &Row{Tokens: []int32{0}, Start: i % 100, Sample: &w, Index: 3, History: history}
			s.draw(logits, r)
			count[r.Out.Token]++
		}
		kept, total := refCandidates(refAdjust(logits, &w, history, history[2:]), &w), 0.0
		for _, c := range kept {
			total += c.p
		}
		chi := 0.0
		for _, c := range kept {
			want := n * c.p / total
			chi += (count[c.id] - want) * (count[c.id] - want) / want
			count[c.id] = 0
		}
		t.Logf("chi-square %.2f with %d degrees of freedom: %+v", chi, len(kept)-1, w)
		if chi > bound[len(kept)-1] {
			t.Errorf("%+v: chi-square %.2f, at most %.2f was to be expected", w, chi, bound[len(kept)-1])
		}
		if slices.Max(count) > 0 {
			t.Errorf("%+v: tokens came that the filters exclude: %v", w, count)
		}
	}
}

func TestFinite(t *testing.T) {
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		if err := finite([]float32{0, float32(bad), 1}); err == nil || !strings.Contains(err.Error(), "token 1") {
			t.Errorf("%v: error %v", bad, err)
		}
	}
	if err := finite([]float32{-math.MaxFloat32, math.MaxFloat32}); err != nil {
		t.Error(err)
	}
}

// BenchmarkDraw is one draw from a vocabulary of 49152.
func BenchmarkDraw(b *testing.B) {
	logits := make([]float32, 49152)
	for i := range logits {
		logits[i] = float32(math.Sin(float64(i))) * 10
	}
	s := newSampler(len(logits))
	for name, w := range map[string]Sampling{
		"greedy": {Logprobs: -1}, "greedy with logprobs": {Logprobs: 5}, "plain": {Temperature: 1, Logprobs: -1},
		"top-k": {Temperature: 1, TopK: 40, Logprobs: -1}, "top-p": {Temperature: 1, TopP: 0.9, Logprobs: -1},
	} {
		b.Run(name, func(b *testing.B) {
			r := &Row{Tokens: []int32{0}, Sample: &w}
			for b.Loop() {
				s.draw(logits, r)
				r.Start++
			}
		})
	}
}
