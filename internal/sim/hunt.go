package sim

import (
	"context"
	"errors"
	"runtime"
	"sync"
)

// Found is a seed whose run broke a rule.
type Found struct {
	Seed      uint64
	Violation *Violation
}

// Tally is what a hunt has seen so far.
type Tally struct {
	Seeds, Requests, Served, Tokens int
	Events                          int
	Ends                            map[string]int
	Found                           []Found
}

func (t *Tally) add(r *Report) {
	t.Seeds++
	t.Requests += r.Requests
	t.Served += r.Served
	t.Tokens += r.Tokens
	t.Events += r.Events
	for code, n := range r.Ends {
		t.Ends[code] += n
	}
}

// Hunt runs the plans of seeds from first on, n of them or (n is 0) until ctx
// ends, as many at once as there are processors. It stops early after enough
// finds. tell hears of every run, one at a time.
func Hunt(ctx context.Context, first uint64, n int, s Shape, enough int, tell func(*Tally)) *Tally {
	t := &Tally{Ends: map[string]int{}}
	var mu sync.Mutex
	next, stop := first, false
	draw := func() (seed uint64, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if stop || ctx.Err() != nil || n > 0 && next-first >= uint64(n) {
			return 0, false
		}
		next++
		return next - 1, true
	}
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				seed, ok := draw()
				if !ok {
					return
				}
				rep, err := Run(Draw(seed, s), nil)
				mu.Lock()
				t.add(rep)
				var v *Violation
				if errors.As(err, &v) {
					t.Found = append(t.Found, Found{seed, v})
					stop = len(t.Found) >= enough
				}
				if tell != nil {
					tell(t)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return t
}
