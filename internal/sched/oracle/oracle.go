// Package oracle judges the scheduler cores from outside: it knows nothing of
// their insides, so it can be wrong only where it is wrong about the rules.
package oracle

import (
	"fmt"
	"slices"
	"strings"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
)

// Oracle watches what goes into the cores and what comes out, and knows only
// what the outside knows: which pages an open grant, a send or a running batch
// may touch, and what each request has been told. Err is the first rule broken.
type Oracle struct {
	Err error

	pool     *kv.Pool
	requests map[sched.ReqID]*told
	grants   map[sched.GrantID][]kv.Page // open, or not quiesced
	revoked  map[sched.GrantID]bool      // TransferQuiesced must follow
	failed   map[sched.GrantID]bool      // the same
	landed   []sched.GrantID             // in this turn
	over     []sched.GrantID             // failed and quiesced in this turn: a Revoke may cross that
	last     sched.GrantID
	sends    map[sched.ReqID]*send
	batches  map[bool]*rows // by Batch.Prefill
	closed   int
}

type told struct {
	ended  bool
	tokens int
	err    *sched.Error
}

type send struct {
	pages    []kv.Page
	bound    bool
	closed   bool
	first    bool // its first token is drawn
	received bool
	token    int32
	key      sched.GrantKey
}

// rows remembers the outstanding batch of one core as it was started.
type rows struct {
	id     sched.BatchID
	pages  [][]kv.Page
	reqs   []sched.ReqID
	memory []sched.BatchRow
}

// New watches cores over this pool.
func New(pool *kv.Pool) *Oracle {
	return &Oracle{pool: pool, requests: map[sched.ReqID]*told{}, grants: map[sched.GrantID][]kv.Page{},
		revoked: map[sched.GrantID]bool{}, failed: map[sched.GrantID]bool{}, sends: map[sched.ReqID]*send{}, batches: map[bool]*rows{}}
}

func (o *Oracle) fault(format string, args ...any) {
	if o.Err == nil {
		o.Err = fmt.Errorf("oracle: "+format, args...)
	}
}

// Submitted notes a new request.
func (o *Oracle) Submitted(req sched.ReqID) { o.requests[req] = &told{} }

// Open is the requests that have not ended, for the end of a walk.
func (o *Oracle) Open() (n int) {
	for _, t := range o.requests {
		if !t.ended {
			n++
		}
	}
	return n
}

// Ended is how many requests have ended.
func (o *Oracle) Ended() int { return o.closed }

// Tokens is how many output tokens the request has been told.
func (o *Oracle) Tokens(req sched.ReqID) int { return o.requests[req].tokens }

// Grants is the open grants (or those that must quiesce yet), ascending.
func (o *Oracle) Grants(revoked bool) (ids []sched.GrantID) {
	for id := range o.grants {
		if (o.revoked[id] || o.failed[id]) == revoked {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Sends is the requests with a send that is closed but not quiesced, or one
// that is open and bound or not, ascending.
func (o *Oracle) Sends(bound, closed bool) (ids []sched.ReqID) {
	for id, s := range o.sends {
		if s.bound == bound && s.closed == closed {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// First says that the send has its first token, so that D can have received it.
func (o *Oracle) First(req sched.ReqID) bool { return o.sends[req].first }

// Delivered is the grant and the first token of a send that D can have received.
func (o *Oracle) Delivered(req sched.ReqID) (key sched.GrantKey, token int32, ok bool) {
	s := o.sends[req]
	return s.key, s.token, s.first && !s.received
}

// Squeezed says that the request ended because running ones needed its pages.
func (o *Oracle) Squeezed(req sched.ReqID) bool {
	e := o.requests[req].err
	return e != nil && e.Code == sched.Overloaded
}

// Over says that the request has ended.
func (o *Oracle) Over(req sched.ReqID) bool { return o.requests[req].ended }

// DecodeEvent notes what the decode core is told.
func (o *Oracle) DecodeEvent(ev sched.Event) {
	switch ev := ev.(type) {
	case *sched.PagesLanded:
		if !o.failed[ev.Grant] {
			o.landed = append(o.landed, ev.Grant)
		}
	case *sched.TransferFailed:
		if o.grants[ev.Grant] != nil && !slices.Contains(o.landed, ev.Grant) {
			o.failed[ev.Grant] = true
		}
	case *sched.TransferQuiesced:
		if o.failed[ev.Grant] {
			o.over = append(o.over, ev.Grant)
		}
		delete(o.grants, ev.Grant)
		delete(o.failed, ev.Grant)
		delete(o.revoked, ev.Grant)
	case *sched.BatchDone:
		o.done(false, ev.Batch)
	}
}

// PrefillEvent notes what the prefill core is told.
func (o *Oracle) PrefillEvent(ev sched.Event) {
	switch ev := ev.(type) {
	case *sched.SubmitPrefill:
		if o.requests[ev.Req] == nil {
			o.Submitted(ev.Req)
		}
	case *sched.Received:
		if s := o.sends[ev.Req]; s != nil && s.first && s.bound { // else D lies
			s.received = true
		}
	case *sched.SendQuiesced:
		delete(o.sends, ev.Req)
	case *sched.BatchDone:
		o.done(true, ev.Batch)
	}
}

func (o *Oracle) done(prefill bool, id sched.BatchID) {
	b := o.batches[prefill]
	if b == nil || b.id != id {
		return
	}
	for i, r := range b.memory {
		if r.Req != b.reqs[i] || len(r.Pages) < len(b.pages[i]) {
			o.fault("batch %d changed while it ran", id)
			continue
		}
		for k, g := range b.pages[i] {
			if r.Pages[k] != g {
				o.fault("batch %d, row %d: page %d became %d while it ran", id, i, g, r.Pages[k])
			}
		}
	}
	delete(o.batches, prefill)
}

// DecodeActions judges what the decode core wants.
func (o *Oracle) DecodeActions(r *sched.DecodeReady) {
	for _, e := range r.Emits {
		t := o.requests[e.Req]
		if t.ended || e.Index != t.tokens {
			o.fault("request %d: token %d with index %d after %d tokens, ended %v", e.Req, e.Token, e.Index, t.tokens, t.ended)
		}
		t.tokens++
	}
	for _, f := range r.Finishes {
		o.finish(f)
		if f.Completion > o.requests[f.Req].tokens {
			o.fault("request %d: %d of %d tokens count", f.Req, f.Completion, o.requests[f.Req].tokens)
		}
	}
	for _, g := range r.Revokes {
		if slices.Contains(o.over, g) {
			continue
		}
		if o.grants[g] == nil || o.revoked[g] {
			o.fault("grant %d is taken back and is not open", g)
		}
		o.revoked[g] = true
	}
	o.over = o.over[:0]
	for _, g := range o.landed {
		if !o.revoked[g] { // else TransferQuiesced follows all the same
			delete(o.grants, g)
		}
	}
	o.landed = o.landed[:0]
	for _, g := range r.Grants {
		if g.Grant <= o.last {
			o.fault("grant %d is used twice", g.Grant)
		}
		o.last = g.Grant
		if want := o.pool.PagesFor(g.Tokens) - g.Prefix/o.pool.PageSize(); len(g.Pages) != want || want < 1 {
			o.fault("grant %d: %d pages for tokens %d to %d", g.Grant, len(g.Pages), g.Prefix, g.Tokens)
		}
		for _, p := range g.Pages {
			o.writes(p, fmt.Sprintf("grant %d", g.Grant), g.Req)
		}
		o.grants[g.Grant] = g.Pages
	}
	o.start(r.Batch)
}

// PrefillActions judges what the prefill core wants.
func (o *Oracle) PrefillActions(r *sched.PrefillReady) {
	for _, e := range r.Firsts {
		if s := o.sends[e.Req]; s == nil || s.closed {
			o.fault("request %d: first token without a send", e.Req)
		} else {
			s.first, s.token = true, e.Token
		}
	}
	for _, s := range r.Opens {
		if old := o.sends[s.Req]; old != nil && (old.bound || old.closed) {
			o.fault("request %d: opened again, bound %v, closed %v", s.Req, old.bound, old.closed)
		}
		if s.Cached >= s.Tokens || len(s.Pages) != o.pool.PagesFor(s.Tokens) {
			o.fault("request %d: %d pages for %d tokens, %d cached", s.Req, len(s.Pages), s.Tokens, s.Cached)
		}
		o.sends[s.Req] = &send{pages: s.Pages}
	}
	for _, b := range r.Binds {
		if s := o.sends[b.Req]; s == nil || s.bound || s.closed {
			o.fault("request %d: bound, but not to an open send", b.Req)
		} else {
			s.bound, s.key = true, b.Key
		}
	}
	for _, c := range r.Closes {
		if s := o.sends[c.Req]; s == nil || s.closed {
			o.fault("request %d: closed, but its send is not open", c.Req)
		} else {
			s.closed = true
		}
	}
	for id, s := range o.sends {
		if s.received && !s.closed { // else SendQuiesced follows all the same
			delete(o.sends, id)
		}
	}
	for _, f := range r.Finishes {
		o.finish(f)
	}
	o.start(r.Batch)
}

func (o *Oracle) finish(f sched.Finish) {
	t := o.requests[f.Req]
	if t.ended {
		o.fault("request %d ends twice", f.Req)
	}
	if (f.Reason == sched.Failed) != (f.Err != nil) {
		o.fault("request %d ends %s with error %v", f.Req, f.Reason, f.Err)
	}
	if f.Err != nil && f.Err.Code == sched.Internal && strings.Contains(f.Err.Message, "do not fit") {
		o.fault("request %d was taken and does not fit: %v", f.Req, f.Err)
	}
	t.ended, t.err = true, f.Err
	o.closed++
}

func (o *Oracle) start(b *sched.Batch) {
	if b == nil {
		return
	}
	if o.batches[b.Prefill] != nil {
		o.fault("batch %d starts while another runs", b.ID)
	}
	run := &rows{id: b.ID, memory: b.Rows}
	for _, r := range b.Rows {
		if len(r.Pages)*o.pool.PageSize() < r.Start+len(r.Tokens) {
			o.fault("batch %d: request %d has %d pages for %d tokens from %d", b.ID, r.Req, len(r.Pages), len(r.Tokens), r.Start)
			return
		}
		if o.requests[r.Req].ended {
			o.fault("batch %d: request %d has ended", b.ID, r.Req)
		}
		for at := r.Start; at < r.Start+len(r.Tokens); at++ {
			o.writes(r.Pages[at/o.pool.PageSize()], fmt.Sprintf("batch %d", b.ID), r.Req)
		}
		run.reqs = append(run.reqs, r.Req)
		run.pages = append(run.pages, append([]kv.Page(nil), r.Pages...))
	}
	o.batches[b.Prefill] = run
}

// writes: who is about to write page p for req must be the only one to touch it.
func (o *Oracle) writes(p kv.Page, who string, req sched.ReqID) {
	if s := o.pool.State(p); s != kv.Owned {
		o.fault("%s writes page %d, which is %s", who, p, s)
	}
	for id, pages := range o.grants {
		if slices.Contains(pages, p) {
			o.fault("%s writes page %d, which grant %d may write", who, p, id)
		}
	}
	for id, s := range o.sends {
		if id != req && s.bound && slices.Contains(s.pages, p) {
			o.fault("%s writes page %d, which the send of request %d reads", who, p, id)
		}
	}
	for _, b := range o.batches {
		for i, pages := range b.pages {
			if slices.Contains(pages, p) {
				o.fault("%s writes page %d, which row %d of batch %d uses", who, p, i, b.id)
			}
		}
	}
}

// Foreign finds a page that a write for the grant may not touch: one that is
// not of an open grant of that number, or of one that has not quiesced.
func (o *Oracle) Foreign(grant sched.GrantID, pages []kv.Page) (kv.Page, bool) {
	for _, p := range pages {
		if !slices.Contains(o.grants[grant], p) {
			return p, false
		}
	}
	return 0, true
}
