package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// ReceiverConfig is what a Receiver needs to know. Zero takes the default in
// brackets.
type ReceiverConfig struct {
	Geometry     kv.Geometry
	Memory       []Memory // one for each local TP rank
	Hello        Hello
	Token        func() string // presented to P, asked for at each try; nil: none
	MaxGrants    int           // grants open at once [4096]
	MaxCredit    int           // bytes of payload in flight on one link [8 MiB]; 2 MiB to 1 GiB
	PingInterval time.Duration // [1s]
	Silence      time.Duration // a link that says nothing for so long is closed [10s]
	WriteTimeout time.Duration // of one frame [10s]
	Events       func(Event)   // must not block; called in order, with no lock held
	Metrics      Metrics
	// Now is the time since process start.
	Now func() time.Duration
	// Dial connects; nil: TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// Metrics are hooks; each may be nil. They are called from link goroutines
// and must not block.
type Metrics struct {
	Bytes    func(n int)           // payload bytes verified (D), or written (P)
	Latency  func(d time.Duration) // D: from Open to Landed. P: from Bind to Received
	Rejected func(cause string)    // a frame was rejected; one of a few fixed words
}

func (m *Metrics) bytes(n int) {
	if m.Bytes != nil {
		m.Bytes(n)
	}
}

func (m *Metrics) latency(d time.Duration) {
	if m.Latency != nil {
		m.Latency(d)
	}
}

func (m *Metrics) rejected(why string) {
	if m.Rejected != nil {
		m.Rejected(why)
	}
}

// Receiver is D's end of all its links. One for each decode core. Each link
// has two goroutines, a reader and a writer, which end by CloseLink, Close or
// a fault; Close waits for them.
type Receiver struct {
	cfg ReceiverConfig
	wg  sync.WaitGroup

	mu     sync.Mutex // guards all below, the lanes of links and their mailboxes
	table  *table
	links  map[uint64]*link
	out    outbox[Event]
	closed bool
}

// link is a lane with its connection.
type link struct {
	lane
	*wire
	r      *Receiver
	intake intake // the reader's
	mailbox
	meant bool // closed by us: no LinkEnded
}

// NewReceiver checks the configuration.
func NewReceiver(cfg ReceiverConfig) (*Receiver, error) {
	if cfg.MaxGrants == 0 {
		cfg.MaxGrants = 4096
	}
	if cfg.MaxCredit == 0 {
		cfg.MaxCredit = 8 << 20
	}
	defaultTo(&cfg.PingInterval, time.Second)
	defaultTo(&cfg.Silence, 10*time.Second)
	defaultTo(&cfg.WriteTimeout, 10*time.Second)
	if cfg.Dial == nil {
		var d net.Dialer
		cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return d.DialContext(ctx, "tcp", addr) }
	}
	if err := checkGeometry(cfg.Geometry, len(cfg.Memory)); err != nil {
		return nil, fmt.Errorf("kv transfer: %w", err)
	}
	if cfg.MaxCredit < minCredit || cfg.MaxCredit > maxCredit {
		return nil, fmt.Errorf("kv transfer: credit is %d bytes, it must be %d to %d", cfg.MaxCredit, minCredit, maxCredit)
	}
	if err := checkNames(cfg.Hello.Instance, cfg.Hello.Fingerprint, cfg.Hello.KVDType); err != nil {
		return nil, err
	}
	return &Receiver{cfg: cfg, table: newTable(cfg.Geometry, cfg.MaxGrants), links: map[uint64]*link{}}, nil
}

func defaultTo(d *time.Duration, v time.Duration) {
	if *d == 0 {
		*d = v
	}
}

func checkNames(instance string, others ...string) error {
	if instance == "" {
		return errors.New("kv transfer: the instance id is empty")
	}
	for _, s := range append(others, instance) {
		if len(s) > maxName {
			return fmt.Errorf("kv transfer: %.20q… has %d bytes, at most %d can be sent", s, len(s), maxName)
		}
	}
	return nil
}

// Dial makes one try at a link: connect, HELLO, WELCOME, bounded by ctx. On
// success the link lives until CloseLink, Close or a fault. A *RefusedError is
// a named no of either side; a *ReplacedError (with the Welcome) another
// instance than expected; IsLocal a fault of our own; all else is the peer's.
func (r *Receiver) Dial(ctx context.Context, s LinkSpec) (Welcome, error) {
	if s.LocalRank < 0 || s.LocalRank >= len(r.cfg.Memory) {
		panic(fmt.Sprintf("transfer: link for rank %d of %d", s.LocalRank, len(r.cfg.Memory)))
	}
	conn, err := r.cfg.Dial(ctx, s.Addr)
	if err != nil {
		return Welcome{}, err
	}
	w := newWire(conn, false, r.cfg.Silence, r.cfg.WriteTimeout)
	stop := context.AfterFunc(ctx, func() { w.kill(context.Cause(ctx)) })
	m, sh, err := r.shake(w, s)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = r.join(&link{r: r, wire: w, intake: newIntake(r.cfg.MaxCredit), lane: lane{link: s.Link, rank: s.LocalRank,
			share: sh, addr: s.Addr, peer: m.Instance, pairs: pairs(len(r.cfg.Memory), m.TP)}})
	}
	if err != nil {
		stop()
		conn.Close()
	}
	return m.Welcome, err
}

// shake says HELLO and judges the answer.
func (r *Receiver) shake(w *wire, s LinkSpec) (m welcome, sh share, err error) {
	tp, token := len(r.cfg.Memory), ""
	if r.cfg.Token != nil {
		token = r.cfg.Token()
	}
	if len(token) > maxToken {
		return m, sh, fmt.Errorf("our token has %d bytes, at most %d can be sent", len(token), maxToken)
	}
	us := hello{Hello: r.cfg.Hello, token: token, tp: tp, rank: s.LocalRank, dp: s.DP, cp: s.CP, tpr: s.TP, pp: s.PP,
		expect: s.Instance, geometry: r.cfg.Geometry, credit: uint64(r.cfg.MaxCredit)}
	if err = w.write(appendFrame(nil, kindHello, 0, us.append)); err != nil {
		return
	}
	h, err := r.answer(w, s.Addr)
	if err != nil {
		return
	}
	body, sound, err := w.control(&h)
	if err == nil && !sound {
		err = breachf(whySum, "the checksum of %v is wrong", h.kind)
	}
	if err != nil {
		return
	}
	if h.kind == kindRefuse {
		var no refuse
		if err = no.parse(body); err == nil {
			err = &RefusedError{no.code, fmt.Sprintf("prefill worker at %s refused the link: %s", s.Addr, no.text)}
		}
		return
	}
	if err = m.parse(body); err != nil {
		return
	}
	if s.Instance != "" && m.Instance != s.Instance {
		return m, sh, &ReplacedError{s.Instance, m.Welcome}
	}
	sh, err = r.judge(&m, s)
	return m, sh, err
}

// answer reads the head of the first frame that P sends.
func (r *Receiver) answer(w *wire, addr string) (head, error) {
	if err := w.armRead(w.silence); err != nil {
		return head{}, err
	}
	if b, err := w.br.Peek(2); err == nil && string(b) != "KV" {
		return head{}, fmt.Errorf("%s does not speak KV transfer: it answers with %s", addr, foreign(b))
	}
	h, err := w.next()
	if v, other := foreignVersion(&w.in); other {
		return h, &RefusedError{RefuseMismatch,
			fmt.Sprintf("protocol version differs: prefill worker at %s has %d, decode has %d", addr, v, version)}
	}
	if err == nil && h.kind != kindWelcome && h.kind != kindRefuse {
		err = breachf(whyOrder, "%v in answer to HELLO", h.kind)
	}
	return h, err
}

// judge compares what P says of itself with what we are and wanted.
func (r *Receiver) judge(m *welcome, s LinkSpec) (share, error) {
	no := func(code, format string, args ...any) (share, error) {
		return share{}, &RefusedError{code, fmt.Sprintf("prefill worker at %s: ", s.Addr) + fmt.Sprintf(format, args...)}
	}
	us := facts{r.cfg.Hello.Fingerprint, r.cfg.Hello.KVDType, r.cfg.Geometry}
	if text, bad := differ(facts{m.Fingerprint, m.KVDType, m.geometry}, us); bad {
		return no(RefuseMismatch, "%s", text)
	}
	if err := checkGeometry(r.cfg.Geometry, m.TP); err != nil {
		return no(RefuseMismatch, "%v", err)
	}
	if m.rank != s.TP || m.DPRank != s.DP || s.CP != 0 || s.PP != 0 {
		return no(RefuseRank, "it is dp %d, tp %d; wanted is dp %d, cp %d, tp %d, pp %d",
			m.DPRank, m.rank, s.DP, s.CP, s.TP, s.PP)
	}
	sh, ok := newShare(r.cfg.Geometry, len(r.cfg.Memory), s.LocalRank, m.TP, m.rank)
	if !ok {
		return no(RefuseRank, "its rank %d of %d has no KV head of our rank %d of %d",
			m.rank, m.TP, s.LocalRank, len(r.cfg.Memory))
	}
	return sh, nil
}

// IsLocal tells whether a Dial failed by our own fault or will (no descriptor,
// no port, our own cancellation) and says nothing about the peer.
func IsLocal(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.EADDRNOTAVAIL) ||
		errors.Is(err, context.Canceled) || errors.Is(err, errClosed)
}

var errClosed = errors.New("the receiver is closed")

func (r *Receiver) join(l *link) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errClosed
	}
	if r.links[l.link] != nil {
		panic(fmt.Sprintf("transfer: link %d dialled twice", l.link))
	}
	r.links[l.link] = l
	r.table.join(&l.lane)
	r.wg.Go(l.read)
	r.wg.Go(l.write)
	return nil
}

// settle carries out what the table ordered. It is called with mu held and releases it.
func (r *Receiver) settle() {
	t := r.table
	for _, o := range t.orders {
		r.links[o.l.link].post(o)
	}
	for _, l := range t.hurry {
		if k := r.links[l.link]; k != nil {
			k.hurry(hurryTime)
		}
	}
	r.out.queue = append(r.out.queue, t.events...)
	clear(t.orders)
	clear(t.events)
	t.orders, t.hurry, t.events = t.orders[:0], t.hurry[:0], t.events[:0]
	r.out.deliver(&r.mu, r.cfg.Events)
}

// Open opens pages to P: entries on every link first, then the frames. It never blocks.
func (r *Receiver) Open(g GrantSpec) {
	r.mu.Lock()
	r.table.open(r.cfg.Now(), g)
	r.settle()
}

// Revoke takes a grant back. It never blocks; Quiesced follows.
func (r *Receiver) Revoke(grant uint64) {
	r.mu.Lock()
	r.table.revoke(grant)
	r.settle()
}

// Notice tells P that a room which was never granted has ended, or that it
// waits here for pages. Best effort; never blocks.
func (r *Receiver) Notice(link uint64, room int64, waits bool) {
	r.mu.Lock()
	if l := r.links[link]; l != nil && l.notices < maxNotices {
		l.post(order{kind: noticeKind(waits), l: &l.lane, room: room})
	}
	r.settle()
}

// CloseLink ends a link. It never blocks. Grants still open on it fail.
func (r *Receiver) CloseLink(link uint64, cause string) {
	r.mu.Lock()
	if l := r.links[link]; l != nil {
		l.meant = true
		l.kill(errors.New(cause))
	}
	r.settle()
}

// Close ends all links and waits for their goroutines.
func (r *Receiver) Close() {
	r.mu.Lock()
	r.closed = true
	for _, l := range r.links {
		l.meant = true
		l.kill(errClosed)
	}
	r.settle()
	r.wg.Wait()
}

// post puts a frame into the mailbox and wakes the writer.
func (l *link) post(o order) {
	if !l.mailbox.post(o, l.r.cfg.MaxGrants) {
		l.kill(fmt.Errorf("%d frames wait to be sent", len(l.queue)))
		return
	}
	l.poke()
}

// write is the writer's goroutine. It closes the connection at its end.
func (l *link) write() {
	defer l.conn.Close()
	ping := time.NewTicker(l.r.cfg.PingInterval)
	defer ping.Stop()
	var buf []byte
	var batch []order
	for {
		for {
			var credit uint64
			batch, credit = l.take(batch[:0])
			buf = encode(buf[:0], batch, credit, len(l.r.cfg.Memory))
			if len(buf) == 0 {
				break
			}
			if err := l.wire.write(buf); err != nil {
				l.kill(err)
			}
		}
		if l.cause() != nil {
			return
		}
		select {
		case <-l.wake:
		case <-ping.C:
			if err := l.wire.write(appendFrame(buf[:0], kindPing, 0, nil)); err != nil {
				l.kill(err)
			}
		}
	}
}

// take empties the mailbox, as far as one lump goes.
func (l *link) take(batch []order) ([]order, uint64) {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	if l.cause() != nil {
		return batch, 0
	}
	return l.mailbox.take(batch)
}

// read is the reader's goroutine: the only one that writes into pages.
func (l *link) read() {
	err := l.frames()
	if b := (*breach)(nil); errors.As(err, &b) {
		l.r.cfg.Metrics.rejected(b.why)
	}
	l.kill(err)
	r, cause := l.r, l.cause().Error() // made without the lock: an error may be anything
	r.mu.Lock()
	delete(r.links, l.link)
	if !l.meant {
		r.table.events = append(r.table.events, &LinkEnded{l.link, cause})
	}
	r.table.leave(&l.lane, cause)
	r.settle()
}

func (l *link) frames() error {
	for {
		h, err := l.next()
		if err != nil {
			return err
		}
		if h.kind == kindData {
			err = l.data(&h)
		} else {
			err = l.other(&h)
		}
		if err != nil {
			return err
		}
	}
}

// data reads the payload of a DATA frame straight into its pages.
func (l *link) data(h *head) error {
	r, size := l.r, int(h.size)
	r.mu.Lock()
	now := r.cfg.Now()
	r.table.hearLink(now, &l.lane)
	p, err := r.table.begin(now, &l.lane, h)
	r.settle()
	switch {
	case err != nil:
		return err
	case p == nil:
		r.cfg.Metrics.rejected(whyUnknown)
		err = l.skip(size)
	default:
		err = l.pages(p, h)
	}
	if err != nil {
		return err
	}
	if credit := l.intake.read(size); credit > 0 {
		r.mu.Lock()
		l.credit += credit
		r.mu.Unlock()
		l.poke()
	}
	return nil
}

// pages is the part of data between the table's begin and end.
func (l *link) pages(p *part, h *head) error {
	r := l.r
	mem, first := r.cfg.Memory[l.rank], int(h.head)-l.share.head+l.share.dHead
	l.into = l.into[:0]
	for _, page := range p.g.spec.Pages[h.index : h.index+h.count] {
		b := mem.Extent(int(h.layer), page, first, int(h.heads))
		if len(b) != r.cfg.Geometry.ExtentBytes(int(h.heads)) {
			panic(fmt.Sprintf("transfer: an extent of %d bytes for %d heads", len(b), h.heads))
		}
		l.into = append(l.into, b)
	}
	sum, err := l.spread()
	if err != nil {
		return err // the reader's exit quiesces the grant
	}
	sound := sum == h.sum
	if sound {
		r.cfg.Metrics.bytes(int(h.size))
	} else {
		r.cfg.Metrics.rejected(whySum)
	}
	r.mu.Lock()
	r.table.end(p, h, sound)
	r.settle()
	return nil
}

// other takes every frame but DATA.
func (l *link) other(h *head) error {
	body, sound, err := l.control(h)
	if err != nil {
		return err
	}
	r := l.r
	r.mu.Lock()
	now := r.cfg.Now()
	landed, rejected, err := r.table.take(now, &l.lane, h, body, sound)
	r.settle()
	if rejected != "" {
		r.cfg.Metrics.rejected(rejected)
	}
	if landed != nil {
		r.cfg.Metrics.latency(now - landed.opened)
	}
	return err
}
