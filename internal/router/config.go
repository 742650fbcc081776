package router

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Config is everything a router can be told. It is not changed after New.
// Start from Default: the fields above the line are flags and are taken as they
// are; below it zero means the default that is named.
type Config struct {
	Prefill       []string      // URL or URL,BOOTSTRAP_PORT
	Decode        []string      // URL
	Watched       bool          // the members change (SetWorkers): a pool may be empty
	Policy        string        // as ParsePolicy knows them, for both legs
	PrefillPolicy string        // "": Policy
	DecodePolicy  string        // "": Policy
	CacheMemory   int64         // bytes that cache_aware takes for what it knows of one pool; fixed
	HealthEvery   time.Duration // from the start of one probe of a worker to the start of the next
	HealthTimeout time.Duration // for one probe
	HealthFails   int           // failed probes in a row that take a worker out
	Retries       int           // further pairs tried for one request while the client has had no byte; 0: none
	MaxRequests   int           // in flight at a time, 429 beyond
	Migrations    int           // times that a stream is moved to another pair after its first byte; 0: none
	MaxBody       int64         // bytes of a request's body
	MaxEjected    float64       // share of a pool, 0 to 1, that failing requests may take out; failed probes are not capped
	Drain         time.Duration // how long running requests may go on after a stop
	Lease         time.Duration // how long a worker that joins is a member unless it says so again
	JoinTokens    api.Tokens    // what workers that join must present; none: those of this machine may, or all if Insecure
	Insecure      bool          // the network is trusted
	Tokens        api.Tokens    // what callers must present; none: everybody may call
	PeerToken     *api.Secret   // what workers are presented; none: the client's own, unless Tokens are set

	RequestTimeout time.Duration // the whole of one request; 600 s
	IdleTimeout    time.Duration // silence of a decode whose answer has begun; 60 s
	WriteTimeout   time.Duration // a client that takes nothing; 60 s, at least half of it in any case
	BodyTimeout    time.Duration // a client that is slow to send its body; 60 s
	MaxBodies      int64         // bytes of request bodies held at a time, 429 beyond; 1 GiB

	Log *slog.Logger // nil: none. Its handler must not block
	// Dial opens connections to workers; nil: TCP. Tests and simulations put
	// their own network here.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Default is the configuration that the flags default to, without workers.
func Default() Config {
	return Config{
		Policy:        "least_load",
		CacheMemory:   8 << 20,
		HealthEvery:   500 * time.Millisecond,
		HealthTimeout: time.Second,
		HealthFails:   2,
		Retries:       2,
		Migrations:    1,
		MaxRequests:   16384,
		Lease:         10 * time.Second,
		MaxBody:       32 << 20,
		MaxEjected:    0.5,
		Drain:         20 * time.Second,
	}
}

// Bounds of a lease: a worker that renews thrice in it must not be a load, and a
// dead one must not stay for hours.
const (
	leaseLeast = 500 * time.Millisecond
	leaseMost  = 10 * time.Minute
)

const (
	minCacheMemory = 64 << 10
	maxCacheMemory = 4 << 30
)

// check refuses what cannot work and fills in what was left at zero.
func (c *Config) check() error {
	for _, d := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"health-interval", &c.HealthEvery, 0},
		{"health-timeout", &c.HealthTimeout, 0},
		{"request-timeout", &c.RequestTimeout, 600 * time.Second},
		{"idle-timeout", &c.IdleTimeout, 60 * time.Second},
		{"write-timeout", &c.WriteTimeout, 60 * time.Second},
		{"body-timeout", &c.BodyTimeout, 60 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v <= 0 {
			return fmt.Errorf("--%s is %v; it must be more than zero", d.name, *d.v)
		}
	}
	if c.MaxBodies == 0 {
		c.MaxBodies = 1 << 30
	}
	switch {
	case c.HealthFails < 1:
		return fmt.Errorf("--health-failures is %d; it must be at least 1", c.HealthFails)
	case c.CacheMemory < minCacheMemory || c.CacheMemory > maxCacheMemory:
		return fmt.Errorf("--cache-memory is %d bytes; it must be between 64KiB and 4GiB", c.CacheMemory)
	case c.Retries < 0:
		return fmt.Errorf("--retries is %d; it must be at least 0", c.Retries)
	case c.Migrations < 0:
		return fmt.Errorf("--migrations is %d; it must be at least 0", c.Migrations)
	case c.MaxRequests < 1:
		return fmt.Errorf("--max-requests is %d; it must be at least 1", c.MaxRequests)
	case c.MaxBody < 1:
		return fmt.Errorf("--max-body is %d; it must be at least 1 byte", c.MaxBody)
	case c.MaxEjected < 0 || c.MaxEjected > 1:
		return fmt.Errorf("--max-ejected is %g; it must be between 0 and 1 (100%%)", c.MaxEjected)
	case c.Drain < 0:
		return fmt.Errorf("--drain is %v; it must not be negative", c.Drain)
	case c.Lease < leaseLeast || c.Lease > leaseMost:
		return fmt.Errorf("--lease is %v; it must be between %v and %v", c.Lease, leaseLeast, leaseMost)
	case len(c.Prefill) == 0 && len(c.Decode) > 0 && !c.Watched:
		return fmt.Errorf("no prefill worker; name one with --prefill URL[,BOOTSTRAP_PORT] or in --workers FILE, or name none at all and let all join")
	case len(c.Decode) == 0 && len(c.Prefill) > 0 && !c.Watched:
		return fmt.Errorf("no decode worker; name one with --decode URL or in --workers FILE, or name none at all and let all join")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}
