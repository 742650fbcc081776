package engine

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// Each tile is done once, by threads with different numbers, in every phase:
// those that follow at once, those after helpers went to sleep, and those in
// which a helper lost its processor in the middle of a tile.
func TestCrewDoesEachTileOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 5} {
		c := newCrew(threads)
		var inside [5]atomic.Int32
		sizes := []int{1000, 2, 2, 2, 500, 1, 9}
		for n := range 100 {
			sizes = append(sizes, n)
		}
		for phase, n := range sizes {
			for range 10 {
				done := make([]atomic.Int32, n)
				c.run(n, func(tile, worker int) {
					if inside[worker].Add(1) != 1 {
						t.Errorf("two threads are number %d", worker)
					}
					if worker > 0 && tile%16 == 3 {
						runtime.Gosched()
					}
					done[tile].Add(1)
					inside[worker].Add(-1)
				})
				for tile := range done {
					if got := done[tile].Load(); got != 1 {
						t.Fatalf("%d threads, phase %d: tile %d was done %d times", threads, phase, tile, got)
					}
				}
			}
		}
		c.close()
	}
}

// A caller whose patience is over sleeps until the helper is out of its tile.
func TestCrewWaitsForAHelperInATile(t *testing.T) {
	c := newCrew(2)
	defer c.close()
	for range 20 {
		entered, leave := make(chan struct{}), make(chan struct{})
		var left atomic.Bool
		go func() {
			<-entered
			for c.state.Load()&asleep == 0 { // the caller has given up
				runtime.Gosched()
			}
			close(leave)
		}()
		c.run(2, func(_, worker int) {
			if worker == 0 {
				<-entered
				return
			}
			close(entered)
			<-leave
			left.Store(true)
		})
		if !left.Load() {
			t.Fatal("the phase ended while a helper was in a tile")
		}
	}
}

// Threads that are more than CPUs offer theirs to each other as they wait awake.
func TestCrowdedCrewWaitsIdly(t *testing.T) {
	for threads, want := range map[int]bool{Cores: false, Cores + 1: true} {
		c := newCrew(threads)
		c.close()
		if got := c.idle != nil; got != want {
			t.Errorf("%d threads, %d CPUs: they offer %v", threads, Cores, got)
		}
		offers := 0
		c.idle = func() { offers++ }
		if !c.spin(time.Hour, func() bool { return offers == 3 }) {
			t.Error("what it waited for is there, but it left")
		}
	}
}
