package worker

import (
	"log/slog"
	"time"
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
	Tokens    []string      // what callers and peers must present; none: no check
	PeerToken string        // what we present [the first of Tokens]
	Insecure  bool          // allow a non-loopback bind without a token
	Drain     time.Duration // how long open requests may go on after the stop [20s]

	Engine         string // "cpu" or "sim" [cpu]
	Threads        int    // of the engine, in all [all cores]
	Kernels        string // "auto", "portable", "avx2", "avx512" [auto]
	Precision      string // "native", "f32" [native]
	TP, DP         int    // [1, 1]
	PageSize       int    // tokens [16]
	KVDType        string // "f16", "f32", "q8_0" [f16; f32 with Precision f32]
	KVMemory       int64  // bytes of KV pages of each DP rank [512 MiB]
	KVPages        int    // pages instead of bytes [from KVMemory]
	Context        int    // tokens [the model's, at most 8192; sim 131072]
	MaxRunning     int    // sequences in a batch [64]
	MaxQueued      int    // requests beyond them [512]
	Chunk          int    // tokens of one prefill chunk [512]
	PrefixCache    bool
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
