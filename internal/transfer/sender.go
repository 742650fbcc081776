package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// SenderConfig is what a Sender needs to know. Zero takes the default in
// brackets.
type SenderConfig struct {
	Geometry     kv.Geometry
	Memory       []Memory                // one for each local TP rank
	Welcome      Welcome                 // TP and PageSize are taken from the above
	Tokens       func(token string) bool // compares in constant time; nil: every token is good
	MaxParked    int                     // rooms a link may park [4096]
	MaxStrangers int                     // connections that have not said HELLO yet [256]
	BusyInterval time.Duration           // [1s]
	Silence      time.Duration           // a link that says nothing for so long is closed [10s]
	WriteTimeout time.Duration           // of one frame [10s]
	HelloTimeout time.Duration           // from accept to HELLO [5s]
	Events       func(SenderEvent)       // must not block; called in order, with no lock held
	Metrics      Metrics
	// Now is the time since process start.
	Now func() time.Duration
}

// Sender is P's end of all its links. One for each prefill core (DP rank).
// Each link has two goroutines, a reader and a writer; Serve waits for those
// of its listener.
type Sender struct {
	cfg SenderConfig

	mu        sync.Mutex // guards all below and the outlets of ports
	rooms     *rooms
	ports     map[*outlet]*port
	peers     map[peerName]*peer
	lastPeer  uint64
	strangers int
	out       outbox[SenderEvent]
}

// port is an outlet with its connection.
type port struct {
	outlet
	*wire
	s      *Sender
	mem    Memory
	name   peerName
	pong   bool     // PONG is due
	grants []uint64 // the writer's, for BUSY
}

// NewSender checks the configuration.
func NewSender(cfg SenderConfig) (*Sender, error) {
	if cfg.MaxParked == 0 {
		cfg.MaxParked = 4096
	}
	if cfg.MaxStrangers == 0 {
		cfg.MaxStrangers = 256
	}
	defaultTo(&cfg.BusyInterval, time.Second)
	defaultTo(&cfg.Silence, 10*time.Second)
	defaultTo(&cfg.WriteTimeout, 10*time.Second)
	defaultTo(&cfg.HelloTimeout, 5*time.Second)
	w := &cfg.Welcome
	w.TP, w.PageSize = len(cfg.Memory), cfg.Geometry.PageSize
	if err := checkGeometry(cfg.Geometry, w.TP); err != nil {
		return nil, fmt.Errorf("kv transfer: %w", err)
	}
	if err := checkNames(w.Instance, w.Fingerprint, w.KVDType); err != nil {
		return nil, err
	}
	if w.DP < 1 || w.DPRank < 0 || w.DPRank >= w.DP {
		return nil, fmt.Errorf("kv transfer: dp rank %d of %d", w.DPRank, w.DP)
	}
	return &Sender{cfg: cfg, rooms: newRooms(cfg.Geometry, w.TP, cfg.MaxParked),
		ports: map[*outlet]*port{}, peers: map[peerName]*peer{}}, nil
}

// settle carries out what rooms left. It is called with mu held and releases it.
func (s *Sender) settle() {
	t := s.rooms
	for _, o := range t.wake {
		if p := s.ports[o]; p != nil {
			p.poke()
		}
	}
	s.out.queue = append(s.out.queue, t.events...)
	clear(t.events)
	t.wake, t.events = t.wake[:0], t.events[:0]
	s.out.deliver(&s.mu, s.cfg.Events)
}

// Open tells where a request's pages are. Again with the same req, before
// Bind: the request restarted with other pages. Like all the following, it never blocks.
func (s *Sender) Open(req uint64, o SendSpec) {
	s.mu.Lock()
	s.rooms.open(req, o)
	s.settle()
}

// LayerDone says that the rows [0, tokens) of one layer are final. Whole pages
// go out then; the last page of the prompt goes with its last row. Rows of it
// past the prompt are sent as they lie there: D's attention never reads
// positions that D has not written itself.
func (s *Sender) LayerDone(req uint64, layer, tokens int) {
	s.mu.Lock()
	s.rooms.layerDone(req, layer, tokens)
	s.settle()
}

// Bind joins an open send to a grant: final pages go out from now on.
func (s *Sender) Bind(req uint64, key GrantKey) {
	s.mu.Lock()
	s.rooms.bind(s.cfg.Now(), req, key)
	s.settle()
}

// First gives the first token; with it the request is computed.
func (s *Sender) First(req uint64, f First) {
	s.mu.Lock()
	s.rooms.first(req, &f)
	s.settle()
}

// CloseSend ends a send. cause nil: D asked for it. SendQuiesced follows.
func (s *Sender) CloseSend(req uint64, cause *Cause) {
	s.mu.Lock()
	s.rooms.closeSend(req, cause)
	s.settle()
}

// Refuse answers a room that no request will serve.
func (s *Sender) Refuse(key GrantKey, cause *Cause) {
	s.mu.Lock()
	s.rooms.refuse(key, cause)
	s.settle()
}

// Serve accepts links for one TP rank until ctx ends, then closes the
// listener and its links and waits for their goroutines.
func (s *Sender) Serve(ctx context.Context, ln net.Listener, rank int) error {
	if rank < 0 || rank >= len(s.cfg.Memory) {
		panic(fmt.Sprintf("transfer: listener for rank %d of %d", rank, len(s.cfg.Memory)))
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel() // a listener that fails takes its links with it: nobody new could come
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	defer ln.Close()
	pause := time.Duration(0)
	for {
		conn, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // no descriptor, or the peer was gone already: both pass
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			continue
		}
		pause = 0
		if !s.stranger(1) {
			s.cfg.Metrics.rejected(whyFull)
			conn.Close()
			continue
		}
		wg.Go(func() { s.handle(ctx, conn, rank) })
	}
}

// stranger counts connections that have not said HELLO; false: one too many.
func (s *Sender) stranger(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > 0 && s.strangers >= s.cfg.MaxStrangers {
		return false
	}
	s.strangers += n
	return true
}

// handle is the goroutine of one connection: the handshake, then the reader.
func (s *Sender) handle(ctx context.Context, conn net.Conn, rank int) {
	w := newWire(conn, true, s.cfg.Silence, s.cfg.WriteTimeout)
	defer context.AfterFunc(ctx, func() { w.kill(errors.New("the prefill worker stops")) })()
	timer := time.AfterFunc(s.cfg.HelloTimeout, func() { w.kill(errors.New("no HELLO in time")) })
	p, why := s.greet(w, rank)
	s.stranger(-1)
	if !timer.Stop() || p == nil {
		if why != "" {
			s.cfg.Metrics.rejected(why)
		}
		w.part()
		return
	}
	s.join(p)
	writer := make(chan struct{})
	go func() {
		defer close(writer)
		p.write()
	}()
	err := p.frames()
	if b := (*breach)(nil); errors.As(err, &b) {
		s.cfg.Metrics.rejected(b.why)
	}
	p.kill(err)
	<-writer // at most as long as a dead connection takes to fail a write: at once
	s.leave(p)
}

// part says goodbye to a connection whose last frame has been written: what
// still comes is read for a moment, lest the reset of an early close destroys it.
func (w *wire) part() {
	defer w.conn.Close()
	if c, ok := w.conn.(interface{ CloseWrite() error }); ok && w.cause() == nil && c.CloseWrite() == nil {
		if w.armRead(time.Second) == nil {
			w.skip(lump)
		}
	}
}

// greet reads HELLO and answers it. No port: the connection is to be closed;
// why is the metric's word.
func (s *Sender) greet(w *wire, rank int) (p *port, why string) {
	m, no := s.hello(w)
	if no == nil && m != nil {
		p, no = s.admit(w, m, rank)
	}
	switch {
	case m == nil && no == nil: // nothing to answer
		return nil, ""
	case no != nil:
		w.write(appendFrame(nil, kindRefuse, 0, (&refuse{no.Code, no.Text}).append))
		return nil, no.Code
	}
	us := welcome{Welcome: s.cfg.Welcome, rank: rank, geometry: s.cfg.Geometry}
	if w.write(appendFrame(nil, kindWelcome, 0, us.append)) != nil || p == nil {
		return nil, ""
	}
	return p, ""
}

// hello reads the first frame, or tells why there is none.
func (s *Sender) hello(w *wire) (*hello, *RefusedError) {
	if err := w.armRead(w.silence); err != nil {
		return nil, nil
	}
	b, err := w.br.Peek(2)
	if err != nil {
		return nil, nil
	}
	if string(b) != "KV" {
		text := "this is a metronome KV transfer port; it was sent " + foreign(b)
		if isUpper(b[0]) && isUpper(b[1]) {
			w.write(fmt.Appendf(nil, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s\n", len(text)+1, text))
			return nil, nil
		}
		return nil, &RefusedError{RefuseForeign, text}
	}
	h, err := w.next()
	if v, other := foreignVersion(&w.in); other {
		return nil, &RefusedError{RefuseMismatch, fmt.Sprintf("protocol version differs: prefill has %d, decode has %d", version, v)}
	}
	if err == nil && h.kind != kindHello {
		err = breachf(whyOrder, "%v before HELLO", h.kind)
	}
	m := new(hello)
	if err == nil {
		var body []byte
		var sound bool
		if body, sound, err = w.control(&h); err == nil && !sound {
			err = breachf(whySum, "the checksum of HELLO is wrong")
		}
		if err == nil {
			err = m.parse(body)
		}
	}
	if b := (*breach)(nil); errors.As(err, &b) {
		return nil, &RefusedError{RefuseInvalid, b.text}
	}
	if err != nil {
		return nil, nil
	}
	return m, nil
}

// admit judges a HELLO. Neither port nor error: WELCOME shall tell D that
// another instance than the one it expects is here, and that is all.
func (s *Sender) admit(w *wire, m *hello, rank int) (*port, *RefusedError) {
	us := &s.cfg.Welcome
	no := func(code, format string, args ...any) (*port, *RefusedError) {
		return nil, &RefusedError{code, fmt.Sprintf(format, args...)}
	}
	if s.cfg.Tokens != nil && !s.cfg.Tokens(m.token) {
		return no(RefuseUnauthorized, "the token is missing or wrong")
	}
	if m.expect != "" && m.expect != us.Instance {
		return nil, nil
	}
	if m.dp != us.DPRank || m.tpr != rank || m.cp != 0 || m.pp != 0 {
		return no(RefuseRank, "this is dp %d, tp %d; wanted is dp %d, cp %d, tp %d, pp %d",
			us.DPRank, rank, m.dp, m.cp, m.tpr, m.pp)
	}
	if text, bad := differ(facts{us.Fingerprint, us.KVDType, s.cfg.Geometry}, facts{m.Fingerprint, m.KVDType, m.geometry}); bad {
		return no(RefuseMismatch, "%s", text)
	}
	if err := checkGeometry(s.cfg.Geometry, m.tp); err != nil {
		return no(RefuseMismatch, "decode: %v", err)
	}
	sh, ok := newShare(s.cfg.Geometry, m.tp, m.rank, us.TP, rank)
	if !ok {
		return no(RefuseRank, "decode rank %d of %d has no KV head of prefill rank %d of %d", m.rank, m.tp, rank, us.TP)
	}
	return &port{wire: w, s: s, mem: s.cfg.Memory[rank], name: peerName{m.Instance, m.DP},
		outlet: outlet{dTP: m.tp, dRank: m.rank, pRank: rank, share: sh,
			window: newWindow(m.credit), streams: map[uint64]*stream{}}}, nil
}

func (s *Sender) join(p *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.peers[p.name]
	if d == nil {
		s.lastPeer++
		d = &peer{number: s.lastPeer}
		s.peers[p.name] = d
	}
	d.links++
	p.peer = d.number
	s.ports[&p.outlet] = p
}

func (s *Sender) leave(p *port) {
	cause := p.cause().Error() // made without the lock: an error may be anything
	s.mu.Lock()
	delete(s.ports, &p.outlet)
	if d := s.peers[p.name]; d.links > 1 {
		d.links--
	} else {
		delete(s.peers, p.name)
	}
	s.rooms.leave(&p.outlet, cause)
	s.settle()
}

// frames reads what D says.
func (p *port) frames() error {
	for {
		h, err := p.next()
		if err != nil {
			return err
		}
		body, sound, err := p.control(&h)
		if err != nil {
			return err
		}
		if err := p.take(&h, body, sound); err != nil {
			return err
		}
	}
}

// take carries out one frame.
func (p *port) take(h *head, body []byte, sound bool) error {
	s := p.s
	s.mu.Lock()
	got, err := s.rooms.take(&p.outlet, h, body, sound)
	if got.ping {
		p.pong = true
		p.poke()
	}
	s.settle()
	if got.refused != "" {
		s.cfg.Metrics.rejected(got.refused)
	}
	if got.received != nil {
		s.cfg.Metrics.latency(s.cfg.Now() - got.received.bound)
	}
	return err
}

// write is the writer's goroutine. It closes the connection at its end.
func (p *port) write() {
	defer p.conn.Close()
	busy := time.NewTicker(p.s.cfg.BusyInterval)
	defer busy.Stop()
	var buf []byte
	for {
		for p.cause() == nil {
			var f frame
			if buf, f = p.gather(buf[:0]); len(buf) == 0 {
				break
			}
			if err := p.put(buf, &f); err != nil {
				p.kill(err)
			}
		}
		if p.cause() != nil {
			return
		}
		select {
		case <-p.wake:
		case <-busy.C:
			if err := p.sayBusy(buf[:0]); err != nil {
				p.kill(err)
			}
		}
	}
}

// gather appends the control frames that are due and the head of the DATA
// frame after them, if there is one: f is of kind DATA then, begun, and its
// head is the last headSize bytes, not filled in yet.
func (p *port) gather(buf []byte) ([]byte, frame) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if p.pong {
		p.pong = false
		buf = appendFrame(buf, kindPong, 0, nil)
	}
	return p.s.rooms.gather(&p.outlet, buf)
}

// put writes what gather gave. The extents go from the arena to the socket;
// each is summed once.
func (p *port) put(buf []byte, f *frame) error {
	p.vec = append(p.vec[:0], buf)
	if f.head.kind != kindData {
		return p.writeVec()
	}
	first := int(f.head.head) - p.share.head + p.share.pHead
	for _, page := range f.pages {
		b := p.mem.Extent(int(f.head.layer), page, first, int(f.head.heads))
		p.vec = append(p.vec, b)
	}
	payload := spans{bufs: p.vec[1:]}
	ahead := payload
	ahead.pass(lead, fetch)
	f.head.sum = payload.sum(0, int(f.head.size), &ahead, fetch)
	f.head.put((*[headSize]byte)(buf[len(buf)-headSize:]))
	err := p.writeVec()
	p.s.mu.Lock()
	p.s.rooms.done(&p.outlet)
	p.s.settle()
	if err == nil {
		p.s.cfg.Metrics.bytes(int(f.head.size))
	}
	return err
}

// sayBusy tells D of every room that it is not forgotten.
func (p *port) sayBusy(buf []byte) error {
	p.s.mu.Lock()
	p.grants = p.s.rooms.busy(&p.outlet, p.grants[:0])
	p.s.mu.Unlock()
	for some := range slices.Chunk(p.grants, maxBusy) {
		buf = appendFrame(buf, kindBusy, 0, func(b []byte) []byte { return appendGrants(b, some) })
	}
	if len(buf) == 0 {
		return nil
	}
	return p.wire.write(buf)
}
