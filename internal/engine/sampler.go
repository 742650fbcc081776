package engine

import (
	"fmt"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
)

// sampler draws tokens; it is the memory of one thread.
type sampler struct {
	adjusted []float32 // logits after penalties and bias
	p        []float32 // probabilities relative to the largest, by id
	heap     []int32   // candidates that no filter has judged yet, the best at 0
	kept     []int32   // candidates in order of probability
	count    []int32   // of each token in the output
	seen     []bool    // tokens of the history
}

func newSampler(vocab int) *sampler {
	return &sampler{
		adjusted: make([]float32, vocab), p: make([]float32, vocab), heap: make([]int32, vocab), kept: make([]int32, 0, vocab),
		count: make([]int32, vocab), seen: make([]bool, vocab),
	}
}

// draw fills r.Out with the token at position Start+len(Tokens). The logits
// are finite.
func (s *sampler) draw(logits []float32, r *Row) {
	l := s.adjust(logits, r)
	r.Out = Output{Top: r.Out.Top[:0]}
	if r.Sample.Temperature == 0 {
		r.Out.Token = int32(argmax(l))
	} else {
		r.Out.Token = s.pick(l, r.Sample, uniform(r.Sample.Seed, r.Sample.Choice, r.Start+len(r.Tokens)))
	}
	if r.Sample.Logprobs >= 0 {
		norm := s.logNorm(logits)
		r.Out.Logprob = logprob(logits, r.Out.Token, norm)
		r.Out.Top = appendTop(r.Out.Top, logits, r.Sample.Logprobs, norm)
	}
}

// finite refuses logits that mean broken weights or broken KV: a token drawn
// from them would hide the damage.
func finite(logits []float32) error {
	for i, l := range logits {
		if l-l != 0 {
			return fmt.Errorf("the logit of token %d is %v: weights or KV are damaged", i, l)
		}
	}
	return nil
}

// argmax is the lowest index of the largest value.
func argmax(l []float32) int {
	best, top := 0, l[0]
	for i, v := range l {
		if v > top {
			best, top = i, v
		}
	}
	return best
}

// logNorm is log Σ exp(logit): exponentials in float32, added in float64 in
// index order.
func (s *sampler) logNorm(logits []float32) float64 {
	top := logits[argmax(logits)]
	sum := 0.0
	kernels.Exps(s.p, logits, top, 1)
	for _, p := range s.p {
		sum += float64(p)
	}
	return float64(top) + kernels.Log64(sum)
}

func logprob(logits []float32, id int32, norm float64) float32 {
	return float32(float64(logits[id]) - norm)
}

// appendTop appends the n most probable tokens, best first, ties by lower id.
func appendTop(top []TokenLogprob, logits []float32, n int, norm float64) []TokenLogprob {
	n = min(n, len(logits))
	if n == 0 {
		return top
	}
	for id, l := range logits {
		if len(top) == n && l <= top[n-1].Logprob {
			continue
		}
		if len(top) < n {
			top = append(top, TokenLogprob{})
		}
		i := len(top) - 1
		for ; i > 0 && l > top[i-1].Logprob; i-- {
			top[i] = top[i-1]
		}
		top[i] = TokenLogprob{int32(id), l}
	}
	for i := range top {
		top[i].Logprob = logprob(logits, top[i].ID, norm)
	}
	return top
}

// adjust applies penalties and bias. It returns logits themselves when there
// is nothing to do.
func (s *sampler) adjust(logits []float32, r *Row) []float32 {
	w := r.Sample
	if !w.NeedsHistory() && len(w.LogitBias) == 0 {
		return logits
	}
	l := s.adjusted
	copy(l, logits)
	if w.NeedsHistory() {
		s.penalise(l, w, r.History, r.History[len(r.History)-r.Index:])
	}
	for _, b := range w.LogitBias {
		l[b.ID] += b.Add
	}
	return l
}

func (s *sampler) penalise(l []float32, w *Sampling, history, output []int32) {
	if w.Repetition != 0 && w.Repetition != 1 {
		for _, id := range history {
			switch {
			case s.seen[id]:
			case l[id] > 0:
				l[id] = l[id] / w.Repetition
			default:
				l[id] = float32(l[id] * w.Repetition)
			}
			s.seen[id] = true
		}
		for _, id := range history {
			s.seen[id] = false
		}
	}
	for _, id := range output {
		s.count[id]++
	}
	for _, id := range output {
		if n := s.count[id]; n > 0 {
			l[id] = (l[id] - float32(float32(n)*w.Frequency)) - w.Presence
			s.count[id] = 0
		}
	}
}

// pick draws one of the tokens that the filters leave, with u in [0, 1).
// Probabilities are float32 relative to the largest; sums of them are float64.
func (s *sampler) pick(l []float32, w *Sampling, u float64) int32 {
	top := l[argmax(l)]
	total := 0.0
	kernels.Exps(s.p, l, top, w.Temperature)
	for _, p := range s.p {
		total += float64(p)
	}
	topK := w.TopK > 0 && w.TopK < len(l)
	topP := w.TopP > 0 && w.TopP < 1
	if !topK && !topP && w.MinP == 0 {
		s.kept = s.kept[:0]
		return s.walk(float64(u * total))
	}
	s.heapify(l)
	limit := len(l)
	if topK {
		limit = w.TopK
		total = 0
		if topP { // its share is one of what top-k leaves
			for i := range limit {
				s.kept = append(s.kept, s.pop(l))
				total += float64(s.p[s.kept[i]])
			}
		}
	}
	sum, n := 0.0, 0
	for ; n < limit; n++ {
		if topP && n > 0 && sum >= float64(float64(w.TopP)*total) {
			break
		}
		if n == len(s.kept) {
			s.kept = append(s.kept, s.pop(l))
		}
		p := s.p[s.kept[n]]
		if p < w.MinP {
			break
		}
		sum += float64(p)
	}
	s.kept = s.kept[:n]
	return s.walk(float64(u * sum))
}

// walk is the token at which the sum of probabilities passes the target: over
// the kept candidates, or over all tokens by id when there are none.
func (s *sampler) walk(target float64) int32 {
	sum, last := 0.0, int32(0)
	if len(s.kept) > 0 {
		for _, id := range s.kept {
			last = id
			if sum += float64(s.p[id]); sum > target {
				break
			}
		}
		return last
	}
	for id, p := range s.p {
		if p == 0 {
			continue
		}
		last = int32(id)
		if sum += float64(p); sum > target {
			break
		}
	}
	return last
}

// heapify makes all tokens candidates.
func (s *sampler) heapify(l []float32) {
	s.kept = s.kept[:0]
	s.heap = s.heap[:len(l)]
	for i := range s.heap {
		s.heap[i] = int32(i)
	}
	for i := len(l)/2 - 1; i >= 0; i-- {
		s.down(l, i)
	}
}

// pop takes the best candidate: the largest logit, then the lowest id.
func (s *sampler) pop(l []float32) int32 {
	best, n := s.heap[0], len(s.heap)-1
	s.heap[0] = s.heap[n]
	s.heap = s.heap[:n]
	s.down(l, 0)
	return best
}

func (s *sampler) down(l []float32, i int) {
	h := s.heap
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && before(l, h[c+1], h[c]) {
			c++
		}
		if !before(l, h[c], h[i]) {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

func before(l []float32, a, b int32) bool {
	return l[a] > l[b] || (l[a] == l[b] && a < b)
}
