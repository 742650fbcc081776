package chaos

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// The six checks that hold in every test of real processes, whatever is broken:
//
//	I1 bounded end    every request ends with a whole answer or an error of its own, in its time     endsIn
//	I2 bystander      a stream that the fault does not touch keeps its beat and its tokens           stream.keepsBeat, stream.keepsTokens
//	I3 back to idle   after the last request nothing is held: gauges, pages, sockets, goroutines     idleUse.regained
//	I4 true or error  a normal end has exactly the tokens of an undisturbed run, else it is an error trueOrError
//	I5 heals          when the fault is gone, new requests work, and nothing else was restarted      heals
//	I6 counts add up  usage, finish reasons and metrics are what the clients have got                tally.addsUp
//
// Every test ends with those of them that need no knowledge of it: Rig.endsWell.
// Of I1, I4 and I6 that is what can be said of answers alone, see book.

const (
	requestBound = 15 * time.Second       // within which every request must end, whatever happens
	idleWait     = 5 * time.Second        // after the last request, until everything is given back
	healWait     = 5 * time.Second        // after the end of a fault, until requests work again
	beatLimit    = 500 * time.Millisecond // a gap of the bystander: five processes and the test share two cores; TestBeat measures alone
)

// endsIn (I1) runs one request, which must end in its time. The answer is never
// nil: a broken connection counts as one without a cause.
func endsIn(t *testing.T, limit time.Duration, run func(ctx context.Context) (*Answer, error)) *Answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	start := time.Now()
	a, err := run(ctx)
	if err != nil && ctx.Err() != nil {
		t.Errorf("a request had not ended after %v", time.Since(start))
	} else if err != nil && a == nil {
		t.Errorf("the connection broke: %v", err)
	}
	if a == nil {
		a = &Answer{Error: &APIError{Code: "none"}}
	}
	return a
}

// keepsBeat (I2): since from, no token of the stream was later than the limit.
func (s *stream) keepsBeat(t *testing.T, when string, from time.Time) {
	t.Helper()
	<-time.After(time.Until(from.Add(500 * time.Millisecond))) // enough tokens to judge by
	g := s.gaps(from, time.Now())
	if len(g) < 10 {
		t.Fatalf("%s: the bystander had %d tokens in %v", when, len(g), time.Since(from))
	}
	if worst := g[len(g)-1]; worst > beatLimit {
		t.Errorf("%s: the bystander waited %v for a token", when, worst)
	}
}

// keepsTokens (I2): a stream that was stopped had the tokens of an undisturbed
// run, which want gives for so many.
func (s *stream) keepsTokens(t *testing.T, want func(n int) (*Answer, error)) {
	t.Helper()
	if s.answer == nil || len(s.answer.IDs) == 0 {
		t.Error("the bystander had no token")
		return
	}
	n := min(len(s.answer.IDs), 400)
	if a, err := want(n); err != nil || !slices.Equal(a.IDs, s.answer.IDs[:n]) {
		t.Errorf("the bystander's tokens are not those of an undisturbed run: %v", err)
	}
}

// idleUse (I3) is what processes use when they have nothing to do.
type idleUse map[*Proc]usageOfProc

type usageOfProc struct{ goroutines, descriptors float64 }

// slack is what pooled idle HTTP connections between router and workers may
// differ by: each is a descriptor and two goroutines.
const slack = 8

// idleUseOf measures after a warm-up, in which every pair has met.
func idleUseOf(t *testing.T, procs ...*Proc) idleUse {
	t.Helper()
	use := idleUse{}
	<-time.After(300 * time.Millisecond)
	for _, p := range procs {
		m, err := Metrics(within(t, 2*time.Second), p.HTTP)
		if err != nil {
			t.Fatal(err)
		}
		use[p] = usageOfProc{m["go_goroutines"], m["process_open_fds"]}
	}
	return use
}

// regained waits until every process holds nothing and, if it lived through the
// fault, uses what it used before.
func (use idleUse) regained(t *testing.T, procs ...*Proc) {
	t.Helper()
	var why string
	for end := time.Now().Add(idleWait); time.Now().Before(end); {
		why = ""
		for _, p := range procs {
			if why = use.busy(t, p); why != "" {
				break
			}
		}
		if why == "" {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
	t.Errorf("%v after the last request: %s", idleWait, why)
}

// busy says what a process still holds, or "".
func (use idleUse) busy(t *testing.T, p *Proc) string {
	m, why := part{p.HTTP, Client}.held()
	if why != "" {
		return fmt.Sprintf("%s pid %d: %s", p.Role, p.PID(), why)
	}
	base, ok := use[p]
	if !ok {
		return "" // restarted: it has no time before the fault
	}
	if g := m["go_goroutines"]; g > base.goroutines+2*slack {
		return fmt.Sprintf("%s pid %d: %v goroutines, %v after the warm-up", p.Role, p.PID(), g, base.goroutines)
	}
	if fd := m["process_open_fds"]; fd > base.descriptors+slack {
		return fmt.Sprintf("%s pid %d: %v descriptors, %v after the warm-up", p.Role, p.PID(), fd, base.descriptors)
	}
	return ""
}

// held gives the metrics of a part, and what of requests it still holds, or "".
func (p part) held() (m map[string]float64, why string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	m, err := MetricsWith(ctx, p.client, p.base)
	if err != nil {
		return nil, err.Error()
	}
	for name, v := range m {
		pages := strings.HasPrefix(name, `metronome_kv_pages{`) && (strings.Contains(name, `"owned"`) || strings.Contains(name, `"quarantined"`))
		if v != 0 && (pages || strings.HasPrefix(name, "metronome_num_")) {
			return m, fmt.Sprintf("%s is %v", name, v)
		}
	}
	return m, ""
}

// trueOrError (I4): a normal end has exactly the right tokens; anything else
// names its cause, and what came before it is right.
func trueOrError(t *testing.T, a, want *Answer) {
	t.Helper()
	switch {
	case a.Error == nil && a.Finish != "" && (a.Done || len(a.At) == 0):
		if d := differ(a, want); d != "" {
			t.Errorf("wrong answer: %s", d)
		}
	case a.Error == nil || a.Error.Code == "" || a.Error.Code == "internal":
		t.Errorf("status %d, finish %q, error %v: neither an answer nor a named cause", a.Status, a.Finish, a.Error)
	default:
		if n := min(len(a.IDs), len(want.IDs)); !slices.Equal(a.IDs[:n], want.IDs[:n]) {
			t.Errorf("wrong tokens before the error: %v", a.IDs)
		}
	}
}

// heals (I5): n requests in a row work again soon, over every pair if n and the
// policy say so.
func heals(t *testing.T, when, base string, n int) {
	t.Helper()
	for end := time.Now().Add(healWait); ; <-time.After(50 * time.Millisecond) {
		failed := part{base, Client}.works(n)
		if failed == nil {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s: not healed after %v: %v", when, healWait, failed)
			return
		}
	}
}

// works says why the last of n requests that failed did.
func (p part) works(n int) (failed error) {
	for range n {
		ctx, cancel := context.WithTimeout(context.Background(), healWait)
		a, err := GenerateWith(ctx, p.client, p.base, map[string]any{"text": "heal", "sampling_params": map[string]any{"max_new_tokens": 2}})
		cancel()
		if err != nil {
			failed = err
		} else if a.Status != 200 {
			failed = fmt.Errorf("status %d: %v", a.Status, a.Error)
		}
	}
	return failed
}

// endsWell (I1, I3, I4, I5, I6) is the end of every test, whatever it broke: what
// was stopped runs on, no part that lives holds anything, a router that finds
// all its workers ready answers, and what clients were told holds.
func (r *Rig) endsWell(t *testing.T) {
	if t.Failed() || t.Skipped() {
		return
	}
	defer r.judgeAll(t)
	var parts, routers []part
	for _, h := range append(r.hosts, r) {
		p, q := h.living()
		parts, routers = append(parts, p...), append(routers, q...)
	}
	end := time.Now().Add(idleWait)
	for _, p := range parts {
		for _, why := p.held(); why != ""; _, why = p.held() {
			if time.Now().After(end) {
				t.Errorf("at the end of the test, after %v: %s: %s", idleWait, p.base, why)
				break
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	for _, p := range routers {
		for p.allReady() { // it may have to learn first that stand-ins for workers are gone
			why := p.works(1)
			if why == nil {
				break
			}
			if time.Now().After(end.Add(healWait)) {
				t.Errorf("at the end of the test: %s: every worker is ready, and requests fail: %v", p.base, why)
				break
			}
			<-time.After(50 * time.Millisecond)
		}
	}
}

// judgeAll judges what clients were told by the routers, also those that are gone.
func (r *Rig) judgeAll(t *testing.T) {
	for _, h := range append(r.hosts, r) {
		for _, p := range slices.Backward(h.procs) { // of two at one address the last has what was told
			if p.Ready && (p.Role == "" || p.Role == "router") {
				by := part{cmp.Or(p.HTTP, p.Router), h.client()}
				judgeTold(t, by, p.runs(), strike(by))
			}
		}
	}
}

func (p *Proc) runs() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// part is a process that serves HTTP, and how it is reached.
type part struct {
	base   string
	client *http.Client
}

// living are the parts that run, after those that were stopped run on, and those
// of them that are routers.
func (r *Rig) living() (parts, routers []part) {
	r.mu.Lock()
	procs := slices.Clone(r.procs)
	r.mu.Unlock()
	of := func(base string) part { return part{base, r.client()} }
	for _, p := range procs {
		if !p.runs() {
			continue
		}
		p.Continue()
		switch p.Role {
		case "": // up: some of its children may have been killed
			parts, routers = append(parts, of(p.Router)), append(routers, of(p.Router))
			for _, m := range slices.Concat(p.Prefill, p.Decode) {
				if _, why := of(m.HTTP).held(); !strings.Contains(why, "refused") {
					parts = append(parts, of(m.HTTP))
				}
			}
		case "router":
			parts, routers = append(parts, of(p.HTTP)), append(routers, of(p.HTTP))
		case "registry": // it has no requests
		default:
			parts = append(parts, of(p.HTTP))
		}
	}
	return parts, routers
}

// allReady: the router has workers of both roles, and no word against any.
func (p part) allReady() bool {
	m, _ := p.held()
	for name, n := range m {
		if strings.HasPrefix(name, "metronome_workers{") && n > 0 && !strings.Contains(name, `state="ready"`) {
			return false
		}
	}
	return m[`metronome_workers{role="prefill",state="ready"}`] > 0 && m[`metronome_workers{role="decode",state="ready"}`] > 0
}

// tally (I6) is what a router had counted before the requests that are judged.
type tally struct {
	router *Proc
	before map[string]float64 // requests by code
}

func tallyOf(t *testing.T, router *Proc) *tally {
	t.Helper()
	for now := requestsByCode(t, router); ; { // a request is counted when its answer is out
		<-time.After(50 * time.Millisecond)
		before := now
		if now = requestsByCode(t, router); maps.Equal(before, now) {
			return &tally{router, now}
		}
	}
}

func requestsByCode(t *testing.T, p *Proc) map[string]float64 {
	t.Helper()
	m, err := Metrics(within(t, 2*time.Second), p.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	return byCode(m)
}

func byCode(m map[string]float64) map[string]float64 {
	codes := map[string]float64{}
	for name, v := range m {
		if code, ok := strings.CutPrefix(name, `metronome_requests_total{code="`); ok {
			codes[strings.TrimSuffix(code, `"}`)] = v
		}
	}
	return codes
}

// addsUp: these answers and no others came from the router, by code, and each
// one's usage and finish reason are those of the tokens that the client has.
func (y *tally) addsUp(t *testing.T, answers []*Answer) {
	t.Helper()
	want := maps.Clone(y.before)
	for _, a := range answers {
		code := "ok"
		if a.Error != nil {
			code = a.Error.Code
		} else if a.Completion != len(a.IDs) || a.Prompt == 0 || a.Finish == "" {
			t.Errorf("usage says %d + %d tokens, finish %q; the client has %d", a.Prompt, a.Completion, a.Finish, len(a.IDs))
		}
		want[code]++
	}
	var got map[string]float64
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		if got = requestsByCode(t, y.router); maps.Equal(got, want) {
			return
		}
	}
	t.Errorf("the router has counted %v, its clients %v", got, want)
}
