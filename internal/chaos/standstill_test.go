package chaos

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// standStill stops processes for so long, as a machine that pauses does.
func standStill(t *testing.T, d time.Duration, procs ...*Proc) {
	t.Helper()
	for _, p := range procs {
		if err := p.Stop(); err != nil {
			t.Skip(err)
		}
	}
	time.Sleep(d)
	for _, p := range procs {
		p.Continue()
	}
}

// A fleet whose machine stands still for just over the silence that a KV link
// may have, and one for much longer, goes on as if nothing had been: the pages
// under way arrive, the stream runs on, nobody is out and nothing is tried again.
func TestStandstill(t *testing.T) {
	r := newRig(t)
	f := r.startPair(t, "sim", []string{"--sim-prefill-rate=500"}, []string{"--heartbeat-interval=500ms"}, []string{"--engine=sim"})
	procs := []*Proc{f.prefill, f.decode, f.router}
	body := func(prompt, tokens int) map[string]any {
		return map[string]any{"text": strings.Repeat("x", prompt), "sampling_params": map[string]any{"max_new_tokens": tokens, "temperature": 0}}
	}
	for _, d := range []time.Duration{10300 * time.Millisecond, 25 * time.Second} {
		running := startStream(t, f.router.HTTP, body(10, 1500))
		fresh := make(chan *Answer, 1)
		go func() { // ends within its bound
			fresh <- endsIn(t, d+requestBound, func(ctx context.Context) (*Answer, error) {
				return Generate(ctx, f.router.HTTP, body(1500, 5))
			})
		}()
		time.Sleep(time.Second) // a third of its prompt is computed
		standStill(t, d, procs...)
		if a := <-fresh; a.Error != nil || len(a.IDs) != 5 {
			t.Errorf("after %v: the request whose prompt was computed: %+v", d, a)
		}
		select {
		case <-running.done:
		case <-time.After(requestBound + 15*time.Second):
			t.Fatalf("after %v: the stream has not ended", d)
		}
		if running.err != nil || running.answer.Error != nil || len(running.answer.IDs) != 1500 {
			t.Errorf("after %v: the stream: %v %+v", d, running.err, running.answer)
		}
	}
	unmoved(t, f.router)
	if log := f.decode.Log() + f.prefill.Log(); strings.Contains(log, "silent for") || strings.Contains(log, "took nothing") {
		t.Errorf("a link was given up:\n%s", log)
	}
}

// unmoved: the router has found nothing wrong with anybody.
func unmoved(t *testing.T, router *Proc) {
	t.Helper()
	m, err := Metrics(within(t, requestBound), router.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"metronome_retries_total", "metronome_migrations_total"} {
		if m[name] != 0 {
			t.Errorf("%s is %v", name, m[name])
		}
	}
	for _, word := range []string{"worker is out", "leg failed", "lease is over"} {
		if strings.Contains(router.Log(), word) {
			t.Errorf("the router: %s", word)
		}
	}
}

// A router that stands still for longer than its time-outs does not hold that
// against its workers: probes under way, the silence of a stream and leases.
func TestRouterStandsStill(t *testing.T) {
	const events = 20
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/health":
			time.Sleep(700 * time.Millisecond) // so that there are always some under way
		case "/generate":
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range events {
				fmt.Fprintf(w, "data: {\"output_ids\":[1%s],\"meta_info\":{\"prompt_tokens\":1,\"completion_tokens\":%d,\"finish_reason\":{\"type\":\"length\"}}}\n\n", strings.Repeat(",1", i), i+1)
				w.(http.Flusher).Flush()
				time.Sleep(250 * time.Millisecond)
			}
			io.WriteString(w, "data: [DONE]\n\n")
		}
	}))
	defer worker.Close()
	prefill := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	defer prefill.Close()
	router := newRig(t).start(t, "router", "--listen=127.0.0.1:0", "--health-failures=1", "--idle-timeout=2s", "--lease=2s")
	renew(t, router, `{"role":"prefill","url":"`+prefill.URL+`","instance":"a"}`)
	renew(t, router, `{"role":"decode","url":"`+worker.URL+`","instance":"b"}`)
	waitWorkers(t, router, "prefill", 1)
	waitWorkers(t, router, "decode", 1)
	for _, d := range []time.Duration{2300 * time.Millisecond, 4 * time.Second} {
		s := startStream(t, router.HTTP, map[string]any{"text": "x"})
		standStill(t, d, router)
		<-s.done
		if s.err != nil || s.answer.Error != nil || !s.answer.Done {
			t.Errorf("after %v: the stream: %v %+v", d, s.err, s.answer)
		}
	}
	unmoved(t, router)
}

// renew says again and again that a worker is there, until the test ends.
func renew(t *testing.T, router *Proc, member string) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() { // ends with ctx
		defer close(done)
		for ctx.Err() == nil {
			once, cancel := context.WithTimeout(ctx, time.Second)
			req, _ := http.NewRequestWithContext(once, http.MethodPut, router.HTTP+"/members", strings.NewReader(member))
			if resp, err := Client.Do(req); err == nil {
				resp.Body.Close()
			}
			cancel()
			select {
			case <-time.After(600 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}()
}
