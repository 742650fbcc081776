package chaos

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// rss is the resident memory of a process, in bytes.
func rss(t *testing.T, p *Proc) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(text), "VmRSS:")
	var kb int
	fmt.Sscan(line, &kb)
	return kb << 10
}

// Four clients that ask for 57 MB each and read nothing cost the router a
// megabyte at the most: it holds a stream's 32 KiB, and the worker is held back by
// the sockets' buffers. When they read at last, they get every byte.
func TestSlowReaders(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc, which only Linux has")
	}
	const clients, size, most = 4, 57 << 20, 1 << 20
	event := []byte("data: {\"text\":\"" + strings.Repeat("x", 1000) + "\"}\n\n")
	var sent atomic.Int64
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Header.Get("X-Bytes") == "" || r.URL.Path != "/generate" {
			io.WriteString(w, "{}")
			return
		}
		var n int
		fmt.Sscan(r.Header.Get("X-Bytes"), &n)
		w.Header().Set("Content-Type", "text/event-stream")
		for ; n > 0; n -= len(event) {
			w.Write(event)
			if n%(64*len(event)) < len(event) {
				w.(http.Flusher).Flush()
			}
			sent.Add(int64(len(event)))
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}))
	defer worker.Close()
	prefill := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "{}")
	}))
	defer prefill.Close()
	router := newRig(t).start(t, "router", "--listen=127.0.0.1:0", "--prefill="+prefill.URL, "--decode="+worker.URL)
	ask := func(size int) net.Conn {
		c, err := net.Dial("tcp", strings.TrimPrefix(router.HTTP, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprintf(c, "POST /generate HTTP/1.1\r\nHost: x\r\nX-Bytes: %d\r\nContent-Length: 26\r\n\r\n{\"text\":\"x\",\"stream\":true}", size)
		return c
	}
	read := func(c net.Conn) (n int64, end []byte) {
		c.SetDeadline(time.Now().Add(requestBound))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		var tail bytes.Buffer
		n, err = io.Copy(&tail, io.LimitReader(resp.Body, 2*size))
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("status %d, %d bytes, %v", resp.StatusCode, n, err)
		}
		return n, tail.Bytes()[max(0, tail.Len()-14):]
	}
	for range 4 * clients { // the router has seen streams before
		n, end := read(ask(4 << 20))
		if n < 4<<20 || string(end) != "data: [DONE]\n\n" {
			t.Fatalf("%d bytes, the end is %q", n, end)
		}
	}
	before := rss(t, router)
	sent.Store(0)
	var conns []net.Conn
	for range clients {
		conns = append(conns, ask(size))
	}
	worst := 0
	for last, since := int64(-1), time.Now(); time.Since(since) < time.Second; time.Sleep(20 * time.Millisecond) {
		if now := sent.Load(); now != last {
			last, since = now, time.Now()
		}
		worst = max(worst, rss(t, router)-before)
	}
	held := sent.Load()
	t.Logf("router's memory grew by %d KB at most; the worker had sent %d of %d MB when it was held back", worst>>10, held>>20, clients*size>>20)
	if worst > most {
		t.Errorf("%d clients that read nothing cost the router %d bytes, want at most %d", clients, worst, most)
	}
	if held > clients*size/2 {
		t.Errorf("the worker was not held back: it sent %d bytes of %d", held, clients*size)
	}
	for _, c := range conns {
		if n, end := read(c); n < size || string(end) != "data: [DONE]\n\n" {
			t.Errorf("a client that reads late gets %d bytes of %d, the end is %q", n, size, end)
		}
	}
}
