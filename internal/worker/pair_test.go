package worker

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
)

// These tests run whole workers over loopback sockets, with the tiny model.

// runWorker runs a worker until the test ends and waits until it is ready.
func runWorker(t *testing.T, cfg Config) *Worker {
	t.Helper()
	if cfg.Model == "" {
		cfg.Model = "tiny"
	}
	cfg.Listen, cfg.BootstrapListen, cfg.KVListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	cfg.Threads = 1
	if cfg.KVPages == 0 {
		cfg.KVPages = 512
	}
	if cfg.Context == 0 {
		cfg.Context = 512
	}
	if cfg.Drain == 0 {
		cfg.Drain = 100 * time.Millisecond
	}
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !strings.Contains(err.Error(), "page size") {
			t.Errorf("%s worker: %v", cfg.Role, err)
		}
	})
	select {
	case <-w.Ready():
	case <-time.After(20 * time.Second):
		t.Fatalf("the %s worker is not ready: %v", cfg.Role, w.Status())
	}
	return w
}

// said is one whole answer.
type said struct {
	outs   []engine.Output
	end    End
	cached int
}

func (s said) tokens() (ids []int32) {
	for _, o := range s.outs {
		ids = append(ids, o.Token)
	}
	return ids
}

func hear(t *testing.T, j *Job) said { t.Helper(); return hearFrom(t, j, 0) }

// hearFrom hears an answer whose first token is number from.
func hearFrom(t *testing.T, j *Job, from int) (s said) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for {
		it, ok := j.Box.Next(ctx)
		if !ok {
			t.Fatalf("job %s: no end within 60 s", j.RID)
		}
		if it.End != nil {
			s.end = *it.End
			return s
		}
		if it.Index != from+len(s.outs) {
			t.Fatalf("job %s: token %d came as %d", j.RID, from+len(s.outs), it.Index)
		}
		if it.Index == 0 {
			s.cached = it.Cached
		}
		s.outs = append(s.outs, it.Out)
	}
}

func submit(t *testing.T, w *Worker, j Job) *Job {
	t.Helper()
	j.Box = NewBox(j.MaxTokens, nil)
	if err := w.Submit(&j); err != nil {
		t.Fatalf("%s worker: %v", w.cfg.Role, err)
	}
	return &j
}

// pair is a prefill and a decode worker.
type pair struct {
	p, d *Worker
	room int64
}

// ask sends both legs of a job.
func (x *pair) ask(t *testing.T, j Job) (legP, legD *Job) {
	t.Helper()
	x.room = rand.Int64()
	j.Room, j.DPRank, j.Addr = x.room, -1, x.p.prefill.addr
	return submit(t, x.p, j), submit(t, x.d, j)
}

// prompts of several lengths with common beginnings, from the vocabulary of w.
func prompts(w *Worker, n int) (ps [][]int32) {
	r := rand.New(rand.NewPCG(1, 2))
	base := make([]int32, 100)
	for i := range base {
		base[i] = int32(3 + r.IntN(w.Vocab()-3))
	}
	for i := range n {
		p := append([]int32(nil), base[:20+7*(i%9)]...)
		ps = append(ps, append(p, int32(3+i)))
	}
	return ps
}

var samplings = []engine.Sampling{
	{Logprobs: 3},
	{Temperature: 0.9, Seed: 7, Logprobs: 1},
	{Temperature: 1.2, TopP: 0.9, TopK: 40, Seed: 99, Choice: 1, Logprobs: -1},
	{Temperature: 0.7, Seed: 5, Repetition: 1.3, Presence: 0.4, Frequency: 0.2, Logprobs: 0},
}

// The same answer, token by token and bit by bit, whether one process does
// both halves or two do one each: whatever the TP sizes, chunks, prefix cache
// and preemptions.
func TestPairAnswersLikeServe(t *testing.T) {
	rounds, every, n := 2, 1, 7
	if raceBuild { // computes some ten times slower; TestPairInBubble has no arithmetic
		rounds, every, n = 1, 3, 3
	}
	ref := runWorker(t, Config{Role: Serve})
	ps := prompts(ref, n)
	jobs := make([]Job, len(ps))
	want := make([]said, len(ps))
	for i, p := range ps {
		jobs[i] = Job{RID: fmt.Sprint(i), Prompt: p, MaxTokens: 14, Sampling: samplings[i%len(samplings)], SeedSet: true}
		j := jobs[i]
		j.Room = -1
		want[i] = hear(t, submit(t, ref, j)) // one at a time
	}
	for i, c := range []struct {
		name string
		p, d Config
	}{
		{"plain", Config{}, Config{}},
		{"tp 2 to 1", Config{TP: 2}, Config{}},
		{"tp 1 to 2", Config{}, Config{TP: 2}},
		{"prefix cache on D, small chunks, tp 2", Config{Chunk: 32, TP: 2}, Config{PrefixCache: true, TP: 2}},
		{"small chunks", Config{Chunk: 16}, Config{}},
		{"prefix cache", Config{PrefixCache: true}, Config{PrefixCache: true}},
		{"dp 2 to 3", Config{DP: 2}, Config{DP: 3}},
		{"preemption", Config{KVPages: 64}, Config{KVPages: 16, ReservedTokens: 1}},
	} {
		if i%every != 0 {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			c.p.Role, c.d.Role = Prefill, Decode
			x := &pair{p: runWorker(t, c.p), d: runWorker(t, c.d)}
			asked := 0
			// The second round finds links up, and caches filled. Who meets whom in a
			// small pool is a matter of time: more rounds until something was preempted.
			for round := 0; round < rounds || c.name == "preemption" && round < 10 && int(x.p.ids.Load()) <= asked; round++ {
				var legs [][2]*Job
				asked += len(jobs)
				for _, j := range jobs {
					p, d := x.ask(t, j)
					legs = append(legs, [2]*Job{p, d})
				}
				for i, l := range legs {
					got := hear(t, l[1])
					if got.end != want[i].end || !reflect.DeepEqual(got.outs, want[i].outs) {
						t.Errorf("round %d, job %d\n got %v %+v %v\nwant %v %+v", round, i, got.tokens(), got.end, got.end.Err, want[i].tokens(), want[i].end)
					}
					if round > 0 && (got.cached > 0) != c.p.PrefixCache {
						t.Errorf("round %d, job %d: %d tokens from P's prefix cache", round, i, got.cached)
					}
					leg := hear(t, l[0])
					if leg.end.Reason != EndPrefilled || len(leg.outs) != 1 || !reflect.DeepEqual(leg.outs[0], want[i].outs[0]) {
						t.Errorf("round %d, job %d: the prefill's leg ended with %+v %v, %v", round, i, leg.end, leg.end.Err, leg.outs)
					}
				}
			}
			if c.name == "preemption" {
				x.mustHaveRecomputed(t, asked)
			}
			settled(t, x.p)
			settled(t, x.d)
		})
	}
}

// TestNamedDPRank: a request that names the prefill's DP rank is computed where
// decode takes its pages from, whatever its room says.
func TestNamedDPRank(t *testing.T) {
	x := &pair{p: runWorker(t, Config{Role: Prefill, DP: 2}), d: runWorker(t, Config{Role: Decode})}
	j := Job{RID: "named", Prompt: prompts(x.p, 1)[0], MaxTokens: 3, Addr: x.p.prefill.addr, Deadline: time.Now().Add(20 * time.Second)}
	for room := range int64(2) {
		for rank := range 2 {
			j.Room, j.DPRank = 100+2*int64(rank)+room, rank
			p, d := submit(t, x.p, j), submit(t, x.d, j)
			if got := hear(t, d); got.end.Reason != EndLength || len(got.outs) != 3 {
				t.Errorf("room %d, DP rank %d: %d tokens, %+v %v", j.Room, rank, len(got.outs), got.end, got.end.Err)
			}
			hear(t, p)
		}
	}
	j.DPRank = 2
	if err := x.p.Submit(&j); err == nil || err.Code != api.InvalidRequest {
		t.Errorf("a DP rank that is not there: %v", err)
	}
}

// mustHaveRecomputed checks that the test has shown what it is for: P has
// numbered more requests than it was given jobs.
func (x *pair) mustHaveRecomputed(t *testing.T, jobs int) {
	t.Helper()
	if n := int(x.p.ids.Load()); n <= jobs {
		t.Errorf("nothing was preempted: %d requests at the prefill worker for %d jobs", n, jobs)
	}
}

// settled checks that no request, page or reservation is left behind.
func settled(t *testing.T, w *Worker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for left := 1; left > 0; {
		n, err := leftIn(ctx, w)
		if err != nil {
			t.Fatalf("%s worker: %d pages and requests are left", w.cfg.Role, left)
		}
		left = n
	}
}

// leftIn counts the pages and requests in a worker.
func leftIn(ctx context.Context, w *Worker) (left int, err error) {
	counts, err := table(ctx, w, func(l *loop) []int {
		n := l.pool.Count()
		return []int{n[kv.Owned] + n[kv.Quarantined] + len(l.open) + int(max(l.jobs.Load(), -l.jobs.Load()))}
	})
	for _, n := range counts {
		left += n
	}
	return left, err
}

// A request without a seed draws one at P, and D goes on with it, also after a
// preemption: the answer is the one that the drawn seed gives in one process.
func TestDrawnSeed(t *testing.T) {
	x := &pair{p: runWorker(t, Config{Role: Prefill}), d: runWorker(t, Config{Role: Decode, KVPages: 8, ReservedTokens: 1})}
	ref := runWorker(t, Config{Role: Serve})
	j := Job{Prompt: prompts(x.p, 1)[0], MaxTokens: 26, Sampling: engine.Sampling{Temperature: 1.5, Logprobs: -1}}
	var legs []*Job
	for i := range 3 {
		j.RID = fmt.Sprint(i)
		_, d := x.ask(t, j)
		legs = append(legs, d)
	}
	seeds := map[string]uint64{}
	for len(seeds) < len(legs) { // D knows a seed from the first token on
		type drawn struct {
			rid  string
			seed uint64
		}
		all, err := table(t.Context(), x.d, func(l *loop) (ds []drawn) {
			for _, q := range l.open {
				if q.emitted > 0 {
					ds = append(ds, drawn{q.job.RID, q.sampling.Seed})
				}
			}
			return ds
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			seeds[d.rid] = d.seed
		}
	}
	seen := map[uint64]bool{}
	for _, d := range legs {
		got := hear(t, d)
		j.RID, j.Room, j.SeedSet, j.Sampling.Seed = d.RID, -1, true, seeds[d.RID]
		want := hear(t, submit(t, ref, j))
		if !reflect.DeepEqual(got.outs, want.outs) || got.end != want.end {
			t.Errorf("job %s, seed %d\n got %v %+v %v\nwant %v", d.RID, j.Sampling.Seed, got.tokens(), got.end, got.end.Err, want.tokens())
		}
		seen[j.Sampling.Seed] = true
	}
	x.mustHaveRecomputed(t, len(legs))
	if len(seen) != len(legs) {
		t.Errorf("%d different seeds of %d", len(seen), len(legs))
	}
}

// A mismatch under reject fails the requests of that address at once, with
// both values; under fatal the worker ends every request and exits with 1.
func TestMismatch(t *testing.T) {
	p := runWorker(t, Config{Role: Prefill, PageSize: 32, KVPages: 64})
	t.Run("reject", func(t *testing.T) {
		x := &pair{p: p, d: runWorker(t, Config{Role: Decode, OnMismatch: "reject"})}
		_, d := x.ask(t, Job{RID: "r", Prompt: []int32{5, 6, 7}, MaxTokens: 4})
		got := hear(t, d)
		if got.end.Reason != EndFailed || got.end.Err.Code != api.PeerMismatch || !strings.Contains(got.end.Err.Message, "32") || !strings.Contains(got.end.Err.Message, "16") {
			t.Errorf("end %+v %v", got.end, got.end.Err)
		}
		if err := x.d.Status(); err != nil {
			t.Errorf("status %v", err)
		}
	})
	t.Run("fatal", func(t *testing.T) {
		w, err := New(Config{Role: Decode, Model: "tiny", Listen: "127.0.0.1:0", Threads: 1, KVPages: 64, Context: 512})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- w.Run(context.Background()) }()
		<-w.Ready()
		x := &pair{p: p, d: w}
		_, d := x.ask(t, Job{RID: "r", Prompt: []int32{5, 6, 7}, MaxTokens: 4})
		got := hear(t, d)
		begin := time.Now()
		err = <-done
		exit, ok := err.(*ExitError)
		if !ok || exit.Code != 1 || !strings.Contains(err.Error(), "32") || !strings.Contains(err.Error(), "16") {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("the exit took %v after the last request had ended", took)
		}
		if got.end.Reason != EndFailed || got.end.Err.HTTPStatus() != 502 {
			t.Errorf("end %+v %v", got.end, got.end.Err)
		}
	})
}

// Either leg's abort ends the other one: D's at once by the link, P's by END.
func TestAbortOfOneLeg(t *testing.T) {
	x := &pair{p: runWorker(t, Config{Role: Prefill, BootstrapTimeout: 30 * time.Second}), d: runWorker(t, Config{Role: Decode})}
	gone := api.Errorf(api.ClientGone, "the client went away")
	prompt := prompts(x.p, 1)[0]
	// P waits for a D that never comes.
	lonely := submit(t, x.p, Job{RID: "lonely", Prompt: prompt, MaxTokens: 4, Room: 77})
	x.p.Abort(lonely, gone)
	if got := hear(t, lonely); got.end.Reason != EndFailed || got.end.Err.Code != api.ClientGone {
		t.Errorf("end %+v", got.end)
	}
	// D waits for a P that never gets its leg.
	d := submit(t, x.d, Job{RID: "d", Prompt: prompt, MaxTokens: 4, Room: 78, DPRank: -1, Addr: x.p.prefill.addr})
	x.d.Abort(d, gone)
	if got := hear(t, d); got.end.Reason != EndFailed || got.end.Err.Code != api.ClientGone {
		t.Errorf("end %+v", got.end)
	}
	settled(t, x.p)
	settled(t, x.d)
}

// A decode worker that stops ends its own requests by name, and the
// prefill's legs of them end too.
func TestStopOfDecode(t *testing.T) {
	p := runWorker(t, Config{Role: Prefill})
	d, err := New(Config{Role: Decode, Model: "tiny", Listen: "127.0.0.1:0", Threads: 1, KVPages: 64, Context: 512, Drain: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	<-d.Ready()
	x := &pair{p: p, d: d}
	_, leg := x.ask(t, Job{RID: "r", Prompt: []int32{5, 6, 7}, MaxTokens: 480})
	if it, ok := leg.Box.Next(t.Context()); !ok || it.End != nil {
		t.Fatalf("no first token: %+v", it)
	}
	cancel()
	for {
		it, ok := leg.Box.Next(t.Context())
		if !ok {
			t.Fatal("no end")
		}
		if it.End != nil {
			if it.End.Reason == EndFailed && it.End.Err.Code != api.Draining {
				t.Errorf("end %+v", it.End.Err)
			}
			break
		}
	}
	if err := <-done; err != nil {
		t.Errorf("Run returned %v", err)
	}
	settled(t, p)
}

// Prompt log-probabilities come with the first item, which without output is
// the end; those after a position leave the prefix cache the tokens up to it.
func TestScorePrompt(t *testing.T) {
	s := runWorker(t, Config{Role: Serve, PrefixCache: true, Chunk: 16})
	p := prompts(s, 3)[2]
	var all *PromptScores
	for _, c := range []struct{ from, max, hits int }{{0, 2, 0}, {0, 0, 0}, {0, 2, 0}, {20, 1, 16}, {20, 0, 16}, {len(p) - 1, 1, (len(p) - 1) / 16 * 16}} {
		j := submit(t, s, Job{RID: "r", Prompt: p, MaxTokens: c.max, Room: -1, ScorePrompt: true, ScoreFrom: c.from, ScoreTop: 2, Sampling: engine.Sampling{Logprobs: 0}})
		first, ok := j.Box.Next(t.Context())
		if !ok || first.Prompt == nil || (first.End != nil) != (c.max == 0) || first.Cached != c.hits {
			t.Fatalf("%+v: got %+v", c, first)
		}
		if all == nil {
			all = first.Prompt
		}
		for i, l := range all.Logprobs {
			if len(all.Logprobs) != len(p)-1 || !(l < 0) || l > all.Top[i][0].Logprob || all.Top[i][0].Logprob < all.Top[i][1].Logprob {
				t.Fatalf("prompt token %d has log-probability %v, the most probable ones are %v", i+1, l, all.Top[i])
			}
		}
		if want := (&PromptScores{all.Logprobs[c.from:], all.Top[c.from:]}); !reflect.DeepEqual(first.Prompt, want) {
			t.Errorf("%+v: %+v, want %+v", c, first.Prompt, want)
		}
		n := 0
		for it := first; it.End == nil; n++ {
			if it, ok = j.Box.Next(t.Context()); !ok || it.Prompt != nil {
				t.Fatalf("%+v: %+v", c, it)
			}
		}
		if n != c.max {
			t.Errorf("%+v: %d tokens", c, n)
		}
	}
}

// An answer goes on, on another worker and after any of its tokens, as if it
// had begun there: the same tokens, log-probabilities, count and end, whatever
// the sampling, and also when what goes on is preempted.
func TestAnswerGoesOn(t *testing.T) {
	ref := runWorker(t, Config{Role: Serve})
	x := &pair{p: runWorker(t, Config{Role: Prefill, PrefixCache: true}), d: runWorker(t, Config{Role: Decode, KVPages: 8, ReservedTokens: 1})}
	const max = 26
	samplings := []engine.Sampling{
		{Logprobs: 3},
		{Temperature: 1.1, TopP: 0.95, Seed: 7, Choice: 1, Logprobs: 1},
		{Presence: -1.5, Frequency: -1, Logprobs: -1}, // draws what the output has already: it must know all of it
		{Temperature: 0.8, Seed: 5, Frequency: -2, Repetition: 1.2, Logprobs: 0},
	}
	goOn := func(j Job, outs []engine.Output, k int) Job {
		j.Prompt = slices.Clone(j.Prompt)
		for _, o := range outs[:k] {
			j.Prompt = append(j.Prompt, o.Token)
		}
		j.MaxTokens, j.Said, j.SeedSet = max-k, k, true
		return j
	}
	prompt := prompts(ref, 1)[0]
	for i := range len(samplings) + 1 { // the last one with a stop id
		j := Job{RID: fmt.Sprint(i), Prompt: prompt, MaxTokens: max, Sampling: samplings[i%len(samplings)], SeedSet: true, Room: -1}
		want := hear(t, submit(t, ref, j))
		if i == len(samplings) {
			j.StopIDs = []int32{want.outs[max-5].Token}
			want = hear(t, submit(t, ref, j))
		}
		var legs []*Job
		for _, k := range []int{1, 4, 9} { // three that grow in a pool of eight pages
			if k < len(want.outs) {
				_, d := x.ask(t, goOn(j, want.outs, k))
				legs = append(legs, d)
			}
		}
		for _, leg := range legs {
			got := hearFrom(t, leg, leg.Said)
			if got.end != want.end || !reflect.DeepEqual(got.outs, want.outs[leg.Said:]) {
				t.Errorf("job %d goes on after %d tokens\n got %v %+v %v\nwant %v %+v", i, leg.Said, got.tokens(), got.end, got.end.Err, want.tokens()[leg.Said:], want.end)
			}
		}
	}
	if value(t, x.d.metrics, "preemptions_total") == 0 {
		t.Error("nothing was preempted")
	}
	settled(t, x.p)
	settled(t, x.d)
	bad := submitted(x.d, Job{Prompt: []int32{5, 6}, Said: 2, SeedSet: true, MaxTokens: 1, Addr: "h:1"})
	if bad == nil || bad.Code != api.InvalidRequest {
		t.Errorf("an answer without a prompt is taken: %v", bad)
	}
}

func submitted(w *Worker, j Job) *api.Error {
	j.Box = NewBox(j.MaxTokens, nil)
	return w.Submit(&j)
}
