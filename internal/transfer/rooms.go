//metronome:pure

package transfer

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// rooms is P's record of granted rooms, of requests whose pages are being
// sent, and of what each link has to write next. It does no I/O. The Sender
// calls it under its lock and then carries out what it left in events and wake.
//
//	join, leave                       a link is up; it has gone
//	grant, abort, received, refill    frames from D
//	open, layerDone, bind, first, closeSend, refuse   from P's core and engine
//	next, done                        around each write, by the link's writer
//
// A room has a stream on each link that GRANTed it. It is parked until bind or
// refuse. Nothing is queued for DATA: what a stream may send is the difference
// between the rows that are final and what it has sent, so each (layer, page,
// heads) goes once, and dropping a room drops all of it. A page is pinned
// while its send is open or a begun frame names it.
type rooms struct {
	geometry   kv.Geometry
	tp         int // ours
	mostParked int // rooms on one link
	mostHeld   int // bytes of RECOMPUTE in them
	sends      map[uint64]*send
	rooms      map[GrantKey]*room
	owners     map[int64]*owner

	events []SenderEvent
	wake   []*outlet
}

// maxHeld is how many bytes of RECOMPUTE the parked rooms of a link may hold.
const maxHeld = 64 << 20

// outlet is a link as rooms sees it.
type outlet struct {
	peer    uint64
	dTP     int
	dRank   int
	pRank   int
	share   share
	window  window
	streams map[uint64]*stream // by grant
	parked  int                // of them
	held    int                // bytes of RECOMPUTE in them
	ready   []*stream          // may have something to send; served in turn
	ends    []frame            // END frames of rooms that are no more
	begun   *send              // owns the pages of the frame being written
}

// owner is the D core that a room belongs to.
type owner struct {
	peer uint64
	n    int // rooms (grants) of that number
}

// room is what one grant opened.
type room struct {
	key     GrantKey
	msg     grantMsg
	streams []*stream
	need    int // streams, for the room to be told of
	send    *send
	bound   time.Duration
}

// stream is a room's part on one link.
type stream struct {
	r      *room
	o      *outlet
	grant  uint64
	held   int
	next   []int32 // units sent, by layer; unit = index*slices + slice
	left   int     // units not sent
	layer  int     // to look at first
	queued bool    // is in ready
	first  bool    // FIRST went out
	ended  bool    // END ok went out
	got    bool    // RECEIVED came
}

// send is a request whose pages may go out.
type send struct {
	req   uint64
	spec  SendSpec
	rows  []int // final, by layer
	first *First
	room  *room
	begun int  // frames being written that name its pages
	over  bool // closeSend came; it stays until begun is 0
}

// frame is what a writer shall write next.
type frame struct {
	head  head // of DATA all but the checksum; of others kind and grant
	share *share
	pages []kv.Page
	first *First
	cause *Cause
}

func newRooms(g kv.Geometry, tp, mostParked int) *rooms {
	return &rooms{geometry: g, tp: tp, mostParked: mostParked, mostHeld: maxHeld,
		sends: map[uint64]*send{}, rooms: map[GrantKey]*room{}, owners: map[int64]*owner{}}
}

// grant takes GRANT and RECOMPUTE. refused is why it was answered with END, or "".
func (t *rooms) grant(o *outlet, id uint64, m *grantMsg) (refused string, err error) {
	page := t.geometry.PageSize
	switch {
	case o.streams[id] != nil:
		return "", breachf(whyDuplicate, "grant %d came before on this link", id)
	case m.dRanks != o.dTP:
		return "", breachf(whyPayload, "GRANT says %d ranks, HELLO said %d", m.dRanks, o.dTP)
	case m.prefix%page != 0 || m.pages != kv.PagesFor(m.tokens, page)-m.prefix/page:
		return "", breachf(whyPayload, "GRANT of %d pages of %d tokens for the positions %d to %d", m.pages, page, m.prefix, m.tokens)
	}
	held := 4*len(m.recompute) + len(m.sampling)
	if o.parked >= t.mostParked || o.held+held > t.mostHeld {
		t.end(o, id, &Cause{CodeOverloaded, fmt.Sprintf("%d rooms wait on this link already", o.parked)})
		return whyFull, nil
	}
	w := t.owners[m.room]
	if w != nil && w.peer != o.peer {
		t.end(o, id, &Cause{CodeInvalid, fmt.Sprintf("room %d belongs to another decode worker", m.room)})
		return whyRoom, nil
	}
	key := GrantKey{o.peer, id}
	r := t.rooms[key]
	if r == nil {
		r = &room{key: key, msg: *m, need: pairs(o.dTP, t.tp)}
		t.rooms[key] = r
		if w == nil {
			w = &owner{peer: o.peer}
			t.owners[m.room] = w
		}
		w.n++
	} else if err := r.fits(o, m); err != nil {
		return "", err
	}
	s := &stream{r: r, o: o, grant: id, held: held}
	r.streams = append(r.streams, s)
	o.streams[id] = s
	o.parked++
	o.held += held
	if len(r.streams) == r.need {
		t.events = append(t.events, &Granted{Key: key, Room: m.room, Digest: r.msg.digest, Prefix: m.prefix, Tokens: m.tokens,
			Recompute: r.msg.recompute, Index: r.msg.index, Sampling: r.msg.sampling})
	}
	return "", nil
}

// fits tells whether a further GRANT says the same as those before it.
func (r *room) fits(o *outlet, m *grantMsg) error {
	for _, s := range r.streams {
		if s.o.dRank == o.dRank && s.o.pRank == o.pRank {
			return breachf(whyDuplicate, "grant %d came before for ranks %d and %d", r.key.Grant, o.dRank, o.pRank)
		}
	}
	if m.room != r.msg.room || m.digest != r.msg.digest || m.prefix != r.msg.prefix || m.tokens != r.msg.tokens || m.recompute != nil && r.msg.recompute != nil {
		return breachf(whyPayload, "grant %d says otherwise than on another link", r.key.Grant)
	}
	if m.recompute != nil {
		r.msg.recompute, r.msg.index, r.msg.sampling = m.recompute, m.index, m.sampling
	}
	return nil
}

// end orders an END with a cause.
func (t *rooms) end(o *outlet, grant uint64, cause *Cause) {
	o.ends = append(o.ends, frame{head: head{kind: kindEnd, grant: grant}, cause: cause})
	t.wake = append(t.wake, o)
}

// full tells whether so many END frames wait that the link must go: D grants
// and does not read.
func (t *rooms) full(o *outlet) bool { return len(o.ends) > 4*t.mostParked+64 }

// abort takes ABORT.
func (t *rooms) abort(o *outlet, grant uint64, id int64) {
	cause := &Cause{CodeTransferFailed, "the decode worker took the room back"}
	if grant == 0 {
		t.events = append(t.events, &Closed{GrantKey{Peer: o.peer}, id, cause})
	} else if s := o.streams[grant]; s != nil {
		t.closed(s.r, cause)
	}
}

// closed removes a room and tells of it.
func (t *rooms) closed(r *room, cause *Cause) {
	key := r.key
	if len(r.streams) < r.need {
		key.Grant = 0
	}
	t.events = append(t.events, &Closed{key, r.msg.room, cause})
	t.remove(r)
}

// remove takes a room off all its links. Its send, if any, stays until closeSend.
func (t *rooms) remove(r *room) {
	for _, s := range r.streams {
		t.unpark(s)
		delete(s.o.streams, s.grant)
		if s.queued {
			s.o.ready = slices.DeleteFunc(s.o.ready, func(q *stream) bool { return q == s })
		}
	}
	delete(t.rooms, r.key)
	if w := t.owners[r.msg.room]; w.n > 1 {
		w.n--
	} else {
		delete(t.owners, r.msg.room)
	}
	if r.send != nil {
		r.send.room = nil
	}
}

// unpark: the stream is bound, or gone.
func (t *rooms) unpark(s *stream) {
	if s.r.send == nil {
		s.o.parked--
		s.o.held -= s.held
	}
}

// received takes RECEIVED. It gives the room when it was the last.
func (t *rooms) received(o *outlet, grant uint64) (*room, error) {
	s := o.streams[grant]
	switch {
	case s == nil:
		return nil, nil // it crossed with our END
	case !s.ended || s.got:
		return nil, breachf(whyOrder, "RECEIVED for grant %d before END or twice", grant)
	}
	s.got = true
	for _, q := range s.r.streams {
		if !q.got {
			return nil, nil
		}
	}
	t.delivered(s.r)
	return s.r, nil
}

func (t *rooms) delivered(r *room) {
	req := r.send.req
	t.events = append(t.events, &Received{req})
	t.remove(r)
	delete(t.sends, req)
}

// refill takes CREDIT.
func (t *rooms) refill(o *outlet, n uint64) error {
	t.wake = append(t.wake, o)
	return o.window.refill(n)
}

// leave: the link has gone. A frame that is being written stays begun until done.
func (t *rooms) leave(o *outlet, cause string) {
	streams := make([]*stream, 0, len(o.streams))
	for _, s := range o.streams {
		streams = append(streams, s)
	}
	slices.SortFunc(streams, func(a, b *stream) int { return cmp.Compare(a.grant, b.grant) })
	for _, s := range streams {
		if slices.ContainsFunc(s.r.streams, func(q *stream) bool { return q.got }) {
			t.delivered(s.r) // D says RECEIVED on any link only when it has everything
			continue
		}
		t.closed(s.r, &Cause{CodeTransferFailed, "the link from the decode worker ended: " + cause})
	}
	o.ends = nil
}

// open takes a request, or other pages for one that is not bound yet.
func (t *rooms) open(req uint64, spec SendSpec) {
	if old := t.sends[req]; old != nil && (old.room != nil || old.over) {
		panic(fmt.Sprintf("transfer: request %d opened again after Bind or CloseSend", req))
	}
	if spec.Tokens < 1 || spec.Cached < 0 || spec.Cached >= spec.Tokens || len(spec.Pages) < t.geometry.PagesFor(spec.Tokens) {
		panic(fmt.Sprintf("transfer: request %d: %d pages for %d tokens, %d cached", req, len(spec.Pages), spec.Tokens, spec.Cached))
	}
	s := &send{req: req, spec: spec, rows: make([]int, t.geometry.Layers)}
	for i := range s.rows {
		s.rows[i] = spec.Cached
	}
	t.sends[req] = s
}

func (t *rooms) layerDone(req uint64, layer, tokens int) {
	s := t.sends[req]
	if s == nil {
		return
	}
	if tokens > s.spec.Tokens {
		panic(fmt.Sprintf("transfer: request %d: %d tokens final of %d", req, tokens, s.spec.Tokens))
	}
	s.rows[layer] = max(s.rows[layer], tokens)
	t.stir(s)
}

// bind lets the final pages of a request go out to the room. If the room has
// gone, Closed has told so.
func (t *rooms) bind(now time.Duration, req uint64, key GrantKey) {
	s, r := t.sends[req], t.rooms[key]
	if s == nil || s.over || s.room != nil {
		panic(fmt.Sprintf("transfer: request %d bound without being open, or twice", req))
	}
	if r == nil {
		return
	}
	if r.send != nil || len(r.streams) < r.need {
		panic(fmt.Sprintf("transfer: request %d bound to grant %d, which is not free", req, key.Grant))
	}
	if r.msg.tokens != s.spec.Tokens {
		cause := &Cause{CodeTransferFailed, fmt.Sprintf("the two legs differ: prefill has a prompt of %d tokens, decode %d",
			s.spec.Tokens, r.msg.tokens)}
		t.refuse(key, cause)
		t.events = append(t.events, &SendFailed{req, cause})
		return
	}
	for _, m := range r.streams {
		t.unpark(m)
		m.next = make([]int32, t.geometry.Layers)
		m.left = t.geometry.Layers * m.o.share.slices * r.msg.pages
	}
	r.send, s.room, r.bound = s, r, now
	r.msg.recompute, r.msg.sampling = nil, nil
	t.stir(s)
}

func (t *rooms) first(req uint64, f *First) {
	if s := t.sends[req]; s != nil {
		s.first = f
		t.stir(s)
	}
}

// stir puts the streams of a send among those that may have something to send.
func (t *rooms) stir(s *send) {
	if s.room == nil {
		return
	}
	for _, m := range s.room.streams {
		if !m.queued && !m.ended {
			m.queued = true
			m.o.ready = append(m.o.ready, m)
			t.wake = append(t.wake, m.o)
		}
	}
}

func (t *rooms) closeSend(req uint64, cause *Cause) {
	s := t.sends[req]
	switch {
	case s == nil: // it was Received meanwhile
		t.events = append(t.events, &SendQuiesced{req})
		return
	case s.room != nil:
		t.sayEnd(s.room, cause)
		t.remove(s.room)
	}
	s.over = true
	t.quiesce(s)
}

// quiesce ends a send that is over when no begun frame names its pages.
func (t *rooms) quiesce(s *send) {
	if s.over && s.begun == 0 && t.sends[s.req] == s {
		delete(t.sends, s.req)
		t.events = append(t.events, &SendQuiesced{s.req})
	}
}

func (t *rooms) refuse(key GrantKey, cause *Cause) {
	if r := t.rooms[key]; r != nil {
		t.sayEnd(r, cause)
		t.remove(r)
	}
}

// sayEnd tells D on every link that a room ended with a cause; nil: D knows.
func (t *rooms) sayEnd(r *room, cause *Cause) {
	for _, s := range r.streams {
		if cause != nil && !s.ended {
			t.end(s.o, s.grant, cause)
		}
	}
}

// taken is what came of a frame from D, beside events.
type taken struct {
	refused  string // why it was answered with END, or ""
	received *room  // D has everything of it
	ping     bool   // PONG is due
}

// take carries out one frame from D.
func (t *rooms) take(o *outlet, h *head, body []byte, sound bool) (got taken, err error) {
	granting := h.kind == kindGrant || h.kind == kindRecompute
	switch {
	case !sound && granting: // fails the room only
		got.refused = whySum
		t.end(o, h.grant, &Cause{CodeTransferFailed, fmt.Sprintf("the checksum of %v is wrong", h.kind)})
	case !sound:
		return got, breachf(whySum, "the checksum of %v is wrong", h.kind)
	case granting:
		var m grantMsg
		if err = m.parse(h.kind, body); err == nil {
			got.refused, err = t.grant(o, h.grant, &m)
		}
	case h.kind == kindAbort:
		var id int64
		if id, err = parseRoom(h.kind, body); err == nil {
			t.abort(o, h.grant, id)
		}
	case h.kind == kindQueued:
		var id int64
		if id, err = parseRoom(h.kind, body); err == nil {
			t.events = append(t.events, &Queued{id})
		}
	case h.kind == kindReceived:
		got.received, err = t.received(o, h.grant)
	case h.kind == kindCredit:
		var n uint64
		if n, err = parseCredit(body); err == nil {
			err = t.refill(o, n)
		}
	case h.kind == kindPing:
		got.ping = true
	case h.kind == kindHello:
		return got, breachf(whyOrder, "HELLO came before")
	}
	if err == nil && t.full(o) {
		err = breachf(whyFull, "%d END frames wait for a peer that reads none", len(o.ends))
	}
	return got, err
}

// gather appends the control frames that are due and room for the head of the
// DATA frame after them, if there is one: f is of kind DATA then, and begun.
func (t *rooms) gather(o *outlet, buf []byte) ([]byte, frame) {
	for len(buf) < lump {
		f, ok := t.next(o)
		if !ok {
			break
		}
		switch f.head.kind {
		case kindData:
			return append(buf, noHead[:]...), f
		case kindFirst:
			buf = appendFrame(buf, kindFirst, f.head.grant, f.first.append)
		case kindEnd:
			buf = appendFrame(buf, kindEnd, f.head.grant, func(b []byte) []byte { return appendEnd(b, f.cause) })
		}
	}
	return buf, frame{}
}

// next is the frame that the link shall write now; false: none, until wake.
// The streams that have one take turns, frame by frame, so a long prompt does
// not hold up a short one. After DATA comes done.
func (t *rooms) next(o *outlet) (frame, bool) {
	if len(o.ends) > 0 {
		f := o.ends[0]
		o.ends = slices.Delete(o.ends, 0, 1)
		return f, true
	}
	for len(o.ready) > 0 {
		m := o.ready[0]
		f, more := t.offer(m)
		if f.head.kind == kindData && !o.window.fits(int(f.head.size)) {
			return frame{}, false // its turn stays; CREDIT wakes us
		}
		copy(o.ready, o.ready[1:])
		o.ready[len(o.ready)-1] = m
		if !more {
			m.queued = false
			o.ready = o.ready[:len(o.ready)-1]
		}
		if f.head.kind != 0 {
			m.commit(&f)
			return f, true
		}
	}
	return frame{}, false
}

// offer finds what a stream can send now, and whether it may have more then.
func (t *rooms) offer(m *stream) (f frame, more bool) {
	s := m.r.send
	if f, ok := t.data(m); ok {
		return f, true
	}
	switch {
	case s.first == nil || m.left > 0 || m.ended:
		return frame{}, false
	case m.o.share.lead && !m.first:
		return frame{head: head{kind: kindFirst, grant: m.grant}, first: s.first}, true
	}
	return frame{head: head{kind: kindEnd, grant: m.grant}}, false
}

// data finds a stream's next DATA frame.
func (t *rooms) data(m *stream) (frame, bool) {
	if m.left == 0 {
		return frame{}, false
	}
	r, sh := m.r, &m.o.share
	page := t.geometry.PageSize
	for range t.geometry.Layers {
		rows := r.send.rows[m.layer]
		ready := rows / page
		if rows == r.send.spec.Tokens {
			ready = t.geometry.PagesFor(rows) // the last page, whole or not
		}
		ready -= r.msg.prefix / page
		index, slice := int(m.next[m.layer])/sh.slices, int(m.next[m.layer])%sh.slices
		if index < ready {
			first, heads := sh.bounds(slice)
			count := 1
			if sh.slices == 1 {
				count = min(ready-index, maxPayload/t.geometry.ExtentBytes(heads))
			}
			from := r.msg.prefix/page + index
			return frame{
				head: head{kind: kindData, grant: m.grant, layer: uint32(m.layer), index: uint32(index), count: uint32(count),
					head: uint16(sh.head + first), heads: uint16(heads), size: uint32(count * t.geometry.ExtentBytes(heads))},
				share: sh, pages: r.send.spec.Pages[from : from+count],
			}, true
		}
		m.layer = (m.layer + 1) % t.geometry.Layers
	}
	return frame{}, false
}

// commit: the frame is about to be written.
func (m *stream) commit(f *frame) {
	switch f.head.kind {
	case kindData:
		m.o.window.take(int(f.head.size))
		m.next[f.head.layer] += int32(f.head.count)
		m.left -= int(f.head.count)
		m.o.begun = m.r.send
		m.r.send.begun++
	case kindFirst:
		m.first = true
	case kindEnd:
		m.ended = true
	}
}

// sent tells whether all DATA of a room has gone out.
func (r *room) sent() bool {
	return !slices.ContainsFunc(r.streams, func(s *stream) bool { return s.left > 0 })
}

// done: the DATA frame has been written, or the link has failed.
func (t *rooms) done(o *outlet) {
	s := o.begun
	if s == nil {
		return
	}
	o.begun = nil
	if s.begun--; s.begun == 0 && s.room != nil && s.room.sent() {
		t.events = append(t.events, &Sent{s.req})
	}
	t.quiesce(s)
}

// busy appends the grants of a link that P still owes something.
func (t *rooms) busy(o *outlet, grants []uint64) []uint64 {
	for id, s := range o.streams {
		if !s.ended {
			grants = append(grants, id)
		}
	}
	slices.Sort(grants)
	return grants
}
