package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// history is what happened to one request: it outlives its exchange, in the
// ring of ended requests. Its line goes into the log when the client's goroutine
// and all prefill legs are through with it, so that it holds both legs.
type history struct {
	began time.Duration

	mu     sync.Mutex // held for a copy, never across anything that waits
	report metric.Report
	open   int // who may still add to it
}

// attemptsKept bounds what is kept of one request: its first attempt and the
// newest ones.
const attemptsKept = 8

func newHistory(x *exchange) *history {
	return &history{began: x.began, open: 1, report: metric.Report{Request: x.id, Role: "router", Path: x.path}}
}

func (h *history) mark(now time.Duration, m metric.Mark) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.report.Timeline.Set(m, now-h.began)
}

// routed: a pair is chosen, and both legs of the attempt go out.
func (h *history) routed(now time.Duration, a *attempt, room int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open++ // its prefill leg
	h.report.Timeline.Set(metric.Routed, now-h.began)
	one := metric.Attempt{Attempt: a.n, Moved: a.goesOn, Room: room,
		Prefill: metric.Leg{Worker: a.workers[Prefill].name}, Decode: metric.Leg{Worker: a.workers[Decode].name}}
	one.Timeline.Set(metric.Routed, now-h.began)
	if len(h.report.Attempts) == attemptsKept {
		h.report.Attempts = slices.Delete(h.report.Attempts, 1, 2)
	}
	h.report.Attempts = append(h.report.Attempts, one)
}

// over: the attempt that was current has come to its end; cause nil: well.
func (h *history) over(now time.Duration, cause *api.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.report.Attempts); n > 0 {
		a := &h.report.Attempts[n-1]
		a.Timeline.Set(metric.Ended, now-h.began)
		if cause != nil && a.Cause == "" {
			a.Cause = short(cause.Error())
		}
	}
}

// at is a leg of an attempt, nil when it is not kept any more.
func (h *history) at(attempt int, leg Leg) *metric.Leg {
	i := slices.IndexFunc(h.report.Attempts, func(a metric.Attempt) bool { return a.Attempt == attempt })
	switch {
	case i < 0:
		return nil
	case leg == Prefill:
		return &h.report.Attempts[i].Prefill
	}
	return &h.report.Attempts[i].Decode
}

// failed notes how a leg failed.
func (h *history) failed(attempt int, leg Leg, f *fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.at(attempt, leg); l != nil {
		l.Fault = short(f.text)
	}
}

// answered takes the worker's own report out of its answer, if it gave one.
func (h *history) answered(attempt int, leg Leg, resp *http.Response) {
	text := resp.Header.Get(api.TimelineHeader)
	if text == "" {
		text = resp.Trailer.Get(api.TimelineHeader)
	}
	r := new(metric.Report)
	if text == "" || len(text) > api.MaxTimeline || json.Unmarshal([]byte(text), r) != nil {
		return
	}
	r.Role, r.Attempts = leg.String(), nil
	r.Clip()
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.at(attempt, leg); l != nil {
		l.Report = r
	}
	if leg == Decode {
		us := &h.report
		us.RID, us.Finish, us.Prompt, us.Completion, us.Cached = r.RID, r.Finish, r.Prompt, r.Completion, r.Cached
	}
}

// ended notes how the request ended for its client.
func (h *history) ended(x *exchange, now time.Duration, status int, err *api.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.report
	r.Status, r.Code, r.Items, r.Bytes = status, "ok", x.items, x.sent
	if err != nil {
		r.Code, r.Error = string(err.Code), err.Message
	}
	if x.lastByte > 0 {
		r.Timeline.Set(metric.LastToken, x.lastByte-h.began)
	}
	r.Timeline.Set(metric.Ended, now-h.began)
	r.Clip()
}

// leave is called once by each who may add to the history. The last one's is
// the line in the log.
func (h *history) leave(log *slog.Logger) {
	h.mu.Lock()
	h.open--
	last := h.open == 0
	h.mu.Unlock()
	if last && log.Enabled(context.Background(), slog.LevelInfo) {
		log.LogAttrs(context.Background(), slog.LevelInfo, "request", h.report.Attrs()...) // nobody writes it any more
	}
}

// snapshot is the report as it stands, a copy.
func (h *history) snapshot() metric.Report {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.report
	r.Attempts = slices.Clone(r.Attempts)
	return r
}

func (h *history) is(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.report.Is(id)
}

// How much one question about requests may bring, and take.
const (
	mostEnded  = 100             // rows of ?ended=
	mostAlike  = 16              // requests of one id
	legTimeout = 2 * time.Second // for the workers to tell what they know
)

// debugRequests is the table of running requests, the oldest first; with ?rid=
// what is known of one request, here and at its workers; with ?ended= so many
// of those that ended last.
func (r *Router) debugRequests(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	rid := q.Get("rid")
	n, err := strconv.Atoi(q.Get("ended"))
	switch {
	case rid != "":
		list := r.about(rid)
		r.askLegs(req.Context(), list)
		writeJSON(w, list)
	case err == nil:
		list := []metric.Report{}
		for _, h := range r.ended.Newest(min(n, mostEnded), func(*history) bool { return true }) {
			list = append(list, h.snapshot())
		}
		writeJSON(w, list)
	default:
		writeJSON(w, r.rows())
	}
}

// about is what the router itself knows of a request: running ones of the id,
// then those that ended, the newest first.
func (r *Router) about(rid string) []metric.Report {
	list, seen := []metric.Report{}, map[*history]bool{}
	for _, x := range r.all() {
		if !x.history.is(rid) {
			continue
		}
		seen[x.history] = true
		x.mu.Lock()
		one := x.history.snapshot()
		if one.Phase = x.pair.phase.String(); x.pair.phase != phaseNew {
			one.Items = x.items
		}
		x.mu.Unlock()
		list = append(list, one)
	}
	for _, h := range r.ended.Newest(mostAlike, func(h *history) bool { return !seen[h] && h.is(rid) }) {
		list = append(list, h.snapshot())
	}
	return list[:min(len(list), mostAlike)]
}

// askLegs asks the workers of legs that gave no report for what they know.
func (r *Router) askLegs(ctx context.Context, list []metric.Report) {
	ctx, cancel := context.WithTimeout(ctx, legTimeout)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(16)
	for i := range list {
		for j := range list[i].Attempts {
			a := &list[i].Attempts[j]
			for _, l := range []*metric.Leg{&a.Prefill, &a.Decode} {
				if l.Report != nil {
					continue
				}
				g.Go(func() error {
					var err error
					if l.Report, err = r.askLeg(ctx, l.Worker, list[i].Request, a.Room); err != nil {
						l.Lost = short(err.Error())
					}
					return nil
				})
			}
		}
	}
	g.Wait()
}

func (r *Router) askLeg(ctx context.Context, worker, id string, room int64) (*metric.Report, error) {
	u, err := url.Parse(worker)
	if err != nil {
		return nil, err
	}
	u.Path, u.RawQuery = "/debug/requests", url.Values{"rid": {id}}.Encode()
	req := (&http.Request{Method: http.MethodGet, URL: u, Header: http.Header{}}).WithContext(ctx)
	if token := r.cfg.PeerToken.Value(); token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := r.probes.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("%s", plainCause(ctx, err))
	}
	defer resp.Body.Close()
	var rows []metric.Report
	body, err := io.ReadAll(io.LimitReader(resp.Body, factsMax))
	if err != nil {
		return nil, fmt.Errorf("%s", plainCause(ctx, err))
	}
	if resp.StatusCode != http.StatusOK || json.Unmarshal(body, &rows) != nil {
		return nil, fmt.Errorf("GET /debug/requests answered %d", resp.StatusCode)
	}
	for i := range rows {
		if one := &rows[i]; one.Room == room {
			one.Attempts = nil
			one.Clip()
			return one, nil
		}
	}
	return nil, fmt.Errorf("the worker knows nothing of it: it was started anew, or has seen %d requests since", metric.Kept)
}
