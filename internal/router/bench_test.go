package router

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/metronome-serve/metronome/internal/lint/edges"
)

// The benchmarks measure the router's own CPU for one request, in a process of
// its own between stub workers in another and this one as the client, beside
// the same for a bare splice: the least that net/http can do with two legs and
// a stream, without any feature. A request of 64 events costs at least 64 waits
// and 64 writes; a big body is read once and written twice.

var benchRole = flag.String("role", "", "what this process is for a benchmark: router, splice or stubs, with addresses after a colon")

func TestMain(m *testing.M) {
	flag.Parse()
	if role, addrs, ok := strings.Cut(*benchRole, ":"); ok {
		benchProcess(role, strings.Split(addrs, "+"))
		return
	}
	spoil = func(b []byte) { // who reads a body that was given back is found out
		given.Add(1)
		for i := range b {
			b[i] = 0xdb
		}
	}
	goleak.VerifyTestMain(withEdges{m})
}

// withEdges holds the changes of phase that the pair machine may make against
// those that a whole run has made.
type withEdges struct{ m *testing.M }

func (w withEdges) Run() int {
	book, err := edges.New(".", map[string]edges.Names{"pair": {"phaseNew": uint8(phaseNew), "phasePicking": uint8(phasePicking),
		"phaseOpen": uint8(phaseOpen), "phaseRelaying": uint8(phaseRelaying), "phaseEnded": uint8(phaseEnded)}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	onEdge = book.Take
	code := w.m.Run()
	if code == 0 && edges.Whole() {
		if err := book.Compare("../../docs/proof.md"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// benchProcess serves on a free port, which it prints, until its input ends.
func benchProcess(role string, addrs []string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println("http://" + ln.Addr().String())
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	switch role {
	case "router":
		cfg := Default()
		cfg.Prefill, cfg.Decode = []string{addrs[0]}, []string{addrs[1]}
		r, err := New(cfg)
		if err != nil {
			panic(err)
		}
		r.Run(ctx, ln)
	case "splice":
		go http.Serve(ln, bareSplice{addrs[0], addrs[1], &http.Transport{MaxIdleConnsPerHost: 4096, DisableCompression: true}})
		<-ctx.Done()
	case "stubs":
		go http.Serve(ln, http.HandlerFunc(benchStub))
		<-ctx.Done()
	}
}

// benchStub is prefill and decode: /generate?events=N&gap=D streams.
func benchStub(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	n, _ := strconv.Atoi(r.URL.Query().Get("events"))
	if r.URL.Path == "/health" {
		return
	}
	if n == 0 || r.Header.Get("X-Leg") == "prefill" {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"text":"x","meta_info":{"finish_reason":{"type":"length"}}}`)
		return
	}
	gap, _ := time.ParseDuration(r.URL.Query().Get("gap"))
	w.Header().Set("Content-Type", "text/event-stream")
	for range n {
		<-time.After(gap) // the stub is a process of its own
		io.WriteString(w, `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}`+"\n\n")
		w.(http.Flusher).Flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// bareSplice does nothing else.
type bareSplice struct {
	prefill, decode string
	tr              *http.Transport
}

func (s bareSplice) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, body); err != nil {
		return
	}
	head := fmt.Appendf(nil, `{"bootstrap_host":"127.0.0.1","bootstrap_port":null,"bootstrap_room":%d,`, rand.Int64())
	send := func(url string) (*http.Response, error) {
		req, _ := http.NewRequestWithContext(r.Context(), "POST", url+r.URL.RequestURI(), io.MultiReader(bytes.NewReader(head), bytes.NewReader(body[1:])))
		req.ContentLength = int64(len(head) + len(body) - 1)
		req.Header = r.Header.Clone()
		return s.tr.RoundTrip(req)
	}
	go func() {
		if resp, err := send(s.prefill); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	resp, err := send(s.decode)
	if err != nil {
		w.WriteHeader(502)
		return
	}
	defer resp.Body.Close()
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	buf := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(buf)
		w.Write(buf[:n])
		w.(http.Flusher).Flush()
		if err != nil {
			return
		}
	}
}

type process struct {
	url string
	pid int
}

func start(b *testing.B, role string, addrs ...string) process {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-role", role+":"+strings.Join(addrs, "+"))
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); cmd.Wait() })
	line := make([]byte, 64)
	n, err := out.Read(line)
	if err != nil {
		b.Fatal(err)
	}
	return process{strings.TrimSpace(string(line[:n])), cmd.Process.Pid}
}

// cpu is the processor time that a process has used, in units of 10 ms.
func (p process) cpu(b *testing.B) time.Duration {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

func BenchmarkCPU(b *testing.B) {
	if runtime.GOOS != "linux" {
		b.Skip("reads /proc, which only Linux has")
	}
	for _, c := range []struct {
		name, query string
		body, at    int // bytes of prompt, requests at a time
	}{
		{"200B", "", 200, 8},
		{"8KB", "", 8 << 10, 8},
		{"220KB", "", 220 << 10, 8},
		{"10MB", "", 10 << 20, 1},
		{"stream64", "?events=64", 200, 8},
		{"stream64x10ms", "?events=64&gap=10ms", 200, 64},
	} {
		for _, role := range []string{"router", "splice"} {
			b.Run(c.name+"/"+role, func(b *testing.B) {
				stubs := start(b, "stubs", "")
				p := start(b, role, stubs.url, stubs.url)
				drive(b, p, c.query, c.body, c.at)
			})
		}
	}
}

// drive sends b.N requests and reports the process's CPU and the client's median
// wait for each.
func drive(b *testing.B, p process, query string, size, at int) {
	tr := &http.Transport{MaxIdleConnsPerHost: at}
	defer tr.CloseIdleConnections()
	body := []byte(`{"stream":true,"text":"` + strings.Repeat("a", size) + `"}`)
	one := func() error {
		req, _ := http.NewRequest("POST", p.url+"/generate"+query, bytes.NewReader(body))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		if err == nil && (resp.StatusCode != 200 || n < 10) {
			err = fmt.Errorf("%d, %d bytes", resp.StatusCode, n)
		}
		return err
	}
	for end := time.Now().Add(5 * time.Second); one() != nil; { // until it is ready
		if time.Now().After(end) {
			b.Fatal(one())
		}
		<-time.After(10 * time.Millisecond)
	}
	before := p.cpu(b)
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	b.ResetTimer()
	for range at {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := one(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64((p.cpu(b)-before).Microseconds())/float64(b.N), "cpu-µs/req")
}
