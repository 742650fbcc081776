package engine

import (
	"sync"
	"sync/atomic"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
)

// crew is the engine's threads: the caller of run and some helpers, which wait
// between phases. A phase is a number of tiles. Each thread has a share of
// neighbouring ones, which it takes one by one, and then helps with the others'
// shares, so that a slow or late helper holds nothing up: the caller takes what
// is left, closes the phase, and waits only for helpers that are inside a tile.
type crew struct {
	wake []chan struct{} // one per helper, holds one token
	done chan struct{}   // the last helper leaves a closed phase, to a caller asleep
	stop chan struct{}
	wg   sync.WaitGroup

	phase  atomic.Uint32 // counts phases
	state  atomic.Uint32 // the number of helpers inside, and bits
	shares []share       // one per thread
	do     func(tile, worker int)
}

// share is tiles [next, end), on a cache line of its own.
type share struct {
	next atomic.Int64
	end  int64
	_    [48]byte
}

// In state, above the number of helpers: the phase may be entered; the caller
// sleeps until they have left.
const (
	open   = 1 << 31
	asleep = 1 << 30
)

// newCrew starts threads-1 helpers; close ends them.
func newCrew(threads int) *crew {
	c := &crew{done: make(chan struct{}), stop: make(chan struct{}), shares: make([]share, threads)}
	for i := range threads - 1 {
		ch := make(chan struct{}, 1)
		c.wake = append(c.wake, ch)
		c.wg.Go(func() { c.help(ch, i+1) })
	}
	return c
}

// run calls do for each tile in [0, n), on all threads; worker numbers them
// from 0. It returns when all calls have returned.
func (c *crew) run(n int, do func(tile, worker int)) {
	if n < 2 || len(c.wake) == 0 {
		for i := range n {
			do(i, 0)
		}
		return
	}
	c.do = do
	for i := range c.shares {
		c.shares[i].next.Store(int64(i * n / len(c.shares)))
		c.shares[i].end = int64((i + 1) * n / len(c.shares))
	}
	c.state.Store(open)
	c.phase.Add(1)
	for _, ch := range c.wake[:min(n-1, len(c.wake))] {
		select {
		case ch <- struct{}{}:
		default: // has a token from before that it has not seen yet
		}
	}
	c.tiles(0)
	if c.state.And(^uint32(open)) != open {
		c.wait()
	}
}

// wait returns when no helper is inside a closed phase. Most leave within a
// tile's time. For longer, the caller sleeps, and the last one wakes it: one
// that lost its processor in a tile may then have the caller's.
func (c *crew) wait() {
	for range 50 {
		if c.state.Load() == 0 {
			return
		}
		kernels.Pause()
	}
	if c.state.Or(asleep) != 0 {
		<-c.done
	}
	c.state.Store(0)
}

func (c *crew) tiles(worker int) {
	for i := range c.shares {
		s := &c.shares[(worker+i)%len(c.shares)]
		for {
			tile := s.next.Add(1) - 1
			if tile >= s.end {
				break
			}
			c.do(int(tile), worker)
		}
	}
}

func (c *crew) help(wake chan struct{}, worker int) {
	for {
		select {
		case <-wake:
		case <-c.stop:
			return
		}
		for {
			seen := c.phase.Load()
			if c.enter() {
				c.tiles(worker)
				if c.state.Add(^uint32(0)) == asleep {
					c.done <- struct{}{}
				}
			}
			if !c.linger(seen) {
				break
			}
		}
	}
}

// enter joins the phase if it is open.
func (c *crew) enter() bool {
	for {
		s := c.state.Load()
		if s&open == 0 {
			return false
		}
		if c.state.CompareAndSwap(s, s+1) {
			return true
		}
	}
}

// linger waits for a phase after the one just seen, for longer than the caller
// alone takes between two: some 20 µs. To go to sleep and be woken costs more
// than that, and most phases follow each other closely.
func (c *crew) linger(seen uint32) bool {
	for range 400 {
		if c.phase.Load() != seen {
			return true
		}
		kernels.Pause()
	}
	return false
}

func (c *crew) close() {
	close(c.stop)
	c.wg.Wait()
}
