//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// row is one row on failures and fidelity. It runs on a fleet of its own, with
// the router's defaults; ours must hold.
type row struct {
	name, must string
	fleet      func(*os.File) (*fleet, error) // nil: stubs
	flags      []string                       // of ours, to make a wait short that is long by default
	run        func(f *fleet, r *running) (says string, holds bool)
}

const watch = 15 * time.Second // how long a row looks at most

// seconds writes a time that was looked for until limit.
func seconds(d, limit time.Duration) string {
	if d >= limit {
		return fmt.Sprintf("> %.0f s", limit.Seconds())
	}
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

func rows(binary string) []row {
	own := func(log *os.File) (*fleet, error) { return startOwn(log, binary) }
	return []row{
		{name: "a prefill process stops (20 requests/s)", must: "none lost, out ≤ 3 s", run: prefillStops},
		{name: "it goes on: used again after", must: "≤ 2 s", run: prefillGoesOn},
		{name: "a prefill answers 500, not streaming", must: "retried, ≤ +50 ms, blame on prefill", run: prefillFails},
		{name: "a decode falls silent mid-stream (stubs)", must: "named error after the idle time-out (ours: set to 2 s)", flags: []string{"--idle-timeout=2s"}, run: midStream("silent")},
		{name: "a decode closes mid-stream (stubs)", must: "named error", run: midStream("cut")},
		{name: "a decode of ours is stopped mid-stream", must: "migrated, no seam", fleet: own, run: decodeGone(syscall.SIGSTOP)},
		{name: "a decode of ours is killed mid-stream", must: "migrated, no seam", fleet: own, run: decodeGone(syscall.SIGKILL)},
		{name: "a client leaves while the prefill is stuck", must: "both legs end ≤ 50 ms", run: clientLeaves},
		{name: "all prefills refuse: readiness", must: "not ready ≤ 1.5 s", run: allRefuse},
		{name: "they come back: used again after", must: "≤ 2 s", run: allComeBack},
		{name: "4 clients read nothing of 57 MB streams", must: "≤ +1 MB, worker held back", run: readsNothing},
		{name: "unknown fields, 0.1, 1.10, big integers", must: "every byte kept", run: bytesKept},
		{name: "client sends pairing fields", must: "removed", run: pairingRemoved},
		{name: "duplicate keys", must: "refused (400)", run: duplicateKeys},
		{name: "`/generate` with a list of texts", must: "works, one room per item", run: listOfTexts},
	}
}

var coupled = mode{Coupled: true}

func (f *fleet) couple() { f.set(coupled, 0, 1, 2, 3) }

// prefillStops stops a prefill under load. A request is lost when it has no
// good answer within 8 s; the prefill is out when requests are quick again.
func prefillStops(f *fleet, r *running) (string, bool) {
	f.couple()
	beside(func() {
		time.Sleep(time.Second)
		f.workers[0].signal(syscall.SIGSTOP)
	})
	const rate, n = 20, 200
	lost, last := 0, time.Duration(0)
	for i, a := range paced(r.url, prompt(200, false), rate, n, 8*time.Second) {
		since := time.Duration(i)*time.Second/rate - time.Second
		if !a.ok() {
			lost++
		}
		if since >= 0 && (!a.ok() || a.took > time.Second) {
			last = since
		}
	}
	const seen = n*time.Second/rate - time.Second
	if last > seen-time.Second {
		last = seen
	}
	return fmt.Sprintf("%d of %d lost, out after %s", lost, n, seconds(last, seen)), lost == 0 && last <= 3*time.Second
}

// used gives how long it takes under load until worker i has a new request.
func (f *fleet) used(r *running, i int) time.Duration {
	began, before := time.Now(), f.tally(i).Requests
	for time.Since(began) < watch && f.tally(i).Requests <= before {
		beside(func() { ask(r.url, prompt(200, false), watch) })
		time.Sleep(50 * time.Millisecond)
	}
	return time.Since(began)
}

func prefillGoesOn(f *fleet, r *running) (string, bool) {
	f.couple()
	f.workers[0].signal(syscall.SIGSTOP)
	paced(r.url, prompt(200, false), 10, 60, 8*time.Second)
	f.workers[0].signal(syscall.SIGCONT)
	until(watch, func() bool { return f.tally(0).Open == 0 }) // what it still had
	d := f.used(r, 0)
	return seconds(d, watch), d <= 2*time.Second
}

func prefillFails(f *fleet, r *running) (string, bool) {
	f.couple()
	usual := paced(r.url, prompt(200, false), 20, 20, 2*time.Second)
	f.set(mode{Coupled: true, Fault: "500"}, 0)
	bad, hung := 0, 0
	var slowest, base time.Duration
	for _, a := range usual {
		base += a.took / 20
	}
	for range 20 {
		a := ask(r.url, prompt(200, false), 2*time.Second)
		switch {
		case a.ok():
			slowest = max(slowest, a.took-base)
		case a.status == 0 || a.err != nil:
			hung++
		default:
			bad++
		}
	}
	says := fmt.Sprintf("%d of 20 failed, %d hung, at most +%d ms", bad, hung, slowest.Milliseconds())
	if r.name != "metronome" {
		return says, true
	}
	blamed := get(r.url+"/metrics", `metronome_workers{role="prefill",state="ejected"} 1`)
	free := get(r.url+"/metrics", `metronome_workers{role="decode",state="ready"} 2`)
	return says + fmt.Sprintf(", prefill ejected: %v, decodes in: %v", blamed, free), bad+hung == 0 && slowest <= 50*time.Millisecond && blamed && free
}

func midStream(fault string) func(*fleet, *running) (string, bool) {
	return func(f *fleet, r *running) (string, bool) {
		f.set(mode{Coupled: true, Events: 20, Gap: 10 * time.Millisecond}, 0, 1)
		f.set(mode{Coupled: true, Events: 20, Gap: 10 * time.Millisecond, Fault: fault}, 2, 3)
		a := ask(r.url, prompt(200, true), watch)
		events := strings.Count(a.body, `" word"`)
		named := strings.Contains(a.body, `"error"`)
		says := fmt.Sprintf("%d of 3 events, ", events)
		switch {
		case a.took >= watch-time.Second && a.err != nil:
			says += "hangs " + seconds(watch, watch)
		case named:
			says += "error event after " + seconds(a.took, watch)
		case a.err != nil:
			says += "cut"
		case strings.Contains(a.body, "[DONE]"):
			says += "ends as if it were whole"
		default:
			says += "ends without a word"
		}
		return says, events == 3 && named && a.took < 3*time.Second && !strings.Contains(a.body, "[DONE]")
	}
}

// startOwn starts workers of ours with the sim engine.
func startOwn(log *os.File, binary string) (*fleet, error) {
	f := &fleet{log: log}
	for i := range 4 {
		port, boot := freePort(), freePort()
		url := fmt.Sprintf("http://%s:%d", stubHost, port)
		argv := []string{binary, "decode", "sim", "--engine=sim", "--sim-decode-base=20ms", "--served-name=m", fmt.Sprintf("--listen=%s:%d", stubHost, port)}
		if i < 2 {
			argv[1] = "prefill"
			argv = append(argv, fmt.Sprintf("--bootstrap-listen=%s:%d", stubHost, boot))
			f.prefill, f.bootstrap = append(f.prefill, url), append(f.bootstrap, boot)
		} else {
			f.decode = append(f.decode, url)
		}
		p, err := launch(log, argv...)
		if err != nil {
			f.close()
			return nil, err
		}
		f.workers, f.all = append(f.workers, p), append(f.all, p)
	}
	for _, url := range f.urls() {
		if err := until(20*time.Second, func() bool { return status(url+"/readyz") == 200 }); err != nil {
			f.close()
			return nil, fmt.Errorf("%s is not ready: %w", url, err)
		}
	}
	return f, nil
}

// texts is what the events of a stream say, one after another.
func texts(body string) string {
	var b strings.Builder
	for line := range strings.Lines(body) {
		if _, rest, ok := strings.Cut(line, `"content":`); ok && strings.HasPrefix(line, "data:") {
			text, _, _ := strings.Cut(rest, `"}`)
			b.WriteString(text)
		}
	}
	return b.String()
}

// decodeGone takes the decode of a running stream away and compares what the
// client has with an undisturbed answer.
func decodeGone(s syscall.Signal) func(*fleet, *running) (string, bool) {
	return func(f *fleet, r *running) (string, bool) {
		body := strings.Replace(chatBody(200, true), `"max_tokens":64`, `"max_tokens":64,"ignore_eos":true,"temperature":0`, 1)
		whole := ask(r.url, body, watch)
		want := texts(whole.body)
		hit := make(chan int, 2) // the decode that was met in the middle of the answer
		beside(func() {
			time.Sleep(500 * time.Millisecond)
			for i := 2; i < 4; i++ {
				if get(f.urls()[i]+"/metrics", "metronome_num_running_reqs 1") {
					f.workers[i].signal(s)
					hit <- i
				}
			}
		})
		a := ask(r.url, body, watch)
		got := texts(a.body)
		switch {
		case want == "":
			return "no undisturbed answer", false
		case a.ok() && got == want:
			return "goes on, same text, " + seconds(max(0, a.took-whole.took), watch) + " longer", len(hit) == 1
		case a.took >= watch-time.Second:
			return "hangs " + seconds(watch, watch), false
		case strings.Contains(a.body, `"error"`):
			return "error event after " + seconds(a.took, watch), false
		default:
			return fmt.Sprintf("cut after %s, %d of %d bytes", seconds(a.took, watch), len(got), len(want)), false
		}
	}
}

func (f *fleet) open() (n int) {
	for i := range f.workers {
		n += f.tally(i).Open
	}
	return n
}

func clientLeaves(f *fleet, r *running) (string, bool) {
	f.set(mode{Coupled: true, Fault: "stuck"}, 0, 1)
	f.set(coupled, 2, 3)
	ctx, cancel := context.WithCancel(context.Background())
	gone := beside(func() { askCtx(ctx, r.url+"/v1/chat/completions", prompt(200, true)) })
	if until(5*time.Second, func() bool { return f.open() == 2 }) != nil {
		cancel()
		return "the legs were not sent together", false
	}
	left := time.Now()
	cancel()
	<-gone
	d := watch
	if until(watch, func() bool { return f.open() == 0 }) == nil {
		d = 0
		for i := range f.workers {
			d = max(d, f.tally(i).Ended.Sub(left))
		}
	}
	return "both ended after " + seconds(d, watch), d <= 50*time.Millisecond
}

func (f *fleet) killPrefills() {
	for _, p := range f.workers[:2] {
		p.kill()
	}
}

func allRefuse(f *fleet, r *running) (string, bool) {
	f.couple()
	paced(r.url, prompt(200, false), 20, 4, 2*time.Second)
	f.killPrefills()
	began := time.Now()
	until(watch, func() bool { return status(r.url+r.ready) != 200 })
	d := time.Since(began)
	if d >= watch {
		return "ready for " + seconds(d, watch), false
	}
	return "not ready after " + seconds(d, watch), d <= 1500*time.Millisecond
}

func allComeBack(f *fleet, r *running) (string, bool) {
	f.couple()
	f.killPrefills()
	paced(r.url, prompt(200, false), 10, 50, 2*time.Second)
	if f.restart(0) != nil || f.restart(1) != nil {
		return "the stubs did not start again", false
	}
	f.set(coupled, 0, 1)
	d := f.used(r, 0)
	return seconds(d, watch), d <= 2*time.Second
}

// readsNothing opens streams whose clients take nothing, and looks at what the
// router's memory and the workers' writes come to.
func readsNothing(f *fleet, r *running) (string, bool) {
	f.set(mode{}, 0, 1)
	f.set(mode{Flood: 57 << 20}, 2, 3)
	closed(r.url, strings.Replace(prompt(200, false), `"m"`, `"m","warm":1`, 1), 4, 200)
	before := r.resident()
	body := prompt(200, true)
	for range 4 {
		c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			return err.Error(), false
		}
		defer c.Close()
		c.(*net.TCPConn).SetReadBuffer(4 << 10)
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	written := func() int64 { return f.tally(2).Written + f.tally(3).Written }
	still(written, time.Second)
	grown := float64(r.resident()-before) / (1 << 20)
	share := float64(written()) / (4 * 57 << 20)
	return fmt.Sprintf("%+.1f MB, workers wrote %.0f %%", grown, 100*share), grown <= 1 && share < 0.5
}

// still waits until a value does not change for a while.
func still(value func() int64, while time.Duration) {
	for last := int64(-1); last != value(); time.Sleep(while) {
		last = value()
	}
}

// sent gives the bodies that a prefill and a decode got for one request.
func (f *fleet) sent(r *running, path, body string) (answer, []string) {
	still(func() (n int64) { // a leg of the request before may be on its way
		for i := range f.workers {
			n += int64(f.tally(i).Requests)
		}
		return n
	}, 100*time.Millisecond)
	before := make([]int, 4)
	for i := range f.workers {
		before[i] = f.tally(i).Requests
	}
	a := askPath(r.url+path, body, 5*time.Second)
	var bodies []string
	until(time.Second, func() bool {
		bodies = nil
		for i := range f.workers {
			if t := f.tally(i); t.Requests > before[i] {
				bodies = append(bodies, t.Body)
			}
		}
		return len(bodies) >= 2
	})
	return a, bodies
}

const odd = `{"model":"m","stream":false,"messages":[{"role":"user","content":"hi"}],"temperature":0.1,"top_p":0.90,"x_unknown":{"b":1.10, "a":[9007199254740993]},"seed":9223372036854775807}`

func bytesKept(f *fleet, r *running) (string, bool) {
	a, bodies := f.sent(r, "/v1/chat/completions", odd)
	if len(bodies) < 2 {
		return fmt.Sprintf("status %d", a.status), false
	}
	lacks := func(part string) bool {
		return slices.ContainsFunc(bodies, func(b string) bool { return !strings.Contains(b, part) })
	}
	kept, lost := !slices.ContainsFunc(bodies, func(b string) bool { return !strings.HasSuffix(b, odd[1:]) }), ""
	for _, part := range []string{"0.1,", "0.90", "x_unknown", "1.10", "9007199254740993", "9223372036854775807"} {
		if lacks(part) {
			lost += " " + strings.TrimSuffix(part, ",")
		}
	}
	if kept {
		return "every byte kept", true
	}
	return "rewritten; not there as sent:" + lost, false
}

func pairingRemoved(f *fleet, r *running) (string, bool) {
	names := []string{"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "bootstrap_pair_key", "kv_transfer_params"}
	body := prompt(100, false)
	for _, n := range names {
		body = strings.Replace(body, "{", `{"`+n+`":0,`, 1)
	}
	body = strings.Replace(body, "{", `{"bootstrap_host":"203.0.113.9","bootstrap_room":7,`, 1)
	a, bodies := f.sent(r, "/v1/chat/completions", body)
	if len(bodies) < 2 {
		return fmt.Sprintf("status %d", a.status), false
	}
	passed := ""
	for _, n := range append(names, "203.0.113.9", `"bootstrap_room":7,`) {
		if strings.Contains(bodies[0]+bodies[1], n) {
			passed += " " + strings.Trim(n, `",`)
		}
	}
	if passed != "" {
		return "passed on:" + passed, false
	}
	return "removed", true
}

func duplicateKeys(f *fleet, r *running) (string, bool) {
	a, bodies := f.sent(r, "/v1/chat/completions", strings.Replace(prompt(100, false), "{", `{"model":"other",`, 1))
	return fmt.Sprintf("status %d, %d legs", a.status, len(bodies)), a.status == 400 && len(bodies) == 0
}

func listOfTexts(f *fleet, r *running) (string, bool) {
	a, bodies := f.sent(r, "/generate", `{"text":["one","two","three"],"sampling_params":{"max_new_tokens":1}}`)
	rooms := map[string]bool{}
	for _, b := range bodies {
		_, list, _ := strings.Cut(b, `"bootstrap_room":[`)
		list, _, _ = strings.Cut(list, "]")
		for _, room := range strings.Split(list, ",") {
			rooms[room] = true
		}
	}
	return fmt.Sprintf("status %d", a.status), a.status == 200 && len(bodies) == 2 && len(rooms) == 3 && bytes.Count([]byte(a.body), []byte(`"text"`)) == 3
}
