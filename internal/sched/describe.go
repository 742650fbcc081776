//metronome:pure

package sched

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

var phaseNames = [...]string{"new", "pending", "preallocate", "transfer", "waiting", "running", "finished",
	"bootstrapping", "queued", "computing", "in flight", "done"}

func (p Phase) String() string { return phaseNames[p] }

func (r Reason) String() string {
	return [...]string{"none", "stop", "length", "failed", "prefilled"}[r]
}

// Describe is the state of the core for people: one line of pages, one for each
// request by arrival, one for each grant whose request has ended.
func (d *Decode) Describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pages: %s", d.pool.Count())
	if d.running {
		fmt.Fprintf(&b, "; batch %d", d.batch.ID)
	}
	b.WriteByte('\n')
	for _, r := range d.byArrival() {
		fmt.Fprintf(&b, "request %d: %s, %d+%d tokens, pages %v", r.id, r.phase, r.prompt, r.output(), r.table.Pages())
		if n := r.table.Shared(); n > 0 {
			fmt.Fprintf(&b, " (%d shared)", n)
		}
		if r.grant != nil {
			fmt.Fprintf(&b, ", grant %d", r.grant.id)
		}
		if due := d.due(r); due != Never {
			fmt.Fprintf(&b, ", due %s", due)
		}
		b.WriteByte('\n')
	}
	for _, id := range slices.Sorted(maps.Keys(d.grants)) {
		if g := d.grants[id]; g.req == nil {
			fmt.Fprintf(&b, "grant %d: taken back, pages %v\n", id, g.table.Pages())
		}
	}
	for i := range d.held {
		fmt.Fprintf(&b, "held for batch %d: pages %v\n", d.batch.ID, d.held[i].Pages())
	}
	return b.String()
}

// Describe is the state of the core for people, see [Decode.Describe].
func (p *Prefill) Describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pages: %s", p.pool.Count())
	if p.running {
		fmt.Fprintf(&b, "; batch %d", p.batch.ID)
	}
	b.WriteByte('\n')
	for _, r := range p.byArrival() {
		fmt.Fprintf(&b, "request %d: %s, room %d, %d of %d tokens, pages %v", r.id, r.phase, r.room, r.computed, len(r.prompt), r.table.Pages())
		if n := r.table.Shared(); n > 0 {
			fmt.Fprintf(&b, " (%d shared)", n)
		}
		if r.granted && !r.local() {
			b.WriteString(", granted")
		}
		if due := min(r.deadline, r.bootstrap); due != Never {
			fmt.Fprintf(&b, ", due %s", due)
		}
		b.WriteByte('\n')
	}
	for _, id := range slices.Sorted(maps.Keys(p.closing)) {
		fmt.Fprintf(&b, "closing send %d: pages %v\n", id, p.closing[id].table.Pages())
	}
	for _, c := range p.held {
		if !c.sends {
			fmt.Fprintf(&b, "held for batch %d: pages %v\n", p.batch.ID, c.table.Pages())
		}
	}
	for _, room := range slices.Sorted(maps.Keys(p.parking.grants)) {
		q := p.parking.grants[room]
		fmt.Fprintf(&b, "parked grant %d/%d: room %d, due %s\n", q.Key.Peer, q.Key.Grant, room, q.timer.due)
	}
	return b.String()
}

// String is what the driver must do, one action a line, in the order of the
// fields.
func (r *DecodeReady) String() string {
	var b strings.Builder
	for _, e := range r.Emits {
		fmt.Fprintln(&b, e)
	}
	for _, f := range r.Finishes {
		fmt.Fprintln(&b, f)
	}
	if r.Batch != nil {
		b.WriteString(r.Batch.String())
	}
	for _, g := range r.Grants {
		fmt.Fprintf(&b, "grant %d: request %d, room %d, links %v, tokens %d to %d into pages %v", g.Grant, g.Req, g.Room, g.Links, g.Prefix, g.Tokens, g.Pages)
		if g.Recompute != nil {
			fmt.Fprintf(&b, ", recompute %d tokens, index %d", len(g.Recompute), g.Index)
		}
		b.WriteByte('\n')
	}
	for _, g := range r.Revokes {
		fmt.Fprintf(&b, "revoke grant %d\n", g)
	}
	for _, n := range r.Notices {
		what := "has ended"
		if n.Waits {
			what = "waits"
		}
		fmt.Fprintf(&b, "notice: room %d %s on link %d\n", n.Room, what, n.Link)
	}
	for _, p := range r.Preempts {
		fmt.Fprintf(&b, "preempt request %d: %d tokens, index %d\n", p.Req, len(p.Tokens), p.Index)
	}
	for i := range r.Peer {
		fmt.Fprintln(&b, r.Peer[i])
	}
	if r.Fatal != nil {
		fmt.Fprintf(&b, "fatal: %s\n", r.Fatal)
	}
	return b.String()
}

// String is what the driver must do, see [DecodeReady.String].
func (r *PrefillReady) String() string {
	var b strings.Builder
	for _, e := range r.Firsts {
		fmt.Fprintf(&b, "first %s\n", e)
	}
	for _, o := range r.Opens {
		fmt.Fprintf(&b, "open send %d: room %d, %d tokens, %d cached, pages %v\n", o.Req, o.Room, o.Tokens, o.Cached, o.Pages)
	}
	for _, o := range r.Binds {
		fmt.Fprintf(&b, "bind send %d to grant %d/%d\n", o.Req, o.Key.Peer, o.Key.Grant)
	}
	for _, o := range r.Closes {
		fmt.Fprintf(&b, "close send %d%s\n", o.Req, because(o.Cause))
	}
	for _, o := range r.Refuses {
		fmt.Fprintf(&b, "refuse grant %d/%d%s\n", o.Key.Peer, o.Key.Grant, because(o.Cause))
	}
	for _, h := range r.HandOvers {
		fmt.Fprintf(&b, "hand over request %d: pages %v, %d tokens, %d cached, token %d, index %d, row %d\n",
			h.Req, h.Pages, len(h.Prompt), h.Cached, h.First, h.Index, h.Row)
	}
	for _, f := range r.Finishes {
		fmt.Fprintln(&b, f)
	}
	if r.Batch != nil {
		b.WriteString(r.Batch.String())
	}
	return b.String()
}

func because(e *Error) string {
	if e == nil {
		return ""
	}
	return ": " + e.Error()
}

func (e Emit) String() string {
	from := "first"
	if e.Row >= 0 {
		from = fmt.Sprintf("row %d", e.Row)
	}
	return fmt.Sprintf("emit request %d: token %d, index %d, %s", e.Req, e.Token, e.Index, from)
}

func (f Finish) String() string {
	s := fmt.Sprintf("finish request %d: %s, %d tokens", f.Req, f.Reason, f.Completion)
	if f.Err != nil {
		s += because(f.Err)
		if f.Err.RetryAfter > 0 {
			s += fmt.Sprintf(" (retry after %s)", f.Err.RetryAfter)
		}
		if f.Err.NoWork {
			s += " (no work done)"
		}
	}
	return s
}

func (b *Batch) String() string {
	var s strings.Builder
	kind := "decode"
	if b.Prefill {
		kind = "prefill"
	}
	fmt.Fprintf(&s, "batch %d, %s\n", b.ID, kind)
	for _, r := range b.Rows {
		fmt.Fprintf(&s, "  request %d: %d tokens from %d, pages %v", r.Req, len(r.Tokens), r.Start, r.Pages)
		if r.Sample {
			fmt.Fprintf(&s, ", draw %d", r.Index)
		}
		s.WriteByte('\n')
	}
	return s.String()
}

var peerKinds = [...]string{"none", "fetch info", "query ranks", "look up rank", "dial link", "close link", "probe health", "cancel"}

func (a PeerAction) String() string {
	s := fmt.Sprintf("%s %d: %s", peerKinds[a.Kind], a.ID, a.Addr)
	switch a.Kind {
	case CancelTry:
		return fmt.Sprintf("cancel %d", a.ID)
	case CloseLink:
		return fmt.Sprintf("close link %d: %s", a.Link, a.Text)
	case QueryRanks:
		s += fmt.Sprintf(", rooms %v", a.Rooms)
	case LookupRank:
		s += ", " + a.Rank.String()
	case DialLink:
		s += fmt.Sprintf(", link %d, our rank %d, %s at %s", a.Link, a.LocalTP, a.Rank, a.Target)
	}
	return s + fmt.Sprintf(", within %s", a.Timeout)
}
