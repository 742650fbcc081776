package api

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// laggard is a connection as one is after a standstill: what came and the
// deadline that has passed are there at once, and the deadline goes first.
type laggard struct {
	net.Conn
	read, write time.Time
}

func (c *laggard) SetReadDeadline(t time.Time) error  { c.read = t; return nil }
func (c *laggard) SetWriteDeadline(t time.Time) error { c.write = t; return nil }

func (c *laggard) Read(b []byte) (int, error)  { return pass(c.read, b) }
func (c *laggard) Write(b []byte) (int, error) { return pass(c.write, b) }

func pass(deadline time.Time, b []byte) (int, error) {
	if !deadline.IsZero() && !time.Now().Before(deadline) {
		return 0, os.ErrDeadlineExceeded
	}
	return len(b), nil
}

// TestConnLooksTwice: a deadline that passed while we stood still ends neither
// a read nor a write that could go on; one that is set to end a read does.
func TestConnLooksTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &twiceConn{Conn: &laggard{}}
		b := make([]byte, 8)
		c.SetDeadline(time.Now().Add(10 * time.Second))
		time.Sleep(time.Minute)
		if n, err := c.Read(b); n != len(b) || err != nil {
			t.Errorf("read %d, %v", n, err)
		}
		if n, err := c.Write(b); n != len(b) || err != nil {
			t.Errorf("written %d, %v", n, err)
		}
		time.Sleep(time.Minute)
		if _, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a third look: %v", err)
		}
		c.SetReadDeadline(time.Now())
		if _, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a second look after an end: %v", err)
		}
		c.SetReadDeadline(time.Time{})
		if _, err := c.Read(b); err != nil {
			t.Error(err)
		}
	})
}

// TestLooksTwiceInTime: a peer that is silent has as much time as was said.
func TestLooksTwiceInTime(t *testing.T) {
	for _, d := range []time.Duration{time.Millisecond, 300 * time.Millisecond, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			defer b.Close()
			c := &twiceConn{Conn: a}
			defer c.Close()
			began := time.Now()
			c.SetReadDeadline(began.Add(d))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != d {
				t.Errorf("%v after %v, not %v", err, time.Since(began), d)
			}
			late := errors.New("late")
			began = time.Now()
			ctx, cancel := WithTimeout(t.Context(), d, late)
			<-ctx.Done()
			if context.Cause(ctx) != late || time.Since(began) != d {
				t.Errorf("%v after %v, not %v", context.Cause(ctx), time.Since(began), d)
			}
			cancel()
			ctx, cancel = WithTimeout(t.Context(), d, late)
			time.Sleep(d - LookOf(d)/2)
			cancel()
			if time.Sleep(d); context.Cause(ctx) != context.Canceled {
				t.Error(context.Cause(ctx))
			}
		})
	}
}
