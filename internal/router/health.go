package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"
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

// probeWorker probes one worker at a fixed rate until ctx ends or it is no
// member any more and has no legs. Probes may
// overlap, so one that hangs does not delay the next; their number is bounded
// by how many fit into the time-out.
func (r *Router) probeWorker(ctx context.Context, w *worker) {
	var wg sync.WaitGroup
	defer wg.Wait()
	room := make(chan struct{}, int(r.cfg.HealthTimeout/r.cfg.HealthEvery)+2)
	tick := time.NewTicker(r.cfg.HealthEvery)
	defer tick.Stop()
	for seq := uint64(1); ; seq++ {
		select {
		case room <- struct{}{}:
			wg.Go(func() {
				r.judgeProbe(ctx, w, seq, r.probe(ctx, w))
				<-room
			})
		default: // cannot be: each ends within the time-out
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
func (r *Router) judgeProbe(ctx context.Context, w *worker, seq uint64, err error) {
	if ctx.Err() != nil {
		return // our own end says nothing about the worker
	}
	cause := ""
	if err != nil {
		cause = err.Error()
	}
	in, out := r.table.probed(r.now(), w, seq, cause)
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
// themselves.
func (r *Router) probe(ctx context.Context, w *worker) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.cfg.HealthTimeout, fmt.Errorf("no answer within %v", r.cfg.HealthTimeout))
	defer cancel()
	registry := make(chan error, 1)
	if w.role == Prefill && w.bootstrapPort != 0 {
		host := w.bootstrapHost + ":" + strconv.Itoa(w.bootstrapPort)
		go func() {
			err := r.checkHealth(ctx, url.URL{Scheme: "http", Host: host}, "")
			if err != nil {
				err = fmt.Errorf("bootstrap registry %s: %w", host, err)
			}
			registry <- err
		}()
	} else {
		registry <- nil
	}
	err := r.checkHealth(ctx, w.url, r.cfg.PeerToken)
	other := <-registry
	if err != nil && other != nil {
		return fmt.Errorf("%w; %w", err, other)
	}
	return cmp.Or(err, other)
}

// checkHealth is one GET /health; anything but 200 is an error.
func (r *Router) checkHealth(ctx context.Context, base url.URL, token string) error {
	base.Path = "/health"
	req := (&http.Request{Method: http.MethodGet, URL: &base, Header: http.Header{}}).WithContext(ctx)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := r.probes.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("GET /health: %s", plainCause(ctx, err))
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)); err != nil {
		return fmt.Errorf("GET /health: %s", plainCause(ctx, err))
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /health answered %d", resp.StatusCode)
	}
	return nil
}

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
	return err.Error()
}
