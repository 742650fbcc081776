package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// call is one streamed request of any path.
type call struct {
	path string
	body map[string]any
}

// raw is a stream as it came: its events byte for byte, with their times. The
// time of creation is taken out, for it differs from run to run.
type raw struct {
	status int
	header http.Header
	events []string // data of each, [DONE] among them
	at     []time.Time
	err    error
}

var created = regexp.MustCompile(`"created":\d+`)

// done tells whether the stream ended in order.
func (r *raw) done() bool { return len(r.events) > 0 && r.events[len(r.events)-1] == "[DONE]" }

// gap is the longest wait between two events, and after which one it was.
func (r *raw) gap() (worst time.Duration, after int) {
	for i := 1; i < len(r.at); i++ {
		if d := r.at[i].Sub(r.at[i-1]); d > worst {
			worst, after = d, i
		}
	}
	return worst, after
}

// stream sends the call with a request id of its own, so that two runs are
// equal, and gives what came. each is called after every event.
func (c call) stream(ctx context.Context, base, id string, each func(n int)) *raw {
	c.body["stream"] = true
	data, _ := json.Marshal(c.body)
	req, err := http.NewRequestWithContext(ctx, "POST", base+c.path, bytes.NewReader(data))
	if err != nil {
		return &raw{err: err}
	}
	req.Header.Set("X-Request-Id", id)
	resp, err := Client.Do(req)
	if err != nil {
		return &raw{err: err}
	}
	defer resp.Body.Close()
	r := &raw{status: resp.StatusCode, header: resp.Header}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		body, err := io.ReadAll(resp.Body)
		r.events, r.err = []string{string(body)}, err
		return r
	}
	stamps := map[string]bool{}
	for in := bufio.NewReaderSize(resp.Body, 1<<20); ; {
		line, err := in.ReadString('\n')
		if data, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "data: "); ok {
			stamps[created.FindString(data)] = true
			r.events, r.at = append(r.events, created.ReplaceAllString(data, "")), append(r.at, time.Now())
			if each != nil {
				each(len(r.events))
			}
		} else if line != "\n" && line != "" {
			r.err = fmt.Errorf("a line that is no event: %q", line)
			return r
		}
		if err != nil {
			if err != io.EOF {
				r.err = err
			}
			if delete(stamps, ""); len(stamps) > 1 {
				r.err = errors.Join(r.err, fmt.Errorf("the time of creation changes: %v", stamps))
			}
			return r
		}
	}
}

// streams runs all calls side by side. each is called after every event of any.
func streams(t *testing.T, base string, calls []call, each func(call, event int)) []*raw {
	t.Helper()
	out := make([]*raw, len(calls))
	var wg sync.WaitGroup
	for i, c := range calls {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			out[i] = c.stream(ctx, base, fmt.Sprintf("call-%d", i), func(n int) {
				if each != nil {
					each(i, n)
				}
			})
		})
	}
	wg.Wait()
	return out
}

// strikeAt gives an each that strikes once, when every call has had n events.
func strikeAt(calls, n int, strike func()) func(call, event int) {
	var mu sync.Mutex
	left := calls
	return func(_, event int) {
		mu.Lock()
		defer mu.Unlock()
		if event == n {
			if left--; left == 0 {
				go strike()
			}
		}
	}
}

// equalRuns: every stream is event for event that of the undisturbed run.
func equalRuns(t *testing.T, got, want []*raw) {
	t.Helper()
	for i := range got {
		g, w := got[i], want[i]
		if g.err != nil || w.err != nil || !w.done() {
			t.Errorf("stream %d: %v; undisturbed: %v, status %d, %d events", i, g.err, w.err, w.status, len(w.events))
			continue
		}
		if !slices.Equal(g.events, w.events) {
			k := 0
			for k < min(len(g.events), len(w.events)) && g.events[k] == w.events[k] {
				k++
			}
			t.Errorf("stream %d differs at event %d of %d:\n got %.600q\nwant %.600q", i, k, len(w.events), g.events[k:min(k+2, len(g.events))], w.events[k:min(k+2, len(w.events))])
		}
	}
}

// migrations is what the router has counted.
func migrations(t *testing.T, router *Proc) float64 {
	t.Helper()
	m, err := Metrics(within(t, 2*time.Second), router.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	return m["metronome_migrations_total"]
}

// waitWorkers waits until the router has n ready workers of a role.
func waitWorkers(t *testing.T, router *Proc, role string, n int) {
	t.Helper()
	name := fmt.Sprintf(`metronome_workers{role="%s",state="ready"}`, role)
	for end := time.Now().Add(20 * time.Second); ; <-time.After(20 * time.Millisecond) {
		m, err := Metrics(within(t, 2*time.Second), router.HTTP)
		if err == nil && int(m[name]) == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s is %v, want %d (%v)", name, m[name], n, err)
		}
	}
}

// A killed decode with fifty streams: each goes on at another decode with
// exactly the events that an undisturbed run gives, a second later at most.
func TestF50KilledDecode(t *testing.T) {
	r := newRig(t)
	sim := []string{"--engine=sim", "--max-running=128", "--prefix-cache=false"}
	p := []*Proc{r.startPrefill(t, "sim", sim...), r.startPrefill(t, "sim", sim...)}
	d := []*Proc{r.startDecode(t, "sim", sim...), r.startDecode(t, "sim", sim...)}
	router := r.startRouter(t, p, d)
	var calls []call
	for i := range 50 {
		c := call{"/generate", map[string]any{"input_ids": promptIDs(40+i, 256, i), "return_logprob": i%2 == 0,
			"sampling_params": map[string]any{"max_new_tokens": 150, "temperature": i % 3, "seed": i}}}
		switch i % 5 {
		case 1:
			c = call{"/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": fmt.Sprint("beat ", i)}},
				"max_tokens": 150, "temperature": i % 3, "seed": i, "stream_options": map[string]any{"include_usage": true}}}
		case 3:
			c = call{"/v1/completions", map[string]any{"prompt": fmt.Sprint("beat ", i), "max_tokens": 150, "logprobs": 2, "temperature": i % 3, "seed": i}}
		}
		calls = append(calls, c)
	}
	want := streams(t, router.HTTP, calls, nil)
	use := idleUseOf(t, p[0], p[1], d[1], router)
	d[1].Stop() // until the router has taken it out: all fifty go to the first
	waitWorkers(t, router, "decode", 1)
	got := streams(t, router.HTTP, calls, strikeAt(len(calls), 40, func() {
		d[1].Continue()
		waitWorkers(t, router, "decode", 2)
		d[0].Kill()
	}))
	equalRuns(t, got, want)
	var worst time.Duration
	for i, g := range got {
		gap, after := g.gap()
		if worst = max(worst, gap); gap > time.Second {
			t.Errorf("stream %d waited %v after event %d", i, gap, after)
		}
	}
	if n := migrations(t, router); n != float64(len(calls)) {
		t.Errorf("%v streams were moved, want %d", n, len(calls))
	}
	t.Logf("the longest gap of %d streams was %v", len(calls), worst)
	explainMoved(t, router, d[0], "call-7")
	use.regained(t, p[0], p[1], d[1], router)
}

// The same with real arithmetic: seeds, log-probabilities, penalties, several
// answers, stop strings.
func TestF50KilledDecodeTiny(t *testing.T) {
	r := newRig(t)
	flags := []string{"--prefix-cache=false", "--threads=1", "--kv-pages=1024", "--max-running=16"}
	p := r.startPrefill(t, "tiny", flags...)
	d := []*Proc{r.startDecode(t, "tiny", flags...), r.startDecode(t, "tiny", flags...)}
	router := r.startRouter(t, []*Proc{p}, d, "--policy=round_robin")
	const n = 160
	chat := func(more map[string]any) call {
		body := map[string]any{"messages": []any{map[string]any{"role": "user", "content": "What keeps the beat?"}}, "max_tokens": n, "ignore_eos": true,
			"stream_options": map[string]any{"include_usage": true}}
		for k, v := range more {
			body[k] = v
		}
		return call{"/v1/chat/completions", body}
	}
	generate := func(params map[string]any) call {
		params["max_new_tokens"], params["ignore_eos"] = n, true
		return call{"/generate", map[string]any{"text": "The metronome", "sampling_params": params, "return_logprob": true, "top_logprobs_num": 2}}
	}
	calls := []call{
		chat(map[string]any{"temperature": 0, "logprobs": true, "top_logprobs": 3}),
		chat(map[string]any{"temperature": 0.9, "seed": 1, "top_p": 0.9}),
		chat(map[string]any{"temperature": 0.7, "seed": 2, "frequency_penalty": -1, "presence_penalty": -1.5, "stop": []string{"no such text"}}),
		{"/v1/completions", map[string]any{"prompt": "A steady", "max_tokens": n, "temperature": 1.1, "seed": 3, "top_k": 40, "logprobs": 2, "ignore_eos": true}},
		{"/v1/completions", map[string]any{"prompt": "A steady", "max_tokens": n, "temperature": 0, "repetition_penalty": 1.3, "ignore_eos": true}},
		generate(map[string]any{"temperature": 0}),
		generate(map[string]any{"temperature": 1, "seed": 4, "min_p": 0.05}),
	}
	a, err := Generate(within(t, time.Minute), router.HTTP, calls[6].body)
	if err != nil || len(a.IDs) != n {
		t.Fatalf("%v %+v", err, a)
	}
	calls = append(calls, generate(map[string]any{"temperature": 1, "seed": 4, "min_p": 0.05, "stop": []string{late(t, a.Text)}}))
	want := streams(t, router.HTTP, calls, nil)
	got := streams(t, router.HTTP, calls, strikeAt(len(calls), 30, d[0].Kill))
	equalRuns(t, got, want)
	if n := migrations(t, router); n < 3 || n > 5 {
		t.Errorf("%v streams were moved: the killed decode had about half of %d", n, len(calls))
	}
}

// late is a piece of a text that does not come before its last third.
func late(t *testing.T, text string) string {
	t.Helper()
	runes := []rune(text)
	for i := 2 * len(runes) / 3; i+5 < len(runes); i++ {
		if s := string(runes[i : i+5]); strings.Index(text, s) == len(string(runes[:i])) && !strings.Contains(s, "\uFFFD") {
			return s
		}
	}
	t.Fatalf("nothing new in the last third of %q", text)
	return ""
}

// Without another decode, or with migration off, a stream that breaks ends with
// one error event in the API's form: no normal finish, no [DONE]. An answer that
// is no stream is an error. The counters show it, and the log has no panic.
func TestF50NoOtherDecode(t *testing.T) {
	r := newRig(t)
	for _, flag := range []string{"--migrations=1", "--migrations=0"} {
		f := r.startPair(t, "sim", nil, nil, []string{"--engine=sim"})
		d := []*Proc{f.decode}
		if flag == "--migrations=0" {
			d = append(d, r.startDecode(t, "sim", "--engine=sim"))
		}
		router := r.startRouter(t, []*Proc{f.prefill}, d, flag, "--policy=round_robin")
		y := tallyOf(t, router)
		calls := []call{
			{"/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "x"}}, "max_tokens": 500}},
			{"/v1/completions", map[string]any{"prompt": "x", "max_tokens": 500}},
			{"/generate", map[string]any{"text": "x", "sampling_params": map[string]any{"max_new_tokens": 500}}},
		}
		if len(d) > 1 { // a stream at each of them
			calls = slices.Concat(calls, calls)
		}
		var whole *Answer
		var side sync.WaitGroup
		got := streams(t, router.HTTP, calls, strikeAt(len(calls), 5, func() {
			if len(d) == 1 {
				side.Go(func() {
					whole = endsIn(t, requestBound, func(ctx context.Context) (*Answer, error) {
						return Generate(ctx, router.HTTP, map[string]any{"text": "x", "sampling_params": map[string]any{"max_new_tokens": 500}})
					})
				})
				<-time.After(200 * time.Millisecond)
			}
			f.decode.Kill()
		}))
		side.Wait()
		broken := 0
		var answers []*Answer
		for i, g := range got {
			last := g.events[len(g.events)-1]
			var e struct{ Error *APIError }
			switch json.Unmarshal([]byte(last), &e); {
			case g.done():
				answers = append(answers, &Answer{Prompt: 1, Finish: "length"})
				continue
			case e.Error == nil || e.Error.Code != "decode_unreachable" || e.Error.Message == "" || e.Error.Type != "server_error":
				t.Errorf("%s: stream %d ends with %q (%v)", flag, i, last, g.err)
			}
			broken++
			answers = append(answers, &Answer{Error: e.Error})
			for _, ev := range g.events[:len(g.events)-1] {
				if strings.Contains(ev, `"error"`) || strings.Contains(ev, `"finish_reason":"`) || strings.Contains(ev, `"type":"length"`) {
					t.Errorf("%s: stream %d has %q before its error", flag, i, ev)
				}
			}
		}
		if want := 3; broken != want {
			t.Errorf("%s: %d streams broke, want %d", flag, broken, want)
		}
		if whole != nil {
			answers = append(answers, whole)
			if whole.Error == nil || whole.Status < 500 {
				t.Errorf("the answer that is no stream: %+v", whole)
			}
		}
		y.addsUp(t, answers)
		if strings.Contains(router.Log(), "panic") || strings.Contains(router.Log(), "goroutine ") {
			t.Errorf("the router's log:\n%s", router.Log())
		}
		router.Kill()
	}
}

// A stream that fails before its first token is an error with a status and a
// JSON body, never an empty 200.
func TestF51NoEmpty200(t *testing.T) {
	r := newRig(t)
	sim := []string{"--engine=sim", "--context=2048", "--sim-prefill-rate=1000", "--kv-timeout=1s"}
	p, d := r.startPrefill(t, "sim", sim...), r.startDecode(t, "sim", append(sim, "--parallel-info-timeout=1s", "--parallel-info-attempts=2")...)
	// Probes that are slower than the wait for KV, so that a stopped prefill is met by requests.
	router := r.startRouter(t, []*Proc{p}, []*Proc{d}, "--health-interval=10s", "--health-timeout=9s", "--retries=0")
	say := func(body map[string]any, timeout string) (int, *APIError) {
		t.Helper()
		body["stream"] = true
		data, _ := json.Marshal(body)
		req, _ := http.NewRequestWithContext(within(t, requestBound), "POST", router.HTTP+"/v1/completions", bytes.NewReader(data))
		if timeout != "" {
			req.Header.Set("X-Request-Timeout", timeout)
		}
		resp, err := Client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var e struct{ Error *APIError }
		if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Error == nil {
			t.Fatalf("status %d, %s: no error body (%v)", resp.StatusCode, resp.Header.Get("Content-Type"), err)
		}
		return resp.StatusCode, e.Error
	}
	want := func(what string, status int, code string, gotStatus int, e *APIError) {
		t.Helper()
		if gotStatus != status || e.Code != code {
			t.Errorf("%s: %d %v, want %d %s", what, gotStatus, e, status, code)
		}
	}
	status, e := say(map[string]any{"prompt": strings.Repeat("x", 3000)}, "")
	want("too long a prompt", 400, "context_length_exceeded", status, e)
	long := func() map[string]any { return map[string]any{"prompt": strings.Repeat("x", 1900), "max_tokens": 5} } // computes for 2 s
	status, e = say(long(), "500ms")
	want("the request's time is out", 504, "deadline_exceeded", status, e)
	timer := time.AfterFunc(300*time.Millisecond, func() { p.Stop() })
	defer timer.Stop()
	status, e = say(long(), "")
	want("the KV falls silent", 502, "kv_transfer_failed", status, e)
	p.Continue()
	heals(t, "continued", router.HTTP, 2)
	timer = time.AfterFunc(300*time.Millisecond, p.Kill)
	defer timer.Stop()
	if status, e = say(long(), ""); status != 502 {
		t.Errorf("the prefill is killed before the first token: %d %v, want 502", status, e)
	}
	router.Kill()
	router = r.startRouter(t, []*Proc{p}, []*Proc{d})
	status, e = say(long(), "")
	want("no prefill", 503, "no_prefill", status, e)
}

// A rolling restart of every worker under load: each is told to stop, drains,
// ends, and is started again where it was. Short requests finish where they are
// or are tried elsewhere, long streams move: none is lost, none gets a wrong token.
func TestRollingRestart(t *testing.T) {
	r := newRig(t)
	flags := []string{"--engine=sim", "--drain=1s"}
	var members []*Proc
	for _, role := range []string{"prefill", "prefill", "decode", "decode"} {
		args := []string{role, "sim", "--listen=127.0.0.1:" + fixedPort(t)}
		if role == "prefill" {
			args = append(args, "--bootstrap-listen=127.0.0.1:"+fixedPort(t))
		} else {
			args = append(args, "--on-mismatch=reject", "--heartbeat-interval=500ms", "--stream-output")
		}
		members = append(members, r.start(t, append(args, flags...)...))
	}
	router := r.startRouter(t, members[:2], members[2:], "--migrations=4", "--policy=round_robin")
	heals(t, "at first", router.HTTP, 4)
	y := tallyOf(t, router)

	short := func(i int) call {
		return call{"/generate", map[string]any{"text": fmt.Sprint("short ", i%7), "sampling_params": map[string]any{"max_new_tokens": 40, "temperature": 0}}}
	}
	long := call{"/generate", map[string]any{"text": "long", "sampling_params": map[string]any{"max_new_tokens": 100000, "temperature": 0}}}
	var want []*raw // of the short ones
	for i := range 7 {
		want = append(want, short(i).stream(within(t, requestBound), router.HTTP, "call", nil))
	}
	ctx, stop := context.WithCancel(context.Background())
	var load sync.WaitGroup
	var mu sync.Mutex
	lost, served := 0, 7
	for k := range 6 {
		load.Go(func() {
			for i := k; ctx.Err() == nil; i++ {
				bound, cancel := context.WithTimeout(context.Background(), requestBound)
				got := short(i).stream(bound, router.HTTP, "call", nil)
				cancel()
				mu.Lock()
				served++
				if got.err != nil || !slices.Equal(noCached(got.events), noCached(want[i%7].events)) {
					lost++
					t.Errorf("a short request: status %d, %v, %.300q", got.status, got.err, got.events[max(0, len(got.events)-1):])
				}
				mu.Unlock()
			}
		})
	}
	var stream *raw
	events := make(chan int, 1)
	longCtx, stopLong := context.WithCancel(context.Background())
	load.Go(func() {
		stream = long.stream(longCtx, router.HTTP, "long", func(n int) {
			select {
			case events <- n:
			default:
			}
		})
	})
	<-events
	for i, p := range members {
		p.Terminate()
		select {
		case <-p.Done():
		case <-time.After(10 * time.Second):
			t.Fatalf("%v has not ended 10 s after SIGTERM", p.Args)
		}
		if code := p.ExitCode(); code != 0 {
			t.Errorf("%v: exit status %d", p.Args, code)
		}
		members[i] = r.start(t, p.Args[:len(p.Args)-1]...)
		waitWorkers(t, router, p.Role, 2)
	}
	<-time.After(500 * time.Millisecond)
	stop()
	stopLong()
	load.Wait()
	if stream.status != 200 || len(stream.events) < 100 || !errors.Is(stream.err, context.Canceled) {
		t.Fatalf("the long stream: status %d, %d events, %v, %.300q", stream.status, len(stream.events), stream.err, stream.events[max(0, len(stream.events)-1):])
	}
	if migrations(t, router) == 0 {
		t.Error("no stream was moved; the long one met the restart of its decode")
	}
	checkLong(t, router.HTTP, long, stream)
	t.Logf("%d short requests served, %d lost; the long stream had %d tokens", served, lost, len(stream.events))
	answers := make([]*Answer, served)
	for i := range answers {
		answers[i] = &Answer{Prompt: 1, Finish: "length"}
	}
	for range 2 { // the long stream and the undisturbed one were left
		answers = append(answers, &Answer{Error: &APIError{Code: "client_gone"}})
	}
	y.addsUp(t, answers)
	idleUse{}.regained(t, append(members, router)...)
}

// noCached takes out what a prefix cache may change.
func noCached(events []string) []string {
	out := make([]string, len(events))
	for i, e := range events {
		out[i] = cached.ReplaceAllString(e, "")
	}
	return out
}

var cached = regexp.MustCompile(`"cached_tokens":\d+,?`)

// checkLong compares a long stream with the beginning of an undisturbed run.
func checkLong(t *testing.T, base string, c call, got *raw) {
	t.Helper()
	n := len(got.events)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ref := c.stream(ctx, base, "long", func(k int) {
		if k == n {
			cancel()
		}
	})
	a, b := noCached(got.events), noCached(ref.events)
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			t.Errorf("the long stream differs at event %d of %d: %q, want %q", i, n, a[i], b[i])
			return
		}
	}
	if len(b) < n {
		t.Errorf("the undisturbed run had %d events of %d", len(b), n)
	}
}

// A prefill dies whose streams run already. Decode preempts some of them, wants
// their KV anew, and there is nobody to compute it: they move, to the other
// prefill and, for want of another, the same decode.
func TestF06KilledPrefillOfRunningStreams(t *testing.T) {
	r := newRig(t)
	sim := []string{"--engine=sim", "--prefix-cache=false"}
	p := []*Proc{r.startPrefill(t, "sim", sim...), r.startPrefill(t, "sim", sim...)}
	// A pool for all of them at first, and not when they have grown.
	d := r.startDecode(t, "sim", append(sim, "--kv-pages=40", "--reserved-tokens=1", "--parallel-info-attempts=2")...)
	router := r.startRouter(t, p, []*Proc{d}, "--policy=round_robin", "--migrations=3")
	var calls []call
	for i := range 8 {
		calls = append(calls, call{"/generate", map[string]any{"input_ids": promptIDs(40, 256, i), "return_logprob": true,
			"sampling_params": map[string]any{"max_new_tokens": 160, "temperature": i % 2, "seed": i}}})
	}
	want := streams(t, router.HTTP, calls, nil)
	got := streams(t, router.HTTP, calls, strikeAt(len(calls), 20, p[0].Kill))
	equalRuns(t, got, want)
	if migrations(t, router) == 0 {
		t.Error("no stream was moved: none was preempted that had the killed prefill")
	}
	idleUse{}.regained(t, p[1], d, router)
}
