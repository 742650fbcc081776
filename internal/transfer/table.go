//metronome:pure

package transfer

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// table is D's record of open grants over all links: what each link has still
// to bring, and who is writing. It does no I/O. The Receiver calls it under
// its lock and then carries out what it left in events, orders and hurry.
//
//	join, leave    a link is up; its reader has gone
//	open, revoke   a grant
//	begin, end     around the payload of a DATA frame, by the link's reader
//	take           every other frame
//
// Invariants: a part exists on every link of a grant from open until the
// grant has landed, failed or been revoked, and no longer. A grant has
// quiesced when it has no part and no link is between begin and end for it.
type table struct {
	geometry kv.Geometry
	most     int // grants
	grants   map[uint64]*grant
	lanes    map[uint64]*lane

	events []Event
	orders []order // frames to send
	hurry  []*lane // their frame must end within hurryTime
}

// lane is a link as the table sees it.
type lane struct {
	link   uint64
	rank   int // ours
	share  share
	addr   string // P's, for texts
	peer   string // P's instance
	pairs  int    // links that a room of this peer has
	parts  map[uint64]*part
	writes *grant // the reader is between begin and end for it
	heard  time.Duration
}

// grant is open, or over and waits for its writers.
type grant struct {
	spec    GrantSpec
	parts   []*part
	left    int // parts that have not ended well
	first   *First
	opened  time.Duration
	heard   time.Duration
	begun   bool // DATA has come
	over    bool
	writers int
}

// part is what one link brings of a grant.
type part struct {
	g     *grant
	l     *lane
	bits  []uint64 // (layer, slice, index) → received; index is the fastest
	left  int      // bits not set
	ended bool     // END ok
	sent  sent     // our own frames
}

// sent is how far the frames of a part have got.
type sent uint8

const (
	grantQueued sent = iota // GRANT or RECOMPUTE waits in the mailbox
	grantSent
)

// order is a frame for D to send.
type order struct {
	kind kind
	l    *lane
	p    *part
	room int64 // ABORT without a part, and QUEUED
}

func newTable(g kv.Geometry, most int) *table {
	return &table{geometry: g, most: most, grants: map[uint64]*grant{}, lanes: map[uint64]*lane{}}
}

func (t *table) join(l *lane) {
	l.parts = map[uint64]*part{}
	l.heard = -time.Hour
	t.lanes[l.link] = l
}

// leave: the link's reader has gone and writes nothing any more.
func (t *table) leave(l *lane, cause string) {
	delete(t.lanes, l.link)
	if l.writes != nil {
		t.stopWriting(l)
	}
	parts := make([]*part, 0, len(l.parts))
	for _, p := range l.parts {
		parts = append(parts, p)
	}
	slices.SortFunc(parts, func(a, b *part) int { return cmp.Compare(a.g.spec.Grant, b.g.spec.Grant) })
	for _, p := range parts {
		t.fail(p.g, &Cause{CodeTransferFailed, "the link to the prefill worker at " + l.addr + " ended: " + cause})
	}
}

// open makes the parts of a grant and orders their frames. A grant that
// cannot be opened fails by event.
func (t *table) open(now time.Duration, s GrantSpec) {
	page := t.geometry.PageSize
	if s.Grant == 0 || t.grants[s.Grant] != nil {
		panic(fmt.Sprintf("transfer: grant %d opened twice", s.Grant))
	}
	if s.Room < 0 || s.Prefix < 0 || s.Prefix%page != 0 || s.Tokens < max(s.Prefix, 1) ||
		len(s.Pages) != kv.PagesFor(s.Tokens, page)-s.Prefix/page || len(s.Links) == 0 {
		panic(fmt.Sprintf("transfer: grant %d of room %d: %d pages of %d tokens on %d links for the positions %d to %d",
			s.Grant, s.Room, len(s.Pages), page, len(s.Links), s.Prefix, s.Tokens))
	}
	lanes, cause := t.route(&s)
	if cause != nil {
		t.events = append(t.events, &Failed{s.Grant, *cause}, &Quiesced{s.Grant})
		return
	}
	g := &grant{spec: s, left: len(lanes), opened: now, heard: now}
	t.grants[s.Grant] = g
	for _, l := range lanes {
		n := t.geometry.Layers * l.share.slices * len(s.Pages)
		p := &part{g: g, l: l, left: n, bits: make([]uint64, (n+63)/64)}
		g.parts = append(g.parts, p)
		l.parts[s.Grant] = p
	}
	for i, p := range g.parts {
		k := kindGrant
		if i == 0 && s.Recompute != nil {
			k = kindRecompute
		}
		t.orders = append(t.orders, order{kind: k, l: p.l, p: p})
	}
}

// route finds the links of a grant and checks that together they carry all heads.
func (t *table) route(s *GrantSpec) ([]*lane, *Cause) {
	fault := func(format string, args ...any) ([]*lane, *Cause) {
		return nil, &Cause{CodeTransferFailed, fmt.Sprintf(format, args...)}
	}
	switch {
	case len(t.grants) >= t.most:
		return nil, &Cause{CodeOverloaded, fmt.Sprintf("%d transfers are open already", len(t.grants))}
	case len(s.Recompute) > MaxRecompute || len(s.Sampling) > MaxSample:
		return fault("%d tokens to recompute with %d bytes of sampling; at most %d and %d can be sent",
			len(s.Recompute), len(s.Sampling), MaxRecompute, MaxSample)
	case s.Recompute != nil && len(s.Recompute) != s.Tokens:
		return fault("%d tokens to recompute, %d granted", len(s.Recompute), s.Tokens)
	}
	lanes := make([]*lane, 0, len(s.Links))
	for _, id := range s.Links {
		l := t.lanes[id]
		if l == nil {
			return fault("link %d to the prefill worker is gone", id)
		}
		// A room has as many links as there are pairs of ranks that share heads;
		// so many different shares make up all heads.
		twice := slices.ContainsFunc(lanes, func(m *lane) bool { return m.share.head == l.share.head })
		if l.peer != t.lanes[s.Links[0]].peer || l.pairs != len(s.Links) || twice {
			return fault("%d links that do not make up one room: link %d is one of %d with prefill instance %s",
				len(s.Links), id, l.pairs, l.peer)
		}
		lanes = append(lanes, l)
	}
	return lanes, nil
}

// begin judges a DATA frame before its payload is read. A part means: read
// into pages, then call end. Nil without error: the grant is not open (any
// more); read to nowhere.
func (t *table) begin(now time.Duration, l *lane, h *head) (*part, error) {
	p := l.parts[h.grant]
	if p == nil {
		return nil, nil
	}
	i, err := t.place(p, h)
	if err != nil {
		return nil, err
	}
	for n := i; n < i+int(h.count); n++ {
		if p.bits[n/64]>>(n%64)&1 != 0 {
			return nil, breachf(whyDuplicate, "DATA for entry %d of layer %d of grant %d came before",
				int(h.index)+n-i, h.layer, h.grant)
		}
	}
	l.writes = p.g
	p.g.writers++
	if !p.g.begun {
		p.g.begun = true
		t.events = append(t.events, &Begun{h.grant})
	}
	t.hear(now, p.g)
	return p, nil
}

// place checks a DATA frame's ranges and gives the number of its first bit.
func (t *table) place(p *part, h *head) (int, error) {
	s, pages := &p.l.share, len(p.g.spec.Pages)
	slice := (int(h.head) - s.head) / s.slice
	switch {
	case int64(h.layer) >= int64(t.geometry.Layers):
		return 0, breachf(whyRange, "DATA for layer %d of %d", h.layer, t.geometry.Layers)
	case h.count == 0 || int64(h.index)+int64(h.count) > int64(pages):
		return 0, breachf(whyRange, "DATA for %d entries from %d on; grant %d has %d", h.count, h.index, h.grant, pages)
	case int(h.head) < s.head || slice >= s.slices:
		return 0, breachf(whyRange, "DATA from head %d on; the link carries %d heads from %d on", h.head, s.heads, s.head)
	}
	if first, n := s.bounds(slice); int(h.head) != s.head+first || int(h.heads) != n {
		return 0, breachf(whyRange, "DATA for %d heads from %d on; that slice has %d from %d on",
			h.heads, h.head, n, s.head+first)
	}
	if want := int64(h.count) * int64(t.geometry.ExtentBytes(int(h.heads))); int64(h.size) != want {
		return 0, breachf(whyRange, "DATA of %d bytes for %d entries with %d heads, which have %d",
			h.size, h.count, h.heads, want)
	}
	return (int(h.layer)*s.slices+slice)*pages + int(h.index), nil
}

// end: the payload has been read into the pages; sound tells whether its checksum was right.
func (t *table) end(p *part, h *head, sound bool) {
	t.stopWriting(p.l)
	if p.g.over {
		return
	}
	if !sound {
		t.fail(p.g, &Cause{CodeTransferFailed, fmt.Sprintf(
			"the checksum of layer %d, entries %d to %d of room %d from %s is wrong",
			h.layer, h.index, h.index+h.count-1, p.g.spec.Room, p.l.addr)})
		return
	}
	i, _ := t.place(p, h)
	for n := i; n < i+int(h.count); n++ {
		p.bits[n/64] |= 1 << (n % 64)
	}
	p.left -= int(h.count)
}

func (t *table) stopWriting(l *lane) {
	g := l.writes
	l.writes = nil
	g.writers--
	t.quiesce(g)
}

// take carries out a frame other than DATA. It gives the grant that has landed
// by it, and why the frame was rejected, if it was and the link may stay.
func (t *table) take(now time.Duration, l *lane, h *head, body []byte, sound bool) (landed *grant, rejected string, err error) {
	t.hearLink(now, l)
	switch {
	case !sound && (h.kind == kindFirst || h.kind == kindEnd): // it fails the room only
		_, err = t.finish(now, l, h.grant, &Cause{CodeTransferFailed, fmt.Sprintf("the checksum of %v from %s is wrong", h.kind, l.addr)})
		rejected = whySum
	case !sound:
		err = breachf(whySum, "the checksum of %v is wrong", h.kind)
	case h.kind == kindFirst:
		first := new(First)
		if err = first.parse(body); err == nil {
			err = t.first(now, l, h.grant, first)
		}
	case h.kind == kindEnd:
		var cause *Cause
		if cause, err = parseEnd(body); err == nil {
			landed, err = t.finish(now, l, h.grant, cause)
		}
	case h.kind == kindBusy:
		err = parseBusy(body, func(grant uint64) { t.busy(now, l, grant) })
	case h.kind == kindWelcome || h.kind == kindRefuse:
		err = breachf(whyOrder, "%v after the handshake", h.kind)
	}
	return landed, rejected, err
}

// first takes FIRST.
func (t *table) first(now time.Duration, l *lane, grant uint64, f *First) error {
	p := l.parts[grant]
	switch {
	case p == nil:
		return nil
	case !l.share.lead || p.ended || p.g.first != nil:
		return breachf(whyOrder, "FIRST for grant %d on a link or at a time where none may come", grant)
	case f.PromptTokens != p.g.spec.Tokens:
		t.fail(p.g, &Cause{CodeTransferFailed, fmt.Sprintf("prefill computed a prompt of %d tokens, decode has %d",
			f.PromptTokens, p.g.spec.Tokens)})
		return nil
	}
	p.g.first = f
	t.hear(now, p.g)
	return nil
}

// finish takes END; cause nil is ok. It gives the grant when it has landed.
func (t *table) finish(now time.Duration, l *lane, grant uint64, cause *Cause) (*grant, error) {
	p := l.parts[grant]
	switch {
	case p == nil:
		return nil, nil
	case p.ended:
		return nil, breachf(whyOrder, "END for grant %d came before", grant)
	case cause != nil:
		t.fail(p.g, cause)
		return nil, nil
	case p.left > 0 || l.share.lead && p.g.first == nil:
		t.fail(p.g, &Cause{CodeTransferFailed, fmt.Sprintf("%s ended room %d with %d extents missing",
			l.addr, p.g.spec.Room, p.left)})
		return nil, nil
	}
	p.ended = true
	t.hear(now, p.g)
	if p.g.left--; p.g.left > 0 {
		return nil, nil
	}
	t.events = append(t.events, &Landed{grant, *p.g.first})
	t.close(p.g, kindReceived)
	return p.g, nil
}

// busy: P still works for the grant.
func (t *table) busy(now time.Duration, l *lane, grant uint64) {
	if p := l.parts[grant]; p != nil {
		t.hear(now, p.g)
	}
}

func (t *table) hear(now time.Duration, g *grant) {
	if now-g.heard >= time.Second {
		g.heard = now
		t.events = append(t.events, &GrantHeard{g.spec.Grant})
	}
}

// hearLink: a frame arrived.
func (t *table) hearLink(now time.Duration, l *lane) {
	if now-l.heard >= 250*time.Millisecond {
		l.heard = now
		t.events = append(t.events, &LinkHeard{l.link})
	}
}

// revoke takes a grant back. One that is not open (it landed, failed, or
// never was) has quiesced.
func (t *table) revoke(grant uint64) {
	g := t.grants[grant]
	switch {
	case g == nil:
		t.events = append(t.events, &Quiesced{grant})
	case !g.over:
		t.close(g, kindAbort)
	}
}

func (t *table) fail(g *grant, cause *Cause) {
	t.events = append(t.events, &Failed{g.spec.Grant, *cause})
	t.close(g, kindAbort)
}

// close removes a grant from all links and tells P by a frame of this kind.
func (t *table) close(g *grant, k kind) {
	g.over = true
	for _, p := range g.parts {
		delete(p.l.parts, g.spec.Grant)
		if t.lanes[p.l.link] == p.l {
			t.orders = append(t.orders, order{kind: k, l: p.l, p: p})
		}
		if p.l.writes == g {
			t.hurry = append(t.hurry, p.l)
		}
	}
	if k == kindReceived {
		delete(t.grants, g.spec.Grant) // every link is done with it: END came
		return
	}
	t.quiesce(g)
}

func (t *table) quiesce(g *grant) {
	if g.over && g.writers == 0 && t.grants[g.spec.Grant] == g {
		delete(t.grants, g.spec.Grant)
		t.events = append(t.events, &Quiesced{g.spec.Grant})
	}
}
