package sim

import (
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// world is virtual time: a queue of what happens next, in one thread.
type world struct {
	now    time.Duration
	queue  happenings
	seq    uint64
	events int
	rng    *rand.Rand // of delays; what a plan says is drawn before
	log    io.Writer  // transcript, or nil
	err    *Violation // the first rule broken
}

// happening is a function and its time. Of two at one time the one that was
// put in first comes first.
type happening struct {
	at  time.Duration
	seq uint64
	do  func()
}

type happenings []happening

func (q happenings) Len() int { return len(q) }
func (q happenings) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q happenings) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *happenings) Push(x any)   { *q = append(*q, x.(happening)) }
func (q *happenings) Pop() any {
	last := len(*q) - 1
	h := (*q)[last]
	(*q)[last] = happening{}
	*q = (*q)[:last]
	return h
}

// after lets something happen in d from now.
func (w *world) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, happening{w.now + max(0, d), w.seq, do})
}

// run lets things happen until a time, or until a rule is broken.
func (w *world) run(until time.Duration) {
	for w.err == nil && len(w.queue) > 0 && w.queue[0].at <= until {
		h := heap.Pop(&w.queue).(happening)
		w.now = h.at
		w.events++
		h.do()
	}
	w.now = max(w.now, until)
}

// between draws a duration.
func (w *world) between(low, high time.Duration) time.Duration {
	if high <= low {
		return low
	}
	return low + time.Duration(w.rng.Int64N(int64(high-low)))
}

// Violation is a rule that was broken.
type Violation struct {
	Rule string // a few fixed words: what a shrunk plan must still break
	At   time.Duration
	Text string
}

func (v *Violation) Error() string { return fmt.Sprintf("at %v: %s: %s", v.At, v.Rule, v.Text) }

func (w *world) broken(rule, format string, args ...any) {
	if w.err == nil {
		w.err = &Violation{rule, w.now, fmt.Sprintf(format, args...)}
		w.say("BROKEN %s", w.err.Error())
	}
}

func (w *world) say(format string, args ...any) {
	if w.log != nil {
		fmt.Fprintf(w.log, "%12v  ", w.now.Round(time.Microsecond))
		fmt.Fprintf(w.log, format+"\n", args...)
	}
}

// process is something that runs, is stopped, dies and starts again.
type process struct {
	*world
	name     string
	life     int // which start this is
	alive    bool
	gone     bool // its host answers nothing: no refusal, no reset
	stopped  bool // SIGSTOP: its kernel still takes bytes
	draining bool // SIGTERM: nothing new is taken
	idle     time.Duration
	since    time.Duration // stopped since
	leapt    time.Duration // how much its clock has leapt forward
	born     time.Duration
	held     []func()  // what waits for SIGCONT
	sockets  []*socket // in the order in which they were opened
}

func newProcess(w *world, name string) *process {
	return &process{world: w, name: name, alive: true, born: w.now, life: 1}
}

// clock is the time since the process started, as the process sees it.
func (p *process) clock() time.Duration { return p.now - p.born + p.leapt }

// heldUp says that the process was stopped, or its clock leapt: it starts its
// deadlines again.
func (p *process) heldUp() bool { return p.idle > 0 || p.leapt > 0 }

// in lets something happen inside the process in d from now: not when it has
// died meanwhile, and not before it continues when it is stopped.
func (p *process) in(d time.Duration, do func()) {
	life := p.life
	p.after(d, func() { p.inside(life, do) })
}

func (p *process) inside(life int, do func()) {
	switch {
	case p.life != life || !p.alive:
	case p.stopped:
		p.held = append(p.held, func() { p.inside(life, do) })
	default:
		do()
	}
}

func (p *process) stop() {
	if p.alive && !p.stopped {
		p.stopped, p.since = true, p.now
	}
}

func (p *process) resume() {
	if !p.stopped {
		return
	}
	p.stopped = false
	p.idle += p.now - p.since
	held := p.held
	p.held = nil
	for i, do := range held {
		if p.stopped { // again, by what it did
			p.held = append(p.held, held[i:]...)
			return
		}
		do()
	}
}

// die ends the process. Its kernel resets its connections, unless the host has
// vanished with it.
func (p *process) die(vanish bool) {
	if !p.alive {
		return
	}
	p.alive, p.gone, p.stopped, p.held = false, vanish, false, nil
	sockets := p.sockets
	p.sockets = nil
	for _, s := range sockets {
		s.lost(vanish)
	}
}

// start begins another life; who calls it makes the insides anew.
func (p *process) start() {
	p.life++
	p.alive, p.gone, p.stopped, p.draining, p.born, p.idle, p.leapt = true, false, false, false, p.now, 0, 0
}

func (p *process) drop(s *socket) {
	p.sockets = slices.DeleteFunc(p.sockets, func(o *socket) bool { return o == s })
}
