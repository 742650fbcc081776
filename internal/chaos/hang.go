package chaos

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// BadPeer is how a bootstrap address that is no good behaves. It answers any
// request in the same way.
type BadPeer string

// Kinds of bad peers.
const (
	Silent  BadPeer = "silent"  // accepts and never answers
	NoSYN   BadPeer = "no-syn"  // the backlog is full: the SYN is never answered
	Trickle BadPeer = "trickle" // a byte a second
	Half    BadPeer = "half"    // half an answer, then nothing
)

// BadPeers are all kinds.
var BadPeers = []BadPeer{Silent, NoSYN, Trickle, Half}

const goodAnswer = `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":16,"kv_cache_dtype":"f16","follow_bootstrap_room":true}`

// Hang is one bad peer on one address.
type Hang struct {
	Addr string
	Kind BadPeer

	ln   net.Listener
	stop chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
	dials int // connections accepted so far
}

// NewHang listens on host (a loopback address), on a free port, as this kind.
func NewHang(kind BadPeer, host string) (*Hang, error) {
	h := &Hang{Kind: kind, stop: make(chan struct{})}
	if kind == NoSYN {
		return h, h.fillBacklog(host)
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, err
	}
	h.ln, h.Addr = ln, ln.Addr().String()
	h.wg.Go(h.accept) // ends when Close closes the listener
	return h, nil
}

func (h *Hang) accept() {
	for {
		c, err := h.ln.Accept()
		if err != nil {
			return
		}
		h.mu.Lock()
		h.conns = append(h.conns, c)
		h.dials++
		h.mu.Unlock()
		h.wg.Go(func() { h.answer(c) }) // ends at Close
	}
}

func (h *Hang) answer(c net.Conn) {
	answer := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(goodAnswer), goodAnswer)
	switch h.Kind {
	case Half:
		c.Write([]byte(answer[:len(answer)-len(goodAnswer)/2]))
	case Trickle:
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for i := range len(answer) {
			select {
			case <-tick.C:
			case <-h.stop:
				return
			}
			if _, err := c.Write([]byte{answer[i]}); err != nil {
				return
			}
		}
	}
	<-h.stop
}

// Dials is the number of connections that were accepted so far.
func (h *Hang) Dials() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.dials
}

// Close ends the peer and its connections.
func (h *Hang) Close() error {
	close(h.stop)
	var errs []error
	if h.ln != nil {
		errs = append(errs, h.ln.Close())
	}
	h.mu.Lock()
	for _, c := range h.conns {
		c.Close()
	}
	h.mu.Unlock()
	h.wg.Wait()
	return errors.Join(errs...)
}
