//metronome:pure

package sched

import (
	"fmt"
	"time"
)

// resolve moves a claim along the chain as far as what is known allows, and
// makes sure that what is missing is being asked for.
func (p *Peers) resolve(now time.Duration, c *claim) {
	pr := c.peer
	if !pr.known {
		p.becomeNeedInfo(now, c)
		p.open(now, &pr.info.pacer)
		return
	}
	if c.dp < 0 {
		c.dp = pr.dpRank(&c.Want)
	}
	switch {
	case c.dp >= pr.facts.DP:
		p.lose(now, c, errorf(PrefillUnreachable, "the request names DP rank %d of prefill %s, which has %d (0 … %d)", c.dp, c.Addr, pr.facts.DP, pr.facts.DP-1))
		return
	case c.dp < 0:
		p.becomeNeedRank(now, c)
		p.askRank(now, pr)
		return
	}
	s := p.linksOf(pr, c.dp)
	if s.complete() {
		p.becomeLinked(now, c, s)
		return
	}
	p.becomeNeedLinks(now, c, s)
	p.advance(now, s)
}

// resolveAll moves on every claim of the peer that waits in the given stage.
func (p *Peers) resolveAll(now time.Duration, pr *peer, stage claimStage) {
	for c := pr.head; c != nil; {
		next := c.next
		if c.stage == stage {
			p.resolve(now, c)
		}
		c = next
	}
	p.settle(now, pr)
}

// dpRank is the DP rank of a request as far as it follows from what is known,
// or -1: the room must be asked for. The order is SGLang's.
func (pr *peer) dpRank(w *Want) int {
	switch {
	case w.DPRank >= 0:
		return w.DPRank
	case pr.facts.DP == 1:
		return 0
	case pr.facts.FollowRoom:
		return int(w.Room % int64(pr.facts.DP))
	}
	return -1
}

// linkedFor says that a request's links are up already.
func (pr *peer) linkedFor(w *Want) bool {
	if !pr.known {
		return false
	}
	dp := pr.dpRank(w)
	for _, s := range pr.sets {
		if s.dp == dp {
			return s.complete()
		}
	}
	return false
}

// infoKey is the fetch of a peer's parallel info.
type infoKey struct {
	pacer
	p *Peers
}

func (p *Peers) initInfo(pr *peer) {
	k := &pr.info
	k.p = p
	p.initPacer(&k.pacer, pr, FetchInfo, k, k.landed)
}

func (k *infoKey) ask(time.Duration) {
	k.p.launch(&k.try, PeerAction{First: k.starts == 1, Attempt: k.starts, Timeout: k.p.cfg.Timeout})
}

func (k *infoKey) exhausted(now time.Duration) {
	pr := k.peer
	err := errorf(PrefillUnreachable, "Could not fetch prefill parallel info from %s after %d attempts: %s", pr.addr, k.spent, k.cause)
	k.p.loseAll(now, pr, needInfo, nil, err)
}

func (k *infoKey) landed(now time.Duration, d *PeerDone, o outcome) {
	cause := d.Cause
	if o == answered {
		if cause = k.publish(now, d.Info); cause == "" {
			k.p.stats.FetchOK++
			return
		}
	}
	if o == void {
		k.p.stats.FetchVoid++
		k.void()
	} else {
		k.p.stats.FetchFailed++
		k.fail(cause)
	}
	k.p.pace(now, &k.pacer)
}

// publish makes a registry's answer known, or says why it is none.
func (k *infoKey) publish(now time.Duration, info *ParallelInfo) (cause string) {
	p, pr := k.p, k.peer
	if info == nil {
		return "malformed answer: empty"
	}
	if cause := malformed(info); cause != "" {
		return cause
	}
	if pr.isDead(now, info.Instance) {
		return "the registry answers with instance " + info.Instance + ", which another one has replaced"
	}
	if pr.isOther(info.Instance) {
		p.replaced(now, pr, info.Instance) // and this very answer is the refetch
	}
	p.succeed(&k.pacer)
	pr.instance = info.Instance
	pr.meet(now, info.Instance)
	if err := mismatch(&p.cfg.Local, p.cfg.DCP, pr.addr, info); err != nil {
		p.mismatched(now, pr, err)
		return ""
	}
	pr.known, pr.facts = true, *info
	p.stats.Known++
	p.startBeat(now, pr)
	p.resolveAll(now, pr, needInfo)
	return ""
}

// Rooms that P has not seen yet are asked for again after firstAsk, doubling
// to lastAsk (rule 18).
const (
	firstAsk = 10 * time.Millisecond
	lastAsk  = time.Second
)

// queryKey is the query for the DP ranks of all rooms of a peer that wait for it.
type queryKey struct {
	pacer
	p    *Peers
	wait time.Duration // before asking again for rooms that P does not know
	asks int           // of this episode, answered without a room

	answers bool // the last attempt has brought an answer
}

func (p *Peers) initQuery(pr *peer) {
	k := &pr.query
	k.p = p
	p.initPacer(&k.pacer, pr, QueryRanks, k, k.landed)
	k.atTick = true
}

// askRank joins a new room to the query. After an answer a new room is asked
// for soon, whatever the older ones have come to wait; after a failure it waits
// as they do, also in an episode of its own.
func (p *Peers) askRank(now time.Duration, pr *peer) {
	k := &pr.query
	k.wait = firstAsk
	if k.answers {
		k.gap = firstAsk
		p.alarms.stop(&k.alarm)
	}
	if !k.isOpen {
		k.asks = 0
	}
	p.open(now, &k.pacer)
	p.pace(now, &k.pacer)
}

func (k *queryKey) ask(time.Duration) {
	k.answers = false
	pr := k.peer
	rooms := make([]int64, 0, pr.at[needRank])
	for c := pr.head; c != nil; c = c.next {
		if c.stage == needRank {
			rooms = append(rooms, c.Room)
		}
	}
	k.p.launch(&k.try, PeerAction{First: k.starts == 1, Attempt: k.starts, Timeout: k.p.cfg.Timeout, Rooms: rooms})
}

func (k *queryKey) exhausted(now time.Duration) {
	pr := k.peer
	err := errorf(PrefillUnreachable, "Could not query prefill DP ranks from %s after %d attempts: %s", pr.addr, k.spent, k.cause)
	k.p.loseAll(now, pr, needRank, nil, err)
}

func (k *queryKey) landed(now time.Duration, d *PeerDone, o outcome) {
	cause := d.Cause
	if o == answered {
		if cause = k.badAnswer(d.Ranks); cause == "" {
			k.take(now, d.Ranks)
			return
		}
	}
	if o == void {
		k.void()
	} else {
		k.fail(cause)
	}
	k.p.pace(now, &k.pacer)
}

// badAnswer says what makes an answer unusable, or "". Only rooms that wait
// are looked at, in order of arrival.
func (k *queryKey) badAnswer(ranks map[int64]int) string {
	pr := k.peer
	for c := pr.head; c != nil; c = c.next {
		if c.stage != needRank {
			continue
		}
		if dp, ok := ranks[c.Room]; ok && (dp < 0 || dp >= pr.facts.DP) {
			return fmt.Sprintf("malformed answer: DP rank %d for room %d, the prefill has %d (0 … %d)", dp, c.Room, pr.facts.DP, pr.facts.DP-1)
		}
	}
	return ""
}

// take moves on the rooms that are in the answer. The others are no failure:
// P has not seen them yet.
func (k *queryKey) take(now time.Duration, ranks map[int64]int) {
	p, pr := k.p, k.peer
	k.spent, k.charge, k.cause, k.answers = 0, false, "", true
	k.asks++
	k.gap = k.wait
	k.wait = min(2*k.wait, lastAsk)
	for c := pr.head; c != nil; {
		next := c.next
		if c.stage == needRank {
			if dp, ok := ranks[c.Room]; ok {
				c.dp = dp
				p.resolve(now, c)
			}
		}
		c = next
	}
	p.settle(now, pr)
	p.pace(now, &k.pacer)
}

// story tells how far the query has come, for a room that ran out of time.
func (k *queryKey) story() string {
	if k.spent == 0 {
		return fmt.Sprintf("%d answers without it", k.asks)
	}
	return k.pacer.story()
}
