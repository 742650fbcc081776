package worker

import (
	"time"

	"github.com/metronome-serve/metronome/internal/sched"
)

// loop drives the cores of one DP rank: decode on a decode worker, prefill on
// a prefill worker, both over one pool on serve. Its goroutine owns every
// field that is not said to be shared.
type loop struct {
	clock clock
	rank  int           // DP rank
	in    *inbox        // shared: everything comes in here
	stop  chan struct{} // shared: closed by the worker to end the loop
	done  chan struct{} // shared: closed when the loop has returned
	turn  turnStamp     // shared: written here
	facts facts         // shared: written here, once a turn

	timer   *time.Timer
	open    map[sched.ReqID]*request
	decode  *decodeSide  // nil on a prefill worker
	prefill *prefillSide // nil on a decode worker
	tick    sched.Tick
}

// idleTurn bounds the time between two turns, so that the stamp of the last
// turn proves that the loop turns also when nothing happens.
const idleTurn = time.Second

// run is the loop, whole. It waits in one place and for nothing that a peer, a
// client, a disk or a log can hold up: no channel but the three below, no
// lock that anyone holds across I/O.
//
//metronome:loop
func (l *loop) run() {
	defer close(l.done)
	for {
		now := l.clock.now()
		deadline := min(l.handOut(now), now+idleTurn)
		l.timer.Reset(deadline - now)
		l.endTurn()
		select {
		case <-l.in.wake:
		case <-l.timer.C:
		case <-l.stop:
			return
		}
		now = l.clock.now()
		l.turn.begin(now)
		for _, m := range l.in.take() { // before the timer is judged: what has arrived is known
			l.take(now, m)
		}
		if now >= deadline {
			l.step(now, &l.tick)
		}
	}
}
