package router

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// many sends n requests at once and gives their answers.
func (f *fleet) many(n int, path, body string) []reply {
	c := make(chan reply)
	for range n {
		go func() { c <- f.post(path, body) }()
	}
	var all []reply
	for range n {
		all = append(all, <-c)
	}
	return all
}

const badRequest = `{"error":{"code":"invalid_request","message":"no"}}`

// F-06: whatever way a prefill fails before the first byte, the other one takes
// over; without another one the client has an error within 2 s. Decode's half is
// let go at once. A 400 is the client's own and is never tried again.
func TestF06PrefillFails(t *testing.T) {
	dies := func(_ *stub, _ http.ResponseWriter, r *http.Request, _ []byte) {
		select {
		case <-time.After(time.Second):
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	}
	for _, c := range []struct {
		name   string
		serve  func(*stub, http.ResponseWriter, *http.Request, []byte) // nil: it refuses
		passes int                                                     // a status that goes to the client
		alone  string
	}{
		{"refuses", nil, 0, "prefill_unreachable"},
		{"answers 503", says(503, `{"error":{"message":"no"}}`), 0, "no_prefill"},
		{"answers 400", says(400, badRequest), 400, "invalid_request"},
		{"dies after a second", dies, 0, "prefill_unreachable"},
	} {
		for _, other := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, other %v", c.name, other), func(t *testing.T) {
				inFleet(t, 2, 1, func(cfg *Config) {
					cfg.MaxEjected = 0
					cfg.HealthEvery = time.Hour // what its probes say is another matter
					if !other {
						cfg.Prefill = cfg.Prefill[:1]
					}
				}, func(t *testing.T, f *fleet) {
					if c.serve == nil {
						f.p[0].kill()
					} else {
						f.p[0].serve = c.serve
					}
					f.d[0].serve = func(_ *stub, w http.ResponseWriter, r *http.Request, body []byte) {
						if host, _ := rooms(t, body); host == "p0" { // KV that cannot come
							<-r.Context().Done()
							return
						}
						if time.Sleep(20 * time.Millisecond); bytes.Contains(body, []byte(`"stream":true`)) {
							w.Header().Set("Content-Type", "text/event-stream")
							io.WriteString(w, usual)
							return
						}
						w.Header().Set("Content-Type", "application/json")
						io.WriteString(w, whole)
					}
					all := append(f.many(50, "/generate", ask), f.many(50, "/v1/chat/completions", chat)...)
					good := 0
					for _, got := range all {
						switch {
						case got.body == whole || got.body == usual:
							good++
						case got.took > 2*time.Second || other && got.status != c.passes || got.code(t) != c.alone,
							c.passes != 0 && (got.status != c.passes || got.body != badRequest):
							t.Fatalf("%+v", got)
						}
					}
					legs := 0
					for _, s := range f.p {
						legs += len(s.requests())
					}
					switch {
					case c.passes != 0 && legs != 100:
						t.Errorf("%d prefill legs for 100 requests: a client's mistake was tried again", legs)
					case c.passes == 0 && good != map[bool]int{true: 100, false: 0}[other]:
						t.Errorf("%d of 100 went well", good)
					}
					synctest.Wait()
					limit := time.Second // after the failure
					if c.name == "dies after a second" {
						limit += time.Second
					}
					for i, d := range f.d[0].times() {
						if d > limit {
							t.Errorf("decode's half of request %d ran for %v", i, d)
						}
					}
					if n := len(f.d[0].times()); n != len(f.d[0].requests()) {
						t.Errorf("%d of %d decode halves have ended", n, len(f.d[0].requests()))
					}
				})
			})
		}
	}
}

// F-26: each attempt has a room of its own, the same on both legs, and nothing
// of the client's goes into it.
func TestF26FreshRooms(t *testing.T) {
	inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
		const n = 1000 // without an id, and as many with the same one
		seen := map[int64]int{}
		f.p[0].serve = says(500, "x")
		for range 3 {
			f.post("/v1/chat/completions", chat)
		}
		f.p[0].serve = prefilled
		time.Sleep(2 * ejectFor)
		for i := range 2 * n {
			if i%2 == 0 {
				f.post("/v1/chat/completions", chat)
			} else {
				f.post("/v1/chat/completions", `{"rid":"same","messages":[],"stream":true,"bootstrap_room":7}`, "X-Request-Id", "same")
			}
		}
		for _, s := range append(f.p, f.d...) {
			for _, body := range s.requests() {
				_, room := rooms(t, body)
				if room < 0 {
					t.Errorf("room %d", room)
				}
				seen[room]++
			}
		}
		single := 0 // a failed try may have been over before its decode leg was sent
		for room, legs := range seen {
			if legs == 1 {
				single++
			}
			if legs > 2 || room == 7 {
				t.Errorf("room %d is in %d legs", room, legs)
			}
		}
		if tried := len(seen) - 2*n; tried < 4 || tried > 6 || single > tried-3 {
			t.Errorf("%d requests had %d rooms, %d of them in one leg only", 2*n+3, len(seen), single)
		}
	})
}

// F-40: while the breaker of the only prefill is open neither leg is sent and
// clients are told to come back; one trial closes it. A worker that was dead for
// long is used again, and a first burst locks nobody out.
func TestF40BreakerLetsGo(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.MaxEjected = 1 }, func(t *testing.T, f *fleet) {
		for _, got := range f.many(500, "/v1/chat/completions", chat) {
			if got.body != usual {
				t.Fatalf("in the first second: %+v", got)
			}
		}
		f.p[0].serve = says(500, "x")
		for range ejectStreak {
			f.post("/v1/chat/completions", chat)
		}
		synctest.Wait() // decode's half of the last one may be on its way still
		p, d := len(f.p[0].requests()), len(f.d[0].requests())
		for range 50 {
			if got := f.post("/v1/chat/completions", chat); got.status != 503 || got.code(t) != "no_prefill" || got.header.Get("Retry-After") != "1" {
				t.Fatalf("%+v", got)
			}
		}
		if len(f.p[0].requests()) != p || len(f.d[0].requests()) != d {
			t.Error("legs were sent while the breaker was open")
		}
		f.p[0].serve = prefilled
		until(t, ejectFor+time.Second, func() bool { return f.post("/v1/chat/completions", chat).body == usual })

		f.p[0].kill()
		time.Sleep(3 * time.Minute)
		f.p[0].start(f)
		until(t, 2*time.Second, func() bool { return f.post("/v1/chat/completions", chat).body == usual })
	})
}

// F-42: a burst on top of long streams spreads over both decodes, whatever the
// policy, and at each moment a worker's legs are the streams that are open there.
func TestF42LongStreamsAndABurst(t *testing.T) {
	for _, policy := range []string{"least_load", "round_robin", "power_of_two"} {
		t.Run(policy, func(t *testing.T) {
			inFleet(t, 2, 2, func(c *Config) { c.Policy = policy }, func(t *testing.T, f *fleet) {
				time.Sleep(rampFor)
				f.post("/v1/chat/completions", chat)
				f.post("/v1/chat/completions", chat)
				for _, s := range f.d {
					s.serve = stream(30*time.Second, "data: 1\n\n", "data: [DONE]\n\n")
				}
				answers := make(chan reply, 60)
				send := func() { go func() { answers <- f.post("/v1/chat/completions", chat) }() }
				even := func(when string, n int) {
					t.Helper()
					synctest.Wait()
					for _, s := range f.d {
						open := len(s.requests()) - len(s.times())
						if legs := f.legs(Decode, s.name); legs != open {
							t.Errorf("%s: %d legs are counted at %s, %d are open", when, legs, s.name, open)
						}
						if n > 0 && 10*open > 6*n {
							t.Errorf("%s: %s has %d of %d", when, s.name, open, n)
						}
					}
				}
				for i := range 20 {
					send()
					time.Sleep(200 * time.Millisecond)
					even(fmt.Sprintf("stream %d", i), 0)
				}
				even("twenty streams", 20)
				for range 40 {
					send()
					time.Sleep(2500 * time.Microsecond)
				}
				even("and a burst", 60)
				for range 60 {
					if got := <-answers; got.status != 200 {
						t.Fatalf("%+v", got)
					}
					even("at the end", 0)
				}
				for _, s := range f.p { // a long prompt and one token, the other way round
					if n := len(s.requests()); n > 62*6/10 {
						t.Errorf("%s had %d of 62 prompts", s.name, n)
					}
				}
			})
		})
	}
}

// legs is how many legs the router counts at a worker.
func (f *fleet) legs(leg Leg, name string) int {
	f.r.table.mu.Lock()
	defer f.r.table.mu.Unlock()
	for _, w := range f.r.table.pools[leg].workers {
		if w.name == name {
			return int(w.legs)
		}
	}
	return -1
}

// F-43: one stopped and two slow prefills. What waits for the stopped one moves
// once; the slow ones are left to work, and nothing is computed twice.
func TestF43NothingComputedTwice(t *testing.T) {
	inFleet(t, 3, 1, nil, func(t *testing.T, f *fleet) {
		slow := func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
			time.Sleep(10 * time.Second)
			io.WriteString(w, whole)
		}
		f.p[0].serve = hang
		f.p[0].setHealth(hungHealth)
		f.p[1].serve, f.p[2].serve = slow, slow
		f.d[0].serve = func(_ *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if host, _ := rooms(t, body); host == "p0" {
				<-r.Context().Done()
				return
			}
			time.Sleep(10 * time.Second)
			io.WriteString(w, whole)
		}
		for _, got := range f.many(20, "/generate", ask) {
			if got.status != 200 || got.took > 13*time.Second {
				t.Errorf("%+v", got)
			}
		}
		if n := len(f.p[1].requests()) + len(f.p[2].requests()); n != 20 {
			t.Errorf("%d prompts were computed for 20 requests", n)
		}
	})
}

// F-52: no limit counts from a request's start but its own deadline: a stream of
// three minutes and a prefill that is silent for a minute are fine.
func TestF52LongAndSlow(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		var events []string
		for i := range 180 {
			events = append(events, fmt.Sprintf("data: %d\n\n", i))
		}
		events = append(events, "data: [DONE]\n\n")
		f.p[0].serve = func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
			time.Sleep(70 * time.Second)
			io.WriteString(w, whole)
		}
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			time.Sleep(70 * time.Second)
			stream(time.Second, events...)(s, w, r, body)
		}
		got := f.post("/generate", `{"text":"a","stream":true}`)
		if got.body != strings.Join(events, "") || got.err != nil || got.took < 4*time.Minute {
			t.Errorf("%d bytes after %v: %v", len(got.body), got.took, got.err)
		}
		// A client that sends its head by drops is bounded all the same.
		c, err := f.net.dial(t.Context(), "", "router:80")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		go func() {
			for _, b := range []byte("POST /generate HTTP/1.1\r\nHost: r\r\nX: " + strings.Repeat("y", 1000)) {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		}()
		io.ReadAll(c)
		if took := time.Since(began); took > headerTimeout+time.Second {
			t.Errorf("a slow head was waited for %v", took)
		}
		c.Close()
	})
}

// F-53: events of any size and form pass unchanged.
func TestF53EventsOfAnySize(t *testing.T) {
	event := func(n int) string { return `data: {"x":"` + strings.Repeat("y", n) + `"}` + "\n\n" }
	const done = "data: [DONE]\n\n"
	for name, body := range map[string]string{
		"64 KiB": event(70<<10) + done, "1 MiB": event(1<<20) + event(5) + done, "16 MiB": event(17<<20) + done,
		"CRLF":     "data: {\"a\":1}\r\n\r\ndata: {\"b\":2}\r\n\r\ndata: [DONE]\r\n\r\n",
		"comments": ": ping\n\n: pong\n\n" + event(3) + ": ping\n\n" + done,
		"fields":   "event: x\nid: 3\nretry: 5\ndata: 1\ndata: 2\n\n" + done,
	} {
		t.Run(name, func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				f.d[0].serve = stream(0, body)
				if got := f.post("/generate", `{"text":"a","stream":true}`); got.body != body || got.err != nil {
					t.Errorf("%d bytes for %d: %v", len(got.body), len(body), got.err)
				}
				if len(body) < 1000 {
					f.d[0].serve = stream(time.Millisecond, strings.Split(body, "")...)
					// Comments ahead of the first event go out with it.
					if got := f.post("/generate", `{"text":"a","stream":true}`); got.body != body || got.err != nil {
						t.Errorf("byte by byte: %q for %q: %v", got.body, body, got.err)
					}
				}
			})
		})
	}
}

// raw sends bytes to the router and reads until the connection ends.
func (f *fleet) raw(request string) string {
	f.t.Helper()
	c, err := f.net.dial(f.t.Context(), "", "router:80")
	if err != nil {
		f.t.Fatal(err)
	}
	defer c.Close()
	go io.WriteString(c, request)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	b, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, io.EOF) && len(b) == 0 {
		return "error: " + err.Error()
	}
	return string(b)
}

// A body that never comes ends any request, of any path, with an answer.
func TestBodiesThatNeverCome(t *testing.T) {
	for head, want := range map[string]string{
		"POST /generate":                               "408",
		"POST /generate\nX-Request-Timeout: 5s":        "408",
		"POST /generate\nX-Request-Timeout: soon":      "400",
		"POST /generate\nX-Request-Timeout: 1h":        "408",
		"GET /generate":                                "405",
		"POST /tokenize":                               "408",
		"PUT /members\nX-Forwarded-For: 10.0.0.1":      "408",
		"GET /livez":                                   "200",
		"POST /nowhere\nTransfer-Encoding: chunked":    "404",
		"POST /generate\nTransfer-Encoding: chunked":   "408",
		"POST /detokenize\nTransfer-Encoding: chunked": "408",
		"POST /v1/models":                              "405",
	} {
		t.Run(strings.ReplaceAll(head, "\n", " "), func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				c, err := f.net.dial(t.Context(), "", "router:80")
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				line, header, _ := strings.Cut(head, "\n")
				if !strings.Contains(header, "chunked") {
					header += "\r\nContent-Length: 50"
				}
				go io.WriteString(c, line+" HTTP/1.1\r\nHost: r\r\n"+strings.TrimPrefix(header, "\r\n")+"\r\n\r\n")
				began := time.Now()
				c.SetReadDeadline(began.Add(2 * time.Minute))
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil || !strings.HasPrefix(resp.Status, want) || time.Since(began) > 61*time.Second {
					t.Errorf("after %v: %+v %v, want %s", time.Since(began), resp, err, want)
				}
			})
		})
	}
}

// A body that is cut into chunks wrongly is a mistake that the client is told of.
func TestBodiesThatCannotBeRead(t *testing.T) {
	for _, path := range []string{"/generate", "/tokenize"} {
		inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
			got := f.raw("POST " + path + " HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
			if !strings.HasPrefix(got, "HTTP/1.1 400 ") || !strings.Contains(got, `"code":"invalid_request"`) {
				t.Errorf("%s: %q", path, got)
			}
		})
	}
}

// Requests that two readers could cut in two ways are refused, or reach the
// workers as one request with a length of our own; nothing is smuggled behind.
func TestSmuggling(t *testing.T) {
	const smuggled = "POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 20\r\n\r\n{\"text\":\"smuggled\"} "
	head := func(lines ...string) string {
		return "POST /generate HTTP/1.1\r\nHost: r\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
	}
	chunked := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(s), s) }
	for name, c := range map[string]struct {
		request string
		status  string
		bodies  int // that the decode sees
	}{
		"two lengths":           {head("Content-Length: 13", "Content-Length: 99") + ask + smuggled, "400", 0},
		"lengths in a list":     {head("Content-Length: 13, 99") + ask, "400", 0},
		"negative length":       {head("Content-Length: -1") + ask, "400", 0},
		"length with a sign":    {head("Content-Length: +13") + ask, "400", 0},
		"unknown coding":        {head("Transfer-Encoding: xchunked") + chunked(ask), "501", 0},
		"two codings":           {head("Transfer-Encoding: gzip, chunked") + chunked(ask), "501", 0},
		"length and chunked":    {head("Content-Length: 13", "Transfer-Encoding: chunked", "Connection: close") + chunked(ask), "200", 1},
		"coding with a space":   {head("Transfer-Encoding : chunked") + chunked(ask), "400", 0},
		"folded line":           {head("X-A: 1\r\n 2", "Content-Length: 13", "Connection: close") + ask, "200", 1},
		"no host":               {"POST /generate HTTP/1.1\r\nContent-Length: 13\r\n\r\n" + ask, "400", 0},
		"NUL in a header":       {head("X-A: a\x00b", "Content-Length: 13") + ask, "400", 0},
		"bare CR":               {head("X-A: a\rX-B: b", "Content-Length: 13") + ask, "400", 0},
		"head too large":        {head("X-A: "+strings.Repeat("a", 2*headerMax), "Content-Length: 13") + ask, "431", 0},
		"bad chunk size":        {head("Transfer-Encoding: chunked") + "zz\r\n" + ask, "", 0},
		"chunk extension":       {head("Transfer-Encoding: chunked", "Connection: close") + fmt.Sprintf("%x;a=b\r\n%s\r\n0\r\n\r\n", len(ask), ask), "200", 1},
		"trailer":               {head("Transfer-Encoding: chunked", "Connection: close") + fmt.Sprintf("%x\r\n%s\r\n0\r\nAuthorization: Bearer x\r\n\r\n", len(ask), ask), "200", 1},
		"body longer than said": {head("Content-Length: 13") + ask + "\r\n\r\nGARBAGE", "200", 1},
	} {
		t.Run(name, func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				f.d[0].serve = answers(whole)
				got := f.raw(c.request)
				if status, _, _ := strings.Cut(strings.TrimPrefix(got, "HTTP/1.1 "), " "); status != c.status && c.status != "" {
					t.Errorf("%.200q, want %s", got, c.status)
				}
				if strings.Contains(got, "smuggled") {
					t.Errorf("%q", got)
				}
				seen := f.d[0].requests()
				if len(seen) != c.bodies {
					t.Fatalf("decode saw %d requests, want %d", len(seen), c.bodies)
				}
				for i, body := range seen {
					h := f.d[0].header(i)
					if !bytes.HasSuffix(body, []byte(ask[1:])) || h.Get("Transfer-Encoding") != "" || h.Get("Authorization") != "" || h.Get("Trailer") != "" {
						t.Errorf("decode saw %q with %v", body, h)
					}
				}
			})
		})
	}
}

// A request id is the client's only if it is short and visible; headers of one
// connection end there.
func TestHeaders(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			w.Header().Set("Connection", "X-Hop")
			w.Header().Set("X-Hop", "1")
			w.Header().Set("Keep-Alive", "timeout=5")
			w.Header().Set("X-End", "1")
			answers(whole)(s, w, r, body)
		}
		for id, kept := range map[string]bool{
			"abc": true, strings.Repeat("a", 128): true, "!~": true,
			strings.Repeat("a", 129): false, "a b": false, "ä": false, "": false,
		} {
			got := f.post("/generate", ask, "X-Request-Id", id)
			if back := got.header.Get("X-Request-Id"); got.status != 200 || (back == id) != kept || len(back) > 128 || back == "" {
				t.Errorf("%q came back as %q", id, back)
			}
			n := len(f.d[0].requests()) - 1
			if sent := f.d[0].header(n).Get("X-Request-Id"); sent != got.header.Get("X-Request-Id") {
				t.Errorf("decode was sent the id %q", sent)
			}
		}
		got := f.post("/generate", ask, "Connection", "X-Mine, close", "X-Mine", "1", "Te", "trailers", "Upgrade", "h2c",
			"Proxy-Authorization", "Basic x", "Expect", "", "X-Other", "1")
		h := f.d[0].header(len(f.d[0].requests()) - 1)
		for _, k := range []string{"Connection", "X-Mine", "Te", "Upgrade", "Proxy-Authorization", "Keep-Alive"} {
			if h.Get(k) != "" {
				t.Errorf("decode was sent %s: %s", k, h.Get(k))
			}
		}
		if h.Get("X-Other") != "1" || got.header.Get("X-End") != "1" || got.header.Get("X-Hop") != "" || got.header.Get("Keep-Alive") != "" {
			t.Errorf("to decode: %v\nto the client: %v", h, got.header)
		}
	})
}
