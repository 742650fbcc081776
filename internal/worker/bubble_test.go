package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
)

// These tests run a decode and a prefill worker in one bubble of virtual time:
// real cores, loops, transfer and sim engines, over connections in memory.

// pipes is the network of a prefill worker in memory: a listener for each TP
// rank, whose address is 127.0.0.1:1 and so on.
type pipes struct {
	ranks []*pipe

	mu    sync.Mutex
	open  []net.Conn
	brief bool // connections end after the first write of the listener's side
}

type pipe struct {
	conns chan net.Conn
	once  sync.Once
	shut  chan struct{}
}

// cut breaks every connection.
func (p *pipes) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.open {
		c.Close()
	}
	p.open = nil
}

// brief is a connection that ends after its first write.
type brief struct{ net.Conn }

func (c brief) Write(b []byte) (int, error) {
	defer c.Close()
	return c.Conn.Write(b)
}

func newPipes(tp int) *pipes {
	p := &pipes{}
	for range tp {
		p.ranks = append(p.ranks, &pipe{conns: make(chan net.Conn), shut: make(chan struct{})})
	}
	return p
}

func (p *pipe) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.shut:
		return nil, net.ErrClosed
	}
}
func (p *pipe) Close() error   { p.once.Do(func() { close(p.shut) }); return nil }
func (p *pipe) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (p *pipes) dial(ctx context.Context, addr string) (net.Conn, error) {
	var rank int
	if _, err := fmt.Sscanf(addr, "127.0.0.1:%d", &rank); err != nil || rank < 1 || rank > len(p.ranks) {
		return nil, fmt.Errorf("no route to %s", addr)
	}
	ours, theirs := net.Pipe()
	p.mu.Lock()
	p.open = append(p.open, theirs)
	if p.brief {
		theirs = brief{theirs}
	}
	p.mu.Unlock()
	select {
	case p.ranks[rank-1].conns <- theirs:
		return ours, nil
	case <-p.ranks[rank-1].shut:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// city is the registries of the bubble: "good" knows the prefill worker, the
// rest is as in a town.
type city struct {
	town
	p  *Worker
	ln *pipes
}

func (c *city) FetchInfo(ctx context.Context, addr string) (bootstrap.Info, error) {
	g := &c.p.cfg
	return bootstrap.Info{
		TP: g.TP, CP: 1, DP: g.DP, PP: 1, PageSize: g.PageSize, KVDType: g.KVDType, FollowRoom: true,
		Instance: c.p.instance, Fingerprint: c.p.Fingerprint(),
	}, c.ask(ctx, addr)
}

func (c *city) LookupRank(ctx context.Context, addr string, dp, cp, tp, pp int) (string, error) {
	return fmt.Sprintf("127.0.0.1:%d", tp+1), c.ask(ctx, addr)
}

func (c *city) Health(ctx context.Context, addr string) (string, error) {
	return c.p.instance, c.ask(ctx, addr)
}

// newSimWorker makes a worker of one rank without listeners.
func newSimWorker(t *testing.T, cfg Config) *Worker {
	cfg.Engine, cfg.Context = "sim", 4096
	if cfg.KVPages == 0 {
		cfg.KVPages = 512
	}
	cfg.defaults()
	w := &Worker{
		cfg: cfg, log: slog.New(slog.NewTextHandler(io.Discard, nil)), clock: newClock(), metrics: metric.New(string(cfg.Role)),
		instance: string(cfg.Role) + "-1", ended: make(chan struct{}, 1), broke: make(chan error, 1), ready: make(chan ReadyLine, 1),
	}
	if err := w.load(); err != nil {
		t.Fatal(err)
	}
	w.loops = append(w.loops, w.newLoop(0))
	w.phase.Store(phaseReady)
	return w
}

// inBubble runs f with a pair of workers.
func inBubble(t *testing.T, pc, dc Config, f func(t *testing.T, c *city, d *Worker)) {
	synctest.Test(t, func(t *testing.T) {
		pc.Role, dc.Role = Prefill, Decode
		p, d := newSimWorker(t, pc), newSimWorker(t, dc)
		ln, c := newPipes(p.cfg.TP), &city{town{asked: map[string]int{}}, p, nil}
		c.ln = ln
		if err := errors.Join(p.wireSenders(), d.wireReceivers(c, ln.dial)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var g sync.WaitGroup
		p.startLoops(ctx, &g)
		d.startLoops(ctx, &g)
		for rank, ln := range ln.ranks {
			g.Go(func() { p.loops[0].prefill.sender.Serve(ctx, ln, rank) })
		}
		f(t, c, d)
		d.stopLoops()
		cancel()
		p.stopLoops()
		g.Wait()
	})
}

var rooms int64

// legs submits both legs of a job whose prefill is behind addr.
func (c *city) legs(t *testing.T, d *Worker, addr string, prompt []int32, max int) *Job {
	t.Helper()
	rooms++
	j := Job{RID: fmt.Sprint(rooms), Prompt: prompt, MaxTokens: max, Room: rooms, DPRank: -1, Addr: addr, Sampling: engine.Sampling{Logprobs: -1}}
	if addr == "good:1" {
		submit(t, c.p, j)
	}
	return submit(t, d, j)
}

func text(seed, n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32(32 + (seed*31+i*7)%90)
	}
	return p
}

func simAnswer(prompt []int32, n int) (out []int32) {
	for range n {
		out = append(out, engine.RefToken(prompt, out, engine.SimSeed(&engine.Sampling{})))
	}
	return out
}

// The beat: a thousand requests for addresses that hang cost the running
// sequences not one tick, and a request for a healthy prefill that comes in
// the middle of it is served at once. Each of the others ends by name. Shows F-01.
func TestBeatSurvivesHungPeers(t *testing.T) {
	inBubble(t, Config{}, Config{ParallelInfoAttempts: 3}, func(t *testing.T, c *city, d *Worker) {
		steady := c.legs(t, d, "good:1", text(1, 100), 3000)
		next := func(j *Job) (Item, time.Time) {
			it, ok := j.Box.Next(t.Context())
			if !ok {
				t.Fatal("no end")
			}
			return it, time.Now()
		}
		next(steady)
		next(steady)
		var hung []*Job
		many := 1000
		if raceBuild { // checks the core's invariants after each step
			many = 100
		}
		for i := range many {
			hung = append(hung, c.legs(t, d, fmt.Sprintf("hung-%d:1", i), text(i, 40), 10))
		}
		_, last := next(steady)
		beats, worst := 0, time.Duration(0)
		for i := range 2900 {
			if i == 1000 {
				fresh := c.legs(t, d, "good:1", text(7, 60), 5)
				begin := time.Now()
				got := hear(t, fresh)
				if want := simAnswer(text(7, 60), 5); !reflect.DeepEqual(got.tokens(), want) {
					t.Errorf("the healthy request: %v %+v, want %v", got.tokens(), got.end.Err, want)
				}
				if d := time.Since(begin); d > 150*time.Millisecond {
					t.Errorf("the healthy request took %v", d)
				}
				for range 5 {
					_, last = next(steady)
				}
				continue
			}
			_, now := next(steady)
			worst = max(worst, now.Sub(last))
			last = now
			beats++
		}
		if worst > 9*time.Millisecond {
			t.Errorf("a beat of %v among %d, want 8.1 ms", worst, beats)
		}
		for i, j := range hung {
			got := hear(t, j)
			addr := fmt.Sprintf("hung-%d:1", i)
			if got.end.Reason != EndFailed || got.end.Err.Code != api.PrefillUnreachable ||
				!strings.HasPrefix(got.end.Err.Message, "Could not fetch prefill parallel info from "+addr+" after 3 attempts") {
				t.Fatalf("job %d: %+v %v", i, got.end, got.end.Err)
			}
			if c.times(addr) != 3 {
				t.Fatalf("%d fetches for %s, want 3", c.times(addr), addr)
			}
		}
		if n := value(t, d.metrics, `parallel_info_fetch_total{result="failed"}`); n != 3*float64(many) {
			t.Errorf("%v failed fetches, want %d", n, 3*many)
		}
		if n := value(t, d.metrics, "loop_overrun_total{where=\"turn\"}"); n != 0 {
			t.Errorf("%v overruns", n)
		}
		rows, err := d.Peers(t.Context())
		if err != nil || len(rows) == 0 {
			t.Errorf("%v, %v", rows, err)
		}
		d.Abort(steady, api.Errorf(api.ClientGone, "enough"))
		for it, _ := next(steady); it.End == nil; it, _ = next(steady) {
		}
	})
}

// The sim engine's next token follows from the KV bytes that it finds, so a
// page that is wrong, late or missing anywhere shows in the answer.
func TestPairInBubble(t *testing.T) {
	for name, c := range map[string]struct {
		p, d Config
		old  int // requests that are preempted at least
	}{
		"plain":           {},
		"tp 4 to 2":       {p: Config{TP: 4}, d: Config{TP: 2}},
		"tp 1 to 8":       {d: Config{TP: 8}},
		"small chunks":    {p: Config{Chunk: 16, PageSize: 4}, d: Config{PageSize: 4}},
		"prefix caches":   {p: Config{PrefixCache: true, TP: 2}, d: Config{PrefixCache: true}},
		"small P":         {p: Config{KVPages: 40, Chunk: 32}},
		"preemption":      {d: Config{KVPages: 50, ReservedTokens: 1}, old: 1},
		"preemption, all": {p: Config{PrefixCache: true, Chunk: 48, TP: 2}, d: Config{KVPages: 56, ReservedTokens: 1, PrefixCache: true, TP: 4, MaxRunning: 9}, old: 1},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, c.p, c.d, func(t *testing.T, city *city, d *Worker) {
				for round := range 2 {
					var jobs []*Job
					for i := range 18 {
						jobs = append(jobs, city.legs(t, d, "good:1", text(i/3, 20+17*(i%9)), 40+i))
						time.Sleep(time.Duration(i%5) * 3 * time.Millisecond)
					}
					for _, j := range jobs {
						got := hear(t, j)
						if want := simAnswer(j.Prompt, j.MaxTokens); !reflect.DeepEqual(got.tokens(), want) || got.end.Reason != EndLength {
							t.Errorf("job %s: %+v %v\n got %v\nwant %v", j.RID, got.end, got.end.Err, got.tokens(), want)
						}
						if c.p.PrefixCache && round > 0 && c.old == 0 && got.cached == 0 {
							t.Errorf("job %s: nothing from P's prefix cache", j.RID)
						}
					}
					settled(t, city.p)
					settled(t, d)
				}
				if n := value(t, d.metrics, "preemptions_total"); n < float64(c.old) {
					t.Errorf("%v preemptions, want at least %d", n, c.old)
				}
			})
		})
	}
}

// Eight prompts that compute for ten seconds each keep a prefill busy. Every
// health check passes all the while, within its time, and leaves nothing behind.
func TestF37BusyIsHealthy(t *testing.T) {
	inBubble(t, Config{SimPrefillRate: 100}, Config{}, func(t *testing.T, c *city, d *Worker) {
		var fronts []http.Handler
		for _, w := range []*Worker{c.p, d} {
			front, err := newFront(w)
			if err != nil {
				t.Fatal(err)
			}
			fronts = append(fronts, front)
		}
		var jobs []*Job
		for i := range 8 {
			jobs = append(jobs, c.legs(t, d, "good:1", text(i, 1000), 5))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		busy, goroutines := 0, runtime.NumGoroutine()
		for range 100 {
			for i, front := range fronts {
				for _, path := range []string{"/livez", "/readyz", "/health", "/health_generate"} {
					began, answer := time.Now(), httptest.NewRecorder()
					front.ServeHTTP(answer, httptest.NewRequest("GET", path, nil))
					if took := time.Since(began); answer.Code != 200 || took > 2*time.Second {
						t.Fatalf("worker %d: %s says %d %s after %v", i, path, answer.Code, answer.Body, took)
					}
				}
			}
			if rows, err := c.p.Requests(t.Context()); err != nil || len(rows) > 8 {
				t.Fatalf("prefill has %d requests, %v", len(rows), err)
			} else if len(rows) > 0 {
				busy++
			}
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if busy < 75 || runtime.NumGoroutine() > goroutines {
			t.Errorf("busy for %d s, %d goroutines before the probes and %d after", busy, goroutines, runtime.NumGoroutine())
		}
		for _, j := range jobs {
			if got := hear(t, j); !reflect.DeepEqual(got.tokens(), simAnswer(j.Prompt, 5)) {
				t.Errorf("job %s: %+v %v", j.RID, got.end, got.end.Err)
			}
		}
		settled(t, c.p)
		settled(t, d)
	})
}

// sparks is an engine in which rows fail that are picked out.
type sparks struct {
	engine.Engine
	pick func(r *engine.Row) bool
}

func (s *sparks) Run(b *engine.Batch) error {
	var bad []int
	for i := range b.Rows {
		if s.pick(&b.Rows[i]) {
			bad = append(bad, i)
			b.Rows[i].Tokens = append([]int32{-1}, b.Rows[i].Tokens[1:]...) // which no engine computes
		}
	}
	err := s.Engine.Run(b)
	for _, i := range bad {
		if b.Rows[i].Err == nil {
			panic("the engine took a negative token")
		}
	}
	return err
}

// A row that the engine refuses ends its own request by name, on both legs;
// those beside it in the batch get all their tokens. At P it fails in the middle
// of a prompt, at D in the middle of an answer.
func TestOneRowFails(t *testing.T) {
	for _, at := range []Role{Prefill, Decode} {
		t.Run(string(at), func(t *testing.T) {
			inBubble(t, Config{Chunk: 256, PrefixCache: true}, Config{PrefixCache: true}, func(t *testing.T, c *city, d *Worker) {
				w, worst := d, text(5, 90)
				if at == Prefill {
					w = c.p
				}
				w.loops[0].engine.eng = &sparks{w.engines[0], func(r *engine.Row) bool {
					if at == Prefill {
						return r.Start == 0 && r.Tokens[0] == worst[0] && r.Tokens[1] == worst[1]
					}
					return r.Index == 7 && r.Start == len(worst)+6
				}}
				for range 2 { // nothing of the first bad prompt is in a prefix cache
					jobs := []*Job{}
					for i := range 8 {
						prompt := text(i, 60+i)
						if i == 5 {
							prompt = worst
						}
						jobs = append(jobs, c.legs(t, d, "good:1", prompt, 20))
					}
					for i, j := range jobs {
						got, want := hear(t, j), simAnswer(j.Prompt, 20)
						switch {
						case i == 5 && (got.end.Reason != EndFailed || got.end.Err.Code != api.Internal || !strings.Contains(got.end.Err.Message, "token -1") ||
							len(got.outs) != map[Role]int{Prefill: 0, Decode: 7}[at] || !reflect.DeepEqual(got.tokens(), want[:len(got.outs):len(got.outs)]) && len(got.outs) > 0):
							t.Errorf("the bad one: %+v %v, tokens %v", got.end, got.end.Err, got.tokens())
						case i != 5 && (got.end.Reason != EndLength || !reflect.DeepEqual(got.tokens(), want)):
							t.Errorf("job %d: %+v %v, tokens %v, want %v", i, got.end, got.end.Err, got.tokens(), want)
						}
					}
					settled(t, c.p)
					settled(t, d)
				}
			})
		})
	}
}

// Links that die in the middle of a transfer fail that request by name, on both
// sides; the next one finds new links.
func TestLinkLoss(t *testing.T) {
	inBubble(t, Config{SimPrefillRate: 1000}, Config{}, func(t *testing.T, c *city, d *Worker) {
		long := c.legs(t, d, "good:1", text(3, 3000), 5) // computes for 3 s
		time.Sleep(time.Second)
		c.ln.cut()
		got := hear(t, long)
		if got.end.Reason != EndFailed || got.end.Err.Code != api.KVTransferFailed {
			t.Errorf("end %+v %v", got.end, got.end.Err)
		}
		next := hear(t, c.legs(t, d, "good:1", text(4, 200), 5))
		if want := simAnswer(text(4, 200), 5); !reflect.DeepEqual(next.tokens(), want) {
			t.Errorf("after the loss: %v %v, want %v", next.tokens(), next.end.Err, want)
		}
		settled(t, c.p)
		settled(t, d)
	})
}

// Links that die as soon as they are up are a failure like any other: they are
// tried again within the budget, and then the request ends by name. Nothing is
// ever sent to a link whose end came before the loop knew of its beginning.
func TestBriefLinks(t *testing.T) {
	inBubble(t, Config{}, Config{ParallelInfoAttempts: 4}, func(t *testing.T, c *city, d *Worker) {
		c.ln.brief = true
		begin := time.Now()
		got := hear(t, c.legs(t, d, "good:1", text(4, 200), 5))
		if got.end.Reason != EndFailed || got.end.Err.HTTPStatus() != 502 {
			t.Errorf("end %+v %v", got.end, got.end.Err)
		}
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
		if n := len(d.loops[0].decode.dialling); n != 0 {
			t.Errorf("%d dials are remembered", n)
		}
		c.ln.brief = false
		next := hear(t, c.legs(t, d, "good:1", text(4, 200), 5))
		if want := simAnswer(text(4, 200), 5); !reflect.DeepEqual(next.tokens(), want) {
			t.Errorf("after the fault: %v %v, want %v", next.tokens(), next.end.Err, want)
		}
	})
}

// A link can end before the loop has heard that it is up, because both come to
// its inbox by ways of their own. The end is kept until then.
func TestEndBeforeBeginning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newSimWorker(t, Config{Role: Decode})
		defer d.release()
		if err := d.wireReceivers(&town{asked: map[string]int{}}, nil); err != nil {
			t.Fatal(err)
		}
		l := d.loops[0]
		submit(t, d, Job{RID: "r", Prompt: text(1, 20), MaxTokens: 5, Room: 1, DPRank: 0, Addr: "good:1"})
		// turn gives the loop a message and takes what it asks of the peer network.
		turn := func(ms ...any) (asked []sched.PeerAction) {
			for _, m := range append(l.in.take(), ms...) {
				l.take(0, m)
			}
			l.step(0, &l.tick)
			l.handOut(0)
			for _, m := range l.peers().in.take() {
				asked = append(asked, m.(*ask).act)
			}
			return asked
		}
		done := func(a []sched.PeerAction, kind sched.PeerKind, d sched.PeerDone) *sched.PeerDone {
			t.Helper()
			if len(a) == 0 || a[0].Kind != kind {
				t.Fatalf("asked for %v, want %v", a, kind)
			}
			d.Kind, d.ID, d.Gen, d.Addr, d.Link = kind, a[0].ID, a[0].Gen, a[0].Addr, a[0].Link
			return &d
		}
		a := turn()
		a = turn(done(a, sched.FetchInfo, sched.PeerDone{Info: &sched.ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1}}))
		a = turn(done(a, sched.LookupRank, sched.PeerDone{Target: "h:1"}))
		up := done(a, sched.DialLink, sched.PeerDone{Welcome: sched.Welcome{TP: 1, DP: 1}})
		turn(&sched.LinkEnded{Link: up.Link, Cause: "cut"})
		turn(up)
		if rows := l.decode.core.PeerTable(); len(rows) != 1 || rows[0].Links != 0 || len(l.decode.dialling) != 0 {
			t.Errorf("the core believes in a dead link: %+v, %v", rows, l.decode.dialling)
		}
		l.decode.receiver.Close()
	})
}

func (l *loop) peers() *peernet { return l.decode.peers }
