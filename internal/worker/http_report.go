package worker

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// entry is one request for tokens on its way through the HTTP side. At its end
// it is a line of the access log, and kept for GET /debug/requests?rid=.
type entry struct {
	h       *httpSide
	w       http.ResponseWriter
	seen    time.Duration
	asked   bool // a router wants the report
	begun   bool // the answer's head is out
	settled bool
	cs      []*choice
	report  metric.Report
}

func (h *httpSide) enter(w http.ResponseWriter, r *http.Request) *entry {
	return &entry{h: h, w: w, seen: h.w.clock.now(), asked: r.Header.Get(api.TimelineHeader) != "",
		report: metric.Report{Request: r.Header.Get("X-Request-Id"), Role: string(h.cfg.Role), Path: r.URL.Path, Status: http.StatusOK, Code: "ok"}}
}

// settle says how the request ended (nil: well), and gives the report to the
// router that asked for it: in the answer's head, or after its body if that has
// begun.
func (e *entry) settle(err *api.Error) {
	e.settled = true
	r := &e.report
	if err != nil {
		r.Code, r.Error = string(err.Code), err.Message
		if !e.begun {
			r.Status = err.HTTPStatus()
		}
	}
	u := usageOf(e.cs)
	r.Items, r.Prompt, r.Completion, r.Cached = len(e.cs), u.Prompt, u.Completion, u.Details.Cached
	var last time.Duration
	for i, c := range e.cs {
		if i == 0 {
			r.Room = max(c.job.Room, 0)
			if c.job.RID != r.Request {
				r.RID = c.job.RID
			}
		}
		line := c.job.Box.Timeline()
		if at, _ := line.At(metric.LastToken); i == 0 || at > last {
			last, r.Timeline, r.Finish = at, line, c.finish
		}
	}
	if r.Finish != "" && e.h.cfg.Role == Prefill {
		r.Finish = EndPrefilled
	}
	r.Timeline.Set(metric.Ended, e.h.w.clock.now()-e.seen)
	r.Clip()
	if !e.asked {
		return
	}
	if text, err := json.Marshal(r); err == nil {
		key := api.TimelineHeader
		if e.begun {
			key = http.TrailerPrefix + key
		}
		e.w.Header()[key] = []string{string(text)}
	}
}

// close is called once at the end, also of a stream that breaks off.
func (e *entry) close() {
	if !e.settled {
		e.settle(api.Errorf(api.Internal, "the answer broke off"))
	}
	e.h.ended.Add(e.report)
	e.h.w.log.LogAttrs(context.Background(), slog.LevelInfo, "request", e.report.Attrs()...)
}

// mostRows bounds what ?ended= and ?rid= list.
const mostRows = 100

// debugRequests is the live table; with ?rid= what is known of one request,
// running or ended; with ?ended= so many of those that ended last.
func (h *httpSide) debugRequests(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	q := r.URL.Query()
	if n, err := strconv.Atoi(q.Get("ended")); err == nil {
		rows := h.ended.Newest(min(n, mostRows), func(metric.Report) bool { return true })
		writeJSON(w, append([]metric.Report{}, rows...))
		return
	}
	h.debug(w, func() (any, error) {
		rows, err := h.w.Requests(ctx)
		if rid := q.Get("rid"); rid != "" {
			return h.about(rid, rows, err)
		}
		return rows, err
	})
}

// about is what is known of one request: its running answers, then those of its
// id that have ended, the newest first.
func (h *httpSide) about(rid string, rows []RequestRow, err error) ([]metric.Report, error) {
	list := []metric.Report{}
	for _, row := range rows {
		r := metric.Report{Request: row.Request, RID: row.RID, Role: string(h.cfg.Role), Phase: row.Phase, Items: 1, Room: max(row.Room, 0),
			Prompt: row.Prompt, Completion: row.Output, Timeline: row.Timeline}
		if r.Clip(); r.Is(rid) && len(list) < mostRows {
			list = append(list, r)
		}
	}
	list = append(list, h.ended.Newest(mostRows, func(r metric.Report) bool { return r.Is(rid) })...)
	if len(list) > 0 {
		err = nil
	}
	return list, err
}
