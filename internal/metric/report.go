package metric

import (
	"log/slog"
	"sync"
)

// Report is what one process knows of one request: a line of its access log, a
// row of GET /debug/requests?rid=, and what a worker gives to its router.
type Report struct {
	Request    string    `json:"request"`               // X-Request-Id
	RID        string    `json:"rid,omitempty"`         // of the first answer, where it is another (/generate's rid)
	Role       string    `json:"role"`                  // router, prefill, decode or serve
	Path       string    `json:"path,omitempty"`        //
	Phase      string    `json:"phase,omitempty"`       // while it runs; "" when it has ended
	Status     int       `json:"status,omitempty"`      // HTTP status that was sent; 499: nobody was there
	Code       string    `json:"code,omitempty"`        // "ok" or the error's
	Error      string    `json:"error,omitempty"`       //
	Finish     string    `json:"finish,omitempty"`      // stop, length, prefilled
	Items      int       `json:"items,omitempty"`       // answers; the timeline is that of the one that ended last
	Room       int64     `json:"room,omitempty,string"` // of the first answer
	Prompt     int       `json:"prompt_tokens"`         //
	Completion int       `json:"completion_tokens"`     //
	Cached     int       `json:"cached_tokens"`         // of the prompt, from the prefix cache
	Preempted  int       `json:"preempted,omitempty"`   // times that its pages were taken, to be computed again
	Bytes      int64     `json:"bytes,omitempty"`       // router: sent to the client
	Timeline   Timeline  `json:"timeline_ms"`
	Attempts   []Attempt `json:"attempts,omitempty"` // router
}

// Attempt is one try of a pair of workers.
type Attempt struct {
	Attempt  int      `json:"attempt"`         // from 1
	Moved    bool     `json:"moved,omitempty"` // it went on with the stream of the one before
	Room     int64    `json:"room,string"`     // of the first answer; pairs its legs
	Timeline Timeline `json:"timeline_ms"`     // the router's, since it saw the request: routed, ended
	Cause    string   `json:"cause,omitempty"` // why it was given up
	Prefill  Leg      `json:"prefill"`
	Decode   Leg      `json:"decode"`
}

// Leg is one leg of an attempt.
type Leg struct {
	Worker string  `json:"worker"`           // URL
	Fault  string  `json:"fault,omitempty"`  // how it failed, as the router saw it
	Report *Report `json:"report,omitempty"` // the worker's; nil: it gave none
	Lost   string  `json:"lost,omitempty"`   // why there is none
}

// How much of a text a report keeps.
const (
	maxID   = 128
	maxText = 512
)

// Clip bounds the report's texts: what it keeps must not grow with what a
// client or a peer sends.
func (r *Report) Clip() {
	for _, s := range []*string{&r.Request, &r.RID, &r.Role, &r.Path, &r.Phase, &r.Code, &r.Finish} {
		*s = clip(*s, maxID)
	}
	r.Error = clip(r.Error, maxText)
}

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n-3] + "…"
	}
	return s
}

// Is tells whether the report is of the request with this id.
func (r *Report) Is(id string) bool {
	return r.Request == id || r.RID != "" && r.RID == clip(id, maxID)
}

// LogValue is the timeline in milliseconds.
func (t Timeline) LogValue() slog.Value {
	var attrs []slog.Attr
	for _, m := range t.Moments() {
		attrs = append(attrs, slog.Float64(m.Mark.String(), ms(m.At)))
	}
	return slog.GroupValue(attrs...)
}

// Attrs are the line of the access log, the same words in every role.
func (r *Report) Attrs() []slog.Attr {
	took, _ := r.Timeline.At(Ended)
	attrs := make([]slog.Attr, 0, 24)
	attrs = append(attrs, slog.String("request", r.Request))
	if r.RID != "" {
		attrs = append(attrs, slog.String("rid", r.RID))
	}
	attrs = append(attrs, slog.String("role", r.Role), slog.String("path", r.Path), slog.Int("status", r.Status), slog.String("code", r.Code),
		slog.String("finish", r.Finish), slog.Int("items", r.Items), slog.Int("prompt_tokens", r.Prompt),
		slog.Int("completion_tokens", r.Completion), slog.Int("cached_tokens", r.Cached), slog.Float64("took_ms", ms(took)))
	if r.Preempted > 0 {
		attrs = append(attrs, slog.Int("preempted", r.Preempted))
	}
	if r.Error != "" {
		attrs = append(attrs, slog.String("error", r.Error))
	}
	if r.Role != "router" {
		return append(attrs, slog.Any("timeline_ms", r.Timeline))
	}
	return r.routed(attrs)
}

// routed adds what a router knows: both legs of the last attempt, and why those
// before it were given up.
func (r *Report) routed(attrs []slog.Attr) []slog.Attr {
	attrs = append(attrs, slog.Int64("bytes", r.Bytes), slog.Int("attempts", len(r.Attempts)))
	lines := []any{slog.Any("router", r.Timeline)}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if i < len(r.Attempts)-1 {
			attrs = append(attrs, slog.Group("attempt_"+string(rune('0'+a.Attempt%10)), "prefill", a.Prefill.Worker, "decode", a.Decode.Worker, "cause", a.Cause))
			continue
		}
		attrs = append(attrs, slog.String("prefill", a.Prefill.Worker), slog.String("decode", a.Decode.Worker))
		if p := a.Prefill.Report; p != nil {
			lines = append(lines, slog.Any("prefill", p.Timeline))
		}
		if d := a.Decode.Report; d != nil {
			lines = append(lines, slog.Any("decode", d.Timeline))
		}
	}
	return append(attrs, slog.Group("timeline_ms", lines...))
}

// Ring keeps the newest things of a kind, so many and no more.
type Ring[T any] struct {
	mu    sync.Mutex // held for a copy, never across anything that waits
	slots []T
	n     int // added in all
}

// Kept is how many ended requests a process remembers.
const Kept = 1024

// NewRing keeps so many.
func NewRing[T any](size int) *Ring[T] { return &Ring[T]{slots: make([]T, size)} }

// Add puts v in place of the oldest.
func (r *Ring[T]) Add(v T) {
	r.mu.Lock()
	r.slots[r.n%len(r.slots)] = v
	r.n++
	r.mu.Unlock()
}

// Newest are at most n things for which want holds, the newest first.
func (r *Ring[T]) Newest(n int, want func(T) bool) (list []T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range min(r.n, len(r.slots)) {
		if v := r.slots[(r.n-1-i)%len(r.slots)]; len(list) < n && want(v) {
			list = append(list, v)
		}
	}
	return list
}
