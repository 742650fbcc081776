//metronome:pure

package sched

import (
	"slices"
	"time"
)

// parking keeps what a prefill core knows of rooms that it has no request for:
// grants that came before their request, and rooms whose request has failed, so
// that a grant which comes too late is answered at once and not after its time.
type parking struct {
	max     int
	timeout time.Duration
	grants  map[int64]*parked
	timers  timers[*parked]
	seq     uint64
	buried  map[int64]buried
	order   []int64 // of burial
}

type parked struct {
	RoomGranted
	timer timer[*parked]
}

// buried is a room whose request has failed.
type buried struct {
	at    time.Duration
	cause *Error
}

// The failed rooms that are remembered: so many, and so long. A GRANT follows
// its request by milliseconds; rooms are drawn fresh for each attempt.
const (
	maxBuried = 1024
	buriedFor = 10 * time.Second
)

func newParking(c PrefillConfig) parking {
	return parking{max: c.MaxParked, timeout: c.BootstrapTimeout, grants: map[int64]*parked{}, buried: map[int64]buried{}}
}

// park keeps a grant until take, drop or its timeout, or says why not.
func (k *parking) park(g *RoomGranted, now time.Duration) *Error {
	if g.Room < 0 {
		return errorf(KVTransferFailed, "room %d is not a room", g.Room)
	}
	if b, ok := k.buried[g.Room]; ok && now-b.at < buriedFor {
		return b.cause
	}
	if q := k.grants[g.Room]; q != nil {
		if q.Key == g.Key {
			return nil
		}
		return errorf(KVTransferFailed, "room %d is granted already, by another grant or decode worker", g.Room)
	}
	if len(k.grants) >= k.max {
		return refused(Overloaded, "%d grants wait for their request, the limit", k.max)
	}
	q := &parked{RoomGranted: *g}
	k.seq++
	q.timer.owner, q.timer.seq = q, k.seq
	k.grants[g.Room] = q
	k.timers.set(&q.timer, now+k.timeout)
	return nil
}

// take removes and returns the grant that waits for this room, or nil. A room
// that is asked for anew is buried no more.
func (k *parking) take(room int64) *RoomGranted {
	delete(k.buried, room)
	q := k.grants[room]
	if q == nil {
		return nil
	}
	k.timers.stop(&q.timer)
	delete(k.grants, room)
	return &q.RoomGranted
}

// drop forgets a parked grant that its D has taken back.
func (k *parking) drop(room int64, key GrantKey) {
	if q := k.grants[room]; q != nil && q.Key == key {
		k.timers.stop(&q.timer)
		delete(k.grants, room)
	}
}

// passed removes and returns a grant that has waited too long, or nil.
func (k *parking) passed(now time.Duration) *RoomGranted {
	t := k.timers.passed(now)
	if t == nil {
		return nil
	}
	delete(k.grants, t.owner.Room)
	return &t.owner.RoomGranted
}

func (k *parking) next() time.Duration { return k.timers.next() }

// rearm gives the grants whose time passed since the last turn another chance (rule 20).
func (k *parking) rearm(now, last time.Duration) {
	var late []*timer[*parked]
	for t := k.timers.passed(now); t != nil; t = k.timers.passed(now) {
		late = append(late, t)
	}
	for _, t := range late {
		k.timers.set(t, rearmed(now, t.due, last))
	}
}

// bury remembers that the request of this room has failed.
func (k *parking) bury(room int64, now time.Duration, cause *Error) {
	if room < 0 {
		return
	}
	if _, ok := k.buried[room]; !ok {
		if len(k.order) == maxBuried {
			delete(k.buried, k.order[0])
			k.order = slices.Delete(k.order, 0, 1)
		}
		k.order = append(k.order, room)
	}
	k.buried[room] = buried{now, cause}
}
