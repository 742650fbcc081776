package worker

import (
	"context"

	"github.com/metronome-serve/metronome/internal/sched"
)

// The baseline: a decode worker whose loop asks bootstrap registries itself, as
// SGLang's scheduler did before its topology fetch moved off that thread. It is
// there to be compared with, and to show that tests and noblock see what they
// must. The cores decide the same things: an attempt each second, stamped when
// it starts, up to the budget. Only the driver is another one: each GET of
// parallel info, each query for DP ranks and each GET of a rank's address runs
// on the loop, one after the other, each up to its timeout.

// runBlocking is the loop of the baseline.
//
//metronome:baseline
func (l *loop) runBlocking() {
	defer close(l.done)
	now := l.clock.now()
	for {
		deadline := l.handOut(now)
		l.askRegistries()
		end := l.endTurn(now)
		l.timer.Reset(max(0, min(deadline-end, idleTurn)))
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
		l.step(now, &l.tick)
	}
}

// askRegistries does here, in order, what the core has asked of registries, and
// hands all else over to the peer network. decodeSide.peers of a baseline is a
// peer network of this loop alone that nobody runs.
func (l *loop) askRegistries() {
	own := l.decode.peers
	for _, m := range own.in.take() {
		a, ok := m.(*ask)
		if !ok {
			continue
		}
		switch a.act.Kind {
		case sched.FetchInfo, sched.QueryRanks, sched.LookupRank:
			ctx, cancel := context.WithTimeout(own.ctx, a.act.Timeout)
			f := &flight{act: a.act, who: l, ctx: ctx, cancel: cancel, members: []member{{l, a.act}}}
			own.finish(f, own.try(f))
		default:
			l.worker.peers.do(l, a.act)
		}
	}
}
