//metronome:pure

package router

import (
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Machine is the state machine of one request over both its legs without the
// exchange around it, for a simulator: the same steps, told and done by hand.
// After each call Do is what has to be done, in order.
type Machine struct{ pair pair }

// NewMachine makes one that tries so many further pairs before the first byte
// and moves the stream so often after it.
func NewMachine(retries, migrations int) *Machine {
	return &Machine{pair{retries: retries, migrations: migrations}}
}

// Failure is how a leg failed: a worker's own word (Code), or the connection's
// end, before an answer or in the middle of one (Cut).
type Failure struct {
	Code string
	Cut  bool
	Text string
}

// Start: the request is read.
func (m *Machine) Start(now time.Duration) { m.pair.Step(now, event{kind: evStart}) }

// Picked is the answer to DoPick.
func (m *Machine) Picked(now time.Duration, prefill, decode string) {
	m.pair.Step(now, event{kind: evPicked, workers: [2]string{prefill, decode}})
}

// None is the other answer to DoPick: there is no pair.
func (m *Machine) None(now time.Duration, code, text string) {
	m.pair.Step(now, event{kind: evNone, err: api.Errorf(api.Code(code), "%s", text)})
}

// Out: the probes of a leg's worker fail. spare: another one is usable; goesOn:
// it could go on with the stream, which has fallen silent.
func (m *Machine) Out(now time.Duration, attempt int, leg Leg, spare, goesOn bool) {
	m.pair.Step(now, event{kind: evOut, attempt: attempt, leg: leg, spare: spare, goesOn: goesOn})
}

// Data: decode's first data of this attempt is at hand.
func (m *Machine) Data(now time.Duration, attempt int) {
	m.pair.Step(now, event{kind: evData, attempt: attempt, leg: Decode})
}

// Ended: a leg's answer ended well.
func (m *Machine) Ended(now time.Duration, attempt int, leg Leg) {
	m.pair.Step(now, event{kind: evEnded, attempt: attempt, leg: leg})
}

// Failed: a leg failed. goesOn: another pair could go on with the stream.
func (m *Machine) Failed(now time.Duration, attempt int, leg Leg, f Failure, goesOn bool) {
	x := fault{kind: faultConnect, text: f.Text, code: api.Code(f.Code)}
	switch {
	case f.Code != "":
		x.kind, x.status = faultStatus, (&api.Error{Code: x.code}).HTTPStatus()
	case f.Cut:
		x.kind = faultCut
	}
	m.pair.Step(now, event{kind: evFailed, attempt: attempt, leg: leg, fault: x, goesOn: goesOn})
}

// Gone: the client went away.
func (m *Machine) Gone(now time.Duration) { m.pair.Step(now, event{kind: evGone}) }

// Deadline: the request's time is out.
func (m *Machine) Deadline(now time.Duration) { m.pair.Step(now, event{kind: evDeadline}) }

// Stop: the router's drain is over.
func (m *Machine) Stop(now time.Duration) { m.pair.Step(now, event{kind: evStop}) }

// Attempt is the number of the current one, from 1.
func (m *Machine) Attempt() int { return m.pair.attempt }

// End is why the request ended, by code and text; over is false before, code ""
// after it ended well.
func (m *Machine) End() (code, text string, over bool) {
	if e := m.pair.end; e != nil {
		return string(e.Code), e.Message, true
	}
	return "", "", m.pair.phase == phaseEnded
}

// Doing is a kind of thing to do.
type Doing uint8

// What a Machine wants done. Blame and praise of workers are left out.
const (
	DoPick   Doing = iota + 1 // choose a pair, and say Picked
	DoSend                    // send both legs of this attempt
	DoEnd                     // end this leg
	DoRelay                   // pass decode's answer on
	DoFail                    // tell the client that it failed
	DoFinish                  // the client has had all
)

// Do is one thing to do.
type Do struct {
	Kind  Doing
	Leg   Leg
	Grace time.Duration // DoEnd: it may end by itself for so long
}

// Do is what the last call asks for.
func (m *Machine) Do() (all []Do) {
	kinds := map[actionKind]Doing{actPick: DoPick, actSend: DoSend, actEnd: DoEnd, actRelay: DoRelay, actFail: DoFail, actFinish: DoFinish}
	for _, a := range m.pair.Ready() {
		if k := kinds[a.kind]; k != 0 {
			all = append(all, Do{k, a.leg, a.grace})
		}
	}
	return all
}
