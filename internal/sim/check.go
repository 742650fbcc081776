package sim

import (
	"fmt"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
)

// check is what must hold in a decode worker after every turn.
func (d *decode) check() {
	if d.judge.Err != nil {
		d.broken("oracle", "%s: %v", d.name, d.judge.Err)
		return
	}
	if err := d.core.Check(); err != nil {
		d.broken("invariant", "%s: %v", d.name, err)
	}
	if d.core.Len(sched.Running) == 0 {
		d.beat = 0
	}
	d.bounds()
}

// overdue is how long after its deadline a request may end: a late turn is
// armed once more, and the turn itself takes a moment.
const overdue = 2 * time.Second

// late: no request outlives its time.
func (w *worker) late(j *job) {
	if j.deadline == sched.Never || w.heldUp() {
		return
	}
	if late := w.clock() - j.deadline; late > overdue {
		w.broken("bound", "%s: request %d should have ended %v ago", w.name, j.id, late)
	}
}

func (d *decode) bounds() {
	for _, j := range d.open {
		d.late(j)
	}
	if n := d.core.Len(sched.Pending); n > 4096 {
		d.broken("bound", "%s: %d requests wait for peers", d.name, n)
	}
	if n := d.core.Len(sched.Running); n > d.plan.MaxRunning {
		d.broken("bound", "%s: %d requests run", d.name, n)
	}
}

func (p *prefill) check() {
	if p.judge.Err != nil {
		p.broken("oracle", "%s: %v", p.name, p.judge.Err)
		return
	}
	if err := sched.CheckShared(nil, p.core); err != nil {
		p.broken("invariant", "%s: %v", p.name, err)
	}
	for _, j := range p.open {
		p.late(j)
	}
}

// rest is what must hold when nobody asks for anything any more.
func (d *decode) rest() {
	c := d.pool.Count()
	switch {
	case len(d.open) > 0:
		d.broken("rest", "%s: %d requests never ended:\n%s", d.name, len(d.open), d.core.Describe())
	case d.end.Grants() > 0:
		d.broken("rest", "%s: %d grants are still open", d.name, d.end.Grants())
	case c[kv.Owned]+c[kv.Quarantined] > 0:
		d.broken("rest", "%s: %d pages are owned and %d in quarantine", d.name, c[kv.Owned], c[kv.Quarantined])
	}
}

func (p *prefill) rest() {
	c := p.pool.Count()
	rooms, sends := p.end.Rooms()
	switch {
	case len(p.open) > 0:
		p.broken("rest", "%s: %d requests never ended:\n%s", p.name, len(p.open), p.core.Describe())
	case rooms > 0 || sends > 0:
		p.broken("rest", "%s: %d rooms and %d sends are still there", p.name, rooms, sends)
	case c[kv.Owned]+c[kv.Quarantined] > 0:
		p.broken("rest", "%s: %d pages are owned and %d in quarantine", p.name, c[kv.Owned], c[kv.Quarantined])
	}
}

// peerRules judges what a decode core asks of its peers, from outside.
type peerRules struct {
	d     *decode
	tries map[uint64]sched.PeerAction
	addrs map[string]*addrRules
}

// addrRules is what is known of one address.
type addrRules struct {
	fetching  bool
	lastFetch time.Duration  // start, by the worker's clock
	fetched   bool           // there was one
	void      int            // tries of this episode that spent nothing
	keys      map[string]int // other tries in flight, by key
}

func newPeerRules(d *decode) peerRules {
	return peerRules{d: d, tries: map[uint64]sched.PeerAction{}, addrs: map[string]*addrRules{}}
}

func (r *peerRules) at(addr string) *addrRules {
	a := r.addrs[addr]
	if a == nil {
		a = &addrRules{keys: map[string]int{}}
		r.addrs[addr] = a
	}
	return a
}

// action judges one thing that the core wants.
func (r *peerRules) action(a *sched.PeerAction) {
	d, at := r.d, r.at(a.Addr)
	switch a.Kind {
	case sched.CancelTry, sched.CloseLink:
		return
	case sched.FetchInfo:
		r.fetch(a, at)
	default:
		key := fmt.Sprint(a.Kind, a.Rank, a.LocalTP)
		if at.keys[key]++; at.keys[key] > 1 {
			d.broken("rule 12", "%s: two tries at once of kind %d for %s, %v", d.name, a.Kind, a.Addr, a.Rank)
		}
	}
	r.tries[a.ID] = *a
	if a.Timeout <= 0 {
		d.broken("rule 3", "%s: a try at %s without a deadline", d.name, a.Addr)
	}
}

func (r *peerRules) fetch(a *sched.PeerAction, at *addrRules) {
	d := r.d
	if at.fetching {
		d.broken("rule 2", "%s: two fetches at once for %s", d.name, a.Addr)
	}
	if since := d.clock() - at.lastFetch; at.fetched && since < d.plan.Interval {
		d.broken("rule 5", "%s: a fetch for %s starts %v after the one before", d.name, a.Addr, since)
	}
	if a.Attempt == 1 {
		at.void = 0
	}
	if a.Attempt-at.void > d.plan.Attempts && !d.heldUp() {
		d.broken("rule 5", "%s: attempt %d for %s, the budget is %d", d.name, a.Attempt, a.Addr, d.plan.Attempts)
	}
	at.fetching, at.fetched, at.lastFetch = true, true, d.clock()
}

// event notes what the core is told.
func (r *peerRules) event(ev sched.Event) {
	done, ok := ev.(*sched.PeerDone)
	if !ok {
		return
	}
	a, ok := r.tries[done.ID]
	if !ok {
		r.d.broken("rig", "%s: a completion that nobody asked for: %+v", r.d.name, done)
		return
	}
	delete(r.tries, done.ID)
	at := r.at(a.Addr)
	if a.Kind == sched.FetchInfo {
		at.fetching = false
		if done.Fault == sched.LocalFault {
			at.void++
		}
		return
	}
	at.keys[fmt.Sprint(a.Kind, a.Rank, a.LocalTP)]--
}

// finish judges the end of a request that gave its peer up.
func (r *peerRules) finish(j *job, f sched.Finish) {
	d := r.d
	if f.Err == nil || !strings.HasPrefix(f.Err.Message, "Could not fetch prefill parallel info") {
		return
	}
	at := r.at(j.leg.addr)
	if at.fetching {
		d.broken("rule 7", "%s: request %d gives %s up while an attempt is under way", d.name, j.id, j.leg.addr)
	}
	if want := fmt.Sprintf("after %d attempts", d.plan.Attempts); !strings.Contains(f.Err.Message, want) {
		d.broken("rule 7", "%s: request %d ends with %q", d.name, j.id, f.Err.Message)
	}
}
