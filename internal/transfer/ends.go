//metronome:pure

package transfer

import (
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// DecodeEnd is a Receiver without goroutines, sockets and clock: the same
// table, mailboxes and frames, for a caller that carries the bytes itself and
// says when. A simulator is one. Nothing in it waits.
//
//	Join, Leave           a link is up; it has gone
//	Open, Revoke, Notice  as Receiver has them
//	Next                  the bytes that the link's writer writes now
//	Take, Finish          a frame arrives; the rest of a DATA frame arrives
//	Events, Hurry         what the calls before have left
type DecodeEnd struct {
	table  *table
	memory []Memory
	most   int
	links  map[uint64]*decodeLink
	// Wrote, when set, hears of every write into pages of a grant.
	Wrote func(grant uint64, pages []kv.Page)
}

type decodeLink struct {
	lane
	mailbox
	intake  intake
	batch   []order
	reading *part // between Take and Finish of a DATA frame
	head    head
	payload []byte
}

// Credit is the byte window of an end's links.
const Credit = minCredit

// NewDecodeEnd makes the end of a D with one Memory for each TP rank.
func NewDecodeEnd(g kv.Geometry, memory []Memory, maxGrants int) *DecodeEnd {
	return &DecodeEnd{table: newTable(g, maxGrants), memory: memory, most: maxGrants, links: map[uint64]*decodeLink{}}
}

// Join makes a link of our rank with rank peerRank of the P that said peer.
func (e *DecodeEnd) Join(link uint64, rank int, peer Welcome, peerRank int, addr string) error {
	sh, ok := newShare(e.table.geometry, len(e.memory), rank, peer.TP, peerRank)
	if !ok {
		return fmt.Errorf("rank %d of %d shares no head with rank %d of %d", rank, len(e.memory), peerRank, peer.TP)
	}
	l := &decodeLink{intake: newIntake(Credit), lane: lane{link: link, rank: rank, share: sh, addr: addr,
		peer: peer.Instance, pairs: pairs(len(e.memory), peer.TP)}}
	e.links[link] = l
	e.table.join(&l.lane)
	return nil
}

// Leave: the link has gone.
func (e *DecodeEnd) Leave(link uint64, cause string) {
	if l := e.links[link]; l != nil {
		delete(e.links, link)
		e.table.leave(&l.lane, cause)
		e.settle()
	}
}

// Open opens a grant.
func (e *DecodeEnd) Open(now time.Duration, g GrantSpec) {
	e.table.open(now, g)
	e.settle()
}

// Revoke takes a grant back.
func (e *DecodeEnd) Revoke(grant uint64) {
	e.table.revoke(grant)
	e.settle()
}

// Notice tells P that a room which was never granted has ended, or waits here.
func (e *DecodeEnd) Notice(link uint64, room int64, waits bool) {
	if l := e.links[link]; l != nil && l.notices < maxNotices {
		l.post(order{kind: noticeKind(waits), l: &l.lane, room: room}, e.most)
	}
}

// settle puts the table's orders into mailboxes.
func (e *DecodeEnd) settle() {
	for _, o := range e.table.orders {
		if l := e.links[o.l.link]; l != nil {
			l.post(o, e.most)
		}
	}
	clear(e.table.orders)
	e.table.orders = e.table.orders[:0]
}

// Events are the news since the last call.
func (e *DecodeEnd) Events() []Event {
	evs := slices.Clone(e.table.events)
	e.table.events = e.table.events[:0]
	return evs
}

// Hurry are the links whose frame, begun for a grant that is over, must end
// within HurryTime or take its link with it.
func (e *DecodeEnd) Hurry() (links []uint64) {
	for _, l := range e.table.hurry {
		links = append(links, l.link)
	}
	e.table.hurry = e.table.hurry[:0]
	return links
}

// HurryTime bounds a frame that is being written into pages of a grant that is over.
const HurryTime = hurryTime

// Next is what the link's writer writes now; empty: nothing.
func (e *DecodeEnd) Next(link uint64) []byte {
	l := e.links[link]
	if l == nil {
		return nil
	}
	var credit uint64
	l.batch, credit = l.mailbox.take(l.batch[:0])
	return encode(nil, l.batch, credit, len(e.memory))
}

// Take takes one frame. more: it is DATA, half of it has been read, and Finish
// must follow before the link's next Take. An error ends the link.
func (e *DecodeEnd) Take(now time.Duration, link uint64, frame []byte) (more bool, err error) {
	l := e.links[link]
	h, body, sound, err := split(frame, false)
	if err != nil {
		return false, err
	}
	defer e.settle()
	if h.kind != kindData {
		_, _, err = e.table.take(now, &l.lane, &h, body, sound)
		return false, err
	}
	e.table.hearLink(now, &l.lane)
	p, err := e.table.begin(now, &l.lane, &h)
	if err != nil {
		return false, err
	}
	l.reading, l.head, l.payload = p, h, body
	if p != nil {
		e.copy(l, 0, int(h.count)/2)
	}
	return true, nil
}

// Finish reads the rest of the DATA frame that Take began.
func (e *DecodeEnd) Finish(link uint64) {
	l := e.links[link]
	if l == nil {
		return
	}
	if p := l.reading; p != nil {
		e.copy(l, int(l.head.count)/2, int(l.head.count))
		e.table.end(p, &l.head, crc32.Checksum(l.payload, castagnoli) == l.head.sum)
	}
	l.credit += l.intake.read(len(l.payload))
	l.reading, l.payload = nil, nil
	e.settle()
}

// copy puts the entries [from, to) of a DATA frame into their pages.
func (e *DecodeEnd) copy(l *decodeLink, from, to int) {
	h, size := &l.head, e.table.geometry.ExtentBytes(int(l.head.heads))
	pages := l.reading.g.spec.Pages[h.index:][from:to]
	if e.Wrote != nil {
		e.Wrote(h.grant, pages)
	}
	first := int(h.head) - l.share.head + l.share.dHead
	for i, page := range pages {
		copy(e.memory[l.rank].Extent(int(h.layer), page, first, int(h.heads)), l.payload[(from+i)*size:][:size])
	}
}

// Grants is how many grants are open or have not quiesced.
func (e *DecodeEnd) Grants() int { return len(e.table.grants) }

// split takes a frame apart.
func split(frame []byte, toP bool) (h head, body []byte, sound bool, err error) {
	if len(frame) < headSize {
		return h, nil, false, errors.New("the frame is cut off")
	}
	if h, err = parseHead((*[headSize]byte)(frame), toP); err != nil {
		return h, nil, false, err
	}
	if body = frame[headSize:]; len(body) != int(h.size) {
		return h, nil, false, errors.New("the frame is cut off")
	}
	return h, body, crc32.Checksum(body, castagnoli) == h.sum, nil
}

// Frames cuts what a writer wrote in one go into frames. It is sound: our own.
func Frames(b []byte) (frames [][]byte) {
	for len(b) > 0 {
		n := headSize + int(uint32(b[4])|uint32(b[5])<<8|uint32(b[6])<<16|uint32(b[7])<<24)
		frames = append(frames, b[:n:n])
		b = b[n:]
	}
	return frames
}

// PrefillEnd is a Sender without goroutines, sockets and clock, see DecodeEnd.
//
//	Join, Leave                                        a link is up; it has gone
//	Open, LayerDone, Bind, First, CloseSend, Refuse    as Sender has them
//	Next, Done                                         what the link's writer writes now; it has been written
//	Busy                                               what it writes each second
//	Take                                               a frame arrives
//	Events                                             what the calls before have left
type PrefillEnd struct {
	rooms  *rooms
	memory []Memory
	links  map[uint64]*prefillLink
	peers  map[peerName]*peer
	last   uint64
}

type prefillLink struct {
	outlet
	name peerName
	pong bool
	rank int

	sending []kv.Page // of the DATA frame that is being written
	sent    head
}

type peerName struct {
	instance string
	dp       int
}

// peer numbers one D core while it has links.
type peer struct {
	number uint64
	links  int
}

// NewPrefillEnd makes the end of a P with one Memory for each TP rank.
func NewPrefillEnd(g kv.Geometry, memory []Memory, maxParked int) *PrefillEnd {
	return &PrefillEnd{rooms: newRooms(g, len(memory), maxParked), memory: memory,
		links: map[uint64]*prefillLink{}, peers: map[peerName]*peer{}}
}

// Join makes a link of our rank with rank peerRank of peerTP of the D that said hello.
func (e *PrefillEnd) Join(link uint64, rank int, hello Hello, peerTP, peerRank int) error {
	sh, ok := newShare(e.rooms.geometry, peerTP, peerRank, len(e.memory), rank)
	if !ok {
		return fmt.Errorf("decode rank %d of %d has no KV head of prefill rank %d of %d", peerRank, peerTP, rank, len(e.memory))
	}
	l := &prefillLink{name: peerName{hello.Instance, hello.DP}, rank: rank, outlet: outlet{dTP: peerTP, dRank: peerRank, pRank: rank,
		share: sh, window: newWindow(Credit), streams: map[uint64]*stream{}}}
	d := e.peers[l.name]
	if d == nil {
		e.last++
		d = &peer{number: e.last}
		e.peers[l.name] = d
	}
	d.links++
	l.peer = d.number
	e.links[link] = l
	return nil
}

// Leave: the link has gone, and so has a frame that was being written.
func (e *PrefillEnd) Leave(link uint64, cause string) {
	l := e.links[link]
	if l == nil {
		return
	}
	delete(e.links, link)
	if d := e.peers[l.name]; d.links > 1 {
		d.links--
	} else {
		delete(e.peers, l.name)
	}
	e.rooms.leave(&l.outlet, cause)
	e.rooms.done(&l.outlet)
}

// Open, LayerDone, Bind, First, CloseSend and Refuse are those of Sender.
func (e *PrefillEnd) Open(req uint64, o SendSpec)                  { e.rooms.open(req, o) }
func (e *PrefillEnd) LayerDone(req uint64, layer, tokens int)      { e.rooms.layerDone(req, layer, tokens) }
func (e *PrefillEnd) Bind(now time.Duration, r uint64, k GrantKey) { e.rooms.bind(now, r, k) }
func (e *PrefillEnd) First(req uint64, f First)                    { e.rooms.first(req, &f) }
func (e *PrefillEnd) CloseSend(req uint64, cause *Cause)           { e.rooms.closeSend(req, cause) }
func (e *PrefillEnd) Refuse(key GrantKey, cause *Cause)            { e.rooms.refuse(key, cause) }

// Take takes one frame. An error ends the link.
func (e *PrefillEnd) Take(link uint64, frame []byte) error {
	l := e.links[link]
	h, body, sound, err := split(frame, true)
	if err != nil {
		return err
	}
	got, err := e.rooms.take(&l.outlet, &h, body, sound)
	l.pong = l.pong || got.ping
	return err
}

// Next is what the link's writer writes now; empty: nothing. Done must follow
// when it is written, before the next Next.
func (e *PrefillEnd) Next(link uint64) []byte {
	l := e.links[link]
	if l == nil {
		return nil
	}
	var buf []byte
	if l.pong {
		l.pong = false
		buf = appendFrame(buf, kindPong, 0, nil)
	}
	buf, f := e.rooms.gather(&l.outlet, buf)
	if f.head.kind != kindData {
		return buf
	}
	at := len(buf) - headSize
	l.sending, l.sent = append(l.sending[:0], f.pages...), f.head
	buf = e.payload(buf, l)
	f.head.sum = crc32.Checksum(buf[at+headSize:], castagnoli)
	l.sent.sum = f.head.sum
	f.head.put((*[headSize]byte)(buf[at:]))
	return buf
}

// payload appends the pages of the link's DATA frame as they are now.
func (e *PrefillEnd) payload(buf []byte, l *prefillLink) []byte {
	first := int(l.sent.head) - l.share.head + l.share.pHead
	for _, page := range l.sending {
		buf = append(buf, e.memory[l.rank].Extent(int(l.sent.layer), page, first, int(l.sent.heads))...)
	}
	return buf
}

// Done: what Next gave has been written. It is intact when nobody has written
// the pages meanwhile: they are pinned.
func (e *PrefillEnd) Done(link uint64) (intact bool) {
	l := e.links[link]
	if l == nil {
		return true
	}
	intact = len(l.sending) == 0 || crc32.Checksum(e.payload(nil, l), castagnoli) == l.sent.sum
	l.sending = l.sending[:0]
	e.rooms.done(&l.outlet)
	return intact
}

// Busy is what the link's writer writes each second.
func (e *PrefillEnd) Busy(link uint64) []byte {
	l := e.links[link]
	if l == nil {
		return nil
	}
	grants := e.rooms.busy(&l.outlet, nil)
	if len(grants) == 0 {
		return nil
	}
	return appendFrame(nil, kindBusy, 0, func(b []byte) []byte { return appendGrants(b, grants) })
}

// Events are the news since the last call.
func (e *PrefillEnd) Events() []SenderEvent {
	evs := slices.Clone(e.rooms.events)
	e.rooms.events, e.rooms.wake = e.rooms.events[:0], e.rooms.wake[:0]
	return evs
}

// Rooms is how many rooms and sends P keeps.
func (e *PrefillEnd) Rooms() (rooms, sends int) { return len(e.rooms.rooms), len(e.rooms.sends) }

// Ping is what D's writer writes each second.
func Ping() []byte { return appendFrame(nil, kindPing, 0, nil) }
