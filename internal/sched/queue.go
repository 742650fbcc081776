//metronome:pure

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// queue holds requests by arrival, the oldest first. A request that comes back
// (preempted, or its peer was lost) gets its old place, so the oldest always
// goes first.
type queue[T interface{ order() uint64 }] struct{ s []T }

func (q *queue[T]) find(n uint64) (int, bool) {
	return slices.BinarySearchFunc(q.s, n, func(r T, n uint64) int { return cmp.Compare(r.order(), n) })
}

func (q *queue[T]) push(r T) {
	if n := len(q.s); n == 0 || q.s[n-1].order() < r.order() {
		q.s = append(q.s, r) // nearly always: it is the youngest
		return
	}
	i, _ := q.find(r.order())
	q.s = slices.Insert(q.s, i, r)
}

func (q *queue[T]) remove(r T) {
	i, ok := q.find(r.order())
	if !ok {
		panic("sched: the request is not in the queue of its phase")
	}
	q.s = slices.Delete(q.s, i, i+1)
}

func (q *queue[T]) len() int { return len(q.s) }

// first and last are the oldest and the youngest, or the zero value.
func (q *queue[T]) first() (r T) {
	if len(q.s) > 0 {
		r = q.s[0]
	}
	return r
}

func (q *queue[T]) last() (r T) {
	if len(q.s) > 0 {
		r = q.s[len(q.s)-1]
	}
	return r
}

// stuck remembers that the oldest request that is ready found too few pages,
// so that turns in which nothing has got better do not try it again.
type stuck[T any] struct {
	req     T
	chances uint64
	reserve int
}

func stuckAt[T any](r T, p *kv.Pool) stuck[T] { return stuck[T]{r, p.Chances(), p.Reserved()} }

// timer is one deadline of its owner, which embeds it.
type timer[T any] struct {
	due   time.Duration
	seq   uint64 // breaks ties
	pos   int    // place in the heap plus 1; 0: not armed
	owner T
}

// timers is a heap of deadlines, so that a turn looks only at those that have passed.
type timers[T any] struct{ heap []*timer[T] }

// set arms t or moves it. Never disarms it.
func (h *timers[T]) set(t *timer[T], due time.Duration) {
	switch {
	case due == Never:
		h.stop(t)
	case t.pos == 0:
		t.due = due
		h.heap = append(h.heap, t)
		t.pos = len(h.heap)
		h.up(t.pos - 1)
	case t.due != due:
		t.due = due
		h.down(t.pos - 1)
		h.up(t.pos - 1)
	}
}

func (h *timers[T]) stop(t *timer[T]) {
	if t.pos == 0 {
		return
	}
	i, last := t.pos-1, len(h.heap)-1
	h.swap(i, last)
	h.heap[last] = nil
	h.heap, t.pos = h.heap[:last], 0
	if i < last {
		moved := h.heap[i]
		h.down(i)
		h.up(moved.pos - 1)
	}
}

// next is the earliest deadline, or Never.
func (h *timers[T]) next() time.Duration {
	if len(h.heap) == 0 {
		return Never
	}
	return h.heap[0].due
}

// passed disarms and returns the earliest timer that is due by now, or nil.
func (h *timers[T]) passed(now time.Duration) *timer[T] {
	if len(h.heap) == 0 || h.heap[0].due > now {
		return nil
	}
	t := h.heap[0]
	h.stop(t)
	return t
}

func (h *timers[T]) less(i, j int) bool {
	a, b := h.heap[i], h.heap[j]
	return a.due < b.due || a.due == b.due && a.seq < b.seq
}

func (h *timers[T]) swap(i, j int) {
	h.heap[i], h.heap[j] = h.heap[j], h.heap[i]
	h.heap[i].pos, h.heap[j].pos = i+1, j+1
}

func (h *timers[T]) up(i int) {
	for ; i > 0 && h.less(i, (i-1)/2); i = (i - 1) / 2 {
		h.swap(i, (i-1)/2)
	}
}

func (h *timers[T]) down(i int) {
	for {
		j := 2*i + 1
		if j >= len(h.heap) {
			return
		}
		if j+1 < len(h.heap) && h.less(j+1, j) {
			j++
		}
		if !h.less(j, i) {
			return
		}
		h.swap(i, j)
		i = j
	}
}

// rearmed is the second chance of a deadline that passed while this process
// was stopped or starved (rule 20): what was left of it at the last turn, and
// at least LateTurn, so that those who kept it have the time to be heard.
func rearmed(now, due, lastTurn time.Duration) time.Duration {
	return now + max(due-lastTurn, LateTurn)
}
