//metronome:pure

package sched

import (
	"cmp"
	"time"
)

// Peers is what a decode core knows of each prefill, and how it learns it
// without ever waiting. It is a sub-machine of Decode: owned by one goroutine,
// no clock, no network. docs/peers.md has the rules. Decode drives it in the
// order of one turn:
//
//   - Late(now, by) first, when the turn comes more than LateTurn after the
//     deadline that was promised for it;
//   - then Step for each PeerDone, LinkHeard and LinkEnded of the inbox, and
//     Want, Granted, Landed and Forget as requests come, are granted, have all
//     their pages, and end;
//   - last Tick, which judges the deadlines that have passed. Only Tick spends
//     attempts on retries and ends requests, so whatever arrived in the turn
//     is known before anything is judged.
//
// After each call Decode takes Verdicts, at the turn's end Actions and Fatal.
// A request is known to Peers from Want (when it returns nil) to Landed,
// Forget or its Lost verdict; then it may Want again under the same id.
//
// One peer record stands for each bootstrap address. A request's claim walks
// along the chain
//
//	parallel info → DP rank → rank addresses → links
//
// of its peer and waits where something is not known yet; all claims of a peer
// that wait for the same thing share one pacer for it. Knowledge that arrives
// moves every claim on at once.
type Peers struct {
	cfg    PeersConfig
	peers  map[string]*peer // by address
	all    []*peer          // the same, for ordered walks
	claims map[ReqID]*claim
	links  map[LinkID]*pair // every link that is up
	tries  map[uint64]*try  // everything in flight, by action id
	alarms alarms

	spare      *claim // removed claims, by next
	unresolved int    // claims that are not Linked yet
	lastTry    uint64
	cut        uint64 // tries up to this id were in flight when this process was stopped
	lastGen    uint64 // generations are unique over all records
	lastLink   LinkID
	jitter     uint64 // state of the jitter's generator

	// What has been asked for and found out since the last call that took it,
	// and the slices that were handed out by that call.
	actions, actionsOut   []PeerAction
	verdicts, verdictsOut []Verdict

	fatal *Error
	stats PeersStats
}

// NewPeers makes a Peers that knows nobody. Zero fields of cfg take their defaults.
func NewPeers(cfg PeersConfig) *Peers {
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.Attempts = cmp.Or(cfg.Attempts, 15)
	cfg.Interval = cmp.Or(cfg.Interval, time.Second)
	cfg.HeartbeatInterval = cmp.Or(cfg.HeartbeatInterval, 5*time.Second)
	cfg.HeartbeatTimeout = cmp.Or(cfg.HeartbeatTimeout, 3*time.Second)
	cfg.HeartbeatFailures = cmp.Or(cfg.HeartbeatFailures, 2)
	cfg.ResolveTimeout = cmp.Or(cfg.ResolveTimeout, 120*time.Second)
	cfg.MaxPerAddr = cmp.Or(cfg.MaxPerAddr, 64)
	cfg.MaxUnresolved = cmp.Or(cfg.MaxUnresolved, 4096)
	cfg.MaxRecords = cmp.Or(cfg.MaxRecords, 4096)
	cfg.IdleTTL = cmp.Or(cfg.IdleTTL, 10*time.Minute)
	cfg.RejectTTL = cmp.Or(cfg.RejectTTL, 30*time.Second)
	cfg.DCP = cmp.Or(cfg.DCP, 1)
	l := &cfg.Local
	l.TP, l.CP, l.DP, l.PP = cmp.Or(l.TP, 1), cmp.Or(l.CP, 1), cmp.Or(l.DP, 1), cmp.Or(l.PP, 1)
	return &Peers{
		cfg:    cfg,
		peers:  map[string]*peer{},
		claims: map[ReqID]*claim{},
		links:  map[LinkID]*pair{},
		tries:  map[uint64]*try{},
		jitter: cfg.Seed,
	}
}

// Want asks for the links of a request. It returns a refusal (429, 503, or the
// mismatch of a known-bad prefill), or nil: verdicts follow.
func (p *Peers) Want(now time.Duration, w Want) *Error {
	if p.fatal != nil {
		return p.fatal
	}
	if p.claims[w.Req] != nil {
		return errorf(Internal, "request %d wants links twice", w.Req)
	}
	pr := p.peers[w.Addr]
	if pr != nil && pr.bad != nil {
		p.rest(now, pr)
		return pr.bad
	}
	if err := p.refuse(pr, &w); err != nil {
		return err
	}
	if pr == nil {
		if err := p.makeRoom(now); err != nil {
			return err
		}
		pr = p.newPeer(w.Addr)
	}
	c := p.newClaim(pr, w)
	p.resolve(now, c)
	p.settle(now, pr)
	return nil
}

// refuse bounds how many requests wait for addresses that are not resolved, so
// that hung addresses never use up the room of healthy ones (rule 19).
func (p *Peers) refuse(pr *peer, w *Want) *Error {
	if pr != nil && pr.linkedFor(w) {
		return nil
	}
	const later = time.Second
	if pr != nil && pr.unresolved >= p.cfg.MaxPerAddr {
		err := errorf(Overloaded, "%d requests wait already for prefill %s, which is not reached yet: the most for one, so that one that hangs leaves room for the others; try again later or elsewhere", pr.unresolved, w.Addr)
		err.RetryAfter = later
		return err
	}
	if p.unresolved >= p.cfg.MaxUnresolved {
		err := errorf(Overloaded, "%d requests wait already for prefills that are not reached yet, the most in all; try again later or elsewhere", p.unresolved)
		err.RetryAfter = later
		return err
	}
	return nil
}

// Granted says that a Linked request's grant goes out now.
func (p *Peers) Granted(now time.Duration, req ReqID) {
	if c := p.claims[req]; c != nil {
		p.becomeGranted(now, c)
		return
	}
	panic("sched: granted a request that Peers does not know")
}

// Landed says that the request has all its pages: nothing of its peer can
// touch it any more.
func (p *Peers) Landed(now time.Duration, req ReqID) { p.Forget(now, req) }

// Forget says that the request has ended. No verdict about it follows.
func (p *Peers) Forget(now time.Duration, req ReqID) {
	if c := p.claims[req]; c != nil {
		pr := c.peer
		p.remove(now, c)
		p.settle(now, pr)
	}
	keep := p.verdicts[:0]
	for _, v := range p.verdicts {
		if v.Req != req {
			keep = append(keep, v)
		}
	}
	p.verdicts = keep
}

// Step takes a completion or a sign of life from the peer network.
func (p *Peers) Step(now time.Duration, ev Event) {
	if p.fatal != nil {
		return
	}
	switch ev := ev.(type) {
	case *PeerDone:
		p.complete(now, ev)
	case *LinkHeard:
		if pa := p.links[ev.Link]; pa != nil {
			pa.heard = now
		}
	case *LinkEnded:
		if pa := p.links[ev.Link]; pa != nil {
			p.linkEnded(now, pa, ev.Cause)
		}
	}
}

// tickMax bounds what one Tick judges, and so how long it may take: some 0.3 ms.
// What is left is due at once, in the next turn: Deadline stays in the past.
const tickMax = 256

// Tick judges the deadlines that have passed.
func (p *Peers) Tick(now time.Duration) {
	seq := p.alarms.seq
	for n := 0; n < tickMax && len(p.verdicts) < tickMax && p.fatal == nil; n++ {
		if !p.alarms.fire(now, seq) {
			return
		}
	}
}

// Late says that this turn comes late by so much, because this process was
// stopped or starved, and the peers were not (rule 20). Every deadline that has
// passed meanwhile gets that time back, up to what it had, once; and no failure
// of a try that was in flight counts.
func (p *Peers) Late(now, by time.Duration) {
	if by <= LateTurn {
		return
	}
	p.cut = p.lastTry
	p.alarms.rearm(now, by)
}

// Deadline is when Tick has something to judge, or Never. It may still have
// passed after a Tick: one Tick does a bounded amount of work.
func (p *Peers) Deadline() time.Duration {
	if p.fatal != nil {
		return Never
	}
	return p.alarms.next()
}

// Actions are what the driver must do on the peer network. The call drains
// them; the slice stays valid until the next call of Actions.
func (p *Peers) Actions() []PeerAction {
	p.actions, p.actionsOut = p.actionsOut[:0], p.actions
	return p.actionsOut
}

// Verdicts are what has been found out about requests, in order. The slice is
// drained by the call and stays valid until the next call of Verdicts.
func (p *Peers) Verdicts() []Verdict {
	p.verdicts, p.verdictsOut = p.verdictsOut[:0], p.verdicts
	return p.verdictsOut
}

// Fatal is the mismatch that ends the process under --on-mismatch=fatal, or nil.
// It is sticky, and after it Peers asks for nothing more.
func (p *Peers) Fatal() *Error { return p.fatal }

// random is the next number of the jitter's generator (splitmix64).
func (p *Peers) random() uint64 {
	p.jitter += 0x9e3779b97f4a7c15
	z := p.jitter
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
