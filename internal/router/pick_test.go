package router

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestPick(t *testing.T) {
	pool := func(s string) (c []candidate) { // a number: its load; x: not usable
		for _, w := range strings.Fields(s) {
			var load int64
			_, err := fmt.Sscan(w, &load)
			c = append(c, candidate{usable: err == nil, load: load})
		}
		return c
	}
	for _, c := range []struct {
		policy Policy
		pool   string
		want   string // of six picks, loads unchanged
	}{
		{RoundRobin, "5 0 0", "012012"},
		{RoundRobin, "0 x 0", "020202"},
		{RoundRobin, "x", "------"},
		{LeastLoad, "5 1 3", "111111"},
		{LeastLoad, "1 x 0", "222222"},
		{LeastLoad, "2 2 7 2", "013013"},
		{LeastLoad, "", "------"},
	} {
		p := picker{policy: c.policy}
		var got strings.Builder
		for range 6 {
			i := p.pick(pool(c.pool))
			got.WriteString(strings.ReplaceAll(fmt.Sprint(i), "-1", "-"))
		}
		if got.String() != c.want {
			t.Errorf("policy %d over %q: %s, want %s", c.policy, c.pool, got.String(), c.want)
		}
	}
}

// A burst spreads: load is booked when a leg is sent, not when it is reported.
func TestBurstSpreads(t *testing.T) {
	p := picker{policy: LeastLoad}
	pool := make([]candidate, 3)
	for i := range pool {
		pool[i].usable = true
	}
	for range 40 {
		pool[p.pick(pool)].load++
	}
	for i, c := range pool {
		if c.load < 13 || c.load > 14 {
			t.Errorf("worker %d has %d of 40", i, c.load)
		}
	}
}

func TestStanding(t *testing.T) {
	var s standing
	see := func(what, want string) {
		t.Helper()
		if got := s.state(); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	see("at first", "starting")
	s.probed(1, "refused", 2)
	see("one failed probe", "out")
	s.probed(2, "", 2)
	see("one good probe", "ready")
	s.probed(4, "slow", 2)
	see("one failed probe", "ready")
	s.probed(3, "slow", 2)
	see("an older probe's failure", "ready")
	s.probed(5, "slow", 2)
	see("two in a row", "out")
	s.probed(6, "", 2)
	for range ejectStreak {
		s.failed(10*time.Second, "500", true)
	}
	see("three failed legs", "ejected")
	if s.usable(10*time.Second+ejectFor-1) || !s.usable(10*time.Second+ejectFor) {
		t.Error("ejected for another time than ejectFor")
	}
	s.trial = true
	if s.usable(time.Hour) {
		t.Error("two trials at a time")
	}
	s.failed(20*time.Second, "500", false)
	if s.usable(20 * time.Second) {
		t.Error("a failed trial lets it in")
	}
	s.served()
	see("a good trial", "ready")
	for range ejectStreak {
		s.failed(0, "500", false)
	}
	see("failures when the pool cannot spare it", "ready")
	s.down("draining", 2)
	see("its own word", "out")
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Prefill = nil }, "no prefill worker"},
		{func(c *Config) { c.Decode = nil }, "no decode worker"},
		{func(c *Config) { c.Prefill = []string{"10.0.0.5:30000"} }, "not a URL like http://"},
		{func(c *Config) { c.Prefill = []string{"ftp://x"} }, "not a URL like http://"},
		{func(c *Config) { c.Prefill = []string{"http://:30000"} }, "the host is missing"},
		{func(c *Config) { c.Prefill = []string{"http://x:0"} }, "not between 1 and 65535"},
		{func(c *Config) { c.Prefill = []string{"http://x:99999"} }, "not between 1 and 65535"},
		{func(c *Config) { c.Prefill = []string{"http://x:1/v1"} }, "only scheme, host and port"},
		{func(c *Config) { c.Prefill = []string{"http://u:p@x:1"} }, "only scheme, host and port"},
		{func(c *Config) { c.Prefill = []string{"http://x:1,"} }, "no bootstrap port"},
		{func(c *Config) { c.Prefill = []string{"http://x:1,70000"} }, "no bootstrap port"},
		{func(c *Config) { c.Prefill = []string{"http://x:1", "http://x:1/"} }, "given twice"},
		{func(c *Config) { c.Decode = []string{"http://x:1,8998"} }, "a decode worker has no bootstrap port"},
		{func(c *Config) { c.Policy = "cache_aware" }, "cache_aware is not built yet"},
		{func(c *Config) { c.DecodePolicy = "best" }, `unknown policy "best"`},
		{func(c *Config) { c.HealthEvery = 0 }, "health-interval is 0s"},
		{func(c *Config) { c.HealthFails = 0 }, "health-failures"},
		{func(c *Config) { c.Retries = -1 }, "retries"},
		{func(c *Config) { c.MaxEjected = 50 }, "max-ejected"},
		{func(c *Config) { c.MaxBody = 0 }, "max-body"},
	} {
		cfg := Default()
		cfg.Prefill, cfg.Decode = []string{"http://p:1"}, []string{"http://d:1"}
		c.change(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v; want %q", err, c.want)
		}
	}
}

func TestParseWorker(t *testing.T) {
	for in, want := range map[string]string{
		"http://10.0.0.5:30000":         "http://10.0.0.5:30000 10.0.0.5 0",
		"http://10.0.0.5:30000/,8998":   "http://10.0.0.5:30000 10.0.0.5 8998",
		"https://p.example":             "https://p.example:443 p.example 0",
		"http://[2001:db8::1]:30000,12": "http://[2001:db8::1]:30000 [2001:db8::1] 12",
		"http://[::1]":                  "http://[::1]:80 [::1] 0",
	} {
		w, err := parseWorker(Prefill, in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if got := fmt.Sprintf("%s %s %d", w.name, w.bootstrapHost, w.bootstrapPort); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
