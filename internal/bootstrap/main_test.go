package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memNet is a network in memory: what listens on an address is a function that
// gets the server's end of each connection. An address without one refuses.
type memNet struct {
	mu     sync.Mutex
	peers  map[string]func(net.Conn)
	holes  map[string]bool // addresses whose SYN is never answered
	dials  map[string]int
	serves sync.WaitGroup
}

func newMemNet() *memNet {
	return &memNet{peers: map[string]func(net.Conn){}, holes: map[string]bool{}, dials: map[string]int{}}
}

// set makes serve answer at addr; nil makes it refuse.
func (m *memNet) set(addr string, serve func(net.Conn)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peers[addr] = serve
}

func (m *memNet) peer(addr string) func(net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peers[addr]
}

// hole makes addr swallow every SYN.
func (m *memNet) hole(addr string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holes[addr] = true
}

func (m *memNet) dialed(addr string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dials[addr]
}

func (m *memNet) Dial(ctx context.Context, _, addr string) (net.Conn, error) {
	m.mu.Lock()
	serve, hole := m.peers[addr], m.holes[addr]
	m.dials[addr]++
	m.mu.Unlock()
	if hole {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if serve == nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	client, server := net.Pipe()
	m.serves.Go(func() { serve(server) })
	return client, nil
}

// says is a peer that reads one request and writes these bytes, then closes.
func says(answer string) func(net.Conn) {
	return func(c net.Conn) {
		defer c.Close()
		if _, err := readRequest(c); err == nil {
			io.WriteString(c, answer)
		}
	}
}

// readRequest reads one request with its body.
func readRequest(c net.Conn) (*http.Request, error) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	return r, err
}

// hangs is a peer that accepts and answers nothing until the other end closes.
func hangs(c net.Conn) {
	io.Copy(io.Discard, c)
	c.Close()
}

// answer is an HTTP answer with a body.
func answer(status int, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body)
}

// memListener hands the server's ends of a memNet's connections to a Server.
type memListener struct {
	addr  net.Addr
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func listen(addr string) *memListener {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		panic(err)
	}
	return &memListener{addr: a, conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *memListener) deliver(c net.Conn) {
	select {
	case l.conns <- c:
	case <-l.done:
		c.Close()
	}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *memListener) Addr() net.Addr { return l.addr }

// serve runs s at addr on m until stop is called.
func (m *memNet) serve(t *testing.T, s *Server, addr string) (stop func()) {
	t.Helper()
	ln := listen(addr)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, ln) }()
	m.set(addr, ln.deliver)
	return sync.OnceFunc(func() {
		m.set(addr, nil)
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Serve: %v", err)
		}
	})
}
