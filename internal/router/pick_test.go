package router

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// poolOf reads a pool: a number is a worker's load, x is one that is not usable,
// a number with ! one whose ramp is full, with - one that leaves.
func poolOf(s string) (c []candidate) {
	for _, w := range strings.Fields(s) {
		var load int64
		last := map[byte]resort{'!': full, '-': leaving}[w[len(w)-1]]
		_, err := fmt.Sscan(strings.TrimRight(w, "!-"), &load)
		c = append(c, candidate{usable: err == nil, last: last, load: load})
	}
	return c
}

func TestPick(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		pool   string
		want   string // of six picks, loads unchanged
	}{
		{RoundRobin, "5 0 0", "012012"},
		{RoundRobin, "0 x 0", "020202"},
		{RoundRobin, "0 0! 0", "020202"},
		{RoundRobin, "0! x 0!", "020202"},
		{RoundRobin, "x", "------"},
		{LeastLoad, "5 1 3", "111111"},
		{LeastLoad, "1 x 0", "222222"},
		{LeastLoad, "1 0! 2", "000000"},
		{LeastLoad, "x 3! x", "111111"},
		{LeastLoad, "0- 3! x", "111111"},
		{LeastLoad, "0- x x", "000000"},
		{LeastLoad, "2 2 7 2", "013013"},
		{LeastLoad, "", "------"},
		{Random, "x 9 x", "111111"},
		{Random, "x x", "------"},
		{PowerOfTwo, "9 x 1", "222222"},
		{PowerOfTwo, "x 9 x", "111111"},
		{PowerOfTwo, "", "------"},
		{ConsistentHash, "5 1 3", "111111"}, // no key
		{ConsistentHash, "x", "------"},
	} {
		p := newPicker(c.policy, 1)
		var got strings.Builder
		for range 6 {
			i := p.pick(poolOf(c.pool), wish{})
			got.WriteString(strings.ReplaceAll(fmt.Sprint(i), "-1", "-"))
		}
		if got.String() != c.want {
			t.Errorf("%s over %q: %s, want %s", policies[c.policy], c.pool, got.String(), c.want)
		}
	}
}

// How often each worker is taken, by a policy that draws, from a fixed seed.
func TestPickDraws(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		pool   string
		least  []int // of 6000 picks
		most   []int
	}{
		{Random, "9 0 0", []int{1850, 1850, 1850}, []int{2150, 2150, 2150}},
		// The most loaded of three is never the better of two, the least loaded
		// is in two draws of three.
		{PowerOfTwo, "9 5 0", []int{0, 1850, 3850}, []int{0, 2150, 4150}},
		{PowerOfTwo, "0 0 0", []int{1850, 1850, 1850}, []int{2150, 2150, 2150}},
	} {
		p := newPicker(c.policy, 7)
		pool, got := poolOf(c.pool), make([]int, 3)
		for range 6000 {
			got[p.pick(pool, wish{})]++
		}
		for i, n := range got {
			if n < c.least[i] || n > c.most[i] {
				t.Errorf("%s over %q: %v, want between %v and %v", policies[c.policy], c.pool, got, c.least, c.most)
				break
			}
		}
	}
}

// F-42: a burst spreads, for load is booked when a leg is sent and given back
// when it ends, not when its answer begins; and equals take turns.
func TestF42BurstSpreads(t *testing.T) {
	for policy, most := range map[Policy]int64{LeastLoad: 14, RoundRobin: 14, PowerOfTwo: 17} {
		p := newPicker(policy, 3)
		pool := poolOf("0 0 0")
		for range 40 {
			pool[p.pick(pool, wish{})].load++
		}
		for i, c := range pool {
			if c.load < 40-2*most || c.load > most {
				t.Errorf("%s: worker %d has %d of 40", policies[policy], i, c.load)
			}
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
	s.probed(0, 1, "refused", 2)
	see("one failed probe", "out")
	s.probed(0, 2, "", 2)
	see("one good probe", "ready")
	s.probed(0, 4, "slow", 2)
	see("one failed probe", "ready")
	s.probed(0, 3, "slow", 2)
	see("an older probe's failure", "ready")
	s.probed(0, 5, "slow", 2)
	see("two in a row", "out")
	s.probed(0, 6, "", 2)
	at := 10 * time.Second
	for range ejectStreak {
		s.failed(at, "500", true)
	}
	see("three failed legs", "ejected")
	if s.usable(at+ejectFor-1) || !s.usable(at+ejectFor) {
		t.Error("ejected for another time than ejectFor")
	}
	if s.ready(at+doubtFor-1) || !s.ready(at+doubtFor) {
		t.Error("in doubt for another time than doubtFor")
	}
	at += ejectFor
	s.picked(at)
	if s.usable(at+ejectFor-1) || !s.usable(at+ejectFor) {
		t.Error("a trial that does not end must let the next one through after ejectFor, not before")
	}
	s.failed(at+ejectFor/2, "500", false)
	if s.usable(at+ejectFor-1) || !s.usable(at+ejectFor) {
		t.Error("a failed trial changes when the next one is")
	}
	s.served(at)
	see("a good trial", "ready")
	if !s.ready(at) {
		t.Error("a good trial leaves a doubt")
	}
	for range ejectStreak {
		s.failed(at, "500", false)
	}
	see("failures when the pool cannot spare it", "ready")
	if s.ready(at) || !s.usable(at) {
		t.Error("a worker that cannot be spared is used, and is not ready")
	}
	s.down("draining", 2)
	see("its own word", "out")
}

// A worker that comes in may have a few legs open, and one more for each that
// did well; after a while it is taken for warm.
func TestRamp(t *testing.T) {
	var s standing
	at := time.Minute
	s.probed(at, 1, "", 2)
	room := func(open int, want bool) {
		t.Helper()
		if s.full(at, open) == want {
			t.Errorf("with %d open: full is %v", open, !want)
		}
	}
	room(rampLegs-1, true)
	room(rampLegs, false)
	s.served(at)
	room(rampLegs, true)
	room(rampLegs+1, false)
	s.probed(at, 2, "", 2) // it was in already
	room(rampLegs, true)
	at += rampFor
	room(1000, true)
	for range ejectStreak {
		s.failed(at, "500", true)
	}
	s.served(at)
	room(rampLegs, true) // the leg that brought it back counts
	room(rampLegs+1, false)
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
		{func(c *Config) { c.Policy = "best" }, `--policy: unknown policy "best"; take least_load, cache_aware, consistent_hash, power_of_two, round_robin or random`},
		{func(c *Config) { c.CacheMemory = 1 }, "--cache-memory is 1 bytes; it must be between 64KiB and 4GiB"},
		{func(c *Config) { c.DecodePolicy = "best" }, `--decode-policy: unknown policy "best"`},
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

// TestHashedBeyondShare: a request that is larger than anybody's share goes to
// the one with the least load, wherever that stands.
func TestHashedBeyondShare(t *testing.T) {
	for want, pool := range []string{"10 90 90", "90 10 90", "90 90 10"} {
		c := poolOf(pool)
		for i := range c {
			c[i].name, c[i].legs = uint64(i+1), boundLegs
		}
		p := newPicker(ConsistentHash, 1)
		if got := p.pick(c, wish{keyed: true, key: 7, cost: 1 << 20}); got != want {
			t.Errorf("%s: %d, want %d", pool, got, want)
		}
	}
}

// TestRandomIsNotInTurn: the same worker comes twice in a row as often as any other.
func TestRandomIsNotInTurn(t *testing.T) {
	p, last, again := newPicker(Random, 1), -1, 0
	for range 900 {
		i := p.pick(poolOf("0 0 0"), wish{})
		if i == last {
			again++
		}
		last = i
	}
	if again < 200 || again > 400 {
		t.Errorf("%d of 900 picks are of the worker before, want about 300", again)
	}
}
