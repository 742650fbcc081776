package worker

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
)

// A wrong setting is refused by New, by name and with what would be right, and
// nothing stays open.
func TestNewRefuses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, c := range map[string]struct {
		change func(*Config)
		has    string
	}{
		"role":          {func(c *Config) { c.Role = "pilot" }, `"pilot"`},
		"engine":        {func(c *Config) { c.Engine = "steam" }, "--engine"},
		"dtype":         {func(c *Config) { c.KVDType = "f8" }, "--kv-dtype"},
		"precision":     {func(c *Config) { c.Precision = "f64" }, "--precision"},
		"mismatch":      {func(c *Config) { c.OnMismatch = "shrug" }, "--on-mismatch"},
		"kernels":       {func(c *Config) { c.Kernels = "neon" }, "--kernels"},
		"threads":       {func(c *Config) { c.Threads = -1 }, "--threads is -1: want 1 to"},
		"drain":         {func(c *Config) { c.Drain = -time.Second }, "--drain"},
		"tp":            {func(c *Config) { c.TP = 7 }, "7"},
		"model":         {func(c *Config) { c.Model = "/nowhere/at.gguf" }, "/nowhere/at.gguf"},
		"context":       {func(c *Config) { c.Context = 1 << 30 }, "context"},
		"memory":        {func(c *Config) { c.KVMemory = 10 }, "--kv-memory"},
		"no address":    {func(c *Config) { c.Listen = "here" }, "--listen"},
		"no port":       {func(c *Config) { c.Listen = "127.0.0.1:http" }, "--listen"},
		"taken":         {func(c *Config) { c.Listen = taken.Addr().String() }, "--listen"},
		"open":          {func(c *Config) { c.Listen = "0.0.0.0:0" }, "--insecure"},
		"open KV":       {func(c *Config) { c.KVListen = "0.0.0.0:0" }, "--kv-listen"},
		"open registry": {func(c *Config) { c.BootstrapListen = ":0" }, "--bootstrap-listen"},
		"KV ports":      {func(c *Config) { c.KVListen, c.DP = "127.0.0.1:65535", 2 }, "--kv-listen"},
		"allow":         {func(c *Config) { c.BootstrapAllow = []string{"10.0.0.0/99"} }, "--bootstrap-allow"},
	} {
		cfg := Config{Role: Prefill, Model: "tiny", Listen: "127.0.0.1:0", BootstrapListen: "127.0.0.1:0", KVListen: "127.0.0.1:0", Threads: 1, KVPages: 16}
		if name == "memory" {
			cfg.KVPages = 0
		}
		c.change(&cfg)
		w, err := New(cfg)
		if err == nil {
			w.release()
		}
		if err == nil || !strings.Contains(err.Error(), c.has) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want one line with %q", name, err, c.has)
		}
	}
}

// Each rank has an address of its own, the advertised host goes before the bound one, and a wildcard is
// never published. Shows F-82.
func TestKVListeners(t *testing.T) {
	cfg := Config{Role: Prefill, Insecure: true, KVListen: "0.0.0.0:0", DP: 2, TP: 2, Advertise: "kv.example"}
	lns, err := cfg.bindKV()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(lns)
	seen := map[string]bool{}
	for _, ln := range lns {
		at, err := cfg.hostPort(ln)
		if err != nil || !strings.HasPrefix(at, "kv.example:") {
			t.Errorf("%s, %v", at, err)
		}
		seen[at] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d addresses for 4 ranks", len(seen))
	}
	cfg.Advertise = ""
	if host, _, err := cfg.reach(lns[0]); err == nil && (host == "0.0.0.0" || host == "::") {
		t.Errorf("a wildcard is advertised: %s", host)
	}
	if self(lns[0]) == "" || !strings.HasPrefix(self(lns[0]), "127.0.0.1:") {
		t.Errorf("self is %s", self(lns[0]))
	}
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"127.0.0.1": true, "127.9.9.9": true, "::1": true, "localhost": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "::": false, "10.0.0.1": false, "example.com": false,
	} {
		if got := loopback(host); got != want {
			t.Errorf("loopback(%q) is %v", host, got)
		}
	}
}

// The threads are divided among the DP ranks: none is left over, each has one.
func TestThreadsAreDivided(t *testing.T) {
	for _, c := range []struct {
		threads, dp int
		want        []int
	}{{4, 1, []int{4}}, {4, 2, []int{2, 2}}, {5, 2, []int{2, 3}}, {2, 3, []int{1, 1, 1}}, {8, 3, []int{2, 3, 3}}} {
		cfg, sum := Config{Threads: c.threads, DP: c.dp}, 0
		for rank, want := range c.want {
			if sum += want; cfg.threadsOf(rank) != want {
				t.Errorf("%d threads, rank %d of %d: %d, want %d", c.threads, rank, c.dp, cfg.threadsOf(rank), want)
			}
		}
		if got := cfg.AllThreads(); got != sum {
			t.Errorf("%d threads, %d ranks: %d in all, want %d", c.threads, c.dp, got, sum)
		}
	}
}

// More threads than CPUs is slow, and said.
func TestTooManyThreads(t *testing.T) {
	for threads, want := range map[int]int{engine.Cores: 0, engine.Cores + 1: 1} {
		var log strings.Builder
		w, err := New(Config{Role: Serve, Model: "tiny", Listen: "127.0.0.1:0", KVPages: 8, Threads: threads, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		w.release()
		if text := fmt.Sprintf("threads=%d cpus=%d", threads, engine.Cores); strings.Count(log.String(), text) != want {
			t.Errorf("%s: %q", text, log.String())
		}
	}
}
