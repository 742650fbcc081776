package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fleet is a router and stub workers on a network of their own, inside a
// synctest bubble.
type fleet struct {
	t      *testing.T
	net    *memNet
	r      *Router
	client *http.Client
	tr     *http.Transport
	stop   context.CancelFunc
	ended  chan error
	p, d   []*stub
	logs   *bytes.Buffer
}

// stub is a worker that does what its test says.
type stub struct {
	name  string // URL
	addr  string
	serve func(s *stub, w http.ResponseWriter, r *http.Request, body []byte)
	srv   *http.Server
	idle  time.Duration // after which it closes an idle connection; 0: never

	mu     sync.Mutex
	health http.HandlerFunc // under mu: probes come at any time; nil: 200
	probes int
	bodies [][]byte
	heads  []http.Header
	ended  []time.Duration // how long each request ran until it ended or its caller left
}

func (s *stub) requests() [][]byte { s.mu.Lock(); defer s.mu.Unlock(); return s.bodies }
func (s *stub) probed() int        { s.mu.Lock(); defer s.mu.Unlock(); return s.probes }
func (s *stub) header(i int) http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heads[i]
}
func (s *stub) times() []time.Duration { s.mu.Lock(); defer s.mu.Unlock(); return s.ended }

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		s.mu.Lock()
		health := s.health
		s.probes++
		s.mu.Unlock()
		if health != nil {
			health(w, r)
		}
		return
	}
	began := time.Now()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	s.bodies, s.heads = append(s.bodies, body), append(s.heads, r.Header.Clone())
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.ended = append(s.ended, time.Since(began))
		s.mu.Unlock()
	}()
	s.serve(s, w, r, body)
}

func (s *stub) start(f *fleet) {
	s.srv = &http.Server{Handler: s, IdleTimeout: s.idle, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	ln := f.net.listen(f.t, s.addr)
	go s.srv.Serve(ln)
}

// kill ends the worker as a dying process does.
func (s *stub) kill() { s.srv.Close() }

func (s *stub) setHealth(h http.HandlerFunc) { s.mu.Lock(); s.health = h; s.mu.Unlock() }

// hang answers nothing until the caller leaves.
func hang(_ *stub, _ http.ResponseWriter, r *http.Request, _ []byte) { <-r.Context().Done() }

// afterward answers a prefill leg when decode has what it needs: a while later.
func prefilled(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
	time.Sleep(10 * time.Millisecond)
	io.WriteString(w, `{"text":"x","meta_info":{"finish_reason":{"type":"length"}}}`)
}

const usual = "data: {\"id\":1}\n\ndata: {\"id\":2}\n\ndata: [DONE]\n\n"

// stream sends events, spaced by gap, the first one after the prefill's time.
func stream(gap time.Duration, events ...string) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	return func(_ *stub, w http.ResponseWriter, r *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		time.Sleep(20 * time.Millisecond)
		for i, e := range events {
			if i > 0 {
				time.Sleep(gap)
			}
			io.WriteString(w, e)
			w.(http.Flusher).Flush()
		}
	}
}

// answers gives a whole answer after the prefill's time.
func answers(body string) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	return func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
		time.Sleep(20 * time.Millisecond)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, body)
	}
}

// hears answers a prefill leg in these pieces, a while apart, and then breaks
// off or ends well.
func hears(kind string, cut bool, pieces ...string) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	return func(_ *stub, w http.ResponseWriter, r *http.Request, _ []byte) {
		w.Header().Set("Content-Type", kind)
		for _, p := range pieces {
			time.Sleep(30 * time.Millisecond)
			io.WriteString(w, p)
			w.(http.Flusher).Flush()
		}
		if cut {
			panic(http.ErrAbortHandler)
		}
	}
}

// says answers at once with a status and a body.
func says(status int, body string) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	return func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// inFleet runs a test against a router with np prefills and nd decodes that do
// the usual thing, in virtual time.
func inFleet(t *testing.T, np, nd int, change func(*Config), test func(t *testing.T, f *fleet)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t, net: newMemNet(), ended: make(chan error, 1), logs: &bytes.Buffer{}}
		cfg := Default()
		cfg.Policy = "round_robin"
		cfg.Dial = f.net.dial
		for i := range np {
			s := &stub{addr: fmt.Sprintf("p%d:1", i), serve: prefilled}
			s.name = "http://" + s.addr
			f.p = append(f.p, s)
			cfg.Prefill = append(cfg.Prefill, s.name)
			s.start(f)
		}
		for i := range nd {
			s := &stub{addr: fmt.Sprintf("d%d:1", i), serve: stream(time.Millisecond, strings.SplitAfter(usual, "\n\n")...)}
			s.name = "http://" + s.addr
			f.d = append(f.d, s)
			cfg.Decode = append(cfg.Decode, s.name)
			s.start(f)
		}
		if change != nil {
			change(&cfg)
		}
		var err error
		if f.r, err = New(cfg); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		f.stop = stop
		ln := f.net.listen(t, "router:80")
		go func() { f.ended <- f.r.Run(ctx, ln) }()
		f.tr = &http.Transport{DialContext: f.net.dial}
		f.client = &http.Client{Transport: f.tr}
		defer f.close()
		time.Sleep(time.Millisecond) // the first probes
		synctest.Wait()
		test(t, f)
	})
}

// close ends everything, also after a test that gave up.
func (f *fleet) close() {
	f.tr.CloseIdleConnections()
	f.stop()
	if err := <-f.ended; err != nil {
		f.t.Errorf("Run: %v", err)
	}
	for _, w := range f.r.table.all() {
		if w.load != 0 || w.legs != 0 {
			f.t.Errorf("%s is left with %d legs and load %d", w.name, w.legs, w.load)
		}
	}
	if n := f.r.bodies.Load(); n != 0 {
		f.t.Errorf("%d bytes of bodies are still booked", n)
	}
	for _, s := range append(f.p, f.d...) {
		s.kill()
	}
	time.Sleep(time.Minute) // stubs wake up and see that they are alone
	synctest.Wait()
}

// reply is an answer as a client sees it.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of reading the body
	took   time.Duration
}

func (f *fleet) post(path, body string, header ...string) reply {
	f.t.Helper()
	return f.do(f.t.Context(), path, body, header...)
}

func (f *fleet) do(ctx context.Context, path, body string, header ...string) reply {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://router:80"+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	began := time.Now()
	resp, err := f.client.Do(req)
	if err != nil {
		return reply{err: err, took: time.Since(began)}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(b), err, time.Since(began)}
}

func (f *fleet) get(path string) reply {
	f.t.Helper()
	resp, err := f.client.Get("http://router:80" + path)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(b), err: err}
}

// code is the error code of a reply's body, or of the last event of a stream.
func (r reply) code(t *testing.T) string {
	t.Helper()
	body := r.body
	if i := strings.LastIndex(body, "data: "); i >= 0 {
		body = body[i+len("data: "):]
	}
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("no error body: %d %q (%v)", r.status, r.body, r.err)
	}
	return e.Error.Code
}

// rooms reads the pairing fields of a leg's body.
func rooms(t *testing.T, body []byte) (host string, room int64) {
	t.Helper()
	var v struct {
		Host string `json:"bootstrap_host"`
		Room int64  `json:"bootstrap_room"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return v.Host, v.Room
}

const chat = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`

func TestF27StreamPassesUnchanged(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		in := `{"stream":true, "messages":[], "x":0.1,"y":1.10,"big":9007199254740993,"bootstrap_host":"evil","routed_dp_rank":3}`
		got := f.post("/v1/chat/completions", in, "X-Request-Id", "abc", "X-Custom", "1", "Authorization", "Bearer client")
		if got.status != 200 || got.body != usual || got.err != nil {
			t.Fatalf("%+v", got)
		}
		if got.header.Get("X-Request-Id") != "abc" || got.header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("header %v", got.header)
		}
		p, d := f.p[0].requests(), f.d[0].requests()
		if len(p) != 1 || len(d) != 1 || !bytes.Equal(p[0], d[0]) {
			t.Fatalf("legs: %s / %s", p, d)
		}
		host, room := rooms(t, p[0])
		want := fmt.Sprintf(`{"bootstrap_host":"p0","bootstrap_port":null,"bootstrap_room":%d,"stream":true, "messages":[], "x":0.1,"y":1.10,"big":9007199254740993}`, room)
		if host != "p0" || room < 0 || string(p[0]) != want {
			t.Errorf("sent %s\nwant %s", p[0], want)
		}
		for _, h := range []http.Header{f.p[0].header(0), f.d[0].header(0)} {
			if h.Get("X-Request-Id") != "abc" || h.Get("X-Custom") != "1" || h.Get("Authorization") != "Bearer client" {
				t.Errorf("leg's header %v", h)
			}
			if d, err := time.ParseDuration(h.Get("X-Request-Timeout")); err != nil || d > 600*time.Second || d < 599*time.Second {
				t.Errorf("X-Request-Timeout %q", h.Get("X-Request-Timeout"))
			}
		}
	})
}

// Whatever a client says of pairing, ranks or KV parameters reaches no worker,
// and a field that comes twice reaches none either: workers would differ in
// which of the two they believe.
func TestClientsPairingFieldsAreRemoved(t *testing.T) {
	fields := []string{"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank",
		"data_parallel_rank", "disagg_prefill_dp_rank", "kv_transfer_params", "metronome_journal"}
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		for _, name := range fields {
			for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/generate"} {
				for _, spelled := range []string{name, strings.ToUpper(name), strings.Replace(name, "_", `\u005f`, 1)} {
					before := len(f.p[0].requests())
					got := f.post(path, fmt.Sprintf(`{"a":1,"%s":{"host":"evil"},"stream":true,"b":[2]}`, spelled))
					if got.status != 200 || got.body != usual {
						t.Fatalf("%s %s: %+v", path, spelled, got)
					}
					for _, s := range []*stub{f.p[0], f.d[0]} {
						body := s.requests()[before]
						_, room := rooms(t, body)
						want := fmt.Sprintf(`{"bootstrap_host":"p0","bootstrap_port":null,"bootstrap_room":%d,"a":1,"stream":true,"b":[2]}`, room)
						if string(body) != want {
							t.Errorf("%s %s: sent %s\nwant %s", path, spelled, body, want)
						}
					}
				}
			}
		}
		before := len(f.p[0].requests())
		for _, name := range append(fields, "stream", "model", "anything") {
			got := f.post("/generate", fmt.Sprintf(`{"%s":null,"text":"x","%s":null}`, name, name))
			if got.status != 400 || got.code(t) != "invalid_request" || !strings.Contains(got.body, "comes twice") {
				t.Errorf("%s twice: %+v", name, got)
			}
		}
		if n := len(f.p[0].requests()) + len(f.d[0].requests()) - 2*before; n != 0 {
			t.Errorf("%d legs were sent of bodies with a field twice", n)
		}
	})
}
