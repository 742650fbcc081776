package bootstrap

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// rig is one prefill worker with a registrar and a registry that a test can
// start, stop and replace.
type rig struct {
	t    *testing.T
	m    *memNet
	r    *Registrar
	c    *Client
	stop func() // the registry

	mu      sync.Mutex
	arrived []time.Time // of each try
}

const registryAddr = "127.0.0.1:8998"

func newRig(t *testing.T, seed uint64, m *memNet, instance string) *rig {
	g := &rig{t: t, m: m}
	g.c = NewClient(ClientConfig{Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		g.mu.Lock()
		g.arrived = append(g.arrived, time.Now())
		g.mu.Unlock()
		return m.Dial(ctx, network, addr)
	}})
	g.r = NewRegistrar(RegistrarConfig{
		Client: g.c, Addr: registryAddr, Seed: seed,
		Ranks: []Registration{rank(2, 0, 1, 0).of(instance), rank(2, 1, 1, 0).of(instance)},
	})
	return g
}

// run starts the registrar; the returned function ends it and all else.
func (g *rig) run() (end func()) {
	ctx, cancel := context.WithCancel(g.t.Context())
	ended := make(chan struct{})
	go func() { g.r.Run(ctx); close(ended) }()
	return func() {
		cancel()
		<-ended
		g.c.Close()
		if g.stop != nil {
			g.stop()
		}
		g.m.serves.Wait()
	}
}

func (g *rig) registry(s *Server) {
	if g.stop != nil {
		g.stop()
	}
	g.stop = g.m.serve(g.t, s, registryAddr)
}

// wantReady waits until the registrar is (or is not) ready and checks how long that took.
func (g *rig) wantReady(ready bool, within time.Duration) {
	g.t.Helper()
	start := time.Now()
	for {
		synctest.Wait()
		got, cause := g.r.Ready()
		if got == ready {
			return
		}
		if time.Since(start) >= within {
			g.t.Fatalf("ready is %v after %v (%v), want %v", got, within, cause, ready)
		}
		time.Sleep(10 * time.Millisecond) // virtual
	}
}

func (g *rig) wantCause(part string) {
	g.t.Helper()
	if ready, cause := g.r.Ready(); ready || !strings.Contains(cause.Error(), part) || !strings.Contains(cause.Error(), registryAddr) {
		g.t.Errorf("ready is %v with the cause %v, want the registry's address and %q", ready, cause, part)
	}
}

// held runs f while no request touches the table.
func held(s *Server, f func(*Table)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.table)
}

func loopbackServer() *Server { return NewServer(ServerConfig{Bind: registryAddr}) }

// A registry that is missing, hangs, refuses or answers nonsense at first: the
// worker is not ready, says why, keeps trying, and is ready seconds after the
// registry works.
func TestRegistrarKeepsTrying(t *testing.T) {
	for _, c := range []struct {
		name  string
		serve func(net.Conn)
		cause string
	}{
		{"refuses", nil, "refused"},
		{"hangs", hangs, "deadline"},
		{"answers 500", says(answer(500, "no")), "status 500: no"},
		{"answers nonsense", says("\xff\x00"), "malformed"},
		{"closes", func(c net.Conn) { c.Close() }, "rank"},
		{"wants a token", says(answer(401, "Unauthorized")), "status 401"},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(t, 1, newMemNet(), "p1")
			g.m.set(registryAddr, c.serve)
			end := g.run()
			defer end()
			time.Sleep(10 * time.Minute) // virtual; SGLang's has given up after 40 s
			g.wantCause(c.cause)
			if n := g.m.dialed(registryAddr); n < 60 || n > 240 {
				t.Errorf("%s: %d tries in ten minutes, want one every 5 s or so", c.name, n)
			}
			g.registry(loopbackServer())
			g.wantReady(true, 12*time.Second)
		})
	}
}

// One check that fails long after the last good one may have been cut by our
// own standstill: it is the second that makes the worker unready.
func TestRegistrarOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, 1, newMemNet(), "p1")
		g.r.cfg.Check = time.Minute
		s := loopbackServer()
		g.registry(s)
		end := g.run()
		defer end()
		g.wantReady(true, 0)
		dialed := g.m.dialed(registryAddr)
		g.m.set(registryAddr, hangs)
		for g.m.dialed(registryAddr) == dialed {
			time.Sleep(100 * time.Millisecond) // virtual
		}
		time.Sleep(g.r.cfg.Probe + g.r.cfg.Wait/4)
		if ready, cause := g.r.Ready(); !ready {
			t.Errorf("not ready after one failure: %v", cause)
		}
		g.wantReady(false, g.r.cfg.Wait*3/2+g.r.cfg.Probe)
	})
}

func TestRegistrarRegistersAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, 2, newMemNet(), "p1")
		s := loopbackServer()
		g.registry(s)
		end := g.run()
		defer end()
		g.wantReady(true, 0)
		held(s, func(table *Table) { wantReady(t, table, 2, true) })

		// It restarted empty.
		s = loopbackServer()
		g.registry(s)
		time.Sleep(6 * time.Second) // virtual
		g.wantReady(true, time.Second)
		held(s, func(table *Table) { wantReady(t, table, 2, true) })

		// It restarted and a former instance was there first: ours takes its place.
		s = loopbackServer()
		old := rank(1, 0, 1, 0).of("p0")
		held(s, func(table *Table) { must(t, table, old) })
		g.registry(s)
		time.Sleep(6 * time.Second)
		g.wantReady(true, time.Second)
		held(s, func(table *Table) {
			if info, _, _ := table.Info(); info.Instance != "p1" || info.TP != 2 {
				t.Errorf("the registry holds %+v, want our instance p1", info)
			}
		})

		// A newer instance takes our place: we are dead there and say so, for good.
		held(s, func(table *Table) { must(t, table, rank(1, 0, 1, 0).of("p2")) })
		time.Sleep(time.Minute)
		g.wantCause("instance p1 was replaced here by instance p2")
		held(s, func(table *Table) {
			if info, _, ready := table.Info(); info.Instance != "p2" || !ready {
				t.Errorf("the registry holds %+v, want the newer instance p2", info)
			}
		})
	})
}

// A registry that hangs for a while still knows us: the worker stays ready
// through a short spell, says so in a long one, and is ready again after it
// without a new registration. Shows F-38.
func TestRegistrarOutlivesAHungRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, 3, newMemNet(), "p1")
		s := loopbackServer()
		g.registry(s)
		end := g.run()
		defer end()
		g.wantReady(true, 0)
		listening := g.m.peer(registryAddr)
		g.m.set(registryAddr, hangs)
		time.Sleep(8 * time.Second) // virtual
		g.wantReady(true, 0)
		time.Sleep(20 * time.Second)
		g.wantCause("deadline")
		g.m.set(registryAddr, listening)
		g.wantReady(true, 10*time.Second)
	})
}

// A registry of SGLang's own tells no instance and keeps the first sizes: it is
// asked for our address instead.
func TestRegistrarAtAForeignRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, 4, newMemNet(), "")
		s := loopbackServer() // without an instance id the table keeps to SGLang's rules
		g.registry(s)
		end := g.run()
		defer end()
		g.wantReady(true, 0)
		other := rank(2, 0, 1, 0)
		other.Port = 9
		held(s, func(table *Table) { must(t, table, other) }) // somebody wrote over our first rank
		time.Sleep(6 * time.Second)
		g.wantReady(true, time.Second)
		held(s, func(table *Table) {
			if _, port, _ := table.Address(Rank{}); port != 7000 {
				t.Errorf("rank 0 is at port %d, want ours again", port)
			}
		})
	})
}

// Twenty workers whose registry stops answering for 15 s and comes back do not
// call in step: no 200 ms hold more than a quarter of them, during it or after,
// and none is lost. Shows F-05.
func TestRegistrarsSpreadOut(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			const workers = 20
			m := newMemNet()
			s := loopbackServer()
			var ends []func()
			var rigs []*rig
			stop := m.serve(t, s, registryAddr)
			for i := range workers {
				// One worker as far as the registry can tell: all of them know it.
				g := newRig(t, 100*seed+uint64(i)+1, m, "p1")
				rigs = append(rigs, g)
				ends = append(ends, g.run())
			}
			for _, g := range rigs {
				g.wantReady(true, 0)
			}
			time.Sleep(30 * time.Second) // virtual: they have drifted apart
			listening := m.peer(registryAddr)
			began := time.Now()
			m.set(registryAddr, hangs)
			time.Sleep(15 * time.Second)
			m.set(registryAddr, listening)
			time.Sleep(15 * time.Second)
			buckets := map[int]int{}
			for _, g := range rigs {
				g.wantReady(true, 0)
				g.mu.Lock()
				for _, at := range g.arrived {
					if d := at.Sub(began); d >= 0 {
						buckets[int(d/(200*time.Millisecond))]++
					}
				}
				g.mu.Unlock()
			}
			worst := 0
			for _, n := range buckets {
				worst = max(worst, n)
			}
			if worst > workers/4 {
				t.Errorf("seed %d: %d of %d workers called within 200 ms, want at most %d", seed, worst, workers, workers/4)
			}
			for _, end := range ends {
				end()
			}
			stop()
			m.serves.Wait()
		})
	}
}

func TestBackoffGrowsToItsBound(t *testing.T) {
	r := NewRegistrar(RegistrarConfig{Ranks: []Registration{rank(1, 0, 1, 0)}})
	var got []time.Duration
	for i := 1; i <= 6; i++ {
		got = append(got, r.backoff(i))
	}
	want := []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 5 * time.Second, 5 * time.Second, 5 * time.Second}
	if !slices.Equal(got, want) || r.backoff(1_000_000) != r.cfg.WaitMax {
		t.Errorf("mean waits %v, want %v and then %v for ever", got, want, r.cfg.WaitMax)
	}
}
