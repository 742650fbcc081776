package chaos

import (
	"context"
	"fmt"
	"slices"
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

const (
	longPrompt   = 2000
	requestBound = 15 * time.Second       // within which every request must end, whatever happens
	idleWait     = 5 * time.Second        // after the last request, until everything is given back
	beatLimit    = 500 * time.Millisecond // a gap of the bystander: five processes and the test share two cores; TestBeat measures alone
)

// faultFleet is two prefill and two decode workers behind a router, with a
// bystander: a long stream over the pair that no fault touches.
type faultFleet struct {
	rig       *Rig
	prefill   [2]*Proc
	decode    [2]*Proc
	router    *Proc
	bystander *stream
	want      *Answer // of the long prompt, undisturbed
	baseline  map[*Proc]usageOfProc
}

type usageOfProc struct{ goroutines, descriptors float64 }

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
	f.baseline = map[*Proc]usageOfProc{}
	<-time.After(300 * time.Millisecond)
	for _, p := range f.all() {
		m, err := Metrics(within(t, 2*time.Second), p.HTTP)
		if err != nil {
			t.Fatal(err)
		}
		f.baseline[p] = usageOfProc{m["go_goroutines"], m["process_open_fds"]}
	}
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
	ctx, cancel := context.WithTimeout(context.Background(), requestBound)
	defer cancel()
	start := time.Now()
	a, err := Stream(ctx, f.router.HTTP, longBody(), each)
	if err != nil && ctx.Err() != nil {
		t.Errorf("a request had not ended after %v", time.Since(start))
	} else if err != nil && a == nil {
		t.Errorf("the router broke the connection: %v", err)
	}
	if a == nil {
		return &Answer{Error: &APIError{Code: "none"}}
	}
	f.judge(t, a)
	return a
}

// judge: true or error. A 200 with a normal finish has exactly the right
// tokens; anything else names its cause.
func (f *faultFleet) judge(t *testing.T, a *Answer) {
	t.Helper()
	switch {
	case f.want == nil:
	case a.Error == nil && a.Done:
		if d := differ(a, f.want); d != "" {
			t.Errorf("wrong answer: %s", d)
		}
	case a.Error == nil || a.Error.Code == "" || a.Error.Code == "internal":
		t.Errorf("status %d, done %v, error %v: neither an answer nor a named cause", a.Status, a.Done, a.Error)
	default:
		if n := min(len(a.IDs), len(f.want.IDs)); !slices.Equal(a.IDs[:n], f.want.IDs[:n]) {
			t.Errorf("wrong tokens before the error: %v", a.IDs)
		}
	}
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
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { f.ask(t, each) })
	}
	wg.Wait()
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
		f.checkBystander(t, ph.name, from)
		pool[0] = ft.heal(t, f, pool[0])
		f.heals(t, ph.name)
	}
	f.checkIdle(t)
}

// checkBystander: the stream over the untouched pair keeps its beat and tokens.
func (f *faultFleet) checkBystander(t *testing.T, when string, from time.Time) {
	t.Helper()
	<-time.After(time.Until(from.Add(500 * time.Millisecond))) // enough tokens to judge by
	g := f.bystander.gaps(from, time.Now())
	if len(g) < 10 {
		t.Fatalf("%s: the bystander had %d tokens in %v", when, len(g), time.Since(from))
	}
	if worst := g[len(g)-1]; worst > beatLimit {
		t.Errorf("%s: the bystander waited %v for a token", when, worst)
	}
}

// heals: within 5 s of the fault's end, requests over every pair work again,
// and no other process was restarted.
func (f *faultFleet) heals(t *testing.T, when string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; {
		var failed error
		for range 4 { // round robin: each pair once or more
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			a, err := Generate(ctx, f.router.HTTP, map[string]any{"text": "heal", "sampling_params": map[string]any{"max_new_tokens": 2}})
			cancel()
			if err != nil {
				failed = err
			} else if a.Status != 200 {
				failed = fmt.Errorf("status %d: %v", a.Status, a.Error)
			}
		}
		if failed == nil {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s: not healed after 5 s: %v", when, failed)
			return
		}
		<-time.After(50 * time.Millisecond)
	}
}

// checkIdle ends the bystander and waits until every process that lived
// through the fault uses what it used after the warm-up.
func (f *faultFleet) checkIdle(t *testing.T) {
	t.Helper()
	f.bystander.stop()
	if f.bystander.answer != nil && len(f.bystander.answer.IDs) > 0 {
		f.checkReference(t)
	}
	var why string
	for end := time.Now().Add(idleWait); time.Now().Before(end); {
		if why = f.busy(t); why == "" {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
	t.Errorf("%v after the last request: %s", idleWait, why)
}

// checkReference compares the bystander's tokens with an undisturbed run.
func (f *faultFleet) checkReference(t *testing.T) {
	t.Helper()
	n := min(len(f.bystander.answer.IDs), 400)
	a, err := f.direct(within(t, requestBound), f.prefill[1], f.decode[1], n)
	if err != nil || !slices.Equal(a.IDs, f.bystander.answer.IDs[:n]) {
		t.Errorf("the bystander's tokens are not those of an undisturbed run: %v", err)
	}
}

// slack is what pooled idle HTTP connections between router and workers may
// differ by: each is a descriptor and two goroutines.
const slack = 8

func (f *faultFleet) busy(t *testing.T) string {
	for _, p := range f.all() {
		m, err := Metrics(within(t, 2*time.Second), p.HTTP)
		if err != nil {
			return err.Error()
		}
		for name, v := range m {
			held := strings.HasPrefix(name, `metronome_kv_pages{`) && (strings.Contains(name, `"owned"`) || strings.Contains(name, `"quarantined"`))
			if v != 0 && (held || strings.HasPrefix(name, "metronome_num_")) {
				return fmt.Sprintf("%s pid %d: %s is %v", p.Role, p.PID(), name, v)
			}
		}
		base, ok := f.baseline[p]
		if !ok {
			continue // restarted: it has no time before the fault
		}
		if g := m["go_goroutines"]; g > base.goroutines+2*slack {
			return fmt.Sprintf("%s pid %d: %v goroutines, %v after the warm-up", p.Role, p.PID(), g, base.goroutines)
		}
		if fd := m["process_open_fds"]; fd > base.descriptors+slack {
			return fmt.Sprintf("%s pid %d: %v descriptors, %v after the warm-up", p.Role, p.PID(), fd, base.descriptors)
		}
	}
	return ""
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
		f.checkBystander(t, fmt.Sprintf("left after %v", after), from)
	}
	f.checkIdle(t)
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
