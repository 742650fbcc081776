package sim

import (
	"slices"
	"strconv"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/router"
	"github.com/metronome-serve/metronome/internal/sched"
)

// A leg is one HTTP exchange between the router and a worker. The messages:
type (
	askMsg struct { // router to worker
		q    *Request
		room int64
		addr string // of the prefill's registry; to a decode
		left time.Duration
		done []int32 // the answer so far, for a stream that goes on
		seed *uint64 // of this attempt: the client's, the stream's, or what P draws
	}
	tokenMsg struct {
		index int
		token int32
	}
	endMsg struct {
		reason sched.Reason
		err    *sched.Error
	}
)

// legEnd is the worker's end of a leg.
type legEnd struct {
	ask  *askMsg
	room int64
	addr string
	s    *socket
	over bool
}

func (l *legEnd) token(index int, token int32) {
	if l != nil {
		l.s.send(tokenMsg{len(l.ask.done) + index, token}, 60)
	}
}

func (l *legEnd) finish(f sched.Finish) {
	l.over = true
	l.s.send(endMsg{f.Reason, f.Err}, 100)
	l.s.close("the answer is complete")
}

// serveLeg takes a leg at a worker's HTTP port. place says which of its loops
// gets the job; nil: none can.
func (p *process) serveLeg(s *socket, place func(*job) *worker) {
	s.take = func(m any) {
		a := m.(*askMsg)
		leg := &legEnd{ask: a, room: a.room, addr: a.addr, s: s}
		if p.draining {
			leg.refuse(sched.Draining, "the worker is draining")
			return
		}
		j := &job{leg: leg, prompt: append(a.q.prompt(), a.done...), deadline: p.clock() + a.left,
			sampling: engine.Sampling{Seed: *a.seed, Temperature: float32(a.q.Temperature)}, seeded: *a.seed != 0}
		w := place(j)
		if w == nil {
			leg.refuse(sched.InvalidRequest, "there is no such DP rank")
			return
		}
		w.lastID++
		j.id, *a.seed = w.lastID, j.sampling.Seed
		s.ended = func(string) {
			if !leg.over {
				w.push(&sched.Abort{Req: j.id, Cause: &sched.Error{Code: sched.ClientGone, Message: "the router closed the connection"}})
			}
		}
		w.push(j)
	}
}

func (l *legEnd) refuse(code sched.Code, why string) {
	l.finish(sched.Finish{Reason: sched.Failed, Err: &sched.Error{Code: code, Message: why}})
}

// front is the router with its clients.
type front struct {
	*process
	net    *network
	plan   *Plan
	calls  []*call
	rooms  int64
	heard  func(q *Request) // a token has come; or nil
	missed map[string]int   // probes in a row, by worker
}

// call is one request at the router.
type call struct {
	f       *front
	q       *Request
	m       *router.Machine
	legs    [2]*socket // of the attempt of that number; nil: none, or over
	seed    *uint64    // of this attempt
	workers [2]string  // the same
	tokens  []int32
	began   time.Duration
	spoke   time.Duration // when the last token came
	picks   int
	over    bool
	ended   time.Duration
	code    string // how it ended; "": well
	text    string
}

// connectTime is how long the router waits for a connection to a worker.
const connectTime = 2 * time.Second

// start sends a request on its way.
func (f *front) start(q *Request) *call {
	c := &call{f: f, q: q, began: f.now, m: router.NewMachine(f.plan.Retries, f.plan.Migrations)}
	f.calls = append(f.calls, c)
	if f.draining {
		c.over, c.code, c.text, c.ended = true, string(sched.Draining), "the router is stopping", f.now
		return c
	}
	f.after(q.Timeout, func() { c.tell(func() { c.m.Deadline(f.now) }) })
	if q.Leaves > 0 {
		f.after(q.Leaves, c.leave)
	}
	c.tell(func() { c.m.Start(f.now) })
	return c
}

// stopAll ends every request: the router's drain is over.
func (f *front) stopAll() {
	for _, c := range f.calls {
		c.tell(func() { c.m.Stop(f.now) })
	}
}

func (c *call) leave() { c.tell(func() { c.m.Gone(c.f.now) }) }

// tell tells the machine something and does what it wants then.
func (c *call) tell(what func()) {
	if c.over {
		return
	}
	what()
	for _, do := range c.m.Do() {
		switch do.Kind {
		case router.DoPick:
			defer c.pick()
		case router.DoSend:
			c.sendBoth()
		case router.DoEnd:
			c.endLeg(do.Leg, do.Grace)
		}
	}
	if code, text, over := c.m.End(); over && !c.over {
		c.over, c.code, c.text, c.ended = true, code, text, c.f.now
		c.f.say("request %d ends after %d tokens: %s %s", c.q.ID, len(c.tokens), code, text)
	}
}

func (c *call) endLeg(leg router.Leg, grace time.Duration) {
	s := c.legs[leg]
	if s == nil {
		return
	}
	c.legs[leg] = nil
	c.f.after(grace, func() { s.close("the router ends the leg") })
}

// pick takes the pair that the plan says, then the others in turn, without
// those whose probes fail.
func (c *call) pick() {
	plan := c.f.plan
	p, okP := c.f.usable("p", c.q.Prefill+c.picks, len(plan.Prefills))
	d, okD := c.f.usable("d", c.q.Decode+c.picks, len(plan.Decodes))
	c.picks++
	switch {
	case !okP:
		c.tell(func() { c.m.None(c.f.now, string(sched.NoPrefill), "no prefill worker is usable") })
	case !okD:
		c.tell(func() { c.m.None(c.f.now, "no_decode", "no decode worker is usable") })
	default:
		c.workers = [2]string{router.Prefill: p, router.Decode: d}
		c.tell(func() { c.m.Picked(c.f.now, p, d) })
	}
}

// usable is the first of n workers, from one of them on, whose probes do not fail.
func (f *front) usable(role string, from, n int) (name string, ok bool) {
	for i := range n {
		if name := role + strconv.Itoa((from+i)%n); f.missed[name] < probesOut {
			return name, true
		}
	}
	return "", false
}

// Of probes: how often, how long one may take, and how many must fail in a row.
const (
	probeEvery = 2 * time.Second
	probeTime  = time.Second
	probesOut  = 2
)

// probe asks a worker now and then whether it is well. When it is out, whoever
// waits for it is told.
func (f *front) probe(name string) {
	over := false
	answered := func(well bool) {
		if over {
			return
		}
		over = true
		if f.missed[name]++; well {
			f.missed[name] = 0
		}
		if f.missed[name] >= probesOut {
			for _, c := range f.calls {
				c.out(name)
			}
		}
	}
	cancel := f.net.ask(f.process, name, func(to *process, reply func(any)) { reply(!to.draining) },
		func(m any, _ string) { answered(m == true) })
	f.after(probeTime, func() {
		cancel()
		answered(false)
	})
	f.after(probeEvery, func() { f.probe(name) })
}

// out tells the machine that the probes of a worker fail.
func (c *call) out(name string) {
	n := c.m.Attempt()
	for _, leg := range [...]router.Leg{router.Prefill, router.Decode} {
		if c.over || c.workers[leg] != name || c.m.Attempt() != n {
			continue
		}
		long, all := probeTime, len(c.f.plan.Decodes)
		if leg == router.Prefill { // most streams never need theirs again
			long, all = 5*probeTime, len(c.f.plan.Prefills)
		}
		_, spare := c.f.usable(name[:1], 0, all)
		c.tell(func() { c.m.Out(c.f.now, n, leg, spare, len(c.tokens) > 0 && c.f.now-c.spoke >= long) })
	}
}

// sendBoth sends both legs of an attempt.
func (c *call) sendBoth() {
	f, q := c.f, c.q
	f.rooms += 7
	seed := q.Seed
	if len(c.tokens) > 0 {
		seed = *c.seed
	}
	c.seed = &seed
	p, d := c.workers[router.Prefill], c.workers[router.Decode]
	f.say("request %d attempt %d: %s %s room %d, %d + %d tokens, max %d", q.ID, c.m.Attempt(), p, d, f.rooms, q.Length, len(c.tokens), q.MaxTokens)
	ask := &askMsg{q: q, room: f.rooms, addr: p, left: q.Timeout - (f.now - c.began), done: slices.Clone(c.tokens), seed: c.seed}
	c.send(router.Prefill, p, ask)
	c.send(router.Decode, d, ask)
}

func (c *call) send(leg router.Leg, name string, m *askMsg) {
	n := c.m.Attempt()
	began := false // data has come
	failed := func(x router.Failure) {
		c.tell(func() { c.m.Failed(c.f.now, n, leg, x, len(c.tokens) > 0) })
	}
	connected := false
	c.legs[leg] = nil
	c.f.after(connectTime, func() {
		if !connected {
			failed(router.Failure{Text: "no connection in time"})
		}
	})
	c.f.net.dial(c.f.process, name, func(to *process, s *socket) bool {
		switch w := c.f.net.workers[to].(type) {
		case *prefill:
			w.serveLeg(s, w.place)
		case *decode:
			w.serveLeg(s, func(*job) *worker { return &w.worker })
		}
		return true
	}, func(s *socket, _ *process) {
		switch {
		case s == nil:
			connected = true
			failed(router.Failure{Text: "connection refused"})
			return
		case c.over || c.m.Attempt() != n:
			s.close("over")
			return
		}
		connected = true
		c.legs[leg] = s
		s.take = func(got any) {
			if c.over || c.m.Attempt() != n || c.legs[leg] != s {
				return
			}
			switch got := got.(type) {
			case tokenMsg:
				if !began {
					began = true
					c.tell(func() { c.m.Data(c.f.now, n) })
				}
				c.token(got)
			case endMsg:
				c.end(leg, n, got, failed)
			}
		}
		s.ended = func(cause string) { failed(router.Failure{Cut: began, Text: cause}) }
		s.send(m, 300+4*m.q.Length)
	})
}

// end takes the end of a leg's answer.
func (c *call) end(leg router.Leg, n int, m endMsg, failed func(router.Failure)) {
	if m.err != nil {
		failed(router.Failure{Code: string(m.err.Code), Text: m.err.Message})
		return
	}
	if leg == router.Decode && m.reason == sched.Length && len(c.tokens) != c.q.MaxTokens {
		c.f.broken("tokens", "request %d: %d tokens of %d and an end", c.q.ID, len(c.tokens), c.q.MaxTokens)
	}
	c.tell(func() { c.m.Ended(c.f.now, n, leg) })
}

// token judges one token of the answer.
func (c *call) token(m tokenMsg) {
	if m.index != len(c.tokens) {
		c.f.broken("tokens", "request %d: token %d after %d tokens", c.q.ID, m.index, len(c.tokens))
		return
	}
	seed := engine.SimSeed(&engine.Sampling{Seed: *c.seed, Temperature: float32(c.q.Temperature)})
	if want := engine.RefToken(c.q.prompt(), c.tokens, seed); m.token != want {
		c.f.broken("tokens", "request %d: token %d is %d, it should be %d", c.q.ID, m.index, m.token, want)
	}
	c.tokens, c.spoke = append(c.tokens, m.token), c.f.now
	if c.f.heard != nil {
		c.f.heard(c.q)
	}
}
