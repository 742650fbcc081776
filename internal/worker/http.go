package worker

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// Limits of the HTTP side.
const (
	maxBody      = 32 << 20
	maxHeader    = 64 << 10
	headerWait   = 10 * time.Second // for the whole request head
	bodyWait     = 60 * time.Second // for the whole body
	writeWait    = 30 * time.Second // for one write to a client that reads nothing
	maxRequestID = 128
)

// httpSide is everything a worker answers over HTTP. Its handlers run on
// net/http's goroutines: they parse, tokenise and write, and talk to the loop
// through Submit, Abort, StopAt and their boxes alone.
type httpSide struct {
	w          *Worker
	cfg        Config
	text       textCodec
	tokens     api.Tokens
	context    int // tokens of prompt and answer
	poolTokens int // tokens that the KV pool holds
	name       string
	started    time.Time

	mu   sync.Mutex // held for a look at the table only
	jobs map[*Job]struct{}

	ended *metric.Ring[metric.Report]
}

// servedName is the model's name in answers: --served-name, or what the file is called.
func (c *Config) servedName() string {
	if c.ServedName != "" {
		return c.ServedName
	}
	return strings.TrimSuffix(filepath.Base(c.Model), ".gguf")
}

// newFront is the HTTP side of a worker.
func newFront(w *Worker) (http.Handler, error) {
	h := &httpSide{w: w, cfg: *w.Config(), tokens: w.cfg.Tokens, context: w.cfg.Context, poolTokens: w.PoolTokens(),
		name: w.cfg.servedName(), started: time.Now(), jobs: map[*Job]struct{}{}, ended: metric.NewRing[metric.Report](metric.Kept)}
	if f := w.Model(); f != nil {
		text, err := newModelText(f)
		if err != nil {
			return nil, err
		}
		h.text = text
	} else {
		h.text = byteText{size: w.Vocab()}
	}
	return h.handler(), nil
}

// handler routes the paths of docs/http.md.
func (h *httpSide) handler() http.Handler {
	mux := http.NewServeMux()
	route := func(method, path string, f http.HandlerFunc) {
		mux.HandleFunc(method+" "+path, f)
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", method)
			api.WriteError(w, api.Errorf(api.MethodNotAllowed, "%s takes %s, not %s", path, method, r.Method))
		})
	}
	route("POST", "/v1/chat/completions", h.generation(api.ParseChat))
	route("POST", "/v1/completions", h.generation(api.ParseCompletion))
	route("POST", "/generate", h.generation(api.ParseGenerate))
	mux.HandleFunc("PUT /generate", h.generation(api.ParseGenerate)) // SGLang takes both
	route("GET", "/v1/models", h.models)
	route("GET", "/model_info", h.modelInfo)
	route("GET", "/get_model_info", h.modelInfo)
	route("GET", "/server_info", h.serverInfo)
	route("GET", "/get_server_info", h.serverInfo)
	route("POST", "/tokenize", h.tokenize)
	route("POST", "/detokenize", h.detokenize)
	route("GET", "/tokenizer_info", h.tokenizerInfo)
	route("POST", "/abort_request", h.abortRequest)
	route("GET", "/livez", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	route("GET", "/readyz", h.readyz)
	route("GET", "/health", h.health)
	route("GET", "/health_generate", h.healthGenerate)
	route("GET", "/metrics", h.w.Metrics().Handler().ServeHTTP)
	route("GET", "/debug/requests", h.debugRequests)
	route("GET", "/debug/peers", h.debugPeers)
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		api.WriteError(w, api.Errorf(api.NotFound, "there is no %s here", r.URL.Path))
	})
	return h.guard(mux)
}

// open are the paths that need no token: probes of load balancers.
var open = map[string]bool{"/livez": true, "/readyz": true, "/health": true, "/health_generate": true}

// guard gives each request its id, and refuses callers without a token.
func (h *httpSide) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		if !validRequestID(id) {
			id = rand.Text()
		}
		w.Header().Set("X-Request-Id", id)
		api.BoundBody(w, r, bodyWait)
		if err := h.authorize(r); err != nil {
			api.WriteError(w, err)
			return
		}
		r.Header.Set("X-Request-Id", id)
		next.ServeHTTP(w, r)
	})
}

func (h *httpSide) authorize(r *http.Request) *api.Error {
	switch {
	case open[r.URL.Path]:
		return nil
	case strings.HasPrefix(r.URL.Path, "/debug/"):
		return h.tokens.AuthorizeDebug(r)
	}
	return h.tokens.Authorize(r.Header.Get("Authorization"))
}

func validRequestID(id string) bool {
	if id == "" || len(id) > maxRequestID {
		return false
	}
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return false
		}
	}
	return true
}

// body reads a request body within its bounds of size and time. guard has set
// the bound of time, which ends with the body.
func body(w http.ResponseWriter, r *http.Request) ([]byte, *api.Error) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, api.Errorf(api.BodyTooLarge, "the body is larger than %d bytes", maxBody)
	case err != nil:
		return nil, api.BodyError(err)
	}
	http.NewResponseController(w).SetReadDeadline(time.Time{})
	return data, nil
}

// generation is the handler of the three paths that make tokens.
func (h *httpSide) generation(parse func([]byte) (*api.Request, *api.Error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		e := h.enter(w, r)
		defer e.close()
		if err := h.generate(w, r, parse, e); err != nil {
			if e.cs == nil { // it came to no job, which would be counted
				h.w.Metrics().Requests.With(string(err.Code)).Inc()
			}
			e.settle(err)
			api.WriteError(w, err)
		}
	}
}

func (h *httpSide) generate(w http.ResponseWriter, r *http.Request, parse func([]byte) (*api.Request, *api.Error), e *entry) *api.Error {
	limit, err := api.TimeLimit(r.Header.Get(api.TimeoutHeader), h.cfg.RequestTimeout)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(limit)
	api.BoundBody(w, r, min(bodyWait, limit))
	data, err := body(w, r)
	if err != nil {
		return err
	}
	req, err := parse(data)
	if err != nil {
		return err
	}
	if err := h.mayResume(r, req); err != nil {
		return err
	}
	rid := r.Header.Get("X-Request-Id")
	wake := make(chan struct{}, 1)
	cs, err := h.makeJobs(req, rid, deadline, wake)
	if err != nil {
		return err
	}
	e.cs = cs
	defer h.forget(cs)
	for i, c := range cs {
		if c.done {
			continue
		}
		c.job.Request, c.job.seen = e.report.Request, e.seen
		if err := h.w.Submit(c.job); err != nil {
			h.abort(cs[:i], err)
			return err
		}
		h.remember(c.job)
	}
	created := time.Now().Unix()
	if req.Journal != nil {
		created = req.Journal.Created
	}
	var form dialect = &openAI{req: req, id: rid, model: h.name, created: created, text: h.text}
	if req.Kind == api.Generate {
		ids := make([]string, len(cs))
		for i, c := range cs {
			ids[i] = c.job.RID
		}
		form = &sglang{req: req, ids: ids, deltas: h.cfg.StreamOutput, text: h.text}
	}
	if req.Stream {
		return h.stream(r.Context(), e, form, wake, newJournal(w, r, req, created, cs))
	}
	return h.whole(r.Context(), e, form, wake)
}

// remember keeps an open job for /abort_request.
func (h *httpSide) remember(j *Job) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.jobs[j] = struct{}{}
}

func (h *httpSide) forget(cs []*choice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range cs {
		delete(h.jobs, c.job)
	}
}

// abortRID ends the open jobs of this exact id, or all, and says how many.
func (h *httpSide) abortRID(rid string, all bool) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for j := range h.jobs {
		if all || j.RID == rid {
			h.w.Abort(j, errAborted)
			n++
		}
	}
	return n
}

var errAborted = api.Errorf(api.Aborted, "aborted by /abort_request")

// abort ends what is still open of a request.
func (h *httpSide) abort(cs []*choice, cause *api.Error) {
	for _, c := range cs {
		if !c.done {
			h.w.Abort(c.job, cause)
		}
	}
}

var errClientGone = api.Errorf(api.ClientGone, "the client went away")

// collect takes items until every answer has ended. each is called after each
// item with the new text; ended says that the answer is complete. It returns
// the first error of an answer; the others are aborted then.
func (h *httpSide) collect(ctx context.Context, cs []*choice, wake <-chan struct{}, each func(c *choice, token bool, delta string) error) *api.Error {
	open := 0
	for _, c := range cs {
		if !c.done {
			open++
		}
	}
	for {
		for _, c := range cs {
			for !c.done {
				it, ok := c.job.Box.TryNext()
				if !ok {
					break
				}
				delta, stopAt := c.take(it)
				if stopAt >= 0 {
					h.w.StopAt(c.job, stopAt)
				}
				if c.err != nil {
					h.abort(cs, c.err)
					return c.err
				}
				if err := each(c, it.End == nil, delta); err != nil {
					h.abort(cs, errClientGone)
					return errClientGone
				}
				if c.done {
					open--
				}
			}
		}
		if open == 0 {
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			h.abort(cs, errClientGone)
			return errClientGone
		}
	}
}

func (h *httpSide) whole(ctx context.Context, e *entry, form dialect, wake <-chan struct{}) *api.Error {
	if err := h.collect(ctx, e.cs, wake, func(*choice, bool, string) error { return nil }); err != nil {
		return err
	}
	e.settle(nil)
	return writeJSON(e.w, form.whole(e.cs))
}

// stream writes one event per token, each in one write. Nothing is written
// before the first token, so that an early failure still gets its status.
func (h *httpSide) stream(ctx context.Context, e *entry, form dialect, wake <-chan struct{}, j *journal) *api.Error {
	cs, out := e.cs, newEventWriter(e.w)
	last := func(c *choice, delta string) error {
		for _, v := range form.last(c, delta) {
			if err := out.event(j.last(c), v); err != nil {
				return err
			}
		}
		return nil
	}
	for _, c := range cs {
		if c.done && !c.told {
			last(c, c.rest) // a client that is gone shows below
		}
	}
	err := h.collect(ctx, cs, wake, func(c *choice, token bool, delta string) error {
		if token {
			if err := out.event(j.token(c), form.event(c, delta)); err != nil {
				return err
			}
			delta = ""
		}
		if !c.done {
			return nil
		}
		return last(c, delta)
	})
	e.begun = out.begun
	switch {
	case err == nil:
		if u := form.usage(cs); u != nil {
			out.event(j.usage(), u)
		}
		out.raw([]byte("data: [DONE]\n\n"))
		e.begun = true
		e.settle(nil)
		return nil
	case !out.begun:
		return err
	case err != errClientGone:
		out.raw(append(api.AppendErrorJSON([]byte("data: "), err), "\n\n"...))
	}
	e.settle(err)
	// The stream ends without [DONE]: the connection must not be used again.
	panic(http.ErrAbortHandler)
}

// eventWriter writes server-sent events, each with the comment line before it:
// one write and one flush each. Its memory is used again for each.
type eventWriter struct {
	w     http.ResponseWriter
	ctl   *http.ResponseController
	buf   eventBuffer
	enc   *json.Encoder // into buf
	begun bool
	until time.Time // the write deadline that is set
}

type eventBuffer []byte

func (b *eventBuffer) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

func newEventWriter(w http.ResponseWriter) *eventWriter {
	e := &eventWriter{w: w, ctl: http.NewResponseController(w)}
	e.enc = json.NewEncoder(&e.buf)
	return e
}

// event writes "data: ", the JSON, an empty line.
func (e *eventWriter) event(comment []byte, v any) error {
	e.buf = append(append(e.buf[:0], comment...), "data: "...)
	if err := e.enc.Encode(v); err != nil { // it ends the line
		return err
	}
	e.buf = append(e.buf, '\n')
	return e.raw(e.buf)
}

func (e *eventWriter) raw(data []byte) error {
	if !e.begun {
		e.begun = true
		hd := e.w.Header()
		hd.Set("Content-Type", "text/event-stream; charset=utf-8")
		hd.Set("Cache-Control", "no-cache")
		e.w.WriteHeader(http.StatusOK)
	}
	// Set anew only when half of it has gone: a timer for each event is dear.
	if now := time.Now(); now.Add(writeWait / 2).After(e.until) {
		e.until = now.Add(writeWait)
		e.ctl.SetWriteDeadline(e.until)
	}
	if _, err := e.w.Write(data); err != nil {
		return err
	}
	return e.ctl.Flush()
}

func writeJSON(w http.ResponseWriter, v any) *api.Error {
	data, err := json.Marshal(v)
	if err != nil {
		return api.Errorf(api.Internal, "the answer cannot be written as JSON: %v", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(data, '\n'))
	return nil
}
