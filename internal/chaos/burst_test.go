package chaos

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"
)

// Two hundred requests at once are the first that a fleet ever gets: no decode
// has met a prefill, no link stands. All are answered, in a second try at the
// latest if the burst was faster than the first handshake; clients of OpenAI
// make that by themselves.
func TestBurstAtTheStart(t *testing.T) {
	r := newRig(t)
	for _, flags := range [][]string{{"tiny", "--threads=1"}, {"sim", "--engine=sim", "--max-running=128"}, {"sim", "--engine=sim", "--prefill=2", "--decode=2"}} {
		up := r.start(t, append([]string{"up", "--port=0"}, flags...)...)
		codes := map[string]int{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				try := func() *Answer {
					return endsIn(t, requestBound, func(ctx context.Context) (*Answer, error) {
						return Generate(ctx, up.Router, map[string]any{"text": fmt.Sprint("burst ", i), "sampling_params": map[string]any{"max_new_tokens": 4, "ignore_eos": true}})
					})
				}
				a, code := try(), "at once"
				if a.Status == 429 {
					<-time.After(time.Second) // its Retry-After
					a, code = try(), "again"
				}
				if a.Status != 200 || len(a.IDs) != 4 {
					code = fmt.Sprint(a.Status, " ", a.Error)
				}
				mu.Lock()
				codes[code]++
				mu.Unlock()
			})
		}
		wg.Wait()
		t.Logf("%v: %v", flags, codes)
		if codes["at once"]+codes["again"] != 200 || codes["at once"] < 64 {
			t.Errorf("%v: %v", flags, codes)
		}
		up.end()
	}
}
