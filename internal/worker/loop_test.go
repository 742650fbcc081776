package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/metric"
)

// clockwork is an engine whose next token is the sum of the row's last token
// and its position, modulo 997, and whose batches take a fixed (virtual) time.
// It keeps the tokens in its pages, so a row that is given wrong pages, or
// pages whose prompt was not computed, makes a wrong token.
type clockwork struct {
	pageSize int
	takes    time.Duration
	layers   int // that are told of while it takes
	fail     func(b *engine.Batch) error

	mu    sync.Mutex
	pages map[kv.Page][]int32
	ran   int
	shut  chan struct{}
}

func newClockwork(pageSize int, takes time.Duration) *clockwork {
	return &clockwork{pageSize: pageSize, takes: takes, pages: map[kv.Page][]int32{}, shut: make(chan struct{})}
}

func (c *clockwork) Geometry() kv.Geometry {
	return kv.Geometry{Layers: 2, Heads: 2, TokenBytes: 8, PageSize: c.pageSize}
}
func (c *clockwork) Fingerprint() string      { return "clockwork" }
func (c *clockwork) Memory(int) engine.Memory { return nil }
func (c *clockwork) Vocab() int               { return 1000 }
func (c *clockwork) MaxBatchTokens() int      { return 1 << 20 }
func (c *clockwork) Close()                   { close(c.shut) }

func (c *clockwork) Run(b *engine.Batch) error {
	if c.takes > 0 {
		for l := range max(1, c.layers) {
			select {
			case <-time.After(c.takes / time.Duration(max(1, c.layers))):
			case <-c.shut:
				return engine.ErrClosed
			}
			if c.layers > 0 && b.LayerDone != nil {
				b.LayerDone(l)
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ran++
	if c.fail != nil {
		if err := c.fail(b); err != nil {
			return err
		}
	}
	for i := range b.Rows {
		r := &b.Rows[i]
		for j, t := range r.Tokens {
			at := r.Start + j
			p := r.Pages[at/c.pageSize]
			if c.pages[p] == nil {
				c.pages[p] = make([]int32, c.pageSize)
			}
			c.pages[p][at%c.pageSize] = t
		}
		if r.Sample != nil {
			if err := c.checkHistory(r); err != nil {
				return err
			}
			r.Out = engine.Output{Token: c.next(r.Pages, r.Start+len(r.Tokens))}
		}
	}
	return nil
}

// checkHistory compares what the sampler is told with what lies in the pages.
func (c *clockwork) checkHistory(r *engine.Row) error {
	n := r.Start + len(r.Tokens)
	if !r.Sample.NeedsHistory() {
		return nil
	}
	if len(r.History) != n || r.Index >= n {
		return fmt.Errorf("history of %d tokens, %d of them output, at position %d", len(r.History), r.Index, n)
	}
	for at, t := range r.History {
		if want := c.pages[r.Pages[at/c.pageSize]][at%c.pageSize]; t != want {
			return fmt.Errorf("token %d of the history is %d, want %d", at, t, want)
		}
	}
	return nil
}

// next is the token after the first n of the row, read from its pages.
func (c *clockwork) next(pages []kv.Page, n int) int32 {
	sum := 0
	for at := range n {
		sum = (sum*31 + int(c.pages[pages[at/c.pageSize]][at%c.pageSize])) % 997
	}
	return int32(sum)
}

// answer is what clockwork makes of a prompt.
func answer(prompt []int32, n int) (out []int32) {
	sum := 0
	for _, t := range prompt {
		sum = (sum*31 + int(t)) % 997
	}
	for range n {
		out = append(out, int32(sum))
		sum = (sum*31 + sum) % 997
	}
	return out
}

// newBench makes a serve worker without listeners over clockwork engines.
func newBench(cfg Config, engines ...*clockwork) *Worker {
	cfg.Role = Serve
	cfg.Context = max(cfg.Context, 512)
	if cfg.KVPages == 0 {
		cfg.KVPages = 1024
	}
	cfg.defaults()
	w := &Worker{
		cfg: cfg, log: cfg.Log, clock: newClock(), metrics: metric.New("serve"), instance: "bench",
		ended: make(chan struct{}, 1), broke: make(chan error, 1), ready: make(chan ReadyLine, 1),
	}
	for rank, e := range engines {
		w.engines = append(w.engines, e)
		w.loops = append(w.loops, w.newLoop(rank))
	}
	w.wireServe()
	w.phase.Store(phaseReady)
	return w
}

// onBench runs f in a bubble with a running worker.
func onBench(t *testing.T, cfg Config, e *clockwork, f func(t *testing.T, w *Worker)) {
	synctest.Test(t, func(t *testing.T) {
		e.shut = make(chan struct{}) // of this bubble
		w := newBench(cfg, e)
		ctx, cancel := context.WithCancel(t.Context())
		var g sync.WaitGroup
		w.startLoops(ctx, &g)
		f(t, w)
		time.Sleep(time.Second) // a batch under way holds pages
		w.stopLoops()
		cancel()
		g.Wait()
		for _, l := range w.loops {
			if n := l.pool.Count(); n[kv.Owned]+n[kv.Quarantined] != 0 && len(l.open) == 0 {
				t.Errorf("pages are lost: %v", n)
			}
		}
	})
}

func job(prompt []int32, max int) *Job {
	return &Job{RID: "r", Prompt: prompt, MaxTokens: max, Room: -1, DPRank: -1, Sampling: engine.Sampling{Logprobs: -1}, Box: NewBox(max, nil)}
}

func prompt(seed, n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32((seed*7919 + i*104729) % 997)
	}
	return p
}

// collect reads a box to its end.
func collect(t *testing.T, j *Job) (tokens []int32, end *End) {
	t.Helper()
	for {
		it, ok := j.Box.Next(t.Context())
		if !ok {
			t.Fatalf("job %s has no end", j.RID)
		}
		if it.End != nil {
			return tokens, it.End
		}
		if it.Index != len(tokens) {
			t.Fatalf("job %s: token %d came as %d", j.RID, len(tokens), it.Index)
		}
		tokens = append(tokens, it.Out.Token)
	}
}

func TestServeAnswers(t *testing.T) {
	for _, cfg := range []Config{
		{},
		{PrefixCache: true},
		{Chunk: 16},
		{Chunk: 7, PageSize: 4, MaxRunning: 3, KVPages: 256},
		{PageSize: 4, MaxRunning: 8, KVPages: 40, ReservedTokens: 1, PrefixCache: true}, // preempts
		{PageSize: 1, MaxRunning: 8, KVPages: 160, ReservedTokens: 1},                   // preempts
	} {
		t.Run(fmt.Sprintf("chunk=%d,page=%d,pages=%d,cache=%v", cfg.Chunk, cfg.PageSize, cfg.KVPages, cfg.PrefixCache), func(t *testing.T) {
			size := cfg.PageSize
			if size == 0 {
				size = 16
			}
			onBench(t, cfg, newClockwork(size, time.Millisecond), func(t *testing.T, w *Worker) {
				var jobs []*Job
				for i := range 20 {
					j := job(prompt(i/2, 10+3*(i%7)), 25+i)
					j.RID = fmt.Sprint(i)
					if i%2 == 1 {
						j.Sampling.Presence = 1
					}
					if err := w.Submit(j); err != nil {
						t.Fatal(err)
					}
					jobs = append(jobs, j)
				}
				defer func() {
					if n := value(t, w.metrics, "preemptions_total"); (n > 0) != (cfg.ReservedTokens > 0) {
						t.Errorf("%v preemptions", n)
					}
				}()
				for _, j := range jobs {
					got, end := collect(t, j)
					if want := answer(j.Prompt, j.MaxTokens); fmt.Sprint(got) != fmt.Sprint(want) {
						t.Errorf("job %s\n got %v\nwant %v", j.RID, got, want)
					}
					if end.Reason != EndLength || end.Err != nil || end.Completion != j.MaxTokens {
						t.Errorf("job %s ended with %+v %v", j.RID, end, end.Err)
					}
				}
			})
		})
	}
}

func TestStopIDsAndStopAt(t *testing.T) {
	onBench(t, Config{}, newClockwork(16, time.Millisecond), func(t *testing.T, w *Worker) {
		p := prompt(1, 20)
		all := answer(p, 50)
		j := job(p, 50)
		j.StopIDs = []int32{all[10]}
		if err := w.Submit(j); err != nil {
			t.Fatal(err)
		}
		got, end := collect(t, j)
		if len(got) == 0 || len(got) > 11 || got[len(got)-1] != all[10] || end.Reason != EndStop || end.Completion != len(got) {
			t.Errorf("%d tokens, end %+v", len(got), end)
		}
		k := job(p, 400)
		if err := w.Submit(k); err != nil {
			t.Fatal(err)
		}
		for {
			it, _ := k.Box.Next(t.Context())
			if it.Index == 5 && it.End == nil {
				w.StopAt(k, 4)
			}
			if it.End != nil {
				if it.End.Reason != EndStop || it.End.Completion != 4 {
					t.Errorf("end %+v", it.End)
				}
				break
			}
		}
	})
}

func TestAbortInEveryPhase(t *testing.T) {
	onBench(t, Config{MaxRunning: 2, Chunk: 16}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		cause := api.Errorf(api.ClientGone, "the client went away")
		var jobs []*Job
		for i := range 30 {
			j := job(prompt(i, 64), 64)
			jobs = append(jobs, j)
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
			time.Sleep(7 * time.Millisecond)
		}
		for _, j := range jobs {
			w.Abort(j, cause)
			w.Abort(j, cause)
		}
		for _, j := range jobs {
			_, end := collect(t, j)
			if end.Reason == EndFailed && (end.Err.Code != api.ClientGone || end.Err.Message != cause.Message) {
				t.Errorf("end %+v", end.Err)
			}
		}
		time.Sleep(100 * time.Millisecond) // the batch under way
		rows, err := w.Requests(t.Context())
		if err != nil || len(rows) != 0 {
			t.Errorf("%v, %v are left", rows, err)
		}
	})
}

func TestDeadline(t *testing.T) {
	onBench(t, Config{}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		j := job(prompt(1, 20), 400)
		j.Deadline = time.Now().Add(time.Second)
		if err := w.Submit(j); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		_, end := collect(t, j)
		if end.Reason != EndFailed || end.Err.Code != api.DeadlineExceeded {
			t.Errorf("end %+v", end)
		}
		if d := time.Since(begin); d < time.Second || d > 1020*time.Millisecond {
			t.Errorf("ended after %v", d)
		}
	})
}

// An engine that fails a batch fails the requests in it, and nothing else.
func TestEngineFailure(t *testing.T) {
	e := newClockwork(16, time.Millisecond)
	e.fail = func(b *engine.Batch) error {
		for _, r := range b.Rows {
			if r.Tokens[0] == 13 && r.Start == 0 {
				return errors.New("a spark flew")
			}
		}
		return nil
	}
	onBench(t, Config{MaxRunning: 1}, e, func(t *testing.T, w *Worker) {
		bad, good := job(append([]int32{13}, prompt(1, 20)...), 10), job(prompt(2, 20), 10)
		for _, j := range []*Job{bad, good} {
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
		}
		if _, end := collect(t, bad); end.Reason != EndFailed || end.Err.Code != api.Internal || !strings.Contains(end.Err.Message, "a spark flew") {
			t.Errorf("end %+v", end)
		}
		if got, end := collect(t, good); end.Reason != EndLength || len(got) != 10 {
			t.Errorf("end %+v", end)
		}
	})
}

// An engine whose model is gone never recovers: the worker takes nothing more,
// says why wherever it is asked, ends what is open, and logs it once.
func TestModelGone(t *testing.T) {
	e := newClockwork(16, time.Millisecond)
	gone := false
	e.fail = func(*engine.Batch) error {
		if gone {
			return engine.ErrModelGone
		}
		return nil
	}
	var log strings.Builder
	onBench(t, Config{MaxRunning: 1, Log: slog.New(slog.NewTextHandler(&log, nil))}, e, func(t *testing.T, w *Worker) {
		good := job(prompt(1, 20), 10)
		if err := w.Submit(good); err != nil {
			t.Fatal(err)
		}
		if got, end := collect(t, good); end.Reason != EndLength || len(got) != 10 || len(w.broke) != 0 {
			t.Fatalf("before: end %+v, %d failures", end, len(w.broke))
		}
		gone = true
		jobs := []*Job{job(prompt(2, 20), 10), job(prompt(3, 20), 10)}
		for _, j := range jobs {
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case cause := <-w.broke:
			w.fail(cause)
		case <-time.After(time.Minute):
			t.Fatal("the worker goes on")
		}
		for _, j := range jobs {
			if _, end := collect(t, j); end.Reason != EndFailed || end.Err.Code != api.Internal || !strings.Contains(end.Err.Message, "cut short") {
				t.Errorf("end %+v", end)
			}
		}
		if err := w.Submit(job(prompt(4, 20), 10)); err == nil || err.Code != api.Draining || err.RetryAfter == 0 {
			t.Errorf("afterwards: %v", err)
		}
		h := &httpSide{w: w, cfg: w.cfg}
		for path, f := range map[string]http.HandlerFunc{"/health": h.health, "/health_generate": h.healthGenerate, "/readyz": h.readyz} {
			r := httptest.NewRecorder()
			if f(r, httptest.NewRequest("GET", path, nil)); r.Code != 503 || !strings.Contains(r.Body.String(), "cut short") {
				t.Errorf("%s: %d %s", path, r.Code, r.Body)
			}
		}
		if got := strings.Count(log.String(), "level=ERROR"); got != 1 || !strings.Contains(log.String(), "cut short") {
			t.Errorf("%d errors in the log: %s", got, log.String())
		}
	})
}

func TestSubmitRefuses(t *testing.T) {
	onBench(t, Config{}, newClockwork(16, time.Millisecond), func(t *testing.T, w *Worker) {
		for name, c := range map[string]struct {
			change func(*Job)
			code   api.Code
		}{
			"empty prompt":  {func(j *Job) { j.Prompt = nil }, api.InvalidRequest},
			"bad token":     {func(j *Job) { j.Prompt[3] = 1000 }, api.InvalidRequest},
			"no tokens":     {func(j *Job) { j.MaxTokens = -1 }, api.InvalidRequest},
			"too long":      {func(j *Job) { j.MaxTokens = 500 }, api.ContextLengthExceeded},
			"room":          {func(j *Job) { j.Room = 5 }, api.InvalidRequest},
			"bad bias":      {func(j *Job) { j.Sampling.LogitBias = []engine.Bias{{ID: 1000}} }, api.InvalidRequest},
			"bad logprobs":  {func(j *Job) { j.Sampling.Logprobs = 5000 }, api.InvalidRequest},
			"tiny penalty":  {func(j *Job) { j.Sampling.Repetition = 0.001 }, api.InvalidRequest},
			"negative temp": {func(j *Job) { j.Sampling.Temperature = -1 }, api.InvalidRequest},
		} {
			j := job(prompt(1, 20), 10)
			c.change(j)
			if err := w.Submit(j); err == nil || err.Code != c.code {
				t.Errorf("%s: %v, want %s", name, err, c.code)
			}
		}
		if n := w.openJobs(); n != 0 {
			t.Errorf("%d jobs are open", n)
		}
	})
}

// Beyond its bound of open jobs the worker refuses; each that was taken ends.
func TestSubmitIsBounded(t *testing.T) {
	onBench(t, Config{MaxRunning: 4, MaxQueued: 8}, newClockwork(16, time.Millisecond), func(t *testing.T, w *Worker) {
		l := w.loops[0]
		l.jobs.Store(4 + 8 + openBeyond)
		if err := w.Submit(job(prompt(1, 20), 5)); err == nil || err.Code != api.Overloaded || err.RetryAfter == 0 {
			t.Errorf("got %v", err)
		}
		l.jobs.Store(0)
		// The core's own, tighter bound comes back as the end of the job.
		var jobs []*Job
		for i := range 40 {
			j := job(prompt(i, 20), 5)
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
			jobs = append(jobs, j)
		}
		refused := 0
		for _, j := range jobs {
			if _, end := collect(t, j); end.Reason == EndFailed {
				refused++
				if end.Err.Code != api.Overloaded || end.Err.HTTPStatus() != 429 {
					t.Errorf("end %+v", end.Err)
				}
			}
		}
		if refused == 0 || refused == 40 {
			t.Errorf("%d of 40 refused", refused)
		}
	})
}

func TestDrain(t *testing.T) {
	for _, wait := range []time.Duration{10 * time.Second, 100 * time.Millisecond} {
		onBench(t, Config{}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
			earlier := job(prompt(3, 20), 1)
			if err := w.Submit(earlier); err != nil {
				t.Fatal(err)
			}
			collect(t, earlier) // the loop has been empty once: that says nothing of the drain
			j := job(prompt(1, 20), 100)
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
			time.Sleep(50 * time.Millisecond)
			w.phase.Store(phaseDraining)
			if err := w.Submit(job(prompt(2, 20), 5)); err == nil || err.Code != api.Draining || err.RetryAfter == 0 {
				t.Errorf("while draining: %v", err)
			}
			begin := time.Now()
			w.drain(wait)
			w.endAll(w.stopCause())
			took := time.Since(begin)
			got, end := collect(t, j)
			if wait > time.Second {
				if end.Reason != EndLength || len(got) != 100 || took > 2*time.Second {
					t.Errorf("a long drain: %d tokens, %+v after %v", len(got), end, took)
				}
				return
			}
			if end.Reason != EndFailed || end.Err.Code != api.Draining || took > wait+endWait {
				t.Errorf("a short drain: %+v after %v", end, took)
			}
		})
	}
}

// What has arrived is known before a deadline is judged: a request whose answer
// came in time is served, though its deadline has passed too when the loop looks.
func TestArrivedBeforeJudged(t *testing.T) {
	onBench(t, Config{}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		j := job(prompt(1, 20), 1)
		j.Deadline = time.Now().Add(12 * time.Millisecond)
		if err := w.Submit(j); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the batch is under way
		w.loops[0].in.push(&question{func(*loop) { time.Sleep(15 * time.Millisecond) }})
		if got, end := collect(t, j); end.Reason != EndLength || len(got) != 1 {
			t.Errorf("%d tokens, %+v", len(got), end)
		}
	})
}

// The loop turns also when nothing happens, so its stamp proves that it lives.
func TestIdleLoopTicks(t *testing.T) {
	onBench(t, Config{HealthWindow: 2 * time.Second}, newClockwork(16, time.Millisecond), func(t *testing.T, w *Worker) {
		for range 30 {
			time.Sleep(time.Second)
			if w.Ticked() != nil {
				t.Fatal("an idle loop looks dead")
			}
		}
		stuck := make(chan struct{})
		w.loops[0].in.push(&question{func(*loop) { <-stuck }})
		time.Sleep(3 * time.Second)
		if w.Ticked() == nil {
			t.Error("a stuck loop looks alive")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Requests(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a stuck loop answered: %v", err)
		}
		close(stuck)
	})
}

// A loop that is stuck in a turn is logged with its stack, once a minute, and
// counted when the turn has ended.
func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var log bytes.Buffer
		w := newBench(Config{Log: slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))}, newClockwork(16, time.Millisecond))
		ctx, cancel := context.WithCancel(t.Context())
		var g sync.WaitGroup
		w.startLoops(ctx, &g)
		overrun := func() float64 { return value(t, w.metrics, `loop_overrun_total{where="turn"}`) }
		stick := func(d time.Duration) {
			w.loops[0].in.push(&question{func(*loop) { stuckHere(d) }})
			time.Sleep(2 * d)
			synctest.Wait()
		}
		stick(5 * time.Millisecond)
		if n := overrun(); n != 0 {
			t.Errorf("a turn of 5 ms counted %v overruns", n)
		}
		for range 3 {
			stick(50 * time.Millisecond)
		}
		if n := overrun(); n != 3 {
			t.Errorf("%v overruns, want 3", n)
		}
		mu.Lock()
		lines := strings.Count(log.String(), "stuck in a turn")
		if lines != 1 || !strings.Contains(log.String(), "stuckHere") {
			t.Errorf("%d lines, log:\n%s", lines, log.String())
		}
		mu.Unlock()
		time.Sleep(time.Minute)
		stick(50 * time.Millisecond)
		mu.Lock()
		if lines := strings.Count(log.String(), "stuck in a turn"); lines != 2 {
			t.Errorf("%d lines after a minute, want 2", lines)
		}
		mu.Unlock()
		w.stopLoops()
		cancel()
		g.Wait()
	})
}

//go:noinline
func stuckHere(d time.Duration) { time.Sleep(d) }

type lockedWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

// value is one series of a scrape.
func value(t *testing.T, m *metric.Set, series string) float64 {
	t.Helper()
	r := httptest.NewRecorder()
	m.Handler().ServeHTTP(r, httptest.NewRequest("GET", "/metrics", nil))
	_, rest, ok := strings.Cut(r.Body.String(), "\nmetronome_"+series+" ")
	line, _, _ := strings.Cut(rest, "\n")
	v, err := strconv.ParseFloat(line, 64)
	if !ok || err != nil {
		t.Fatalf("the scrape lacks %s: %q", series, line)
	}
	return v
}

// The beat is measured from batch to batch while sequences run, and not
// across a pause without any.
func TestBeat(t *testing.T) {
	onBench(t, Config{}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		for range 2 {
			j := job(prompt(1, 20), 11) // one token from the prefill, ten decode batches: nine gaps
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
			collect(t, j)
			time.Sleep(5 * time.Second)
		}
		if n, sum := value(t, w.metrics, "beat_seconds_count"), value(t, w.metrics, "beat_seconds_sum"); n != 18 || sum < 0.17 || sum > 0.19 {
			t.Errorf("%v beats of %.3f s in all, want 18 of 0.180", n, sum)
		}
	})
}

func TestGauges(t *testing.T) {
	onBench(t, Config{MaxRunning: 2, KVPages: 100}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		var jobs []*Job
		for i := range 6 {
			j := job(prompt(i, 40), 60)
			jobs = append(jobs, j)
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(200 * time.Millisecond)
		m := w.metrics
		if n := value(t, m, "num_running_reqs"); n < 2 {
			t.Errorf("%v running", n)
		}
		if n := value(t, m, `kv_pages{state="free"}`) + value(t, m, `kv_pages{state="owned"}`) + value(t, m, `kv_pages{state="quarantined"}`) + value(t, m, `kv_pages{state="cached"}`); n != 100 {
			t.Errorf("%v pages in all, want 100", n)
		}
		rows, err := w.Requests(t.Context())
		if err != nil || len(rows) != 6 || rows[0].Phase != "running" || rows[0].Output == 0 || rows[0].Age <= 0 {
			t.Errorf("%+v, %v", rows, err)
		}
		if n := w.AbortRID("r", false, api.Errorf(api.ClientGone, "gone")); n != 6 {
			t.Errorf("aborted %d", n)
		}
		for _, j := range jobs {
			collect(t, j)
		}
		time.Sleep(time.Second)
		if n := value(t, m, "num_running_reqs") + value(t, m, "num_queue_reqs") + value(t, m, `kv_pages{state="owned"}`); n != 0 {
			t.Errorf("%v requests and pages are left", n)
		}
		if n := value(t, m, `requests_total{code="client_gone"}`); n != 6 {
			t.Errorf("%v requests counted as gone", n)
		}
		if first, gaps, ends := value(t, m, "time_to_first_token_seconds_count"), value(t, m, "inter_token_latency_seconds_count"), value(t, m, "e2e_request_latency_seconds_count"); first != 6 || gaps < 20 || ends != 6 {
			t.Errorf("%v first tokens, %v gaps, %v ends", first, gaps, ends)
		}
	})
}

// The choices of DP ranks: the one with the fewest open jobs.
func TestPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newBench(Config{DP: 3}, newClockwork(16, 0), newClockwork(16, 0), newClockwork(16, 0))
		for i := range 9 {
			l := w.place(job(prompt(1, 5), 5))
			if l.rank != i%3 {
				t.Errorf("job %d went to rank %d", i, l.rank)
			}
			l.jobs.Add(1)
		}
		w.cfg.Role = Prefill
		for room := range int64(9) {
			if l := w.place(&Job{Room: room, DPRank: -1}); l.rank != int(room%3) {
				t.Errorf("room %d went to rank %d", room, l.rank)
			}
			if l := w.place(&Job{Room: room, DPRank: 2}); l.rank != 2 {
				t.Errorf("room %d names rank 2 and went to rank %d", room, l.rank)
			}
		}
	})
}

// steady is a serve loop with 64 running sequences that is stepped by hand:
// turn runs one batch and one turn of the loop.
func steady(tb testing.TB, pages int) (turn func()) {
	e := newClockwork(16, 0)
	w := newBench(Config{KVPages: pages, Context: 1 << 20}, e)
	l := w.loops[0]
	var boxes []*Box
	for i := range 64 {
		j := job(prompt(i, 5), pages/64*16-16)
		boxes = append(boxes, j.Box)
		if err := w.Submit(j); err != nil {
			tb.Fatal(err)
		}
	}
	instant := &instant{e}
	turn = func() {
		for len(l.engine.queue) > 0 {
			p := <-l.engine.queue
			p.run(instant)
			l.in.push(p)
		}
		now := l.clock.now()
		l.turn.begin(now)
		<-l.in.wake
		for _, m := range l.in.take() {
			l.take(now, m)
		}
		l.step(now, &l.tick)
		l.handOut(now)
		l.endTurn(now)
		for _, b := range boxes {
			for _, ok := b.TryNext(); ok; _, ok = b.TryNext() {
			}
		}
	}
	for range 200 {
		turn()
	}
	if n := l.decode.core.Len(5); n != 64 {
		tb.Fatalf("%d sequences run, want 64", n)
	}
	return turn
}

// instant draws without looking at pages, so that a benchmark measures the loop.
type instant struct{ *clockwork }

func (e *instant) Run(b *engine.Batch) error {
	for i := range b.Rows {
		b.Rows[i].Out = engine.Output{Token: int32(b.Rows[i].Start % 997)}
	}
	return nil
}

func TestSteadyTurnAllocatesNothing(t *testing.T) {
	if raceBuild {
		t.Skip("race builds check the cores' invariants after each step, which allocates")
	}
	turn := steady(t, 1<<13)
	// A page for each sequence every 16 turns: 64 are taken in one of them, in
	// memory that was reserved at admission.
	if n := testing.AllocsPerRun(500, turn); n > 0 {
		t.Errorf("%v allocations a turn, want 0", n)
	}
}

// One turn with 64 running sequences: step, plan, emit 64 tokens, next batch.
// It competes with a batch of some 10 ms.
func BenchmarkTurn64(b *testing.B) {
	turn := steady(b, 1<<19)
	b.ReportAllocs()
	for b.Loop() {
		turn()
	}
}

// What the watchdog and the busy histogram add to each turn: under 200 ns.
func BenchmarkWatchdog(b *testing.B) {
	w := newBench(Config{}, newClockwork(16, 0))
	l := w.loops[0]
	b.ReportAllocs()
	for b.Loop() {
		now := l.clock.now()
		l.turn.begin(now)
		l.endTurn(now)
	}
}
