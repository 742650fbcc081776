package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

const (
	headerMax      = 64 << 10
	headerTimeout  = 10 * time.Second
	workerIdle     = 4 * time.Second // a pooled connection; below the 5 s after which SGLang's server closes one
	clientIdle     = 2 * time.Minute
	closeGrace     = time.Second
	factsTimeout   = 5 * time.Second // of a GET that a worker answers for us
	factsTries     = 3               // workers that are asked for what any one can answer
	factsMax       = 4 << 20
	requestIDBytes = 128
)

// Router is the HTTP front of one fleet.
type Router struct {
	cfg       Config
	table     *table
	metrics   *metric.Set
	pool      *legPool          // legs without TLS
	transport http.RoundTripper // legs with TLS, and what one worker alone is asked for
	probes    http.RoundTripper // a pool of its own: a busy leg's connection is no probe's
	start     time.Time
	handler   http.Handler

	base     context.Context // ends when nothing is to run any more
	stop     context.CancelFunc
	legs     sync.WaitGroup // prefill legs in flight
	probers  sync.WaitGroup // one for each worker, and who watches the leases
	draining atomic.Bool
	bodies   atomic.Int64 // bytes of bodies held

	setting sync.Mutex // one change of the members at a time
	leases  leases     // under setting

	mu      sync.Mutex
	live    map[*exchange]struct{}
	budget  budget
	pace    pace
	probing bool // between the start and the end of Run

	ended *metric.Ring[*history]
}

// New makes a router from a checked configuration. The error says what is wrong
// with it and what would be right.
func New(cfg Config) (*Router, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	r := &Router{cfg: cfg, metrics: metric.New("router"), start: time.Now(), live: map[*exchange]struct{}{}, budget: newBudget(),
		leases: leases{length: cfg.Lease}, ended: metric.NewRing[*history](metric.Kept)}
	var err error
	if r.table, err = newTable(&cfg, r.metrics); err != nil {
		return nil, err
	}
	r.base, r.stop = context.WithCancel(context.Background())
	dial := r.dialer()
	r.pool, r.transport, r.probes = newLegPool(dial), newTransport(dial), newTransport(dial)
	r.handler = r.routes()
	return r, nil
}

// dialer gives what opens connections to workers, within dialTimeout.
func (r *Router) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	dial := r.cfg.Dial
	if dial == nil {
		dial = newDialer().dial
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := api.WithTimeout(ctx, dialTimeout, fmt.Errorf("cannot connect within %v", dialTimeout))
		defer cancel()
		c, err := dial(ctx, network, addr)
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return c, err
	}
}

// newTransport is a pool of connections to workers: HTTP/1.1, no compression,
// no cap on their number, small packets sent at once (Go's default).
func newTransport(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext:            dial,
		TLSHandshakeTimeout:    dialTimeout,
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
		DisableCompression:     true,
		MaxIdleConnsPerHost:    idleMost,
		IdleConnTimeout:        workerIdle,
		MaxResponseHeaderBytes: headerMax,
	}
}

// now is the time since start.
func (r *Router) now() time.Duration { return time.Since(r.start) }

// Metrics is the router's set, for whoever adds to it.
func (r *Router) Metrics() *metric.Set { return r.metrics }

// Run serves on ln until ctx ends. Then it is not ready at once, refuses new
// requests, lets running ones finish within cfg.Drain, ends the rest by name,
// and returns. A Router runs once.
func (r *Router) Run(ctx context.Context, ln net.Listener) error {
	r.setting.Lock()
	r.setProbing(true)
	r.startProbing(r.table.all())
	r.setting.Unlock()
	r.probers.Go(func() { r.watchLeases(r.base) })
	srv := &http.Server{
		Handler:           r.handler,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       clientIdle,
		MaxHeaderBytes:    headerMax,
		ErrorLog:          slog.NewLogLogger(r.cfg.Log.Handler(), slog.LevelDebug),
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState:         closeFlagged,
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(clientListener{api.LookingTwice(ln)}) }()
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
		r.drain()
		shut, cancel := context.WithTimeout(context.Background(), closeGrace)
		if srv.Shutdown(shut) != nil {
			srv.Close()
		}
		cancel()
		<-failed
	}
	r.endAll() // nothing starts a leg from here on
	r.setProbing(false)
	r.stop()
	r.legs.Wait()
	r.probers.Wait()
	r.pool.close()
	r.transport.(*http.Transport).CloseIdleConnections()
	r.probes.(*http.Transport).CloseIdleConnections()
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("router: %w", err)
	}
	return nil
}

func (r *Router) setProbing(on bool) {
	r.mu.Lock()
	r.probing = on
	r.mu.Unlock()
}

// SetWorkers makes these the members of the pools; the strings are those of
// Config. Who stays keeps its standing and its requests. Who is new is probed
// first and used then. Who is not named any more gets no new request once
// another one of its pool is usable, and its requests run to their end. Calls
// take effect in their order. After an error nothing has changed.
func (r *Router) SetWorkers(prefill, decode []string) error {
	lists, err := parseWorkers(prefill, decode)
	if err != nil {
		return err
	}
	r.setting.Lock()
	defer r.setting.Unlock()
	r.table.given = lists
	r.setMembers()
	return nil
}

// drain waits for running requests and ends those that take too long.
func (r *Router) drain() {
	r.draining.Store(true)
	r.cfg.Log.Info("draining", "requests", r.running(), "limit", r.cfg.Drain)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end, stopped := r.now()+r.cfg.Drain, false; r.running() > 0; <-tick.C {
		if now := r.now(); now >= end && !stopped {
			stopped = true
			r.endAll()
		} else if now >= end+closeGrace {
			return
		}
	}
}

// endAll ends what is running by name and lets nothing in.
func (r *Router) endAll() {
	r.draining.Store(true)
	for _, x := range r.all() {
		x.step(event{kind: evStop})
	}
}

// mayRetry tells whether the budget that all requests share has a further
// attempt, and takes it.
func (r *Router) mayRetry() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.budget.take()
}

// overloaded refuses a request, with a Retry-After from the pace at which
// requests end.
func (r *Router) overloaded(format string, args ...any) *api.Error {
	e := api.Errorf(api.Overloaded, format, args...)
	now := r.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	e.RetryAfter = r.pace.retryAfter(now, len(r.live))
	return e
}

func (r *Router) running() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.live)
}

func (r *Router) all() []*exchange {
	r.mu.Lock()
	defer r.mu.Unlock()
	xs := make([]*exchange, 0, len(r.live))
	for x := range r.live {
		xs = append(xs, x)
	}
	return xs
}

// workerOut moves the requests that wait for a worker whose probes fail.
func (r *Router) workerOut(w *worker) {
	for _, x := range r.all() {
		x.workerOut(w)
	}
}

// clientListener hands out connections that can be told to close after the
// answer in hand.
type clientListener struct{ net.Listener }

func (l clientListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &clientConn{Conn: c}, nil
}

type clientConn struct {
	net.Conn
	closing atomic.Bool
}

type connKey struct{}

// closeAfter closes the client's connection once the answer is out: a stream
// that failed ends so, although its last chunk is in order.
func closeAfter(req *http.Request) {
	if c, ok := req.Context().Value(connKey{}).(*clientConn); ok {
		c.closing.Store(true)
	}
}

func closeFlagged(c net.Conn, s http.ConnState) {
	if cc, ok := c.(*clientConn); ok && s == http.StateIdle && cc.closing.Load() {
		cc.Close()
	}
}

// routes is every path that the router serves.
func (r *Router) routes() http.Handler {
	mux := http.NewServeMux()
	handle := func(path string, methods []string, h http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
			for _, m := range methods {
				if req.Method == m {
					h(w, req)
					return
				}
			}
			w.Header().Set("Allow", methods[0])
			api.WriteError(w, api.Errorf(api.MethodNotAllowed, "%s does not take %s; use %s", path, req.Method, methods[0]))
		})
	}
	get, post := []string{http.MethodGet, http.MethodHead}, []string{http.MethodPost}
	guard := func(h http.HandlerFunc) http.HandlerFunc { return r.guard(h, false) }
	debug := func(h http.HandlerFunc) http.HandlerFunc { return r.guard(h, true) }

	handle("/v1/chat/completions", post, guard(r.generate(api.Chat)))
	handle("/v1/completions", post, guard(r.generate(api.Completion)))
	handle("/generate", []string{http.MethodPost, http.MethodPut}, guard(r.generate(api.Generate)))
	handle("/tokenize", post, guard(r.forward))
	handle("/detokenize", post, guard(r.forward))
	for _, path := range []string{"/v1/models", "/model_info", "/get_model_info", "/tokenizer_info"} {
		handle(path, get, guard(r.forward))
	}
	handle("/server_info", get, guard(r.serverInfo))
	handle("/get_server_info", get, guard(r.serverInfo))
	handle(membersPath, []string{http.MethodPut, http.MethodDelete}, r.members)
	handle("/livez", get, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	handle("/readyz", get, r.ready)
	handle("/health", get, r.ready)
	handle("/metrics", get, guard(r.metrics.Handler().ServeHTTP))
	handle("/debug/requests", get, debug(r.debugRequests))
	handle("/debug/workers", get, debug(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, r.table.rows()) }))
	handle("/debug/pprof/", get, debug(pprof.Index))
	handle("/debug/pprof/cmdline", get, debug(pprof.Cmdline))
	handle("/debug/pprof/profile", get, debug(pprof.Profile))
	handle("/debug/pprof/symbol", append(get, http.MethodPost), debug(pprof.Symbol))
	handle("/debug/pprof/trace", get, debug(pprof.Trace))
	mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		api.WriteError(w, api.Errorf(api.NotFound, "there is no %s here", req.URL.Path))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		id := requestID(req)
		req.Header["X-Request-Id"] = []string{id}
		w.Header()["X-Request-Id"] = req.Header["X-Request-Id"]
		api.BoundBody(w, req, r.cfg.BodyTimeout)
		mux.ServeHTTP(w, req)
	})
}

// requestID is the client's, if it is short and visible ASCII, else a new one.
func requestID(req *http.Request) string {
	id := req.Header.Get("X-Request-Id")
	if id == "" || len(id) > requestIDBytes {
		return newID()
	}
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' {
			return newID()
		}
	}
	return id
}

func newID() string {
	const hex = "0123456789abcdef"
	var b [32]byte
	for i := 0; i < len(b); i += 16 {
		for v, k := rand.Uint64(), 0; k < 16; k++ {
			b[i+k] = hex[v>>(4*k)&15]
		}
	}
	return string(b[:])
}

// guard lets callers in who present a token. debug is for pages that without
// any token are for callers on this machine only.
func (r *Router) guard(h http.HandlerFunc, debug bool) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		err := r.cfg.Tokens.Authorize(req.Header.Get("Authorization"))
		if debug {
			err = r.cfg.Tokens.AuthorizeDebug(req)
		}
		if err != nil {
			api.WriteError(w, err)
			return
		}
		h(w, req)
	}
}

// ready answers /readyz and /health: a usable prefill and a usable decode, and
// not draining. The body says why not.
func (r *Router) ready(w http.ResponseWriter, req *http.Request) {
	why := r.table.notReady(r.now())
	if r.draining.Load() {
		why = "the router is stopping"
	}
	if why != "" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, "not ready: "+why+"\n")
		return
	}
	io.WriteString(w, "ready\n")
}

// peerHeader is the header that goes to workers: the client's end-to-end
// headers, its id, and the token that workers know. The client's own token goes
// on only when it was not for us.
func (r *Router) peerHeader(req *http.Request) http.Header {
	h := make(http.Header, len(req.Header)+2)
	copyHeader(h, req.Header)
	delete(h, "Accept-Encoding") // answers are looked into
	delete(h, api.TimeoutHeader)
	switch token := r.cfg.PeerToken.Value(); {
	case token != "":
		h["Authorization"] = []string{"Bearer " + token}
	case !r.cfg.Tokens.Empty():
		delete(h, "Authorization")
	}
	return h
}
