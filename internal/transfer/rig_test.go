package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/metronome-serve/metronome/internal/kv"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(os.Exit))
}

// arena is the KV memory of all ranks of one side.
type arena struct {
	g     kv.Geometry
	tp    int
	pages int
	ranks [][]byte
}

func newArena(g kv.Geometry, tp, pages int) *arena {
	a := &arena{g: g, tp: tp, pages: pages}
	for range tp {
		a.ranks = append(a.ranks, make([]byte, g.Layers*pages*g.ExtentBytes(g.Heads/tp)))
	}
	return a
}

type rankMemory struct {
	a    *arena
	rank int
}

func (a *arena) memory() (m []Memory) {
	for r := range a.tp {
		m = append(m, rankMemory{a, r})
	}
	return m
}

func (m rankMemory) Extent(layer int, page kv.Page, head, heads int) []byte {
	a := m.a
	one := a.g.ExtentBytes(1)
	local := a.g.Heads / a.tp
	if head < 0 || heads < 1 || head+heads > local || int(page) >= a.pages || layer >= a.g.Layers {
		panic(fmt.Sprintf("extent of layer %d, page %d, heads %d+%d", layer, page, head, heads))
	}
	at := ((layer*a.pages+int(page))*local + head) * one
	return a.ranks[m.rank][at : at+heads*one : at+heads*one]
}

// head is one head of one page in one layer, whichever rank holds it.
func (a *arena) head(layer int, page kv.Page, head int) []byte {
	local := a.g.Heads / a.tp
	return rankMemory{a, head / local}.Extent(layer, page, head%local, 1)
}

// each visits every head extent of the pages.
func (a *arena) each(pages []kv.Page, f func(layer, i, head int, b []byte)) {
	for layer := range a.g.Layers {
		for i, p := range pages {
			for h := range a.g.Heads {
				f(layer, i, h, a.head(layer, p, h))
			}
		}
	}
}

const poison = 0xDB

func (a *arena) poison(pages []kv.Page) {
	a.each(pages, func(_, _, _ int, b []byte) {
		for i := range b {
			b[i] = poison
		}
	})
}

func (a *arena) poisoned(pages []kv.Page) (ok bool) {
	ok = true
	a.each(pages, func(_, _, _ int, b []byte) {
		for i := range b {
			ok = ok && b[i] == poison
		}
	})
	return ok
}

// log collects events; E is Event or SenderEvent.
type log[E any] struct {
	mu   sync.Mutex
	all  []E
	hook func(E)
}

func (l *log[E]) add(e E) {
	l.mu.Lock()
	l.all = append(l.all, e)
	hook := l.hook
	l.mu.Unlock()
	if hook != nil {
		hook(e)
	}
}

// on sets what is called with every further event.
func (l *log[E]) on(hook func(E)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hook = hook
}

// pick gives the events of one type.
func pick[T, E any](l *log[E]) (out []T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.all {
		if t, ok := any(e).(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// counts of rejected frames.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[why]++
}

func (c *counts) of(why string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[why]
}

// rig is one P and one D over in-memory connections.
type rig struct {
	t          *testing.T
	g          kv.Geometry
	dn, pn     int
	pa, da     *arena
	s          *Sender
	r          *Receiver
	pLog       log[SenderEvent]
	dLog       log[Event]
	pBad, dBad counts
	lns        []*listener
	links      []uint64
	ends       map[uint64]*conn // D's end of each link
	stop       context.CancelFunc
	wg         sync.WaitGroup
	last       *conn
	started    time.Time
	buffer     int
}

var small = kv.Geometry{Layers: 3, Heads: 4, TokenBytes: 4, PageSize: 4}

type options struct {
	g        kv.Geometry
	dn, pn   int
	pages    int
	sender   func(*SenderConfig)
	receiver func(*ReceiverConfig)
	buffer   int // of each connection and direction
	unlinked bool
}

func newRig(t *testing.T, o options) *rig {
	if o.g == (kv.Geometry{}) {
		o.g = small
	}
	o.dn, o.pn = max(o.dn, 1), max(o.pn, 1)
	if o.pages == 0 {
		o.pages = 64
	}
	if o.buffer == 0 {
		o.buffer = 64 << 10
	}
	r := &rig{t: t, g: o.g, dn: o.dn, pn: o.pn, pa: newArena(o.g, o.pn, o.pages), da: newArena(o.g, o.dn, o.pages),
		ends: map[uint64]*conn{}, started: time.Now(), buffer: o.buffer}
	now := func() time.Duration { return time.Since(r.started) }
	sc := SenderConfig{Geometry: o.g, Memory: r.pa.memory(), Now: now, Events: r.pLog.add,
		Welcome: Welcome{Instance: "p1", Fingerprint: "fp", DP: 1, KVDType: "f16"}, Metrics: Metrics{Rejected: r.pBad.add}}
	rc := ReceiverConfig{Geometry: o.g, Memory: r.da.memory(), Now: now, Events: r.dLog.add, Dial: r.dial,
		Hello: Hello{Instance: "d1", Fingerprint: "fp", KVDType: "f16"}, Metrics: Metrics{Rejected: r.dBad.add}}
	if o.sender != nil {
		o.sender(&sc)
	}
	if o.receiver != nil {
		o.receiver(&rc)
	}
	var err error
	if r.s, err = NewSender(sc); err != nil {
		t.Fatal(err)
	}
	if r.r, err = NewReceiver(rc); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	for rank := range o.pn {
		ln := newListener()
		r.lns = append(r.lns, ln)
		r.wg.Go(func() { r.s.Serve(ctx, ln, rank) })
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, m := range r.pa.ranks {
		for i := 0; i+8 <= len(m); i += 8 {
			binary.LittleEndian.PutUint64(m[i:], rng.Uint64())
		}
	}
	if !o.unlinked {
		r.link()
	}
	return r
}

// taps, when set, is called with D's end of every new connection.
var taps func(d *conn)

// dial connects to "p<rank>".
func (r *rig) dial(ctx context.Context, addr string) (net.Conn, error) {
	var rank int
	fmt.Sscanf(addr, "p%d", &rank)
	d, p := newConns(r.buffer)
	r.last = d
	if taps != nil {
		taps(d)
	}
	r.lns[rank].conns <- p
	return d, nil
}

// link dials every pair of ranks.
func (r *rig) link() {
	r.links = nil
	for p := range r.pn {
		for d := range r.dn {
			if _, ok := newShare(r.g, r.dn, d, r.pn, p); ok {
				r.links = append(r.links, r.dialOne(d, p))
			}
		}
	}
}

var lastLink uint64

func (r *rig) dialOne(d, p int) uint64 {
	lastLink++
	w, err := r.r.Dial(context.Background(), LinkSpec{Link: lastLink, Addr: fmt.Sprintf("p%d", p), LocalRank: d, TP: p, Instance: "p1"})
	if err != nil {
		r.t.Fatal(err)
	}
	if w.TP != r.pn || w.Instance != "p1" || w.PageSize != r.g.PageSize {
		r.t.Fatalf("welcome %+v", w)
	}
	r.ends[lastLink] = r.last
	return lastLink
}

// close stops both sides, and checks that nothing is left.
func (r *rig) close() {
	r.t.Helper()
	r.r.Close()
	r.stop()
	r.wg.Wait()
	synctest.Wait()
	if n := len(r.r.table.grants); n != 0 {
		r.t.Errorf("%d grants left at D", n)
	}
	t := r.s.rooms
	if len(t.rooms)+len(t.owners)+len(r.s.ports)+len(r.s.peers)+r.s.strangers != 0 {
		r.t.Errorf("left at P: %d rooms, %d owners, %d ports, %d peers, %d strangers",
			len(t.rooms), len(t.owners), len(r.s.ports), len(r.s.peers), r.s.strangers)
	}
}

// pagesFrom is n page ids in a scattered order.
func pagesFrom(first, n int) (p []kv.Page) {
	for i := range n {
		p = append(p, kv.Page(first+(i*7)%n))
	}
	if n%7 == 0 {
		for i := range p {
			p[i] = kv.Page(first + n - 1 - i)
		}
	}
	return p
}

// compute lets P's engine finish the prompt chunk by chunk, layer by layer.
func (r *rig) compute(req uint64, from, tokens, chunk int) {
	for from < tokens {
		from = min(from+chunk, tokens)
		for layer := range r.g.Layers {
			r.s.LayerDone(req, layer, from)
		}
	}
}

// same tells whether D holds what P computed.
func (r *rig) same(ppages, dpages []kv.Page) bool {
	ok := true
	r.da.each(dpages, func(layer, i, head int, b []byte) {
		ok = ok && bytes.Equal(b, r.pa.head(layer, ppages[i], head))
	})
	return ok
}

// room is a request on both sides, for tests with several.
type testRoom struct {
	id     uint64 // grant, room and request
	tokens int
	pp, dp []kv.Page
}

// serve lets P's core answer by itself: rooms are bound when they are granted
// and closed when D takes them back. Requests have the number of their room.
func (r *rig) serve() {
	r.pLog.on(func(e SenderEvent) {
		switch e := e.(type) {
		case *Granted:
			r.bind(uint64(e.Room), e.Key)
		case *Closed:
			if r.mine(e.Room) {
				r.s.CloseSend(uint64(e.Room), nil)
			}
		}
	})
}

// bind is Bind for a request that the test may close meanwhile.
func (r *rig) bind(req uint64, key GrantKey) {
	r.s.mu.Lock()
	if s := r.s.rooms.sends[req]; s != nil && !s.over {
		r.s.rooms.bind(r.s.cfg.Now(), req, key)
	}
	r.s.settle()
}

// mine tells whether a room has a request at P.
func (r *rig) mine(room int64) bool {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	s := r.s.rooms.sends[uint64(room)]
	return s != nil && !s.over
}

// writing is the grant that the first link is half way through a frame of, or 0.
func (r *rig) writing() uint64 {
	r.r.mu.Lock()
	defer r.r.mu.Unlock()
	if g := r.r.links[r.links[0]].writes; g != nil {
		return g.spec.Grant
	}
	return 0
}

// bound tells whether a request is joined to a room.
func (r *rig) bound(req uint64) bool {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return r.s.rooms.sends[req].room != nil
}

// sends and ports count what P holds.
func (r *rig) sends() int {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return len(r.s.rooms.sends)
}

func (r *rig) ports() int {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	return len(r.s.ports)
}

func (r *rig) room(id uint64, tokens, firstPage int) *testRoom {
	n := r.g.PagesFor(tokens)
	m := &testRoom{id: id, tokens: tokens, pp: pagesFrom(firstPage, n), dp: pagesFrom(firstPage+1, n)}
	r.s.Open(id, SendSpec{Room: int64(id), Tokens: tokens, Pages: m.pp})
	return m
}

func (r *rig) grant(m *testRoom) {
	r.r.Open(GrantSpec{Grant: m.id, Room: int64(m.id), Links: r.links, Tokens: m.tokens, Pages: m.dp})
}

// outcome counts D's events of one grant.
func (r *rig) outcome(grant uint64) (landed, failed, quiesced int) {
	for _, e := range pick[*Landed](&r.dLog) {
		landed += equal(e.Grant, grant)
	}
	for _, e := range pick[*Failed](&r.dLog) {
		failed += equal(e.Grant, grant)
	}
	for _, e := range pick[*Quiesced](&r.dLog) {
		quiesced += equal(e.Grant, grant)
	}
	return
}

func equal(a, b uint64) int {
	if a == b {
		return 1
	}
	return 0
}

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// seal sets the checksums of a frame, the payload's only if it was 0.
func seal(b []byte) {
	le := binary.LittleEndian
	if le.Uint32(b[32:]) == 0 {
		le.PutUint32(b[32:], crc32.Checksum(b[headSize:], castagnoli))
	}
	le.PutUint32(b[36:], crc32.Checksum(b[:36], castagnoli))
}
