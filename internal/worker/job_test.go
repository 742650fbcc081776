package worker

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
)

func token(i int) Item { return Item{Out: engine.Output{Token: int32(i)}, Index: i} }

func TestBoxKeepsEverythingForASlowReader(t *testing.T) {
	const n = 1000
	b := NewBox(n, nil)
	for i := range n {
		b.put(token(i), new(metric.Timeline))
	}
	b.put(Item{End: &End{Reason: EndLength, Completion: n}}, new(metric.Timeline))
	for i := range n {
		it, ok := b.Next(t.Context())
		if !ok || it.Index != i || it.Out.Token != int32(i) {
			t.Fatalf("item %d: got %+v, %v", i, it, ok)
		}
	}
	if it, ok := b.Next(t.Context()); !ok || it.End == nil || it.End.Completion != n {
		t.Fatalf("end: got %+v, %v", it, ok)
	}
	if it, ok := b.Next(t.Context()); ok {
		t.Fatalf("after the end: got %+v", it)
	}
}

// A reader that alternates with the writer over the ring's seam gets the order
// of the puts, also when the ring grows while it is wrapped.
func TestBoxOrderAcrossGrowth(t *testing.T) {
	b := NewBox(10_000, nil)
	put, got := 0, 0
	for round := range 60 {
		for range 7 + 3*round {
			b.put(token(put), new(metric.Timeline))
			put++
		}
		for range 5 + 3*round {
			it, ok := b.TryNext()
			if !ok || it.Index != got {
				t.Fatalf("item %d: got %+v, %v", got, it, ok)
			}
			got++
		}
	}
	if len(b.ring) > 512 {
		t.Errorf("a lag of at most 300 items grew the ring to %d", len(b.ring))
	}
}

func TestBoxPanicsOnBrokenInvariants(t *testing.T) {
	for name, f := range map[string]func(b *Box){
		"too many": func(b *Box) {
			for i := range 5 {
				b.put(token(i), new(metric.Timeline))
			}
		},
		"after the end": func(b *Box) {
			b.put(Item{End: &End{}}, new(metric.Timeline))
			b.put(token(0), new(metric.Timeline))
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(NewBox(3, nil))
		})
	}
}

func TestBoxNextEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBox(3, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if it, ok := b.Next(ctx); ok {
			t.Fatalf("got %+v from an empty box", it)
		}
		b.put(token(0), new(metric.Timeline)) // the box is still good
		if it, ok := b.Next(t.Context()); !ok || it.Index != 0 {
			t.Fatalf("got %+v, %v", it, ok)
		}
	})
}

func TestBoxesShareAWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wake := make(chan struct{}, 1)
		boxes := []*Box{NewBox(100, wake), NewBox(100, wake), NewBox(100, wake)}
		var g sync.WaitGroup
		for _, b := range boxes {
			g.Go(func() {
				for i := range 100 {
					b.put(token(i), new(metric.Timeline))
				}
				b.put(Item{End: &End{}}, new(metric.Timeline))
			})
		}
		ends, items := 0, 0
		for ends < len(boxes) {
			<-wake
			for _, b := range boxes {
				for it, ok := b.TryNext(); ok; it, ok = b.TryNext() {
					items++
					if it.End != nil {
						ends++
					}
				}
			}
		}
		if items != 303 {
			t.Errorf("%d items, want 303", items)
		}
		g.Wait()
	})
}

// One token through a box: a lock, a copy of some 100 bytes, a wake.
func BenchmarkBox(b *testing.B) {
	box := NewBox(1<<30, nil)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		box.put(token(i), new(metric.Timeline))
		box.TryNext()
	}
}

func TestInboxLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const producers, each = 8, 500
		in := newInbox()
		type msg struct{ from, n int }
		var g sync.WaitGroup
		for p := range producers {
			g.Go(func() {
				for i := range each {
					in.push(msg{p, i})
				}
			})
		}
		var next [producers]int
		for total := 0; total < producers*each; {
			<-in.wake
			for _, m := range in.take() {
				v := m.(msg)
				if v.n != next[v.from] {
					t.Fatalf("producer %d: got %d, want %d", v.from, v.n, next[v.from])
				}
				next[v.from]++
				total++
			}
		}
		g.Wait()
	})
}

func TestSteadyBoxAndInboxAllocateNothing(t *testing.T) {
	box, in, m := NewBox(1<<30, nil), newInbox(), &pass{}
	i := 0
	if n := testing.AllocsPerRun(1000, func() {
		i++
		in.push(m)
		in.take()
		box.put(token(i), new(metric.Timeline))
		box.TryNext()
	}); n != 0 {
		t.Errorf("%v allocations a turn, want 0", n)
	}
}
