//metronome:pure

package sched

import (
	"fmt"
	"time"
)

// rankKey is the lookup of one P rank's address.
type rankKey struct {
	pacer
	set     *linkSet
	key     RankKey
	target  string // rank_ip:rank_port; "": not known
	hurried bool   // looked up anew at once, and no link to it has lasted since (rule 21)
}

func (r *rankKey) ask(time.Duration) {
	p := r.set.p
	p.launch(&r.try, PeerAction{First: r.starts == 1, Attempt: r.starts, Timeout: p.cfg.Timeout, Rank: r.key})
}

func (r *rankKey) exhausted(now time.Duration) {
	err := errorf(PrefillUnreachable, "Could not fetch the address of prefill %v from %s after %d attempts: %s", r.key, r.peer.addr, r.spent, r.cause)
	r.set.p.loseAll(now, r.peer, needLinks, r.set, err)
}

func (r *rankKey) landed(now time.Duration, d *PeerDone, o outcome) {
	p := r.set.p
	if o == answered && d.Target != "" {
		r.target = d.Target
		p.succeed(&r.pacer)
		for _, pa := range r.set.pairs {
			if pa.rank == r && pa.dialled != r.target {
				pa.gap = 0 // another place: nothing has been asked of it yet
			}
		}
		if r.set.at[needLinks] > 0 {
			p.advance(now, r.set)
		}
		return
	}
	switch o {
	case void:
		r.void()
	case answered:
		r.fail("malformed answer: no address")
	default:
		r.fail(d.Cause)
	}
	p.pace(now, &r.pacer)
}

// pair is one of our TP ranks, one P rank, and the link between them.
type pair struct {
	pacer
	set     *linkSet
	rank    *rankKey
	local   int
	link    LinkID // 0: down
	dialing LinkID
	dialled string        // target of the last attempt
	upAt    time.Duration // when the link came up
	heard   time.Duration // when a frame last arrived on it
}

func (pa *pair) ask(time.Duration) {
	p := pa.set.p
	p.lastLink++
	pa.dialing, pa.dialled = p.lastLink, pa.rank.target
	p.launch(&pa.try, PeerAction{
		First: pa.starts == 1, Attempt: pa.starts, Timeout: p.cfg.Timeout, Rank: pa.rank.key,
		Link: pa.dialing, LocalTP: pa.local, Target: pa.dialled, Instance: pa.peer.instance,
	})
}

func (pa *pair) exhausted(now time.Duration) {
	err := errorf(PrefillUnreachable, "Could not set up a link to prefill %v of %s at %s after %d attempts: %s", pa.rank.key, pa.peer.addr, pa.dialled, pa.spent, pa.cause)
	pa.set.p.loseAll(now, pa.peer, needLinks, pa.set, err)
}

func (pa *pair) landed(now time.Duration, d *PeerDone, o outcome) {
	p, pr := pa.set.p, pa.peer
	switch {
	case o == void:
		pa.void()
		if pa.rank.target != "" {
			p.pace(now, &pa.pacer)
		}
	case o == failed:
		p.dialFailed(now, pa, d.Cause)
	case pr.isDead(now, d.Welcome.Instance):
		p.refuseLink(now, pa, d, "instance "+d.Welcome.Instance+" answered, which another one has replaced")
	case pr.isOther(d.Welcome.Instance):
		p.hangUp(pa, d, "another instance answered than "+pr.instance)
		p.replaced(now, pr, d.Welcome.Instance)
		p.requeue(now, pr)
	case d.Fault == MismatchFault:
		p.mismatched(now, pr, errorf(PeerMismatch, "Link refused between this decode worker and prefill %s: %s", pr.addr, d.Cause))
	default:
		p.welcome(now, pa, d)
	}
}

// welcome judges what P says of itself in the handshake, learns what its
// registry did not tell, and puts the link into use.
func (p *Peers) welcome(now time.Duration, pa *pair, d *PeerDone) {
	pr, w := pa.peer, &d.Welcome
	if err := mismatchWelcome(&p.cfg.Local, pr.addr, w); err != nil {
		p.hangUp(pa, d, err.Message)
		p.mismatched(now, pr, err)
		return
	}
	if w.TP != 0 && w.TP != pr.facts.TP || w.DP != 0 && w.DP != pr.facts.DP {
		p.refuseLink(now, pa, d, fmt.Sprintf("the prefill there has tp %d, dp %d, its registry says tp %d, dp %d", w.TP, w.DP, pr.facts.TP, pr.facts.DP))
		return
	}
	pr.meet(now, w.Instance)
	if pr.instance == "" {
		pr.instance = w.Instance
	}
	if pr.facts.Fingerprint == "" {
		pr.facts.Fingerprint = w.Fingerprint
	}
	p.succeed(&pa.pacer)
	pa.link, pa.upAt, pa.heard = d.Link, now, now
	p.links[pa.link] = pa
	s := pa.set
	s.up++
	if s.complete() {
		p.completeSet(now, s)
	}
}

// hangUp closes a link whose handshake went through but which is not wanted.
func (p *Peers) hangUp(pa *pair, d *PeerDone, why string) {
	if d.Fault == OK {
		p.closeLink(d.Link, pa.peer, why)
	}
}

func (p *Peers) refuseLink(now time.Duration, pa *pair, d *PeerDone, why string) {
	p.hangUp(pa, d, why)
	p.dialFailed(now, pa, why)
}

// dialFailed drops the rank's address, which may be stale, and looks it up
// anew: once at once, then at the pace of lookups (rule 21). With the last
// attempt spent there is nothing left to look up; the due turn judges.
func (p *Peers) dialFailed(now time.Duration, pa *pair, cause string) {
	pa.fail(cause)
	r, s := pa.rank, pa.set
	r.target = ""
	for _, other := range s.pairs {
		if other.rank == r && other.spent < p.cfg.Attempts {
			p.alarms.stop(&other.alarm)
		}
	}
	if !pa.isOpen {
		return
	}
	if pa.spent >= p.cfg.Attempts {
		p.pace(now, &pa.pacer)
		return
	}
	if !r.hurried && !r.isOpen {
		r.hurried = true
		r.gap = 0
	}
	p.open(now, &r.pacer)
}
