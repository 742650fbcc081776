package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"
)

// RegistrarConfig is what a Registrar needs to know. Zero takes the default in brackets.
type RegistrarConfig struct {
	Client  *Client
	Addr    string         // of the registry
	Ranks   []Registration // all ranks of this prefill worker
	Timeout time.Duration  // of one PUT, total [3s]
	Probe   time.Duration  // of one check, total [1s]
	Check   time.Duration  // mean time between two checks [4s]
	Wait    time.Duration  // mean wait after the first failure; doubles with each [1s]
	WaitMax time.Duration  // bound of the mean wait [5s]
	Stale   time.Duration  // unreachable for so long: not ready any more [10s]
	Seed    uint64         // of the jitter [random]
	Log     *slog.Logger   // [discard]
}

// Registrar keeps one prefill worker registered: it registers all ranks, asks
// every few seconds whether the registry still knows them, and registers again
// when the registry restarted empty or speaks of another instance. One try is
// in flight at a time, each with a deadline. Waits grow and spread evenly over
// half to one and a half of their mean, so that many prefills whose registry
// comes back do not call in step.
//
// Run it on one goroutine; Ready may be called from any.
type Registrar struct {
	cfg  RegistrarConfig
	rand *rand.Rand

	mu    sync.Mutex
	ready bool
	cause error // why not ready
}

// NewRegistrar makes a registrar that is not ready yet.
func NewRegistrar(cfg RegistrarConfig) *Registrar {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&cfg.Timeout, 3 * time.Second}, {&cfg.Probe, time.Second}, {&cfg.Check, 4 * time.Second},
		{&cfg.Wait, time.Second}, {&cfg.WaitMax, 5 * time.Second}, {&cfg.Stale, 10 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Registrar{
		cfg:   cfg,
		rand:  rand.New(rand.NewPCG(cfg.Seed, 0)),
		cause: errors.New("not registered yet"),
	}
}

// Ready says whether the registry knows all our ranks, else why not.
func (r *Registrar) Ready() (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ready {
		return true, nil
	}
	return false, fmt.Errorf("bootstrap registry %s: %w", r.cfg.Addr, r.cause)
}

// Run keeps the worker registered until ctx ends.
func (r *Registrar) Run(ctx context.Context) {
	registered := false
	failures := 0
	good := time.Now() // of the last good check
	for ctx.Err() == nil {
		err := r.turn(ctx, &registered)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			failures, good = 0, time.Now()
			r.become(true, nil)
			r.pause(ctx, r.cfg.Check)
		default:
			failures++
			// One failure alone may be of a check that we cut by standing still.
			if !registered || failures > 1 && time.Since(good) >= r.cfg.Stale {
				r.become(false, err)
			}
			r.pause(ctx, r.backoff(failures))
		}
	}
}

// turn makes sure once that the registry knows us. A registry that cannot be
// reached leaves registered as it is: it may know us still.
func (r *Registrar) turn(ctx context.Context, registered *bool) error {
	if *registered {
		err := r.check(ctx)
		var lost *lostError
		if err == nil || !errors.As(err, &lost) {
			return err
		}
		*registered = false
		r.become(false, err)
		r.cfg.Log.Warn("bootstrap registry has lost this worker, registering again", "registry", r.cfg.Addr, "cause", err)
	}
	for _, rank := range r.cfg.Ranks {
		try, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
		err := r.cfg.Client.Register(try, r.cfg.Addr, rank)
		cancel()
		if err != nil {
			return fmt.Errorf("registering rank %v: %w", rank.Rank, err)
		}
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	*registered = true
	return nil
}

// lostError: the registry lives and does not know us.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// check asks whether the registry knows all ranks of this worker. One that
// tells no instance (SGLang's) is asked for the address of our first rank: it
// keeps the sizes of whoever registered first.
func (r *Registrar) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Probe)
	defer cancel()
	first := r.cfg.Ranks[0]
	info, err := r.cfg.Client.FetchInfo(ctx, r.cfg.Addr)
	var status *StatusError
	switch {
	case errors.As(err, &status):
		return &lostError{err}
	case err != nil:
		return err
	case info.Instance != "" && info.Instance == first.Instance:
		return nil
	case info.Instance != "":
		return &lostError{fmt.Errorf("it serves the prefill instance %s, ours is %s", info.Instance, first.Instance)}
	}
	want := net.JoinHostPort(first.IP, strconv.Itoa(first.Port))
	target, err := r.cfg.Client.LookupRank(ctx, r.cfg.Addr, first.Rank.DP, first.Rank.CP, first.Rank.TP, first.Rank.PP)
	switch {
	case errors.As(err, &status):
		return &lostError{err}
	case err != nil:
		return err
	case target != want:
		return &lostError{fmt.Errorf("it has %s for rank %v, ours is %s", target, first.Rank, want)}
	}
	return nil
}

// backoff is the mean wait after so many failures in a row.
func (r *Registrar) backoff(failures int) time.Duration {
	return min(r.cfg.Wait<<min(failures-1, 16), r.cfg.WaitMax)
}

// pause waits half to one and a half of the mean.
func (r *Registrar) pause(ctx context.Context, mean time.Duration) {
	t := time.NewTimer(mean/2 + time.Duration(r.rand.Int64N(int64(mean))))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (r *Registrar) become(ready bool, cause error) {
	r.mu.Lock()
	changed := ready != r.ready || !ready && (r.cause == nil || r.cause.Error() != cause.Error())
	r.ready, r.cause = ready, cause
	r.mu.Unlock()
	switch {
	case !changed:
	case ready:
		r.cfg.Log.Info("registered at the bootstrap registry", "registry", r.cfg.Addr, "ranks", len(r.cfg.Ranks))
	default:
		r.cfg.Log.Warn("not registered at the bootstrap registry", "registry", r.cfg.Addr, "cause", cause)
	}
}
