package bootstrap

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// gate is a listener that bounds its open connections. When they are too many,
// the one that has been silent longest makes room (it has not sent its first
// byte, or it waits between two requests), and if all of them are being served
// the newcomer is closed. So connections that say nothing cannot lock anybody out.
type gate struct {
	net.Listener
	max int

	mu     sync.Mutex
	conns  map[net.Conn]*list.Element // the element is in silent, or nil while a request is under way
	silent *list.List                 // of net.Conn, the longest silent first
}

func newGate(ln net.Listener, max int) *gate {
	return &gate{Listener: ln, max: max, conns: map[net.Conn]*list.Element{}, silent: list.New()}
}

func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		fits, displaced := g.admit(c)
		if displaced != nil {
			displaced.Close()
		}
		if fits {
			return c, nil
		}
		c.Close()
	}
}

func (g *gate) admit(c net.Conn) (fits bool, displaced net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.conns) >= g.max {
		oldest := g.silent.Front()
		if oldest == nil {
			return false, nil
		}
		displaced = g.silent.Remove(oldest).(net.Conn)
		delete(g.conns, displaced)
	}
	g.conns[c] = g.silent.PushBack(c)
	return true, displaced
}

// state is the server's ConnState hook.
func (g *gate) state(c net.Conn, state http.ConnState) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e, ok := g.conns[c]
	if !ok {
		return // displaced
	}
	if e != nil {
		g.silent.Remove(e)
	}
	switch state {
	case http.StateNew, http.StateIdle:
		g.conns[c] = g.silent.PushBack(c)
	case http.StateActive:
		g.conns[c] = nil
	case http.StateClosed, http.StateHijacked:
		delete(g.conns, c)
	}
}
