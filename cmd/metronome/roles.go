package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/router"
	"github.com/metronome-serve/metronome/internal/worker"
)

// logQueue is the number of log lines that may wait for a slow stderr; more
// are shed and counted.
const logQueue = 4096

// logFlush is how long the last lines may take at the end.
const logFlush = time.Second

func (c *commonFlags) logger() (*slog.Logger, func()) {
	var level slog.Level
	level.UnmarshalText([]byte(c.LogLevel)) // checked by the flag's enum, as the format is
	h, err := worker.NewLogHandler(os.Stderr, c.LogFormat, level, logQueue)
	if err != nil {
		panic(err)
	}
	return slog.New(h), func() { h.Close(logFlush) }
}

// lifetime ends with ctx, and for a child of up also when stdin closes.
func (c *commonFlags) lifetime(ctx context.Context) context.Context {
	if !c.ExitWithStdin {
		return ctx
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() { // ends with the process: a read of stdin cannot be taken back
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

// process is what every role has beside its own work.
type process struct {
	*auth
	log *slog.Logger
	end func()
}

// begin starts a role's log and follows its tokens. The context ends with ctx,
// with the process's end, or, for a child of up, when stdin closes.
func (c *commonFlags) begin(ctx context.Context) (context.Context, *process, error) {
	if err := c.checkAdvertise(); err != nil {
		return ctx, nil, err
	}
	a, err := c.auth()
	if err != nil {
		return ctx, nil, err
	}
	log, flush := c.logger()
	ctx, cancel := context.WithCancel(c.lifetime(ctx))
	a.follow(ctx, log)
	return ctx, &process{a, log, func() { cancel(); flush() }}, nil
}

// announce prints the ready line.
func (c *commonFlags) announce(r readyLine) {
	if c.JSON {
		json.NewEncoder(stdout).Encode(r)
		return
	}
	line := "ready " + r.Role + " " + r.HTTP
	if r.Bootstrap != "" {
		line += " bootstrap " + r.Bootstrap
	}
	for _, kv := range r.KV {
		line += " kv " + kv
	}
	fmt.Fprintln(stdout, line)
}

// check refuses flags that are named and not built yet, and settles the KV
// dtype that follows from the precision when nobody chose one.
func (f *engineFlags) check(s *settings) error {
	if f.Precision == "f32" && !s.chosen("kv-dtype") {
		f.KVDType = "f32"
	}
	if !(f.SimPrefillRate > 0) {
		return usagef("--sim-prefill-rate is %v: want more than 0", f.SimPrefillRate)
	}
	return atLeast(number{"threads", f.Threads, 0}, number{"kv-pages", f.KVPages, 0}, number{"context", f.Context, 0}, number{"tp", f.TP, 1}, number{"dp", f.DP, 1},
		number{"page-size", f.PageSize, 1}, number{"max-running", f.MaxRunning, 1}, number{"max-queued", f.MaxQueued, 1}, number{"chunk", f.Chunk, 1}, number{"reserved-tokens", f.ReservedTokens, 1}, number{"sim-kv-bytes", f.SimKVBytes, 1})
}

// number is the value of a flag, and the least that it may be.
type number struct {
	flag     string
	v, least int
}

func atLeast(all ...number) error {
	for _, n := range all {
		if n.v < n.least {
			return usagef("--%s is %d: want at least %d", n.flag, n.v, n.least)
		}
	}
	return nil
}

// workerConfig is the part of a worker's settings that all roles share.
func workerConfig(p *process, role worker.Role, model, listen string, c *commonFlags, f *engineFlags) (worker.Config, error) {
	model, err := modelPath(model, f.Engine)
	if err != nil {
		return worker.Config{}, err
	}
	return worker.Config{
		Role: role, Model: model, Listen: listen, Advertise: c.Advertise, Tokens: p.accept, PeerToken: p.peer, Insecure: c.Insecure, Drain: c.Drain,
		Engine: f.Engine, Threads: f.Threads, Kernels: f.Kernels, Precision: f.Precision, TP: f.TP, DP: f.DP, PageSize: f.PageSize,
		KVDType: f.KVDType, KVMemory: int64(f.KVMemory), KVPages: f.KVPages, Memory: machineMemory(), Context: f.Context, MaxRunning: f.MaxRunning, MaxQueued: f.MaxQueued, ReservedTokens: f.ReservedTokens,
		Chunk: f.Chunk, PrefixCache: f.PrefixCache, ServedName: f.ServedName, RequestTimeout: f.RequestTimeout, HealthWindow: f.HealthWindow,
		SimPrefillRate: f.SimPrefillRate, SimDecodeBase: f.SimDecodeBase, SimDecodePerSeq: f.SimDecodePerSeq, SimKVBytes: f.SimKVBytes,
		StreamOutput: f.StreamOutput, Log: p.log,
	}, nil
}

// check refuses what is no router, and a registry that a router could not tell
// decodes of: it names them the prefill's own host.
func (f *joinFlags) check(registry string) error {
	for _, u := range f.Join {
		if err := router.CheckJoin(u); err != nil {
			return usagef("--join %s: %v", u, err)
		}
	}
	if len(f.Join) > 0 && registry != "" {
		return usagef("--join with --registry %s: routers take a prefill's registry to be on its own host; leave out --registry", registry)
	}
	return nil
}

// start keeps the worker a member of its routers until ctx ends; the function
// that it returns waits for the goodbyes.
func (f *joinFlags) start(ctx context.Context, line worker.ReadyLine, token *api.Secret, log *slog.Logger) (wait func()) {
	self := router.Membership{Role: string(line.Role), URL: line.HTTP, Instance: line.Instance}
	if _, port, err := net.SplitHostPort(line.Bootstrap); err == nil {
		self.BootstrapPort, _ = strconv.Atoi(port)
	}
	var wg sync.WaitGroup
	for _, u := range f.Join {
		j := &router.Joiner{Router: u, Token: token, Self: self, Log: log}
		wg.Go(func() { j.Run(ctx) })
	}
	return wg.Wait
}

// runWorker starts a worker and serves until ctx ends. join is nil for one that
// has no part in a fleet.
func runWorker(ctx context.Context, c *commonFlags, join *joinFlags, cfg worker.Config) error {
	w, err := worker.New(cfg)
	if err != nil {
		return usageError{err}
	}
	// Go has no priorities: beside the engine's threads there must always be
	// room for the loop and for the network.
	runtime.GOMAXPROCS(w.Config().AllThreads() + 2)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }() // ends when ctx does; waited for below
	select {
	case line := <-w.Ready():
		c.announce(readyLine{Ready: true, Role: string(line.Role), HTTP: line.HTTP, Bootstrap: line.Bootstrap, KV: line.KV, PID: line.PID, Instance: line.Instance})
		if join != nil {
			defer join.start(ctx, line, cfg.PeerToken, cfg.Log)()
		}
		err = <-ended
		cancel()
	case err = <-ended:
	}
	var exit *worker.ExitError
	if errors.As(err, &exit) {
		return exitCode{code: exit.Code, err: exit.Err}
	}
	return err
}

// Run starts a prefill worker.
func (c *prefillCmd) Run(ctx context.Context, s *settings) error {
	if err := errors.Join(s.unknown(), c.engineFlags.check(s), c.checkBind("listen", c.Listen), c.checkBind("kv-listen", c.KVListen), c.checkBind("bootstrap-listen", c.BootstrapListen), c.prefillOnly.check(), c.joinFlags.check(c.Registry)); err != nil {
		return err
	}
	ctx, p, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer p.end()
	cfg, err := workerConfig(p, worker.Prefill, c.Model, c.Listen, &c.commonFlags, &c.engineFlags)
	if err != nil {
		return err
	}
	cfg.BootstrapListen, cfg.Registry, cfg.AnnounceHTTP, cfg.KVListen = c.BootstrapListen, c.Registry, c.AnnounceHTTP, c.KVListen
	cfg.BootstrapTimeout, cfg.KVTimeout = c.BootstrapTimeout, c.KVTimeout
	return runWorker(ctx, &c.commonFlags, &c.joinFlags, cfg)
}

// Run starts a decode worker.
func (c *decodeCmd) Run(ctx context.Context, s *settings) error { return c.run(ctx, s, false) }

// Run starts a decode worker whose loop waits for registries.
func (c *baselineCmd) Run(ctx context.Context, s *settings) error { return c.run(ctx, s, true) }

func (c *decodeCmd) run(ctx context.Context, s *settings, blocking bool) error {
	if err := errors.Join(s.unknown(), c.engineFlags.check(s), c.decodeOnly.check(s), c.joinFlags.check(""), c.checkBind("listen", c.Listen)); err != nil {
		return err
	}
	ctx, p, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer p.end()
	cfg, err := workerConfig(p, worker.Decode, c.Model, c.Listen, &c.commonFlags, &c.engineFlags)
	if err != nil {
		return err
	}
	cfg.ParallelInfoTimeout, cfg.ParallelInfoAttempts, cfg.ParallelInfoInterval = c.ParallelInfoTimeout, c.ParallelInfoAttempts, c.ParallelInfoInterval
	cfg.HeartbeatInterval, cfg.HeartbeatFailures = c.HeartbeatInterval, c.HeartbeatFailures
	cfg.OnMismatch, cfg.ResolveTimeout, cfg.BootstrapAllow, cfg.KVTimeout = c.OnMismatch, c.ResolveTimeout, c.BootstrapAllow, c.KVTimeout
	cfg.Blocking = blocking
	return runWorker(ctx, &c.commonFlags, &c.joinFlags, cfg)
}

// check refuses a registry that nobody could dial: the worker would wait for it for ever.
func (p *prefillOnly) check() error {
	if p.Registry == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(p.Registry)
	n, bad := strconv.Atoi(port)
	if err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
		return usagef("--registry %s: an address is HOST:PORT, like 10.0.0.1:8998", p.Registry)
	}
	return nil
}

func (d *decodeOnly) check(s *settings) error {
	if s.chosen("bootstrap-allow") && len(d.BootstrapAllow) == 0 {
		return usagef("--bootstrap-allow is empty: it would allow any host; name some, or leave it out")
	}
	return atLeast(number{"parallel-info-attempts", d.ParallelInfoAttempts, 1}, number{"heartbeat-failures", d.HeartbeatFailures, 1})
}

// Run starts one process that does both halves.
func (c *serveCmd) Run(ctx context.Context, s *settings) error {
	if err := errors.Join(s.unknown(), c.engineFlags.check(s), c.checkBind("listen", c.Listen)); err != nil {
		return err
	}
	ctx, p, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer p.end()
	cfg, err := workerConfig(p, worker.Serve, c.Model, c.Listen, &c.commonFlags, &c.engineFlags)
	if err != nil {
		return err
	}
	return runWorker(ctx, &c.commonFlags, nil, cfg)
}

// Run starts a router.
func (c *routerCmd) Run(ctx context.Context, s *settings) error {
	if err := errors.Join(s.unknown(), c.checkBind("listen", c.Listen)); err != nil {
		return err
	}
	ctx, p, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer p.end()
	cfg := router.Default()
	cfg.Prefill, cfg.Decode, cfg.Policy, cfg.PrefillPolicy, cfg.DecodePolicy = c.Prefill, c.Decode, c.Policy, c.PrefillPolicy, c.DecodePolicy
	cfg.HealthEvery, cfg.HealthTimeout, cfg.HealthFails = c.HealthInterval, c.HealthTimeout, c.HealthFailures
	cfg.Retries, cfg.MaxBody, cfg.MaxEjected, cfg.RequestTimeout, cfg.Drain = c.Retries, int64(c.MaxBody), float64(c.MaxEjected), c.RequestTimeout, c.Drain
	cfg.Migrations, cfg.IdleTimeout, cfg.MaxRequests, cfg.CacheMemory = c.Migrations, c.IdleTimeout, c.MaxRequests, int64(c.CacheMemory)
	cfg.Tokens, cfg.PeerToken, cfg.Log = p.accept, p.peer, p.log
	cfg.Lease, cfg.JoinTokens, cfg.Insecure = c.Lease, p.peers, c.Insecure
	r, err := c.router(ctx, cfg)
	if err != nil {
		return err
	}
	ln, err := listen(c.Listen)
	if err != nil {
		return err
	}
	// The live heap of a router is small, so the collector would run each few
	// requests. Bytes that nobody touches cost no memory and let it wait longer.
	defer runtime.KeepAlive(make([]byte, 8<<20))
	line := readyLine{Ready: true, Role: "router", HTTP: "http://" + c.reach(ln), PID: os.Getpid()}
	go func() { // ends by itself after firstProbes, or with ctx
		waitReady(ctx, "http://"+ln.Addr().String())
		c.announce(line)
	}()
	return r.Run(ctx, ln)
}

// router makes the router, with the workers of the flags and, if one is given,
// of the file, whose changes it follows.
func (c *routerCmd) router(ctx context.Context, cfg router.Config) (*router.Router, error) {
	cfg.Watched = c.Workers != ""
	r, err := router.New(cfg)
	if err != nil {
		return nil, usageError{err}
	}
	if c.Workers == "" {
		return r, nil
	}
	f, err := follow("workers", c.Workers, func(data []byte) error {
		w, err := parseWorkers(data)
		if err != nil {
			return err
		}
		return r.SetWorkers(slices.Concat(c.Prefill, w.Prefill), slices.Concat(c.Decode, w.Decode))
	})
	if err != nil {
		return nil, err
	}
	go f.run(ctx, cfg.Log) // ends with ctx; nothing waits for it
	return r, nil
}

// firstProbes is how long a router waits for a usable pair before it says that
// it is there all the same: requests get a named error until workers come.
const firstProbes = 2 * time.Second

func waitReady(ctx context.Context, base string) {
	ctx, cancel := context.WithTimeout(ctx, firstProbes)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, "GET", base+"/readyz", nil)
		if err != nil {
			return
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// listen takes a role's address for HTTP.
func listen(addr string) (net.Listener, error) {
	ln, err := worker.Listen("--listen", addr)
	if err != nil {
		return nil, usageError{err}
	}
	return ln, nil
}

// reach is the address that others use for a listener: a wildcard bind is
// reached by --advertise, or else by this machine's loopback.
func (c *commonFlags) reach(ln net.Listener) string {
	host, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		return ln.Addr().String()
	}
	if ip := net.ParseIP(host); c.Advertise != "" {
		host = c.Advertise
	} else if ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// Run starts a bootstrap registry alone.
func (c *registryCmd) Run(ctx context.Context, s *settings) error {
	if err := errors.Join(s.unknown(), c.checkBind("listen", c.Listen)); err != nil {
		return err
	}
	ctx, p, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer p.end()
	cfg := bootstrap.ServerConfig{Bind: c.Listen, AllowOpenWrites: c.Insecure, AnnounceHTTP: true, Metrics: metric.New("registry").Handler(), Log: p.log}
	if !p.accept.Empty() {
		cfg.Tokens = p.accept.Valid
	}
	ln, err := listen(c.Listen)
	if err != nil {
		return err
	}
	c.announce(readyLine{Ready: true, Role: "registry", HTTP: "http://" + c.reach(ln), Bootstrap: c.reach(ln), PID: os.Getpid()})
	return bootstrap.NewServer(cfg).Serve(ctx, ln)
}

type versionCmd struct {
	Verbose bool `help:"Also print Go version, platform and the engine's kernels."`
}

// Version is the product's version, changed with each release.
const Version = "0.1.0-dev"

// Run prints the version.
func (c *versionCmd) Run() error {
	fmt.Fprintln(stdout, "metronome", Version)
	if !c.Verbose {
		return nil
	}
	revision := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	fmt.Fprintf(stdout, "revision %s\n%s %s/%s\nkernels %s\n", revision, runtime.Version(), runtime.GOOS, runtime.GOARCH, engine.Kernels())
	return nil
}
