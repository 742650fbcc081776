package router

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// worker is one member of a pool.
type worker struct {
	role          Leg
	name          string // scheme://host:port, as in logs and errors
	url           url.URL
	bootstrapHost string // prefill: what decode is told; IPv6 in brackets
	bootstrapPort int    // prefill: 0 when it was not given

	// Under table.mu.
	standing standing
	load     int64 // tokens outstanding
	legs     int   // open
}

// parseWorker reads URL, and for a prefill URL[,BOOTSTRAP_PORT].
func parseWorker(role Leg, s string) (*worker, error) {
	bad := func(format string, args ...any) (*worker, error) {
		return nil, fmt.Errorf("--%s %s: %s", role, s, fmt.Sprintf(format, args...))
	}
	raw, port, hasPort := strings.Cut(s, ",")
	w := &worker{role: role}
	if hasPort {
		if role == Decode {
			return bad("a decode worker has no bootstrap port; give only its URL")
		}
		p, err := strconv.ParseUint(port, 10, 16)
		if err != nil || p == 0 {
			return bad("%q is no bootstrap port; it must be between 1 and 65535", port)
		}
		w.bootstrapPort = int(p)
	}
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return bad("not a URL like http://10.0.0.5:30000")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Path != "" && u.Path != "/" {
		return bad("a worker's URL has only scheme, host and port, as in %s://%s", u.Scheme, u.Host)
	}
	host := u.Hostname()
	if host == "" || strings.ContainsAny(host, " \"\\") {
		return bad("the host is missing or malformed")
	}
	if p := u.Port(); p != "" {
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 {
			return bad("port %s is not between 1 and 65535", p)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return bad("the port after the colon is missing")
	} else if u.Scheme == "https" {
		u.Host = net.JoinHostPort(host, "443")
	} else {
		u.Host = net.JoinHostPort(host, "80")
	}
	w.url = url.URL{Scheme: u.Scheme, Host: u.Host}
	w.name = w.url.String()
	if w.bootstrapHost = host; strings.Contains(host, ":") {
		w.bootstrapHost = "[" + host + "]"
	}
	return w, nil
}

// table is the pools of workers and who is in them.
type table struct {
	maxEjected float64
	failLimit  int
	metrics    *metric.Set

	mu    sync.Mutex
	pools [2]pool // by leg
}

type pool struct {
	workers []*worker
	picker  picker
	seen    []candidate // scratch for pick
}

func newTable(cfg *Config, m *metric.Set) (*table, error) {
	t := &table{maxEjected: cfg.MaxEjected, failLimit: cfg.HealthFails, metrics: m}
	for leg, c := range [...]struct {
		urls   []string
		policy string
	}{{cfg.Prefill, cfg.PrefillPolicy}, {cfg.Decode, cfg.DecodePolicy}} {
		if c.policy == "" {
			c.policy = cfg.Policy
		}
		policy, err := ParsePolicy(c.policy)
		if err != nil {
			return nil, err
		}
		p := &t.pools[leg]
		p.picker = newPicker(policy, rand.Uint64())
		for _, s := range c.urls {
			w, err := parseWorker(Leg(leg), s)
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(p.workers, func(o *worker) bool { return o.name == w.name }) {
				return nil, fmt.Errorf("--%s %s is given twice", w.role, w.name)
			}
			p.workers = append(p.workers, w)
		}
		p.seen = make([]candidate, len(p.workers))
	}
	t.count()
	return t, nil
}

// cost is what the request adds to each leg's load, in tokens as far as they can
// be told without the tokenizer: the prefill computes the prompt, the decode
// holds its pages and runs for as many tokens as are asked for.
func (x *exchange) cost() [2]int64 {
	prompt := int64(x.scan.PromptBytes)/bytesPerToken + 16*int64(x.items)
	answer := int64(x.scan.MaxTokens)
	if answer == 0 {
		answer = usualAnswer
	}
	return [2]int64{prompt, prompt + min(answer, longAnswer)*int64(x.items)}
}

const (
	bytesPerToken = 4     // of text, and of ids with their commas
	usualAnswer   = 256   // tokens, where the request does not say
	longAnswer    = 16384 // more is a bound that the client does not expect to reach
)

// pickPair chooses a worker for each leg and books the request's cost on both;
// release gives it back. Neither is booked unless both are there. avoid lists,
// by leg, workers that are not to be taken.
func (t *table) pickPair(now time.Duration, cost [2]int64, avoid [2][]*worker) (got [2]*worker, err *api.Error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for leg := range t.pools {
		p := &t.pools[leg]
		for i, w := range p.workers {
			p.seen[i] = candidate{usable: w.standing.usable(now) && !slices.Contains(avoid[leg], w), full: w.standing.full(now, w.legs), load: w.load}
		}
		i := p.picker.pick(p.seen)
		if i < 0 {
			return got, t.noneUsable(Leg(leg), now)
		}
		got[leg] = p.workers[i]
	}
	for leg, w := range got {
		w.load += cost[leg]
		w.legs++
		w.standing.picked(now)
	}
	return got, nil
}

// release ends the booking of one leg.
func (t *table) release(w *worker, cost int64) {
	t.mu.Lock()
	w.load -= cost
	w.legs--
	t.mu.Unlock()
}

func (t *table) noneUsable(leg Leg, now time.Duration) *api.Error {
	e := api.Errorf(leg.none(), "no usable %s worker: %s", leg, t.why(leg, now))
	e.RetryAfter = time.Second
	return e
}

// why says of each worker that is not usable what is wrong with it, at most of
// four.
func (t *table) why(leg Leg, now time.Duration) string {
	var b strings.Builder
	out := 0
	for _, w := range t.pools[leg].workers {
		if w.standing.ready(now) {
			continue
		}
		if out++; out > 4 {
			continue
		}
		if out > 1 {
			b.WriteString("; ")
		}
		state := w.standing.state()
		if state == "ready" {
			state = "failing"
		}
		fmt.Fprintf(&b, "%s is %s", w.name, state)
		if w.standing.cause != "" {
			fmt.Fprintf(&b, " (%s)", w.standing.cause)
		}
	}
	switch {
	case out == 0:
		return "all have been tried"
	case out > 4:
		fmt.Fprintf(&b, "; and %d more", out-4)
	}
	return b.String()
}

// spare tells whether a pair could be had without those in avoid.
func (t *table) spare(now time.Duration, avoid [2][]*worker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for leg := range t.pools {
		if !slices.ContainsFunc(t.pools[leg].workers, func(w *worker) bool {
			return w.standing.usable(now) && !slices.Contains(avoid[leg], w)
		}) {
			return false
		}
	}
	return true
}

// notReady says why no request can be served now, "" when one can. It goes by
// what requests meet, too: a pool whose every worker fails them is not ready,
// also when none of it may be ejected.
func (t *table) notReady(now time.Duration) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	for leg := range t.pools {
		if !slices.ContainsFunc(t.pools[leg].workers, func(w *worker) bool { return w.standing.ready(now) }) {
			return t.noneUsable(Leg(leg), now).Message
		}
	}
	return ""
}

// served and blamed take in the fate of a leg.
func (t *table) served(now time.Duration, w *worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := w.standing.ejected
	w.standing.served(now)
	if was {
		t.count()
	}
}

func (t *table) blamed(now time.Duration, w *worker, v verdict) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case v.down:
		w.standing.down(v.err.Message, t.failLimit)
	case v.health:
		p := &t.pools[w.role]
		ejected := 0
		for _, o := range p.workers {
			if o.standing.ejected {
				ejected++
			}
		}
		w.standing.failed(now, v.err.Message, float64(ejected+1) <= t.maxEjected*float64(len(p.workers)))
	}
	t.count()
}

// probed takes in the end of a probe and tells whether it took the worker out.
func (t *table) probed(now time.Duration, w *worker, seq uint64, cause string) (cameIn, wentOut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := w.standing.up
	w.standing.probed(now, seq, cause, t.failLimit)
	t.count()
	return w.standing.up && !was, was && !w.standing.up
}

// count sets the gauges of workers by state.
func (t *table) count() {
	for leg := range t.pools {
		n := map[string]int{"starting": 0, "ready": 0, "out": 0, "ejected": 0}
		for _, w := range t.pools[leg].workers {
			n[w.standing.state()]++
		}
		for state, k := range n {
			t.metrics.Workers(Leg(leg).String(), state).Set(float64(k))
		}
	}
}

// first is a usable worker, decode's or prefill's as asked, for requests that
// any one can answer. It prefers prefer's pool and falls back on the other.
func (t *table) first(now time.Duration, prefer Leg) (*worker, *api.Error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, leg := range []Leg{prefer, prefer.other()} {
		for _, w := range t.pools[leg].workers {
			if w.standing.usable(now) {
				return w, nil
			}
		}
	}
	return nil, t.noneUsable(prefer, now)
}

// all lists the workers, prefills first. The slice is the caller's.
func (t *table) all() []*worker {
	return slices.Concat(t.pools[Prefill].workers, t.pools[Decode].workers)
}
