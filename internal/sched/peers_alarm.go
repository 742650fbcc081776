//metronome:pure

package sched

import "time"

// alarm is one deadline of one thing: an attempt that is due, a heartbeat, the
// end of a request's patience. The zero alarm is not set.
type alarm struct {
	at   time.Duration
	span time.Duration // from setting to at
	pos  int           // 1 + index in the heap; 0: not set
	late bool          // a late turn has armed it again already (rule 20)
	due  func(now time.Duration)
}

func (a *alarm) isSet() bool { return a.pos != 0 }

// alarms is a heap of all set alarms, the earliest first, so that a turn costs
// O(due) and not O(everything that waits). Each entry holds its own order, so
// that a comparison touches no alarm; four children share two cache lines.
type alarms struct {
	heap []alarmEntry
	seq  uint64
	held []*alarm // scratch of rearm
}

type alarmEntry struct {
	at  time.Duration
	seq uint64 // order of setting: breaks ties
	a   *alarm
}

func (e *alarmEntry) before(o *alarmEntry) bool {
	return e.at < o.at || e.at == o.at && e.seq < o.seq
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
	a.at, a.span, a.late = at, at-now, false
	h.push(a)
}

func (h *alarms) push(a *alarm) {
	h.seq++
	h.heap = append(h.heap, alarmEntry{})
	h.up(len(h.heap)-1, alarmEntry{a.at, h.seq, a})
}

// stop disarms a; one that is not set stays so.
func (h *alarms) stop(a *alarm) {
	if a.pos == 0 {
		return
	}
	i, end := a.pos-1, len(h.heap)-1
	last := h.heap[end]
	h.heap[end] = alarmEntry{}
	h.heap = h.heap[:end]
	a.pos = 0
	if i == end {
		return
	}
	if i > 0 && last.before(&h.heap[(i-1)/4]) {
		h.up(i, last)
	} else {
		h.down(i, last)
	}
}

// fire disarms the first alarm that is due, if it was set no later than seq,
// and calls it: in order of time and then of setting. The caller takes seq
// before its loop, so that no turn can go round for ever.
func (h *alarms) fire(now time.Duration, seq uint64) bool {
	if len(h.heap) == 0 || h.heap[0].at > now || h.heap[0].seq > seq {
		return false
	}
	a := h.heap[0].a
	h.stop(a)
	a.due(now)
	return true
}

// rearm gives the alarms that passed while this process was stopped, for by,
// that time back, but never more than they had: once for each setting.
func (h *alarms) rearm(now, by time.Duration) {
	h.held = h.held[:0]
	for len(h.heap) > 0 && h.heap[0].at <= now {
		a := h.heap[0].a
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

// up puts e into the hole at i or above it, down at i or below it.
func (h *alarms) up(i int, e alarmEntry) {
	for i > 0 {
		parent := (i - 1) / 4
		if !e.before(&h.heap[parent]) {
			break
		}
		h.put(i, h.heap[parent])
		i = parent
	}
	h.put(i, e)
}

func (h *alarms) down(i int, e alarmEntry) {
	for {
		first := 4*i + 1
		if first >= len(h.heap) {
			break
		}
		for c := first + 1; c < min(4*i+5, len(h.heap)); c++ {
			if h.heap[c].before(&h.heap[first]) {
				first = c
			}
		}
		if !h.heap[first].before(&e) {
			break
		}
		h.put(i, h.heap[first])
		i = first
	}
	h.put(i, e)
}

func (h *alarms) put(i int, e alarmEntry) {
	h.heap[i] = e
	e.a.pos = i + 1
}
