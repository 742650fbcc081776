//metronome:pure

package router

import (
	"math"
	"time"
)

// budget bounds further attempts to a tenth of all requests, after a first
// allowance, so that retries cannot multiply an overload.
type budget struct{ tenths int64 }

const budgetTenths = 1000 // 100 further attempts at once

func newBudget() budget { return budget{budgetTenths} }

// earn is called once for each request.
func (b *budget) earn() { b.tenths = min(b.tenths+1, budgetTenths) }

// take tells whether a further attempt may be made now, and counts it.
func (b *budget) take() bool {
	if b.tenths < 10 {
		return false
	}
	b.tenths -= 10
	return true
}

// pace is the rate at which requests end, averaged over about paceOver: what
// says how long a full router stays full.
type pace struct {
	count float64 // of ends, each one fading with its age
	at    time.Duration
}

const (
	paceOver      = 10 * time.Second
	retryAfterMin = time.Second
	retryAfterMax = 30 * time.Second
)

func (p *pace) fade(now time.Duration) {
	p.count *= math.Exp(-float64(now-p.at) / float64(paceOver))
	p.at = now
}

// ended counts the end of one request.
func (p *pace) ended(now time.Duration) {
	p.fade(now)
	p.count++
}

// retryAfter is how long it takes at this pace until as many requests have
// ended as are running: then there is room again, also if others came first.
func (p *pace) retryAfter(now time.Duration, running int) time.Duration {
	p.fade(now)
	rate := p.count / paceOver.Seconds()
	if s := float64(running) / rate; s < retryAfterMax.Seconds() { // false for a rate of 0
		return max(time.Duration(s*float64(time.Second)), retryAfterMin)
	}
	return retryAfterMax
}
