package router

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// forward passes a request that any one worker can answer to a usable one:
// decode's for the tokenizer, which is work, prefill's for facts, as SGLang's
// router does.
func (r *Router) forward(w http.ResponseWriter, req *http.Request) {
	prefer := Prefill
	var body []byte
	if req.Method == http.MethodPost {
		prefer = Decode
		var err error
		if body, err = io.ReadAll(http.MaxBytesReader(w, req.Body, r.cfg.MaxBody)); err != nil {
			e := api.BodyError(err)
			if _, ok := err.(*http.MaxBytesError); ok {
				e = tooLarge(r.cfg.MaxBody)
			}
			api.WriteError(w, e)
			return
		}
		http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
	ws, e := r.table.usable(r.now(), prefer)
	var a *answer
	for _, wk := range ws[:min(len(ws), factsTries)] { // one may be gone before a probe has found out
		if a, e = r.ask(req.Context(), wk, req, body); e == nil || req.Context().Err() != nil {
			break
		}
	}
	if e != nil {
		api.WriteError(w, e)
		return
	}
	copyHeader(w.Header(), a.header)
	w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	w.WriteHeader(a.status)
	w.Write(a.body)
}

// ask sends one request to one worker and reads its whole answer.
func (r *Router) ask(ctx context.Context, wk *worker, req *http.Request, body []byte) (*answer, *api.Error) {
	ctx, cancel := api.WithTimeout(ctx, factsTimeout, context.DeadlineExceeded)
	defer cancel()
	bad := func(err error) *api.Error {
		return api.Errorf(wk.role.unreachable(), "%s %s: %s", wk.role, wk.name, plainCause(ctx, err))
	}
	u := wk.url
	u.Path, u.RawQuery = req.URL.Path, req.URL.RawQuery
	out := (&http.Request{Method: req.Method, URL: &u, Header: r.peerHeader(req)}).WithContext(ctx)
	if body != nil {
		out.ContentLength, out.Body = int64(len(body)), io.NopCloser(bytes.NewReader(body))
	}
	resp, err := r.transport.RoundTrip(out)
	if err != nil {
		return nil, bad(err)
	}
	defer resp.Body.Close()
	if text := noAnswer(resp.StatusCode); text != "" {
		return nil, bad(errors.New(text))
	}
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, factsMax+1)); err != nil {
		return nil, bad(err)
	}
	if len(a.body) > factsMax {
		return nil, api.Errorf(wk.role.unreachable(), "%s %s: the answer is longer than %d bytes", wk.role, wk.name, factsMax)
	}
	return a, nil
}

// serverInfo gathers what every worker says of itself, by pool, as SGLang's
// router does.
func (r *Router) serverInfo(w http.ResponseWriter, req *http.Request) {
	all := r.table.all()
	infos := make([]json.RawMessage, len(all))
	var g errgroup.Group
	g.SetLimit(16)
	for i, wk := range all {
		g.Go(func() error {
			a, err := r.ask(req.Context(), wk, req, nil)
			if err == nil && (a.status != http.StatusOK || !json.Valid(a.body)) {
				err = api.Errorf(wk.role.unreachable(), "%s answered %d, not a JSON document", wk.name, a.status)
			}
			if err != nil {
				infos[i] = api.AppendErrorJSON(nil, err)
			} else {
				infos[i] = a.body
			}
			return nil
		})
	}
	g.Wait()
	n := 0
	for n < len(all) && all[n].role == Prefill {
		n++
	}
	writeJSON(w, map[string][]json.RawMessage{"prefill": infos[:n], "decode": infos[n:]})
}

// requestRow is a running request.
type requestRow struct {
	ID       string          `json:"id"`
	Path     string          `json:"path"`
	Phase    string          `json:"phase"`
	AgeS     float64         `json:"age_s"`
	PhaseS   float64         `json:"phase_age_s"`
	Attempt  int             `json:"attempt"`
	Prefill  string          `json:"prefill,omitempty"`
	Decode   string          `json:"decode,omitempty"`
	PrefillS string          `json:"prefill_leg"`
	DecodeS  string          `json:"decode_leg"`
	Body     int             `json:"prompt_bytes"`
	Items    int             `json:"items"`
	Timeline metric.Timeline `json:"timeline_ms"`
}

// rows is the table of running requests, the oldest first.
func (r *Router) rows() []requestRow {
	rows := []requestRow{}
	for _, x := range r.all() {
		x.mu.Lock()
		now := r.now()
		p := &x.pair
		one := requestRow{ID: x.id, Path: x.path, Phase: p.phase.String(), AgeS: (now - x.began).Seconds(), Attempt: p.attempt,
			PhaseS: (now - max(p.since, x.began)).Seconds(), Prefill: p.workers[Prefill], Decode: p.workers[Decode],
			PrefillS: p.legs[Prefill].String(), DecodeS: p.legs[Decode].String(), Timeline: x.history.snapshot().Timeline}
		if p.phase != phaseNew {
			one.Body, one.Items = x.scan.PromptBytes, x.items
		}
		x.mu.Unlock()
		rows = append(rows, one)
	}
	slices.SortFunc(rows, func(a, b requestRow) int { return cmp.Compare(b.AgeS, a.AgeS) })
	return rows
}

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		api.WriteError(w, api.Errorf(api.Internal, "%v", err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(b, '\n'))
}
