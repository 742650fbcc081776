package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/router"
	"github.com/metronome-serve/metronome/internal/worker"
)

// The tests of this package run all roles inside one process, so that the race
// detector sees them: serve, and a prefill and a decode worker behind a router.

// roles is such a fleet. The three ways to ask it must give equal answers.
type roles struct {
	serve, router   string // base URLs
	prefill, decode string
	bootstrap       string
	log             *safeBuffer // the router's, JSON
}

// ways are the names of the three ways.
var ways = []string{"serve", "router", "workers"}

type tune func(role worker.Role, c *worker.Config)

// startRoles starts a fleet of the built-in model that ends with the test.
func startRoles(t *testing.T, change tune) *roles {
	t.Helper()
	start := func(role worker.Role) worker.ReadyLine {
		cfg := worker.Config{Role: role, Model: "tiny", Listen: "127.0.0.1:0", BootstrapListen: "127.0.0.1:0", KVListen: "127.0.0.1:0",
			Threads: 1, KVPages: 600, PrefixCache: true, Drain: time.Second, OnMismatch: "reject"}
		if change != nil {
			change(role, &cfg)
		}
		w, err := worker.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		background(t, w.Run)
		select {
		case line := <-w.Ready():
			return line
		case <-time.After(20 * time.Second):
			t.Fatalf("the %s worker is not ready: %v", role, w.Status())
		}
		panic("unreachable")
	}
	f := &roles{serve: start(worker.Serve).HTTP, decode: start(worker.Decode).HTTP, log: new(safeBuffer)}
	p := start(worker.Prefill)
	f.prefill, f.bootstrap = p.HTTP, p.Bootstrap
	_, port, _ := net.SplitHostPort(p.Bootstrap)
	cfg := router.Default()
	cfg.Prefill, cfg.Decode, cfg.Drain = []string{p.HTTP + "," + port}, []string{f.decode}, time.Second
	cfg.Log = slog.New(slog.NewJSONHandler(f.log, nil))
	r, err := router.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	background(t, func(ctx context.Context) error { return r.Run(ctx, ln) })
	f.router = "http://" + ln.Addr().String()
	waitReady(t.Context(), f.router)
	t.Cleanup(func() { f.idle(t) }) // before the roles end
	return f
}

// background runs f until the test has ended.
func background(t *testing.T, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// idle waits until nothing is open anywhere: every request has ended on both
// legs, and its pages are given back.
func (f *roles) idle(t *testing.T) { t.Helper(); f.idleWithin(t, 5*time.Second) }

func (f *roles) idleWithin(t *testing.T, limit time.Duration) {
	t.Helper()
	f.until(t, limit, "something is held", func() (held []string) {
		for _, base := range []string{f.serve, f.prefill, f.decode, f.router} {
			if rows, a := f.open(base); len(rows) > 0 {
				held = append(held, base+" "+a.String())
			}
			held = append(held, holds(t, base)...)
		}
		return held
	})
}

// row is a request in a live table.
type row struct{ RID, Phase string }

func (f *roles) open(base string) (rows []row, a answer) {
	a = send(context.Background(), "GET", base+"/debug/requests", nil)
	if json.Unmarshal(a.body, &rows) != nil {
		rows = []row{{}}
	}
	return rows, a
}

// until waits for something to become empty.
func (f *roles) until(t *testing.T, limit time.Duration, what string, left func() []string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	if raceBuild {
		limit *= 3
	}
	for end := time.Now().Add(limit); ; <-tick.C {
		list := left()
		if len(list) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("after %v %s: %.1000q", limit, what, list)
			return
		}
	}
}

// gauge is a line of /metrics that counts requests, or pages that somebody has.
var gauge = regexp.MustCompile(`(?m)^(metronome_num_\w+|metronome_kv_pages\{state="(?:owned|quarantined)"\}) (\S+)$`)

// holds are the gauges that are not zero. None is ever below.
func holds(t *testing.T, base string) (held []string) {
	t.Helper()
	a := send(context.Background(), "GET", base+"/metrics", nil)
	for _, m := range gauge.FindAllSubmatch(a.body, -1) {
		if v := string(m[2]); strings.HasPrefix(v, "-") {
			t.Errorf("%s: %s is %s", base, m[1], v)
		} else if v != "0" {
			held = append(held, fmt.Sprintf("%s %s %s", base, m[1], v))
		}
	}
	if a.status != 200 {
		held = append(held, base+": "+a.String())
	}
	return held
}

// answer is what came back. status 0: the connection broke, body says how.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) String() string { return fmt.Sprintf("%d %.600s", a.status, a.body) }

// failure is the part of an error answer that must be equal everywhere.
func (a answer) failure() (code, param, kind string) {
	var b struct {
		Error struct{ Message, Code, Param, Type string }
	}
	if json.Unmarshal(a.body, &b) != nil || b.Error.Message == "" {
		return "no error body", string(a.body), ""
	}
	return b.Error.Code, b.Error.Param, b.Error.Type
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// send makes one request. It never takes longer than 30 s.
func send(ctx context.Context, method, url string, body []byte) answer {
	return sendWith(ctx, method, url, body, nil)
}

// sendAs posts with a request id.
func sendAs(ctx context.Context, id, url string, body []byte) answer {
	return sendWith(ctx, "POST", url, body, map[string]string{"X-Request-Id": id})
}

func sendWith(ctx context.Context, method, url string, body []byte, header map[string]string) answer {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return answer{body: []byte(err.Error())}
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := client.Do(req)
	if err != nil {
		return answer{body: []byte(err.Error())}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{body: fmt.Appendf(nil, "after %d bytes: %v", len(data), err)}
	}
	return answer{resp.StatusCode, resp.Header, data}
}

// ask sends a body one of the three ways.
func (f *roles) ask(way, path string, body []byte) answer {
	switch way {
	case "serve":
		return send(context.Background(), "POST", f.serve+path, body)
	case "router":
		return send(context.Background(), "POST", f.router+path, body)
	}
	return f.askWorkers(path, body)
}

// askWorkers sends both legs as a router would, and gives decode's answer. An
// error of prefill's that decode does not know of is the answer.
func (f *roles) askWorkers(path string, body []byte) answer {
	host, port, _ := net.SplitHostPort(f.bootstrap)
	pairing := fmt.Sprintf(`"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":%d,`, host, port, rand.Int64N(1<<62))
	if i := bytes.IndexByte(body, '{'); i >= 0 {
		if bytes.Equal(bytes.TrimSpace(body[i+1:]), []byte("}")) {
			pairing = strings.TrimSuffix(pairing, ",")
		}
		body = slices.Concat(body[:i+1], []byte(pairing), body[i+1:])
	}
	ctx, cancel := context.WithCancel(context.Background())
	prefill := make(chan answer, 1)
	go func() { prefill <- send(ctx, "POST", f.prefill+path, body) }()
	defer func() {
		cancel()
		<-prefill
	}()
	return send(context.Background(), "POST", f.decode+path, body)
}

var (
	varying = regexp.MustCompile(`"(id|rid)":"[^"]*",?|"created":\d+,?|"cached_tokens":\d+,?`)
	indexed = regexp.MustCompile(`"index":(\d+)`)
)

// plain is an answer without ids, times and what the prefix caches held; the
// events of a stream in order for each choice, however they came mixed.
func (a answer) plain() string {
	s := string(varying.ReplaceAll(a.body, nil))
	if !strings.HasPrefix(s, "data:") {
		return s
	}
	events := strings.SplitAfter(s, "\n\n")
	slices.SortStableFunc(events, func(a, b string) int { return strings.Compare(index(a), index(b)) })
	return strings.Join(events, "")
}

// index sorts what belongs to no choice, usage and [DONE], behind the choices.
func index(event string) string {
	if m := indexed.FindStringSubmatch(event); m != nil {
		return m[1]
	}
	return "~"
}

// three asks all three ways and checks what holds for every request: an answer,
// never a 500, the same everywhere. It returns serve's.
func (f *roles) three(t *testing.T, name, path, body string) answer {
	t.Helper()
	want := f.ask("serve", path, []byte(body))
	check(t, name+" (serve)", want)
	for _, way := range ways[1:] {
		got := f.ask(way, path, []byte(body))
		check(t, name+" ("+way+")", got)
		if want.status != 200 {
			code, param, kind := got.failure()
			if c, p, k := want.failure(); got.status != want.status || code != c || param != p || kind != k {
				t.Errorf("%s: %s says %v, serve %v", name, way, got, want)
			}
			continue
		}
		if way == "workers" && (strings.Contains(body, `"echo":true`) || strings.Contains(body, `"logprob_start_len"`)) {
			continue // decode leaves the prompt's part to the prefill's answer
		}
		if g, w := got.plain(), want.plain(); got.status != 200 || g != w {
			t.Errorf("%s: %s says %d\n%.1500s\nserve\n%.1500s", name, way, got.status, g, w)
		}
	}
	return want
}

func check(t *testing.T, name string, a answer) {
	t.Helper()
	switch {
	case a.status == 0 || a.status >= 500:
		t.Errorf("%s: %v", name, a)
	case a.status != 200:
		if code, _, _ := a.failure(); code == "no error body" {
			t.Errorf("%s: no error body: %v", name, a)
		}
	case bytes.HasPrefix(a.body, []byte("data:")):
		if !bytes.HasSuffix(a.body, []byte("data: [DONE]\n\n")) {
			t.Errorf("%s: the stream has no end: %v", name, a)
		}
		for line := range strings.Lines(string(a.body)) {
			if data, ok := strings.CutPrefix(line, "data: {"); ok && !json.Valid([]byte("{"+data)) {
				t.Errorf("%s: an event is not JSON: %s", name, line)
			}
		}
	case !json.Valid(a.body):
		t.Errorf("%s: not JSON: %v", name, a)
	}
}
