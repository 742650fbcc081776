//metronome:pure

package sched

import "time"

// What a driver shows to people and metrics of its core.

// Len is how many requests are in the phase.
func (d *Decode) Len(p Phase) int { return d.in[p].len() }

// Phase of an open request, 0 when it has ended or is not known.
func (d *Decode) Phase(id ReqID) Phase {
	if r := d.reqs[id]; r != nil {
		return r.phase
	}
	return 0
}

// Times of an open request.
func (d *Decode) Times(id ReqID) (t Times) {
	if r := d.reqs[id]; r != nil {
		t = r.times
	}
	return t
}

// PeerStats counts what the core's peers have done. Not with Serve.
func (d *Decode) PeerStats() PeersStats { return d.peers.Stats() }

// PeerTable is every prefill that the core knows of, by address. Not with Serve.
func (d *Decode) PeerTable() []PeerRow { return d.peers.Table() }

// Len is how many requests are in the phase.
func (p *Prefill) Len(ph Phase) int { return p.in[ph].len() }

// Phase of an open request, 0 when it has ended or is not known.
func (p *Prefill) Phase(id ReqID) Phase {
	if r := p.reqs[id]; r != nil {
		return r.phase
	}
	return 0
}

// Times of an open request.
func (p *Prefill) Times(id ReqID) (t Times) {
	if r := p.reqs[id]; r != nil {
		t = r.times
	}
	return t
}

// passed notes the first time that something was so.
func passed(at *time.Duration, now time.Duration) {
	if *at == 0 {
		*at = max(now, 1)
	}
}
