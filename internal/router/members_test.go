package router

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// add starts one more worker that does the usual thing. It is no member yet.
func (f *fleet) add(leg Leg, addr string) *stub {
	s := &stub{addr: addr, name: "http://" + addr, serve: prefilled}
	if leg == Decode {
		s.serve = stream(time.Millisecond, strings.SplitAfter(usual, "\n\n")...)
		f.d = append(f.d, s)
	} else {
		f.p = append(f.p, s)
	}
	s.start(f)
	return s
}

func (f *fleet) set(prefill, decode string) {
	f.t.Helper()
	if err := f.r.SetWorkers(strings.Fields(prefill), strings.Fields(decode)); err != nil {
		f.t.Fatal(err)
	}
}

// members is the listing, as role, address and state.
func (f *fleet) members() string {
	var b strings.Builder
	for _, w := range f.r.table.rows() {
		fmt.Fprintf(&b, "%s %s; ", strings.TrimPrefix(w.URL, "http://"), w.State)
	}
	return b.String()
}

// F-21: who is removed gets no new request, the listing shows what lives, and
// what runs there runs on.
func TestF21RemovedWorkerIsForgotten(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[1].serve = func(_ *stub, w http.ResponseWriter, r *http.Request, _ []byte) {
			time.Sleep(5 * time.Second)
			io.WriteString(w, whole)
		}
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if host, _ := rooms(t, body); host == "p1" {
				time.Sleep(5 * time.Second)
			}
			io.WriteString(w, whole)
		}
		long := make(chan reply, 2)
		for range 2 {
			go func() { long <- f.post("/generate", ask) }()
		}
		synctest.Wait()
		f.set("http://p0:1", "http://d0:1")
		if got := f.members(); got != "p0:1 ready; p1:1 leaving; d0:1 ready; " {
			t.Error(got)
		}
		for range 200 {
			if got := f.post("/generate", ask); got.status != 200 {
				t.Fatalf("%+v", got)
			}
		}
		if n := len(f.p[1].requests()); n != 1 {
			t.Errorf("the removed worker had %d requests, want the first one only", n)
		}
		for range 2 {
			if got := <-long; got.status != 200 {
				t.Errorf("%+v", got)
			}
		}
		time.Sleep(time.Second)
		if got := f.members(); got != "p0:1 ready; d0:1 ready; " {
			t.Error(got)
		}
		probes := f.p[1].probed()
		time.Sleep(5 * time.Second)
		if n := f.p[1].probed(); n != probes {
			t.Errorf("a forgotten worker is still probed: %d more", n-probes)
		}
	})
}

// F-75: whatever the order of adding and removing, and however long a new
// worker takes to start, no request meets an empty pool.
func TestF75ReplacedUnderLoad(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Prefill[0] += ",8998" }, func(t *testing.T, f *fleet) {
		for _, a := range []string{"p0:8998", "p0:8999", "p1:8998"} {
			reg := &stub{addr: a}
			reg.start(f)
			defer reg.kill()
		}
		p1 := f.add(Prefill, "p1:1")
		time.Sleep(time.Second)
		stop, ended := make(chan struct{}), make(chan int)
		go func() {
			n := 0
			for ; ; n++ {
				select {
				case <-stop:
					ended <- n
					return
				default:
				}
				if got := f.post("/v1/chat/completions", chat); got.body != usual {
					t.Errorf("request %d: %+v\n%s", n, got, f.members())
					time.Sleep(10 * time.Millisecond)
				}
			}
		}()
		for i := range 50 {
			switch i % 4 {
			case 0: // both in one
				f.set("http://p1:1,8998", "http://d0:1")
			case 1: // added, removed right after
				f.set("http://p0:1,8998 http://p1:1,8998", "http://d0:1")
				f.set("http://p0:1,8998", "http://d0:1")
			case 2: // the reverse
				f.set("", "http://d0:1")
				f.set("http://p0:1,8998", "http://d0:1")
			case 3: // the same address, other facts; it starts late
				p1.setHealth(says503)
				f.set("http://p0:1,8999 http://p1:1,8998", "http://d0:1")
				time.Sleep(300 * time.Millisecond)
				p1.setHealth(nil)
			}
			time.Sleep(time.Duration(i) * 5 * time.Millisecond)
		}
		close(stop)
		if n := <-ended; n < 100 {
			t.Errorf("only %d requests", n)
		}
	})
}

// A removed worker without a successor goes on for leaveFor; then the pool is
// empty and says so.
func TestLastWorkerLeaves(t *testing.T) {
	inFleet(t, 1, 1, func(c *Config) { c.Watched = true }, func(t *testing.T, f *fleet) {
		f.set("", "http://d0:1")
		until(t, leaveFor+time.Second, func() bool { return f.ready() != "" })
		got := f.post("/generate", ask)
		if got.status != 503 || got.code(t) != "no_prefill" || !strings.Contains(got.body, "there is none") {
			t.Errorf("%+v", got)
		}
		f.set("http://p0:1", "http://d0:1")
		until(t, time.Second, func() bool { return f.ready() == "" })
		if got := f.post("/v1/chat/completions", chat); got.body != usual {
			t.Errorf("%+v", got)
		}
		if err := f.r.SetWorkers([]string{"http://p0:1", "nonsense"}, nil); err == nil || f.ready() != "" {
			t.Errorf("a wrong list: %v, %q", err, f.ready())
		}
	})
}

// A worker that starts late is used within 2 s, a few requests at a time.
func TestLateStarterRampsUp(t *testing.T) {
	inFleet(t, 1, 2, func(c *Config) { c.Prefill = append(c.Prefill, "http://p9:1") }, func(t *testing.T, f *fleet) {
		time.Sleep(10 * time.Second) // p0 is warm
		late := f.add(Prefill, "p9:1")
		slow := func(_ *stub, w http.ResponseWriter, _ *http.Request, _ []byte) {
			time.Sleep(time.Second)
			io.WriteString(w, whole)
		}
		late.serve, f.p[0].serve = slow, slow
		for _, d := range f.d {
			d.serve = slow
		}
		until(t, time.Second, func() bool { return strings.Contains(f.members(), "p9:1 ready") })
		answers := make(chan reply, 100)
		for range 100 {
			go func() { answers <- f.post("/generate", ask) }()
		}
		synctest.Wait()
		if n := len(late.requests()); n != rampLegs {
			t.Errorf("%d of 100 at once went to the worker that has just come in, want %d", n, rampLegs)
		}
		for range 100 {
			if got := <-answers; got.status != 200 {
				t.Fatalf("%+v", got)
			}
		}
		time.Sleep(rampFor)
		for range 100 {
			go func() { answers <- f.post("/generate", ask) }()
		}
		synctest.Wait()
		if n := len(late.requests()) - rampLegs; n != 50 {
			t.Errorf("%d of 100 at once went to it when it was warm, want half", n)
		}
		for range 100 {
			<-answers
		}
	})
}
