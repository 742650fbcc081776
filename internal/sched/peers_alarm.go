//metronome:pure

package sched

import "time"

// alarm is one deadline of one thing: an attempt that is due, a heartbeat, the
// end of a request's patience. The zero alarm is not set.
type alarm struct {
	at   time.Duration
	span time.Duration // from setting to at
	seq  uint64        // order of setting: breaks ties
	pos  int           // 1 + index in the heap; 0: not set
	late bool          // a late turn has armed it again already (rule 20)
	due  func(now time.Duration)
}

func (a *alarm) isSet() bool { return a.pos != 0 }

// alarms is a binary heap of all set alarms, the earliest first, so that a turn
// costs O(due) and not O(everything that waits).
type alarms struct {
	heap []*alarm
	seq  uint64
	held []*alarm // scratch of late
}

// next is the earliest deadline, or Never.
func (h *alarms) next() time.Duration {
	if len(h.heap) == 0 {
		return Never
	}
	return h.heap[0].at
}

// set arms a for the time at, not before now; an alarm that is set moves.
func (h *alarms) set(a *alarm, now, at time.Duration) {
	h.stop(a)
	at = max(at, now)
	h.seq++
	a.at, a.span, a.seq, a.late = at, at-now, h.seq, false
	h.push(a)
}

func (h *alarms) push(a *alarm) {
	h.heap = append(h.heap, a)
	a.pos = len(h.heap)
	h.up(a.pos - 1)
}

// stop disarms a; one that is not set stays so.
func (h *alarms) stop(a *alarm) {
	if a.pos == 0 {
		return
	}
	i, last := a.pos-1, len(h.heap)-1
	h.swap(i, last)
	h.heap[last] = nil
	h.heap = h.heap[:last]
	a.pos = 0
	if i < last {
		h.down(i)
		h.up(i)
	}
}

// fire disarms every alarm that is due and calls it, in order of time and then
// of setting. One that is set while fire runs waits for the next call, so no
// turn can go round for ever.
func (h *alarms) fire(now time.Duration) {
	mark := h.seq
	for len(h.heap) > 0 && h.heap[0].at <= now && h.heap[0].seq <= mark {
		a := h.heap[0]
		h.stop(a)
		a.due(now)
	}
}

// rearm gives the alarms that passed while this process was stopped, for by,
// that time back, but never more than they had: once for each setting.
func (h *alarms) rearm(now, by time.Duration) {
	h.held = h.held[:0]
	for len(h.heap) > 0 && h.heap[0].at <= now {
		a := h.heap[0]
		h.stop(a)
		h.held = append(h.held, a)
	}
	for i, a := range h.held {
		if !a.late {
			a.late = true
			a.at = now + min(by, a.span)
		}
		h.push(a)
		h.held[i] = nil
	}
}

func (h *alarms) before(i, j int) bool {
	a, b := h.heap[i], h.heap[j]
	if a.at != b.at {
		return a.at < b.at
	}
	return a.seq < b.seq
}

func (h *alarms) swap(i, j int) {
	h.heap[i], h.heap[j] = h.heap[j], h.heap[i]
	h.heap[i].pos, h.heap[j].pos = i+1, j+1
}

func (h *alarms) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.before(i, parent) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h *alarms) down(i int) {
	for {
		first := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h.heap); child++ {
			if h.before(child, first) {
				first = child
			}
		}
		if first == i {
			return
		}
		h.swap(i, first)
		i = first
	}
}
