package worker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/model"
	"github.com/metronome-serve/metronome/internal/sched"
)

// ReadyLine is what a worker says of itself when it can serve.
type ReadyLine struct {
	Ready     bool     `json:"ready"`
	Role      Role     `json:"role"`
	HTTP      string   `json:"http"`
	Bootstrap string   `json:"bootstrap,omitempty"`
	KV        []string `json:"kv,omitempty"`
	PID       int      `json:"pid"`
	Instance  string   `json:"instance"`
}

// ExitError is why Run returned when the process must end with a status other
// than 0.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return e.Err.Error() }
func (e *ExitError) Unwrap() error { return e.Err }

// Worker is one prefill, decode or serve process.
type Worker struct {
	cfg      Config
	log      *slog.Logger
	clock    clock
	metrics  *metric.Set
	instance string

	file    *model.File // nil with the sim engine
	engines []engine.Engine
	loops   []*loop
	peers   *peernet // decode
	prefill *prefillNet

	http    net.Listener
	closers []func() // in reverse order: what New took

	ids   atomic.Uint64
	phase atomic.Int32  // a phase… value
	ended chan struct{} // capacity 1: a loop has no open job any more
	broke chan error    // capacity 1: what ends Run at once
	cause error         // that, set before phaseFailed
	ready chan ReadyLine
	allow func(host string) bool // nil: any host

	// front is the HTTP side; Run serves it.
	front http.Handler
}

// Phases of a worker.
const (
	phaseStarting int32 = iota
	phaseReady
	phaseDraining
	phaseFailed
)

// openBeyond is how many jobs may be open beyond those that run or queue: on
// decode those whose peer is not known yet, on prefill those under delivery.
const openBeyond = 4096

// New checks the configuration, loads the model, takes the memory and binds
// the listeners, so that an error is one of usage. Nothing runs before Run.
func New(cfg Config) (_ *Worker, err error) {
	cfg.defaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	w := &Worker{
		cfg: cfg, log: cfg.Log, clock: newClock(), metrics: metric.New(string(cfg.Role)), instance: rand.Text(),
		ended: make(chan struct{}, 1), broke: make(chan error, 1), ready: make(chan ReadyLine, 1),
	}
	defer func() {
		if err != nil {
			w.release()
		}
	}()
	if w.allow, err = bootstrap.ParseAllow(cfg.BootstrapAllow); err != nil {
		return nil, fmt.Errorf("--bootstrap-allow: %w", err)
	}
	if err := w.load(); err != nil {
		return nil, err
	}
	if w.http, err = cfg.bind("--listen", cfg.Listen); err != nil {
		return nil, err
	}
	w.onClose(func() { w.http.Close() })
	for rank := range cfg.DP {
		w.loops = append(w.loops, w.newLoop(rank))
	}
	switch cfg.Role {
	case Prefill:
		err = w.wirePrefill()
	case Decode:
		err = w.wireDecode()
	case Serve:
		w.wireServe()
	}
	if err != nil {
		return nil, err
	}
	w.front, err = newFront(w)
	return w, err
}

func (w *Worker) onClose(f func()) { w.closers = append(w.closers, f) }

// release gives back what New took, the last first.
func (w *Worker) release() {
	for _, f := range slices.Backward(w.closers) {
		f()
	}
	w.closers = nil
}

func (w *Worker) newLoop(rank int) *loop {
	in := newInbox()
	return &loop{
		worker: w, clock: w.clock, rank: rank, in: in, stop: make(chan struct{}), done: make(chan struct{}),
		timer: time.NewTimer(idleTurn), open: map[sched.ReqID]*request{}, engine: newBatcher(w.engines[rank], in, w.clock, w.broken),
		metrics: w.metrics, overrun: w.metrics.LoopOverrun.With("turn"), gauges: newGauges(w.metrics), codes: newCodes(w.metrics),
	}
}

// Ready receives one line when the worker can serve (a prefill: when it is registered).
func (w *Worker) Ready() <-chan ReadyLine { return w.ready }

// Config is what the worker runs with, defaults filled in.
func (w *Worker) Config() *Config { return &w.cfg }

// Model is the model file, nil with the sim engine.
func (w *Worker) Model() *model.File { return w.file }

// Vocab is the number of token ids.
func (w *Worker) Vocab() int { return w.engines[0].Vocab() }

// PoolTokens is how many tokens the KV pages of one DP rank hold.
func (w *Worker) PoolTokens() int { return w.cfg.KVPages * w.cfg.PageSize }

// Instance is this process's id, random at every start.
func (w *Worker) Instance() string { return w.instance }

// Fingerprint is the engine's: what the bits of an answer depend on.
func (w *Worker) Fingerprint() string { return w.engines[0].Fingerprint() }

// Metrics are this process's.
func (w *Worker) Metrics() *metric.Set { return w.metrics }

func (w *Worker) nextID() sched.ReqID { return sched.ReqID(w.ids.Add(1)) }

// Submit takes a job. nil: taken, and exactly one End follows in its Box.
func (w *Worker) Submit(j *Job) *api.Error {
	err := w.submit(j)
	if err != nil {
		w.metrics.Requests.With(string(err.Code)).Inc()
	}
	return err
}

func (w *Worker) submit(j *Job) *api.Error {
	if err := w.checkJob(j); err != nil {
		return err
	}
	l := w.place(j)
	if n := l.jobs.Add(1); n > int64(w.cfg.MaxRunning+w.cfg.MaxQueued+openBeyond) {
		l.release()
		return &api.Error{Code: api.Overloaded, Message: fmt.Sprintf("%d requests are open, no more are taken", n-1), RetryAfter: time.Second}
	}
	// After the reservation: either the drain sees this job, or this sees the drain.
	if err := w.closed(); err != nil {
		l.release()
		return err
	}
	now := w.clock.now()
	deadline := w.cfg.RequestTimeout
	if !j.Deadline.IsZero() {
		deadline = time.Until(j.Deadline)
	}
	j.id, j.loop = w.nextID(), l
	q := newRequest(j, now, now+deadline)
	if !j.SeedSet && w.cfg.Role != Decode {
		q.sampling.Seed = drawSeed()
	}
	l.in.push(q)
	return nil
}

// release gives a reservation back.
func (l *loop) release() {
	if l.jobs.Add(-1) == 0 {
		l.worker.emptied()
	}
}

// place chooses the DP rank: a prefill's is the one that the job names, for
// decode goes there, or follows from the room, as the registry tells everybody;
// the others take the rank with the fewest open jobs.
func (w *Worker) place(j *Job) *loop {
	switch {
	case w.cfg.Role == Prefill && j.DPRank >= 0:
		return w.loops[j.DPRank]
	case w.cfg.Role == Prefill:
		return w.loops[j.Room%int64(len(w.loops))]
	}
	return slices.MinFunc(w.loops, func(a, b *loop) int { return cmp.Compare(a.jobs.Load(), b.jobs.Load()) })
}

// checkJob refuses what would hurt others inside: the engine takes a batch
// whole or not at all.
func (w *Worker) checkJob(j *Job) *api.Error {
	switch {
	case len(j.Prompt) == 0:
		return api.Errorf(api.InvalidRequest, "the prompt is empty")
	case j.MaxTokens < 0:
		return api.Errorf(api.InvalidRequest, "max tokens is %d: at least 0", j.MaxTokens)
	case j.ScorePrompt && (j.ScoreFrom < 0 || j.ScoreFrom >= len(j.Prompt)):
		return api.Errorf(api.InvalidRequest, "log-probabilities from token %d on of a prompt of %d", j.ScoreFrom, len(j.Prompt))
	case j.Said < 0 || j.Said >= len(j.Prompt) || j.Said > 0 && !j.SeedSet:
		return api.Errorf(api.InvalidRequest, "an answer goes on after %d of %d tokens, seed %v: it needs a prompt and its seed", j.Said, len(j.Prompt), j.SeedSet)
	case (j.Room < 0) != (w.cfg.Role == Serve):
		return api.Errorf(api.InvalidRequest, "room %d on a %s worker", j.Room, w.cfg.Role)
	case w.cfg.Role == Prefill && j.DPRank >= len(w.loops):
		return api.Errorf(api.InvalidRequest, "the request names DP rank %d of a prefill worker that has %d (0 … %d)", j.DPRank, len(w.loops), len(w.loops)-1)
	case len(j.Prompt)+j.MaxTokens > w.cfg.Context:
		return api.Errorf(api.ContextLengthExceeded, "a prompt of %d tokens and %d more do not fit the context of %d", len(j.Prompt), j.MaxTokens, w.cfg.Context)
	}
	if i := badToken(j.Prompt, w.Vocab()); i >= 0 {
		return api.Errorf(api.InvalidRequest, "prompt token %d is %d, the vocabulary has %d", i, j.Prompt[i], w.Vocab())
	}
	if err := j.Sampling.Check(w.Vocab()); err != nil {
		return api.Errorf(api.InvalidRequest, "%v", err)
	}
	if w.cfg.Role != Decode {
		return nil
	}
	host, port, err := net.SplitHostPort(j.Addr)
	if n, err2 := strconv.Atoi(port); err != nil || err2 != nil || n < 1 || n > 65535 || host == "" {
		return api.Errorf(api.InvalidRequest, "bootstrap address %q is not host:port", j.Addr)
	}
	if w.allow != nil && !w.allow(host) {
		return api.Errorf(api.Forbidden, "bootstrap host %q is not in --bootstrap-allow", host)
	}
	return nil
}

// Abort ends a taken job with this cause, in whatever phase it is. It never
// blocks; a job that has ended ignores it.
func (w *Worker) Abort(j *Job, cause *api.Error) {
	j.loop.in.push(&sched.Abort{Req: j.id, Cause: schedError(cause)})
}

// StopAt is the verdict of a job's reader: the answer ends before output token
// index (a stop string was met), counted with those of j.Said. It never blocks.
func (w *Worker) StopAt(j *Job, index int) {
	j.loop.in.push(&sched.StopAt{Req: j.id, Index: index - j.Said})
}

// closed says why no job is taken now: the worker has never been ready yet, or
// it stops. nil: it takes jobs.
func (w *Worker) closed() *api.Error {
	switch w.phase.Load() {
	case phaseStarting:
		return &api.Error{Code: api.Starting, Message: "the worker is starting", RetryAfter: time.Second}
	case phaseDraining:
		return &api.Error{Code: api.Draining, Message: "the worker is draining", RetryAfter: time.Second}
	case phaseFailed:
		return &api.Error{Code: api.Draining, Message: "the worker failed and ends: " + w.cause.Error(), RetryAfter: time.Second}
	}
	return nil
}

// Status says whether the worker should get new work: nil, or a starting or
// draining error that says why not. A prefill whose registry has lost it or
// hangs is not ready, but goes on serving whoever knows it.
func (w *Worker) Status() *api.Error {
	if err := w.closed(); err != nil {
		return err
	}
	return w.unregistered()
}

func (w *Worker) unregistered() *api.Error {
	if w.prefill == nil {
		return nil
	}
	ok, err := w.prefill.registrar.Ready()
	if ok {
		return nil
	}
	return &api.Error{Code: api.Starting, Message: fmt.Sprintf("not registered at the bootstrap registry: %v", err), RetryAfter: time.Second}
}

// Ticked says whether every loop has turned, and every engine that has a batch
// has got on with it, within the health window. nil: they have.
func (w *Worker) Ticked() *api.Error {
	now, window := w.clock.now(), w.cfg.HealthWindow
	for _, l := range w.loops {
		what := ""
		switch {
		case now-time.Duration(l.turn.last.Load()) > window:
			what = "the loop has not turned"
		case l.engine.stuck(now, window):
			what = "the engine has finished no layer of its batch"
		default:
			continue
		}
		return api.Errorf(api.Internal, "%s for %v", what, window).With(http.StatusServiceUnavailable)
	}
	return nil
}

// emptied says that a loop has no open job any more. It never blocks.
func (w *Worker) emptied() {
	select {
	case w.ended <- struct{}{}:
	default:
	}
}

// Run serves until ctx ends, then drains: it takes no new jobs, waits for the
// open ones at most Config.Drain, ends the rest with a named error and
// returns when every goroutine has. What cannot heal (a fatal mismatch, a
// listener that died, a model that is gone) ends it with *ExitError within a second.
func (w *Worker) Run(ctx context.Context) error {
	defer w.release()
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var g sync.WaitGroup
	front := w.start(serving, &g)
	var err error
	select {
	case <-ctx.Done():
		w.phase.Store(phaseDraining)
		w.drain(w.cfg.Drain)
		w.endAll(w.stopCause())
	case cause := <-w.broke:
		err = &ExitError{Code: 1, Err: cause}
		w.fail(cause)
	}
	w.stop(front)
	stop()
	g.Wait()
	return err
}

// fail takes no new jobs and ends every open one by the name of the cause.
func (w *Worker) fail(cause error) {
	w.cause = cause
	w.phase.Store(phaseFailed)
	w.log.Error("the worker failed and ends", "cause", cause)
	var e *sched.Error
	if !errors.As(cause, &e) {
		e = &sched.Error{Code: sched.Internal, Message: "the worker failed: " + cause.Error()}
	}
	w.endAll(e)
}

// How long the last answers may take on their way out. Together they stay
// within the second that a fatal mismatch may take.
const (
	endWait   = 250 * time.Millisecond // for the cores to end every request
	flushWait = 500 * time.Millisecond // for HTTP handlers to write their last bytes
)

// startLoops starts the loops and what they drive inside the process. Loops,
// engines and the peer network end by stop, the watchers with ctx.
func (w *Worker) startLoops(ctx context.Context, g *sync.WaitGroup) {
	for _, l := range w.loops {
		g.Go(func() { l.labelled(ctx) })
		g.Go(l.engine.run)
		watch := &watcher{clock: w.clock, log: w.log, name: l.name(), turn: &l.turn}
		g.Go(func() { watch.run(ctx) })
	}
	if w.peers != nil {
		g.Go(w.peers.run)
	}
}

// start starts every goroutine of the worker.
func (w *Worker) start(ctx context.Context, g *sync.WaitGroup) *http.Server {
	w.startLoops(ctx, g)
	front := &http.Server{
		Handler: w.front, ReadHeaderTimeout: headerWait, MaxHeaderBytes: maxHeader, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(w.log.Handler(), slog.LevelDebug),
	}
	g.Go(func() {
		if err := front.Serve(api.LookingTwice(w.http)); !errors.Is(err, http.ErrServerClosed) {
			w.broken(fmt.Errorf("HTTP server: %w", err))
		}
	})
	g.Go(func() { w.announce(ctx) })
	if w.prefill != nil {
		w.prefill.start()
	}
	return front
}

// broken ends Run with this error: once, however often it is called. It never blocks.
func (w *Worker) broken(err error) {
	select {
	case w.broke <- err:
	default:
	}
}

// announce says once that the worker can serve.
func (w *Worker) announce(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for w.unregistered() != nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
	if w.phase.CompareAndSwap(phaseStarting, phaseReady) {
		w.ready <- w.readyLine()
	}
}

func (w *Worker) readyLine() ReadyLine {
	r := ReadyLine{Ready: true, Role: w.cfg.Role, PID: os.Getpid(), Instance: w.instance}
	if addr, err := w.cfg.hostPort(w.http); err == nil {
		r.HTTP = "http://" + addr
	}
	if w.prefill != nil {
		r.Bootstrap, r.KV = w.prefill.addr, w.prefill.kv
	}
	return r
}

// drain waits until no job is open.
func (w *Worker) drain(wait time.Duration) {
	t := time.NewTimer(wait)
	defer t.Stop()
	for w.openJobs() > 0 {
		select {
		case <-w.ended:
		case <-t.C:
			return
		}
	}
}

func (w *Worker) openJobs() (n int64) {
	for _, l := range w.loops {
		n += l.jobs.Load()
	}
	return n
}

// stopCause ends what a drain had no time for.
func (w *Worker) stopCause() *sched.Error {
	return &sched.Error{Code: sched.Draining, Message: fmt.Sprintf("the worker stops: the request had not ended within %v", w.cfg.Drain), RetryAfter: time.Second}
}

// endAll ends every open job with this cause.
func (w *Worker) endAll(cause *sched.Error) {
	for _, l := range w.loops {
		l.in.push(&abortAll{cause})
	}
	w.drain(endWait)
}

// stop ends what start has started, from the outside in: first the callers,
// then the loops, then what the loops use.
func (w *Worker) stop(front *http.Server) {
	flush, cancel := context.WithTimeout(context.Background(), flushWait)
	defer cancel()
	if front.Shutdown(flush) != nil {
		front.Close()
	}
	w.stopLoops()
}

// stopLoops ends the loops, then what the loops use: first those who touch KV
// memory from outside, last the engines that own it.
func (w *Worker) stopLoops() {
	for _, l := range w.loops {
		close(l.stop)
		<-l.done
	}
	if w.peers != nil {
		w.peers.close()
	}
	if w.prefill != nil {
		w.prefill.stop()
	}
	for _, l := range w.loops {
		if l.decode != nil && l.decode.receiver != nil {
			l.decode.receiver.Close()
		}
		l.engine.close()
	}
}
