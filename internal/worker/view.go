package worker

import (
	"context"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
)

// RequestRow is one request in the live table.
type RequestRow struct {
	Request  string          `json:"request"`
	RID      string          `json:"rid"`
	Phase    string          `json:"phase"`
	Age      float64         `json:"age_seconds"`
	Prompt   int             `json:"prompt_tokens"`
	Output   int             `json:"output_tokens"`
	Room     int64           `json:"room"`
	DP       int             `json:"dp_rank"`
	Addr     string          `json:"bootstrap,omitempty"`
	Timeline metric.Timeline `json:"timeline_ms"`
}

// PeerRow is one bootstrap address in the live table of one decode core.
type PeerRow struct {
	Addr     string   `json:"addr"`
	DP       int      `json:"dp_rank"`
	State    string   `json:"state"`
	Instance string   `json:"instance,omitempty"`
	Attempts int      `json:"attempts"`
	InFlight []string `json:"in_flight"`
	Links    int      `json:"links"`
	Waiting  int      `json:"waiting"`
	Linked   int      `json:"linked"`
	Granted  int      `json:"granted"`
	Failures int      `json:"heartbeat_failures"`
	Last     string   `json:"last_error,omitempty"`
}

// Requests is the live table of requests. The loops answer between two turns;
// ctx bounds the wait.
func (w *Worker) Requests(ctx context.Context) ([]RequestRow, error) {
	return table(ctx, w, func(l *loop) []RequestRow { return l.requests() })
}

// Peers is the live table of what the decode cores know of each prefill.
func (w *Worker) Peers(ctx context.Context) ([]PeerRow, error) {
	return table(ctx, w, func(l *loop) []PeerRow { return l.peerRows() })
}

// AbortRID ends the jobs with this request id, or all, and says how many.
func (w *Worker) AbortRID(rid string, all bool, cause *api.Error) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	ids, err := table(ctx, w, func(l *loop) []sched.ReqID { return l.abortRID(rid, all, schedError(cause)) })
	if err != nil {
		return 0
	}
	return len(ids)
}

// table asks every loop and joins the answers.
func table[R any](ctx context.Context, w *Worker, ask func(*loop) []R) ([]R, error) {
	rows := []R{}
	for _, l := range w.loops {
		var reply []R // the loop's until done
		done := make(chan struct{})
		l.in.push(&question{func(l *loop) {
			reply = ask(l)
			close(done)
		}})
		select {
		case <-done:
			rows = append(rows, reply...)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return rows, nil
}

// sorted is the loop's open requests, the oldest first.
func (l *loop) sorted() []*request {
	qs := make([]*request, 0, len(l.open))
	for _, q := range l.open {
		qs = append(qs, q)
	}
	slices.SortFunc(qs, func(a, b *request) int { return int(a.id) - int(b.id) })
	return qs
}

func (l *loop) requests() []RequestRow {
	now := l.clock.now()
	var rows []RequestRow
	for _, q := range l.sorted() {
		q.stamp(l.times(q.id))
		r := RequestRow{
			RID: "recompute", Phase: l.phase(q.id), Age: (now - q.began).Seconds(),
			Prompt: len(q.prompt), Output: q.emitted, Room: q.room, DP: l.rank, Timeline: q.timeline,
		}
		if q.job != nil {
			r.Request, r.RID, r.Addr = q.job.Request, q.job.RID, q.job.Addr
		}
		rows = append(rows, r)
	}
	return rows
}

func (l *loop) abortRID(rid string, all bool, cause *sched.Error) (ids []sched.ReqID) {
	now := l.clock.now()
	for _, q := range l.sorted() {
		if q.job != nil && (all || q.job.RID == rid) {
			l.step(now, &sched.Abort{Req: q.id, Cause: cause})
			ids = append(ids, q.id)
		}
	}
	return ids
}

// times are what the cores know of a request's way.
func (l *loop) times(id sched.ReqID) sched.Times {
	if l.decode == nil {
		return l.prefill.core.Times(id)
	}
	return l.decode.core.Times(id)
}

// phase is where a request stands, in whichever core has it.
func (l *loop) phase(id sched.ReqID) string {
	if l.decode != nil {
		if p := l.decode.core.Phase(id); p != 0 {
			return p.String()
		}
	}
	if l.prefill != nil {
		if p := l.prefill.core.Phase(id); p != 0 {
			return p.String()
		}
	}
	return "ended"
}

func (l *loop) peerRows() []PeerRow {
	if l.decode == nil || l.decode.peers == nil {
		return nil
	}
	var rows []PeerRow
	for _, r := range l.decode.core.PeerTable() {
		rows = append(rows, PeerRow{
			Addr: r.Addr, DP: l.rank, State: r.State, Instance: r.Instance, Attempts: r.Attempts, InFlight: r.InFlight,
			Links: r.Links, Waiting: r.Waiting, Linked: r.Linked, Granted: r.Granted, Failures: r.Failures, Last: r.Error,
		})
	}
	return rows
}
