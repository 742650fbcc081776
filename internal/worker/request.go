package worker

import (
	"cmp"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// request is what a loop keeps of one open request beside its core: what the
// engine and the reader need and scheduling does not.
type request struct {
	id       sched.ReqID
	job      *Job // nil: a prefill for RECOMPUTE, which has no HTTP leg here
	prompt   []int32
	room     int64
	digest   uint64 // of the prompt, where it has two legs
	sampling engine.Sampling
	history  []int32 // prompt and output so far, where sampling has penalties
	began    time.Duration
	deadline time.Duration
	emitted  int
	last     time.Duration // when the last output token came

	seen      time.Duration // when the process first saw it
	timeline  metric.Timeline
	preempted int

	// targets, scores and tops are those of engine.Row for the whole prompt,
	// where the job wants the prompt's log-probabilities.
	targets []int32
	scores  []float32
	tops    [][]engine.TokenLogprob
	told    bool // the reader has them

	// first is the output token that did not come from a decode batch: with
	// FIRST, or from the prefill core of serve. cached came with it.
	first  engine.Output
	cached int

	stopAt int // index of a StopAt, or -1: later tokens do not count, wherever the core stands
}

func newRequest(j *Job, began, deadline time.Duration) *request {
	q := &request{
		id: j.id, job: j, prompt: j.Prompt, room: j.Room, sampling: j.Sampling,
		began: began, deadline: deadline, stopAt: -1, seen: cmp.Or(j.seen, began),
	}
	q.mark(metric.Queued, began)
	if q.room >= 0 {
		q.digest = sched.Digest(q.prompt)
	}
	if q.sampling.NeedsHistory() {
		q.history = append(make([]int32, 0, len(j.Prompt)+j.MaxTokens), j.Prompt...)
	}
	if j.ScorePrompt {
		q.targets = append(slices.Clone(j.Prompt[1:]), -1)
		for i := range j.ScoreFrom {
			q.targets[i] = -1
		}
		q.scores = make([]float32, len(j.Prompt))
		if j.ScoreTop > 0 {
			q.tops = make([][]engine.TokenLogprob, len(j.Prompt))
		}
	}
	return q
}

// mark notes that the request passes a mark now.
func (q *request) mark(m metric.Mark, now time.Duration) { q.timeline.Set(m, now-q.seen) }

// stamp notes what the core knows of a request's way.
func (q *request) stamp(t sched.Times) {
	if t.Linked > 0 {
		q.mark(metric.Resolved, t.Linked)
	}
	if t.Granted > 0 {
		q.mark(metric.Granted, t.Granted)
	}
}

// maxHit is how many prompt tokens may come from the prefix cache: at least
// one token must be computed, and all whose successors are to be scored.
func (q *request) maxHit() int {
	if q.targets != nil {
		return q.job.ScoreFrom
	}
	return len(q.prompt) - 1
}

// said is how many of the prompt's tokens are output: what the cores number
// from 0 is that much further on for the engine and the reader.
func (q *request) said() int {
	if q.job == nil {
		return 0
	}
	return q.job.Said
}

// tell adds the prompt's scores to the first item of a job, if they are known here.
func (q *request) tell(it *Item) {
	if q.scores == nil || q.told {
		return
	}
	q.told = true
	from, last := q.job.ScoreFrom, len(q.prompt)-1
	it.Prompt = &PromptScores{Logprobs: q.scores[from:last]}
	if q.tops != nil {
		it.Prompt.Top = q.tops[from:last]
	}
}

// put gives one output token to the reader. index is the core's.
func (l *loop) put(now time.Duration, q *request, out engine.Output, index int) {
	if q.history != nil {
		q.history = append(q.history, out.Token)
	}
	q.emitted = index + 1
	if index == 0 {
		q.mark(metric.FirstToken, now)
		q.stamp(l.times(q.id))
	}
	if l.decode != nil {
		q.mark(metric.LastToken, now)
	}
	if q.job == nil || index >= q.job.MaxTokens {
		return // a prefill draws a token that nobody wants
	}
	it := Item{Out: out, Index: q.said() + index}
	if it.Index == 0 {
		l.metrics.TTFT.Observe((now - q.began).Seconds())
		it.Cached, it.Seed = q.cached, q.sampling.Seed
		q.tell(&it)
	}
	if index > 0 && q.last > 0 {
		l.metrics.ITL.Observe((now - q.last).Seconds())
	}
	q.last = now
	q.job.Box.put(it, &q.timeline)
}

// output is what the engine drew in a row of the pass just done. The engine
// reuses the row's memory, the reader keeps what it is given.
func (p *pass) output(row int) engine.Output {
	out := p.batch.Rows[row].Out
	out.Top = append([]engine.TokenLogprob(nil), out.Top...) // nil when there are none
	return out
}

// submit opens a request.
func (l *loop) submit(now time.Duration, q *request) {
	l.open[q.id] = q
	l.metrics.Prompt.Add(float64(len(q.prompt) - q.said()))
	if l.prefill != nil {
		s := &sched.SubmitPrefill{Req: q.id, Prompt: q.prompt, Room: q.room, Digest: q.digest, MaxHit: q.maxHit(), Deadline: q.deadline,
			Begun: q.said() > 0}
		if l.decode != nil {
			s.MaxTokens = q.job.MaxTokens
		}
		l.prefill.core.Step(now, s)
		return
	}
	l.decode.core.Step(now, q.decodeSubmit())
}

func (q *request) decodeSubmit() *sched.Submit {
	j := q.job
	return &sched.Submit{
		Req: q.id, Prompt: q.prompt, MaxTokens: j.MaxTokens, StopIDs: j.StopIDs,
		Addr: j.Addr, Room: q.room, Digest: q.digest, DPRank: j.DPRank, Deadline: q.deadline,
	}
}

// stopAt passes a reader's verdict on. Which core has the request is not known here.
func (l *loop) stopAt(now time.Duration, s *sched.StopAt) {
	if q := l.open[s.Req]; q != nil && q.stopAt < 0 {
		q.stopAt = s.Index
	}
	l.step(now, s)
}

// finish ends a request. Exactly one comes for each.
func (l *loop) finish(now time.Duration, f *sched.Finish) {
	q := l.open[f.Req]
	delete(l.open, f.Req)
	defer l.release()
	if q.job == nil {
		return
	}
	n := min(f.Completion, q.job.MaxTokens)
	if f.Reason == sched.Stop && q.stopAt >= 0 {
		n = min(n, q.stopAt)
	}
	l.count(now, q, f.Err)
	l.metrics.Generation.Add(float64(n))
	l.metrics.Cached.Add(float64(q.cached))
	it := Item{Cached: q.cached, End: &End{Reason: reason(f.Reason), Err: apiError(f.Err), Completion: q.said() + n}}
	if f.Err == nil {
		q.tell(&it)
	}
	q.stamp(f.Times)
	if f.Reason == sched.Prefilled {
		q.mark(metric.Received, now)
	}
	q.job.Box.put(it, &q.timeline)
}

// count records the end of a job.
func (l *loop) count(now time.Duration, q *request, e *sched.Error) {
	l.metrics.E2E.Observe((now - q.began).Seconds())
	code := sched.Code("")
	if e != nil {
		code = e.Code
	}
	c := l.codes[code]
	if c == nil {
		c = l.codes[otherCode]
	}
	c.Inc()
}

func reason(r sched.Reason) string {
	switch r {
	case sched.Stop:
		return EndStop
	case sched.Length:
		return EndLength
	case sched.Prefilled:
		return EndPrefilled
	}
	return EndFailed
}

func firstOutput(f *transfer.First) engine.Output {
	out := engine.Output{Token: f.Token, Logprob: f.Logprob}
	for _, t := range f.Top {
		out.Top = append(out.Top, engine.TokenLogprob(t))
	}
	return out
}
