//metronome:pure

package worker

import "time"

// The pace of dials: so many may start within any such span. Go has no
// goroutine priorities, so a burst of dials would take the processor from the
// engine and the loop; 64 cost about a millisecond of 10.
const (
	paceDials = 64
	paceSpan  = 10 * time.Millisecond
)

// pacer decides when the next dial may start. It has no clock and no queue:
// its driver asks may(now), starts one dial and calls started(now), or waits
// until next(now).
type pacer struct {
	starts [paceDials]time.Duration // ring of the last starts
	n      int                      // starts so far
}

// may says whether a dial may start now: fewer than paceDials have started
// within the last paceSpan.
func (p *pacer) may(now time.Duration) bool { return p.next(now) <= now }

// next is when the next dial may start, now or later.
func (p *pacer) next(now time.Duration) time.Duration {
	if p.n < paceDials {
		return now
	}
	return max(now, p.starts[p.n%paceDials]+paceSpan)
}

// started records one start.
func (p *pacer) started(now time.Duration) {
	p.starts[p.n%paceDials] = now
	p.n++
}
