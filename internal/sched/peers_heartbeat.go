//metronome:pure

package sched

import "time"

// heartbeat probes one peer at a fixed rate for as long as something is known
// of it, good or bad (rule 10). A success begins the count anew; so does a
// refetch, because every startBeat does.
type heartbeat struct {
	try
	p        *Peers
	alarm    alarm // the next probe
	failures int   // in a row
	cause    string
}

func (p *Peers) initBeat(pr *peer) {
	h := &pr.beat
	h.p = p
	h.try = try{peer: pr, kind: ProbeHealth, done: h.landed}
	h.alarm.due = h.due
}

// startBeat begins the probes of a record that has just become known. The
// first one is jittered over the interval, so that many records learned at
// once are not probed at once for ever.
func (p *Peers) startBeat(now time.Duration, pr *peer) {
	h := &pr.beat
	h.failures, h.cause = 0, ""
	every := p.cfg.HeartbeatInterval
	p.alarms.set(&h.alarm, now, now+1+time.Duration(p.random()%uint64(every)))
}

func (p *Peers) stopBeat(pr *peer) {
	p.alarms.stop(&pr.beat.alarm)
	p.cancel(&pr.beat.try)
}

// due starts a probe and plans the next one. A probe still in flight is not
// doubled: its own timeout ends it.
func (h *heartbeat) due(now time.Duration) {
	h.p.alarms.set(&h.alarm, now, now+h.p.cfg.HeartbeatInterval)
	if !h.inFlight() {
		h.p.launch(&h.try, PeerAction{Timeout: h.p.cfg.HeartbeatTimeout})
	}
}

func (h *heartbeat) landed(now time.Duration, d *PeerDone, o outcome) {
	p, pr := h.p, h.peer
	cause := d.Cause
	switch {
	case o == void:
		return
	case o == failed:
	case pr.isDead(now, d.Instance):
		cause = "instance " + d.Instance + " answers, which another one has replaced"
	case pr.isOther(d.Instance):
		p.replaced(now, pr, d.Instance)
		p.requeue(now, pr)
		return
	case d.ID <= p.cut: // begun before this process was stopped: counts neither way
		return
	default:
		h.failures, h.cause = 0, ""
		pr.met = now
		return
	}
	h.failures++
	h.cause = cause
	if h.failures < p.cfg.HeartbeatFailures {
		return
	}
	p.stats.EvictedHeartbeat++
	lost := errorf(PrefillUnreachable, "Lost connection with prefill instance (bootstrap_addr: %s) after %d failed heartbeats: %s", pr.addr, h.failures, cause)
	p.drop(now, pr, (*linkSet).spoke, lost.Message)
	p.loseClosed(now, pr, lost)
	p.requeue(now, pr)
}
