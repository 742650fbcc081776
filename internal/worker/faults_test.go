package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
)

// Public faults of other systems between workers, each test by the fault's
// number: a decode worker and some prefills in one bubble of virtual time.

// region is a prefill worker and the way to it. It can be stopped, as SIGSTOP
// does: what it has not read stays with the sender, and it answers nobody.
type region struct {
	city
	slow time.Duration // a write over a link takes so long

	mu      sync.Mutex
	stopped chan struct{} // nil: it runs
}

func (r *region) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = make(chan struct{})
}

func (r *region) resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped != nil {
		close(r.stopped)
		r.stopped = nil
	}
}

// runs waits until the worker is not stopped.
func (r *region) runs(ctx context.Context) error {
	r.mu.Lock()
	stopped := r.stopped
	r.mu.Unlock()
	if stopped == nil {
		return nil
	}
	select {
	case <-stopped:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gated is a prefill's end of a link.
type gated struct {
	net.Conn
	at *region
}

func (g gated) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	g.at.runs(context.Background())
	return n, err
}

func (g gated) Write(b []byte) (int, error) {
	g.at.runs(context.Background())
	time.Sleep(g.at.slow)
	return g.Conn.Write(b)
}

// country is the registries of the bubble: "p0:1" and "alias0:1" are two names
// of the first prefill, and so on; the rest is as in a town.
type country struct {
	town
	all []*region
}

func (c *country) at(addr string) *region {
	var i int
	if _, err := fmt.Sscanf(addr, "p%d:1", &i); err != nil {
		if _, err := fmt.Sscanf(addr, "alias%d:1", &i); err != nil {
			return nil
		}
	}
	return c.all[i]
}

func (c *country) FetchInfo(ctx context.Context, addr string) (bootstrap.Info, error) {
	r := c.at(addr)
	if r == nil {
		return c.town.FetchInfo(ctx, addr)
	}
	if err := r.runs(ctx); err != nil {
		return bootstrap.Info{}, err
	}
	return r.FetchInfo(ctx, addr)
}

func (c *country) LookupRank(ctx context.Context, addr string, dp, cp, tp, pp int) (string, error) {
	r := c.at(addr)
	if r == nil {
		return c.town.LookupRank(ctx, addr, dp, cp, tp, pp)
	}
	if err := r.runs(ctx); err != nil {
		return "", err
	}
	return addr, r.ask(ctx, addr)
}

func (c *country) Health(ctx context.Context, addr string) (string, error) {
	r := c.at(addr)
	if r == nil {
		return c.town.Health(ctx, addr)
	}
	if err := r.runs(ctx); err != nil {
		return "", err
	}
	return r.Health(ctx, addr)
}

func (c *country) dial(ctx context.Context, addr string) (net.Conn, error) {
	r := c.at(addr)
	if r == nil {
		return nil, errors.New("connection refused")
	}
	return r.ln.dial(ctx, "127.0.0.1:1")
}

// legs submits both legs of a job; a stopped prefill takes its own in silence.
func (c *country) legs(t *testing.T, d *Worker, addr string, prompt []int32, max int) (p, legD *Job) {
	t.Helper()
	rooms++
	j := Job{RID: fmt.Sprint(rooms), Prompt: prompt, MaxTokens: max, Room: rooms, DPRank: -1, Addr: addr, Sampling: engine.Sampling{Logprobs: -1}}
	if r := c.at(addr); r != nil {
		p = submit(t, r.p, j)
	}
	return p, submit(t, d, j)
}

// right asks for an answer of n tokens, which must be the right one.
func (c *country) right(t *testing.T, d *Worker, addr string, prompt []int32, n int) {
	t.Helper()
	_, leg := c.legs(t, d, addr, prompt, n)
	isRight(t, leg, hear(t, leg))
}

func isRight(t *testing.T, j *Job, got said) {
	t.Helper()
	if want := simAnswer(j.Prompt, j.MaxTokens); !reflect.DeepEqual(got.tokens(), want) || got.end.Reason != EndLength {
		t.Errorf("job %s: %v %v, %d tokens of %d", j.RID, got.end.Reason, got.end.Err, len(got.outs), len(want))
	}
}

// rightOrNamed: a job's end is the right answer, or an error with a cause.
func rightOrNamed(t *testing.T, j *Job) (ok bool) {
	t.Helper()
	got := hear(t, j)
	if got.end.Reason == EndFailed {
		if e := got.end.Err; e == nil || e.Code == "" || e.Code == api.Internal {
			t.Errorf("job %s: no cause: %v", j.RID, e)
		}
		return false
	}
	isRight(t, j, got)
	return true
}

// inCountry runs f with n prefill workers and a decode worker.
func inCountry(t *testing.T, n int, pc, dc Config, f func(t *testing.T, c *country, d *Worker)) {
	synctest.Test(t, func(t *testing.T) {
		pc.Role, dc.Role = Prefill, Decode
		d, c := newSimWorker(t, dc), &country{town: town{asked: map[string]int{}}}
		ctx, cancel := context.WithCancel(t.Context())
		var g sync.WaitGroup
		for i := range n {
			p := newSimWorker(t, pc)
			p.instance = fmt.Sprint("prefill-", i)
			r := &region{city: city{town: town{asked: map[string]int{}}, p: p, ln: newPipes(1)}}
			c.all = append(c.all, r)
			if err := p.wireSenders(); err != nil {
				t.Fatal(err)
			}
			p.startLoops(ctx, &g)
			g.Go(func() { p.loops[0].prefill.sender.Serve(ctx, gates{r.ln.ranks[0], r}, 0) })
		}
		if err := d.wireReceivers(c, c.dial); err != nil {
			t.Fatal(err)
		}
		d.startLoops(ctx, &g)
		defer func() {
			for _, r := range c.all {
				r.resume()
			}
			d.stopLoops()
			cancel()
			for _, r := range c.all {
				r.p.stopLoops()
			}
			g.Wait()
		}()
		f(t, c, d)
	})
}

// gates makes every connection of a listener a gated one.
type gates struct {
	*pipe
	at *region
}

func (g gates) Accept() (net.Conn, error) {
	c, err := g.pipe.Accept()
	if err != nil {
		return nil, err
	}
	return gated{c, g.at}, nil
}

// beat measures a stream's gaps from now until done is closed.
func beat(t *testing.T, j *Job, done <-chan struct{}) *time.Duration {
	worst := new(time.Duration)
	last := time.Now()
	ctx := t.Context()
	go func() {
		for {
			it, ok := j.Box.Next(ctx)
			select {
			case <-done:
				return
			default:
			}
			if !ok || it.End != nil {
				*worst = time.Hour
				return
			}
			*worst, last = max(*worst, time.Since(last)), time.Now()
		}
	}()
	return worst
}

// A stopped prefill does not read; five hundred requests through it fill every
// buffer on the way. No write of decode's reaches its beat, the other prefill's
// requests are served meanwhile, all of its own end, and it is used again.
func TestF02StoppedPeerDoesNotRead(t *testing.T) {
	inCountry(t, 2, Config{MaxQueued: 1000}, Config{KVPages: 512, MaxQueued: 1000, KVTimeout: 5 * time.Second}, func(t *testing.T, c *country, d *Worker) {
		c.right(t, d, "p0:1", text(1, 40), 3)
		_, stream := c.legs(t, d, "p1:1", text(2, 100), 3000)
		stream.Box.Next(t.Context())
		done := make(chan struct{})
		worst := beat(t, stream, done)
		c.all[0].stop()
		var lost, theirs []*Job
		many := fewer(500, 24)
		for i := range many {
			p, j := c.legs(t, d, "p0:1", text(i, 40), 3)
			lost, theirs = append(lost, j), append(theirs, p)
		}
		begin := time.Now()
		for i := range 10 {
			asked := time.Now()
			c.right(t, d, "p1:1", text(i, 60), 4)
			if took := time.Since(asked); took > 200*time.Millisecond {
				t.Errorf("a request over the healthy prefill took %v", took)
			}
			time.Sleep(time.Second)
		}
		time.Sleep(20*time.Second - time.Since(begin))
		close(done)
		synctest.Wait()
		if *worst > 20*time.Millisecond {
			t.Errorf("the bystander waited %v for a token", *worst)
		}
		c.all[0].resume()
		for i, j := range lost {
			rightOrNamed(t, j)
			c.all[0].p.Abort(theirs[i], api.Errorf(api.ClientGone, "decode has ended")) // as the router does
		}
		c.right(t, d, "p0:1", text(9, 60), 4)
		d.Abort(stream, api.Errorf(api.ClientGone, "enough"))
		allIdle(t, c, d)
	})
}

// idle lets time go on until nothing is left in a worker, for 10 s at most.
func idle(t *testing.T, w *Worker) {
	t.Helper()
	left := 0
	for range 1000 {
		var err error
		if left, err = leftIn(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if left == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s worker: %d pages and requests are left after 10 s", w.cfg.Role, left)
}

// fewer is n, or raced in a race build, which checks the cores' invariants after each step.
func fewer(n, raced int) int {
	if raceBuild {
		return raced
	}
	return n
}

func allIdle(t *testing.T, c *country, d *Worker) {
	t.Helper()
	for _, r := range c.all {
		idle(t, r.p)
	}
	idle(t, d)
}

// A hundred long prompts are aborted at prefill alone. Decode hears of each
// within a second, and the next requests are as fast as ever.
func TestF07AbortAtPrefill(t *testing.T) {
	inCountry(t, 1, Config{SimPrefillRate: 2000, KVPages: 1024}, Config{KVPages: 1024}, func(t *testing.T, c *country, d *Worker) {
		twenty := func() time.Duration {
			begin := time.Now()
			var jobs []*Job
			for i := range 20 {
				_, j := c.legs(t, d, "p0:1", text(i, 50), 10)
				jobs = append(jobs, j)
			}
			for _, j := range jobs {
				isRight(t, j, hear(t, j))
			}
			return time.Since(begin)
		}
		twenty() // makes the link
		quiet := twenty()
		var jobs []*Job
		many := fewer(100, 10)
		for i := range many {
			_, j := c.legs(t, d, "p0:1", text(i, 1000), 10)
			jobs = append(jobs, j)
		}
		time.Sleep(300 * time.Millisecond) // some have their grant, one computes
		if n := c.all[0].p.AbortRID("", true, api.Errorf(api.ClientGone, "aborted")); n != many {
			t.Fatalf("%d of them were open at prefill", n)
		}
		begin := time.Now()
		for _, j := range jobs {
			if got := hear(t, j); got.end.Reason != EndFailed || got.end.Err.Code != api.ClientGone {
				t.Errorf("job %s: %+v %v", j.RID, got.end, got.end.Err)
			}
		}
		allIdle(t, c, d)
		if took := time.Since(begin); took > time.Second {
			t.Errorf("decode was free again after %v", took)
		}
		if took := twenty(); took > quiet*3/2 {
			t.Errorf("twenty requests took %v, before the fault %v", took, quiet)
		}
	})
}

// A request is aborted while its pages are on their way, at ever new moments,
// and requests of another prefill want all pages at once: a late write into a
// page that was given away would be in their tokens.
func TestF12PagesAreNotUsedUnderAWriter(t *testing.T) {
	rounds := fewer(200, 8)
	inCountry(t, 2, Config{SimPrefillRate: 4000}, Config{KVPages: 32, ReservedTokens: 1, KVTimeout: 3 * time.Second}, func(t *testing.T, c *country, d *Worker) {
		c.all[0].slow = 2 * time.Millisecond
		held := 0
		for i := range rounds {
			pLeg, a := c.legs(t, d, "p0:1", text(i, 200), 4)
			time.Sleep(time.Duration(i*9%70) * time.Millisecond)
			c.all[0].stop()
			d.Abort(a, api.Errorf(api.ClientGone, "gone"))
			synctest.Wait()
			if counts(t, d)[kv.Quarantined] > 0 {
				held++
			}
			var next []*Job
			for k := range 3 {
				_, j := c.legs(t, d, "p1:1", text(i+k+1, 230), 8)
				next = append(next, j)
			}
			time.Sleep(time.Duration(i%40) * time.Millisecond)
			c.all[0].resume()
			for _, j := range next {
				isRight(t, j, hear(t, j))
			}
			c.all[0].p.Abort(pLeg, api.Errorf(api.ClientGone, "gone"))
			hear(t, a)
			allIdle(t, c, d)
		}
		if held == 0 {
			t.Error("no page was held for its writer: nothing was shown")
		}
	})
}

func counts(t *testing.T, w *Worker) kv.Count {
	t.Helper()
	all, err := table(t.Context(), w, func(l *loop) []kv.Count { return []kv.Count{l.pool.Count()} })
	if err != nil {
		t.Fatal(err)
	}
	return all[0]
}

// The client leaves in the middle of a transfer and the prefill dies, or falls
// silent for good, before it can say that it is done: decode's pages all come back.
func TestF13PrefillDiesUnderAnAbort(t *testing.T) {
	inCountry(t, 1, Config{SimPrefillRate: 4000}, Config{KVTimeout: 3 * time.Second, HeartbeatInterval: time.Second}, func(t *testing.T, c *country, d *Worker) {
		c.all[0].slow = 2 * time.Millisecond
		free := counts(t, d)[kv.Free]
		for i := range 30 {
			p, j := c.legs(t, d, "p0:1", text(i, 200), 4)
			time.Sleep(time.Duration(10+i*2) * time.Millisecond)
			silent := i%2 == 1
			if silent {
				c.all[0].stop()
			}
			d.Abort(j, api.Errorf(api.ClientGone, "gone"))
			time.Sleep(time.Duration(i*3) * time.Millisecond)
			if !silent {
				c.all[0].ln.cut()
			}
			idle(t, d)
			if n := counts(t, d)[kv.Free]; n != free {
				t.Fatalf("round %d: %d free pages, at the start %d", i, n, free)
			}
			if silent {
				c.all[0].resume()
			}
			c.all[0].p.Abort(p, api.Errorf(api.ClientGone, "gone"))
			idle(t, c.all[0].p)
		}
	})
}

// Prefill's pool holds little more than one prompt, its prefix cache is on, and
// the link is slow: each prompt evicts what is left of others while they are
// being sent. What is not sent yet is not evicted.
func TestF16EvictionUnderASend(t *testing.T) {
	inCountry(t, 1, Config{KVPages: 9, PrefixCache: true, Chunk: 32}, Config{}, func(t *testing.T, c *country, d *Worker) {
		c.all[0].slow = time.Millisecond
		var jobs []*Job
		for i := range 30 {
			_, j := c.legs(t, d, "p0:1", text(i, 110+i%9), 5) // 8 pages of 9
			jobs = append(jobs, j)
		}
		for _, j := range jobs {
			isRight(t, j, hear(t, j))
		}
		allIdle(t, c, d)
	})
}

// Twelve requests in a pool for three, over two prefills: they push each other
// out, every third is aborted while it is out, the rest are right; what can
// never fit is refused, and rounds leave nothing behind.
func TestF17PushedOut(t *testing.T) {
	inCountry(t, 2, Config{}, Config{KVPages: 84, ReservedTokens: 1}, func(t *testing.T, c *country, d *Worker) {
		aborted := 0
		for range fewer(5, 1) {
			leg, never := c.legs(t, d, "p0:1", text(1, 20), 2000)
			if got := hear(t, never); got.end.Reason != EndFailed || got.end.Err.Code != api.ContextLengthExceeded {
				t.Errorf("what can never fit: %s %v", got.end.Reason, got.end.Err)
			}
			c.all[0].p.Abort(leg, api.Errorf(api.ClientGone, "decode has refused"))
			var jobs []*Job
			third := map[string]*Job{}
			for i := range fewer(12, 6) {
				_, j := c.legs(t, d, fmt.Sprintf("p%d:1", i%2), text(i, 20+i), 400)
				if jobs = append(jobs, j); i%3 == 2 {
					third[j.RID] = j
				}
			}
			gone := map[string]bool{}
			for range 2000 {
				time.Sleep(10 * time.Millisecond)
				rows, err := d.Requests(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for _, r := range rows {
					if j := third[r.RID]; j != nil && !gone[r.RID] && r.Output > 0 && r.Phase != "running" {
						d.Abort(j, api.Errorf(api.ClientGone, "gone"))
						gone[r.RID] = true
					}
				}
				if len(rows) == 0 {
					break
				}
			}
			aborted += len(gone)
			for _, j := range jobs {
				if got := hear(t, j); gone[j.RID] {
					if got.end.Reason != EndFailed || got.end.Err.Code != api.ClientGone {
						t.Errorf("an aborted one: %+v", got.end)
					}
				} else {
					isRight(t, j, got)
				}
			}
			allIdle(t, c, d)
		}
		if aborted == 0 {
			t.Error("none was aborted while it was out: nothing was shown")
		}
	})
}

// One sequence runs at a time. Of two that wait one client leaves and the
// other's time runs out: the running one has all of its tokens.
func TestF33QueuedClientLeaves(t *testing.T) {
	onBench(t, Config{MaxRunning: 1}, newClockwork(16, 10*time.Millisecond), func(t *testing.T, w *Worker) {
		a, b, c := job(prompt(1, 20), 200), job(prompt(2, 20), 200), job(prompt(3, 20), 200)
		c.Deadline = time.Now().Add(500 * time.Millisecond)
		for _, j := range []*Job{a, b, c} {
			if err := w.Submit(j); err != nil {
				t.Fatal(err)
			}
			time.Sleep(30 * time.Millisecond)
		}
		w.Abort(b, api.Errorf(api.ClientGone, "gone"))
		if _, end := collect(t, b); end.Reason != EndFailed || end.Err.Code != api.ClientGone {
			t.Errorf("the one that left: %+v", end)
		}
		if _, end := collect(t, c); end.Reason != EndFailed || end.Err.Code != api.DeadlineExceeded {
			t.Errorf("the one whose time ran out: %+v", end)
		}
		if got, end := collect(t, a); end.Reason != EndLength || !reflect.DeepEqual(got, answer(a.Prompt, 200)) {
			t.Errorf("the running one: %+v, %d tokens", end, len(got))
		}
	})
}

// Decode's slots or pages are full of long answers for longer than prefill
// waits for a decode that is gone: requests behind them are served in the end.
// One that falls silent is given up at the limit.
func TestF41BusyIsNotDead(t *testing.T) {
	for name, dc := range map[string]Config{"slots": {MaxRunning: 2, KVPages: 1024}, "pages": {KVPages: 260, ReservedTokens: 1}} {
		t.Run(name, func(t *testing.T) {
			inCountry(t, 1, Config{BootstrapTimeout: 5 * time.Second, KVPages: 1024}, dc, func(t *testing.T, c *country, d *Worker) {
				var long, behind []*Job
				for i := range 2 {
					_, j := c.legs(t, d, "p0:1", text(i, 200), 1850) // 15 s
					long = append(long, j)
				}
				time.Sleep(time.Second)
				begin := time.Now()
				for i := range 10 {
					_, j := c.legs(t, d, "p0:1", text(5+i, 200), 5)
					behind = append(behind, j)
				}
				for _, j := range behind {
					isRight(t, j, hear(t, j))
				}
				if took := time.Since(begin); name == "slots" && took < 5*time.Second {
					t.Errorf("they waited %v only: nothing was shown", took)
				}
				for _, j := range long {
					isRight(t, j, hear(t, j))
				}
				allIdle(t, c, d)
			})
		})
	}
}

func TestF41SilentIsDead(t *testing.T) {
	inCountry(t, 1, Config{BootstrapTimeout: 5 * time.Second}, Config{MaxRunning: 2, KVPages: 1024}, func(t *testing.T, c *country, d *Worker) {
		for i := range 6 { // as many as may run and be granted
			c.legs(t, d, "p0:1", text(i, 200), 1850)
		}
		var theirs []*Job
		for i := range 10 {
			p, _ := c.legs(t, d, "p0:1", text(5+i, 200), 5)
			theirs = append(theirs, p)
		}
		time.Sleep(8 * time.Second)
		begin := time.Now()
		stuck := make(chan struct{}) // its links live, and its loop stands still
		d.loops[0].in.push(&question{func(*loop) { <-stuck }})
		for _, p := range theirs {
			if got := hear(t, p); got.end.Reason != EndFailed || got.end.Err.Code != api.DecodeUnreachable {
				t.Errorf("%v %v", got.end.Reason, got.end.Err)
			}
		}
		if took := time.Since(begin); took < 4*time.Second || took > 6*time.Second {
			t.Errorf("prefill gave up after %v", took)
		}
		close(stuck)
		for _, w := range []*Worker{d, c.all[0].p} {
			w.AbortRID("", true, api.Errorf(api.ClientGone, "enough"))
		}
		allIdle(t, c, d)
	})
}

// Sixteen requests wait for the KV of a stopped prefill, in a worker of sixteen
// slots. Sixteen of another prefill are served at once; gauges tell the two apart.
func TestF45WaitingIsNotRunning(t *testing.T) {
	inCountry(t, 2, Config{}, Config{MaxRunning: 16, KVPages: 1024, KVTimeout: 5 * time.Second}, func(t *testing.T, c *country, d *Worker) {
		c.right(t, d, "p0:1", text(1, 40), 3)
		c.right(t, d, "p1:1", text(1, 40), 3)
		c.all[0].stop()
		var stuck, fine []*Job
		for i := range 16 {
			_, j := c.legs(t, d, "p0:1", text(i, 60), 3)
			stuck = append(stuck, j)
		}
		time.Sleep(1500 * time.Millisecond) // gauges are renewed every second
		gauge := func(name string) float64 { return value(t, d.metrics, name) }
		if n := gauge("num_decode_transfer_queue_reqs"); n != 16 || gauge("num_running_reqs") != 0 {
			t.Errorf("%v wait for KV and %v run, want 16 and 0", n, gauge("num_running_reqs"))
		}
		begin := time.Now()
		for i := range 16 {
			_, j := c.legs(t, d, "p1:1", text(20+i, 60), 20)
			fine = append(fine, j)
		}
		for _, j := range fine {
			isRight(t, j, hear(t, j))
		}
		if took := time.Since(begin); took > time.Second {
			t.Errorf("those of the healthy prefill took %v", took)
		}
		for _, j := range stuck {
			if rightOrNamed(t, j) {
				t.Error("a stopped prefill has served a request")
			}
		}
		if took := time.Since(begin); took > 20*time.Second {
			t.Errorf("the last one ended after %v", took)
		}
		c.all[0].resume()
		c.right(t, d, "p0:1", text(3, 60), 4)
	})
}

// Three thousand short requests, 64 at a time, share one connection, and sixty
// whose prefill never comes ask once in an interval.
func TestF47ConnectionsAreShared(t *testing.T) {
	n := fewer(3000, 300)
	inCountry(t, 1, Config{}, Config{}, func(t *testing.T, c *country, d *Worker) {
		var g sync.WaitGroup
		slots := make(chan struct{}, 64)
		for i := range n {
			slots <- struct{}{}
			_, j := c.legs(t, d, "p0:1", text(i, 20), 1)
			g.Go(func() {
				isRight(t, j, hear(t, j))
				<-slots
			})
		}
		g.Wait()
		if open := len(c.all[0].ln.open); open != 1 {
			t.Errorf("%d connections for %d requests", open, n)
		}
		var jobs []*Job
		begin := time.Now()
		for range 60 {
			_, j := c.legs(t, d, "dead:1", text(1, 20), 1)
			jobs = append(jobs, j)
		}
		for _, j := range jobs {
			if got := hear(t, j); got.end.Reason != EndFailed || got.end.Err.Code != api.PrefillUnreachable {
				t.Errorf("%+v", got.end)
			}
		}
		if asked, most := c.times("dead:1"), int(time.Since(begin)/d.cfg.ParallelInfoInterval)+1; asked > most {
			t.Errorf("%d lookups in %v", asked, time.Since(begin))
		}
	})
}

// Two prefills of one host differ by their port alone, and one of them is known
// by two names: each request has the KV of its own.
func TestF82OneHost(t *testing.T) {
	inCountry(t, 2, Config{}, Config{}, func(t *testing.T, c *country, d *Worker) {
		var jobs []*Job
		for i := range 30 {
			_, j := c.legs(t, d, []string{"p0:1", "p1:1", "alias0:1"}[i%3], text(i, 40+i), 5)
			jobs = append(jobs, j)
		}
		for _, j := range jobs {
			isRight(t, j, hear(t, j))
		}
		for i, want := range []float64{20, 10} {
			if n := value(t, c.all[i].p.metrics, `requests_total{code="ok"}`); n != want {
				t.Errorf("prefill %d has served %v, want %v", i, n, want)
			}
		}
		allIdle(t, c, d)
	})
}

// Rooms that lead to no KV of the request's own: one that nobody has, one whose
// request has been served, also when its pages are another's meanwhile, one of
// another prefill, one whose time is over, one of another prompt of the same
// length. None gives an answer, all end by name, and are counted.
func TestF71ForgedReferences(t *testing.T) {
	inCountry(t, 2, Config{BootstrapTimeout: 2 * time.Second, KVPages: 16}, Config{KVTimeout: 5 * time.Second}, func(t *testing.T, c *country, d *Worker) {
		ask := func(addr string, room int64, prompt []int32) *Job {
			return submit(t, d, Job{RID: "forged", Prompt: prompt, MaxTokens: 5, Room: room, DPRank: -1, Addr: addr, Sampling: engine.Sampling{Logprobs: -1}})
		}
		leg := func(r *region, room int64, prompt []int32) *Job {
			return submit(t, r.p, Job{RID: "leg", Prompt: prompt, MaxTokens: 5, Room: room, Sampling: engine.Sampling{Logprobs: -1}})
		}
		rooms += 1000
		p0, forged := c.all[0], 0
		refused := func(what string, j *Job, want string) {
			t.Helper()
			got := hear(t, j)
			if got.end.Reason != EndFailed || len(got.outs) != 0 || got.end.Err.Code == api.Internal || !strings.Contains(got.end.Err.Message, want) {
				t.Errorf("%s: %v %v, %d tokens; want an error with %q", what, got.end.Reason, got.end.Err, len(got.outs), want)
			}
			forged++
			if n := value(t, d.metrics, `requests_total{code="`+string(got.end.Err.Code)+`"}`); n == 0 {
				t.Errorf("%s: %s is not counted", what, got.end.Err.Code)
			}
		}
		mine, yours := text(1, 100), text(2, 100)
		refused("nobody's", ask("p0:1", rooms, mine), "no request for room")

		c.right(t, d, "p0:1", mine, 5)
		refused("used", ask("p0:1", rooms, mine), "no request for room")
		for i := range 5 { // in a pool of 16 pages
			c.right(t, d, "p0:1", text(10+i, 100), 5)
		}
		refused("used, its pages are another's", ask("p0:1", rooms-5, mine), "no request for room")

		rooms++
		l := leg(p0, rooms, mine)
		refused("another prefill's", ask("p1:1", rooms, mine), "no request for room")
		hear(t, l)
		refused("its time is over", ask("p0:1", rooms, mine), "no decode worker asked for room")

		for _, first := range []bool{true, false} {
			rooms++
			var l, j *Job
			if first {
				l = leg(p0, rooms, yours)
				time.Sleep(50 * time.Millisecond) // it is computed
				j = ask("p0:1", rooms, mine)
			} else {
				j = ask("p0:1", rooms, mine)
				time.Sleep(50 * time.Millisecond) // its pages are open
				l = leg(p0, rooms, yours)
			}
			refused("another prompt's", j, "different prompts")
			if got := hear(t, l); got.end.Reason != EndFailed || got.end.Err.Code != api.KVTransferFailed {
				t.Errorf("the leg of another prompt: %v %v", got.end.Reason, got.end.Err)
			}
		}
		if n := value(t, d.metrics, `requests_total{code="ok"}`); n != 6 {
			t.Errorf("%v requests are counted as served, want 6", n)
		}
		c.right(t, d, "p0:1", mine, 5)
		allIdle(t, c, d)
	})
}

// A loop that does not turn, and an engine that does not come back from a
// batch, make health red within the window, and green when they go on. A batch
// that takes longer, but finishes layer after layer, does not.
func TestF38HungLoopOrEngine(t *testing.T) {
	e := newClockwork(16, 10*time.Second)
	e.layers = 10
	onBench(t, Config{HealthWindow: 2 * time.Second}, e, func(t *testing.T, w *Worker) {
		h := &httpSide{w: w, cfg: w.cfg}
		check := func(when string, want int, cause string) {
			t.Helper()
			for path, f := range map[string]http.HandlerFunc{"/health": h.health, "/health_generate": h.healthGenerate, "/readyz": h.readyz} {
				r := httptest.NewRecorder()
				if f(r, httptest.NewRequest("GET", path, nil)); r.Code != want || !strings.Contains(r.Body.String(), cause) {
					t.Errorf("%s, %s: %d %s; want %d %s", when, path, r.Code, r.Body, want, cause)
				}
			}
		}
		check("idle", 200, "")
		stuck := make(chan struct{})
		w.loops[0].in.push(&question{func(*loop) { <-stuck }})
		time.Sleep(2100 * time.Millisecond)
		check("the loop hangs", 503, "loop")
		close(stuck)
		time.Sleep(idleTurn + time.Millisecond) // its next turn is surely over
		check("the loop turns again", 200, "")

		j := job(prompt(1, 20), 1)
		if err := w.Submit(j); err != nil {
			t.Fatal(err)
		}
		for range 9 {
			time.Sleep(time.Second)
			check("a long batch", 200, "")
		}
		collect(t, j)
		e.layers = 0
		j = job(prompt(2, 20), 1)
		if err := w.Submit(j); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		check("the engine hangs", 503, "engine")
		collect(t, j)
		time.Sleep(time.Second)
		check("the engine is back", 200, "")
	})
}

// A prefill worker whose KV listener, registry or HTTP server has died ends, though
// links that were made before live on: it does not stay behind half dead.
func TestF38DeadListener(t *testing.T) {
	for name, of := range map[string]func(*Worker) net.Listener{
		"KV": func(w *Worker) net.Listener { return w.prefill.listeners[0] }, "registry": func(w *Worker) net.Listener { return w.prefill.registers },
		"HTTP": func(w *Worker) net.Listener { return w.http },
	} {
		t.Run(name, func(t *testing.T) {
			p, err := New(Config{Role: Prefill, Model: "tiny", Listen: "127.0.0.1:0", BootstrapListen: "127.0.0.1:0", Threads: 1, KVPages: 64, Context: 512})
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- p.Run(context.Background()) }()
			<-p.Ready()
			x := &pair{p: p, d: runWorker(t, Config{Role: Decode, KVPages: 64})}
			_, leg := x.ask(t, Job{RID: "r", Prompt: []int32{5, 6, 7}, MaxTokens: 4})
			if got := hear(t, leg); got.end.Reason != EndLength {
				t.Fatalf("%v %v", got.end.Reason, got.end.Err)
			}
			of(p).Close()
			select {
			case err := <-done:
				if exit, ok := err.(*ExitError); !ok || exit.Code != 1 {
					t.Errorf("Run returned %v", err)
				}
			case <-time.After(5 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}
