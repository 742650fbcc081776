package sim

import (
	"fmt"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/sched"
)

// A leg is one HTTP exchange between the router and a worker. The messages:
type (
	askMsg struct { // router to worker
		q    *Request
		room int64
		addr string // of the prefill's registry; to a decode
		left time.Duration
		seed *uint64 // of this attempt: what P drew
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
	q    *Request
	room int64
	addr string
	s    *socket
	over bool
}

func (l *legEnd) token(index int, token int32) {
	if l != nil {
		l.s.send(tokenMsg{index, token}, 60)
	}
}

func (l *legEnd) finish(f sched.Finish) {
	l.over = true
	l.s.send(endMsg{f.Reason, f.Err}, 100)
	l.s.close("the answer is complete")
}

// serveLeg takes a leg at a worker's HTTP port.
func (w *worker) serveLeg(s *socket, prefill func(*job)) {
	s.take = func(m any) {
		a := m.(*askMsg)
		w.lastID++
		leg := &legEnd{q: a.q, room: a.room, addr: a.addr, s: s}
		j := &job{id: w.lastID, leg: leg, prompt: a.q.prompt(), deadline: w.clock() + a.left,
			sampling: engine.Sampling{Seed: a.q.Seed, Temperature: float32(a.q.Temperature)}, seeded: a.q.Seed != 0}
		if prefill != nil {
			prefill(j)
			*a.seed = j.sampling.Seed
		}
		s.ended = func(string) {
			if !leg.over {
				w.push(&sched.Abort{Req: j.id, Cause: &sched.Error{Code: sched.ClientGone, Message: "the router closed the connection"}})
			}
		}
		w.push(j)
	}
}

// front is the router with its clients.
type front struct {
	*process
	net   *network
	plan  *Plan
	calls []*call
	rooms int64
}

// call is one request at the router.
type call struct {
	f       *front
	q       *Request
	attempt int
	legs    [2]*socket // of this attempt; nil: none, or over
	seed    *uint64    // of this attempt
	tokens  []int32
	began   time.Duration
	over    bool
	err     *sched.Error // how it ended; nil: well
	ended   time.Duration
}

// The legs of a call.
const (
	prefillLeg = iota
	decodeLeg
)

// connectTime is how long the router waits for a connection to a worker.
const connectTime = 2 * time.Second

// start sends a request on its way.
func (f *front) start(q *Request) *call {
	c := &call{f: f, q: q, began: f.now}
	f.calls = append(f.calls, c)
	f.after(q.Timeout, func() { c.finish(&sched.Error{Code: sched.DeadlineExceeded, Message: "the request's time ran out"}) })
	if q.Leaves > 0 {
		f.after(q.Leaves, func() { c.finish(clientGone()) })
	}
	c.try()
	return c
}

// try sends both legs of another attempt.
func (c *call) try() {
	f, q := c.f, c.q
	c.attempt++
	f.rooms += 7
	seed := q.Seed
	c.seed = &seed
	p := (q.Prefill + c.attempt - 1) % len(f.plan.Prefills)
	d := (q.Decode + c.attempt - 1) % len(f.plan.Decodes)
	left := q.Timeout - (f.now - c.began)
	f.say("request %d attempt %d: p%d d%d room %d, %d tokens, max %d", q.ID, c.attempt, p, d, f.rooms, len(q.prompt()), q.MaxTokens)
	for leg, name := range [2]string{fmt.Sprintf("p%d", p), fmt.Sprintf("d%d", d)} {
		c.send(leg, name, &askMsg{q: q, room: f.rooms, addr: fmt.Sprintf("p%d", p), left: left, seed: c.seed})
	}
}

func (c *call) send(leg int, name string, m *askMsg) {
	attempt := c.attempt
	mine := func() bool { return !c.over && c.attempt == attempt }
	c.legs[leg] = nil
	connected := false
	c.f.after(connectTime, func() {
		if !connected && mine() {
			c.failed(leg, &sched.Error{Code: sched.PrefillUnreachable, Message: "no connection in time"})
		}
	})
	c.f.net.dial(c.f.process, name, func(to *process, s *socket) bool {
		switch w := c.f.net.workers[to].(type) {
		case *prefill:
			w.serveLeg(s, w.draws)
		case *decode:
			w.serveLeg(s, nil)
		}
		return true
	}, func(s *socket, _ *process) {
		connected = true
		switch {
		case s == nil && mine():
			c.failed(leg, &sched.Error{Code: sched.PrefillUnreachable, Message: "connection refused"})
		case s == nil:
		case !mine():
			s.close("over")
		default:
			c.legs[leg] = s
			s.take = func(got any) {
				if mine() {
					c.take(leg, got)
				}
			}
			s.ended = func(cause string) {
				if mine() && c.legs[leg] == s {
					c.failed(leg, &sched.Error{Code: sched.DecodeUnreachable, Message: cause})
				}
			}
			s.send(m, 300+4*len(m.q.prompt()))
		}
	})
}

func (c *call) take(leg int, m any) {
	switch m := m.(type) {
	case tokenMsg:
		c.token(m)
	case endMsg:
		c.legs[leg] = nil
		switch {
		case m.err != nil:
			c.failed(leg, m.err)
		case leg == decodeLeg:
			if m.reason == sched.Length && len(c.tokens) != c.q.MaxTokens {
				c.f.broken("tokens", "request %d: %d tokens of %d and an end", c.q.ID, len(c.tokens), c.q.MaxTokens)
			}
			c.finish(nil)
		}
	}
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
	c.tokens = append(c.tokens, m.token)
}

func (c *call) failed(leg int, err *sched.Error) {
	switch {
	case leg == prefillLeg && len(c.tokens) > 0: // decode has all it needs
		return
	case len(c.tokens) == 0 && c.attempt <= c.f.plan.Retries && err.Code != sched.ContextLengthExceeded:
		c.f.say("request %d attempt %d failed at leg %d: %v", c.q.ID, c.attempt, leg, err)
		c.endLegs()
		c.try()
		return
	}
	c.finish(err)
}

func (c *call) endLegs() {
	for leg, s := range c.legs {
		if s != nil {
			s.close("the router ends the leg")
			c.legs[leg] = nil
		}
	}
}

// finish ends the request, once.
func (c *call) finish(err *sched.Error) {
	if c.over {
		return
	}
	c.endLegs()
	c.over, c.err, c.ended = true, err, c.f.now
	c.f.say("request %d ends after %d tokens: %v", c.q.ID, len(c.tokens), err)
}

func clientGone() *sched.Error {
	return &sched.Error{Code: sched.ClientGone, Message: "the client went away"}
}
