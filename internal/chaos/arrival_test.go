package chaos

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Large KV arrives while a stream runs: it is read and verified beside the
// loop, and the beat goes on. A loop that waited for the pages would stand still
// for most of that time.
func TestBeatWhilePagesArrive(t *testing.T) {
	r := newRig(t)
	const tokens, perToken, times = 2000, 64 << 10, 10 // 131 MB each
	both := []string{"--engine=sim", "--context=16384", fmt.Sprintf("--sim-kv-bytes=%d", perToken), "--kv-memory=1GiB", "--sim-prefill-rate=1000000"}
	// Prefill has the prompt in its cache and sends at once; decode keeps nothing.
	f := r.startPair(t, "sim", nil, []string{"--prefix-cache=false", "--stream-output"}, both)
	body := map[string]any{"input_ids": promptIDs(tokens, 256, 3), "sampling_params": map[string]any{"max_new_tokens": 1, "temperature": 0}}
	arrive := func() time.Duration {
		began := time.Now()
		if a, err := Generate(within(t, time.Minute), f.router.HTTP, body); err != nil || a.Status != 200 {
			t.Fatalf("%v %+v", err, a)
		}
		return time.Since(began)
	}
	arrive()
	run := startStream(t, f.router.HTTP, map[string]any{"text": "beat", "sampling_params": map[string]any{"max_new_tokens": 10000, "temperature": 0, "ignore_eos": true}})
	var broken []string
	for range 6 { // a neighbour on the machine breaks one, a loop that waits all of them
		from := time.Now()
		<-time.After(2 * time.Second)
		quiet := run.gaps(from, time.Now())
		before := received(t, f.decode)
		var took []time.Duration
		from = time.Now()
		for range times {
			took = append(took, arrive())
		}
		arriving := run.gaps(from, time.Now())
		if n := received(t, f.decode) - before; n < times*tokens*perToken {
			t.Fatalf("%.0f bytes came, want %d", n, times*tokens*perToken)
		}
		if len(quiet) < 50 || len(arriving) < 5 {
			broken = append(broken, fmt.Sprintf("%d tokens in the quiet, %d beside the pages", len(quiet), len(arriving)))
			continue
		}
		limit := 4 * median(quiet)
		q, a := stood(quiet, limit), stood(arriving, limit)
		t.Logf("%d × %.0f MB in %v each: half of the gaps below %v, in the quiet %v; nine of ten below %v, in the quiet %v; %.0f %% of the time in gaps above %v, in the quiet %.0f %%",
			times, tokens*perToken/1e6, median(took), median(arriving), median(quiet), quantile(arriving, 0.9), quantile(quiet, 0.9), 100*a, limit, 100*q)
		if a <= 0.25 {
			return
		}
		broken = append(broken, fmt.Sprintf("%.0f %% of the time in gaps above %v, in the quiet %.0f %%", 100*a, limit, 100*q))
	}
	t.Error(strings.Join(broken, "; "))
}

// stood is the part of the time that lies in gaps above a limit.
func stood(gaps []time.Duration, limit time.Duration) float64 {
	var all, long time.Duration
	for _, g := range gaps {
		if all += g; g > limit {
			long += g
		}
	}
	return float64(long) / float64(all)
}

// received is how many bytes of KV a worker has taken in.
func received(t *testing.T, p *Proc) float64 {
	t.Helper()
	m, err := Metrics(within(t, 5*time.Second), p.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range m {
		if strings.HasPrefix(name, "metronome_kv_transfer_bytes_total") {
			return v
		}
	}
	t.Fatal("no metric of KV bytes")
	return 0
}
