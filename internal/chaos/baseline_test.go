package chaos

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestBlockingBaseline shows on real processes what the promise is worth: a
// decode worker whose loop asks registries itself, as the original did
// (metronome blocking-decode), beside ours, in one run. On both runs a stream
// that needs none of the peers that hang; then those are asked for, and a
// newcomer for a healthy prefill that nobody has met. On the original were
// measured 5.00 s of silence in each cycle for one address, 10.02 s for two,
// 20.03 s for four, 5 s in every cycle for a query of DP ranks; a newcomer waits
// as long. A rig that cannot see that is broken.
func TestBlockingBaseline(t *testing.T) {
	t.Parallel() // it mostly waits
	scenes := []*hungScene{
		{name: "1 hung registry", bad: silent(t, 1), cycle: 5 * time.Second},
		{name: "2 hung registries", bad: silent(t, 2), cycle: 10 * time.Second},
		{name: "hung query of DP ranks", bad: []string{mute(t, 2)}, cycle: 5 * time.Second},
		{name: "hung GET of a rank", bad: []string{mute(t, 1)}, cycle: 5 * time.Second},
	}
	if os.Getenv("METRONOME_LONG") != "" {
		scenes = append(scenes, &hungScene{name: "4 hung registries", bad: silent(t, 4), cycle: 20 * time.Second})
	}
	r := newRig(t)
	const sim = "--engine=sim"
	old, fresh := r.startPrefill(t, "sim", sim), r.startPrefill(t, "sim", sim)
	flags := []string{"sim", sim, "--listen=127.0.0.1:0", "--sim-decode-base=20ms", "--stream-output"}
	ctx, cancel := context.WithCancel(t.Context())
	var wg, legs sync.WaitGroup
	for i, s := range scenes {
		for j, role := range []string{"blocking-decode", "decode"} {
			w := &s.worker[j]
			w.d = r.start(t, append([]string{role}, flags...)...)
			body := leg(old.Bootstrap, int64(1000*i+100*j), 100000)
			legs.Go(func() { Generate(ctx, old.HTTP, body) }) // ends when the pages are there, or by cancel
			w.run = startStream(t, w.d.HTTP, body)
			wg.Go(func() { w.play(ctx, s, fresh, int64(1000*i+100*j)) }) // ends with the window
		}
	}
	wg.Wait()
	cancel()
	legs.Wait()
	for _, s := range scenes {
		s.worker[0].d.Kill() // its loop would not hear of a kinder way
		s.judge(t)
	}
}

// hungScene is what is asked for while streams run, and what came of it.
type hungScene struct {
	name   string
	bad    []string      // addresses of registries
	cycle  time.Duration // of a loop that waits for them
	worker [2]hungWorker // the baseline's, ours
}

type hungWorker struct {
	d        *Proc
	run      *stream
	gaps     []time.Duration
	newcomer time.Duration // until its first token; 0: none came
}

// play asks for the bad ones and for the newcomer. All of the bad ones are
// known to the worker after one cycle; of those that follow two are looked at.
func (w *hungWorker) play(ctx context.Context, s *hungScene, fresh *Proc, room int64) {
	from := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second+2*s.cycle+time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i, addr := range s.bad {
		wg.Go(func() { Generate(ctx, w.d.HTTP, leg(addr, room+int64(i)+1, 4)) }) // ends with the window
	}
	<-time.After(100 * time.Millisecond)
	start := time.Now()
	body := leg(fresh.Bootstrap, room+50, 4)
	wg.Go(func() { Generate(ctx, fresh.HTTP, body) }) // ends with the window
	Stream(ctx, w.d.HTTP, body, func(n int) {
		if n == 1 {
			w.newcomer = time.Since(start)
		}
	})
	<-ctx.Done()
	w.gaps = w.run.gaps(from, time.Now())
	w.run.cancel()
	wg.Wait()
}

// judge compares the two.
func (s *hungScene) judge(t *testing.T) {
	old, ours := &s.worker[0], &s.worker[1]
	if len(old.gaps) == 0 || len(ours.gaps) == 0 {
		t.Fatalf("%s: %d and %d tokens came", s.name, len(old.gaps), len(ours.gaps))
	}
	was, is := old.gaps[len(old.gaps)-1], ours.gaps[len(ours.gaps)-1]
	t.Logf("%-24s longest gap: a loop that waits %6.3f s, ours %6.3f s; a newcomer's first token after %6.3f s, ours %6.3f s (0: not in the window)",
		s.name, was.Seconds(), is.Seconds(), old.newcomer.Seconds(), ours.newcomer.Seconds())
	if was < s.cycle-100*time.Millisecond || was > s.cycle+2*time.Second {
		t.Errorf("%s: a loop that waits was silent for %v, want %v", s.name, was, s.cycle)
	}
	if old.newcomer > 0 && old.newcomer < 4*time.Second {
		t.Errorf("%s: the newcomer of a loop that waits had its token after %v", s.name, old.newcomer)
	}
	if is > time.Second || ours.newcomer == 0 || ours.newcomer > time.Second {
		t.Errorf("%s: our longest gap is %v, our newcomer had its first token after %v", s.name, is, ours.newcomer)
	}
}

// silent are n registries that take the question and never answer.
func silent(t *testing.T, n int) (addrs []string) {
	for range n {
		h, err := NewHang(Silent, "127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		addrs = append(addrs, h.Addr)
	}
	return addrs
}

// mute is a registry that tells its parallel info, with so many DP ranks, and
// answers nothing else: with more than one the query for a room's rank hangs,
// with one the lookup of its address.
func mute(t *testing.T, dp int) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	info := strings.NewReplacer(`"dp_size":1`, fmt.Sprintf(`"dp_size":%d`, dp), `room":true`, `room":false`).Replace(goodAnswer)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Query().Get("target_tp_rank") == "-1" {
			fmt.Fprint(w, info)
			return
		}
		if req.URL.Path == "/health" {
			return
		}
		<-req.Context().Done()
	})}
	go srv.Serve(ln) // ends at Close
	t.Cleanup(func() { srv.Close() })
	return ln.Addr().String()
}
