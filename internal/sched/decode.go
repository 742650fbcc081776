//metronome:pure

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Decode is the scheduler core of a decode worker: which request may take
// pages, which runs in the next batch, when each ends. It is owned by one
// goroutine. See the package comment for the driver's duties.
type Decode struct {
	cfg   DecodeConfig
	pool  *kv.Pool
	peers *Peers // nil with Serve

	now    time.Duration
	armed  time.Duration // the deadline that the last Ready told, until it is judged
	handed bool          // Ready has been called since the last Step
	ready  DecodeReady

	arrivals  uint64
	lastGrant GrantID
	reqs      map[ReqID]*decodeReq
	in        [Finished]queue[*decodeReq] // by phase
	grants    map[GrantID]*grant
	timers    timers[*decodeReq]
	passed    []*decodeReq // scratch of begin
	stuck     stuck[*decodeReq]
	shares    map[string]share // by address of a prefill; of this turn
	tell      time.Duration    // when P hears next of rooms that wait for pages; Never: none waits
	seen      uint64           // serve: the pool's chances at the last Ready

	batch   Batch           // the one outstanding, or memory for the next
	running bool            // batch is outstanding
	rows    []*decodeReq    // its requests; nil: ended meanwhile
	held    []kv.BlockTable // of requests that ended while it ran
}

// decodeReq is one request, from its Submit to its Finish.
type decodeReq struct {
	id       ReqID
	phase    Phase
	arrival  uint64
	tokens   []int32 // prompt, then output
	prompt   int     // how many of tokens are prompt
	max      int     // output tokens at most
	stop     []int32
	digest   uint64 // of the prompt
	want     Want
	deadline time.Duration
	silent   time.Duration // Transfer: when silence about the grant has lasted too long
	late     bool          // the deadline has been armed again (rule 20)
	timer    timer[*decodeReq]
	times    Times

	links   []LinkID
	granted bool // it was granted once: P does not wait for its room any more
	grant   *grant
	table   kv.BlockTable
	row     int // in the outstanding batch, or -1
}

func (r *decodeReq) order() uint64 { return r.arrival }
func (r *decodeReq) output() int   { return len(r.tokens) - r.prompt }
func (r *decodeReq) final() int    { return r.prompt + r.max }

// grant is what D opened to P. It stays until nothing can write its pages.
type grant struct {
	id     GrantID
	req    *decodeReq    // nil: taken back, or failed
	failed bool          // the driver has said so: no Revoke is needed
	table  kv.BlockTable // in quarantine once req is nil
}

func (c *DecodeConfig) defaults() {
	c.MaxRunning = cmp.Or(c.MaxRunning, 64)
	c.MaxQueued = cmp.Or(c.MaxQueued, 512)
	c.MaxGrants = cmp.Or(c.MaxGrants, 2*c.MaxRunning)
	c.Context = cmp.Or(c.Context, 8192)
	c.ReservedTokens = cmp.Or(c.ReservedTokens, 512)
	c.KVTimeout = cmp.Or(c.KVTimeout, 30*time.Second)
	c.LateTurn = cmp.Or(c.LateTurn, LateTurn)
}

// NewDecode makes the core. The pool is the core's alone, or with Serve shared
// with the prefill core that the same goroutine steps.
func NewDecode(cfg DecodeConfig, pool *kv.Pool) *Decode {
	cfg.defaults()
	d := &Decode{cfg: cfg, pool: pool, armed: Never, tell: Never, reqs: map[ReqID]*decodeReq{}, grants: map[GrantID]*grant{}, shares: map[string]share{}}
	if !cfg.Serve {
		d.peers = NewPeers(cfg.Peers)
	}
	return d
}

// Step takes one event. now never goes back.
func (d *Decode) Step(now time.Duration, ev Event) {
	d.begin(now)
	if d.stale(ev) {
		return
	}
	switch ev := ev.(type) {
	case *Submit:
		d.submit(ev)
	case *Adopt:
		d.adopt(ev)
	case *PagesLanded:
		d.landed(d.grants[ev.Grant], ev.First)
	case *TransferFailed:
		g := d.grants[ev.Grant]
		g.failed = true
		d.fail(g.req, ev.Cause)
	case *TransferQuiesced:
		d.quiesced(d.grants[ev.Grant])
	case *GrantHeard:
		d.heard(d.grants[ev.Grant].req)
	case *BatchDone:
		d.batchDone(ev)
	case *Abort:
		d.fail(d.reqs[ev.Req], ev.Cause)
	case *StopAt:
		r := d.reqs[ev.Req]
		d.end(r, Stop, nil, max(0, min(ev.Index, r.output())))
	case *PeerDone, *LinkHeard, *LinkEnded:
		d.peers.Step(now, ev)
	case *Tick:
		d.tick()
	}
	d.hear()
	if invariants {
		mustHold(d.Check())
	}
}

// stale is the one place where completions and verdicts of the past are
// dropped: their grant, batch or request is not theirs any more.
func (d *Decode) stale(ev Event) bool {
	open := func(id GrantID) bool { g := d.grants[id]; return g != nil && g.req != nil }
	switch ev := ev.(type) {
	case *PagesLanded:
		return !open(ev.Grant)
	case *TransferFailed:
		return !open(ev.Grant)
	case *GrantHeard:
		return !open(ev.Grant)
	case *TransferQuiesced:
		return d.grants[ev.Grant] == nil
	case *BatchDone:
		return !d.running || d.batch.ID != ev.Batch
	case *Abort:
		return d.reqs[ev.Req] == nil
	case *StopAt:
		return d.reqs[ev.Req] == nil
	case *PeerDone, *LinkHeard, *LinkEnded:
		return d.peers == nil
	}
	return false
}

// begin opens a turn's next Step: what the last Ready handed out is the
// driver's no more, and a late turn is noticed before anything is judged.
func (d *Decode) begin(now time.Duration) {
	if d.handed {
		d.handed = false
		r := &d.ready
		*r = DecodeReady{Emits: r.Emits[:0], Finishes: r.Finishes[:0], Grants: r.Grants[:0], Revokes: r.Revokes[:0],
			Notices: r.Notices[:0], Preempts: r.Preempts[:0], Fatal: r.Fatal}
	}
	last := d.now
	d.now = max(d.now, now)
	if d.armed == Never || d.now-d.armed <= d.cfg.LateTurn {
		return
	}
	if d.peers != nil {
		d.peers.Late(d.now, d.now-d.armed)
	}
	d.armed = Never
	d.passed = d.passed[:0]
	for t := d.timers.passed(d.now); t != nil; t = d.timers.passed(d.now) {
		d.passed = append(d.passed, t.owner)
	}
	for _, r := range d.passed {
		d.rearm(r, last)
	}
}

// rearm gives the deadlines of r that passed since the last turn their second
// chance: the request's once, silence as often as it was not P's.
func (d *Decode) rearm(r *decodeReq, last time.Duration) {
	if r.deadline <= d.now && r.deadline > last && !r.late {
		r.late, r.deadline = true, rearmed(d.now, r.deadline, last)
	}
	if r.silent <= d.now {
		r.silent = d.now + d.cfg.KVTimeout
	}
	d.timers.set(&r.timer, d.due(r))
}

// due is the next deadline of r.
func (d *Decode) due(r *decodeReq) time.Duration { return min(r.deadline, r.silent) }

// tick judges the deadlines that have passed: first those of the peers, whose
// verdicts may save or end requests, then the requests' own.
func (d *Decode) tick() {
	if d.peers != nil {
		d.peers.Tick(d.now)
		d.hear()
	}
	for t := d.timers.passed(d.now); t != nil; t = d.timers.passed(d.now) {
		r := t.owner
		if r.deadline <= d.now {
			e := errorf(DeadlineExceeded, "the request's time ran out in phase %s", r.phase)
			e.NoWork = !r.granted && r.output() == 0
			d.fail(r, e)
			continue
		}
		d.fail(r, errorf(KVTransferFailed, "no data from prefill %s for room %d within %s",
			r.want.Addr, r.want.Room, d.cfg.KVTimeout))
	}
}

// hear takes over what Peers has found out.
func (d *Decode) hear() {
	if d.peers == nil {
		return
	}
	for vs := d.peers.Verdicts(); len(vs) > 0; vs = d.peers.Verdicts() {
		for _, v := range vs {
			if r := d.reqs[v.Req]; r != nil && r.phase <= Transfer { // else it has ended, or has all its pages
				d.verdict(r, v)
			}
		}
	}
	if e := d.peers.Fatal(); e != nil && d.ready.Fatal == nil {
		d.ready.Fatal = e
		d.failAll(e)
	}
}

func (d *Decode) verdict(r *decodeReq, v Verdict) {
	switch v.Kind {
	case Linked:
		r.links = append(r.links[:0], v.Links...)
		passed(&r.times.Linked, d.now)
		if r.phase == Pending {
			d.becomePreallocate(r)
		}
	case Unlinked:
		if r.phase == Preallocate {
			d.becomePending(r)
		}
	case Lost:
		d.fail(r, v.Err)
	}
}

// failAll ends every open request, the oldest first.
func (d *Decode) failAll(e *Error) {
	for _, r := range d.byArrival() {
		d.fail(r, e)
	}
}

// byArrival is every open request, the oldest first.
func (d *Decode) byArrival() []*decodeReq {
	all := make([]*decodeReq, 0, len(d.reqs))
	for _, q := range d.in {
		all = append(all, q.s...)
	}
	slices.SortFunc(all, func(a, b *decodeReq) int { return cmp.Compare(a.arrival, b.arrival) })
	return all
}

// Ready is what the driver must do now. It plans once after each Step; called
// again, it returns the same.
func (d *Decode) Ready() *DecodeReady {
	if d.handed {
		return &d.ready
	}
	d.handed = true
	if !d.running {
		d.form() // running requests take their pages before new ones are admitted
		d.hear() // of those that were preempted just now
	}
	d.admit()
	d.tellWaiting()
	d.ready.Deadline = min(d.timers.next(), d.tell)
	if d.cfg.Serve {
		d.pool.SetReserve(d.growth())
		if c := d.pool.Chances(); c != d.seen {
			d.seen, d.ready.Deadline = c, d.now // the prefill core has planned before that: one more turn
		}
	}
	if d.peers != nil {
		d.ready.Peer = d.peers.Actions()
		d.ready.Deadline = min(d.ready.Deadline, d.peers.Deadline())
	}
	d.armed = max(d.now, d.ready.Deadline) // what is due already was told only now
	if invariants {
		mustHold(d.Check())
	}
	return &d.ready
}

// submit takes a request or refuses it; either way it will end exactly once.
func (d *Decode) submit(s *Submit) {
	if e := d.refusal(s); e != nil {
		d.ready.Finishes = append(d.ready.Finishes, Finish{Req: s.Req, Reason: Failed, Err: e})
		return
	}
	r := d.record(s)
	d.becomePending(r)
	d.wanted(r)
}

// wanted asks Peers for the links of a pending request.
func (d *Decode) wanted(r *decodeReq) {
	if e := d.peers.Want(d.now, r.want); e != nil {
		d.fail(r, e)
	}
}

func (d *Decode) refusal(s *Submit) *Error {
	total := len(s.Prompt) + s.MaxTokens
	queued := d.in[Preallocate].len() + d.in[Transfer].len() + d.in[Waiting].len()
	switch {
	case d.ready.Fatal != nil:
		return d.ready.Fatal
	case d.cfg.Serve:
		return errorf(Internal, "this process computes prompts itself: a request comes by Adopt")
	case len(s.Prompt) == 0 || s.MaxTokens < 0:
		return errorf(InvalidRequest, "a request needs a prompt of at least 1 token and max_tokens of at least 0, got %d tokens and %d",
			len(s.Prompt), s.MaxTokens)
	case s.MaxTokens > d.cfg.Context-len(s.Prompt): // in this form nothing overflows
		return tooLong(len(s.Prompt), s.MaxTokens, "context", d.cfg.Context)
	case d.pool.PagesFor(total) > d.pool.Total():
		return tooLong(len(s.Prompt), s.MaxTokens, "KV pool", d.pool.Total()*d.pool.PageSize())
	case queued >= d.cfg.MaxQueued:
		return refused(Overloaded, "%d requests are queued, the limit", queued)
	}
	return nil
}

// record opens the record of a new request.
func (d *Decode) record(s *Submit) *decodeReq {
	if d.reqs[s.Req] != nil {
		panic("sched: a request id was used twice")
	}
	d.arrivals++
	n := len(s.Prompt)
	r := &decodeReq{
		id: s.Req, arrival: d.arrivals, tokens: s.Prompt[:n:n], prompt: n, max: s.MaxTokens, stop: s.StopIDs, digest: s.Digest,
		want:     Want{Req: s.Req, Addr: s.Addr, Room: s.Room, DPRank: s.DPRank},
		deadline: s.Deadline, silent: Never, row: -1,
	}
	r.timer.owner, r.timer.seq = r, r.arrival
	d.reqs[s.Req] = r
	d.timers.set(&r.timer, d.due(r))
	return r
}

// adopt takes over a request that the prefill core of this process computed.
func (d *Decode) adopt(a *Adopt) {
	r := d.record(&a.Submit)
	if a.Index > r.prompt || d.pool.PagesFor(r.prompt) != len(a.Pages) {
		panic("sched: an adopted request does not fit its pages")
	}
	r.prompt -= a.Index
	r.table = kv.Adopted(a.Pages)
	d.becomeWaiting(r)
	d.first(r, a.First)
}

// admit grants pages to those whose peer is ready, in order of arrival. The
// first one that does not fit stops the others: a big request is not overtaken
// for ever. Requests that are not ready are in another queue and block nobody;
// nor do those whose prefill has its share of grants or pages already.
func (d *Decode) admit() {
	q := &d.in[Preallocate]
	if q.len() == 0 {
		return
	}
	d.countShares()
	for i := 0; i < q.len() && len(d.grants)+d.in[Waiting].len() < d.cfg.MaxGrants; {
		r := q.s[i]
		if d.hasShare(r) {
			i++
			continue
		}
		if d.stuck == stuckAt(r, d.pool) || !d.take(r) {
			return
		}
		d.becomeTransfer(r)
		d.open(r)
		if d.peers.stats.Known > 1 {
			d.addShare(r)
		}
	}
}

// noticeEvery is how often P hears of a room that waits for pages. It waits
// for a grant by --bootstrap-timeout, which is much longer.
const noticeEvery = time.Second

// tellWaiting lets P know of the rooms that wait here for pages: they are
// neither lost nor forgotten, however long it takes.
func (d *Decode) tellWaiting() {
	q := &d.in[Preallocate]
	switch {
	case q.len() == 0:
		d.tell = Never
	case d.tell == Never:
		d.tell = d.now + noticeEvery
	case d.tell <= d.now:
		d.tell = d.now + noticeEvery
		for _, r := range q.s {
			if !r.granted && len(r.links) > 0 {
				d.ready.Notices = append(d.ready.Notices, Notice{Link: r.links[0], Room: r.want.Room, Waits: true})
			}
		}
	}
}

// share is what one prefill has of the grants, and of the pages with the
// growth that is kept for them.
type share struct {
	grants, pages int
	full          bool // one of its requests must wait, and so must those after it
}

// countShares counts them, when there is more than one prefill to share.
func (d *Decode) countShares() {
	clear(d.shares)
	if d.peers.stats.Known < 2 {
		return
	}
	for _, r := range d.in[Transfer].s {
		d.addShare(r)
	}
}

func (d *Decode) addShare(r *decodeReq) {
	s := d.shares[r.want.Addr]
	s.grants++
	s.pages += d.pool.PagesFor(d.reach(r))
	d.shares[r.want.Addr] = s
}

// hasShare says that r's prefill has half of the grants, or would have half of
// the pool, in transfers. One that has fallen silent, or has a long queue, can
// so never keep the requests of the others waiting.
func (d *Decode) hasShare(r *decodeReq) bool {
	s, known := d.shares[r.want.Addr]
	if !known || s.full {
		return s.full
	}
	if s.grants < d.cfg.MaxGrants/2 && s.pages+d.pool.PagesFor(d.reach(r)) <= d.pool.Total()/2 {
		return false
	}
	s.full = true
	d.shares[r.want.Addr] = s
	return true
}

// take gives r the pages of its tokens, if enough are left for the growth of
// those ahead of it and its own: SGLang's admission budget, with the true
// remainder of each request in place of its estimates. An idle pool admits
// whatever Submit let in.
func (d *Decode) take(r *decodeReq) bool {
	if d.cfg.PrefixCache {
		d.pool.Match(&r.table, r.tokens[:len(r.tokens)-1]) // P must deliver at least one token
	}
	need := d.pool.PagesFor(len(r.tokens)) - r.table.Len()
	own := d.pool.PagesFor(d.reach(r)) - d.pool.PagesFor(len(r.tokens))
	if d.pool.Available()-need < d.growth()+own {
		d.pool.Release(&r.table)
		d.stuck = stuckAt(r, d.pool)
		return false
	}
	r.table.Grow(d.pool.PagesFor(r.final()))
	return d.pool.Extend(&r.table, len(r.tokens))
}

// growth is how many more pages the admitted requests may need soon.
func (d *Decode) growth() int {
	n := 0
	for _, ph := range [...]Phase{Transfer, Waiting, Running} {
		for _, r := range d.in[ph].s {
			n += max(0, d.pool.PagesFor(d.reach(r))-r.table.Len())
		}
	}
	return n
}

// reach is how many tokens r may have soon: ReservedTokens more, but never
// more than its answer can have.
func (d *Decode) reach(r *decodeReq) int { return min(len(r.tokens)+d.cfg.ReservedTokens, r.final()) }

// open hands the grant of r out.
func (d *Decode) open(r *decodeReq) {
	d.lastGrant++
	r.grant = &grant{id: d.lastGrant, req: r}
	d.grants[r.grant.id] = r.grant
	g := Grant{Grant: r.grant.id, Req: r.id, Room: r.want.Room, Digest: r.digest, Links: r.links, Tokens: len(r.tokens),
		Prefix: r.table.Shared() * d.pool.PageSize(), Pages: r.table.Pages()[r.table.Shared():]}
	if r.granted {
		g.Recompute, g.Index, g.Digest = r.tokens, r.output(), 0
	}
	r.granted = true
	passed(&r.times.Granted, d.now)
	d.ready.Grants = append(d.ready.Grants, g)
	d.peers.Granted(d.now, r.id)
	d.heard(r)
}

// heard starts the time again for which P may be silent about r.
func (d *Decode) heard(r *decodeReq) {
	r.silent = d.now + d.cfg.KVTimeout
	d.timers.set(&r.timer, d.due(r))
}

// landed: r has all its pages and its next token.
func (d *Decode) landed(g *grant, token int32) {
	r := g.req
	delete(d.grants, g.id)
	r.grant = nil
	if token < 0 || d.cfg.Vocab > 0 && int(token) >= d.cfg.Vocab {
		d.fail(r, errorf(KVTransferFailed, "prefill %s sent token %d, the vocabulary has %d", r.want.Addr, token, d.cfg.Vocab))
		return
	}
	d.peers.Landed(d.now, r.id)
	d.becomeWaiting(r)
	d.first(r, token)
}

// first emits the token that came with the pages, before any batch. It is
// nobody's where no output is wanted.
func (d *Decode) first(r *decodeReq, token int32) {
	if d.cfg.PrefixCache {
		d.pool.Share(&r.table, r.tokens)
	}
	if r.max == 0 { // the prompt was all that was wanted
		d.end(r, Length, nil, 0)
		return
	}
	if cap(r.tokens) < r.final() {
		r.tokens = append(make([]int32, 0, r.final()), r.tokens...) // no token of the answer allocates
	}
	d.token(r, token, -1)
}

// token takes one output token of r: emits it, and ends the answer if it is
// the last one.
func (d *Decode) token(r *decodeReq, token int32, row int) {
	d.ready.Emits = append(d.ready.Emits, Emit{Req: r.id, Token: token, Index: r.output(), Row: row})
	r.tokens = append(r.tokens, token)
	switch {
	case slices.Contains(r.stop, token):
		d.end(r, Stop, nil, r.output())
	case r.output() >= r.max:
		d.end(r, Length, nil, r.output())
	}
}

// quiesced: nothing writes the grant's pages any more.
func (d *Decode) quiesced(g *grant) {
	if g.req != nil { // every link went away without a word
		g.failed = true
		d.fail(g.req, errorf(KVTransferFailed, "the links to prefill %s closed", g.req.want.Addr))
	}
	d.pool.Lift(&g.table)
	delete(d.grants, g.id)
}

func (d *Decode) fail(r *decodeReq, e *Error) {
	if e == nil {
		e = errorf(Internal, "the request was ended without a cause")
	}
	d.end(r, Failed, e, r.output())
}

// end ends r: the one place that finishes a request.
func (d *Decode) end(r *decodeReq, why Reason, e *Error, completion int) {
	if r.phase == Preallocate && !r.granted && len(r.links) > 0 {
		d.ready.Notices = append(d.ready.Notices, Notice{Link: r.links[0], Room: r.want.Room})
	}
	d.yield(r)
	d.forget(r)
	d.ready.Finishes = append(d.ready.Finishes, Finish{Req: r.id, Reason: why, Err: e, Completion: completion, Times: r.times})
}

// forget closes the record of r.
func (d *Decode) forget(r *decodeReq) {
	d.becomeFinished(r)
	d.timers.stop(&r.timer)
	delete(d.reqs, r.id)
	if d.peers != nil {
		d.peers.Forget(d.now, r.id)
	}
}

// yield takes the pages of r from it. Those that something outside may still
// touch go to quarantine: until the grant has quiesced, or the batch is done.
func (d *Decode) yield(r *decodeReq) {
	r.silent = Never
	d.stuck = stuck[*decodeReq]{} // less growth is to be reserved now
	if g := r.grant; g != nil {
		if !g.failed {
			d.ready.Revokes = append(d.ready.Revokes, g.id)
		}
		d.pool.Quarantine(&r.table)
		g.table, r.table, g.req, r.grant = r.table, kv.BlockTable{}, nil, nil
		return
	}
	if d.cfg.PrefixCache && r.phase >= Waiting {
		d.pool.Insert(&r.table, r.tokens[:len(r.tokens)-1]) // the last token's rows are not there yet
	}
	if r.row < 0 {
		d.pool.Release(&r.table)
		return
	}
	d.pool.Quarantine(&r.table)
	d.held = append(d.held, r.table)
	d.rows[r.row], r.table, r.row = nil, kv.BlockTable{}, -1
}

// The phases of a request. Each function says which it may come from.

func (d *Decode) becomePending(r *decodeReq) {
	d.move(r, Pending, newborn, Preallocate, Transfer, Waiting, Running)
}

func (d *Decode) becomePreallocate(r *decodeReq) { d.move(r, Preallocate, Pending) }
func (d *Decode) becomeTransfer(r *decodeReq)    { d.move(r, Transfer, Preallocate) }
func (d *Decode) becomeRunning(r *decodeReq)     { d.move(r, Running, Waiting) }

func (d *Decode) becomeWaiting(r *decodeReq) {
	d.move(r, Waiting, newborn, Transfer) // newborn: of Adopt
	r.silent = Never
	d.timers.set(&r.timer, d.due(r))
}

func (d *Decode) becomeFinished(r *decodeReq) {
	d.move(r, Finished, Pending, Preallocate, Transfer, Waiting, Running)
}

func (d *Decode) move(r *decodeReq, to Phase, from ...Phase) {
	changes("Decode", r.phase, to, from)
	if r.phase != newborn {
		d.in[r.phase].remove(r)
	}
	r.phase = to
	if to != Finished {
		d.in[to].push(r)
	}
}
