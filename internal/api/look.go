package api

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// SecondLook is the end of a wait for a peer that is armed apart. A timer that
// fires says that its time is over, not that nothing came: after this process
// stood still (it was stopped, or its machine paused) both are there at once,
// and the timer goes first. With the end armed when the rest has gone, what came
// meanwhile is found, and a peer that is silent has no more time than before.
const SecondLook = 250 * time.Millisecond

// LookOf is the second look of a wait of d: no more than half of it.
func LookOf(d time.Duration) time.Duration { return min(SecondLook, d/2) }

// WithTimeout is context.WithTimeoutCause with a second look. The context does
// not tell its deadline.
func WithTimeout(ctx context.Context, d time.Duration, cause error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	var mu sync.Mutex
	mu.Lock()
	defer mu.Unlock()
	var timer *time.Timer
	timer = time.AfterFunc(d-LookOf(d), func() {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() == nil {
			timer = time.AfterFunc(LookOf(d), func() { cancel(cause) })
		}
	})
	return ctx, func() {
		cancel(context.Canceled)
		mu.Lock()
		defer mu.Unlock()
		timer.Stop()
	}
}

// LookingTwice gives the deadlines of accepted connections a second look.
func LookingTwice(ln net.Listener) net.Listener { return twiceListener{ln} }

type twiceListener struct{ net.Listener }

func (l twiceListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &twiceConn{Conn: c}, nil
}

type twiceConn struct {
	net.Conn
	mu          sync.Mutex
	read, write time.Duration // what is left of the deadline when it fires
}

func (c *twiceConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) && c.again(&c.read, c.Conn.SetReadDeadline) {
		return c.Conn.Read(b)
	}
	return n, err
}

func (c *twiceConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) && c.again(&c.write, c.Conn.SetWriteDeadline) {
		var more int
		more, err = c.Conn.Write(b[n:])
		n += more
	}
	return n, err
}

// again arms what is left of a deadline that has fired, once.
func (c *twiceConn) again(left *time.Duration, set func(time.Time) error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := *left
	*left = 0
	return d > 0 && set(time.Now().Add(d)) == nil
}

func (c *twiceConn) arm(left *time.Duration, set func(time.Time) error, t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	*left = 0
	if !t.IsZero() {
		*left = LookOf(max(0, time.Until(t))) // of one that has passed nothing: it is to end a read
	}
	return set(t.Add(-*left))
}

func (c *twiceConn) SetReadDeadline(t time.Time) error {
	return c.arm(&c.read, c.Conn.SetReadDeadline, t)
}

func (c *twiceConn) SetWriteDeadline(t time.Time) error {
	return c.arm(&c.write, c.Conn.SetWriteDeadline, t)
}

func (c *twiceConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// CloseWrite is what net/http wants before it closes a connection whose peer may
// still send.
func (c *twiceConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
