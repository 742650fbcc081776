package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

func line(t *metric.Timeline) string {
	var b strings.Builder
	for _, m := range t.Moments() {
		fmt.Fprintf(&b, "%s=%v ", m.Mark, m.At.Round(time.Millisecond/10))
	}
	return strings.TrimSpace(b.String())
}

// Both sides of one request in virtual time: the prefill is known after 2 ms, a
// prompt of 1,000 tokens computes for 100 ms in two chunks, then four more
// tokens come 8.1 ms apart. A request whose prefill hangs has been queued, and
// no more.
func TestTimelines(t *testing.T) {
	inBubble(t, Config{SimPrefillRate: 10000}, Config{}, func(t *testing.T, c *city, d *Worker) {
		var p *Job
		rooms++
		both := Job{RID: "r", Prompt: text(1, 1000), MaxTokens: 5, Room: rooms, DPRank: -1, Addr: "good:1"}
		both.Sampling.Logprobs = -1
		p = submit(t, c.p, both)
		j := submit(t, d, both)
		hear(t, j)
		hear(t, p)
		got := [2]metric.Timeline{p.Box.Timeline(), j.Box.Timeline()}
		for i, want := range []string{
			"queued=0s granted=2ms first_layer=12.8ms last_page=100ms first_token=100ms received=100ms",
			"queued=0s resolved=2ms granted=2ms first_page=12.8ms last_page=100ms first_token=100ms last_token=132.4ms",
		} {
			if s := line(&got[i]); s != want {
				t.Errorf("timeline\n got %s\nwant %s", s, want)
			}
		}
		hung := c.legs(t, d, "hung:1", text(2, 40), 5)
		synctest.Wait()
		rows, err := d.Requests(t.Context())
		if err != nil || len(rows) != 1 || line(&rows[0].Timeline) != "queued=0s" {
			t.Errorf("live rows %+v, %v", rows, err)
		}
		d.Abort(hung, api.Errorf(api.ClientGone, "enough"))
		hear(t, hung)
		if line := hung.Box.Timeline(); len(line.Moments()) != 1 {
			t.Errorf("a request that waited for a hung prefill: %v", line.Moments())
		}
	})
}

// askFront asks a worker's HTTP side and gives the answer whole, trailer and all.
func askFront(t *testing.T, front http.Handler, path, body string, header ...string) *http.Response {
	t.Helper()
	method := "POST"
	if body == "" {
		method = "GET"
	}
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.RemoteAddr = "127.0.0.1:5"
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	front.ServeHTTP(w, r)
	return w.Result()
}

// The end of a request is one line of the log, a row for whoever asks by id, and
// a word to the router that wants it; to nobody else, and the prompt is nowhere.
func TestReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := newSimWorker(t, Config{Role: Serve})
		w.log = slog.New(slog.NewJSONHandler(&log, nil))
		w.wireServe()
		front, err := newFront(w)
		if err != nil {
			t.Fatal(err)
		}
		stop := runLoops(t, w)
		defer stop()
		ask := func(body string, header ...string) *http.Response {
			return askFront(t, front, "/generate", body, header...)
		}
		const asked = api.TimelineHeader
		plain := ask(`{"text":"secret words","sampling_params":{"max_new_tokens":3}}`, "X-Request-Id", "one")
		if v := plain.Header.Get(asked); v != "" || plain.StatusCode != 200 {
			t.Errorf("nobody asked: %d %q", plain.StatusCode, v)
		}
		whole := ask(`{"text":"secret words","rid":"mine","sampling_params":{"max_new_tokens":3}}`, "X-Request-Id", "two", asked, "1")
		stream := ask(`{"text":"secret words","stream":true,"sampling_params":{"max_new_tokens":3}}`, "X-Request-Id", "three", asked, "1")
		bad := ask(`{"text":"secret words","sampling_params":{"max_new_tokens":-3}}`, "X-Request-Id", "four", asked, "1")
		for id, text := range map[string]string{"two": whole.Header.Get(asked), "three": stream.Trailer.Get(asked), "four": bad.Header.Get(asked)} {
			var r metric.Report
			if err := json.Unmarshal([]byte(text), &r); err != nil || r.Request != id || len(text) > api.MaxTimeline {
				t.Errorf("%s: %q, %v", id, text, err)
			}
			if done := r.Code == "ok" && r.Prompt == 12 && r.Completion == 3 && r.Finish == "length" && r.Status == 200; done == (id == "four") {
				t.Errorf("%s: %+v", id, r)
			}
		}
		if v := stream.Header.Get(asked); v != "" {
			t.Errorf("a stream's report is in its head: %q", v)
		}
		checkAccessLog(t, log.String())
		var rows []metric.Report
		json.NewDecoder(askFront(t, front, "/debug/requests?rid=mine", "").Body).Decode(&rows)
		if len(rows) != 1 || rows[0].Request != "two" {
			t.Errorf("by rid: %+v", rows)
		}
		json.NewDecoder(askFront(t, front, "/debug/requests?ended=2", "").Body).Decode(&rows)
		if len(rows) != 2 || rows[0].Request != "four" || rows[1].Request != "three" {
			t.Errorf("the last two: %+v", rows)
		}
	})
}

func checkAccessLog(t *testing.T, log string) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(log), "\n")
	if len(lines) != 4 || strings.Contains(log, "secret") {
		t.Fatalf("the log has %d lines:\n%s", len(lines), log)
	}
	for i, want := range []string{"one ok 200 length", "two ok 200 length", "three ok 200 length", "four invalid_request 400 "} {
		var l struct {
			Msg, Request, Code, Finish, Path string
			Status                           int
			Prompt                           int                `json:"prompt_tokens"`
			Line                             map[string]float64 `json:"timeline_ms"`
		}
		if err := json.Unmarshal([]byte(lines[i]), &l); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s %s %d %s", l.Request, l.Code, l.Status, l.Finish); got != want || l.Msg != "request" || l.Path != "/generate" {
			t.Errorf("line %d: %s", i, lines[i])
		}
		if i == 3 {
			continue
		}
		at := -1.0
		for _, m := range []string{"queued", "first_layer", "first_token", "last_token", "ended"} {
			if v, ok := l.Line[m]; !ok || v < at {
				t.Errorf("%s at %v of %v, after %v: %s", m, v, ok, at, lines[i])
			} else {
				at = v
			}
		}
	}
}

// Debug pages are for callers on this machine, or with a token.
func TestDebugIsGuarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tokens := range []api.Tokens{{}, api.NewTokens("t")} {
			w := newSimWorker(t, Config{Role: Serve, Tokens: tokens})
			w.wireServe()
			front, err := newFront(w)
			if err != nil {
				t.Fatal(err)
			}
			stop := runLoops(t, w)
			see := func(from, token string, want int) {
				t.Helper()
				r := httptest.NewRequest("GET", "/debug/requests", nil)
				r.RemoteAddr = from
				r.Header.Set("Authorization", "Bearer "+token)
				rec := httptest.NewRecorder()
				if front.ServeHTTP(rec, r); rec.Code != want {
					t.Errorf("from %s, token %q, tokens configured %v: %d, want %d", from, token, !tokens.Empty(), rec.Code, want)
				}
			}
			see("127.0.0.1:5", "", 200)
			see("10.0.0.1:5", "wrong", 403)
			see("10.0.0.1:5", "t", map[bool]int{true: 403, false: 200}[tokens.Empty()])
			stop()
		}
	})
}

// runLoops runs the loops of a worker until the function that it gives is called.
func runLoops(t *testing.T, w *Worker) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var g sync.WaitGroup
	w.startLoops(ctx, &g)
	return func() {
		w.stopLoops()
		cancel()
		g.Wait()
	}
}
