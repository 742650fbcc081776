//metronome:pure

package sched

import (
	"fmt"
	"slices"
	"time"
)

// linkSet is all the links of one DP rank of one generation of a peer: one for
// each pair of ranks that the rank mapping names. All rooms of that DP rank use
// every one of them, so they become Linked together or fail together.
type linkSet struct {
	p      *Peers
	peer   *peer
	dp     int
	ranks  []*rankKey
	pairs  []*pair
	up     int
	ids    []LinkID // of all pairs, ascending, while the set is complete; then never written again
	at     [stageCount]int
	active bool // some key of the set has an open episode
	kept   bool // the peer has been dropped; serves the rooms that were granted on it
	closed bool
}

func (s *linkSet) complete() bool { return s.up == len(s.pairs) }

// linksOf is the set of a DP rank, made when first needed.
func (p *Peers) linksOf(pr *peer, dp int) *linkSet {
	i, found := slices.BinarySearchFunc(pr.sets, dp, func(s *linkSet, dp int) int { return s.dp - dp })
	if found {
		return pr.sets[i]
	}
	s := &linkSet{p: p, peer: pr, dp: dp}
	for tp := range p.cfg.Local.TP {
		for lpp := range p.cfg.Local.PP {
			m := MapRank(&p.cfg.Local, tp, lpp, &pr.facts)
			for _, ptp := range m.TP {
				for _, pcp := range m.CP {
					for _, ppp := range m.PP {
						s.add(tp, RankKey{DP: dp, CP: pcp, TP: ptp, PP: ppp})
					}
				}
			}
		}
	}
	pr.sets = slices.Insert(pr.sets, i, s)
	return s
}

// add joins a pair of ranks to the set. Pairs of one P rank share its address.
func (s *linkSet) add(local int, key RankKey) {
	i := slices.IndexFunc(s.ranks, func(r *rankKey) bool { return r.key == key })
	if i < 0 {
		r := &rankKey{set: s, key: key}
		s.p.initPacer(&r.pacer, s.peer, LookupRank, r, r.landed)
		i = len(s.ranks)
		s.ranks = append(s.ranks, r)
	}
	pa := &pair{set: s, rank: s.ranks[i], local: local}
	s.p.initPacer(&pa.pacer, s.peer, DialLink, pa, pa.landed)
	s.pairs = append(s.pairs, pa)
}

// advance makes sure that every missing link of the set is on its way: its
// rank's address is asked for, or it is dialled.
func (p *Peers) advance(now time.Duration, s *linkSet) {
	s.active = true
	for _, pa := range s.pairs {
		switch {
		case pa.link != 0:
		case pa.isOpen && pa.spent >= p.cfg.Attempts: // nothing left to do but to be judged
		case pa.rank.target == "" && !pa.inFlight():
			p.open(now, &pa.rank.pacer)
		default: // one in flight may be left of an earlier episode, and cancelled
			p.open(now, &pa.pacer)
			p.pace(now, &pa.pacer)
		}
	}
}

// completeSet lets every claim of the set have its links at once.
func (p *Peers) completeSet(now time.Duration, s *linkSet) {
	s.ids = make([]LinkID, 0, len(s.pairs))
	for _, pa := range s.pairs {
		s.ids = append(s.ids, pa.link)
	}
	slices.Sort(s.ids)
	for c := s.peer.head; c != nil; c = c.next {
		if c.stage == needLinks && c.set == s {
			p.becomeLinked(now, c, s)
		}
	}
	p.settle(now, s.peer)
}

// restSet ends the episodes of a set that nobody waits for.
func (p *Peers) restSet(s *linkSet) {
	if !s.active {
		return
	}
	s.active = false
	for _, r := range s.ranks {
		r.hurried = r.hurried && s.complete()
		p.shut(&r.pacer)
	}
	for _, pa := range s.pairs {
		p.shut(&pa.pacer)
	}
}

// closeSet closes the links of a set for good.
func (p *Peers) closeSet(s *linkSet, why string) {
	s.closed = true
	for _, pa := range s.pairs {
		if pa.link != 0 {
			link := pa.link
			p.linkDown(pa)
			p.closeLink(link, s.peer, why)
		}
	}
}

func (p *Peers) closeLink(link LinkID, pr *peer, why string) {
	p.actions = append(p.actions, PeerAction{Kind: CloseLink, Link: link, Gen: pr.gen, Addr: pr.addr, Text: why})
}

// spoke says that every link of the set has been heard within one heartbeat
// interval: the prefill lives, whatever its registry does.
func (s *linkSet) spoke(now time.Duration) bool {
	for _, pa := range s.pairs {
		if pa.link == 0 || now-pa.heard > s.p.cfg.HeartbeatInterval {
			return false
		}
	}
	return true
}

// missing tells what the set still lacks, for an error that ends a request.
func (s *linkSet) missing() string {
	for _, pa := range s.pairs {
		switch {
		case pa.link != 0:
		case pa.rank.target == "" && pa.cause == "":
			return fmt.Sprintf("the address of %v is not known (%s)", pa.rank.key, pa.rank.story())
		default:
			return fmt.Sprintf("the link to %v at %s is not up (%s)", pa.rank.key, pa.dialled, pa.story())
		}
	}
	return ""
}

// String names a prefill rank in errors.
func (k RankKey) String() string {
	return fmt.Sprintf("rank dp=%d cp=%d tp=%d pp=%d", k.DP, k.CP, k.TP, k.PP)
}

// linkEnded: a link closed by itself. Rooms granted on it fail by their own
// events; requests without a grant wait for a new link. One that ends within
// an interval of coming up counts as a failed set-up, so a storm of them is
// paced and budgeted like any other failure.
func (p *Peers) linkEnded(now time.Duration, pa *pair, cause string) {
	s, complete := pa.set, pa.set.complete()
	lived := now - pa.upAt
	p.linkDown(pa)
	if complete {
		for c := s.peer.head; c != nil; c = c.next {
			if c.stage == isLinked && c.set == s {
				p.unlink(c)
				p.becomeNeedLinks(now, c, s)
			}
		}
	}
	if s.at[needLinks] == 0 {
		return
	}
	if lived < p.cfg.Interval {
		s.active = true
		pa.isOpen, pa.charge = true, true
		p.dialFailed(now, pa, fmt.Sprintf("the link ended %v after it came up: %s", lived, cause))
	} else {
		pa.rank.hurried = false
	}
	p.advance(now, s)
}

func (p *Peers) linkDown(pa *pair) {
	delete(p.links, pa.link)
	pa.link = 0
	pa.set.up--
	pa.set.ids = nil
}
