package worker

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// Role says which half of the work a worker does.
type Role string

// The roles of a worker.
const (
	Prefill Role = "prefill"
	Decode  Role = "decode"
	Serve   Role = "serve" // both halves in one process, over one pool and one engine
)

// Config is everything a worker can be told; the fields are the flags of the
// same names. It is not changed after New. Zero takes the default in brackets.
type Config struct {
	Role  Role
	Model string // path of a GGUF file, or "tiny" for the built-in model

	Listen    string        // host:port of the HTTP side [127.0.0.1, port by role]
	Advertise string        // host that others reach us by [the bound one]
	Tokens    api.Tokens    // what callers and peers must present; none: no check
	PeerToken *api.Secret   // what we present [nothing]
	Insecure  bool          // allow a non-loopback bind without a token
	Drain     time.Duration // how long open requests may go on after the stop [20s]

	Engine         string // "cpu" or "sim" [cpu]
	Threads        int    // of the engines of all DP ranks together, one each at least [engine.Cores]
	Kernels        string // "auto", "portable", "avx2", "avx512", of the whole process [auto]
	Precision      string // "native", "f32" [native]
	TP, DP         int    // [1, 1]
	PageSize       int    // tokens [16]
	KVDType        string // "f16", "f32", "q8_0" [f16; f32 with Precision f32]
	KVMemory       int64  // bytes of KV pages of each DP rank [512 MiB]
	KVPages        int    // pages instead of bytes [from KVMemory]
	Memory         int64  // bytes that the machine has, which a pool must fit into [0: not known]
	Context        int    // tokens [the model's, at most 8192; sim 131072]
	MaxRunning     int    // sequences in a batch [64]
	MaxQueued      int    // requests beyond them [512]
	Chunk          int    // tokens of one prefill chunk [512]
	PrefixCache    bool
	ReservedTokens int           // growth in tokens that admission to decode keeps free for each sequence ahead [512]
	ServedName     string        // model name in answers [the file's]
	RequestTimeout time.Duration // of a whole request [600s]

	// Prefill.
	BootstrapListen  string        // [127.0.0.1:8998]
	AnnounceHTTP     bool          // adds prefill_http_port to the registry's answer
	KVListen         string        // first of the listeners of the TP ranks [127.0.0.1:0]
	Registry         string        // address of a registry that runs elsewhere; then none is embedded
	BootstrapTimeout time.Duration // wait for the other leg [300s]

	// Prefill and decode.
	KVTimeout time.Duration // silence about a granted transfer [30s]

	// Decode.
	ParallelInfoTimeout  time.Duration // of one attempt [5s]
	ParallelInfoAttempts int           // [15]
	ParallelInfoInterval time.Duration // from start to start [1s]
	HeartbeatInterval    time.Duration // [5s]
	HeartbeatFailures    int           // consecutive, to evict [2]
	OnMismatch           string        // "fatal", "reject" [fatal]
	ResolveTimeout       time.Duration // parallel info to link, in all [120s]
	BootstrapAllow       []string      // hosts and CIDRs that may be dialled; none: any
	HealthWindow         time.Duration // [20s]
	Blocking             bool          // the loop asks registries itself and waits, for comparisons (blocking.go)

	// Simulated engine.
	SimPrefillRate  float64       // tokens/s [20000]
	SimDecodeBase   time.Duration // of one decode batch [8ms]
	SimDecodePerSeq time.Duration // [100µs]
	SimKVBytes      int           // bytes of KV of one token [2048]

	// HTTP side.
	Join         string // URL of a router to register at by lease
	StreamOutput bool   // deltas instead of cumulative chunks on /generate

	Log *slog.Logger // must never block: see NewLogHandler [discard]
}

// defaults fills in what was left zero.
func (c *Config) defaults() {
	c.Listen = cmp.Or(c.Listen, map[Role]string{Prefill: "127.0.0.1:30000", Decode: "127.0.0.1:30100", Serve: "127.0.0.1:8000"}[c.Role])
	c.Drain = cmp.Or(c.Drain, 20*time.Second)
	c.Engine = cmp.Or(c.Engine, "cpu")
	c.Threads = cmp.Or(c.Threads, engine.Cores)
	c.Kernels = cmp.Or(c.Kernels, "auto")
	c.Precision = cmp.Or(c.Precision, "native")
	c.TP, c.DP = cmp.Or(c.TP, 1), cmp.Or(c.DP, 1)
	c.PageSize = cmp.Or(c.PageSize, 16)
	if c.KVDType == "" {
		c.KVDType = map[bool]string{true: "f32", false: "f16"}[c.Precision == "f32"]
	}
	c.KVMemory = cmp.Or(c.KVMemory, 512<<20)
	c.MaxRunning = cmp.Or(c.MaxRunning, 64)
	c.MaxQueued = cmp.Or(c.MaxQueued, 512)
	c.Chunk = cmp.Or(c.Chunk, 512)
	c.ReservedTokens = cmp.Or(c.ReservedTokens, 512)
	c.RequestTimeout = cmp.Or(c.RequestTimeout, 600*time.Second)
	c.BootstrapListen = cmp.Or(c.BootstrapListen, "127.0.0.1:8998")
	c.KVListen = cmp.Or(c.KVListen, "127.0.0.1:0")
	c.BootstrapTimeout = cmp.Or(c.BootstrapTimeout, 300*time.Second)
	c.KVTimeout = cmp.Or(c.KVTimeout, 30*time.Second)
	c.ParallelInfoTimeout = cmp.Or(c.ParallelInfoTimeout, 5*time.Second)
	c.ParallelInfoAttempts = cmp.Or(c.ParallelInfoAttempts, 15)
	c.ParallelInfoInterval = cmp.Or(c.ParallelInfoInterval, time.Second)
	c.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, 5*time.Second)
	c.HeartbeatFailures = cmp.Or(c.HeartbeatFailures, 2)
	c.OnMismatch = cmp.Or(c.OnMismatch, "fatal")
	c.ResolveTimeout = cmp.Or(c.ResolveTimeout, 120*time.Second)
	c.HealthWindow = cmp.Or(c.HealthWindow, 20*time.Second)
	c.SimPrefillRate = cmp.Or(c.SimPrefillRate, 20000)
	c.SimDecodeBase = cmp.Or(c.SimDecodeBase, 8*time.Millisecond)
	c.SimDecodePerSeq = cmp.Or(c.SimDecodePerSeq, 100*time.Microsecond)
	c.SimKVBytes = cmp.Or(c.SimKVBytes, 2048)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// threadsOf is a DP rank's share of the threads: nothing is left over, and each
// has one at least.
func (c *Config) threadsOf(rank int) int { return max(1, (c.Threads+rank)/c.DP) }

// AllThreads is how many threads the engines of all DP ranks compute with.
func (c *Config) AllThreads() (n int) {
	for rank := range c.DP {
		n += c.threadsOf(rank)
	}
	return n
}

// check refuses what no worker can run with. Sizes that depend on the model
// are checked by the engine.
func (c *Config) check() error {
	oneOf := func(flag, v string, words ...string) error {
		if slices.Contains(words, v) {
			return nil
		}
		return fmt.Errorf("%s %q is unknown: want one of %v", flag, v, words)
	}
	for _, err := range []error{
		oneOf("role", string(c.Role), string(Prefill), string(Decode), string(Serve)),
		oneOf("--engine", c.Engine, "cpu", "sim"),
		oneOf("--kernels", c.Kernels, "auto", "portable", "avx2", "avx512"),
		oneOf("--precision", c.Precision, "native", "f32"),
		oneOf("--kv-dtype", c.KVDType, "f16", "f32", "q8_0"),
		oneOf("--on-mismatch", c.OnMismatch, "fatal", "reject"),
	} {
		if err != nil {
			return err
		}
	}
	if c.Blocking && c.Role != Decode {
		return fmt.Errorf("a %s worker asks no registries: only a decode worker can wait for them", c.Role)
	}
	for _, n := range []struct {
		flag    string
		v, high int
	}{
		{"--threads", c.Threads, 1024}, {"--tp", c.TP, 1024}, {"--dp", c.DP, 1024}, {"--page-size", c.PageSize, 4096},
		{"--max-running", c.MaxRunning, 1 << 16}, {"--max-queued", c.MaxQueued, 1 << 20}, {"--chunk", c.Chunk, 1 << 16}, {"--reserved-tokens", c.ReservedTokens, 1 << 20},
		{"--parallel-info-attempts", c.ParallelInfoAttempts, 1 << 20}, {"--heartbeat-failures", c.HeartbeatFailures, 1 << 20},
	} {
		if n.v < 1 || n.v > n.high {
			return fmt.Errorf("%s is %d: want 1 to %d", n.flag, n.v, n.high)
		}
	}
	for _, d := range []struct {
		flag string
		v    time.Duration
	}{
		{"--drain", c.Drain}, {"--request-timeout", c.RequestTimeout}, {"--bootstrap-timeout", c.BootstrapTimeout},
		{"--kv-timeout", c.KVTimeout}, {"--parallel-info-timeout", c.ParallelInfoTimeout},
		{"--parallel-info-interval", c.ParallelInfoInterval}, {"--heartbeat-interval", c.HeartbeatInterval},
		{"--resolve-timeout", c.ResolveTimeout}, {"--health-window", c.HealthWindow},
	} {
		if d.v <= 0 {
			return fmt.Errorf("%s is %v: want more than 0", d.flag, d.v)
		}
	}
	return nil
}
