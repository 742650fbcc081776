package router

import (
	"cmp"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// worker is one member of a pool.
type worker struct {
	role          Leg
	name          string // scheme://host:port, as in logs and errors
	hash          uint64 // of the name
	url           url.URL
	plain         bool   // no TLS, and a host that goes into a request's head as it is
	bootstrapHost string // prefill: what decode is told; IPv6 in brackets
	bootstrapPort int    // prefill: 0 when it was not given
	instance      string // of one that joined

	probes atomic.Uint64 // begun

	// Under table.mu.
	slot     int // in its pool's prefix index
	standing standing
	model    string        // fingerprint that it told last; "" while it has told none
	since    time.Duration // when it told that first
	slowTill time.Duration // its /health answered, after the time-out: until when that counts
	load     int64         // tokens outstanding
	legs     int           // open
	leaving  time.Duration // not 0: it is to go, at the latest then
}

// same tells whether two are one member of a pool: what decodes are told of it
// is the same, too, and it was not started anew.
func (w *worker) same(o *worker) bool {
	return w.name == o.name && w.bootstrapPort == o.bootstrapPort && w.instance == o.instance
}

// parseWorker reads URL, and for a prefill URL[,BOOTSTRAP_PORT].
func parseWorker(role Leg, s string) (*worker, error) {
	bad := func(format string, args ...any) (*worker, error) {
		return nil, fmt.Errorf("--%s %s: %s", role, s, fmt.Sprintf(format, args...))
	}
	raw, port, hasPort := strings.Cut(s, ",")
	u, err := parseBase(raw)
	if err != nil {
		return bad("%v", err)
	}
	w := newWorker(role, *u)
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
	return w, nil
}

// newWorker makes one from a URL that parseBase gave.
func newWorker(role Leg, u url.URL) *worker {
	w := &worker{role: role, url: u, name: u.String(), bootstrapHost: u.Hostname(),
		plain: u.Scheme == "http" && strings.IndexFunc(u.Host, func(r rune) bool { return r > '~' || r == '%' }) < 0}
	w.hash = hashKey(w.name)
	if strings.Contains(w.bootstrapHost, ":") {
		w.bootstrapHost = "[" + w.bootstrapHost + "]"
	}
	return w
}

// parseBase reads the URL of a process: scheme, host and port, the port filled
// in.
func parseBase(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("not a URL like http://10.0.0.5:30000")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Path != "" && u.Path != "/" {
		return nil, fmt.Errorf("the URL has only scheme, host and port, as in %s://%s", u.Scheme, u.Host)
	}
	host := u.Hostname()
	if host == "" || strings.ContainsAny(host, " ,\"\\") {
		return nil, errors.New("the host is missing or malformed")
	}
	if p := u.Port(); p != "" {
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 {
			return nil, fmt.Errorf("port %s is not between 1 and 65535", p)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return nil, errors.New("the port after the colon is missing")
	} else if u.Scheme == "https" {
		u.Host = net.JoinHostPort(host, "443")
	} else {
		u.Host = net.JoinHostPort(host, "80")
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, nil
}

// leaveFor is how long a worker that was removed goes on being used while there
// is no other to use.
const leaveFor = 30 * time.Second

// table is the pools of workers and who is in them. The members may change at
// any time. One that is removed leaves when another one of its pool is usable,
// or after leaveFor: so replacing the members never leaves a gap, whatever the
// order and however long the new ones take to start. Its legs go on to their
// end, and it is probed until then.
type table struct {
	maxEjected float64
	failLimit  int
	metrics    *metric.Set
	given      [2][]*worker // the members that flags and file name, by leg; Router.setting is held

	mu    sync.Mutex
	pools [2]pool // by leg
}

type pool struct {
	workers []*worker // the members, also those that are leaving
	gone    []*worker // members no more, with legs that are open
	picker  picker
	seen    []candidate // scratch for pick
}

func newTable(cfg *Config, m *metric.Set) (*table, error) {
	t := &table{maxEjected: cfg.MaxEjected, failLimit: cfg.HealthFails, metrics: m}
	seed := maphash.MakeSeed()
	for leg, name := range [...]string{cfg.PrefillPolicy, cfg.DecodePolicy} {
		flag := "policy"
		if name != "" {
			flag = Leg(leg).String() + "-policy"
		}
		policy, err := ParsePolicy(cmp.Or(name, cfg.Policy))
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
		p := newPicker(policy, rand.Uint64())
		if p.seed = seed; policy == CacheAware {
			p.index = newPrefixIndex(cfg.CacheMemory)
		}
		t.pools[leg].picker = p
	}
	lists, err := parseWorkers(cfg.Prefill, cfg.Decode)
	if err != nil {
		return nil, err
	}
	t.given = lists
	t.set(0, lists)
	return t, nil
}

// parseWorkers reads the members of both pools.
func parseWorkers(prefill, decode []string) (lists [2][]*worker, err error) {
	for leg, urls := range [...][]string{prefill, decode} {
		for _, s := range urls {
			w, err := parseWorker(Leg(leg), s)
			if err != nil {
				return lists, err
			}
			if slices.ContainsFunc(lists[leg], func(o *worker) bool { return o.name == w.name }) {
				return lists, fmt.Errorf("%s %s is given twice", w.role, w.name)
			}
			lists[leg] = append(lists[leg], w)
		}
	}
	return lists, nil
}

// set makes these the members and tells who is new and who is to leave. A
// worker that stays, or comes back before it is gone, keeps its standing and
// its load.
func (t *table) set(now time.Duration, lists [2][]*worker) (added, removed []*worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for leg := range t.pools {
		p := &t.pools[leg]
		known := slices.Concat(p.workers, p.gone)
		var members []*worker
		for _, w := range lists[leg] {
			if i := slices.IndexFunc(known, w.same); i >= 0 {
				w = known[i]
				w.leaving = 0
			} else {
				added = append(added, w)
				p.seat(w, slices.Concat(known, members))
			}
			members = append(members, w)
		}
		stays := func(w *worker) bool { return slices.Contains(members, w) }
		p.gone = slices.DeleteFunc(p.gone, stays)
		for _, w := range p.workers {
			if stays(w) {
				continue
			}
			if w.leaving == 0 {
				w.leaving = now + leaveFor
				removed = append(removed, w)
			}
			members = append(members, w)
		}
		p.workers = members
	}
	t.sweep(now)
	t.count()
	return added, removed
}

// seat gives a new worker a slot of its own in the prefix index, as long as
// there are 64, and clears it.
func (p *pool) seat(w *worker, others []*worker) {
	for slices.ContainsFunc(others, func(o *worker) bool { return o.slot == w.slot }) {
		w.slot++
	}
	if p.picker.index != nil && p.picker.index.turn > 0 { // else it is clear, and its memory not yet in use
		p.picker.index.forget(w.slot)
	}
}

// sweep takes those out who are leaving and are not needed any more.
func (t *table) sweep(now time.Duration) {
	for leg := range t.pools {
		p := &t.pools[leg]
		replaced := slices.ContainsFunc(p.workers, func(w *worker) bool { return w.leaving == 0 && w.standing.usable(now) })
		p.workers = slices.DeleteFunc(p.workers, func(w *worker) bool {
			goes := w.leaving != 0 && (replaced || now >= w.leaving)
			if goes {
				p.gone = append(p.gone, w)
			}
			return goes
		})
	}
}

// forget tells whether a worker is gone and nothing of it is left to watch.
func (t *table) forget(w *worker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := &t.pools[w.role]
	i := slices.Index(p.gone, w)
	if i < 0 || w.legs > 0 {
		return false
	}
	p.gone = slices.Delete(p.gone, i, i+1)
	t.count()
	return true
}

// wish is what the request wants of each pool: what it adds to each leg's load,
// in tokens as far as they can be told without the tokenizer (the prefill
// computes the prompt, the decode holds its pages and runs for as many tokens as
// are asked for), and by what a worker is chosen. It is made once, from the
// body and the header.
func (t *table) wish(x *exchange) (wishes [2]wish) {
	cost := x.cost()
	for leg := range t.pools {
		w := &wishes[leg]
		w.cost = cost[leg]
		switch p := &t.pools[leg].picker; p.policy { // policy and seed do not change
		case ConsistentHash:
			key := cmp.Or(x.req.Header.Get(routingKey), x.req.Header.Get(sessionID))
			if key == "" {
				key = x.scan.User()
			}
			w.keyed, w.key = key != "", hashKey(key)
		case CacheAware:
			if w.prefixes = wishes[Prefill].prefixes; w.prefixes == nil {
				w.prefixes = prefixesOf(nil, p.seed, x.scan.Prompt())
			}
		}
	}
	return wishes
}

// What a routing key is taken from, before the body's user: the header of
// sglang-router and smg, and the one that vllm-router and many clients use. In
// the canonical form, which costs nothing to look up.
const (
	routingKey = "X-Smg-Routing-Key"
	sessionID  = "X-Session-Id"
)

func (x *exchange) cost() [2]int64 {
	prompt := int64(x.scan.PromptBytes)/bytesPerToken + 16*int64(x.items)
	answer := int64(x.scan.MaxTokens)
	if answer == 0 {
		answer = usualAnswer
	}
	return [2]int64{prompt, prompt + min(answer, longAnswer)*int64(x.items)}
}

const (
	usualAnswer = 256   // tokens, where the request does not say
	longAnswer  = 16384 // more is a bound that the client does not expect to reach
)

// pickPair chooses a worker for each leg and books the request's cost on both;
// release gives it back. What a prefill is thought to have of the prompt costs
// it nothing. Neither is booked unless both are there. avoid lists, by leg,
// workers that are not to be taken.
func (t *table) pickPair(now time.Duration, wishes *[2]wish, avoid [2][]*worker) (got [2]*worker, cost [2]int64, err *api.Error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for leg := range t.pools {
		p := &t.pools[leg]
		p.seen = p.seen[:0]
		for _, w := range p.workers {
			c := candidate{usable: w.standing.usable(now) && !slices.Contains(avoid[leg], w), load: w.load,
				legs: w.legs, slot: w.slot, name: w.hash}
			if w.leaving != 0 {
				c.last = leaving
			} else if w.standing.full(now, w.legs) {
				c.last = full
			}
			p.seen = append(p.seen, c)
		}
		i := p.picker.pick(p.seen, wishes[leg])
		if i < 0 {
			return got, cost, t.noneUsable(Leg(leg), now)
		}
		got[leg], cost[leg] = p.workers[i], wishes[leg].cost
		if Leg(leg) == Prefill {
			cost[leg] = max(1, cost[leg]-p.seen[i].cached)
		}
	}
	for leg, w := range got {
		if index := t.pools[leg].picker.index; index != nil {
			index.note(wishes[leg].prefixes, w.slot)
		}
		w.load += cost[leg]
		w.legs++
		w.standing.picked(now)
	}
	return got, cost, nil
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
	if len(t.pools[leg].workers) == 0 {
		return "there is none"
	}
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

// out tells whether a worker's probes fail.
func (t *table) out(w *worker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !w.standing.up
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
// fingerprint is of the model that the worker told, "" if it did not. One that
// has another model than the fleet is out at once: its name leads to a stranger.
func (t *table) probed(now time.Duration, w *worker, seq uint64, fingerprint, cause string) (cameIn, wentOut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := w.standing.up
	if fingerprint != "" && fingerprint != w.model {
		w.model, w.since = fingerprint, now
	}
	limit := t.failLimit
	if fleet := t.model(); cause == "" && w.model != "" && w.model != fleet {
		cause, limit = fmt.Sprintf("it serves another model than the fleet: fingerprint %s, the fleet's is %s", w.model, fleet), 1
	}
	w.standing.probed(now, seq, cause, limit)
	t.sweep(now)
	t.count()
	return w.standing.up && !was, was && !w.standing.up
}

// model is the fingerprint that the fleet serves: the one that most members
// told, and of equals the one that is known for longest, so that of two workers
// the one that has changed is the stranger. A fleet that moves to another model
// one worker after another changes over in the middle.
func (t *table) model() string {
	type group struct {
		n     int
		since time.Duration
	}
	groups := map[string]group{}
	best := ""
	for leg := range t.pools {
		for _, w := range t.pools[leg].workers {
			if w.model == "" {
				continue
			}
			g, known := groups[w.model]
			if g.n++; !known || w.since < g.since {
				g.since = w.since
			}
			groups[w.model] = g
		}
	}
	for m, g := range groups {
		if b := groups[best]; best == "" || g.n > b.n || g.n == b.n && (g.since < b.since || g.since == b.since && m < best) {
			best = m
		}
	}
	return best
}

// slow notes that a worker's /health has answered, but late, and tells whether
// the worker is out; isSlow tells whether one did of late.
func (t *table) slow(till time.Duration, w *worker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.slowTill = till
	return !w.standing.up
}

func (t *table) isSlow(now time.Duration, w *worker) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return now < w.slowTill
}

// state is one word for metrics and tables.
func (w *worker) state() string {
	if w.leaving != 0 {
		return "leaving"
	}
	return w.standing.state()
}

// count sets the gauges of workers by state.
func (t *table) count() {
	for leg := range t.pools {
		n := map[string]int{"starting": 0, "ready": 0, "out": 0, "ejected": 0, "leaving": len(t.pools[leg].gone)}
		for _, w := range t.pools[leg].workers {
			n[w.state()]++
		}
		for state, k := range n {
			t.metrics.Workers(Leg(leg).String(), state).Set(float64(k))
		}
	}
}

// usable are the workers to ask what any one can answer: those of prefer's pool,
// then the others.
func (t *table) usable(now time.Duration, prefer Leg) (ws []*worker, e *api.Error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, leg := range []Leg{prefer, prefer.other()} {
		for _, w := range t.pools[leg].workers {
			if w.standing.usable(now) {
				ws = append(ws, w)
			}
		}
	}
	if len(ws) == 0 {
		e = t.noneUsable(prefer, now)
	}
	return ws, e
}

// all lists the workers, prefills first. The slice is the caller's.
func (t *table) all() []*worker {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Concat(t.pools[Prefill].workers, t.pools[Decode].workers)
}

// memberRow is a worker as /debug/workers shows it.
type memberRow struct {
	Role          string `json:"role"`
	URL           string `json:"url"`
	BootstrapPort int    `json:"bootstrap_port,omitempty"`
	State         string `json:"state"`
	Cause         string `json:"cause,omitempty"`
	Legs          int    `json:"legs"`
	Tokens        int64  `json:"tokens_outstanding"`
	Instance      string `json:"instance,omitempty"` // of one that joined
}

// rows lists the workers, also those that are gone and have legs left.
func (t *table) rows() []memberRow {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := []memberRow{}
	for i := range t.pools {
		for _, w := range slices.Concat(t.pools[i].workers, t.pools[i].gone) {
			rows = append(rows, memberRow{w.role.String(), w.name, w.bootstrapPort, w.state(), w.standing.cause, w.legs, w.load, w.instance})
		}
	}
	return rows
}
