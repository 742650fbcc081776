package router

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// history asks the router for one request.
func (f *fleet) history(rid string) metric.Report {
	f.t.Helper()
	var list []metric.Report
	got := f.get("/debug/requests?rid=" + rid)
	if err := json.Unmarshal([]byte(got.body), &list); err != nil || len(list) != 1 {
		f.t.Fatalf("%d %s, %v", got.status, got.body, err)
	}
	return list[0]
}

// lastLine is the newest line of the access log.
func lastLine(t *testing.T, log string) (l map[string]any) {
	t.Helper()
	for line := range strings.Lines(log) {
		if strings.Contains(line, `"msg":"request"`) {
			l = nil
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
		}
	}
	return l
}

const decodeSays = `{"request":"x","rid":"mine","finish":"stop","prompt_tokens":7,"completion_tokens":2,"cached_tokens":4,"timeline_ms":{"queued":1,"resolved":2,"granted":3,"last_page":4,"first_token":5,"last_token":6}}`

// reporting is a decode that gives its report after the stream, as ours do.
func reporting(_ *stub, w http.ResponseWriter, r *http.Request, body []byte) {
	stream(time.Millisecond, strings.SplitAfter(usual, "\n\n")...)(nil, w, r, body)
	if r.Header.Get(api.TimelineHeader) == "1" {
		w.Header().Set(http.TrailerPrefix+api.TimelineHeader, decodeSays)
	}
}

// What both workers say at the end is joined in one line, and is nothing that a
// client sees or can ask for.
func TestHistoryJoinsLegs(t *testing.T) {
	var log strings.Builder
	inFleet(t, 1, 1, func(c *Config) { c.Log = slog.New(slog.NewJSONHandler(&log, nil)) }, func(t *testing.T, f *fleet) {
		f.p[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			w.Header().Set(api.TimelineHeader, `{"timeline_ms":{"queued":1,"first_layer":2,"granted":3,"last_page":4},"attempts":[{}]}`)
			prefilled(s, w, r, body)
		}
		f.d[0].serve = reporting
		got := f.post("/v1/chat/completions", chat, "X-Request-Id", "one", api.TimelineHeader, "mine")
		if got.body != usual || got.header.Get(api.TimelineHeader) != "" || f.d[0].header(0).Get(api.TimelineHeader) != "1" {
			t.Errorf("%+v", got)
		}
		synctest.Wait()
		for _, id := range []string{"one", "mine"} { // by the router's id, and by the rid of the body
			r := f.history(id)
			if len(r.Attempts) != 1 || r.Attempts[0].Prefill.Report == nil || r.Attempts[0].Decode.Report == nil || r.Attempts[0].Prefill.Report.Attempts != nil {
				t.Fatalf("%s: %+v", id, r)
			}
			if r.Code != "ok" || r.Status != 200 || r.Prompt != 7 || r.Completion != 2 || r.Cached != 4 || r.Finish != "stop" || r.Bytes != int64(len(usual)) {
				t.Errorf("%+v", r)
			}
		}
		l := lastLine(t, log.String())
		line := l["timeline_ms"].(map[string]any)
		text := fmt.Sprintf("%v %v %v %v %v %v", l["request"], l["attempts"], l["completion_tokens"], line["router"], line["prefill"], line["decode"])
		want := "one 1 2 map[ended:23 first_token:20 last_token:22 queued:0 routed:0] map[first_layer:2 granted:3 last_page:4 queued:1]" +
			" map[first_token:5 granted:3 last_page:4 last_token:6 queued:1 resolved:2]"
		if text != want {
			t.Errorf("the line says\n%s, want\n%s", text, want)
		}
	})
}

// A worker that says nonsense of its way is not believed, and does no harm.
func TestHistoryRefusesNonsense(t *testing.T) {
	for _, says := range []string{"", "{", `{"timeline_ms":{"queued":-1}}`, `{"timeline_ms":{"queued":1e99}}`, `[]`, `{"error":"` + strings.Repeat("x", api.MaxTimeline) + `"}`} {
		inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
			f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
				w.Header().Set(api.TimelineHeader, says)
				answers(whole)(s, w, r, body)
			}
			if got := f.post("/generate", ask, "X-Request-Id", "one"); got.body != whole || got.header.Get(api.TimelineHeader) != "" {
				t.Errorf("%.40q: %+v", says, got)
			}
			if d := f.history("one").Attempts[0].Decode; d.Report != nil || d.Lost == "" {
				t.Errorf("%.40q: %+v", says, d)
			}
		})
	}
}

// A request that was tried again, and a stream that was moved, show both
// attempts with the cause; workers that could not tell at the end are asked.
func TestHistoryShowsAttempts(t *testing.T) {
	var log strings.Builder
	inFleet(t, 1, 3, func(c *Config) { c.Log = slog.New(slog.NewJSONHandler(&log, nil)) }, func(t *testing.T, f *fleet) {
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			time.Sleep(5 * time.Millisecond) // the prefill has its leg
			says(500, `{"object":"error","message":"boom","code":500}`)(s, w, r, body)
		}
		f.d[1].serve = breaking(5, 2, breaks["cut"])
		f.d[2].serve = tokens(5, nil)
		p := f.p[0].serve
		f.p[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if r.URL.Path == "/debug/requests" { // of the first attempt's leg, whose connection is gone
				_, room := rooms(t, f.p[0].requests()[0])
				fmt.Fprintf(w, `[{"role":"prefill","phase":"queued","room":"1"},{"role":"prefill","code":"aborted","room":"%d","timeline_ms":{"queued":3}}]`, room)
				return
			}
			p(s, w, r, body)
		}
		got := f.post("/v1/chat/completions", chat, "X-Request-Id", "one")
		if got.body != said(5)+api.Done {
			t.Fatalf("%+v", got)
		}
		r := f.history("one")
		var text []string
		for _, a := range r.Attempts {
			text = append(text, fmt.Sprintf("%d %s moved %v: %s | %s", a.Attempt, a.Decode.Worker, a.Moved, a.Cause, a.Decode.Fault))
		}
		want := []string{
			"1 http://d0:1 moved false: internal: decode http://d0:1 answered 500: boom | boom",
			"2 http://d1:1 moved false: decode_unreachable: decode http://d1:1: the answer broke off: the connection was closed | the answer broke off: the connection was closed",
			"3 http://d2:1 moved true:  | ",
		}
		if strings.Join(text, "\n") != strings.Join(want, "\n") {
			t.Errorf("the attempts\n%s\nwant\n%s", strings.Join(text, "\n"), strings.Join(want, "\n"))
		}
		if rep := r.Attempts[0].Prefill.Report; rep == nil || rep.Code != "aborted" || len(rep.Timeline.Moments()) != 1 {
			t.Errorf("what the first prefill says when it is asked: %+v", r.Attempts[0].Prefill)
		}
		if l := lastLine(t, log.String()); l["attempts"] != 3.0 || l["attempt_1"].(map[string]any)["cause"] == "" || l["decode"] != "http://d2:1" {
			t.Errorf("the line %v", l)
		}
	})
}

// A running request is found too, and what is kept is bounded.
func TestHistoryOfARunningRequest(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.r.ended = metric.NewRing[*history](mostEnded + 1)
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if r.Header.Get("X-Request-Id") == "one" {
				hang(s, w, r, body)
			}
			io.WriteString(w, whole)
		}
		done := make(chan reply)
		go func() { done <- f.post("/generate", ask, "X-Request-Id", "one", "X-Request-Timeout", "10s") }()
		time.Sleep(time.Second)
		if r := f.history("one"); r.Phase != "open" || r.Items != 1 || len(r.Attempts) != 1 || r.Code != "" {
			t.Errorf("%+v", r)
		}
		<-done
		if r := f.history("one"); r.Phase != "" || r.Code != "deadline_exceeded" || r.Status != 504 || r.Attempts[0].Cause == "" {
			t.Errorf("%+v", r)
		}
		for range mostEnded + 1 {
			f.post("/generate", ask)
		}
		if got := f.get("/debug/requests?rid=one"); got.body != "[]\n" {
			t.Errorf("after %d more: %s", mostEnded+1, got.body)
		}
		var rows []metric.Report
		if err := json.Unmarshal([]byte(f.get("/debug/requests?ended=999").body), &rows); err != nil || len(rows) != mostEnded {
			t.Errorf("%d rows, %v", len(rows), err)
		}
	})
}
