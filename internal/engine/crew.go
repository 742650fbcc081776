package engine

import (
	"sync"
	"sync/atomic"
)

// crew is the engine's threads: the caller of run and some helpers, which wait
// between phases. A phase is a number of tiles, handed out one by one to
// whoever is free, so that a slow or late helper holds nothing up: the caller
// takes what is left, closes the phase, and waits only for helpers that are
// inside a tile.
type crew struct {
	wake []chan struct{} // one per helper, holds one token
	done chan struct{}   // the last helper leaves a closed phase, to a caller asleep
	stop chan struct{}
	wg   sync.WaitGroup

	phase atomic.Uint32 // counts phases
	state atomic.Uint32 // the number of helpers inside, and bits
	next  atomic.Int64
	n     int
	do    func(tile, worker int)
}

// In state, above the number of helpers: the phase may be entered; the caller
// sleeps until they have left.
const (
	open   = 1 << 31
	asleep = 1 << 30
)

// newCrew starts threads-1 helpers; close ends them.
func newCrew(threads int) *crew {
	c := &crew{done: make(chan struct{}), stop: make(chan struct{})}
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
	c.n, c.do = n, do
	c.next.Store(0)
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
// tile's time; for longer, the caller sleeps, and the last one wakes it.
func (c *crew) wait() {
	for range spins {
		if c.state.Load() == 0 {
			return
		}
	}
	if c.state.Or(asleep) != 0 {
		<-c.done
	}
	c.state.Store(0)
}

func (c *crew) tiles(worker int) {
	for {
		i := int(c.next.Add(1)) - 1
		if i >= c.n {
			return
		}
		c.do(i, worker)
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
			if !c.enter() {
				break
			}
			c.tiles(worker)
			if c.state.Add(^uint32(0)) == asleep {
				c.done <- struct{}{}
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

// linger waits a few microseconds for a phase after the one just seen. Most
// phases follow each other closely, and going to sleep and being woken costs
// more than that.
func (c *crew) linger(seen uint32) bool {
	for range spins {
		if c.phase.Load() != seen {
			return true
		}
	}
	return false
}

const spins = 5000

func (c *crew) close() {
	close(c.stop)
	c.wg.Wait()
}
