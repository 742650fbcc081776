package transfer

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// An in-memory network for synctest bubbles: buffered connections with
// deadlines, whose streams can be held, cut and corrupted at any byte.

// stream of bytes in one direction.
type pipe struct {
	mu   sync.Mutex
	cond *sync.Cond
	buf  []byte
	room int // bytes that may wait
	read int // bytes read so far

	hold    int         // the reader gets no byte from this offset on; -1: all
	cut     int         // the reader gets errCut at this offset; -1: never
	flip    map[int]int // offset → bits to flip
	eof     bool        // the writer closed
	gone    bool        // the reader closed
	rd, wd  time.Time   // deadlines
	rt, wt  *time.Timer
	writes  int // bytes written so far
	written func(b []byte)
}

var errCut = errors.New("connection reset (by the test)")

func newPipe(room int) *pipe {
	p := &pipe{room: room, hold: -1, cut: -1, flip: map[int]int{}}
	p.cond = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.cond.Broadcast()
}

func past(t time.Time) bool { return !t.IsZero() && !time.Now().Before(t) }

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		n := min(len(b), len(p.buf))
		if p.hold >= 0 {
			n = min(n, p.hold-p.read)
		}
		if p.cut >= 0 {
			n = min(n, p.cut-p.read)
		}
		switch {
		case p.gone:
			return 0, net.ErrClosed
		case past(p.rd):
			return 0, os.ErrDeadlineExceeded
		case p.cut >= 0 && p.read >= p.cut:
			return 0, errCut
		case n > 0:
			for at, bits := range p.flip {
				if at >= p.read && at < p.read+n {
					p.buf[at-p.read] ^= byte(bits)
				}
			}
			copy(b, p.buf[:n])
			p.buf = p.buf[n:]
			p.read += n
			p.cond.Broadcast()
			return n, nil
		case p.eof && len(p.buf) == 0 && p.hold < 0:
			return 0, io.EOF
		}
		p.cond.Wait()
	}
}

func (p *pipe) Write(b []byte) (n int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.eof:
			return n, net.ErrClosed
		case p.gone && p.hold < 0 || p.cut >= 0 && p.read >= p.cut:
			return n, errCut
		case past(p.wd):
			return n, os.ErrDeadlineExceeded
		case len(b) == 0:
			return n, nil
		}
		if m := min(len(b), p.room-len(p.buf)); m > 0 {
			p.buf = append(p.buf, b[:m]...)
			if p.written != nil {
				p.written(b[:m])
			}
			b, n = b[m:], n+m
			p.writes += m
			p.cond.Broadcast()
			continue
		}
		p.cond.Wait()
	}
}

func (p *pipe) deadline(at *time.Time, timer **time.Timer, t time.Time) {
	p.set(func() {
		*at = t
		if *timer != nil {
			(*timer).Stop()
		}
		if d := time.Until(t); !t.IsZero() && d > 0 {
			*timer = time.AfterFunc(d, func() { p.set(func() {}) })
		}
	})
}

// conn is one end.
type conn struct {
	in, out *pipe
}

// newConns gives the two ends; room is how many bytes each direction buffers.
func newConns(room int) (*conn, *conn) {
	a, b := newPipe(room), newPipe(room)
	return &conn{a, b}, &conn{b, a}
}

func (c *conn) Read(b []byte) (int, error)  { return c.in.Read(b) }
func (c *conn) Write(b []byte) (int, error) { return c.out.Write(b) }

func (c *conn) Close() error {
	c.deadlines(time.Time{})
	c.in.set(func() { c.in.gone = true })
	c.out.set(func() { c.out.eof = true })
	return nil
}

func (c *conn) CloseWrite() error {
	c.out.set(func() { c.out.eof = true })
	return nil
}

func (c *conn) deadlines(t time.Time) {
	c.SetReadDeadline(t)
	c.SetWriteDeadline(t)
}

func (c *conn) LocalAddr() net.Addr           { return &net.TCPAddr{} }
func (c *conn) RemoteAddr() net.Addr          { return &net.TCPAddr{} }
func (c *conn) SetDeadline(t time.Time) error { c.deadlines(t); return nil }
func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.deadline(&c.in.rd, &c.in.rt, t)
	return nil
}
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.deadline(&c.out.wd, &c.out.wt, t)
	return nil
}

// listener hands out the ends it is given.
type listener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newListener() *listener {
	return &listener{conns: make(chan net.Conn, 1024), done: make(chan struct{})}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }
