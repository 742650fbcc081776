package worker

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whenever dials are asked for, any span of 10 ms sees at most 64 starts, and a
// dial that comes when fewer have started does not wait.
func TestPacer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p pacer
		var now time.Duration
		var starts []time.Duration
		for range rapid.IntRange(1, 400).Draw(t, "dials") {
			now += time.Duration(rapid.IntRange(0, 1_000_000).Draw(t, "gap_ns"))
			at := p.next(now)
			busy := 0
			for _, s := range starts {
				if s > now-paceSpan {
					busy++
				}
			}
			if busy < paceDials && at != now {
				t.Fatalf("dial at %v waits until %v although only %d have started", now, at, busy)
			}
			if busy == paceDials && at == now {
				t.Fatalf("dial at %v is the %dth of its span", now, busy+1)
			}
			now = at
			if !p.may(now) {
				t.Fatalf("next says %v, may says no", at)
			}
			p.started(now)
			starts = append(starts, now)
		}
		for i := paceDials; i < len(starts); i++ {
			if span := starts[i] - starts[i-paceDials]; span < paceSpan {
				t.Fatalf("%d dials within %v", paceDials+1, span)
			}
		}
	})
}
