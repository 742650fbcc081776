//metronome:pure

package sched

import (
	"fmt"
	"time"
)

// claim is one request's claim on a peer, from Want to its end or Landed.
type claim struct {
	Want
	peer       *peer
	stage      claimStage
	dp         int           // DP rank, -1: not known yet
	set        *linkSet      // from needLinks on, else nil
	left       time.Duration // of the resolve timeout; stands still while Linked
	alarm      alarm         // its end
	prev, next *claim        // of the same peer, by arrival
}

// claimStage is how far along the chain a claim is. It changes only in
// become… functions.
type claimStage uint8

const (
	fresh      claimStage = iota // not placed yet
	needInfo                     // waits for parallel info
	needRank                     // waits for the DP rank of its room
	needLinks                    // waits for rank addresses and links
	isLinked                     // all links are up
	isGranted                    // its grant is open
	stageCount = iota
)

func (s claimStage) resolving() bool { return s == needInfo || s == needRank || s == needLinks }

func (p *Peers) newClaim(pr *peer, w Want) *claim {
	c := p.spare
	if c != nil {
		p.spare = c.next
		c.next = nil
	} else {
		c = &claim{}
		c.alarm.due = func(now time.Duration) { p.outOfTime(now, c) }
	}
	c.Want, c.peer, c.stage, c.dp, c.set, c.left = w, pr, fresh, -1, nil, p.cfg.ResolveTimeout
	pr.at[fresh]++
	p.claims[w.Req] = c
	c.prev = pr.tail
	if pr.tail != nil {
		pr.tail.next = c
	} else {
		pr.head = c
	}
	pr.tail = c
	return c
}

func (p *Peers) becomeNeedInfo(now time.Duration, c *claim) {
	p.become(now, c, needInfo, nil, fresh, needRank, needLinks, isLinked)
	c.dp = -1
}

func (p *Peers) becomeNeedRank(now time.Duration, c *claim) {
	p.become(now, c, needRank, nil, fresh, needInfo)
}

func (p *Peers) becomeNeedLinks(now time.Duration, c *claim, s *linkSet) {
	p.become(now, c, needLinks, s, fresh, needInfo, needRank, isLinked)
}

func (p *Peers) becomeLinked(now time.Duration, c *claim, s *linkSet) {
	p.become(now, c, isLinked, s, fresh, needRank, needLinks)
	p.verdicts = append(p.verdicts, Verdict{Kind: Linked, Req: c.Req, Links: c.set.ids})
}

func (p *Peers) becomeGranted(now time.Duration, c *claim) {
	p.become(now, c, isGranted, c.set, isLinked)
}

// unlink tells the request that it has lost its peer; the caller places it anew.
func (p *Peers) unlink(c *claim) {
	p.verdicts = append(p.verdicts, Verdict{Kind: Unlinked, Req: c.Req})
}

// become moves a claim to another stage and link set: the counters follow, and
// the clock of the resolve timeout runs only while the claim waits for its peer.
func (p *Peers) become(now time.Duration, c *claim, to claimStage, s *linkSet, from ...claimStage) {
	changes("Peers", c.stage, to, from)
	was := c.stage
	p.count(c, -1)
	c.stage, c.set = to, s
	p.count(c, +1)
	switch {
	case to.resolving() && !c.alarm.isSet():
		p.alarms.set(&c.alarm, now, now+c.left)
	case was.resolving() && !to.resolving():
		c.left = max(0, c.alarm.at-now)
		p.alarms.stop(&c.alarm)
	}
}

// count adds n to the counters of the claim's stage.
func (p *Peers) count(c *claim, n int) {
	c.peer.at[c.stage] += n
	if c.stage.resolving() {
		p.unresolved += n
		c.peer.unresolved += n
	}
	if c.set != nil {
		c.set.at[c.stage] += n
	}
}

// lose ends the request; the caller settles the peer. The claim is gone.
func (p *Peers) lose(now time.Duration, c *claim, err *Error) {
	p.verdicts = append(p.verdicts, Verdict{Kind: Lost, Req: c.Req, Err: err})
	p.remove(now, c)
}

// loseAll ends every request of the peer that waits in the given stage (for the
// given links, unless nil), in order of arrival.
func (p *Peers) loseAll(now time.Duration, pr *peer, stage claimStage, s *linkSet, err *Error) {
	for c := pr.head; c != nil; {
		next := c.next
		if c.stage == stage && (s == nil || c.set == s) {
			p.lose(now, c, err)
		}
		c = next
	}
	p.settle(now, pr)
}

// remove takes the claim off its peer and keeps its memory for the next one;
// the caller settles the peer.
func (p *Peers) remove(now time.Duration, c *claim) {
	p.count(c, -1)
	p.alarms.stop(&c.alarm)
	delete(p.claims, c.Req)
	pr := c.peer
	if c.prev != nil {
		c.prev.next = c.next
	} else {
		pr.head = c.next
	}
	if c.next != nil {
		c.next.prev = c.prev
	} else {
		pr.tail = c.prev
	}
	if s := c.set; s != nil && s.kept && s.at[isGranted] == 0 {
		p.closeSet(s, "its last room has ended")
	}
	c.Want, c.peer, c.set, c.prev = Want{}, nil, nil, nil
	c.next, p.spare = p.spare, c
}

// outOfTime ends a request whose chain took longer than the resolve timeout.
func (p *Peers) outOfTime(now time.Duration, c *claim) {
	pr := c.peer
	var where string
	switch c.stage {
	case needInfo:
		where = "its parallel info is not known (" + pr.info.story() + ")"
	case needRank:
		where = fmt.Sprintf("the DP rank of room %d is not known (%s)", c.Room, pr.query.story())
	default:
		where = c.set.missing()
	}
	p.lose(now, c, errorf(PrefillUnreachable, "Could not reach prefill %s within %v (--resolve-timeout): %s", c.Addr, p.cfg.ResolveTimeout, where))
	p.settle(now, pr)
}
