package worker

import (
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
)

// gauges shows a loop's counts once a turn. The loops of all DP ranks share
// the gauges, so each adds what has changed of its own; a turn in which nothing
// changed costs a few comparisons.
type gauges struct {
	all    [gaugeCount]metric.Gauge
	last   [gaugeCount]int
	counts [counterCount]metric.Counter
	seen   [counterCount]uint64
}

const (
	gRunning = iota
	gQueued
	gPrealloc
	gTransfer
	gBootstrap
	gInflight
	gFree
	gOwned
	gQuarantined
	gCached
	gKnown
	gFlying
	gaugeCount
)

const (
	cFetchOK = iota
	cFetchFailed
	cFetchVoid
	cEvictedHeartbeat
	cEvictedReplaced
	cEvictedIdle
	counterCount
)

func newGauges(m *metric.Set) gauges {
	return gauges{
		all: [gaugeCount]metric.Gauge{
			m.Running, m.Queued, m.Prealloc, m.Transfer, m.Bootstrap, m.Inflight,
			m.Pages.Free, m.Pages.Owned, m.Pages.Quarantined, m.Pages.Cached, m.Known, m.FetchFlying,
		},
		counts: [counterCount]metric.Counter{
			m.Fetches.With("ok"), m.Fetches.With("failed"), m.Fetches.With("canceled"),
			m.Evicted.With("heartbeat"), m.Evicted.With("replaced"), m.Evicted.With("idle"),
		},
	}
}

func (g *gauges) publish(l *loop) {
	var now [gaugeCount]int
	if d := l.decode; d != nil {
		now[gRunning] = d.core.Len(sched.Running)
		now[gQueued] = d.core.Len(sched.Waiting)
		now[gPrealloc] = d.core.Len(sched.Pending) + d.core.Len(sched.Preallocate)
		now[gTransfer] = d.core.Len(sched.Transfer)
		if d.peers != nil {
			g.peers(&now, d.core.PeerStats())
		}
	}
	if p := l.prefill; p != nil {
		now[gRunning] += p.core.Len(sched.Computing)
		now[gQueued] += p.core.Len(sched.Queued)
		now[gBootstrap] = p.core.Len(sched.Bootstrapping)
		now[gInflight] = p.core.Len(sched.InFlight)
	}
	n := l.pool.Count()
	now[gFree], now[gOwned], now[gQuarantined], now[gCached] = n[kv.Free], n[kv.Owned], n[kv.Quarantined], n[kv.Cached]
	for i, v := range now {
		if v != g.last[i] {
			g.all[i].Add(float64(v - g.last[i]))
			g.last[i] = v
		}
	}
}

func (g *gauges) peers(now *[gaugeCount]int, s sched.PeersStats) {
	now[gKnown], now[gFlying] = s.Known, s.FetchesInFlight
	for i, v := range [counterCount]uint64{s.FetchOK, s.FetchFailed, s.FetchVoid, s.EvictedHeartbeat, s.EvictedReplaced, s.EvictedIdle} {
		if v != g.seen[i] {
			g.counts[i].Add(float64(v - g.seen[i]))
			g.seen[i] = v
		}
	}
}

// otherCode counts ends whose code no core gives: the cause of an abort.
const otherCode = "other"

// newCodes is the counter of each way that a core can end a request.
func newCodes(m *metric.Set) map[sched.Code]metric.Counter {
	codes := map[sched.Code]metric.Counter{"": m.Requests.With("ok"), otherCode: m.Requests.With(otherCode)}
	for _, c := range []sched.Code{
		sched.InvalidRequest, sched.ContextLengthExceeded, sched.DeadlineExceeded, sched.Overloaded, sched.ClientGone, sched.Aborted, sched.Internal,
		sched.PrefillUnreachable, sched.DecodeUnreachable, sched.KVTransferFailed, sched.PeerMismatch, sched.NoPrefill, sched.Draining,
	} {
		codes[c] = m.Requests.With(string(c))
	}
	return codes
}
