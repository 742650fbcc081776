package worker

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/model"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// load opens the model and makes one engine for each DP rank.
func (w *Worker) load() error {
	c := &w.cfg
	make, err := w.engineMaker()
	if err != nil {
		return err
	}
	if n := c.AllThreads(); n > engine.Cores && c.Engine == "cpu" {
		w.log.Warn("more threads than CPUs: answers are right, and slow; lower --threads or --dp", "threads", n, "cpus", engine.Cores)
	}
	ec := engine.Config{
		Pages: c.KVPages, PageSize: c.PageSize, KVDType: c.KVDType, TP: c.TP,
		Context: c.Context, MaxBatchTokens: max(c.Chunk, c.MaxRunning, c.PageSize), Precision: c.Precision,
	}
	for rank := range c.DP {
		ec.Threads = c.threadsOf(rank)
		e, err := make(ec)
		if err != nil {
			return err
		}
		w.engines = append(w.engines, e)
		w.onClose(e.Close)
	}
	return nil
}

// engineMaker finds out what the engines need to know and are made of.
func (w *Worker) engineMaker() (func(engine.Config) (engine.Engine, error), error) {
	c := &w.cfg
	if c.Engine == "sim" {
		if c.Context == 0 {
			c.Context = simContext
		}
		err := c.sizePool(c.SimKVBytes)
		return func(ec engine.Config) (engine.Engine, error) {
			return engine.NewSim(engine.SimConfig{
				PrefillRate: c.SimPrefillRate, DecodeBase: c.SimDecodeBase, DecodePerSeq: c.SimDecodePerSeq, KVBytes: c.SimKVBytes, Config: ec,
			})
		}, err
	}
	if err := engine.UseKernels(c.Kernels); err != nil {
		return nil, fmt.Errorf("--kernels %s: %w", c.Kernels, err)
	}
	f, err := openModel(c.Model)
	if err != nil {
		return nil, err
	}
	w.file = f
	w.onClose(func() { f.Close() })
	weights, err := engine.LoadWeights(f)
	if err != nil {
		return nil, err
	}
	h, err := f.Hyper()
	if err != nil {
		return nil, err
	}
	if c.Context == 0 {
		c.Context = min(h.Context, maxDefaultContext)
	}
	bytes, err := engine.KVTokenBytes(c.KVDType, h.HeadDim)
	if err != nil {
		return nil, err
	}
	err = c.sizePool(bytes * h.KVHeads * h.Layers)
	return func(ec engine.Config) (engine.Engine, error) { return engine.New(weights, ec) }, err
}

// Contexts that are taken when none is given, in tokens.
const (
	simContext        = 131072
	maxDefaultContext = 8192
)

// sizePool decides how many KV pages there are, given the bytes of one token.
func (c *Config) sizePool(tokenBytes int) error {
	pageBytes := tokenBytes * c.PageSize
	if c.Memory > 0 && int64(c.KVPages) > c.Memory/int64(pageBytes) {
		return fmt.Errorf("--kv-pages %d of %d bytes each ask for more memory than the %d bytes of this machine", c.KVPages, pageBytes, c.Memory)
	}
	if c.KVPages == 0 && c.Memory > 0 && c.KVMemory > c.Memory {
		return fmt.Errorf("--kv-memory %d asks for more memory than the %d bytes of this machine", c.KVMemory, c.Memory)
	}
	if c.KVPages == 0 {
		c.KVPages = int(min(c.KVMemory/int64(pageBytes), math.MaxInt32))
	}
	if c.KVPages < 1 {
		return fmt.Errorf("--kv-memory %d or --kv-pages %d holds no page of %d tokens of %d bytes", c.KVMemory, c.KVPages, c.PageSize, tokenBytes)
	}
	return nil
}

func openModel(name string) (*model.File, error) {
	if name == "tiny" {
		return model.OpenBytes("tiny", model.Builtin())
	}
	return model.Open(name)
}

func (w *Worker) newPool() *kv.Pool { return kv.NewPool(w.cfg.KVPages, w.cfg.PageSize, rand.Uint64()) }

func (w *Worker) decodeConfig() sched.DecodeConfig {
	c := &w.cfg
	late := sched.LateTurn
	if c.Blocking {
		late = sched.Never // a loop that waits is late all the time, and the original counted it
	}
	return sched.DecodeConfig{
		LateTurn:   late,
		MaxRunning: c.MaxRunning, MaxQueued: c.MaxQueued, MaxGrants: maxGrants(c), Context: c.Context, Vocab: w.Vocab(),
		ReservedTokens: c.ReservedTokens,
		KVTimeout:      c.KVTimeout, PrefixCache: c.PrefixCache,
		Peers: sched.PeersConfig{
			Timeout: c.ParallelInfoTimeout, Attempts: c.ParallelInfoAttempts, Interval: c.ParallelInfoInterval,
			HeartbeatInterval: c.HeartbeatInterval, HeartbeatFailures: c.HeartbeatFailures, ResolveTimeout: c.ResolveTimeout,
			Reject: c.OnMismatch == "reject", Seed: rand.Uint64(),
			Local: sched.ParallelInfo{
				TP: c.TP, CP: 1, DP: c.DP, PP: 1, PageSize: c.PageSize, KVDType: c.KVDType,
				Instance: w.instance, Fingerprint: w.Fingerprint(),
			},
		},
	}
}

func maxGrants(c *Config) int { return 2 * c.MaxRunning }

func (w *Worker) prefillConfig() sched.PrefillConfig {
	c := &w.cfg
	return sched.PrefillConfig{
		MaxRunning: c.MaxRunning, MaxQueued: c.MaxQueued, Chunk: c.Chunk, Context: c.Context,
		BootstrapTimeout: c.BootstrapTimeout, PrefixCache: c.PrefixCache,
	}
}

func memories(e engine.Engine, tp int) (m []transfer.Memory) {
	for rank := range tp {
		m = append(m, e.Memory(rank))
	}
	return m
}

func (w *Worker) transferMetrics() transfer.Metrics {
	m := w.metrics
	return transfer.Metrics{
		Bytes:    func(n int) { m.KVBytes.Add(float64(n)) },
		Latency:  func(d time.Duration) { m.KVLatency.Observe(float64(d) / float64(time.Millisecond)) },
		Rejected: func(cause string) { m.KVRejected.With(cause).Inc() },
	}
}

// wireServe puts both cores of each rank over one pool.
func (w *Worker) wireServe() {
	for _, l := range w.loops {
		pool := w.newPool()
		dc := w.decodeConfig()
		dc.Serve = true
		l.pool = pool
		l.decode = &decodeSide{loop: l, core: sched.NewDecode(dc, pool)}
		l.decode.pass.core = l.decode.core
		l.prefill = &prefillSide{loop: l, core: sched.NewPrefill(w.prefillConfig(), pool)}
		l.prefill.pass.core, l.prefill.pass.batch.LayerDone = l.prefill.core, l.prefill.layerDone
	}
}

// wireDecode gives all ranks one peer network.
func (w *Worker) wireDecode() error {
	client := bootstrap.NewClient(bootstrap.ClientConfig{Token: w.cfg.PeerToken.Value, Allow: w.allow})
	w.onClose(client.Close)
	d := net.Dialer{Resolver: &net.Resolver{PreferGo: true}} // whose lookups end with their context
	return w.wireReceivers(client, func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) })
}

// wireReceivers gives each decode rank its core and its end of the links. dial
// connects to a prefill rank.
func (w *Worker) wireReceivers(r registry, dial func(ctx context.Context, addr string) (net.Conn, error)) error {
	w.peers = newPeernet(w.clock, r, w.log)
	for rank, l := range w.loops {
		l.pool = w.newPool()
		d := &decodeSide{
			loop: l, core: sched.NewDecode(w.decodeConfig(), l.pool), peers: w.peers,
			grants: map[sched.GrantID]*request{}, dialling: map[sched.LinkID]*sched.LinkEnded{},
		}
		d.pass.core = d.core
		if w.cfg.Blocking {
			d.peers = newPeernet(w.clock, r, w.log)
		}
		r, err := transfer.NewReceiver(transfer.ReceiverConfig{
			Geometry: w.engines[rank].Geometry(), Memory: memories(w.engines[rank], w.cfg.TP),
			Hello: transfer.Hello{Instance: w.instance, DP: rank, Fingerprint: w.Fingerprint(), KVDType: w.cfg.KVDType},
			Token: w.cfg.PeerToken.Value, MaxGrants: maxGrants(&w.cfg), Events: d.events, Metrics: w.transferMetrics(), Now: w.clock.now, Dial: dial,
		})
		if err != nil {
			return err
		}
		d.receiver, l.decode = r, d
	}
	return nil
}

// prefillNet is what a prefill worker shows to the network beside HTTP: the KV
// listeners of its ranks, its registry, and its registration there.
type prefillNet struct {
	w         *Worker
	listeners []net.Listener    // of dp rank × tp rank
	registry  *bootstrap.Server // nil: one elsewhere is used
	registers net.Listener      // the registry's
	registrar *bootstrap.Registrar
	addr      string   // of the registry, for others
	kv        []string // of the ranks, for others

	cancel context.CancelFunc
	done   sync.WaitGroup
}

// wirePrefill wires the ranks and binds what they listen on.
func (w *Worker) wirePrefill() (err error) {
	n := &prefillNet{w: w}
	if n.listeners, err = w.cfg.bindKV(); err != nil {
		return err
	}
	w.onClose(func() { closeAll(n.listeners) })
	if err := w.wireSenders(); err != nil {
		return err
	}
	if err := n.openRegistry(); err != nil {
		return err
	}
	w.prefill = n
	return nil
}

// wireSenders gives each prefill rank its core and its end of the links.
func (w *Worker) wireSenders() (err error) {
	for rank, l := range w.loops {
		l.pool = w.newPool()
		p := &prefillSide{loop: l, core: sched.NewPrefill(w.prefillConfig(), l.pool)}
		p.pass.core, p.pass.batch.LayerDone = p.core, p.layerDone
		p.sender, err = transfer.NewSender(transfer.SenderConfig{
			Geometry: w.engines[rank].Geometry(), Memory: memories(w.engines[rank], w.cfg.TP),
			Welcome: transfer.Welcome{
				Instance: w.instance, Fingerprint: w.Fingerprint(), TP: w.cfg.TP, DP: w.cfg.DP, DPRank: rank,
				PageSize: w.cfg.PageSize, KVDType: w.cfg.KVDType,
			},
			Tokens: w.tokenCheck(), Events: p.events, Metrics: w.transferMetrics(), Now: w.clock.now,
		})
		if err != nil {
			return err
		}
		l.prefill = p
	}
	return nil
}

// tokenCheck compares in constant time; nil: no token is configured.
func (w *Worker) tokenCheck() func(string) bool {
	if w.cfg.Tokens.Empty() {
		return nil
	}
	return w.cfg.Tokens.Valid
}

func (n *prefillNet) openRegistry() (err error) {
	w, c := n.w, &n.w.cfg
	at := c.Registry // where the registrar writes
	n.addr = at
	if c.Registry == "" {
		if n.registers, err = c.bind("--bootstrap-listen", c.BootstrapListen); err != nil {
			return err
		}
		w.onClose(func() { n.registers.Close() })
		if n.addr, err = c.hostPort(n.registers); err != nil {
			return err
		}
		at = self(n.registers)
		n.registry = bootstrap.NewServer(bootstrap.ServerConfig{
			Bind: n.registers.Addr().String(), Tokens: w.tokenCheck(), AllowOpenWrites: c.Insecure, AnnounceHTTP: c.AnnounceHTTP,
			Metrics: w.metrics.Handler(), Log: w.log,
		})
	}
	ranks, err := n.ranks()
	if err != nil {
		return err
	}
	client := bootstrap.NewClient(bootstrap.ClientConfig{Token: c.PeerToken.Value, Allow: ownRegistry(at)})
	w.onClose(client.Close)
	n.registrar = bootstrap.NewRegistrar(bootstrap.RegistrarConfig{Client: client, Addr: at, Ranks: ranks, Log: w.log})
	return nil
}

// self is a listener's address as this machine reaches it.
func self(ln net.Listener) string {
	a := *ln.Addr().(*net.TCPAddr)
	if a.IP.IsUnspecified() {
		a.IP = net.IPv4(127, 0, 0, 1)
	}
	return a.String()
}

// ownRegistry lets the client talk to the registry that the flags name, and
// give it our token.
func ownRegistry(addr string) func(host string) bool {
	own, _, _ := net.SplitHostPort(addr)
	return func(host string) bool { return host == own }
}

// ranks are the registrations of all ranks of this worker.
func (n *prefillNet) ranks() (rs []bootstrap.Registration, err error) {
	w, c := n.w, &n.w.cfg
	info := bootstrap.Info{
		TP: c.TP, CP: 1, DP: c.DP, PP: 1, PageSize: c.PageSize, KVDType: c.KVDType, FollowRoom: true,
		Instance: w.instance, Fingerprint: w.Fingerprint(),
	}
	if c.AnnounceHTTP {
		info.PrefillHTTPPort = w.http.Addr().(*net.TCPAddr).Port
	}
	for i, ln := range n.listeners {
		r := bootstrap.Registration{Info: info, Rank: bootstrap.Rank{DP: i / c.TP, TP: i % c.TP}}
		if r.IP, r.Port, err = c.reach(ln); err != nil {
			return nil, err
		}
		rs = append(rs, r)
		n.kv = append(n.kv, net.JoinHostPort(r.IP, fmt.Sprint(r.Port)))
	}
	return rs, nil
}

// start serves links and registry until stop.
func (n *prefillNet) start() {
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	serve := func(what string, f func(context.Context) error) {
		n.done.Go(func() {
			if err := f(ctx); err != nil {
				n.w.broken(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	for i, ln := range n.listeners {
		serve("KV listener", func(ctx context.Context) error {
			return n.w.loops[i/n.w.cfg.TP].prefill.sender.Serve(ctx, ln, i%n.w.cfg.TP)
		})
	}
	if n.registry != nil {
		serve("bootstrap registry", func(ctx context.Context) error { return n.registry.Serve(ctx, n.registers) })
	}
	n.done.Go(func() { n.registrar.Run(ctx) })
}

// stop ends what start has started.
func (n *prefillNet) stop() {
	n.cancel()
	n.done.Wait()
}
