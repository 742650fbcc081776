package worker

import (
	"context"
	"runtime/pprof"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
)

// loop drives the cores of one DP rank: decode on a decode worker, prefill on
// a prefill worker, both over one pool on serve. Its goroutine owns every
// field that is not said to be shared.
type loop struct {
	worker *Worker
	clock  clock
	rank   int           // DP rank
	in     *inbox        // shared: everything comes in here
	stop   chan struct{} // shared: closed by the worker to end the loop
	done   chan struct{} // shared: closed when the loop has returned
	turn   turnStamp     // shared: written here
	jobs   atomic.Int64  // shared: jobs taken and not ended yet; Submit reserves here

	timer   *time.Timer
	pool    *kv.Pool
	open    map[sched.ReqID]*request
	engine  *batcher
	decode  *decodeSide  // nil on a prefill worker
	prefill *prefillSide // nil on a decode worker
	tick    sched.Tick
	metrics *metric.Set
	overrun metric.Counter
	gauges  gauges
	codes   map[sched.Code]metric.Counter // requests_total, looked up beforehand; "": ok
}

// idleTurn bounds the time between two turns, so that the stamp of the last
// one proves that the loop turns also when nothing happens.
const idleTurn = time.Second

// run is the loop, whole. It waits in one place, and for nothing that a peer,
// a client, a disk or a log can hold up: there is no channel here but the
// three of the select, and no lock that anyone holds across I/O.
//
//metronome:loop
func (l *loop) run() {
	defer close(l.done)
	now := l.clock.now()
	for {
		deadline := l.handOut(now)
		end := l.endTurn(now)
		l.timer.Reset(min(deadline-end, idleTurn))
		select {
		case <-l.in.wake:
		case <-l.timer.C:
		case <-l.stop:
			return
		}
		now = l.clock.now()
		l.turn.begin(now)
		for _, m := range l.in.take() {
			l.take(now, m)
		}
		l.step(now, &l.tick) // last: what has arrived is known before a deadline is judged
	}
}

// endTurn closes the books of the turn that began at now.
func (l *loop) endTurn(now time.Duration) time.Duration {
	l.gauges.publish(l)
	end := l.clock.now()
	l.turn.end()
	busy := end - now
	l.metrics.LoopBusy.Observe(busy.Seconds())
	if busy > overrunAfter {
		l.overrun.Inc()
	}
	return end
}

// handOut does what the cores want done and returns the next deadline. On
// serve the cores hand requests to each other: the prefill core's Ready comes
// first, and again after the decode core has preempted.
func (l *loop) handOut(now time.Duration) time.Duration {
	deadline := sched.Never
	if l.prefill != nil {
		deadline = l.prefill.handOut(now)
	}
	if l.decode == nil {
		return deadline
	}
	d, preempted := l.decode.handOut(now)
	if preempted {
		deadline = l.prefill.handOut(now)
	}
	return min(deadline, d)
}

// step gives an event to every core of the loop. A core ignores what concerns
// a request that it does not have.
func (l *loop) step(now time.Duration, ev sched.Event) {
	if l.prefill != nil {
		l.prefill.core.Step(now, ev)
	}
	if l.decode != nil {
		l.decode.core.Step(now, ev)
	}
}

// take gives one message of the inbox to whom it concerns.
func (l *loop) take(now time.Duration, m any) {
	switch m := m.(type) {
	case *pass:
		m.out = false
		if m.batch.LayerDone != nil {
			l.prefill.layered()
		}
		m.core.Step(now, &m.done)
	case *request:
		l.submit(now, m)
	case *sched.StopAt:
		l.stopAt(now, m)
	case *sched.Abort:
		l.step(now, m)
	case *sched.PeerDone:
		l.decode.peerDone(now, m)
	case *sched.LinkEnded:
		l.decode.linkEnded(now, m)
	case *landed:
		l.decode.landed(now, m)
	case *pageBegun:
		l.decode.pageBegun(now, m)
	case *pagesSent:
		l.prefill.pagesSent(now, m)
	case *granted:
		l.prefill.granted(now, m)
	case *abortAll:
		l.abortAll(now, m)
	case *question:
		m.answer(l)
	case sched.Event:
		l.step(now, m)
	}
}

// abortAll ends every open request with one cause.
type abortAll struct{ cause *sched.Error }

func (l *loop) abortAll(now time.Duration, m *abortAll) {
	for _, q := range l.sorted() {
		l.step(now, &sched.Abort{Req: q.id, Cause: m.cause})
	}
}

// question asks the loop for something between two turns. answer must not
// wait: it says that its result is there by closing a channel.
type question struct{ answer func(*loop) }

// labelled runs the loop under a profiler label, by which the watcher finds its stack.
func (l *loop) labelled(ctx context.Context) {
	run := l.run
	if l.worker.cfg.Blocking {
		run = l.runBlocking
	}
	pprof.Do(ctx, pprof.Labels(loopLabel, l.name()), func(context.Context) { run() })
}

func (l *loop) name() string { return string(l.worker.cfg.Role) + strconv.Itoa(l.rank) }

// tell is how peernet and transfer reach the loop.
func (l *loop) tell(m any) { l.in.push(m) }
