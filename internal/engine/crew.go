package engine

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

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

	batch  atomic.Bool   // begun: another phase follows soon
	phase  atomic.Uint32 // counts phases
	state  atomic.Uint32 // the number of helpers inside, and bits
	shares []share       // one per thread
	do     func(tile, worker int)
	broken atomic.Bool             // a tile of this phase met memory that is gone
	mapped func(addr uintptr) bool // see Weights; set before the first phase
	idle   func()                  // called now and then by a thread that waits awake; nil where each has a CPU
}

// share is a thread's tiles [next, end), on a cache line of its own, with the
// thread's number and the CPU that it was on when it was last asked, -1 where
// nobody knows.
type share struct {
	next    atomic.Int64
	end     int64
	thread  atomic.Int32
	cpu     atomic.Int32
	inside  atomic.Bool // a helper's: it is in a phase
	fetched atomic.Bool // a helper's: to the caller's CPU
	_       [32]byte
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
	for i := range c.shares {
		c.shares[i].thread.Store(-1)
		c.shares[i].cpu.Store(-1)
	}
	if threads > Cores { // who waits awake has the CPU of one with a tile
		c.idle = yieldCPU
	}
	for i := range threads - 1 {
		ch := make(chan struct{}, 1)
		c.wake = append(c.wake, ch)
		c.wg.Go(func() { c.help(ch, i+1) })
	}
	return c
}

// begin is called before the phases of a batch, and end after them.
func (c *crew) begin() {
	c.shares[0].thread.Store(currentThread())
	c.batch.Store(true)
}

func (c *crew) end() { c.batch.Store(false) }

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
	c.shares[0].cpu.Store(currentCPU())
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
	if c.broken.Swap(false) {
		panic(ErrModelGone)
	}
}

// wait returns when no helper is inside a closed phase. All leave within a
// tile's time, but one that the system stopped in a tile: that one gets the
// caller's CPU, while the caller sleeps, and the last one wakes it.
func (c *crew) wait() {
	if c.spin(patience, func() bool { return c.state.Load() == 0 }) {
		return
	}
	for i := range c.shares {
		if s := &c.shares[i]; s.inside.Load() && stopped(s.thread.Load()) {
			s.fetched.Store(true)
			fetch(s)
		}
	}
	if c.state.Or(asleep) != 0 {
		<-c.done
		c.shares[0].thread.Store(currentThread())
	}
	c.state.Store(0)
}

func (c *crew) tiles(worker int) {
	defer func() {
		if memoryGone(recover(), c.mapped) {
			c.broken.Store(true) // the caller says so when all have left the phase
		}
	}()
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
	debug.SetPanicOnFault(true)
	s := &c.shares[worker]
	for {
		select {
		case <-wake:
		case <-c.stop:
			return
		}
		c.spread(worker)
		began, looked := time.Now(), uint32(0)
		for seen := c.phase.Load(); ; seen = c.phase.Load() {
			if c.enter() {
				s.inside.Store(true)
				c.tiles(worker)
				s.inside.Store(false)
				if c.state.Add(^uint32(0)) == asleep {
					c.done <- struct{}{}
					runtime.Gosched() // the caller goes on here, at once
				}
			}
			if s.fetched.Swap(false) || time.Since(began) > turn {
				c.giveWay(worker)
				began = time.Now()
			}
			if c.spin(linger, func() bool { return c.phase.Load() != seen }) {
				continue
			}
			if looked == seen || !c.fetchCaller() {
				break
			}
			c.spread(worker)
			looked = seen
		}
	}
}

// fetchCaller gives the helper's CPU to a caller that the system has stopped
// in the middle of a batch.
func (c *crew) fetchCaller() bool {
	caller := &c.shares[0]
	return c.batch.Load() && c.state.Load()&asleep == 0 && stopped(caller.thread.Load()) && fetch(caller)
}

// giveWay offers the helper's CPU to others, and not the caller's.
func (c *crew) giveWay(worker int) {
	c.spread(worker)
	yieldCPU()
	c.spread(worker)
}

// spread moves the helper to a CPU that no thread before it is on, if it shares
// one. Where others keep all CPUs busy, the system wakes a helper on that of the
// caller, and sees no reason to change it: each CPU has something to do.
func (c *crew) spread(worker int) {
	s, before := &c.shares[worker], c.shares[:worker]
	s.thread.Store(currentThread())
	s.cpu.Store(currentCPU())
	for i := range before {
		if at := before[i].cpu.Load(); at >= 0 && at == s.cpu.Load() {
			leaveCPUs(before)
			s.cpu.Store(currentCPU())
			return
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

// To go to sleep and be woken costs 50 to 100 µs, on a virtual machine more: as
// much as a phase of a small model takes. So both wait for each other awake, for
// longer than it usually takes.
const (
	patience = 60 * time.Microsecond  // of the caller, for the others' last tiles
	linger   = 100 * time.Microsecond // of a helper, for the next phase: between two, and between batches, the caller alone has something to do
)

// turn is how long a helper computes before it offers its CPU to others, of its
// own accord and with no tile in hand. Where none waits that costs 0.2 µs. Where
// one does, the system would soon stop the helper for it in the middle of a
// tile, which the caller then waits for. Linux gives a thread up to a tick of 4 ms:
// so who shares the CPU with a helper has half of it.
const turn = 4 * time.Millisecond

// spin waits until there is what it looks for, or, false, for too long.
func (c *crew) spin(long time.Duration, there func() bool) bool {
	for began := time.Now(); ; {
		for range 32 {
			if there() {
				return true
			}
			kernels.Pause()
		}
		if time.Since(began) > long {
			return false
		}
		if c.idle != nil {
			c.idle()
		}
	}
}

func (c *crew) close() {
	close(c.stop)
	c.wg.Wait()
}
