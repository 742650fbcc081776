package router

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	idleMost    = 4096                   // connections to one worker that are kept for the next leg
	sweepLeast  = 100 * time.Millisecond // between two looks for connections that have been idle for too long
	writeBeside = 32 << 10               // bytes of a body that are surely taken by a connection that is idle; more is written beside the wait for an answer
	wroteWait   = 50 * time.Millisecond  // for a body to be gone, after its whole answer has come
)

// legPool sends legs over connections of HTTP/1.1 without TLS, and keeps those
// for the next leg. It is to http.Transport what one goroutine is to three: the
// leg's own writes its request and reads its answer, so that an exchange is one
// write, one wait and one read, with nothing handed over. Legs with TLS go
// through http.Transport.
type legPool struct {
	dial func(ctx context.Context, network, addr string) (net.Conn, error)

	mu       sync.Mutex
	idle     map[string][]*legConn // by address, the one that was used last at the end
	sweeping bool                  // a sweep is to come
	closed   bool
}

func newLegPool(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *legPool {
	return &legPool{dial: dial, idle: map[string][]*legConn{}}
}

// legRequest is a request as it goes to one worker.
type legRequest struct {
	addr   string // host:port
	path   string
	query  string
	header http.Header // no hop-by-hop header, no Content-Length
	body   [][]byte
	length int
}

// roundTrip sends a request and gives its answer's head; the answer's body must
// be closed. ctx ends all of it at any time. A worker may close a pooled
// connection as we write to it: if no byte of an answer has come, the request is
// sent once again, on a new one.
func (p *legPool) roundTrip(ctx context.Context, req *legRequest) (*http.Response, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if c := p.take(req.addr); c != nil {
		resp, err := c.exchange(ctx, req)
		if err == nil || c.answered || ctx.Err() != nil {
			return resp, err
		}
	}
	conn, err := p.dial(ctx, "tcp", req.addr)
	if err != nil {
		return nil, err
	}
	c := &legConn{Conn: conn, pool: p, addr: req.addr}
	c.in = bufio.NewReader(c)
	if s, ok := conn.(syscall.Conn); ok {
		c.look = looker(s)
	}
	return c.exchange(ctx, req)
}

// take gives the idle connection to addr that was used last. One that has been
// closed, or on which somebody has said something unasked, is none.
func (p *legPool) take(addr string) *legConn {
	for {
		p.mu.Lock()
		list := p.idle[addr]
		if len(list) == 0 {
			p.mu.Unlock()
			return nil
		}
		c := list[len(list)-1]
		list[len(list)-1] = nil
		p.idle[addr] = list[:len(list)-1]
		p.mu.Unlock()
		if time.Since(c.since) < workerIdle && (c.look == nil || !c.look()) {
			return c
		}
		c.Close()
	}
}

// put keeps a connection for the next leg.
func (p *legPool) put(c *legConn) {
	c.since = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[c.addr]) == idleMost {
		c.Close()
		return
	}
	p.idle[c.addr] = append(p.idle[c.addr], c)
	if !p.sweeping {
		p.sweeping = true
		time.AfterFunc(workerIdle, p.sweep)
	}
}

// sweep closes what has been idle for too long, and comes again while there is
// anything left.
func (p *legPool) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := time.Duration(math.MaxInt64)
	for addr, list := range p.idle {
		n := 0
		for n < len(list) && time.Since(list[n].since) >= workerIdle {
			list[n].Close()
			n++
		}
		switch {
		case n == len(list):
			delete(p.idle, addr)
		case n > 0:
			p.idle[addr] = append([]*legConn(nil), list[n:]...)
			fallthrough
		default:
			next = min(next, workerIdle-time.Since(list[n].since))
		}
	}
	if p.sweeping = len(p.idle) > 0; p.sweeping {
		time.AfterFunc(max(next, sweepLeast), p.sweep)
	}
}

// close closes the idle connections, and the others when their legs are over.
func (p *legPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, list := range p.idle {
		for _, c := range list {
			c.Close()
		}
	}
	clear(p.idle)
}

// legConn is one connection to a worker. It belongs to the pool or to one leg.
type legConn struct {
	net.Conn
	pool  *legPool
	addr  string
	since time.Time   // when it became idle
	look  func() bool // whether there is something to read, or its end; nil: it cannot be looked at

	in       *bufio.Reader
	left     int64 // bytes that may be read yet: an answer's head has a bound
	answered bool  // a byte of the answer has come

	head   []byte // of the request
	pieces [8][]byte
	out    net.Buffers

	release func() bool // takes the leg's context off the connection
	wrote   chan error  // of what writes beside the leg, nil: nothing does
}

var errHeadTooLong = fmt.Errorf("the head of the answer is longer than %d bytes", headerMax)

func (c *legConn) Read(p []byte) (int, error) {
	if c.left <= 0 {
		return 0, errHeadTooLong
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	c.answered = c.answered || n > 0
	return n, err
}

// exchange sends a request and reads its answer's head.
func (c *legConn) exchange(ctx context.Context, req *legRequest) (*http.Response, error) {
	c.release = context.AfterFunc(ctx, func() { c.Conn.Close() })
	c.answered = false
	if err := c.writeHead(req); err != nil {
		c.end(false)
		return nil, err
	}
	unsent := c.write(req)
	resp, err := c.readHead()
	if err != nil {
		c.end(false)
		if unsent != nil && !c.answered {
			err = unsent
		}
		return nil, err
	}
	c.left = math.MaxInt64
	again := unsent == nil && !resp.Close && resp.StatusCode != http.StatusSwitchingProtocols
	if resp.Body == http.NoBody {
		c.end(again)
	} else {
		resp.Body = &legBody{c: c, body: resp.Body, again: again}
	}
	return resp, nil
}

// readHead reads heads until one is not 1xx. The bound is for all of them: a
// worker that sends such heads for ever is one that lies.
func (c *legConn) readHead() (*http.Response, error) {
	c.left = headerMax
	for {
		resp, err := http.ReadResponse(c.in, nil)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode < 100 || resp.StatusCode > 199 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, nil
		}
	}
}

// write writes a request, head and body as they lie in memory. A worker may
// answer before it has read all of a large body, and then reads no more of it:
// such a body is written beside the wait for the answer. An error is not yet the
// end: there may be an answer that says why.
func (c *legConn) write(req *legRequest) error {
	c.out = append(append(net.Buffers(c.pieces[:0]), c.head), req.body...)
	if req.length <= writeBeside {
		_, err := c.out.WriteTo(c.Conn)
		return err
	}
	c.wrote = make(chan error, 1)
	go func() {
		_, err := c.out.WriteTo(c.Conn)
		c.wrote <- err
	}()
	return nil
}

var errBadHeader = errors.New("a header of the request has a line break")

// writeHead makes the request's head.
func (c *legConn) writeHead(req *legRequest) error {
	b := append(append(c.head[:0], "POST "...), req.path...)
	if req.query != "" {
		b = append(append(b, '?'), req.query...)
	}
	b = append(append(b, " HTTP/1.1\r\nHost: "...), req.addr...)
	b = strconv.AppendInt(append(b, "\r\nContent-Length: "...), int64(req.length), 10)
	if req.header["User-Agent"] == nil {
		b = append(b, "\r\nUser-Agent: Go-http-client/1.1"...) // net/http's own
	}
	for name, values := range req.header {
		for _, v := range values {
			if strings.ContainsAny(v, "\r\n\x00") {
				return errBadHeader
			}
			b = append(append(append(append(b, "\r\n"...), name...), ": "...), v...)
		}
	}
	c.head = append(b, "\r\n\r\n"...)
	return nil
}

// end is called once for an exchange; again: the connection is good for another.
func (c *legConn) end(again bool) {
	again = c.release() && again && c.written() && c.in.Buffered() == 0
	if again {
		clear(c.pieces[:])
		c.pool.put(c)
		return
	}
	c.Close()
	if c.wrote != nil {
		<-c.wrote
	}
}

// written tells whether the whole request is gone.
func (c *legConn) written() bool {
	if c.wrote == nil {
		return true
	}
	late := time.NewTimer(wroteWait)
	defer late.Stop()
	select {
	case err := <-c.wrote:
		c.wrote = nil
		return err == nil
	case <-late.C:
		return false
	}
}

// legBody is the body of an answer. Its end makes the connection free for the
// next leg; whoever closes it before that ends the connection.
type legBody struct {
	c     *legConn
	body  io.Reader
	again bool
	over  error
}

func (b *legBody) Read(p []byte) (int, error) {
	if b.over != nil {
		return 0, b.over
	}
	n, err := b.body.Read(p)
	if err != nil {
		b.over = err
		b.c.end(b.again && err == io.EOF)
	}
	return n, err
}

var errBodyClosed = errors.New("read from a body that is closed")

func (b *legBody) Close() error {
	if b.over == nil {
		b.over = errBodyClosed
		b.c.end(false)
	}
	return nil
}
