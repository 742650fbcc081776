package router

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	dialTimeout = 2 * time.Second        // name, connection and all
	dialNext    = 250 * time.Millisecond // from the start of one address's try to that of the next (RFC 8305's connection attempt delay)
	dialMost    = 8                      // addresses of one name that are tried
	lookupWait  = 500 * time.Millisecond // for a lookup, where the last one's addresses can do instead
	lookupStale = 5 * time.Minute        // how long they can
)

// dialer connects to workers. A name is looked up anew for each connection, for
// the worker behind it may have moved; while the lookup fails, the addresses
// that it gave last do. All addresses of a name are tried side by side, each a
// little after the one before: one that swallows packets must not use up the
// time of the others.
type dialer struct {
	connect func(ctx context.Context, network, addr string) (net.Conn, error)
	lookup  func(ctx context.Context, network, host string) ([]netip.Addr, error)

	mu   sync.Mutex
	last map[string]lookedUp // by host; what is stale goes when something is added
}

type lookedUp struct {
	addrs []netip.Addr
	at    time.Time
}

func newDialer() *dialer {
	return &dialer{connect: (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext, lookup: net.DefaultResolver.LookupNetIP, last: map[string]lookedUp{}}
}

// dial is for http.Transport.
func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return d.connect(ctx, network, addr)
	}
	addrs, err := d.resolve(ctx, host)
	if err != nil {
		return nil, err
	}
	targets := make([]string, 0, dialMost)
	for _, a := range addrs[:min(len(addrs), dialMost)] {
		targets = append(targets, net.JoinHostPort(a.Unmap().String(), port))
	}
	return d.race(ctx, network, targets)
}

func (d *dialer) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	d.mu.Lock()
	last, known := d.last[host]
	d.mu.Unlock()
	known = known && time.Since(last.at) < lookupStale
	limit := dialTimeout
	if known {
		limit = lookupWait
	}
	lctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	addrs, err := d.lookup(lctx, "ip", host)
	if err == nil && len(addrs) == 0 {
		err = fmt.Errorf("the name %s has no address", host)
	}
	if err != nil {
		if known && ctx.Err() == nil {
			return last.addrs, nil
		}
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for h, l := range d.last {
		if time.Since(l.at) >= lookupStale {
			delete(d.last, h)
		}
	}
	d.last[host] = lookedUp{addrs, time.Now()}
	return addrs, nil
}

// race gives the first connection that comes about, or else the last error.
func (d *dialer) race(ctx context.Context, network string, addrs []string) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type try struct {
		c   net.Conn
		err error
	}
	tries := make(chan try)
	attempt := func(addr string) {
		c, err := d.connect(ctx, network, addr)
		select {
		case tries <- try{c, err}:
		case <-ctx.Done(): // another one was first, or time is up
			if c != nil {
				c.Close()
			}
		}
	}
	next := time.NewTimer(0)
	defer next.Stop()
	var last error
	for open := 0; ; {
		select {
		case <-next.C:
			go attempt(addrs[0])
			addrs, open = addrs[1:], open+1
			if len(addrs) > 0 {
				next.Reset(dialNext)
			}
		case t := <-tries:
			if t.err == nil {
				return t.c, nil
			}
			last, open = t.err, open-1
			if open == 0 && len(addrs) == 0 {
				return nil, last
			}
			if len(addrs) > 0 {
				next.Reset(0)
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
