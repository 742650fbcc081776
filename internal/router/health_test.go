package router

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func (f *fleet) ready() string {
	f.t.Helper()
	got := f.get("/readyz")
	if got.status == 200 {
		return ""
	}
	return got.body
}

// until waits for a condition in virtual time and returns how long it took.
func until(t *testing.T, most time.Duration, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > most {
			t.Fatalf("not within %v", most)
		}
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
	}
	return time.Since(began)
}

func TestReadyNeedsAPair(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		if why := f.ready(); why != "" {
			t.Fatal(why)
		}
		f.p[0].kill()
		f.p[1].kill()
		until(t, 1500*time.Millisecond, func() bool { return f.ready() != "" })
		if why := f.ready(); !strings.Contains(why, "http://p0:1 is out") || !strings.Contains(why, "cannot connect") {
			t.Errorf("%s", why)
		}
		got := f.post("/generate", ask)
		if got.status != 503 || got.code(t) != "no_prefill" || got.header.Get("Retry-After") == "" {
			t.Errorf("%+v", got)
		}
		if n := len(f.d[0].requests()); n != 0 {
			t.Errorf("decode was sent %d legs alone", n)
		}
		f.p[0].start(f)
		until(t, 600*time.Millisecond, func() bool { return f.ready() == "" })
		if got := f.post("/generate", `{"text":"a","stream":true}`); got.body != usual {
			t.Errorf("%+v", got)
		}
		f.d[0].kill()
		until(t, 1500*time.Millisecond, func() bool { return strings.Contains(f.ready(), "no usable decode") })
		if got := f.post("/generate", ask); got.status != 503 || got.code(t) != "no_decode" {
			t.Errorf("%+v", got)
		}
	})
}

// A stopped process accepts and says nothing. Requests that wait for it move
// to the other prefill when its probes have failed; none is lost.
func TestStoppedPrefill(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hang
		f.p[0].setHealth(hungHealth)
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if host, _ := rooms(t, body); host == "p0" {
				<-r.Context().Done()
				return
			}
			io.WriteString(w, whole)
		}
		// More than the retry budget: moving away from a worker that does nothing
		// multiplies no load.
		answers := make(chan reply)
		const many = 3 * budgetTenths / 10
		for range many {
			go func() { answers <- f.post("/generate", ask) }()
		}
		for range many {
			if got := <-answers; got.status != 200 || got.took > 3*time.Second {
				t.Fatalf("%+v", got)
			}
		}
		began := time.Now()
		f.p[0].setHealth(nil)
		f.p[0].serve = prefilled
		f.d[0].serve = func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) { io.WriteString(w, whole) }
		before := len(f.p[0].requests())
		until(t, 2*time.Second, func() bool { return f.post("/generate", ask).status == 200 && len(f.p[0].requests()) > before })
		t.Logf("used again after %v", time.Since(began))
	})
}

// A hung bootstrap registry takes its prefill out, although the prefill itself
// answers.
func TestHungRegistry(t *testing.T) {
	inFleet(t, 2, 1, func(c *Config) { c.Prefill[0] += ",8998" }, func(t *testing.T, f *fleet) {
		reg := &stub{addr: "p0:8998"}
		reg.start(f)
		defer reg.kill()
		until(t, time.Second, func() bool { return f.standing().up })
		reg.setHealth(hungHealth)
		until(t, 2*time.Second, func() bool { return !f.standing().up })
		if cause := f.standing().cause; !strings.Contains(cause, "bootstrap registry p0:8998: GET /health: no answer within 1s") {
			t.Errorf("%s", cause)
		}
		f.net.mu.Lock()
		f.net.hung["p0:8998"] = true // nor does a connection come about
		f.net.mu.Unlock()
		if got := f.post("/generate", `{"text":"a","stream":true}`); got.body != usual {
			t.Errorf("%+v", got)
		}
		f.net.mu.Lock()
		f.net.hung["p0:8998"] = false
		f.net.mu.Unlock()
		reg.setHealth(nil)
		until(t, time.Second, func() bool { return f.standing().up })
	})
}

// F-37: SGLang's /health generates a token and takes a second at the least,
// which is longer than a probe's time-out. Such a worker is in, and goes out
// when its process stops or its engine hangs.
func TestF37SlowHealth(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		p := f.p[0]
		models := func(w http.ResponseWriter) { w.WriteHeader(http.StatusUnauthorized) } // it asks for clients' tokens
		usually := p.serve
		p.serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if r.URL.Path == "/v1/models" {
				models(w)
				return
			}
			usually(s, w, r, body)
		}
		slowly := func(d time.Duration) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				select {
				case <-time.After(d):
				case <-r.Context().Done():
				}
			}
		}
		steady := func(up bool) {
			t.Helper()
			for range 40 {
				if f.standing().up != up {
					t.Fatalf("in: %v, %s", !up, f.standing().cause)
				}
				time.Sleep(500 * time.Millisecond)
			}
		}
		p.setHealth(hungHealth)
		until(t, 2*time.Second, func() bool { return !f.standing().up })
		time.Sleep(10 * time.Second)
		for _, d := range []time.Duration{1010 * time.Millisecond, 3 * time.Second} {
			p.setHealth(slowly(d))
			took := until(t, d+600*time.Millisecond, func() bool { return f.standing().up })
			t.Logf("/health takes %v: in after %v", d, took)
			steady(true)
		}
		p.setHealth(hungHealth) // the engine hangs, its HTTP side does not
		until(t, 3*time.Second+f.r.slowLimit()+2*time.Second, func() bool { return !f.standing().up })
		steady(false)
		p.setHealth(slowly(2 * time.Second))
		until(t, 5*time.Second, func() bool { return f.standing().up })
		models = func(w http.ResponseWriter) { time.Sleep(time.Minute) } // the process stops
		p.setHealth(hungHealth)
		until(t, 2500*time.Millisecond, func() bool { return !f.standing().up })
		models = func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) }
		p.setHealth(slowly(2 * time.Second)) // slow, and nothing else to go by
		steady(false)
		if n := f.net.open("p0:1"); n > 2*12 {
			t.Errorf("%d connections to one worker are open", n)
		}
	})
}

// Failing requests eject a worker whose probes are fine, but never more than
// the share allowed; a trial brings it back.
func TestEjection(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = says(500, "x")
		for range 20 {
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
		if n := len(f.p[0].requests()); n != ejectStreak {
			t.Errorf("%d legs were sent to the failing prefill, want %d", n, ejectStreak)
		}
		time.Sleep(ejectFor)
		f.p[0].serve = prefilled
		before := len(f.p[0].requests())
		for range 4 {
			f.post("/v1/chat/completions", chat)
		}
		if why := f.ready(); why != "" {
			t.Error(why)
		}
		if n := len(f.p[0].requests()) - before; n != 2 {
			t.Errorf("%d of 4 legs after it healed", n)
		}
		f.p[0].serve, f.p[1].serve = says(500, "x"), says(500, "x")
		for range 10 {
			if got := f.post("/v1/chat/completions", chat); got.status != 500 {
				t.Fatalf("%+v: with both failing, one must stay to tell", got)
			}
		}
		if why := f.ready(); !strings.Contains(why, "http://p1:1 is failing (prefill http://p1:1 answered 500: x)") {
			t.Errorf("ready although every request fails: %q", why)
		}
		f.p[0].serve, f.p[1].serve = prefilled, prefilled
		until(t, doubtFor+time.Second, func() bool { return f.ready() == "" })
	})
}

// A worker that says it is draining is out until its probe says otherwise.
func TestWorkerDrains(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = says(503, `{"error":{"code":"draining","message":"stopping"}}`)
		f.p[0].setHealth(says503)
		for range 4 {
			if got := f.post("/v1/chat/completions", chat); got.body != usual {
				t.Fatalf("%+v", got)
			}
		}
		if n := len(f.p[0].requests()); n != 1 {
			t.Errorf("%d legs were sent to the draining prefill", n)
		}
	})
}

func hungHealth(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// standing is that of the first prefill.
func (f *fleet) standing() standing {
	f.r.table.mu.Lock()
	defer f.r.table.mu.Unlock()
	return f.r.table.pools[Prefill].workers[0].standing
}

func says503(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }

// Shows F-43. Retries are taken from a budget: a fleet that fails everywhere is not sent
// three times the load.
func TestRetryBudget(t *testing.T) {
	inFleet(t, 3, 1, func(c *Config) { c.MaxEjected = 0 }, func(t *testing.T, f *fleet) {
		for _, s := range f.p {
			s.serve = says(500, "x")
		}
		for range 300 {
			f.post("/v1/chat/completions", chat)
		}
		n := 0
		for _, s := range f.p {
			n += len(s.requests())
		}
		if most := 300 + budgetTenths/10 + 300/10; n > most || n < 300+budgetTenths/10 {
			t.Errorf("%d legs for 300 requests; at most %d", n, most)
		}
	})
}

// While the router drains it is not ready and takes nothing; what ends in time
// ends whole, each in its own time, and what does not ends by name when the time
// is up: a stream with an event, what has had no byte with a status.
func TestDrain(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		slow := "data: 1\n\n"
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, b []byte) {
			if strings.Contains(string(b), `"stream":false`) {
				<-r.Context().Done()
				return
			}
			stream(0, slow)(s, w, r, b)
			for text, d := range map[string]time.Duration{"short": 5 * time.Second, "longer": 18 * time.Second} {
				if strings.Contains(string(b), `"text":"`+text) {
					time.Sleep(d)
					io.WriteString(w, "data: [DONE]\n\n")
					return
				}
			}
			<-r.Context().Done()
		}
		begin := func(text string, stream bool) chan reply {
			c := make(chan reply, 1)
			go func() { c <- f.post("/generate", fmt.Sprintf(`{"text":%q,"stream":%v}`, text, stream)) }()
			return c
		}
		short, longer, long, whole := begin("short", true), begin("longer", true), begin("endless", true), begin("endless", false)
		time.Sleep(time.Second)
		began := time.Now()
		f.stop()
		synctest.Wait()
		if why := f.ready(); !strings.Contains(why, "stopping") {
			t.Errorf("readyz: %q", why)
		}
		if got := f.post("/generate", ask); got.status != 503 || got.code(t) != "draining" || got.header.Get("Retry-After") == "" {
			t.Errorf("%+v", got)
		}
		for c, took := range map[chan reply]time.Duration{short: 5 * time.Second, longer: 18 * time.Second} {
			if got := <-c; got.body != slow+"data: [DONE]\n\n" || got.took.Round(time.Second) != took {
				t.Errorf("%+v", got)
			}
		}
		got := <-long
		if got.code(t) != "draining" || !strings.HasPrefix(got.body, slow) {
			t.Errorf("%+v", got)
		}
		if got := <-whole; got.code(t) != "draining" || got.status != 503 {
			t.Errorf("%+v", got)
		}
		f.ended <- <-f.ended
		if took := time.Since(began); took < 20*time.Second || took > 21*time.Second {
			t.Errorf("the drain took %v", took)
		}
	})
}

// A request that has had nothing waits for a worker that is out, for that may
// come back, and moves when another comes in; not for ever.
func TestWorkerOutBeforeTheFirstByte(t *testing.T) {
	ask := func(f *fleet) (reply, time.Duration) {
		began := time.Now()
		got := f.post("/generate", `{"text":"x","stream":true}`)
		return got, time.Since(began)
	}
	within := func(t *testing.T, took, least, most time.Duration) {
		t.Helper()
		if took < least || took > most {
			t.Errorf("it took %v, not %v to %v", took, least, most)
		}
	}
	for leg, code := range map[Leg]string{Decode: "decode_unreachable", Prefill: "prefill_unreachable"} {
		t.Run(leg.String(), func(t *testing.T) {
			inFleet(t, 1, 1, func(c *Config) { c.IdleTimeout = 30 * time.Second }, func(t *testing.T, f *fleet) {
				hung := []*stub{f.p[0], f.d[0]}[leg]
				f.d[0].serve, hung.serve = hang, hang
				time.AfterFunc(time.Second, func() { hung.setHealth(hungHealth) })
				got, took := ask(f)
				if got.code(t) != code || !strings.Contains(got.body, "its health probes have failed for 30s") {
					t.Errorf("%+v", got)
				}
				within(t, took, 30*time.Second, 35*time.Second)
			})
		})
	}
	t.Run("comes back", func(t *testing.T) {
		inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
			f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
				s.setHealth(hungHealth)
				time.Sleep(50 * time.Second)
				s.setHealth(nil)
				time.Sleep(50 * time.Second)
				stream(0, usual)(s, w, r, body)
			}
			got, took := ask(f)
			if got.status != 200 || got.body != usual {
				t.Errorf("%+v", got)
			}
			within(t, took, 100*time.Second, 101*time.Second)
		})
	})
	t.Run("another comes in", func(t *testing.T) {
		inFleet(t, 1, 2, nil, func(t *testing.T, f *fleet) {
			f.d[0].serve = hang
			f.d[0].setHealth(hungHealth)
			f.d[1].setHealth(hungHealth)
			time.Sleep(5 * time.Second)
			f.d[0].setHealth(nil)
			time.Sleep(5 * time.Second)
			time.AfterFunc(time.Second, func() { f.d[0].setHealth(hungHealth) })
			time.AfterFunc(20*time.Second, func() { f.d[1].setHealth(nil) })
			got, took := ask(f)
			if got.status != 200 || got.body != usual {
				t.Errorf("%+v", got)
			}
			within(t, took, 20*time.Second, 25*time.Second)
		})
	})
}

// What a worker sends instead of HTTP does not fill errors and logs.
func TestLongCause(t *testing.T) {
	got := plainCause(t.Context(), errors.New(`malformed HTTP response "`+strings.Repeat(`\x00`, 5000)))
	if len(got) > 500 || !strings.HasPrefix(got, "malformed HTTP response") {
		t.Errorf("%d bytes: %.600s", len(got), got)
	}
}
