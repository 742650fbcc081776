package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
)

// startProbing gives each worker a prober, once the router runs.
func (r *Router) startProbing(workers []*worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.probing {
		return
	}
	for _, w := range workers {
		r.probers.Go(func() { r.probeWorker(r.base, w) })
	}
}

// A worker whose GET /health answers 200, but only after the time-out of a
// probe, is slow to say it, not dead: SGLang's generates a token and takes a
// second at the least, more when it is busy. Such an answer is waited for a
// while longer. While one has come of late, a probe also asks for /v1/models,
// which the worker's HTTP side answers alone, and that must come in time.
// Together they say as much as a quick /health: the process answers now, and
// its engine did a moment ago.
const (
	slowIntervals = 8               // intervals that an answer may take beyond the time-out
	slowMost      = 4 * time.Second // at most so long
)

// slowLimit is how long an answer of GET /health is waited for.
func (r *Router) slowLimit() time.Duration {
	return r.cfg.HealthTimeout + min(slowMost, slowIntervals*r.cfg.HealthEvery)
}

// probeWorker probes one worker at a fixed rate until ctx ends or it is no
// member any more and has no legs. Probes may overlap, so one that hangs does
// not delay the next; their number is bounded by how many fit into slowLimit.
func (r *Router) probeWorker(ctx context.Context, w *worker) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	room := make(chan struct{}, int(r.slowLimit()/r.cfg.HealthEvery)+2)
	tick := time.NewTicker(r.cfg.HealthEvery)
	defer tick.Stop()
	for {
		select {
		case room <- struct{}{}:
			seq := w.probes.Add(1)
			wg.Go(func() {
				r.probe(ctx, w, seq)
				<-room
			})
		default: // cannot be: each ends within slowLimit
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if r.table.forget(w) {
			return
		}
	}
}

// judgeProbe books the end of a probe and moves requests that wait for a worker
// that went out.
func (r *Router) judgeProbe(ctx context.Context, w *worker, seq uint64, fingerprint string, err error) {
	if ctx.Err() != nil {
		return // our own end says nothing about the worker
	}
	cause := ""
	if err != nil {
		cause = err.Error()
	}
	in, out := r.table.probed(r.now(), w, seq, fingerprint, cause)
	switch {
	case in:
		r.cfg.Log.Info("worker is in", "role", w.role.String(), "worker", w.name)
	case out:
		r.cfg.Log.Warn("worker is out", "role", w.role.String(), "worker", w.name, "cause", cause)
		r.workerOut(w)
	}
}

// probe asks a worker, and a prefill's bootstrap registry as well, whether they
// live: a prefill whose registry hangs would stall decodes that cannot protect
// themselves. It judges when the time-out is over at the latest, and goes on
// waiting for an answer that is slow.
func (r *Router) probe(ctx context.Context, w *worker, seq uint64) {
	long, cancel := api.WithTimeout(ctx, r.slowLimit(), context.DeadlineExceeded)
	defer cancel()
	short, cancel := api.WithTimeout(long, r.cfg.HealthTimeout, fmt.Errorf("no answer within %v", r.cfg.HealthTimeout))
	defer cancel()
	ask := func(ctx context.Context, base url.URL, token string) chan checked {
		c := make(chan checked, 1)
		go func() { c <- r.check(ctx, base, "/health", token, http.StatusOK) }()
		return c
	}
	var registry chan checked
	var front chan error
	host := w.bootstrapHost + ":" + strconv.Itoa(w.bootstrapPort)
	if w.role == Prefill && w.bootstrapPort != 0 {
		registry = ask(short, url.URL{Scheme: "http", Host: host}, "")
	}
	if r.table.isSlow(r.now(), w) {
		front = make(chan error, 1)
		go func() { front <- r.checkFront(short, w) }()
	}
	health := ask(long, w.url, r.cfg.PeerToken.Value())
	var got checked
	var err error
	slow := false
	select {
	case got = <-health:
		err = got.err
	case <-short.Done():
		slow = true
		err = fmt.Errorf("GET /health: %w", context.Cause(short))
		if front != nil {
			err = <-front
		}
	}
	if registry != nil {
		if e := (<-registry).err; e != nil {
			e = fmt.Errorf("bootstrap registry %s: %w", host, e)
			if err != nil {
				e = fmt.Errorf("%w; %w", err, e)
			}
			err = e
		}
	}
	r.judgeProbe(ctx, w, seq, got.fingerprint, err)
	if !slow {
		return
	}
	if got = <-health; got.err == nil && r.table.slow(r.now()+r.slowLimit(), w) {
		seq = w.probes.Add(1) // it is out: this is news
		short, cancel := api.WithTimeout(ctx, r.cfg.HealthTimeout, context.DeadlineExceeded)
		defer cancel()
		if r.checkFront(short, w) == nil && (registry == nil || (<-ask(short, url.URL{Scheme: "http", Host: host}, "")).err == nil) {
			r.judgeProbe(ctx, w, seq, got.fingerprint, nil)
		}
	}
}

// checkFront asks a worker for what its HTTP side answers alone. That it wants
// a token for it is an answer as well.
func (r *Router) checkFront(ctx context.Context, w *worker) error {
	return r.check(ctx, w.url, "/v1/models", r.cfg.PeerToken.Value(), http.StatusOK, http.StatusUnauthorized, http.StatusForbidden).err
}

// checked is what came of one GET: the fingerprint of the model that the other
// side has, if it tells, or what is wrong.
type checked struct {
	fingerprint string
	err         error
}

// check is one GET; any status but those of ok is an error.
func (r *Router) check(ctx context.Context, base url.URL, path, token string, ok ...int) checked {
	wrong := func(format string, args ...any) checked { return checked{err: fmt.Errorf(format, args...)} }
	base.Path = path
	req := (&http.Request{Method: http.MethodGet, URL: &base, Header: http.Header{}}).WithContext(ctx)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := r.probes.RoundTrip(req)
	if err != nil {
		return wrong("GET %s: %s", path, plainCause(ctx, err))
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)); err != nil {
		return wrong("GET %s: %s", path, plainCause(ctx, err))
	}
	if !slices.Contains(ok, resp.StatusCode) {
		return wrong("GET %s answered %d", path, resp.StatusCode)
	}
	f := resp.Header.Get(bootstrap.FingerprintHeader)
	if len(f) > maxFingerprint {
		return wrong("GET %s: the model fingerprint has %d bytes, at most %d are allowed", path, len(f), maxFingerprint)
	}
	return checked{fingerprint: f}
}

// maxFingerprint is the most bytes of a model fingerprint that are kept of a worker.
const maxFingerprint = 256

// plainCause is the part of a network error that tells something: the cause for
// which ctx ended, else the innermost error behind the dial's or read's.
func plainCause(ctx context.Context, err error) string {
	if ctx.Err() != nil {
		return context.Cause(ctx).Error()
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		if op.Op == "dial" {
			return "cannot connect: " + op.Err.Error()
		}
		return op.Err.Error()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "the connection was closed"
	}
	text := err.Error()
	if len(text) > causeMost {
		text = text[:causeMost] + "…" // net/http quotes the whole line of what is no HTTP
	}
	return text
}

const causeMost = 400 // bytes of a cause's text
