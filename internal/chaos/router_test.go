package chaos

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// loader sends the same request at a fixed rate, whatever becomes of those that
// are under way, and keeps what came of each.
type loader struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	runs []run
}

type run struct {
	began time.Time
	took  time.Duration
	wrong string // "" for the right answer
}

// load runs until ctx ends; then wait for l.wg.
func load(ctx context.Context, base string, perSecond int, want []int32, body map[string]any) *loader {
	l := &loader{}
	l.wg.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				l.wg.Go(func() { l.one(base, want, body) })
			case <-ctx.Done():
				return
			}
		}
	})
	return l
}

func (l *loader) one(base string, want []int32, body map[string]any) {
	ctx, cancel := context.WithTimeout(context.Background(), requestBound)
	defer cancel()
	r := run{began: time.Now()}
	a, err := Stream(ctx, base, body, nil)
	r.took = time.Since(r.began)
	switch {
	case err != nil:
		r.wrong = err.Error()
	case a.Error != nil:
		r.wrong = a.Error.Error()
	case !slices.Equal(a.IDs, want) || !a.Done:
		r.wrong = fmt.Sprintf("%d tokens, done %v", len(a.IDs), a.Done)
	}
	l.mu.Lock()
	l.runs = append(l.runs, r)
	l.mu.Unlock()
}

// A prefill of two stops under load. Nothing is lost: what waits for it moves
// to the other one. It is out within 3 s, and used again 2 s after it runs on.
func TestStoppedPrefillUnderLoad(t *testing.T) {
	r := newRig(t)
	flags := []string{"--engine=sim", "--prefix-cache=false", "--drain=1s", "--max-running=128"}
	p := []*Proc{r.startPrefill(t, "sim", flags...), r.startPrefill(t, "sim", flags...)}
	d := []*Proc{r.startDecode(t, "sim", append(flags, "--on-mismatch=reject", "--heartbeat-interval=1s")...)}
	router := r.startRouter(t, p, d, "--policy=round_robin")
	body := map[string]any{"input_ids": promptIDs(200, 256, 5), "sampling_params": map[string]any{"max_new_tokens": 8, "temperature": 0, "ignore_eos": true}}
	ref, err := Stream(within(t, requestBound), router.HTTP, body, nil)
	if err != nil || ref.Error != nil || len(ref.IDs) != 8 {
		t.Fatalf("undisturbed: %v %+v", err, ref)
	}
	for _, rate := range []int{2, 50} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		l := load(ctx, router.HTTP, rate, ref.IDs, body)
		<-time.After(1500 * time.Millisecond)
		stopped := time.Now()
		p[0].Stop()
		out := await(t, 3*time.Second, func() bool { return valueOf(t, router, `metronome_workers{role="prefill",state="out"}`) == 1 })
		<-time.After(time.Until(stopped.Add(4 * time.Second)))
		p[0].Continue()
		running := time.Now()
		served := func() float64 { return valueOf(t, p[0], `metronome_requests_total{code="ok"}`) }
		await(t, 2*time.Second, func() bool { return valueOf(t, router, `metronome_workers{role="prefill",state="ready"}`) == 2 })
		before := served() // it may have ended what it had begun
		await(t, time.Until(running.Add(2*time.Second)), func() bool { return served() > before })
		back := time.Since(running)
		<-time.After(time.Second)
		cancel()
		l.wg.Wait()
		moved, late := 0, time.Duration(0)
		for _, one := range l.runs {
			if one.wrong != "" {
				t.Errorf("at %d/s: a request sent %v after the stop, %v before the end of it, ended after %v: %s", rate,
					one.began.Sub(stopped), running.Sub(one.began), one.took, one.wrong)
			}
			if one.took > time.Second {
				moved++
			}
			if since := one.began.Sub(stopped); since > 3*time.Second && one.began.Before(running) {
				late = max(late, one.took)
			}
		}
		if late > time.Second {
			t.Errorf("at %d/s: a request sent 3 s after the stop took %v", rate, late)
		}
		if moved == 0 {
			t.Errorf("at %d/s: no request met the stopped prefill", rate)
		}
		t.Logf("at %d/s: %d requests, %d moved, none lost; out after %v, used again after %v", rate, len(l.runs), moved, out, back)
	}
}

func valueOf(t *testing.T, p *Proc, name string) float64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	m, err := Metrics(ctx, p.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	return m[name]
}

// await polls a condition and returns how long it took.
func await(t *testing.T, most time.Duration, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > most {
			t.Fatalf("not within %v", most)
		}
		<-time.After(20 * time.Millisecond)
	}
	return time.Since(began)
}

// Tokens are rotated in the files of all parts while they run: no request fails,
// the old token is refused in the end, and a prefill that starts anew is reached
// by a decode that had learned the new token from its file.
func TestTokensRotateWithoutRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "tokens")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old\n")
	auth := "--token-file=" + file
	pArgs := []string{"prefill", "sim", "--engine=sim", "--listen=127.0.0.1:" + fixedPort(t), "--bootstrap-listen=127.0.0.1:" + fixedPort(t), auth, "--drain=1s"}
	p := r.start(t, pArgs...)
	d := r.startDecode(t, "sim", "--engine=sim", "--on-mismatch=reject", "--heartbeat-interval=500ms", auth)
	router := r.startRouter(t, []*Proc{p}, []*Proc{d}, auth)
	ask := func(token string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(within(t, requestBound), "POST", router.HTTP+"/generate", strings.NewReader(`{"text":"hi","sampling_params":{"max_new_tokens":2}}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := Client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	steady := func(token string) {
		t.Helper()
		for end := time.Now().Add(time.Second); time.Now().Before(end); {
			if s := ask(token); s != 200 {
				t.Fatalf("%s: %d", token, s)
			}
		}
	}
	steady("old")
	write("old\nnew\n") // all take both
	steady("old")
	write("new\nold\n") // all present the new one
	steady("new")
	write("new\n")
	await(t, 2*time.Second, func() bool { return ask("old") == 403 })
	steady("new")
	r.present("new")
	write("not a token\n") // changes nothing
	steady("new")
	p.Kill()
	write("new\n")
	p = r.start(t, pArgs...)
	await(t, 5*time.Second, func() bool { return ask("new") == 200 })
	for _, proc := range []*Proc{p, d, router} {
		if log := proc.Log(); strings.Contains(log, "Bearer new") || strings.Contains(log, "Bearer old") {
			t.Errorf("the log shows a token: %s", tail(log, 1000))
		}
	}
}
