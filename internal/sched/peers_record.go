//metronome:pure

package sched

import (
	"slices"
	"time"
)

// maxDead bounds the instance ids that one record remembers as replaced. The
// oldest goes: an old prefill does not come back after eight others.
const maxDead = 8

// peer is the record of one bootstrap address. It outlives what is known: an
// evicted record keeps the pace of its fetches, the ids that are dead there,
// and the granted rooms that were left to their links.
type peer struct {
	addr  string
	index int    // in Peers.all
	gen   uint64 // of what is known; nothing older may change it

	known    bool
	facts    ParallelInfo  // when known
	bad      *Error        // known to mismatch (reject); not known then
	badEnd   alarm         // forgets a known-bad record whose registry sends no id
	instance string        // the instance id last met here; outlives an eviction
	dead     []string      // ids replaced here
	met      time.Duration // when instance was last met, or took the address

	info  infoKey
	query queryKey
	beat  heartbeat
	sets  []*linkSet // by DP rank, ascending; of this generation

	head, tail *claim // by arrival
	at         [stageCount]int
	unresolved int
	idle       alarm // nobody has used the record for so long
	used       time.Duration
}

func (p *Peers) newPeer(addr string) *peer {
	p.lastGen++
	pr := &peer{addr: addr, gen: p.lastGen, index: len(p.all)}
	pr.badEnd.due = func(now time.Duration) { p.forgetBad(now, pr) }
	pr.idle.due = func(now time.Duration) { p.idleDue(now, pr) }
	p.initInfo(pr)
	p.initQuery(pr)
	p.initBeat(pr)
	p.peers[addr] = pr
	p.all = append(p.all, pr)
	return pr
}

// settle ends the episodes that nobody waits for any more, and lets an unused
// record grow idle. It follows every removal of claims.
func (p *Peers) settle(now time.Duration, pr *peer) {
	if pr.at[needInfo] == 0 {
		p.shut(&pr.info.pacer)
	}
	if pr.at[needRank] == 0 {
		p.shut(&pr.query.pacer)
	}
	for _, s := range pr.sets {
		if s.at[needLinks] == 0 {
			p.restSet(s)
		}
	}
	p.rest(now, pr)
}

// rest begins the time for which a record without claims is kept. The alarm
// stays where it is: idleDue moves it, once in a long while.
func (p *Peers) rest(now time.Duration, pr *peer) {
	if pr.head != nil {
		return
	}
	pr.used = now
	if !pr.idle.isSet() {
		p.alarms.set(&pr.idle, now, now+p.cfg.IdleTTL)
	}
}

// quiet says that a record may go: no try that must be the only one of its
// address is in flight, nor so young that another would come too soon.
func (p *Peers) quiet(now time.Duration, pr *peer) bool {
	rested := func(pc *pacer) bool { return !pc.inFlight() && (!pc.begun || now-pc.last >= p.cfg.Interval) }
	return rested(&pr.info.pacer) && rested(&pr.query.pacer) && !pr.beat.inFlight()
}

// idleDue removes a record that nobody has used, once its last completion is in.
func (p *Peers) idleDue(now time.Duration, pr *peer) {
	switch {
	case pr.head != nil: // in use; rest sets the alarm again
		return
	case now < pr.used+p.cfg.IdleTTL:
		p.alarms.set(&pr.idle, now, pr.used+p.cfg.IdleTTL)
		return
	case !p.quiet(now, pr):
		p.cancel(&pr.beat.try)
		p.alarms.set(&pr.idle, now, now+p.cfg.Interval)
		return
	}
	p.stats.EvictedIdle += pr.count()
	p.delete(now, pr)
}

// makeRoom lets the longest unused record go when there are as many as may be
// kept (rule 19).
func (p *Peers) makeRoom(now time.Duration) *Error {
	if len(p.all) < p.cfg.MaxRecords {
		return nil
	}
	var oldest *peer
	for _, pr := range p.all {
		if pr.head == nil && p.quiet(now, pr) && (oldest == nil || pr.used < oldest.used || pr.used == oldest.used && pr.addr < oldest.addr) {
			oldest = pr
		}
	}
	if oldest == nil {
		err := errorf(NoPrefill, "this decode worker keeps track of %d prefill addresses, all in use; try again later or elsewhere", len(p.all))
		err.RetryAfter = time.Second
		return err
	}
	p.stats.EvictedIdle += oldest.count()
	p.delete(now, oldest)
	return nil
}

// count is 1 for a record that knows something.
func (pr *peer) count() uint64 {
	if pr.known || pr.bad != nil {
		return 1
	}
	return 0
}

func (p *Peers) delete(now time.Duration, pr *peer) {
	p.drop(now, pr, spareNone, "its prefill's record was not used for long")
	p.alarms.stop(&pr.idle)
	delete(p.peers, pr.addr)
	last := p.all[len(p.all)-1]
	p.all[pr.index], last.index = last, pr.index
	p.all = p.all[:len(p.all)-1]
}

// drop forgets what is known of a peer and begins another generation:
// everything in flight is cancelled, and links close unless spare keeps them
// for their granted rooms. The caller places the claims anew.
func (p *Peers) drop(now time.Duration, pr *peer, spare func(*linkSet, time.Duration) bool, why string) {
	p.lastGen++
	pr.gen = p.lastGen
	if pr.known {
		p.stats.Known--
	}
	pr.known, pr.bad, pr.facts = false, nil, ParallelInfo{}
	p.alarms.stop(&pr.badEnd)
	p.shut(&pr.info.pacer)
	p.shut(&pr.query.pacer)
	p.stopBeat(pr)
	for _, s := range pr.sets {
		p.restSet(s)
		if s.at[isGranted] > 0 && spare(s, now) {
			s.kept = true
		} else {
			p.closeSet(s, why)
		}
	}
	clear(pr.sets)
	pr.sets = pr.sets[:0]
	// Links kept at an earlier eviction are judged anew.
	for c := pr.head; c != nil; c = c.next {
		if c.stage == isGranted && c.set.kept && !spare(c.set, now) {
			p.closeSet(c.set, why)
		}
	}
}

func spareNone(*linkSet, time.Duration) bool    { return false }
func spareGranted(*linkSet, time.Duration) bool { return true }

// loseClosed ends the requests whose grant rests on links that drop has closed.
func (p *Peers) loseClosed(now time.Duration, pr *peer, err *Error) {
	for c := pr.head; c != nil; {
		next := c.next
		if c.stage == isGranted && c.set.closed {
			p.lose(now, c, err)
		}
		c = next
	}
}

// requeue lets the claims without a grant of a peer that has just been dropped
// wait again, in a new episode.
func (p *Peers) requeue(now time.Duration, pr *peer) {
	for c := pr.head; c != nil; c = c.next {
		switch c.stage {
		case isGranted:
			continue
		case isLinked:
			p.unlink(c)
		}
		p.becomeNeedInfo(now, c)
	}
	if pr.at[needInfo] > 0 {
		p.open(now, &pr.info.pacer)
	}
	p.settle(now, pr)
}

// replaced: another instance answers at the address (rule 16). That is never a
// mismatch: the old one is dead there from now on (rule 15), its granted rooms
// end by name, and what the new one is, only a fetch that begins now can tell.
// The caller requeues the claims without a grant.
func (p *Peers) replaced(now time.Duration, pr *peer, by string) {
	p.stats.EvictedReplaced += pr.count()
	lost := errorf(PrefillUnreachable, "Lost connection with prefill instance (bootstrap_addr: %s): instance %s has replaced %s there", pr.addr, by, pr.instance)
	if len(pr.dead) == maxDead {
		pr.dead = slices.Delete(pr.dead, 0, 1)
	}
	pr.dead = append(pr.dead, pr.instance)
	pr.instance = ""
	pr.meet(now, by)
	p.drop(now, pr, spareNone, "another prefill has taken the address")
	p.loseClosed(now, pr, lost)
}

// isDead says that an id was replaced here by one that is, as far as we know,
// still here. A name that led elsewhere for a while and leads back again is no
// such case: when nobody has met the other one for deadTTL, the id may return.
func (pr *peer) isDead(now time.Duration, instance string) bool {
	return instance != "" && slices.Contains(pr.dead, instance) && now-pr.met < deadTTL
}

// deadTTL is longer than any answer can be on its way.
const deadTTL = 10 * time.Second

// meet: the instance is at the address now.
func (pr *peer) meet(now time.Duration, instance string) {
	pr.met = now
	pr.dead = slices.DeleteFunc(pr.dead, func(id string) bool { return id == instance })
}

// isOther says that an id is told and another than the one last met.
func (pr *peer) isOther(instance string) bool { return !same(pr.instance, instance) }

// mismatched: the peer cannot serve us. Under fatal that ends the process; else
// the record stays as known bad, its requests without a grant end, and it is
// looked at anew when its id changes (rules 9 and 17).
func (p *Peers) mismatched(now time.Duration, pr *peer, err *Error) {
	p.stats.Mismatches++
	if !p.cfg.Reject {
		p.fatal = err
		return
	}
	p.drop(now, pr, spareGranted, "the prefill does not fit: "+err.Message)
	pr.bad = err
	p.startBeat(now, pr)
	if pr.instance == "" {
		p.alarms.set(&pr.badEnd, now, now+p.cfg.RejectTTL)
	}
	for c := pr.head; c != nil; {
		next := c.next
		if c.stage != isGranted {
			p.lose(now, c, err)
		}
		c = next
	}
	p.settle(now, pr)
}

// forgetBad lets a known-bad record go that no id can ever clear.
func (p *Peers) forgetBad(now time.Duration, pr *peer) {
	p.drop(now, pr, spareGranted, "")
	p.settle(now, pr)
}
