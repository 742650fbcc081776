//metronome:pure

package router

import (
	"fmt"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// phase is where a request stands.
type phase uint8

const (
	phaseNew      phase = iota // its body is being read
	phasePicking               // a pair of workers is wanted
	phaseOpen                  // both legs are sent; this attempt has given the client nothing
	phaseRelaying              // the decode's answer goes to the client
	phaseEnded
)

func (p phase) String() string {
	return [...]string{"new", "picking", "open", "relaying", "ended"}[p]
}

// legState is where one leg of the current attempt stands.
type legState uint8

const (
	legNone  legState = iota
	legOpen           // sent
	legDone           // ended by itself, well
	legEnded          // failed, or ended by us
)

func (s legState) String() string { return [...]string{"none", "open", "done", "ended"}[s] }

// eventKind is what can happen to a request.
type eventKind uint8

const (
	evStart    eventKind = iota + 1 // the body is read and understood
	evPicked                        // the answer to actPick: a pair
	evNone                          // the answer to actPick: there is none, err says why
	evData                          // the decode's first data is at hand
	evEnded                         // a leg's answer ended well
	evFailed                        // a leg failed
	evOut                           // a leg's worker went out of rotation; spare: another one is usable
	evGone                          // the client went away
	evDeadline                      // the request's time is out
	evStop                          // the drain is over
	evLast     = evStop
)

func (k eventKind) String() string {
	return [...]string{"", "start", "picked", "none", "data", "ended", "failed", "out", "gone", "deadline", "stop"}[k]
}

// event is one thing that happened. attempt is the attempt that a leg's event
// (data, ended, failed, out) belongs to; of the other kinds it is not looked at.
type event struct {
	kind    eventKind
	attempt int
	leg     Leg
	workers [2]string  // evPicked: names, by leg
	err     *api.Error // evNone
	fault   fault      // evFailed
	spare   bool       // evOut
	goesOn  bool       // evFailed, evOut: another pair could go on with the stream (evOut: and it has fallen silent)
}

// actionKind is what the driver has to do.
type actionKind uint8

const (
	actPick   actionKind = iota + 1 // choose a pair, and answer with evPicked or evNone
	actSend                         // send both legs of this attempt, with a fresh room for each item
	actEnd                          // end this leg, now or (grace) if it has not ended by then
	actServed                       // the leg's worker did its part: note it
	actBlame                        // the leg's worker is at fault: note it, and do not pick it again for this request
	actRelay                        // from now on pass the decode's answer to the client
	actFail                         // tell the client that it failed: err, or pass unchanged
	actFinish                       // the client has had the whole answer
)

// action is one thing to be done. Actions are done in order and none waits.
type action struct {
	kind    actionKind
	leg     Leg
	grace   time.Duration // actEnd
	verdict verdict       // actBlame, actFail
	err     *api.Error    // actEnd: the cause
}

// endGrace is how long the other leg may take to end by itself after decode
// has ended: its answer is due, and a connection that is let end can be used
// again.
const endGrace = 50 * time.Millisecond

// pair is the state machine of one request over both its legs. Invariants:
//
//   - Both legs of an attempt are sent together or not at all.
//   - When the request ends, each leg has ended by itself or has had actEnd.
//   - Exactly one actFail or actFinish, or neither when the client went away.
//   - After actRelay another pair is tried only to go on with the stream, at
//     most migrations times, each with one try more than retries allows.
//
// The driver feeds events to Step, then does what Ready holds, in order.
type pair struct {
	retries    int // further pairs allowed before the first byte
	migrations int // times that a stream may be moved after it

	phase   phase
	attempt int // the current one, 0: none yet
	moves   int // times that the stream was moved
	legs    [2]legState
	workers [2]string
	since   time.Duration // when the phase began
	last    verdict       // of the attempt before, while picking
	end     *api.Error    // why it ended; nil: well
	ready   []action
}

// Ready is what the last Step asks for. The slice is reused by the next one.
func (p *pair) Ready() []action { return p.ready }

// Step takes one event. What has lost its meaning is dropped here: anything
// after the end, and leg events of an attempt that is over or of a leg that
// has ended.
func (p *pair) Step(now time.Duration, ev event) {
	p.ready = p.ready[:0]
	switch ev.kind {
	case evData, evEnded, evFailed, evOut:
		flows := ev.kind == evOut && p.phase == phaseRelaying // its prefill may be needed again, whose leg is done
		if ev.attempt != p.attempt || p.legs[ev.leg] != legOpen && !flows {
			return
		}
	}
	if p.phase == phaseEnded {
		return
	}
	switch ev.kind {
	case evGone:
		p.fail(now, verdict{err: api.Errorf(api.ClientGone, "the client went away")})
	case evDeadline:
		p.fail(now, verdict{err: p.timeout()})
	case evStop:
		p.fail(now, verdict{err: api.Errorf(api.Draining, "the router is stopping and its drain time is over; send the request again")})
	case evStart:
		if p.phase == phaseNew {
			p.becomePicking(now)
		}
	case evPicked:
		if p.phase == phasePicking {
			p.becomeOpen(now, ev.workers)
		}
	case evNone:
		if p.phase == phasePicking {
			p.nonePicked(now, ev.err)
		}
	case evData:
		if p.phase == phaseOpen && ev.leg == Decode {
			p.becomeRelaying(now)
		}
	case evEnded:
		p.ended(now, ev.leg)
	case evFailed:
		p.failed(now, ev.leg, ev.fault, ev.goesOn)
	case evOut:
		p.out(now, ev)
	}
}

func (p *pair) do(a action) { p.ready = append(p.ready, a) }

func (p *pair) become(now time.Duration, to phase, from ...phase) {
	if !slices.Contains(from, p.phase) {
		panic(fmt.Sprintf("router: a request cannot go from %v to %v", p.phase, to))
	}
	if onEdge != nil {
		onEdge("pair", uint8(p.phase), uint8(to))
	}
	p.phase, p.since = to, now
}

// onEdge hears of every change in tests, which compare what was taken with what
// the become… functions allow.
var onEdge func(machine string, from, to uint8)

func (p *pair) becomePicking(now time.Duration) {
	p.become(now, phasePicking, phaseNew, phaseOpen, phaseRelaying)
	p.do(action{kind: actPick})
}

func (p *pair) becomeOpen(now time.Duration, workers [2]string) {
	p.become(now, phaseOpen, phasePicking)
	p.attempt++
	p.workers = workers
	p.legs = [2]legState{legOpen, legOpen}
	p.do(action{kind: actSend})
}

func (p *pair) becomeRelaying(now time.Duration) {
	p.become(now, phaseRelaying, phaseOpen)
	p.do(action{kind: actServed, leg: Decode})
	p.do(action{kind: actRelay})
}

func (p *pair) becomeEnded(now time.Duration, err *api.Error) {
	p.become(now, phaseEnded, phaseNew, phasePicking, phaseOpen, phaseRelaying)
	p.end = err
}

// endLegs ends what is still open.
func (p *pair) endLegs(cause *api.Error, grace time.Duration) {
	for _, leg := range [...]Leg{Prefill, Decode} {
		if p.legs[leg] == legOpen {
			p.legs[leg] = legEnded
			p.do(action{kind: actEnd, leg: leg, grace: grace, err: cause})
		}
	}
}

// fail ends the request with an error.
func (p *pair) fail(now time.Duration, v verdict) {
	p.endLegs(v.err, 0)
	p.becomeEnded(now, v.err)
	if v.err.Code != api.ClientGone {
		p.do(action{kind: actFail, verdict: v})
	}
}

// timeout is 408 while nothing has been computed, 504 after.
func (p *pair) timeout() *api.Error {
	e := api.Errorf(api.DeadlineExceeded, "the request's time ran out (phase %v, attempt %d)", p.phase, p.attempt)
	if p.attempt == 0 {
		e.Status = 408
	}
	return e
}

// nonePicked ends the request: with what went wrong before, if this was to be
// another try, else for want of workers.
func (p *pair) nonePicked(now time.Duration, err *api.Error) {
	if p.attempt > 0 {
		p.fail(now, p.last)
		return
	}
	p.fail(now, verdict{err: err})
}

// ended: a prefill's normal end leaves decode alone; decode's is the end.
func (p *pair) ended(now time.Duration, leg Leg) {
	if leg == Decode && p.phase == phaseOpen {
		p.failed(now, leg, fault{kind: faultCut, text: "the answer ended before any data"}, false)
		return
	}
	p.legs[leg] = legDone
	if leg == Prefill {
		p.do(action{kind: actServed, leg: leg})
		return
	}
	p.endLegs(decodeEnded, endGrace)
	p.becomeEnded(now, nil)
	p.do(action{kind: actFinish})
}

var decodeEnded = api.Errorf(api.ClientGone, "decode has ended")

// failed: before an attempt's first byte a leg's failure ends the other one and,
// if it may help, another pair is tried. After it, decode has all it needs from
// the prefill, so only its own failure matters.
func (p *pair) failed(now time.Duration, leg Leg, f fault, goesOn bool) {
	v := judge(leg, p.workers[leg], f)
	if f.kind != faultSilent && f.kind != faultOut { // those legs still run, and are ended below
		p.legs[leg] = legEnded
	}
	if v.blamed {
		p.do(action{kind: actBlame, leg: v.blame, verdict: v})
	}
	switch {
	case p.phase == phaseRelaying && leg == Prefill:
	case p.phase == phaseRelaying:
		p.interrupted(now, v, goesOn)
	case v.retry && p.mayTry():
		p.again(now, v)
	default:
		p.fail(now, v)
	}
}

// mayTry bounds the tries: what retries allows, and one more for each move.
func (p *pair) mayTry() bool { return p.attempt <= p.retries+p.moves }

// again gives this attempt up for another pair.
func (p *pair) again(now time.Duration, v verdict) {
	p.endLegs(v.err, 0)
	p.last = v
	p.becomePicking(now)
}

// interrupted: decode failed after the client's first byte. The stream moves to
// another pair, if that can go on with it and the failure is the worker's and
// not the request's; else it ends with the error.
func (p *pair) interrupted(now time.Duration, v verdict, goesOn bool) {
	if !goesOn || !v.retry || p.moves == p.migrations {
		p.fail(now, v)
		return
	}
	p.moves++
	p.again(now, v)
}

// out: the probes of a leg's worker fail. A request that waits for it moves, if
// there is somewhere to move to, and so does a stream that has fallen silent as
// well: its decode's machine may be gone without a word, or decode wants KV anew
// from a prefill that is gone. One that flows stays.
func (p *pair) out(now time.Duration, ev event) {
	f := fault{kind: faultOut, text: "its health probes fail"}
	switch {
	case !ev.spare:
	case p.phase == phaseOpen && p.mayTry():
		p.failed(now, ev.leg, f, false)
	case p.phase == phaseRelaying && ev.goesOn && p.moves < p.migrations:
		v := judge(ev.leg, p.workers[ev.leg], f)
		p.do(action{kind: actBlame, leg: v.blame, verdict: v})
		p.interrupted(now, v, true)
	}
}
