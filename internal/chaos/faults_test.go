package chaos

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// faultFlags make a fleet whose every wait is short, so that a fault's whole
// course fits into seconds. A prompt of longPrompt tokens computes for a second.
var faultFlags = struct{ prefill, decode, both []string }{
	prefill: []string{"--bootstrap-timeout=2s"},
	decode: []string{"--on-mismatch=reject", "--parallel-info-timeout=1s", "--parallel-info-attempts=2", "--heartbeat-interval=500ms",
		"--resolve-timeout=4s"},
	both: []string{"--engine=sim", "--sim-prefill-rate=2000", "--kv-timeout=2s", "--request-timeout=30s", "--drain=1s",
		"--prefix-cache=false"},
}

const longPrompt = 2000

// faultFleet is two prefill and two decode workers behind a router, with a
// bystander: a long stream over the pair that no fault touches.
type faultFleet struct {
	rig       *Rig
	prefill   [2]*Proc
	decode    [2]*Proc
	router    *Proc
	bystander *stream
	want      *Answer // of the long prompt, undisturbed
	idle      idleUse
}

func startFaultFleet(t *testing.T) *faultFleet {
	t.Helper()
	f := &faultFleet{rig: newRig(t)}
	for i := range f.prefill {
		f.prefill[i] = f.rig.start(t, f.args("prefill", "127.0.0.1:"+fixedPort(t), "127.0.0.1:"+fixedPort(t))...)
		f.decode[i] = f.rig.start(t, f.args("decode", "127.0.0.1:"+fixedPort(t), "")...)
	}
	f.router = f.rig.startRouter(t, f.prefill[:], f.decode[:], "--policy=round_robin", "--idle-timeout=3s")
	f.warmUp(t)
	f.want = f.ask(t, nil)
	if f.want.Status != 200 || len(f.want.IDs) != 24 {
		t.Fatalf("undisturbed: %+v", f.want)
	}
	f.bystander = f.startBystander(t)
	return f
}

func longBody() map[string]any {
	return map[string]any{"input_ids": promptIDs(longPrompt, 256, 3), "sampling_params": map[string]any{"max_new_tokens": 24, "temperature": 0, "ignore_eos": true}}
}

// warmUp sends requests until every pair has met, and remembers what the
// processes use when idle.
func (f *faultFleet) warmUp(t *testing.T) {
	t.Helper()
	for range 2 {
		for _, p := range f.prefill {
			for _, d := range f.decode {
				a, err := f.direct(within(t, requestBound), p, d, 4)
				if err != nil || a.Status != 200 {
					t.Fatalf("warm-up: %v %+v", err, a)
				}
			}
		}
		a, err := Generate(within(t, requestBound), f.router.HTTP, map[string]any{"text": "warm", "sampling_params": map[string]any{"max_new_tokens": 2}})
		if err != nil || a.Status != 200 {
			t.Fatalf("warm-up through the router: %v %+v", err, a)
		}
	}
	f.idle = idleUseOf(t, f.all()...)
}

func (f *faultFleet) all() []*Proc {
	return []*Proc{f.prefill[0], f.prefill[1], f.decode[0], f.decode[1], f.router}
}

var rooms struct {
	sync.Mutex
	next int64
}

func room() int64 {
	rooms.Lock()
	defer rooms.Unlock()
	rooms.next++
	return rooms.next<<20 + 7
}

// direct sends both legs of a short request itself, so that it chooses the pair.
func (f *faultFleet) direct(ctx context.Context, p, d *Proc, tokens int) (*Answer, error) {
	body := leg(p.Bootstrap, room(), tokens)
	var legs sync.WaitGroup
	legs.Go(func() { Generate(ctx, p.HTTP, body) })
	a, err := Stream(ctx, d.HTTP, body, nil)
	legs.Wait()
	return a, err
}

// startBystander runs a long stream over the second pair.
func (f *faultFleet) startBystander(t *testing.T) *stream {
	t.Helper()
	body := leg(f.prefill[1].Bootstrap, room(), 60000)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go Generate(ctx, f.prefill[1].HTTP, body) // the prefill leg; ends when D has everything
	return startStream(t, f.decode[1].HTTP, body)
}

// ask sends the long prompt through the router and waits for its end. The
// answer must be right or name its cause.
func (f *faultFleet) ask(t *testing.T, each func(int)) *Answer {
	t.Helper()
	a := endsIn(t, requestBound, func(ctx context.Context) (*Answer, error) { return Stream(ctx, f.router.HTTP, longBody(), each) })
	if f.want != nil {
		trueOrError(t, a, f.want)
	}
	return a
}

// phases of a request, as a client can bring them about. Each calls strike at
// its moment and then lets the requests end.
var phases = []struct {
	name string
	run  func(t *testing.T, f *faultFleet, strike func())
}{
	{"before bootstrap", func(t *testing.T, f *faultFleet, strike func()) {
		strike()
		f.several(t, 4, nil)
	}},
	{"computing", func(t *testing.T, f *faultFleet, strike func()) {
		var once sync.Once
		timer := time.AfterFunc(250*time.Millisecond, func() { once.Do(strike) })
		defer timer.Stop()
		f.several(t, 4, nil)
	}},
	{"mid-transfer", func(t *testing.T, f *faultFleet, strike func()) {
		timer := time.AfterFunc(750*time.Millisecond, strike) // layers go out as they are computed
		defer timer.Stop()
		f.several(t, 4, nil)
	}},
	{"after", func(t *testing.T, f *faultFleet, strike func()) {
		var once sync.Once
		f.several(t, 4, func(n int) {
			if n == 3 {
				once.Do(strike)
			}
		})
	}},
}

// several sends n long prompts side by side and waits for all.
func (f *faultFleet) several(t *testing.T, n int, each func(int)) {
	t.Helper()
	y := tallyOf(t, f.router)
	answers := make([]*Answer, n)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() { answers[i] = f.ask(t, each) })
	}
	wg.Wait()
	y.addsUp(t, answers)
}

// restart starts a worker anew at the addresses of a dead one.
func (f *faultFleet) restart(t *testing.T, dead *Proc, flags ...string) *Proc {
	t.Helper()
	return f.rig.start(t, append(f.args(dead.Role, strings.TrimPrefix(dead.HTTP, "http://"), dead.Bootstrap), flags...)...)
}

func (f *faultFleet) args(role, listen, bootstrap string) []string {
	args := []string{role, "sim", "--listen=" + listen}
	if role == "prefill" {
		args = append(append(args, "--bootstrap-listen="+bootstrap), faultFlags.prefill...)
	} else {
		args = append(args, faultFlags.decode...)
	}
	return append(args, faultFlags.both...)
}

// fault is what happens to a worker; heal makes it whole again and returns the
// process that stands in its place.
type fault struct {
	name   string
	strike func(p *Proc)
	heal   func(t *testing.T, f *faultFleet, p *Proc) *Proc
}

var faults = []fault{
	{"stopped and continued", func(p *Proc) { p.Stop() }, func(t *testing.T, _ *faultFleet, p *Proc) *Proc {
		p.Continue()
		return p
	}},
	{"killed, restarted", func(p *Proc) { p.Kill() }, func(t *testing.T, f *faultFleet, p *Proc) *Proc { return f.restart(t, p) }},
	{"killed, restarted with another topology", func(p *Proc) { p.Kill() }, func(t *testing.T, f *faultFleet, p *Proc) *Proc {
		return f.restart(t, p, "--tp=2")
	}},
}

func TestFaults(t *testing.T) {
	for _, victim := range []string{"prefill", "decode"} {
		for _, ft := range faults {
			t.Run(victim+" "+ft.name, func(t *testing.T) { runFault(t, victim, ft) })
		}
	}
}

// runFault strikes one of two workers in each phase, and asks afterwards that
// everything is as if nothing had happened.
func runFault(t *testing.T, victim string, ft fault) {
	f := startFaultFleet(t)
	pool := &f.prefill
	if victim == "decode" {
		pool = &f.decode
	}
	for _, ph := range phases {
		from := time.Now()
		ph.run(t, f, func() { ft.strike(pool[0]) })
		f.bystander.keepsBeat(t, ph.name, from)
		pool[0] = ft.heal(t, f, pool[0])
		f.heals(t, ph.name)
	}
	f.ends(t)
}

// heals: within 5 s of the fault's end, requests over every pair work again,
// and no other process was restarted.
func (f *faultFleet) heals(t *testing.T, when string) {
	t.Helper()
	heals(t, when, f.router.HTTP, 4) // round robin: each pair once or more
}

// ends ends the bystander, compares its tokens with an undisturbed run, and
// waits until nothing is held.
func (f *faultFleet) ends(t *testing.T) {
	t.Helper()
	f.bystander.stop()
	f.bystander.keepsTokens(t, func(n int) (*Answer, error) {
		return f.direct(within(t, requestBound), f.prefill[1], f.decode[1], n)
	})
	f.idle.regained(t, f.all()...)
}

// The client leaves in each phase: both legs end within a second, and
// everything is given back.
func TestClientLeaves(t *testing.T) {
	f := startFaultFleet(t)
	for _, after := range []time.Duration{0, 100 * time.Millisecond, 500 * time.Millisecond, 900 * time.Millisecond, 1200 * time.Millisecond} {
		from := time.Now()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), after+time.Millisecond)
				defer cancel()
				Stream(ctx, f.router.HTTP, longBody(), nil)
			})
		}
		wg.Wait()
		left := time.Now()
		for {
			running := f.requests(t)
			if running == 0 {
				break
			}
			if time.Since(left) > time.Second {
				t.Errorf("left after %v: %d legs still open a second later", after, running)
				break
			}
			<-time.After(20 * time.Millisecond)
		}
		f.heals(t, fmt.Sprintf("left after %v", after))
		f.bystander.keepsBeat(t, fmt.Sprintf("left after %v", after), from)
	}
	f.ends(t)
}

// requests is the number of open legs on all workers, the bystander's apart.
func (f *faultFleet) requests(t *testing.T) int {
	n := 0
	for _, p := range f.all()[:4] {
		var rows []struct {
			RID string `json:"rid"`
		}
		if err := get(within(t, 2*time.Second), p.HTTP+"/debug/requests", &rows); err != nil {
			t.Fatal(err)
		}
		n += len(rows)
	}
	return n - 1
}
