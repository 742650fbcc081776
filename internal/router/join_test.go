package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// join keeps a stub a member until the function that it returns is called.
func (f *fleet) join(s *stub, role Leg, instance string) (leave func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	j := &Joiner{Router: "http://router:80", Log: slog.New(slog.DiscardHandler), Dial: f.net.dial,
		Self: Membership{Role: role.String(), URL: s.name, Instance: instance}}
	done := make(chan struct{})
	go func() { defer close(done); j.Run(ctx) }()
	return func() { cancel(); <-done }
}

// put is one renewal.
func (f *fleet) put(m Membership) reply {
	b, _ := json.Marshal(m)
	req, _ := http.NewRequestWithContext(f.t.Context(), "PUT", "http://router:80"+membersPath, strings.NewReader(string(b)))
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, body: string(text), err: err}
}

// A router that is told of no worker is not ready until a pair has joined, and
// loses nothing when one says goodbye and another one comes.
func TestFleetByJoin(t *testing.T) {
	inFleet(t, 0, 0, nil, func(t *testing.T, f *fleet) {
		if got := f.get("/readyz"); got.status != 503 || !strings.Contains(got.body, "no usable prefill worker: there is none") {
			t.Fatalf("%+v", got)
		}
		defer f.join(f.add(Prefill, "p0:1"), Prefill, "a")()
		time.Sleep(time.Second)
		if got := f.get("/readyz"); got.status != 503 || !strings.Contains(got.body, "no usable decode worker: there is none") {
			t.Fatalf("%+v", got)
		}
		leave := f.join(f.add(Decode, "d0:1"), Decode, "b")
		until(t, time.Second, func() bool { return f.ready() == "" })
		if got := f.post("/v1/chat/completions", chat); got.body != usual {
			t.Fatalf("%+v", got)
		}
		defer f.join(f.add(Decode, "d1:1"), Decode, "c")()
		time.Sleep(time.Minute) // many renewals
		if got := f.members(); got != "p0:1 ready; d0:1 ready; d1:1 ready; " {
			t.Fatal(got)
		}
		leave()
		synctest.Wait()
		n := len(f.d[0].requests())
		for range 20 {
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
		if got := len(f.d[0].requests()); got != n {
			t.Errorf("%d requests went to a worker that had said goodbye", got-n)
		}
	})
}

// A worker that falls silent is out when its lease is over; what runs there runs
// on. One that is started anew at its address is a new worker.
func TestLeaseEnds(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		s := f.add(Decode, "d1:1")
		s.serve = func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
			time.Sleep(30 * time.Second)
			io.WriteString(w, whole)
		}
		f.d[0].serve = s.serve
		began := time.Now()
		if got := f.put(Membership{Role: "decode", URL: s.name, Instance: "a"}); got.status != 200 || got.body != `{"lease_ms":10000}`+"\n" {
			t.Fatalf("%+v", got)
		}
		until(t, time.Second, func() bool { return strings.Contains(f.members(), "d1:1 ready") })
		long := make(chan reply, 2)
		for range 2 {
			go func() { long <- f.post("/generate", ask) }()
		}
		until(t, 20*time.Second, func() bool { return strings.Contains(f.members(), "d1:1 leaving") })
		if took := time.Since(began); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("its lease of 10 s was over after %v", took)
		}
		f.d[0].serve = answers(whole)
		for range 10 {
			if got := f.post("/generate", ask); got.status != 200 || len(s.requests()) != 1 {
				t.Fatalf("%+v, %d requests to the worker without a lease", got, len(s.requests()))
			}
		}
		if got := f.put(Membership{Role: "decode", URL: s.name, Instance: "b"}); got.status != 200 {
			t.Fatalf("%+v", got)
		}
		if got := f.put(Membership{Role: "decode", URL: s.name, Instance: "a"}); got.status != 200 {
			t.Fatalf("an instance whose lease only ended may come back: %+v", got)
		}
		if got := f.put(Membership{Role: "decode", URL: s.name, Instance: "b"}); got.status != 409 {
			t.Fatalf("one that was replaced may not: %+v", got)
		}
		for range 2 {
			if got := <-long; got.status != 200 {
				t.Errorf("%+v", got)
			}
		}
	})
}

// Workers find a router that was not there at first, and one that forgot them.
func TestJoinerFindsItsRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet()
		ctx, cancel := context.WithCancel(t.Context())
		j := &Joiner{Router: "http://late:80", Token: api.NewSecret("old"), Log: slog.New(slog.DiscardHandler), Dial: net.dial,
			Self: Membership{Role: "decode", URL: "http://d:1", Instance: "i"}}
		done := make(chan struct{})
		go func() { defer close(done); j.Run(ctx) }()
		time.Sleep(time.Minute)
		var mu sync.Mutex
		var seen []string
		status := 403
		answer := func(with int) (calls []string) { // from now on, and what was seen so far
			mu.Lock()
			defer mu.Unlock()
			calls, seen, status = seen, nil, with
			return calls
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprintf("%s %s %s", r.Method, r.Header.Get("Authorization"), b))
			w.WriteHeader(status)
			io.WriteString(w, `{"lease_ms":3000}`)
		})}
		ln := net.listen(t, "late:80")
		go srv.Serve(ln)
		time.Sleep(5 * time.Second)
		if calls := answer(200); len(calls) == 0 || !strings.HasPrefix(calls[0], "PUT Bearer old ") {
			t.Fatalf("%q", calls)
		}
		j.Token.Replace("new")
		time.Sleep(5 * time.Second)
		answer(200)
		time.Sleep(30 * time.Second)
		calls := answer(200)
		const self = ` Bearer new {"role":"decode","url":"http://d:1","instance":"i"}`
		if n := len(calls); n < 24 || n > 38 || calls[0] != "PUT"+self {
			t.Fatalf("%d renewals in 30 s of a lease of 3 s: %q", n, calls)
		}
		cancel()
		<-done
		if got := strings.Join(answer(409), " "); got != "DELETE"+self {
			t.Errorf("%q", got)
		}
		j.Run(t.Context()) // ends: the router says that this instance is dead
		if calls := answer(409); len(calls) != 1 {
			t.Errorf("%q", calls)
		}
		srv.Close()
	})
}

// F-78: who may join, and with what.
func TestF78JoinRefuses(t *testing.T) {
	const good = `{"role":"decode","url":"http://10.0.0.5:30100","instance":"i"}`
	for _, c := range []struct {
		name, from, token, method, body string
		tokens, joins                   []string // what clients, and what workers must present
		insecure                        bool
		status                          int
		says                            string
	}{
		{name: "no token anywhere, this machine", from: "127.0.0.1", body: good, status: 200},
		{name: "no token anywhere, another machine", from: "10.0.0.5", body: good, status: 403, says: "join with a token"},
		{name: "trusted network", from: "10.0.0.5", insecure: true, body: good, status: 200},
		{name: "no token", from: "127.0.0.1", joins: []string{"s"}, body: good, status: 401, says: "bearer token"},
		{name: "wrong token", from: "127.0.0.1", joins: []string{"s"}, token: "t", body: good, status: 403, says: "not one of"},
		{name: "no token, insecure", from: "10.0.0.5", insecure: true, joins: []string{"s"}, body: good, status: 401, says: "bearer token"},
		{name: "a client's token", from: "10.0.0.5", tokens: []string{"c"}, joins: []string{"s"}, token: "c", body: good, status: 403, says: "not one of"},
		{name: "the right token", from: "10.0.0.5", tokens: []string{"c"}, joins: []string{"s", "r"}, token: "r", body: good, status: 200},
		{name: "goodbye without token", from: "10.0.0.5", joins: []string{"s"}, method: "DELETE", body: good, status: 401, says: "bearer token"},
		{name: "reading", from: "127.0.0.1", method: "GET", status: 405, says: "use PUT"},
		{name: "10 MB", from: "127.0.0.1", body: good + strings.Repeat(" ", 10<<20), status: 413, says: "at most 4096 bytes"},
		{name: "no JSON", from: "127.0.0.1", body: "x", status: 400, says: "not a membership"},
		{name: "wrong role", from: "127.0.0.1", body: `{"role":"router","url":"http://10.0.0.5:1","instance":"i"}`, status: 400, says: "prefill or decode"},
		{name: "no instance", from: "127.0.0.1", body: `{"role":"decode","url":"http://10.0.0.5:1"}`, status: 400, says: "visible ASCII"},
		{name: "instance with a line end", from: "127.0.0.1", body: `{"role":"decode","url":"http://10.0.0.5:1","instance":"a\nb"}`, status: 400, says: "visible ASCII"},
		{name: "a path", from: "127.0.0.1", body: `{"role":"decode","url":"http://10.0.0.5:1/admin","instance":"i"}`, status: 400, says: "only scheme, host and port"},
		{name: "another scheme", from: "127.0.0.1", body: `{"role":"decode","url":"file://x","instance":"i"}`, status: 400, says: "not a URL"},
		{name: "a password", from: "127.0.0.1", body: `{"role":"decode","url":"http://u:p@10.0.0.5:1","instance":"i"}`, status: 400, says: "only scheme, host and port"},
		{name: "a comma", from: "127.0.0.1", body: `{"role":"decode","url":"http://a,b:1","instance":"i"}`, status: 400, says: "host"},
		{name: "a decode with a registry", from: "127.0.0.1", body: `{"role":"decode","url":"http://10.0.0.5:1","instance":"i","bootstrap_port":1}`, status: 400, says: "bootstrap port"},
		{name: "a port too many", from: "127.0.0.1", body: `{"role":"prefill","url":"http://10.0.0.5:1","instance":"i","bootstrap_port":65536}`, status: 400, says: "bootstrap port"},
		{name: "its own loopback", from: "10.0.0.5", insecure: true, body: `{"role":"decode","url":"http://127.0.0.1:1","instance":"i"}`, status: 400, says: "--advertise"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Default()
			cfg.Insecure, cfg.Tokens, cfg.JoinTokens = c.insecure, api.NewTokens(c.tokens...), api.NewTokens(c.joins...)
			r, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if c.method == "" {
				c.method = "PUT"
			}
			req := httptest.NewRequest(c.method, membersPath, strings.NewReader(c.body))
			req.RemoteAddr = c.from + ":1"
			if c.token != "" {
				req.Header.Set("Authorization", "Bearer "+c.token)
			}
			rec := httptest.NewRecorder()
			r.handler.ServeHTTP(rec, req)
			if rec.Code != c.status || !strings.Contains(rec.Body.String(), c.says) {
				t.Errorf("%d %s; want %d, %q", rec.Code, rec.Body, c.status, c.says)
			}
			if n := len(r.table.all()); n > 0 != (c.status == 200) {
				t.Errorf("%d members", n)
			}
		})
	}
}
