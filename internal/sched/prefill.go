//metronome:pure

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Prefill is the scheduler core of a prefill worker: which prompts are computed
// in the next batch, and who holds pages until they are delivered. It is owned
// by one goroutine. See the package comment for the driver's duties.
type Prefill struct {
	cfg  PrefillConfig
	pool *kv.Pool

	now    time.Duration
	armed  time.Duration // the deadline that the last Ready told, until it is judged
	handed bool          // Ready has been called since the last Step
	ready  PrefillReady

	arrivals uint64
	reqs     map[ReqID]*prefillReq
	rooms    map[int64]*prefillReq    // those with a leg of their own, by room
	keys     map[GrantKey]*prefillReq // granted, or (recompute) about to be
	in       [Done]queue[*prefillReq] // by phase
	closing  map[ReqID]*closing       // sends that have not quiesced
	parking  parking
	timers   timers[*prefillReq]
	passed   []*prefillReq // scratch of begin
	stuck    stuck[*prefillReq]

	batch   Batch         // the one outstanding, or memory for the next
	running bool          // batch is outstanding
	rows    []*prefillReq // its requests; nil: ended meanwhile
	held    []*closing    // of requests that ended while it ran
}

// prefillReq is one request, from its SubmitPrefill to its Finish or HandOver.
type prefillReq struct {
	id        ReqID
	phase     Phase
	arrival   uint64 // those whose answers have begun before all others
	prompt    []int32
	room      int64
	digest    uint64 // of the prompt
	index     int
	maxHit    int
	deadline  time.Duration
	bootstrap time.Duration // when it has waited too long for its grant; Never once granted
	late      bool          // its deadlines have been armed again (rule 20)
	timer     timer[*prefillReq]

	key      GrantKey // of its grant, or of the one that will follow (recompute)
	granted  bool     // D has opened pages for it, or it needs none (local)
	opened   bool     // the sender knows where its pages are
	known    bool     // the sender has heard of it
	bound    bool     // the sender has joined it to its grant
	table    kv.BlockTable
	cached   int // tokens of the prefix hit
	computed int // tokens whose rows are final
	row      int // in the outstanding batch, or -1
	times    Times
}

func (r *prefillReq) order() uint64 { return r.arrival }
func (r *prefillReq) local() bool   { return r.room < 0 }

// closing is the pages of a request that has ended and whose pages the sender
// or the outstanding batch still names.
type closing struct {
	table        kv.BlockTable
	batch, sends bool
}

func (c *PrefillConfig) defaults(pageSize int) {
	c.MaxRunning = cmp.Or(c.MaxRunning, 64)
	c.MaxQueued = cmp.Or(c.MaxQueued, 512)
	c.MaxParked = cmp.Or(c.MaxParked, 4096)
	c.Chunk = max(cmp.Or(c.Chunk, 512), pageSize)
	c.Context = cmp.Or(c.Context, 8192)
	c.BootstrapTimeout = cmp.Or(c.BootstrapTimeout, 300*time.Second)
}

// NewPrefill makes the core. The pool is the core's alone, or in serve shared
// with the decode core that the same goroutine steps.
func NewPrefill(cfg PrefillConfig, pool *kv.Pool) *Prefill {
	cfg.defaults(pool.PageSize())
	return &Prefill{
		cfg: cfg, pool: pool, armed: Never,
		reqs: map[ReqID]*prefillReq{}, rooms: map[int64]*prefillReq{}, keys: map[GrantKey]*prefillReq{},
		closing: map[ReqID]*closing{}, parking: newParking(cfg),
	}
}

// Step takes one event. now never goes back.
func (p *Prefill) Step(now time.Duration, ev Event) {
	p.begin(now)
	if p.stale(ev) {
		return
	}
	switch ev := ev.(type) {
	case *SubmitPrefill:
		p.submit(ev)
	case *RoomGranted:
		p.roomGranted(ev)
	case *RoomClosed:
		p.roomClosed(ev)
	case *RoomQueued:
		p.roomQueued(ev.Room)
	case *Received:
		p.end(p.reqs[ev.Req], Prefilled, nil)
	case *SendFailed:
		p.fail(p.reqs[ev.Req], ev.Cause)
	case *SendQuiesced:
		c := p.closing[ev.Req]
		delete(p.closing, ev.Req)
		c.sends = false
		p.lift(c)
	case *BatchDone:
		p.batchDone(ev)
	case *Abort:
		p.fail(p.reqs[ev.Req], ev.Cause)
	case *StopAt:
		p.end(p.reqs[ev.Req], Stop, nil)
	case *Tick:
		p.tick()
	}
	if invariants {
		mustHold(p.Check())
	}
}

// stale is the one place where completions and verdicts of the past are
// dropped: their request, send or batch is not theirs any more.
func (p *Prefill) stale(ev Event) bool {
	switch ev := ev.(type) {
	case *Received:
		r := p.reqs[ev.Req]
		return r == nil || r.phase != InFlight || !r.bound
	case *SendFailed:
		return p.reqs[ev.Req] == nil
	case *SendQuiesced:
		return p.closing[ev.Req] == nil
	case *BatchDone:
		return !p.running || p.batch.ID != ev.Batch
	case *Abort:
		return p.reqs[ev.Req] == nil
	case *StopAt:
		return p.reqs[ev.Req] == nil
	}
	return false
}

// begin opens a turn's next Step, see Decode.begin.
func (p *Prefill) begin(now time.Duration) {
	if p.handed {
		p.handed = false
		r := &p.ready
		*r = PrefillReady{Firsts: r.Firsts[:0], Opens: r.Opens[:0], Binds: r.Binds[:0], Closes: r.Closes[:0],
			Refuses: r.Refuses[:0], HandOvers: r.HandOvers[:0], Finishes: r.Finishes[:0]}
	}
	last := p.now
	p.now = max(p.now, now)
	if p.armed == Never || p.now-p.armed <= LateTurn {
		return
	}
	p.armed = Never
	p.passed = p.passed[:0]
	for t := p.timers.passed(p.now); t != nil; t = p.timers.passed(p.now) {
		p.passed = append(p.passed, t.owner)
	}
	for _, r := range p.passed {
		if !r.late {
			r.late = true
			for _, due := range []*time.Duration{&r.deadline, &r.bootstrap} {
				if *due > last && *due <= p.now {
					*due = rearmed(p.now, *due, last)
				}
			}
		}
		p.arm(r)
	}
	p.parking.rearm(p.now, last)
}

func (p *Prefill) arm(r *prefillReq) { p.timers.set(&r.timer, min(r.deadline, r.bootstrap)) }

// tick judges the deadlines that have passed.
func (p *Prefill) tick() {
	for t := p.timers.passed(p.now); t != nil; t = p.timers.passed(p.now) {
		r := t.owner
		if r.deadline <= p.now {
			e := errorf(DeadlineExceeded, "the request's time ran out in phase %s", r.phase)
			e.NoWork = r.phase == Bootstrapping || r.phase == Queued
			p.fail(r, e)
			continue
		}
		p.fail(r, errorf(DecodeUnreachable, "no decode worker asked for room %d within %g s",
			r.room, p.cfg.BootstrapTimeout.Seconds()))
	}
	for g := p.parking.passed(p.now); g != nil; g = p.parking.passed(p.now) {
		p.refuse(g.Key, errorf(PrefillUnreachable, "no request for room %d came to this prefill worker within %g s",
			g.Room, p.cfg.BootstrapTimeout.Seconds()))
	}
}

// Ready is what the driver must do now. It plans once after each Step; called
// again, it returns the same.
func (p *Prefill) Ready() *PrefillReady {
	if p.handed {
		return &p.ready
	}
	p.handed = true
	if !p.running {
		p.form()
	}
	p.ready.Deadline = min(p.timers.next(), p.parking.next())
	p.armed = max(p.now, p.ready.Deadline)
	if invariants {
		mustHold(p.Check())
	}
	return &p.ready
}

// submit takes a request or refuses it. A grant that waits for its room is
// answered at once, either way.
func (p *Prefill) submit(s *SubmitPrefill) {
	g := p.parking.take(s.Room)
	if e := p.refusal(s); e != nil {
		p.ready.Finishes = append(p.ready.Finishes, Finish{Req: s.Req, Reason: Failed, Err: e, Completion: s.Index})
		p.parking.bury(s.Room, p.now, e)
		if g != nil {
			p.refuse(g.Key, e)
		}
		return
	}
	r := p.record(s)
	if r.granted {
		p.becomeQueued(r)
		return
	}
	p.becomeBootstrapping(r)
	if g != nil {
		p.granted(r, g)
	}
}

func (p *Prefill) refusal(s *SubmitPrefill) *Error {
	n := len(s.Prompt)
	queued := p.in[Bootstrapping].len() + p.in[Queued].len()
	again := s.again()
	switch {
	case n == 0:
		return errorf(InvalidRequest, "a request needs a prompt of at least 1 token")
	case s.MaxTokens > p.cfg.Context-n: // in this form nothing overflows
		return tooLong(n, s.MaxTokens, "context", p.cfg.Context)
	case p.pool.PagesFor(n+s.MaxTokens) > p.pool.Total():
		return tooLong(n, s.MaxTokens, "KV pool", p.pool.Total()*p.pool.PageSize())
	case !again && p.rooms[s.Room] != nil:
		return errorf(InvalidRequest, "room %d is in use by another request", s.Room)
	case again && p.keys[s.Grant] != nil:
		return errorf(Internal, "grant %d is in use by another request", s.Grant.Grant)
	case again:
		return nil // its answer has begun: the queue's bound does not end it
	case queued >= p.cfg.MaxQueued:
		return refused(Overloaded, "%d requests are queued, the limit", queued)
	}
	return nil
}

// again says that the request was preempted at a decode core and is computed anew.
func (s *SubmitPrefill) again() bool { return s.Grant != GrantKey{} || s.Index > 0 }

// record opens the record of a new request.
func (p *Prefill) record(s *SubmitPrefill) *prefillReq {
	if p.reqs[s.Req] != nil || p.closing[s.Req] != nil {
		panic("sched: a request id was used twice")
	}
	p.arrivals++
	r := &prefillReq{
		id: s.Req, arrival: p.arrivals, prompt: s.Prompt, room: s.Room, digest: s.Digest, index: s.Index, maxHit: s.MaxHit,
		deadline: s.Deadline, bootstrap: p.now + p.cfg.BootstrapTimeout, key: s.Grant, row: -1,
	}
	if !s.again() && !s.Begun {
		r.arrival |= 1 << 63
	}
	switch {
	case r.local():
		r.granted, r.bootstrap = true, Never
	case s.Grant != GrantKey{}:
		p.keys[s.Grant] = r
	default:
		p.rooms[s.Room] = r
	}
	r.timer.owner, r.timer.seq = r, r.arrival
	p.reqs[s.Req] = r
	p.arm(r)
	return r
}

// roomGranted joins a grant to its request, or parks it until the request comes.
func (p *Prefill) roomGranted(g *RoomGranted) {
	r := p.keys[g.Key]
	if r == nil {
		r = p.rooms[g.Room]
	}
	if r != nil {
		p.granted(r, g)
		return
	}
	if e := p.parking.park(g, p.now); e != nil {
		p.refuse(g.Key, e)
	}
}

// granted: D has opened its pages for r.
func (p *Prefill) granted(r *prefillReq, g *RoomGranted) {
	switch {
	case r.granted && r.key == g.Key:
		return
	case r.key != GrantKey{} && r.key != g.Key:
		p.refuse(g.Key, errorf(KVTransferFailed, "room %d is granted already, by another grant or decode worker", g.Room))
		return
	case g.Digest != r.digest:
		e := errorf(KVTransferFailed, "the two legs differ: prefill and decode have different prompts for room %d", g.Room)
		p.refuse(g.Key, e)
		p.fail(r, e)
		return
	case g.Tokens != len(r.prompt) || g.Prefix < 0 || g.Prefix >= g.Tokens || g.Prefix%p.pool.PageSize() != 0:
		e := errorf(KVTransferFailed, "the grant of room %d covers tokens %d to %d, the prompt has %d (page size %d)",
			g.Room, g.Prefix, g.Tokens, len(r.prompt), p.pool.PageSize())
		p.refuse(g.Key, e)
		p.fail(r, e)
		return
	}
	r.granted, r.key, r.bootstrap = true, g.Key, Never
	passed(&r.times.Granted, p.now)
	p.stuck = stuck[*prefillReq]{} // what it could not have, it may take from others now
	p.keys[g.Key] = r
	p.arm(r)
	if r.phase == Bootstrapping {
		p.becomeQueued(r)
	}
	if r.opened {
		p.bind(r)
	}
}

// roomQueued: D has the room in its queue, so the time for which r waits for a
// decode worker begins again.
func (p *Prefill) roomQueued(room int64) {
	if r := p.rooms[room]; r != nil && !r.granted {
		r.bootstrap = p.now + p.cfg.BootstrapTimeout
		p.arm(r)
	}
}

func (p *Prefill) bind(r *prefillReq) {
	r.bound = true
	p.ready.Binds = append(p.ready.Binds, BindSend{Req: r.id, Key: r.key})
}

func (p *Prefill) refuse(k GrantKey, e *Error) {
	p.ready.Refuses = append(p.ready.Refuses, RefuseGrant{Key: k, Cause: e})
}

// roomClosed: D does not want the room any more. What it took back, it need
// not be told.
func (p *Prefill) roomClosed(ev *RoomClosed) {
	e := ev.Cause
	if e == nil {
		e = errorf(DecodeUnreachable, "the decode worker gave room %d up", ev.Room)
	}
	r := p.keys[ev.Key]
	if ev.Key.Grant == 0 { // a notice: the room was never granted
		if r = p.rooms[ev.Room]; r != nil && r.granted {
			return
		}
	}
	if r == nil {
		p.parking.drop(ev.Room, ev.Key)
		return
	}
	p.close(r, nil)
	p.finish(r, Failed, e)
}

func (p *Prefill) fail(r *prefillReq, e *Error) {
	if e == nil {
		e = errorf(Internal, "the request was ended without a cause")
	}
	p.end(r, Failed, e)
}

// end ends r for a reason that D does not know yet, or (Prefilled) knows well.
func (p *Prefill) end(r *prefillReq, why Reason, e *Error) {
	if r.granted && !r.local() && !r.bound {
		p.refuse(r.key, e)
	}
	if why == Prefilled {
		r.known = false // the sender has nothing left to close
	}
	p.close(r, e)
	p.finish(r, why, e)
}

// close takes the pages of r from it. Those that something outside may still
// touch go to quarantine: until the send has quiesced and the batch is done.
func (p *Prefill) close(r *prefillReq, cause *Error) {
	if r.known {
		p.ready.Closes = append(p.ready.Closes, CloseSend{Req: r.id, Cause: cause})
	}
	if !r.known && r.row < 0 {
		p.pool.Release(&r.table)
		return
	}
	c := &closing{sends: r.known, batch: r.row >= 0}
	p.pool.Quarantine(&r.table)
	c.table, r.table = r.table, kv.BlockTable{}
	if c.sends {
		p.closing[r.id] = c
	}
	if c.batch {
		p.held = append(p.held, c)
		p.rows[r.row], r.row = nil, -1
	}
}

func (p *Prefill) lift(c *closing) {
	if !c.batch && !c.sends {
		p.pool.Lift(&c.table)
	}
}

// finish is the one place that ends a request.
func (p *Prefill) finish(r *prefillReq, why Reason, e *Error) {
	p.forget(r)
	done := r.index
	if why == Prefilled {
		done++
	}
	if e != nil {
		p.parking.bury(r.room, p.now, e)
	}
	p.ready.Finishes = append(p.ready.Finishes, Finish{Req: r.id, Reason: why, Err: e, Completion: done, Times: r.times})
}

// forget closes the record of r.
func (p *Prefill) forget(r *prefillReq) {
	p.becomeDone(r)
	p.timers.stop(&r.timer)
	delete(p.reqs, r.id)
	if p.rooms[r.room] == r {
		delete(p.rooms, r.room)
	}
	if p.keys[r.key] == r {
		delete(p.keys, r.key)
	}
}

// The phases of a request. Each function says which it may come from.

func (p *Prefill) becomeBootstrapping(r *prefillReq) {
	p.move(r, Bootstrapping, newborn, Computing, InFlight)
}

func (p *Prefill) becomeQueued(r *prefillReq)    { p.move(r, Queued, newborn, Bootstrapping) }
func (p *Prefill) becomeComputing(r *prefillReq) { p.move(r, Computing, Bootstrapping, Queued) }
func (p *Prefill) becomeInFlight(r *prefillReq)  { p.move(r, InFlight, Computing) }

func (p *Prefill) becomeDone(r *prefillReq) {
	p.move(r, Done, Bootstrapping, Queued, Computing, InFlight)
}

func (p *Prefill) move(r *prefillReq, to Phase, from ...Phase) {
	changes("Prefill", r.phase, to, from)
	if waits := to == Bootstrapping; r.granted == waits && (waits || to == Queued) {
		panic("sched: a request that is granted is Queued, one that is not is Bootstrapping")
	}
	if r.phase != newborn {
		p.in[r.phase].remove(r)
	}
	r.phase = to
	if to != Done {
		p.in[to].push(r)
	}
}

// byArrival is every open request, the oldest first.
func (p *Prefill) byArrival() []*prefillReq {
	all := make([]*prefillReq, 0, len(p.reqs))
	for _, q := range p.in {
		all = append(all, q.s...)
	}
	slices.SortFunc(all, func(a, b *prefillReq) int { return cmp.Compare(a.arrival, b.arrival) })
	return all
}
