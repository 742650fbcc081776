package router

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
)

// names is a resolver that a test changes.
type names struct {
	addrs []string
	err   error
	hangs bool
}

func (n *names) lookup(ctx context.Context, _, _ string) ([]netip.Addr, error) {
	if n.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var addrs []netip.Addr
	for _, a := range n.addrs {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	return addrs, n.err
}

// F-83: the name of a replaced worker gives the old and the new address, or
// nothing for a while. The old one refuses, or swallows packets.
func TestF83NameMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := newMemNet()
		n := &names{addrs: []string{"10.0.0.1"}}
		d := newDialer()
		d.connect, d.lookup = mem.dial, n.lookup
		old := mem.listen(t, "10.0.0.1:80")
		reach := func(want string, most time.Duration) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), dialTimeout)
			defer cancel()
			began := time.Now()
			c, err := d.dial(ctx, "tcp", "worker:80")
			got := ""
			if err != nil {
				got = err.Error()
			} else {
				got = c.(*memConn).remote
				c.Close()
			}
			if !strings.Contains(got, want) || time.Since(began) > most {
				t.Errorf("%s after %v, want %s within %v", got, time.Since(began), want, most)
			}
			synctest.Wait()
		}
		reach("10.0.0.1:80", 0)
		mem.listen(t, "10.0.0.2:80")
		old.Close()
		n.addrs = []string{"10.0.0.1", "10.0.0.2"}
		reach("10.0.0.2:80", 0) // the old one refuses
		mem.hung["10.0.0.1:80"] = true
		reach("10.0.0.2:80", dialNext) // it swallows
		n.addrs = []string{"10.0.0.2"}
		reach("10.0.0.2:80", 0)
		n.addrs, n.err = nil, errors.New("no such host")
		time.Sleep(10 * time.Second)
		reach("10.0.0.2:80", 0) // the last addresses do
		n.hangs = true
		reach("10.0.0.2:80", lookupWait)
		n.hangs = false
		time.Sleep(lookupStale)
		reach("no such host", 0)
		n.addrs, n.err = []string{"10.0.0.1"}, nil
		reach("deadline exceeded", dialTimeout)
	})
}

// Many addresses that swallow packets are bounded in number, and all are let go.
func TestDialManyAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{}
		for i := range 20 {
			n.addrs = append(n.addrs, netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}).String())
		}
		d := newDialer()
		d.lookup = n.lookup
		var tried, open atomic.Int32
		d.connect = func(ctx context.Context, _, _ string) (net.Conn, error) {
			tried.Add(1)
			open.Add(1)
			<-ctx.Done()
			open.Add(-1)
			return nil, ctx.Err()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := d.dial(ctx, "tcp", "worker:80"); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		synctest.Wait()
		if tried.Load() != dialMost || open.Load() != 0 {
			t.Errorf("%d addresses were tried, %d tries are open", tried.Load(), open.Load())
		}
	})
}

// The name of a worker leads to one of another model. It is known by the model
// that its probes tell, and out at the next one; nothing is sent to it. When the
// name leads back it is in again. Of two that differ the one that has changed is
// the stranger, and a fleet can move to another model worker by worker.
func TestF83Stranger(t *testing.T) {
	tells := func(s *stub, model string) {
		s.setHealth(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set(bootstrap.FingerprintHeader, model) })
	}
	served := func(t *testing.T, f *fleet, n int) {
		t.Helper()
		for range n {
			if got := f.post("/generate", `{"text":"a","stream":true}`); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
	}
	inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
		all := []*stub{f.p[0], f.p[1], f.d[0], f.d[1]}
		for _, s := range all {
			tells(s, "F")
		}
		time.Sleep(time.Second)
		served(t, f, 4)
		tells(f.p[0], "X")
		until(t, 600*time.Millisecond, func() bool { return !f.standing().up })
		if cause := f.standing().cause; !strings.Contains(cause, "another model") || !strings.Contains(cause, "fingerprint X, the fleet's is F") {
			t.Error(cause)
		}
		before := len(f.p[0].requests())
		served(t, f, 10)
		if n := len(f.p[0].requests()) - before; n != 0 {
			t.Errorf("%d requests went to the stranger", n)
		}
		tells(f.p[0], "F")
		until(t, 600*time.Millisecond, func() bool { return f.standing().up })
		for i, s := range all {
			tells(s, "X")
			time.Sleep(1100 * time.Millisecond)
			if i != 1 { // two prefills of X and two decodes of F: the fleet changes over with the next
				served(t, f, 3)
			}
		}
	})
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		tells(f.d[0], "F")
		tells(f.p[0], "F")
		time.Sleep(time.Second)
		tells(f.p[0], "X")
		until(t, 600*time.Millisecond, func() bool { return strings.Contains(f.ready(), "another model") })
		if got := f.post("/generate", ask); got.status != 503 || got.code(t) != "no_prefill" {
			t.Errorf("%+v", got)
		}
		tells(f.p[0], "F")
		until(t, 600*time.Millisecond, func() bool { return f.ready() == "" })
		served(t, f, 1)
	})
}
