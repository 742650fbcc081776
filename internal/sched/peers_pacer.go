//metronome:pure

package sched

import (
	"cmp"
	"fmt"
	"time"
)

// try is one thing asked of the driver and not answered yet. It belongs to the
// key that asked; no key has two.
type try struct {
	peer      *peer
	kind      PeerKind
	id        uint64 // 0: nothing in flight
	gen       uint64 // the peer's generation when it started
	cancelled bool
	done      func(now time.Duration, d *PeerDone, o outcome)
}

func (t *try) inFlight() bool { return t.id != 0 }

// outcome is what a completion is worth to the key that asked.
type outcome uint8

const (
	answered outcome = iota + 1 // the driver brings an answer
	failed                      // the peer's fault: the attempt is spent
	void                        // proves nothing: stale, cancelled, our own fault, or cut by a stop of this process
)

// launch asks the driver for one try of t.
func (p *Peers) launch(t *try, a PeerAction) {
	if t.inFlight() {
		panic(fmt.Sprintf("sched: second try of kind %d for %s while one is in flight", t.kind, t.peer.addr))
	}
	p.lastTry++
	t.id, t.gen, t.cancelled = p.lastTry, t.peer.gen, false
	p.tries[t.id] = t
	a.Kind, a.ID, a.Gen, a.Addr = t.kind, t.id, t.gen, t.peer.addr
	p.actions = append(p.actions, a)
	if t.kind == FetchInfo {
		p.stats.FetchesInFlight++
	}
}

// cancel asks the driver to end t early. It stays in flight until its
// completion is in.
func (p *Peers) cancel(t *try) {
	if !t.inFlight() || t.cancelled {
		return
	}
	t.cancelled = true
	p.actions = append(p.actions, PeerAction{Kind: CancelTry, ID: t.id, Gen: t.gen, Addr: t.peer.addr})
}

// complete is the one place where completions come in and stale ones go.
func (p *Peers) complete(now time.Duration, d *PeerDone) {
	t := p.tries[d.ID]
	if t == nil || t.kind != d.Kind || t.gen != d.Gen {
		return
	}
	delete(p.tries, d.ID)
	t.id = 0
	o := answered
	switch {
	case t.gen != t.peer.gen:
		o = void
	case d.Fault == OK || d.Fault == MismatchFault && d.Kind == DialLink:
	case d.Fault == LocalFault || t.cancelled || d.ID <= p.cut:
		o = void
	default:
		o = failed
	}
	if t.kind == FetchInfo {
		p.stats.FetchesInFlight--
	}
	if o == void && d.Kind == DialLink && d.Fault == OK {
		p.closeLink(d.Link, t.peer, "the prefill's record has changed since this link was dialled")
	}
	t.done(now, d, o)
}

// pacer rations the attempts of one key: parallel info or DP ranks of an
// address, the address of a rank, or a link of a pair of ranks.
//
// One attempt is in flight at most; attempts start one interval apart; an
// episode has a budget of them. An episode is one spell of somebody waiting for
// the key. It ends by success, by exhaustion, or when nobody waits any more.
// The interval outlives it.
//
//	open      somebody waits: begin an episode, if none is open
//	fail      the attempt failed
//	void      the attempt proved nothing: it is not counted
//	succeed   the key is known
//	shut      nobody waits: cancel what is in flight
type pacer struct {
	try
	owner  paced
	alarm  alarm // the next attempt, or the judgement that there is none left
	atTick bool  // also the first attempt starts in Tick: it asks for all that the turn has brought
	isOpen bool
	spent  int           // attempts of this episode that count
	starts int           // all of this episode
	charge bool          // the try in flight is counted in spent
	begun  bool          // last is valid
	last   time.Duration // start of the last attempt, of whichever episode
	gap    time.Duration // from last to the next start
	cause  string        // of the last failed attempt
}

// paced is what a pacer rations.
type paced interface {
	// ask launches one attempt.
	ask(now time.Duration)
	// exhausted ends everybody who waits for the key.
	exhausted(now time.Duration)
}

func (p *Peers) initPacer(pc *pacer, pr *peer, kind PeerKind, owner paced, done func(time.Duration, *PeerDone, outcome)) {
	pc.try = try{peer: pr, kind: kind, done: done}
	pc.owner = owner
	pc.gap = p.cfg.Interval
	pc.alarm.due = func(now time.Duration) { p.paceDue(now, pc) }
}

// open begins an episode if none is open.
func (p *Peers) open(now time.Duration, pc *pacer) {
	if pc.isOpen {
		return
	}
	pc.isOpen = true
	pc.spent, pc.starts, pc.cause = 0, 0, ""
	p.pace(now, pc)
}

// pace plans the next start. The first one of an episode that need not wait
// starts at once; everything else starts, or ends, in the turn that is due.
func (p *Peers) pace(now time.Duration, pc *pacer) {
	if !pc.isOpen || pc.inFlight() || pc.alarm.isSet() {
		return
	}
	at := now
	if pc.begun {
		at = pc.last + pc.gap
	}
	if pc.starts == 0 && at <= now && !pc.atTick {
		p.attempt(now, pc)
		return
	}
	p.alarms.set(&pc.alarm, now, at)
}

func (p *Peers) paceDue(now time.Duration, pc *pacer) {
	switch {
	case !pc.isOpen || pc.inFlight():
	case pc.spent >= p.cfg.Attempts:
		pc.owner.exhausted(now)
	default:
		p.attempt(now, pc)
	}
}

func (p *Peers) attempt(now time.Duration, pc *pacer) {
	p.alarms.stop(&pc.alarm)
	pc.spent++
	pc.starts++
	pc.charge = true
	pc.begun, pc.last, pc.gap = true, now, p.cfg.Interval
	pc.owner.ask(now)
}

// fail keeps the cause of an attempt that counts. What was charged to an
// episode that is over is not charged to the one that is open now.
func (pc *pacer) fail(cause string) {
	if pc.charge {
		pc.cause = cmp.Or(cause, "no cause given")
	}
	pc.charge = false
}

// void takes back the charge of an attempt that proved nothing.
func (pc *pacer) void() {
	if pc.charge {
		pc.spent--
	}
	pc.charge = false
}

// succeed ends the episode. Spent stays readable until the next one opens.
func (p *Peers) succeed(pc *pacer) {
	pc.isOpen, pc.charge = false, false
	p.alarms.stop(&pc.alarm)
}

// shut ends the episode because nobody waits any more.
func (p *Peers) shut(pc *pacer) {
	p.succeed(pc)
	p.cancel(&pc.try)
}

// story tells how far the episode has come, for an error that ends it from outside.
func (pc *pacer) story() string {
	switch {
	case pc.cause != "":
		return fmt.Sprintf("%d attempts, last cause: %s", pc.spent, pc.cause)
	case pc.inFlight():
		return fmt.Sprintf("%d attempts, the last one unanswered", pc.spent)
	}
	return fmt.Sprintf("%d attempts", pc.spent)
}
