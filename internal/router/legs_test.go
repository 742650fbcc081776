package router

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// inPool runs a test in virtual time with a pool and workers that are what
// serve does with each connection.
func inPool(t *testing.T, serve func(c *memConn), test func(t *testing.T, net *memNet, p *legPool)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet()
		ln := net.listen(t, "w:1")
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go serve(c.(*memConn))
			}
		}()
		p := newLegPool(net.dial)
		test(t, net, p)
		p.close()
		ln.Close()
		for _, c := range net.conns {
			c.Close()
		}
		time.Sleep(workerIdle) // the sweep's timer
	})
}

// answersEach answers each request on a connection with the next of these.
func answersEach(all ...string) func(c *memConn) {
	return func(c *memConn) {
		in := bufio.NewReader(c)
		for _, a := range all {
			if !readRequest(in) {
				return
			}
			io.WriteString(c, a)
		}
	}
}

// readRequest reads one with its body.
func readRequest(in *bufio.Reader) bool {
	req, err := http.ReadRequest(in)
	if err == nil {
		_, err = io.Copy(io.Discard, req.Body)
	}
	return err == nil
}

func small(text string) *legRequest {
	return &legRequest{addr: "w:1", path: "/generate", header: http.Header{}, body: [][]byte{[]byte(text)}, length: len(text)}
}

// get reads the whole answer of a request.
func (p *legPool) get(ctx context.Context, req *legRequest) (status int, body string, err error) {
	resp, err := p.roundTrip(ctx, req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// A connection is used again exactly if both sides are through with the
// exchange and agree to it.
func TestLegConnectionIsUsedAgain(t *testing.T) {
	const usual = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for name, c := range map[string]struct {
		answer string
		again  bool
	}{
		"length":          {usual, true},
		"chunked":         {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", true},
		"trailer":         {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n", true},
		"after 1xx":       {"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + usual, true},
		"says close":      {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", false},
		"HTTP/1.0":        {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", false},
		"1.0, keep-alive": {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok", true},
		"too much":        {usual + "x", false},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, answersEach(c.answer, c.answer), func(t *testing.T, n *memNet, p *legPool) {
				for range 2 {
					if status, body, err := p.get(t.Context(), small("x")); status != 200 || body != "ok" || err != nil {
						t.Fatal(status, body, err)
					}
				}
				if again := len(n.conns) == 1; again != c.again {
					t.Errorf("%d connections for 2 requests", len(n.conns))
				}
			})
		})
	}
}

// What is sent again is only what may not have been understood; and a body that
// is no body ends its connection.
func TestLegIsNotSentAgain(t *testing.T) {
	const usual = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for _, bad := range []string{"HTTP/1.1 2x OK\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"} {
		inPool(t, answersEach(usual, bad, usual), func(t *testing.T, n *memNet, p *legPool) {
			for i := range 3 {
				_, body, err := p.get(t.Context(), small("x"))
				if fails := i == 1; fails != (err != nil) || !fails && body != "ok" {
					t.Errorf("request %d: %q, %v", i, body, err)
				}
			}
			if len(n.conns) != 2 {
				t.Errorf("%d connections were made, want 2", len(n.conns))
			}
		})
	}
}

// The bound of an answer's head is none of its body.
func TestLegBodyLongerThanAHead(t *testing.T) {
	long := strings.Repeat("x", 3*headerMax)
	inPool(t, answersEach(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(long), long)), func(t *testing.T, _ *memNet, p *legPool) {
		if _, body, err := p.get(t.Context(), small("x")); body != long || err != nil {
			t.Errorf("%d bytes, %v", len(body), err)
		}
	})
}

// An answer that is not read to its end ends its connection, and so does the
// end of the leg's context, at once: before the head, and inside of the body.
func TestLegEndsItsConnection(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		end    func(stop context.CancelCauseFunc, resp *http.Response)
	}{
		"closed":       {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", func(_ context.CancelCauseFunc, resp *http.Response) { resp.Body.Close() }},
		"ended, body":  {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", func(stop context.CancelCauseFunc, _ *http.Response) { stop(errLegOver) }},
		"ended, head":  {"HTTP/1.1 200", nil},
		"ended, quiet": {"", nil},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, answersEach(c.answer, "never"), func(t *testing.T, n *memNet, p *legPool) {
				ctx, stop := context.WithCancelCause(t.Context())
				defer stop(nil)
				if c.end == nil {
					time.AfterFunc(time.Second, func() { stop(errLegOver) })
				}
				began := time.Now()
				resp, err := p.roundTrip(ctx, small("x"))
				if c.end != nil {
					if err != nil {
						t.Fatal(err)
					}
					c.end(stop, resp)
					_, err = io.ReadAll(resp.Body)
				}
				if err == nil || time.Since(began) > time.Second {
					t.Errorf("after %v: %v", time.Since(began), err)
				}
				if c.end == nil && plainCause(ctx, err) != errLegOver.Error() {
					t.Errorf("%v", plainCause(ctx, err))
				}
				synctest.Wait()
				if n.open("w:1") != 0 || len(p.idle) != 0 {
					t.Errorf("%d connections are open, %d are kept", n.open("w:1"), len(p.idle))
				}
			})
		})
	}
}

// A worker that refuses a large body after its first bytes, and reads no more
// of it, is heard.
func TestAnswerBeforeTheBodyIsSent(t *testing.T) {
	for _, size := range []int{1 << 20, writeBeside + 1, writeBeside} {
		refuse := func(c *memConn) {
			io.ReadFull(c, make([]byte, 100))
			io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno\n")
		}
		inPool(t, refuse, func(t *testing.T, n *memNet, p *legPool) {
			began := time.Now()
			status, body, err := p.get(t.Context(), small(strings.Repeat("x", size)))
			if status != 413 || body != "no\n" || err != nil || time.Since(began) > wroteWait {
				t.Errorf("%d bytes: %d %q %v after %v", size, status, body, err, time.Since(began))
			}
			if kept, want := len(p.idle["w:1"]), 1; size > memBuffer && kept != 0 || size < memBuffer && kept != want {
				t.Errorf("%d bytes: %d connections are kept", size, kept)
			}
		})
	}
}

// Idle connections are closed when their time is over, one that is used stays.
func TestIdleLegConnectionsAreClosed(t *testing.T) {
	const usual = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	slow := func(c *memConn) {
		for in := bufio.NewReader(c); readRequest(in); {
			time.Sleep(100 * time.Millisecond) // the first ten are under way together
			io.WriteString(c, usual)
		}
	}
	inPool(t, slow, func(t *testing.T, n *memNet, p *legPool) {
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() { p.get(t.Context(), small("x")) })
		}
		all.Wait()
		for i := range 3 {
			time.Sleep(workerIdle - time.Second)
			synctest.Wait()
			if want := [...]int{10, 1, 1}[i]; n.open("w:1") != want {
				t.Errorf("after %d s: %d connections are open, want %d", 3*(i+1), n.open("w:1"), want)
			}
			p.get(t.Context(), small("x"))
		}
		time.Sleep(workerIdle + sweepLeast)
		synctest.Wait()
		if n.open("w:1") != 0 || p.sweeping || len(p.idle) != 0 {
			t.Errorf("in the end %d are open", n.open("w:1"))
		}
		if len(n.conns) != 10 {
			t.Errorf("%d connections were made, want 10", len(n.conns))
		}
	})
}

// Of a worker that closed an idle connection, or said something on it that
// nobody asked for, a pooled connection is not used: nothing is sent on it.
func TestIdleConnectionThatIsNoMore(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("this system cannot look at a connection")
	}
	for name, after := range map[string]func(net.Conn){
		"closed":  func(c net.Conn) { c.Close() },
		"unasked": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged") },
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			var served atomic.Int32
			idle := make(chan net.Conn, 9)
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					go func() {
						for in := bufio.NewReader(c); readRequest(in); {
							served.Add(1)
							io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
							idle <- c
						}
					}()
				}
			}()
			p := newLegPool((&net.Dialer{}).DialContext)
			defer p.close()
			req := small("x")
			req.addr = ln.Addr().String()
			for i := range 3 {
				if _, body, err := p.get(t.Context(), req); body != "ok" || err != nil {
					t.Fatal(i, body, err)
				}
				if i == 0 {
					continue // the second request shows that it is kept
				}
				<-idle
				c := <-idle
				after(c)
				kept := p.idle[req.addr][0]
				for end := time.Now().Add(5 * time.Second); !kept.look() && time.Now().Before(end); {
				}
				idle <- c
			}
			if n := served.Load(); n != 3 {
				t.Errorf("%d requests were served, want 3", n)
			}
		})
	}
}

// What a head must not have in it does not get there.
func TestLegHeadWithALineBreak(t *testing.T) {
	inPool(t, answersEach(), func(t *testing.T, n *memNet, p *legPool) {
		req := small("x")
		req.header["X-A"] = []string{"a\r\nX-B: b"}
		if _, _, err := p.get(t.Context(), req); !errors.Is(err, errBadHeader) {
			t.Errorf("%v", err)
		}
	})
}

// lines is a connection whose peer says something once it was asked, and is gone
// then.
type lines struct {
	net.Conn
	text  *bytes.Reader
	asked chan struct{}
	ask   func()
}

func newLines(text []byte) *lines {
	s := &lines{text: bytes.NewReader(text), asked: make(chan struct{})}
	s.ask = sync.OnceFunc(func() { close(s.asked) })
	return s
}

func (s *lines) Write(p []byte) (int, error) { s.ask(); return len(p), nil }
func (s *lines) Close() error                { s.ask(); return nil }
func (s *lines) Read(p []byte) (int, error)  { <-s.asked; return s.text.Read(p) }

// outcome is all that a leg sees of an answer.
type outcome struct {
	fails   bool
	status  int
	header  http.Header
	trailer http.Header
	length  int64
	body    string
	broken  bool
}

func outcomeOf(resp *http.Response, err error) outcome {
	if err != nil {
		return outcome{fails: true}
	}
	defer resp.Body.Close()
	o := outcome{status: resp.StatusCode, header: resp.Header, length: resp.ContentLength}
	if o.status == http.StatusSwitchingProtocols {
		return o // to us that is an error without a body; we never ask for it
	}
	b, err := io.ReadAll(resp.Body)
	o.body, o.broken, o.trailer = string(b), err != nil, resp.Trailer
	return o
}

// Whatever a worker says, a leg over a connection of ours sees what net/http
// would have shown it.
func FuzzLegAnswers(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "HTTP/1.1 200 OK\r\n\r\nuntil the end", "HTTP/1.0 200 OK\r\n\r\nx",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2;a=b\r\nok\r\n0\r\nX-T: 1\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",
		strings.Repeat("HTTP/1.1 103 Early\r\n\r\n", headerMax/20) + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 304 Not\r\nContent-Length: 5\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
		"HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1 200\r\n\r\n", "SSH-2.0-x\r\n", "", "\r\n", "HTTP/1.1 200 OK\r\nA b: c\r\n\r\n", "HTTP/1.1 200 OK\nConnection: close\n\nx", "HTTP/1.1 200 OK\r\nPragma: no-cache\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", headerMax) + "\r\n\r\n", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", headerMax-40) + "\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dial := func(context.Context, string, string) (net.Conn, error) { return newLines(text), nil }
		p := newLegPool(dial)
		defer p.close()
		got := outcomeOf(p.roundTrip(t.Context(), small("x")))
		tr := newTransport(dial)
		defer tr.CloseIdleConnections()
		req, err := http.NewRequest("POST", "http://w:1/generate", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		want := outcomeOf(tr.RoundTrip(req))
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%.200q:\n got %.400s\nwant %.400s", text, fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want))
		}
	})
}
