package router

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

// memNet is a network inside the process, so that tests run in virtual time:
// a listener for each address, and connections with a bounded buffer in each
// direction, as sockets have.
type memNet struct {
	mu        sync.Mutex
	listeners map[string]*memListener
	hung      map[string]bool // addresses that neither accept nor refuse
	conns     []*memConn      // the accepted ends
}

const memBuffer = 64 << 10 // bytes in flight in one direction

func newMemNet() *memNet {
	return &memNet{listeners: map[string]*memListener{}, hung: map[string]bool{}}
}

type memListener struct {
	net    *memNet
	addr   string
	accept chan net.Conn
	done   chan struct{}
	once   sync.Once
}

func (n *memNet) listen(t testing.TB, addr string) *memListener {
	t.Helper()
	l := &memListener{net: n, addr: addr, accept: make(chan net.Conn, 128), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[addr] != nil {
		t.Fatalf("%s is taken", addr)
	}
	n.listeners[addr] = l
	return l
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		l.net.mu.Lock()
		delete(l.net.listeners, l.addr)
		l.net.mu.Unlock()
		close(l.done)
	})
	return nil
}

func (l *memListener) Addr() net.Addr { return memAddr(l.addr) }

func (n *memNet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l, hung := n.listeners[addr], n.hung[addr]
	n.mu.Unlock()
	if hung {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	refused := &net.OpError{Op: "dial", Net: "mem", Addr: memAddr(addr), Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	if l == nil {
		return nil, refused
	}
	a, b := newHalf(), newHalf()
	client := &memConn{in: a, out: b, local: "127.0.0.1:1", remote: addr}
	server := &memConn{in: b, out: a, local: addr, remote: "127.0.0.1:1"}
	select {
	case l.accept <- server:
		n.mu.Lock()
		n.conns = append(n.conns, server)
		n.mu.Unlock()
		return client, nil
	case <-l.done:
		return nil, refused
	}
}

type memAddr string

func (a memAddr) Network() string { return "mem" }
func (a memAddr) String() string  { return string(a) }

// half is one direction of a connection.
type half struct {
	mu     sync.Mutex
	buf    []byte
	closed error         // what the reader gets after buf
	wake   chan struct{} // closed and replaced at every change
	dead   [2]time.Time  // deadlines of reader and writer
}

func newHalf() *half { return &half{wake: make(chan struct{})} }

func (h *half) changed() {
	close(h.wake)
	h.wake = make(chan struct{})
}

// wait waits for a change, with mu held on entry and exit.
func (h *half) wait(end int) error {
	dead, wake := h.dead[end], h.wake
	var timer <-chan time.Time
	if !dead.IsZero() {
		left := time.Until(dead)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		t := time.NewTimer(left)
		defer t.Stop()
		timer = t.C
	}
	h.mu.Unlock()
	defer h.mu.Lock()
	select {
	case <-wake:
	case <-timer:
	}
	return nil
}

func (h *half) close(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed == nil {
		h.closed = err
		h.changed()
	}
}

func (h *half) setDeadline(end int, t time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dead[end] = t
	h.changed()
}

var errReset = &net.OpError{Op: "read", Net: "mem", Err: syscall.ECONNRESET}

type memConn struct {
	in, out       *half
	local, remote string
}

func (c *memConn) Read(p []byte) (int, error) {
	h := c.in
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		if !h.dead[0].IsZero() && time.Until(h.dead[0]) <= 0 {
			return 0, &net.OpError{Op: "read", Net: "mem", Err: os.ErrDeadlineExceeded}
		}
		if errors.Is(h.closed, net.ErrClosed) || h.closed == errReset {
			return 0, h.closed
		}
		if len(h.buf) > 0 {
			n := copy(p, h.buf)
			h.buf = h.buf[n:]
			h.changed()
			return n, nil
		}
		if h.closed != nil {
			return 0, h.closed
		}
		if err := h.wait(0); err != nil {
			return 0, &net.OpError{Op: "read", Net: "mem", Err: err}
		}
	}
}

func (c *memConn) Write(p []byte) (n int, err error) {
	h := c.out
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(p) > 0 {
		if h.closed != nil {
			return n, &net.OpError{Op: "write", Net: "mem", Err: syscall.EPIPE}
		}
		if room := memBuffer - len(h.buf); room > 0 {
			k := min(room, len(p))
			h.buf = append(h.buf, p[:k]...)
			n, p = n+k, p[k:]
			h.changed()
			continue
		}
		if err := h.wait(1); err != nil {
			return n, &net.OpError{Op: "write", Net: "mem", Err: err}
		}
	}
	return n, nil
}

// Close ends both directions: the peer reads what was sent, then the end; its
// writes fail.
func (c *memConn) Close() error {
	c.out.close(io.EOF)
	c.in.close(net.ErrClosed)
	return nil
}

// reset ends both directions at once: what was sent is lost.
func (c *memConn) reset() {
	c.out.close(errReset)
	c.in.close(net.ErrClosed)
}

func (c *memConn) LocalAddr() net.Addr                { return memAddr(c.local) }
func (c *memConn) RemoteAddr() net.Addr               { return memAddr(c.remote) }
func (c *memConn) SetReadDeadline(t time.Time) error  { c.in.setDeadline(0, t); return nil }
func (c *memConn) SetWriteDeadline(t time.Time) error { c.out.setDeadline(1, t); return nil }
func (c *memConn) SetDeadline(t time.Time) error {
	c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// open counts the connections of a listener whose two ends are both open.
func (n *memNet) open(addr string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	open := 0
	for _, c := range n.conns {
		c.in.mu.Lock()
		if c.local == addr && c.in.closed == nil {
			open++
		}
		c.in.mu.Unlock()
	}
	return open
}
