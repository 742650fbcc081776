package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
)

// These tests run a decode and a prefill worker in one bubble of virtual time:
// real cores, loops, transfer and sim engines, over connections in memory.

// pipes is a listener in memory.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	shut  chan struct{}

	mu    sync.Mutex
	open  []net.Conn
	brief bool // connections end after the first write of the listener's side
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

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), shut: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.shut:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.shut) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (p *pipes) dial(ctx context.Context, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	p.mu.Lock()
	p.open = append(p.open, theirs)
	if p.brief {
		theirs = brief{theirs}
	}
	p.mu.Unlock()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.shut:
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
	return "127.0.0.1:1", c.ask(ctx, addr)
}

func (c *city) Health(ctx context.Context, addr string) (string, error) {
	return c.p.instance, c.ask(ctx, addr)
}

// newSimWorker makes a worker of one rank without listeners.
func newSimWorker(t *testing.T, cfg Config) *Worker {
	cfg.Engine, cfg.Context = "sim", 4096
	if cfg.KVPages == 0 {
		cfg.KVPages = 2048
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
		ln, c := newPipes(), &city{town{asked: map[string]int{}}, p, nil}
		c.ln = ln
		if err := errors.Join(p.wireSenders(), d.wireReceivers(c, ln.dial)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var g sync.WaitGroup
		p.startLoops(ctx, &g)
		d.startLoops(ctx, &g)
		g.Go(func() { p.loops[0].prefill.sender.Serve(ctx, ln, 0) })
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
// the middle of it is served at once. Each of the others ends by name.
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
		for i := range 1000 {
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
		if n := value(t, d.metrics, `parallel_info_fetch_total{result="failed"}`); n != 3000 {
			t.Errorf("%v failed fetches, want 3000", n)
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
