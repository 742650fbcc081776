//metronome:pure

package router

import (
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Bounds of what the members that join may take.
const (
	leasesMost = 1024             // held at a time
	ghostsMost = 4096             // instances that are remembered as dead; the oldest goes
	ghostFor   = 10 * time.Minute // a renewal is late by seconds, not more
	stoodStill = time.Second      // less is a busy machine, and a third of no lease that is usual
)

// joined is a worker that has registered itself: where it is, and which start of
// it it is.
type joined struct {
	role     Leg
	url      url.URL // scheme, host and port
	port     int     // prefill: of its bootstrap registry; 0: none of its own
	instance string
}

// lease is how long a worker that joined is a member unless it says so again.
type lease struct {
	joined
	until time.Duration
}

// ghost is an instance that may not come back: it said goodbye, or another start
// of the worker took its place.
type ghost struct {
	instance string
	since    time.Duration
}

// leases are the workers that joined, in the order in which they did. One that
// falls silent goes when its lease is over, and may come back, for it may be the
// network that was silent. One that said goodbye, or that was replaced at its
// address, is dead: a renewal of it that was under way for long changes nothing.
type leases struct {
	length time.Duration
	held   []lease
	dead   []ghost // the oldest first
}

// renew takes in a worker's word that it is there, and tells whether that
// changes the members.
func (l *leases) renew(now time.Duration, j joined) (changed bool, err *api.Error) {
	if l.isDead(now, j.instance) {
		return false, api.Errorf(api.InvalidRequest, "instance %s of %s %s has said goodbye or was replaced; a new start of it joins with a new instance",
			j.instance, j.role, &j.url).With(http.StatusConflict)
	}
	i := slices.IndexFunc(l.held, func(h lease) bool { return h.role == j.role && h.url == j.url })
	if i < 0 {
		if len(l.held) >= leasesMost {
			return false, api.Errorf(api.Overloaded, "%d workers have joined, which is the most that this router takes", leasesMost)
		}
		l.held = append(l.held, lease{j, now + l.length})
		return true, nil
	}
	h := &l.held[i]
	if h.instance != j.instance {
		l.bury(now, h.instance)
	}
	changed = h.joined != j
	*h = lease{j, now + l.length}
	return changed, nil
}

// leave takes in a worker's goodbye and tells whether that changes the members.
// The instance is dead from here on, also when its lease is over already.
func (l *leases) leave(now time.Duration, j joined) (changed bool) {
	if !l.isDead(now, j.instance) {
		l.bury(now, j.instance)
	}
	n := len(l.held)
	l.held = slices.DeleteFunc(l.held, func(h lease) bool {
		return h.role == j.role && h.url == j.url && h.instance == j.instance
	})
	return len(l.held) < n
}

// rest gives the leases the time back in which this process did not run: nobody
// could renew one then, and who tried comes again only after a while.
func (l *leases) rest(now, stood time.Duration) {
	if stood < stoodStill {
		return
	}
	for i := range l.held {
		h := &l.held[i]
		h.until = min(h.until+stood, now+l.length)
	}
}

// expire takes those out whose lease is over.
func (l *leases) expire(now time.Duration) (gone []joined) {
	l.held = slices.DeleteFunc(l.held, func(h lease) bool {
		over := now >= h.until
		if over {
			gone = append(gone, h.joined)
		}
		return over
	})
	return gone
}

func (l *leases) isDead(now time.Duration, instance string) bool {
	l.dead = slices.DeleteFunc(l.dead, func(g ghost) bool { return now-g.since >= ghostFor })
	return slices.ContainsFunc(l.dead, func(g ghost) bool { return g.instance == instance })
}

func (l *leases) bury(now time.Duration, instance string) {
	if len(l.dead) >= ghostsMost {
		l.dead = slices.Delete(l.dead, 0, 1)
	}
	l.dead = append(l.dead, ghost{instance, now})
}
