package chaos

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestCollectorInTheBeat shows what Go's collector costs running streams: 32 of
// them over the router, as it is, without the collector, and with one that runs
// all the time. As it is it has nothing to do while they run. Gaps are judged by
// hand, METRONOME_LONG=1, on a quiet machine: a neighbour costs far more.
func TestCollectorInTheBeat(t *testing.T) {
	const streams = 32
	window, rounds, long := 3*time.Second, 1, os.Getenv("METRONOME_LONG") != ""
	if long {
		window, rounds = 12*time.Second, 2
	}
	settings := []string{"GOGC=100", "GOGC=off", "GOGC=2"}
	all := map[string][]time.Duration{}
	for range rounds {
		for _, s := range settings {
			t.Run(s, func(t *testing.T) {
				gaps, before, collections := beatUnder(t, s, streams, window)
				t.Logf("half of the gaps below %v, 99 %% below %v, 99.9 %% below %v, the longest %v, of %d; decode collected %d times",
					quantile(gaps, 0.5), quantile(gaps, 0.99), quantile(gaps, 0.999), gaps[len(gaps)-1], len(gaps), collections)
				all[s] = append(all[s], gaps...)
				if s == "GOGC=100" && collections > 0 || s == "GOGC=2" && before+collections == 0 { // the latter: we would not see it
					t.Errorf("decode collected %d times before, %d times in %v", before, collections, window)
				}
			})
		}
	}
	for _, s := range settings {
		slices.Sort(all[s])
		t.Logf("%s, all rounds: %v, 99 %% %v, 99.9 %% %v", s, quantile(all[s], 0.5), quantile(all[s], 0.99), quantile(all[s], 0.999))
	}
	if with, without := quantile(all["GOGC=100"], 0.999), quantile(all["GOGC=off"], 0.999); long && with > 2*without {
		t.Errorf("99.9 %% of the gaps are below %v with the collector, below %v without", with, without)
	}
}

// beatUnder runs streams for a while under a setting of the environment, and
// gives their gaps, ascending, and how often decode collected before and meanwhile.
func beatUnder(t *testing.T, setting string, streams int, window time.Duration) (gaps []time.Duration, before, collections int) {
	r := newRig(t)
	r.Wrap = []string{"env", setting, "GODEBUG=gctrace=1"}
	f := r.startPair(t, "sim", nil, []string{"--stream-output"}, []string{"--engine=sim", "--kv-memory=64MiB"})
	var runs []*stream
	for range streams {
		runs = append(runs, startStream(t, f.router.HTTP, map[string]any{"text": "beat", "sampling_params": map[string]any{"max_new_tokens": 8000, "temperature": 0, "ignore_eos": true}}))
	}
	<-time.After(time.Second)
	before = collected(f.decode)
	from := time.Now()
	<-time.After(window)
	for _, s := range runs {
		gaps = append(gaps, s.gaps(from, time.Now())...)
	}
	collections = collected(f.decode) - before
	slices.Sort(gaps)
	return gaps, before, collections
}

// collected counts lines such as "gc 3 @0.1s 2%: …".
func collected(p *Proc) int { return strings.Count("\n"+p.Log(), "\ngc ") }
