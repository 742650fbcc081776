package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Whole answers, as /generate without stream gives them.
const (
	ask   = `{"text":"hi"}`
	whole = `{"text":"x","meta_info":{"finish_reason":{"type":"stop"}}}`
)

func TestWholeAnswerPassesUnchanged(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.d[0].serve = answers(whole)
		got := f.post("/generate", ask)
		if got.status != 200 || got.body != whole || got.header.Get("X-Request-Id") == "" {
			t.Fatalf("%+v", got)
		}
	})
}

// Shows F-25, F-62. Each item of a batch, and each of its choices, has a room of its own.
func TestBatchHasARoomForEachItem(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Prefill[0] += ",8998" }, func(t *testing.T, f *fleet) {
		reg := &stub{addr: "p0:8998"}
		reg.start(f)
		defer reg.kill()
		time.Sleep(time.Second)
		f.d[0].serve = answers("[1,2]")
		if got := f.post("/generate", `{"text":["a","b"],"sampling_params":{"n":2}}`); got.body != "[1,2]" {
			t.Fatalf("%+v", got)
		}
		var v struct {
			Host []string `json:"bootstrap_host"`
			Port []int    `json:"bootstrap_port"`
			Room []int64  `json:"bootstrap_room"`
		}
		if err := json.Unmarshal(f.p[0].requests()[0], &v); err != nil {
			t.Fatal(err)
		}
		slices.Sort(v.Room)
		if !slices.Equal(v.Host, []string{"p0", "p0", "p0", "p0"}) || !slices.Equal(v.Port, []int{8998, 8998, 8998, 8998}) ||
			len(slices.Compact(v.Room)) != 4 || v.Room[0] < 0 {
			t.Errorf("%+v", v)
		}
	})
}

// The stub failures below are seen by a client as a normal answer: another pair
// has given it, in time, and the first pair's other leg was let go at once.
func TestRetriesBeforeTheFirstByte(t *testing.T) {
	cut := func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	// SGLang's way: the head of a stream at once, the failure inside of it.
	aborted := stream(0, `data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Decode handshake failed","status_code":500}}}`+"\n\n", "data: [DONE]\n\n")
	for _, c := range []struct {
		name string
		leg  Leg
		bad  func(*stub, http.ResponseWriter, *http.Request, []byte)
	}{
		{"prefill answers 500", Prefill, says(500, `{"object":"error","message":"boom","code":500}`)},
		{"prefill answers 502", Prefill, says(502, "bad gateway")},
		{"prefill answers 503", Prefill, says(503, `{"error":{"code":"starting","message":"loading"}}`)},
		{"prefill is full", Prefill, says(429, `{"error":{"code":"overloaded","message":"full"}}`)},
		{"prefill breaks off", Prefill, cut},
		{"prefill aborts in a stream", Prefill, aborted},
		{"prefill has an error event", Prefill, stream(0, `data: {"error":{"code":"internal","message":"x"}}`+"\n\n")},
		{"decode answers 500", Decode, says(500, "boom")},
		{"decode breaks off", Decode, cut},
		{"decode aborts in its first event", Decode, aborted},
		{"decode has an error event first", Decode, stream(0, `data: {"error":{"code":"internal","message":"x"}}`+"\n\n")},
		{"decode sends only a comment", Decode, stream(0, ": hello\n\n")},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
				bad, peer := f.p[0], f.d[0]
				if c.leg == Decode {
					bad, peer = f.d[0], f.p[0]
				}
				bad.serve, peer.serve = c.bad, hang
				got := f.post("/v1/chat/completions", chat)
				if got.status != 200 || got.body != usual || got.err != nil {
					t.Fatalf("%+v", got)
				}
				if got.took > 100*time.Millisecond {
					t.Errorf("took %v", got.took)
				}
				synctest.Wait()
				if n, times := len(peer.requests()), peer.times(); len(times) != n || n == 1 && times[0] > 50*time.Millisecond {
					t.Errorf("the other leg: %d requests, ran %v", n, times) // none: let go before it was sent
				}
				other := f.p[1]
				if c.leg == Decode {
					other = f.d[1]
				}
				_, a := rooms(t, bad.requests()[0])
				_, b := rooms(t, other.requests()[0])
				if a == b {
					t.Errorf("both attempts have room %d", a)
				}
			})
		})
	}
}

func TestRefusedConnectionIsRetried(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].kill()
		for range 4 { // well before a probe notices
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
	})
}

// Shows F-06, F-51. Without another pair the client hears in short time, by a
// status and a body, what happened; the other leg is let go.
func TestErrorsWithoutAnotherPair(t *testing.T) {
	bad := `{"error":{"message":"too long","code":"context_length_exceeded","type":"x","param":"prompt"}}` + "\n"
	for _, c := range []struct {
		name         string
		p, d         func(*stub, http.ResponseWriter, *http.Request, []byte)
		status       int
		code, phrase string
		unchanged    string
	}{
		{name: "prefill 400", p: says(400, bad), d: hang, status: 400, code: "context_length_exceeded", unchanged: bad},
		{name: "decode 400", p: hang, d: says(400, bad), status: 400, code: "context_length_exceeded", unchanged: bad},
		{name: "prefill 400 inside a stream", d: hang, status: 400, code: "invalid_request", phrase: "too long",
			p: stream(0, `data: {"meta_info":{"finish_reason":{"type":"abort","message":"too long","status_code":400}}}`+"\n\n")},
		{name: "prefill 500", p: says(500, "boom"), d: hang, status: 500, code: "internal", phrase: "prefill http://p0:1 answered 500: boom"},
		{name: "decode blames the prefill", p: hang, status: 502, code: "prefill_unreachable", phrase: "after 15 attempts",
			d: says(502, `{"error":{"code":"prefill_unreachable","message":"Could not fetch prefill parallel info from p0:8998 after 15 attempts"}}`)},
		{name: "foreign 503", p: says(503, "busy"), d: hang, status: 503, code: "no_prefill", phrase: "busy"},
		{name: "decode 404", p: hang, d: says(404, `{"error":{"code":"model_not_found","message":"m"}}`), status: 404, code: "model_not_found"},
		{name: "decode sends elsewhere", p: hang, d: says(302, ""), status: 502, code: "decode_unreachable", phrase: "status 302"},
		{name: "decode says nothing", p: hang, d: says(204, ""), status: 502, code: "decode_unreachable", phrase: "status 204"},
		{name: "prefill sends elsewhere", p: says(307, ""), d: hang, status: 502, code: "prefill_unreachable", phrase: "status 307"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				f.p[0].serve, f.d[0].serve = c.p, c.d
				got := f.post("/v1/completions", `{"prompt":"x","stream":true}`)
				if got.status != c.status || got.code(t) != c.code || !strings.Contains(got.body, c.phrase) {
					t.Fatalf("%d %s", got.status, got.body)
				}
				if c.unchanged != "" && got.body != c.unchanged {
					t.Errorf("body %s", got.body)
				}
				if got.status == 503 && got.header.Get("Retry-After") == "" {
					t.Error("no Retry-After")
				}
				if got.took > 50*time.Millisecond {
					t.Errorf("took %v", got.took)
				}
				synctest.Wait()
				for _, s := range []*stub{f.p[0], f.d[0]} {
					if n, times := len(s.requests()), s.times(); n > 1 || len(times) != n || n == 1 && times[0] > 50*time.Millisecond {
						t.Errorf("%s: %d requests, ran %v", s.name, n, times)
					}
				}
			})
		})
	}
}

// Shows F-50. A failure after the first byte is an error event, the end of the
// connection, and no [DONE].
func TestFailureInsideAStream(t *testing.T) {
	event := "data: {\"id\":1}\n\n"
	for _, c := range []struct {
		name         string
		d            func(*stub, http.ResponseWriter, *http.Request, []byte)
		keeps        string
		code, phrase string
	}{
		{"cut", func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, event)(s, w, r, b)
			panic(http.ErrAbortHandler)
		}, event, "decode_unreachable", "broke off"},
		{"reset", func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, event)(s, w, r, b)
			time.Sleep(time.Millisecond)
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			c.(*memConn).reset()
		}, event, "decode_unreachable", "connection reset"},
		{"closed in order, without [DONE]", stream(0, event), event, "decode_unreachable", "broke off"},
		{"cut inside an event", stream(0, event, `data: {"i`), event, "decode_unreachable", "broke off"},
		{"silent", func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, event)(s, w, r, b)
			<-r.Context().Done()
		}, event, "decode_unreachable", "nothing came for 1m0s"},
		{"an error event", stream(0, event, event+`data: {"error":{"code":"kv_transfer_failed","message":"gone"}}`+"\n\n"), event + event, "kv_transfer_failed", "gone"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
				f.d[0].serve = c.d
				got := f.post("/v1/chat/completions", chat)
				if got.status != 200 || got.err != nil || got.code(t) != c.code || !strings.Contains(got.body, c.phrase) || strings.Contains(got.body, "[DONE]") {
					t.Fatalf("%+v", got)
				}
				if i := strings.LastIndex(got.body, "data: {\"error\""); got.body[:i] != c.keeps {
					t.Errorf("before the error: %q", got.body[:i])
				}
				if n := len(f.d[1].requests()); n != 0 {
					t.Error("tried again after the first byte")
				}
				synctest.Wait()
				if n := f.net.open("router:80"); n != 0 {
					t.Errorf("%d connections are left open", n)
				}
			})
		})
	}
}

// A prefill that fails when decode has begun does not matter.
func TestPrefillFailsAfterTheFirstByte(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			time.Sleep(25 * time.Millisecond)
			panic(http.ErrAbortHandler)
		}
		f.d[0].serve = stream(10*time.Millisecond, strings.SplitAfter(usual, "\n\n")...)
		if got := f.post("/v1/chat/completions", chat); got.body != usual {
			t.Fatalf("%+v", got)
		}
	})
}

// Decode's end ends a prefill that has not, 50 ms later.
func TestDecodesEndEndsPrefill(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hang
		got := f.post("/v1/chat/completions", chat)
		if got.body != usual {
			t.Fatalf("%+v", got)
		}
		time.Sleep(endGrace)
		synctest.Wait()
		if times := f.p[0].times(); len(times) != 1 || times[0] > got.took+endGrace {
			t.Errorf("the prefill leg ran %v, the request %v", times, got.took)
		}
	})
}

func TestClientGoneEndsBothLegs(t *testing.T) {
	for _, c := range []struct {
		name string
		d    func(*stub, http.ResponseWriter, *http.Request, []byte)
	}{
		{"while both are stuck", hang},
		{"in the middle of a stream", func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, "data: 1\n\n")(s, w, r, b)
			<-r.Context().Done()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				f.p[0].serve, f.d[0].serve = hang, c.d
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				got := f.do(ctx, "/v1/chat/completions", chat)
				if got.err == nil {
					t.Fatalf("%+v", got)
				}
				synctest.Wait()
				for _, s := range []*stub{f.p[0], f.d[0]} {
					if times := s.times(); len(times) != 1 || times[0] > time.Second+50*time.Millisecond {
						t.Errorf("%s ran %v", s.name, times)
					}
				}
			})
		})
	}
}

// A client that leaves ends decode's leg, and decode takes its room back. When
// the prefill tells of that before the client's own goroutine has run, nobody is
// blamed, and no other pair is asked.
func TestClientGoneIsNobodysFault(t *testing.T) {
	inFleet(t, 1, 2, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = says(502, `{"error":{"code":"kv_transfer_failed","message":"the decode worker took the room back"}}`)
		ctx, leave := context.WithCancel(t.Context())
		req := httptest.NewRequestWithContext(ctx, "POST", "/generate", strings.NewReader(ask))
		w := httptest.NewRecorder()
		x := &exchange{r: f.r, w: w, rc: http.NewResponseController(w), req: req, kind: api.Generate, path: "/generate", began: f.r.now(), id: "left",
			pair: pair{retries: 2}}
		x.history = newHistory(x)
		if err := x.open(); err != nil {
			t.Fatal(err)
		}
		leave()
		x.step(event{kind: evStart}) // the client's goroutine comes to decode's leg late
		synctest.Wait()
		if x.pair.phase != phaseEnded || x.pair.end.Code != api.ClientGone {
			t.Errorf("phase %v, end %v", x.pair.phase, x.pair.end)
		}
		x.run()
		x.close(nil)
		if legs := len(f.p[0].requests()); legs != 1 || strings.Contains(f.logs.String(), "leg failed") {
			t.Errorf("%d prefill legs; %s", legs, f.logs)
		}
	})
}

// A client that closes only its sending side is taken for one that has left, for
// nothing tells the two apart. It can still read, and must not read a success.
func TestClientThatStillReadsIsTold(t *testing.T) {
	for _, c := range []struct {
		name string
		d    func(*stub, http.ResponseWriter, *http.Request, []byte)
		want int
		cut  bool
	}{
		{"before the answer", hang, 499, false},
		{"in the middle of a stream", func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, "data: 1\n\n")(s, w, r, b)
			<-r.Context().Done()
		}, 200, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
				f.p[0].serve, f.d[0].serve = hang, c.d
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				w := httptest.NewRecorder()
				defer func() {
					if cut := recover() == http.ErrAbortHandler; cut != c.cut || w.Code != c.want {
						t.Errorf("status %d, cut %v, body %q", w.Code, cut, w.Body)
					}
				}()
				f.r.routes().ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/v1/chat/completions", strings.NewReader(chat)))
			})
		})
	}
}

// Shows F-51. A request whose time is out before the first byte is a 504, in a
// stream an event, and a 408 while its body still comes.
func TestDeadline(t *testing.T) {
	t.Run("before the first byte", func(t *testing.T) {
		inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
			f.p[0].serve, f.d[0].serve = hang, hang
			got := f.post("/v1/chat/completions", chat, "X-Request-Timeout", "1500ms")
			if got.status != 504 || got.code(t) != "deadline_exceeded" || got.header.Get("X-Should-Retry") != "false" || got.took > 1550*time.Millisecond {
				t.Fatalf("%+v", got)
			}
			if h := f.d[0].header(0).Get("X-Request-Timeout"); h != "1500ms" {
				t.Errorf("decode was told %q", h)
			}
			synctest.Wait()
			if a, b := f.p[0].times(), f.d[0].times(); len(a) != 1 || len(b) != 1 || a[0] > 1550*time.Millisecond || b[0] > 1550*time.Millisecond {
				t.Errorf("legs ran %v, %v", a, b)
			}
		})
	})
	t.Run("in a stream", func(t *testing.T) {
		inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
			f.d[0].serve = stream(300*time.Millisecond, "data: 1\n\n", "data: 2\n\n", "data: 3\n\n")
			got := f.post("/v1/chat/completions", chat, "X-Request-Timeout", "500ms")
			if got.status != 200 || got.code(t) != "deadline_exceeded" || !strings.HasPrefix(got.body, "data: 1\n\ndata: 2\n\ndata: {\"error\"") || got.took > 550*time.Millisecond {
				t.Fatalf("%+v", got)
			}
		})
	})
	t.Run("while the body trickles", func(t *testing.T) {
		inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
			c, err := f.net.dial(t.Context(), "mem", "router:80")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			began := time.Now()
			io.WriteString(c, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nX-Request-Timeout: 2s\r\n\r\n{\"text\":")
			b := make([]byte, 4096)
			n, err := c.Read(b)
			if !strings.HasPrefix(string(b[:n]), "HTTP/1.1 408 ") || time.Since(began) > 2050*time.Millisecond {
				t.Fatalf("%s %v after %v", b[:n], err, time.Since(began))
			}
			if len(f.d[0].requests()) != 0 {
				t.Error("a leg was sent")
			}
		})
	})
}

// A client that takes nothing holds decode back, costs bounded memory, and is
// cut in the end.
func TestSlowClientHoldsDecodeBack(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		written, event := 0, "data: "+strings.Repeat("x", 1000)+"\n\n"
		f.d[0].serve = func(_ *stub, w http.ResponseWriter, r *http.Request, _ []byte) {
			w.Header().Set("Content-Type", "text/event-stream")
			for r.Context().Err() == nil {
				n, err := io.WriteString(w, event)
				written += n
				if err != nil {
					return
				}
			}
		}
		c, err := f.net.dial(t.Context(), "mem", "router:80")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(ask), ask)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if most := 2*memBuffer + 2*relayBuffer + 64<<10; written > most {
			t.Errorf("decode wrote %d bytes, more than the %d that buffers hold", written, most)
		}
		time.Sleep(f.r.cfg.WriteTimeout)
		synctest.Wait()
		if n := f.r.running(); n != 0 {
			t.Errorf("%d requests still run", n)
		}
		if len(f.d[0].times()) != 1 {
			t.Error("decode still runs")
		}
		if got := f.r.table.pools[Decode].workers[0].standing; got.streak != 0 || got.cause != "" {
			t.Errorf("decode is blamed: %+v", got)
		}
	})
}

// Shows F-49. A pooled connection that the worker closed meanwhile, because it
// was restarted, costs no request.
func TestStaleConnection(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.HealthFails = 100 }, func(t *testing.T, f *fleet) {
		for range 3 {
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
			for _, s := range []*stub{f.p[0], f.d[0]} {
				s.kill()
				s.start(f)
			}
		}
	})
}

// F-49: a worker closes an idle connection while a request is on its way over
// it. If no byte of an answer has come the request goes out once more, on a new
// connection; not so if the connection was new.
func TestF49IdleConnectionClosedInTheWay(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Retries = 0 }, func(t *testing.T, f *fleet) {
		closes := func(s *stub, _ http.ResponseWriter) bool { return len(s.requests()) == 2 }
		drop := func(w http.ResponseWriter) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			c.Close()
		}
		for _, s := range []*stub{f.p[0], f.d[0]} {
			good := s.serve
			s.serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
				if closes(s, w) {
					drop(w)
					return
				}
				good(s, w, r, body)
			}
		}
		for range 3 {
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
		if h := f.p[0].header(0); h["Idempotency-Key"] != nil {
			t.Errorf("the worker is sent %v", h)
		}
		for _, s := range []*stub{f.p[0], f.d[0]} {
			if n := len(s.requests()); n != 4 {
				t.Errorf("%s had %d requests, want 3 and one again", s.name, n)
			}
		}
		time.Sleep(workerIdle + time.Second) // the next connection is new
		closes = func(*stub, http.ResponseWriter) bool { return true }
		if got := f.post("/v1/chat/completions", chat); got.status != 502 {
			t.Errorf("%+v", got)
		}
		if p, d := len(f.p[0].requests()), len(f.d[0].requests()); max(p, d) != 5 { // the leg that fails first may end the other on its way
			t.Errorf("%d and %d requests: sent again although the connection was new", p, d)
		}
	})
}

// F-49: workers close connections that were idle for 5 s, as SGLang's do, and
// requests come just before, at and just after that moment, and that of our own
// limit, 500 times. A worker restarts between two requests. None fails.
func TestF49RequestsAroundIdleLimits(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Retries = 0 }, func(t *testing.T, f *fleet) {
		for _, s := range []*stub{f.p[0], f.d[0]} {
			s.kill()
			s.idle = 5 * time.Second
			s.start(f)
		}
		time.Sleep(2 * time.Second)
		for i := range 500 {
			gap := map[bool]time.Duration{true: 5 * time.Second, false: workerIdle}[i%2 == 0]
			time.Sleep(gap + time.Duration(i%21-10)*time.Millisecond - 20*time.Millisecond) // an answer takes 20 ms or so
			if i%50 == 49 {
				f.p[0].kill()
				f.p[0].start(f)
			}
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("request %d: %+v", i, got)
			}
		}
	})
}

// Shows F-50. An answer that is no stream and breaks off in its middle is no
// answer: another decode gives it, or the client hears an error.
func TestWholeAnswerIsCut(t *testing.T) {
	for _, decodes := range []int{1, 2} {
		for _, length := range []bool{true, false} {
			inFleet(t, 1, decodes, nil, func(t *testing.T, f *fleet) {
				for _, s := range f.d {
					s.serve = answers(whole)
				}
				f.d[0].serve = func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
					w.Header().Set("Content-Type", "application/json")
					if length {
						w.Header().Set("Content-Length", fmt.Sprint(len(whole)))
					}
					io.WriteString(w, whole[:len(whole)/2])
					w.(http.Flusher).Flush()
					time.Sleep(time.Millisecond)
					panic(http.ErrAbortHandler)
				}
				got := f.post("/generate", ask)
				if decodes == 2 && (got.status != 200 || got.body != whole) {
					t.Errorf("with another decode: %+v", got)
				}
				if decodes == 1 && (got.status != 502 || got.code(t) != "decode_unreachable") {
					t.Errorf("without another decode: %+v", got)
				}
			})
		}
	}
}

func TestRefusedRequests(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.MaxBody = 1000 }, func(t *testing.T, f *fleet) {
		for _, c := range []struct {
			name, method, path, body string
			header                   []string
			status                   int
			code                     string
		}{
			{"no JSON", "POST", "/generate", `{"text":`, nil, 400, "invalid_request"},
			{"a field twice", "POST", "/generate", `{"text":"a","text":"b"}`, nil, 400, "invalid_request"},
			{"too large", "POST", "/generate", `{"text":"` + strings.Repeat("a", 1000) + `"}`, nil, 413, "body_too_large"},
			{"unknown path", "POST", "/v2/x", ask, nil, 404, "not_found"},
			{"wrong method", "GET", "/generate", "", nil, 405, "method_not_allowed"},
			{"bad timeout", "POST", "/generate", ask, []string{"X-Request-Timeout", "soon"}, 400, "invalid_request"},
			{"no time left", "POST", "/generate", ask, []string{"X-Request-Timeout", "-1s"}, 408, "deadline_exceeded"},
		} {
			req, _ := http.NewRequest(c.method, "http://router:80"+c.path, strings.NewReader(c.body))
			for i := 0; i < len(c.header); i += 2 {
				req.Header.Set(c.header[i], c.header[i+1])
			}
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			got := reply{status: resp.StatusCode, body: string(b)}
			if got.status != c.status || got.code(t) != c.code || resp.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s: %d %s", c.name, got.status, got.body)
			}
		}
		if n := len(f.p[0].requests()) + len(f.d[0].requests()); n != 0 {
			t.Errorf("%d legs were sent", n)
		}
	})
}

func TestTokens(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Tokens, c.PeerToken = api.NewTokens("right"), api.NewSecret("peer") }, func(t *testing.T, f *fleet) {
		if got := f.post("/generate", ask); got.status != 401 || got.code(t) != "unauthorized" {
			t.Errorf("%+v", got)
		}
		if got := f.post("/generate", ask, "Authorization", "Bearer wrong"); got.status != 403 || got.code(t) != "forbidden" {
			t.Errorf("%+v", got)
		}
		if got := f.post("/generate", ask, "Authorization", "bearer right"); got.status != 200 {
			t.Errorf("%+v", got)
		}
		if h := f.d[0].header(0).Get("Authorization"); h != "Bearer peer" {
			t.Errorf("decode got %q", h)
		}
		for _, path := range []string{"/livez", "/readyz", "/health"} {
			if got := f.get(path); got.status != 200 {
				t.Errorf("%s: %d", path, got.status)
			}
		}
		for _, path := range []string{"/v1/models", "/metrics", "/server_info"} {
			if got := f.get(path); got.status != 401 {
				t.Errorf("%s: %d", path, got.status)
			}
		}
		if got := f.get("/nothing"); got.status != 404 {
			t.Errorf("/nothing: %d", got.status)
		}
	})
}

func TestTooManyRequests(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.MaxRequests = 1 }, func(t *testing.T, f *fleet) {
		f.p[0].serve, f.d[0].serve = hang, hang
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan reply)
		go func() { ended <- f.do(ctx, "/generate", ask) }()
		synctest.Wait()
		if got := f.post("/generate", ask); got.status != 429 || got.code(t) != "overloaded" || got.header.Get("Retry-After") == "" {
			t.Errorf("%+v", got)
		}
		if got := f.get("/debug/requests"); got.status != 200 || !strings.Contains(got.body, `"phase":"open"`) || !strings.Contains(got.body, `"prefill":"http://p0:1"`) {
			t.Errorf("%+v", got)
		}
		cancel()
		<-ended
	})
}

// Facts come from one worker, or from all.
func TestFacts(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		for _, s := range append(f.p, f.d...) {
			s.serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
				fmt.Fprintf(w, `{"worker":%q,"path":%q,"body":%q}`, s.addr, r.URL.RequestURI(), body)
			}
		}
		if got := f.get("/v1/models"); got.status != 200 || got.body != `{"worker":"p0:1","path":"/v1/models","body":""}` {
			t.Errorf("%+v", got)
		}
		if got := f.post("/tokenize", `{"text":"a"}`); got.body != `{"worker":"d0:1","path":"/tokenize","body":"{\"text\":\"a\"}"}` {
			t.Errorf("%+v", got)
		}
		kept := f.p[0].serve
		f.p[0].serve = func(*stub, http.ResponseWriter, *http.Request, []byte) { panic(http.ErrAbortHandler) }
		if got := f.get("/v1/models"); got.body != `{"worker":"p1:1","path":"/v1/models","body":""}` {
			t.Errorf("after the first one broke off: %+v", got)
		}
		f.p[0].serve = kept
		f.p[1].serve = says(500, "x")
		got := f.get("/server_info")
		var v struct {
			Prefill, Decode []struct {
				Worker string
				Error  struct{ Code string }
			}
		}
		if err := json.Unmarshal([]byte(got.body), &v); err != nil {
			t.Fatal(err, got.body)
		}
		if len(v.Prefill) != 2 || v.Prefill[0].Worker != "p0:1" || v.Prefill[1].Error.Code != "prefill_unreachable" || len(v.Decode) != 1 || v.Decode[0].Worker != "d0:1" {
			t.Errorf("%s", got.body)
		}
	})
}

func TestMetricsAndLog(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = says(500, "x")
		f.post("/v1/chat/completions", chat)
		f.post("/v1/chat/completions", "{")
		got := f.get("/metrics").body
		for _, want := range []string{
			`metronome_requests_total{code="ok"} 1`, `metronome_requests_total{code="invalid_request"} 1`, `metronome_retries_total 1`,
			`metronome_workers{role="prefill",state="ready"} 2`, `metronome_workers{role="decode",state="ready"} 1`, `metronome_time_to_first_token_seconds_count 1`,
			`metronome_e2e_request_latency_seconds_count 1`,
		} {
			if !strings.Contains(got, want+"\n") {
				t.Errorf("no %s", want)
			}
		}
	})
}

// A client that leaves as soon as it has [DONE] has had its answer, however
// long the worker takes to end; a worker that does not is let go.
func TestClientLeavesAfterDone(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			stream(0, usual)(s, w, r, b)
			<-r.Context().Done()
		}
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		req, _ := http.NewRequestWithContext(ctx, "POST", "http://router:80/generate", strings.NewReader(`{"text":"x","stream":true}`))
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, len(usual))); err != nil {
			t.Fatal(err)
		}
		leave()
		time.Sleep(2 * endGrace)
		synctest.Wait()
		if got := f.get("/metrics").body; !strings.Contains(got, `metronome_requests_total{code="ok"} 1`) || strings.Contains(got, "client_gone") {
			t.Error(got)
		}
		if times := f.d[0].times(); len(times) != 1 {
			t.Errorf("decode legs ended: %v", times)
		}
	})
}

// A body that does not fit into one write is sent on byte for byte, to both
// legs and again to the next pair.
func TestLargeBodyPassesUnchanged(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve, f.p[1].serve = says(500, `{}`), prefilled
		word := func(n int) string {
			var b strings.Builder
			for i := range n {
				fmt.Fprintf(&b, "%07d ", i)
			}
			return b.String()
		}
		front, back := `"stream":true,"a":"`+word(5000)+`"`, `,"b":"`+word(30000)+`"}`
		for range 2 { // round robin: each meets the prefill that fails first
			if got := f.post("/generate", "{"+front+`,"bootstrap_room":7`+back); got.status != 200 || got.body != usual {
				t.Fatalf("%d %.200s %v", got.status, got.body, got.err)
			}
		}
		legs := slices.Concat(f.p[0].requests(), f.p[1].requests(), f.d[0].requests())
		if len(legs) < 6 { // a decode leg may be over before it is sent
			t.Errorf("%d legs, want at least 6: two requests, each sent again", len(legs))
		}
		for i, b := range legs {
			_, rest, _ := strings.Cut(string(b), `,"stream"`)
			if `"stream"`+rest != front+back {
				t.Errorf("leg %d is not what was sent: %d bytes, want %d", i, len(rest), len(front+back))
			}
		}
	})
}
