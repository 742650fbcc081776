package sim

import (
	"fmt"
	"maps"
	"slices"
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

// bounds: no wait and no queue is longer than it may be.
func (d *decode) bounds() {
	pending := map[string]int{}
	for _, j := range d.open {
		d.late(j)
		d.unresolved(j, pending)
	}
	for g, heard := range d.heard {
		if silent := d.clock() - heard; silent > d.plan.KVTimeout+overdue && !d.heldUp() {
			d.broken("silence", "%s: nothing came for grant %d for %v", d.name, g, silent)
		}
	}
	switch {
	case d.core.Len(sched.Running) > d.plan.MaxRunning:
		d.broken("bound", "%s: %d requests run", d.name, d.core.Len(sched.Running))
	case d.end.Grants() > 2*d.plan.MaxRunning:
		d.broken("bound", "%s: %d grants are open", d.name, d.end.Grants())
	}
}

// unresolved judges the wait of a request for its peer (rules 19 and 21).
func (d *decode) unresolved(j *job, pending map[string]int) {
	if d.core.Phase(j.id) != sched.Pending {
		j.pending = d.clock()
		return
	}
	if waited := d.clock() - j.pending; waited > d.plan.ResolveTimeout+overdue && !d.heldUp() {
		d.broken("rule 21", "%s: request %d has waited %v for its peer", d.name, j.id, waited)
	}
	if at := d.rules.at(j.leg.addr); at.answered && d.rules.asks(j, at) {
		_, told := at.told[roomOf{at.gen, j.leg.room}]
		if since := d.clock() - at.asked; !told && since > time.Second+overdue && !d.heldUp() {
			d.broken("rule 18", "%s: room %d has not been asked for for %v", d.name, j.leg.room, since)
		}
	}
	if !j.unresolved {
		return
	}
	if pending[j.leg.addr]++; pending[j.leg.addr] > d.plan.MaxPerAddr {
		d.broken("rule 19", "%s: %d requests wait for %s", d.name, pending[j.leg.addr], j.leg.addr)
	}
}

func (p *prefillRank) check() {
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
	if rooms, _ := p.end.Rooms(); rooms > maxRooms+len(p.open) {
		p.broken("bound", "%s: %d rooms are kept", p.name, rooms)
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

func (p *prefillRank) rest() {
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
	d         *decode
	tries     map[uint64]sched.PeerAction
	links     map[sched.LinkID]dialled
	addrs     map[string]*addrRules
	withdrawn []uint64 // in this turn
}

// dialled is where a link leads that came up.
type dialled struct {
	sched.PeerAction
	dp int // DP ranks there
}

// info is what fetches have brought of one generation.
type info uint8

const (
	unknown info = iota
	maybe        // the answer of an instance that was replaced: it may be believed again (decision 006)
	known
	next // it opened another generation: the eviction and its refetch in one
)

// roomOf is a room, as one generation of an address knows it.
type roomOf struct {
	gen  uint64
	room int64
}

// addrRules is what is known of one address.
type addrRules struct {
	gen       uint64          // the newest that a try named
	infos     map[uint64]info // what has come of a generation
	opens     info            // what the last answer brought for the next generation: it may be eviction and refetch in one
	instance  string          // who was met last
	replaced  map[string]bool // instances that another one has followed
	returned  bool            // one of them has answered again
	evicted   uint64          // the newest generation whose heartbeats failed twice in a row
	failures  int             // of heartbeats in a row
	beaten    uint64          // the generation that they are of
	landed    bool            // the last fetch brought good info
	used      bool            // ... and something was asked since
	mismatch  bool            // somebody of another model or layout has answered under this address
	gaveUp    int             // the event in which requests gave it up
	fetching  bool
	lastFetch time.Duration  // start, by the worker's clock
	fetched   bool           // there was one
	void      int            // tries of this episode that spent nothing
	keys      map[string]int // other tries in flight, by key
	asked     time.Duration  // when the last query for DP ranks began; 0: none has
	askFailed int            // queries that have failed since the last good answer
	answered  bool           // the last one has come back, with a good answer
	size      int            // DP ranks, as the last fetch has it
	told      map[roomOf]int // DP ranks that have been told, by room and generation
}

func newPeerRules(d *decode) peerRules {
	return peerRules{d: d, tries: map[uint64]sched.PeerAction{}, links: map[sched.LinkID]dialled{}, addrs: map[string]*addrRules{}}
}

func (r *peerRules) at(addr string) *addrRules {
	a := r.addrs[addr]
	if a == nil {
		a = &addrRules{keys: map[string]int{}, told: map[roomOf]int{}, infos: map[uint64]info{}, replaced: map[string]bool{}}
		r.addrs[addr] = a
	}
	return a
}

// resolved says that an address was known at its last try.
func (r *peerRules) resolved(addr string) bool {
	at := r.at(addr)
	return at.infos[at.gen] != unknown && at.evicted != at.gen
}

// ready notes which tries the core withdraws in the turn that asks for them: it
// asked before it heard that their generation was over.
func (r *peerRules) ready(actions []sched.PeerAction) {
	r.withdrawn = r.withdrawn[:0]
	for i := range actions {
		if actions[i].Kind == sched.CancelTry {
			r.withdrawn = append(r.withdrawn, actions[i].ID)
		}
	}
}

// action judges one thing that the core wants.
func (r *peerRules) action(a *sched.PeerAction) {
	d, at := r.d, r.at(a.Addr)
	if a.Kind == sched.CancelTry || a.Kind == sched.CloseLink {
		return
	}
	if a.Gen > at.gen && at.opens != unknown {
		at.infos[a.Gen] = at.opens
	}
	at.opens = unknown
	switch {
	case a.Gen < at.gen:
		d.broken("rule 11", "%s: a try at %s for generation %d after one for %d", d.name, a.Addr, a.Gen, at.gen)
	case a.Gen <= at.evicted && !slices.Contains(r.withdrawn, a.ID):
		d.broken("rule 10", "%s: a try at %s for generation %d, whose heartbeats failed", d.name, a.Addr, a.Gen)
	case a.Kind == sched.FetchInfo && at.infos[a.Gen] == known:
		d.broken("rule 1", "%s: %s is fetched again, and is known", d.name, a.Addr)
	case a.Kind != sched.FetchInfo && at.infos[a.Gen] == unknown:
		d.broken("rule 8", "%s: a try at %s for generation %d, of which no info has come", d.name, a.Addr, a.Gen)
	}
	at.gen, at.used = a.Gen, true
	switch a.Kind {
	case sched.FetchInfo:
		r.fetch(a, at)
	default:
		key := fmt.Sprint(a.Kind, a.Rank, a.LocalTP)
		if at.keys[key]++; at.keys[key] > 1 {
			d.broken("rule 12", "%s: two tries at once of kind %d for %s, %v", d.name, a.Kind, a.Addr, a.Rank)
		}
	}
	if a.Kind == sched.QueryRanks {
		r.query(a, at)
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
	if at.gaveUp == d.events && a.Attempt > 1 {
		d.broken("rule 7", "%s: %s is given up in the turn that starts attempt %d", d.name, a.Addr, a.Attempt)
	}
	at.fetching, at.fetched, at.lastFetch, at.landed, at.answered = true, true, d.clock(), false, false
}

// query judges a query for DP ranks: it asks for all rooms that wait for
// theirs and for no other one, in its time (rule 18).
func (r *peerRules) query(a *sched.PeerAction, at *addrRules) {
	d, wait := r.d, firstAsk
	if at.askFailed > 0 {
		wait = d.plan.Interval
	}
	if since := d.clock() - at.asked; at.asked > 0 && since < wait {
		d.broken("rule 18", "%s: the DP ranks of %s are asked for %v after the last time", d.name, a.Addr, since)
	}
	if at.asked, at.answered = d.clock(), false; d.plan.FollowRoom {
		d.broken("rule 18", "%s: %s is asked for DP ranks that follow from the room", d.name, a.Addr)
	}
	rooms := map[int64]bool{}
	for _, room := range a.Rooms {
		rooms[room] = true
	}
	if len(rooms) != len(a.Rooms) {
		d.broken("rule 18", "%s: a room is asked for twice: %v", d.name, a.Rooms)
	}
	for _, j := range r.waiting(a.Addr) {
		if _, told := at.told[roomOf{a.Gen, j.leg.room}]; !rooms[j.leg.room] && !told && !j.granted {
			d.broken("rule 18", "%s: room %d is not asked for with %v", d.name, j.leg.room, a.Rooms)
		}
		delete(rooms, j.leg.room)
	}
	if len(rooms) > 0 && !slices.Contains(r.withdrawn, a.ID) {
		d.broken("rule 18", "%s: the DP ranks of %v are asked for, which do not wait", d.name, rooms)
	}
}

// firstAsk is how soon a query for DP ranks may follow a good answer.
const firstAsk = 10 * time.Millisecond

// ranked notes what a query for DP ranks has brought.
func (r *peerRules) ranked(a *sched.PeerAction, done *sched.PeerDone, at *addrRules) {
	sound := done.Fault == sched.OK
	for _, j := range r.waiting(a.Addr) {
		dp, ok := done.Ranks[j.leg.room]
		sound = sound && (!ok || dp >= 0 && dp < at.size)
	}
	if at.answered = sound; !sound {
		if done.Fault != sched.LocalFault {
			at.askFailed++
		}
		return
	}
	at.askFailed = 0
	for _, j := range r.waiting(a.Addr) {
		if dp, ok := done.Ranks[j.leg.room]; ok {
			at.told[roomOf{a.Gen, j.leg.room}] = dp
		}
	}
}

// waiting are the requests that wait for a peer and do not name a DP rank.
func (r *peerRules) waiting(addr string) (all []*job) {
	for _, j := range r.d.open {
		if j.leg.addr == addr && j.leg.ask.q.Named == 0 && r.d.core.Phase(j.id) == sched.Pending {
			all = append(all, j)
		}
	}
	return all
}

// granted judges where the pages of a room are granted to: the DP rank that it
// names, that follows, or that was told for it.
func (r *peerRules) granted(j *job, g *sched.Grant) {
	at := r.at(j.leg.addr)
	for _, id := range g.Links {
		l := r.links[id]
		want, told := j.leg.ask.q.Named-1, true
		switch {
		case want >= 0:
		case l.dp == 1:
			want = 0
		case r.d.plan.FollowRoom:
			want = int(j.leg.room % int64(l.dp))
		default:
			want, told = at.told[roomOf{l.Gen, j.leg.room}]
		}
		if !told || l.Addr != j.leg.addr || l.Rank.DP != want {
			r.d.broken("rule 18", "%s: room %d of %s is granted to DP rank %d of %s, it is at %d (known: %v)",
				r.d.name, j.leg.room, j.leg.addr, l.Rank.DP, l.Addr, want, told)
		}
	}
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
	switch a.Kind {
	case sched.FetchInfo:
		at.fetching = false
		r.fetched(&a, done, at)
		return
	case sched.ProbeHealth:
		r.beat(&a, done, at)
	case sched.QueryRanks:
		r.ranked(&a, done, at)
	case sched.DialLink:
		r.links[a.Link] = dialled{a, done.Welcome.DP}
		at.mismatch = at.mismatch || done.Fault == sched.MismatchFault
		at.meet(done.Welcome.Instance)
	}
	at.keys[fmt.Sprint(a.Kind, a.Rank, a.LocalTP)]--
}

// fetched notes what a fetch has brought.
func (r *peerRules) fetched(a *sched.PeerAction, done *sched.PeerDone, at *addrRules) {
	if done.Fault == sched.LocalFault {
		at.void++
	}
	if done.Fault != sched.OK || done.Info.TP < 1 {
		return
	}
	at.size = done.Info.DP
	brings, other := known, at.meet(done.Info.Instance)
	if at.replaced[done.Info.Instance] || at.returned { // who is dead there now is not seen from here
		brings, other, at.returned = maybe, true, true
	} else {
		at.landed, at.used = a.Gen == at.gen, false
	}
	at.infos[a.Gen] = max(at.infos[a.Gen], brings)
	if other || done.Info.Fingerprint != "same" { // what is known bad has a generation of its own, too
		at.opens = brings
	}
	at.mismatch = at.mismatch || done.Info.Fingerprint != "same"
}

// meet notes who has answered, and says that it is another one than before.
func (at *addrRules) meet(instance string) bool {
	if instance == "" || instance == at.instance {
		return false
	}
	if at.replaced[instance] { // it may be believed again, and the one that followed it then is dead
		at.returned = true
		return false
	}
	other := at.instance != ""
	at.replaced[at.instance] = other
	at.instance = instance
	return other
}

// beat counts failed heartbeats. What this process itself has cut does not count.
func (r *peerRules) beat(a *sched.PeerAction, done *sched.PeerDone, at *addrRules) {
	at.meet(done.Instance)
	switch {
	case r.d.heldUp() || done.Fault == sched.LocalFault:
		return
	case done.Fault == sched.OK:
		at.failures = 0
		return
	case at.beaten != a.Gen:
		at.beaten, at.failures = a.Gen, 0
	}
	if at.failures++; at.failures == 2 && a.Gen == at.gen {
		at.evicted = a.Gen
	}
}

// finish judges the end of a request that its peer, or its time, is blamed for.
func (r *peerRules) finish(j *job, f sched.Finish) {
	d := r.d
	if f.Err == nil {
		return
	}
	at := r.at(j.leg.addr)
	late := d.clock() - j.deadline
	gaveUp := strings.HasPrefix(f.Err.Message, "Could not fetch prefill parallel info")
	if strings.HasPrefix(f.Err.Message, "Could not query prefill DP ranks") && at.askFailed < d.plan.Attempts && !d.heldUp() {
		d.broken("rule 18", "%s: request %d gives %s up after %d queries that failed", d.name, j.id, j.leg.addr, at.askFailed)
	}
	if gaveUp {
		at.gaveUp = d.events
	}
	switch {
	case j.leg.ask.q.Named == 0 && strings.Contains(f.Err.Message, "names DP rank"):
		d.broken("rule 18", "%s: request %d names no DP rank and ends with %q", d.name, j.id, f.Err.Message)
	case f.Err.Code == sched.PeerMismatch && !at.mismatch:
		d.broken("rule 16", "%s: request %d ends with %q, and nobody of another kind has answered", d.name, j.id, f.Err.Message)
	case f.Err.Code == sched.DeadlineExceeded && late > sched.LateTurn && d.before < j.deadline && !d.plan.Blocking:
		d.broken("rule 20", "%s: request %d ends by a deadline that passed %v ago, while the process was held up", d.name, j.id, late)
	case gaveUp && at.fetching:
		d.broken("rule 7", "%s: request %d gives %s up while an attempt is under way", d.name, j.id, j.leg.addr)
	case gaveUp && at.landed:
		d.broken("rule 6", "%s: request %d gives %s up after a fetch that succeeded", d.name, j.id, j.leg.addr)
	case gaveUp && !strings.Contains(f.Err.Message, fmt.Sprintf("after %d attempts", d.plan.Attempts)):
		d.broken("rule 7", "%s: request %d ends with %q", d.name, j.id, f.Err.Message)
	}
}

// turned judges a whole turn: good info that came in it was used in it by
// those who wait for it.
func (r *peerRules) turned() {
	for _, j := range r.d.open {
		at := r.at(j.leg.addr)
		if at.landed && !at.used && r.d.core.Phase(j.id) == sched.Pending && !r.asks(j, at) {
			r.d.broken("rule 4", "%s: request %d waits, though what is to be known of %s has come", r.d.name, j.id, j.leg.addr)
		}
	}
	for _, at := range r.addrs {
		at.used = at.used || at.landed
	}
	r.abandoned()
}

// asks says that the DP rank of a request's room is to be asked for, which has
// a pace of its own.
func (r *peerRules) asks(j *job, at *addrRules) bool {
	return at.size > 1 && !r.d.plan.FollowRoom && j.leg.ask.q.Named == 0
}

// abandoned judges what is still under way at the end of a turn: somebody
// waits for it, or it is a heartbeat (rule 13).
func (r *peerRules) abandoned() {
	d := r.d
	for _, id := range slices.Sorted(maps.Keys(d.tries)) {
		a := &d.tries[id].act
		wanted := a.Kind == sched.ProbeHealth
		for _, j := range d.open {
			wanted = wanted || j.leg.addr == a.Addr && d.core.Phase(j.id) == sched.Pending && r.wants(j, a)
		}
		if !wanted {
			d.broken("rule 13", "%s: %s at %s goes on, and nobody waits for it", d.name, peerKinds[a.Kind], a.Addr)
		}
	}
}

// wants says that a try may be on behalf of a request that waits.
func (r *peerRules) wants(j *job, a *sched.PeerAction) bool {
	dp, told := r.at(a.Addr).told[roomOf{a.Gen, j.leg.room}]
	if named := j.leg.ask.q.Named; named > 0 {
		dp, told = named-1, true
	}
	switch a.Kind {
	case sched.FetchInfo:
		return true
	case sched.QueryRanks:
		return !told || j.granted // one that is preempted asks again
	}
	return !told || dp == a.Rank.DP || j.granted
}
