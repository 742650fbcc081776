package router

import (
	"testing"
	"time"
)

func TestBudget(t *testing.T) {
	b, n := newBudget(), 0
	for b.take() {
		n++
	}
	if n != budgetTenths/10 {
		t.Errorf("%d further attempts at once, want %d", n, budgetTenths/10)
	}
	for range 100 {
		b.earn()
	}
	for n = 0; b.take(); n++ {
	}
	if n != 10 {
		t.Errorf("%d further attempts for 100 requests, want 10", n)
	}
}

// Retry-After is the time in which what is running ends at the present pace.
func TestRetryAfter(t *testing.T) {
	for _, c := range []struct {
		every   time.Duration // one request ends each; 0: none ever
		running int
		want    time.Duration
	}{
		{0, 10, retryAfterMax},
		{time.Second, 10, 10 * time.Second},
		{100 * time.Millisecond, 100, 10 * time.Second},
		{100 * time.Millisecond, 3, retryAfterMin},
		{time.Second, 16384, retryAfterMax},
	} {
		var p pace
		now := time.Duration(0)
		for ; c.every > 0 && now < time.Minute; now += c.every {
			p.ended(now)
		}
		if got := p.retryAfter(now, c.running); got < c.want*9/10 || got > c.want*11/10 {
			t.Errorf("one end each %v, %d running: %v, want about %v", c.every, c.running, got, c.want)
		}
		if got := p.retryAfter(now+time.Hour, c.running); got != retryAfterMax {
			t.Errorf("after an hour without an end: %v", got)
		}
	}
}
