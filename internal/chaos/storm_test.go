package chaos

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A storm of clients that leave, and a soak in which everything happens to a
// fleet. Both draw from a seed that they print, and end with nothing held anywhere.

// asked is one request of a storm, drawn by a number.
func asked(draw *rand.Rand) call {
	n, max := 5+draw.IntN(600), 5+draw.IntN(300)
	switch draw.IntN(3) {
	case 0:
		return call{"/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": strings.Repeat("x", n)}}, "max_tokens": max, "n": 1 + draw.IntN(2)}}
	case 1:
		return call{"/v1/completions", map[string]any{"prompt": []any{strings.Repeat("y", n), "z"}, "max_tokens": max}}
	}
	return call{"/generate", map[string]any{"input_ids": promptIDs(n, 256, draw.IntN(8)), "sampling_params": map[string]any{"max_new_tokens": max}}}
}

// Shows F-31. Three hundred clients leave at random moments, three times over:
// queued, while their prompt is computed or moved, or in the middle of their
// tokens. Five seconds later nobody holds anything for them, on any process.
func TestCancelStorm(t *testing.T) {
	r := newRig(t)
	sim := []string{"--engine=sim", "--sim-prefill-rate=30000", "--max-running=32"}
	p := []*Proc{r.startPrefill(t, "sim", sim...), r.startPrefill(t, "sim", sim...)}
	d := []*Proc{r.startDecode(t, "sim", sim...), r.startDecode(t, "sim", sim...)}
	router := r.startRouter(t, p, d, "--policy=round_robin")
	all := []*Proc{p[0], p[1], d[0], d[1], router}
	heals(t, "at first", router.HTTP, 8)
	use := idleUseOf(t, all...)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round := range 3 {
		draw := rand.New(rand.NewPCG(seed, uint64(round)))
		var clients sync.WaitGroup
		for i := range 300 {
			c, whole, stay := asked(draw), draw.IntN(4) == 0, time.Duration(draw.IntN(1500))*time.Millisecond
			clients.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), stay)
				defer cancel()
				if whole {
					Post(ctx, router.HTTP+c.path, c.body)
					return
				}
				c.stream(ctx, router.HTTP, fmt.Sprint("storm-", i), nil)
			})
		}
		clients.Wait()
		use.regained(t, all...)
	}
	heals(t, "after the storm", router.HTTP, 4)
	codes := requestsByCode(t, router)
	if codes["client_gone"] < 200 {
		t.Errorf("only %v of 900 clients left before the end: no storm", codes["client_gone"])
	}
	for code, n := range codes {
		if code != "ok" && code != "client_gone" && n > 0 {
			t.Errorf("%v requests ended with %s", n, code)
		}
	}
}

// soak is a fleet of two and two with fixed addresses. The second of each pool
// is only ever stopped and continued, so that its use of memory can be followed.
type soak struct {
	rig    *Rig
	worker [4]*Proc // prefills, decodes
	router *Proc
	draw   *rand.Rand
	want   []*Answer // of body(i), undisturbed

	mu    sync.Mutex
	tally map[string]int // what happened, and how often
}

func (s *soak) count(what string) {
	s.mu.Lock()
	s.tally[what]++
	s.mu.Unlock()
}

func (s *soak) body(i int) map[string]any {
	return map[string]any{"input_ids": promptIDs(20+90*i, 256, i), "sampling_params": map[string]any{"max_new_tokens": 10 + 25*i, "temperature": 0}}
}

// A pool that is soon touched all over, so that memory which grows is no KV.
var soakFlags = []string{"--engine=sim", "--kv-pages=512", "--sim-prefill-rate=5000", "--kv-timeout=2s", "--drain=1s", "--request-timeout=30s"}

func startSoak(t *testing.T, seed uint64) *soak {
	s := &soak{rig: newRig(t), draw: rand.New(rand.NewPCG(seed, 0)), tally: map[string]int{}}
	for i := range s.worker {
		args := []string{"prefill", "sim", "--listen=127.0.0.1:" + fixedPort(t), "--bootstrap-listen=127.0.0.1:" + fixedPort(t)}
		if i >= 2 {
			args = append([]string{"decode", "sim", "--listen=127.0.0.1:" + fixedPort(t)}, faultFlags.decode...)
		}
		s.worker[i] = s.rig.start(t, append(args, soakFlags...)...)
	}
	s.router = s.rig.startRouter(t, s.worker[:2], s.worker[2:], "--idle-timeout=5s", "--migrations=3")
	for i := range 8 {
		a, err := Generate(within(t, requestBound), s.router.HTTP, s.body(i))
		if err != nil || a.Status != 200 {
			t.Fatalf("undisturbed: %v %+v", err, a)
		}
		s.want = append(s.want, a)
	}
	return s
}

// client asks until ctx ends, and leaves every fifth request. Whatever happens
// its answers are right, or errors that say what it was.
func (s *soak) client(ctx context.Context, t *testing.T, draw *rand.Rand) {
	for ctx.Err() == nil {
		i, leaves := draw.IntN(len(s.want)), draw.IntN(5) == 0
		if leaves {
			gone, cancel := context.WithTimeout(context.Background(), time.Duration(draw.IntN(1000))*time.Millisecond)
			Stream(gone, s.router.HTTP, s.body(i), nil)
			cancel()
			s.count("left")
			continue
		}
		a := endsIn(t, 40*time.Second, func(ctx context.Context) (*Answer, error) { return Stream(ctx, s.router.HTTP, s.body(i), nil) })
		trueOrError(t, a, s.want[i])
		if a.Error != nil {
			s.count("request: " + a.Error.Code)
			<-time.After(50 * time.Millisecond)
		} else {
			s.count("request: ok")
		}
	}
}

// strike brings one fault about and takes it away again.
func (s *soak) strike(t *testing.T) {
	i, last := s.draw.IntN(4), time.Duration(200+s.draw.IntN(3000))*time.Millisecond
	p, kind := s.worker[i], s.draw.IntN(3)
	if i%2 == 1 {
		kind = 0
	}
	switch kind {
	case 0:
		p.Stop()
		<-time.After(last)
		p.Continue()
	case 1:
		p.Kill()
		<-time.After(last)
	case 2:
		p.Terminate()
		select {
		case <-p.Done():
		case <-time.After(10 * time.Second):
			t.Errorf("%v has not ended 10 s after SIGTERM", p.Args)
			p.Kill()
		}
	}
	if kind > 0 {
		s.worker[i] = s.rig.start(t, p.Args[:len(p.Args)-1]...)
	}
	s.count(fmt.Sprintf("%s: %s", p.Role, []string{"stopped", "killed", "terminated"}[kind]))
	<-time.After(time.Duration(s.draw.IntN(2000)) * time.Millisecond)
}

// Everything happens to a fleet under load: workers are stopped and continued,
// killed, terminated and started again, and clients leave. In the end nothing is
// held, requests work, and no process that lived through it has grown.
// METRONOME_SOAK says for how long (6s); `make long` runs it for ten minutes.
func TestSoak(t *testing.T) {
	length := 6 * time.Second
	if v := os.Getenv("METRONOME_SOAK"); v != "" {
		var err error
		if length, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d, %v", seed, length)
	s := startSoak(t, seed)
	lasting := []*Proc{s.worker[1], s.worker[3], s.router}
	ctx, stop := context.WithTimeout(context.Background(), length)
	defer stop()
	use := idleUseOf(t, lasting...)
	var load sync.WaitGroup
	for i := range 8 {
		draw := rand.New(rand.NewPCG(seed, uint64(i+1)))
		load.Go(func() { s.client(ctx, t, draw) })
	}
	// Memory is compared with what it was after a tenth: arenas, caches and pools are warm then.
	warm, begin := map[*Proc]float64(nil), time.Now()
	for ctx.Err() == nil {
		s.strike(t)
		if warm == nil && time.Since(begin) > length/10 {
			warm = memories(t, lasting)
		}
	}
	load.Wait()
	heals(t, "at the end", s.router.HTTP, 4)
	use.regained(t, append(s.worker[:], s.router)...)
	for p, now := range memories(t, lasting) {
		t.Logf("%s: %.1f MiB after a tenth, %.1f MiB at the end", p.Role, warm[p]/(1<<20), now/(1<<20))
		if now > 1.25*warm[p]+16<<20 {
			t.Errorf("%s pid %d has grown from %v to %v bytes", p.Role, p.PID(), warm[p], now)
		}
	}
	s.report(t)
}

// memories is the resident memory of processes, in bytes.
func memories(t *testing.T, procs []*Proc) map[*Proc]float64 {
	t.Helper()
	bytes := map[*Proc]float64{}
	for _, p := range procs {
		m, err := Metrics(within(t, 5*time.Second), p.HTTP)
		if err != nil {
			t.Fatal(err)
		}
		bytes[p] = m["process_resident_memory_bytes"]
	}
	return bytes
}

// report says in one line what happened.
func (s *soak) report(t *testing.T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(s.tally)) {
		parts = append(parts, fmt.Sprintf("%s %d", what, s.tally[what]))
	}
	t.Logf("soak: %s", strings.Join(parts, ", "))
	if s.tally["request: ok"] == 0 {
		t.Error("no request went well")
	}
}
