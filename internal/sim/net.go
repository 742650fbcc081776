package sim

import (
	"slices"
	"time"
)

// network joins the processes of a world. A connection is a pair of ordered
// streams of messages with delay, a bandwidth and a bounded number of bytes on
// the way; it can be cut, blocked in one direction (what is on the way waits,
// as TCP repeats), or lose its other end without a word.
type network struct {
	*world
	cfg     NetPlan
	names   map[string]*process // who answers under a name now
	workers map[*process]any    // *prefill or *decode
	blocked map[path]int        // faults that block a direction
	held    map[path][]*socket  // whose messages wait for that to end
	slow    map[path]time.Duration
	trickle map[path]trickle
	// delivered are the rooms whose pages, first token and ends a decode worker
	// has had in full.
	delivered map[int64]bool
	tamper    func(from, to *process, frame []byte) [][]byte // lies on KV links, or nil
}

// trickle is a path that lets few bytes through, for a while.
type trickle struct {
	rate  int64 // bytes/s of each connection
	until time.Duration
}

// path is a direction between two hosts.
type path struct{ from, to string }

// socket is one end of a connection.
type socket struct {
	net    *network
	owner  *process
	life   int
	peer   *socket
	closed bool // by its owner, or the owner knows that the other end closed it
	dead   bool // nothing that it sends arrives: the other host vanished
	last   time.Duration
	load   int      // bytes on the way to the other end's process
	sent   int      // messages
	came   int      // of these, how many the other end has had
	waits  []parcel // held back, in the order in which they were sent
	early  []parcel // arrived before others that were sent before them

	take   func(m any)        // a message for the owner
	ended  func(cause string) // the connection has ended; not after close
	drains func()             // load has shrunk
}

// parcel is a message on the way.
type parcel struct {
	m    any
	size int
	nth  int
}

// maxLoad is how many bytes a connection takes before its writer must wait.
const maxLoad = 256 << 10

func (n *network) delay(from, to *process) time.Duration {
	return n.between(n.cfg.Delay, n.cfg.Delay+n.cfg.Jitter) + n.slow[path{from.name, to.name}]
}

// dial connects to whoever answers under a name. accepted runs at the other
// end; done here, with nil when the connection was refused. Nobody answers for
// a host that vanished or cannot be reached.
func (n *network) dial(from *process, name string, accept func(to *process, s *socket) bool, done func(s *socket, to *process)) {
	to := n.names[name]
	if to == nil {
		from.in(n.cfg.Delay, func() { done(nil, nil) })
		return
	}
	out, back := path{from.name, to.name}, path{to.name, from.name}
	life := from.life
	n.after(n.delay(from, to), func() {
		if to.gone || n.blocked[out] > 0 || n.blocked[back] > 0 {
			return // SYN is lost; it is not repeated here: the caller's deadline ends it
		}
		a := &socket{net: n, owner: from, life: life}
		b := &socket{net: n, owner: to, life: to.life, peer: a}
		a.peer = b
		if !to.alive || !accept(to, b) {
			from.inside(life, func() { done(nil, to) })
			return
		}
		to.sockets = append(to.sockets, b)
		n.after(n.delay(to, from), func() {
			if from.life != life || !from.alive {
				b.lost(false)
				return
			}
			from.sockets = append(from.sockets, a)
			from.inside(life, func() {
				if !a.closed {
					done(a, to)
				}
			})
		})
	})
}

// send gives a message to the other end. full: the writer should wait for drains.
func (s *socket) send(m any, size int) (full bool) {
	if s.closed || s.dead {
		return false
	}
	s.load += size
	s.sent++
	c := parcel{m, size, s.sent}
	if out := (path{s.owner.name, s.peer.owner.name}); s.net.blocked[out] > 0 || len(s.waits) > 0 {
		s.hold(c)
	} else {
		s.carry(c)
	}
	return s.load > maxLoad
}

// hold keeps a message back until its direction is free again.
func (s *socket) hold(c parcel) {
	way := path{s.owner.name, s.peer.owner.name}
	if len(s.waits) == 0 {
		s.net.held[way] = append(s.net.held[way], s)
	}
	s.waits = insert(s.waits, c)
}

// insert puts a message at its place in the order of sending.
func insert(list []parcel, c parcel) []parcel {
	i, _ := slices.BinarySearchFunc(list, c.nth, func(w parcel, nth int) int { return w.nth - nth })
	return slices.Insert(list, i, c)
}

func (s *socket) carry(c parcel) {
	n := s.net
	at := max(s.last, n.now+n.delay(s.owner, s.peer.owner))
	took := func(rate int64) time.Duration { return time.Duration(int64(c.size) * int64(time.Second) / rate) }
	at += took(n.cfg.Bandwidth)
	if t := n.trickle[path{s.owner.name, s.peer.owner.name}]; at < t.until {
		at = min(at+took(t.rate), t.until)
	}
	s.last = at
	n.after(at-n.now, func() {
		if n.blocked[path{s.owner.name, s.peer.owner.name}] > 0 {
			s.hold(c)
			return
		}
		// A stream keeps its order: what overtook another waits for it.
		for s.early = insert(s.early, c); len(s.early) > 0 && s.early[0].nth == s.came+1; s.early = s.early[1:] {
			s.came++
			s.arrive(s.early[0])
		}
	})
}

// arrive gives a message to the process at the other end.
func (s *socket) arrive(c parcel) {
	p := s.peer
	if p.dead || !p.owner.alive || p.owner.life != p.life {
		return
	}
	p.owner.inside(p.life, func() {
		s.load -= c.size
		if !p.closed && p.take != nil {
			p.take(c.m)
		}
		if s.drains != nil && !s.closed {
			s.owner.inside(s.life, s.drains)
		}
	})
}

// unblock sends what waited.
func (s *socket) unblock() {
	waits := s.waits
	s.waits = nil
	for _, c := range waits {
		s.carry(c)
	}
}

// close ends the connection from this side.
func (s *socket) close(cause string) {
	if s.closed {
		return
	}
	s.closed = true
	s.owner.drop(s)
	s.tellPeer(cause)
}

// tellPeer brings the end of the stream to the other side, behind what was sent.
func (s *socket) tellPeer(cause string) {
	if s.dead {
		return
	}
	n, p := s.net, s.peer
	if n.blocked[path{s.owner.name, p.owner.name}] > 0 {
		n.after(time.Second, func() { s.tellPeer(cause) }) // repeated
		return
	}
	at := max(s.last, n.now+n.delay(s.owner, p.owner))
	n.after(at-n.now, func() {
		switch {
		case n.blocked[path{s.owner.name, p.owner.name}] > 0:
			s.tellPeer(cause)
		case s.came < s.sent && !s.peer.dead: // it does not overtake what was sent
			n.after(n.cfg.Delay+time.Millisecond, func() { s.tellPeer(cause) })
		case p.owner.alive && p.owner.life == p.life:
			p.owner.inside(p.life, func() { p.end(cause) })
		}
	})
}

// end: the owner learns that the connection is over.
func (s *socket) end(cause string) {
	if s.closed {
		return
	}
	s.closed = true
	s.owner.drop(s)
	if s.ended != nil {
		s.ended(cause)
	}
}

// lost: the owner is no more. Its kernel says so, or nothing does.
func (s *socket) lost(vanish bool) {
	s.closed = true
	if vanish {
		s.peer.dead = true
		s.keepAlive(9)
		return
	}
	s.tellPeer("the connection was reset")
}

// keepAlive is the other side's kernel, which asks every 15 s whether the host
// is there: one that came back knows nothing of the connection.
func (s *socket) keepAlive(probes int) {
	s.net.after(15*time.Second, func() {
		p := s.peer
		switch {
		case s.owner.gone && probes > 1:
			s.keepAlive(probes - 1)
		case p.owner.alive && p.owner.life == p.life:
			p.owner.inside(p.life, func() { p.end("no answer to keep-alive probes") })
		}
	})
}

// cut ends every connection between two processes for both.
func (n *network) cut(a, b *process) {
	for _, s := range slices.Clone(a.sockets) {
		if s.peer.owner == b {
			p := s.peer
			a.inside(s.life, func() { s.end("the connection was reset") })
			b.inside(p.life, func() { p.end("the connection was reset") })
		}
	}
}

// block holds everything back in one direction; the function it gives lifts that.
func (n *network) block(from, to *process) (lift func()) {
	way := path{from.name, to.name}
	n.blocked[way]++
	return func() {
		if n.blocked[way]--; n.blocked[way] > 0 {
			return
		}
		held := n.held[way]
		delete(n.held, way)
		for _, s := range held { // also those that were closed meanwhile
			s.unblock()
		}
	}
}

// ask is one HTTP exchange. serve runs at the other end and may reply at once,
// later or never; answered runs here once, unless cancelled: with the reply, or
// with why there is none. It has no deadline of its own.
func (n *network) ask(from *process, name string, serve func(to *process, reply func(any)), answered func(m any, fault string)) (cancel func()) {
	var line *socket
	over := false
	finish := func(m any, fault string) {
		if over {
			return
		}
		over = true
		if line != nil {
			line.close("done")
		}
		answered(m, fault)
	}
	n.dial(from, name, func(to *process, s *socket) bool {
		s.take = func(any) {
			serve(to, func(m any) { s.send(m, 200) })
		}
		return true
	}, func(s *socket, _ *process) {
		switch {
		case s == nil:
			finish(nil, "connection refused")
			return
		case over:
			s.close("cancelled")
			return
		}
		line = s
		s.take = func(m any) { finish(m, "") }
		s.ended = func(cause string) { finish(nil, cause) }
		s.send(struct{}{}, 200)
	})
	return func() {
		if !over {
			over = true
			if line != nil {
				line.close("cancelled")
			}
		}
	}
}
