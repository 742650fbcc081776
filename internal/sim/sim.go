// Package sim runs whole fleets in virtual time, in one thread, from one seed:
// the real scheduler cores, the real transfer tables with their frames, the
// real registry table, the router's real pair machine and the sim engine with
// real KV bytes, in a world whose
// network, processes and peers go wrong as a plan says.
//
// A run has two phases. Until Plan.Calm faults come and go and only safety is
// judged; then every fault is taken back, and everything must finish and heal.
// After every turn of every worker the checkers look:
//
//	tokens     each token of an answer is the reference function of its prompt
//	oracle     pages, grants, batches, ends: each as the outside sees it (sched/oracle)
//	invariant  the cores' own
//	panic      no core does
//	page       nothing writes pages but an open grant of theirs
//	beat       a decode batch follows the one before it, whatever peers do
//	bound      every request ends in its time, every queue stays in its bound
//	silence    a grant about which nothing comes ends within --kv-timeout
//	received   a prefill's leg ends well only when decode has all of it
//	pinned     what is being sent does not change meanwhile
//	rule N     the rules of docs/peers.md that an observer can judge
//	rest       at the end nothing is left: no request, grant, room, page
//	heal       what is asked when all is well is served
//
// What is driven by hand here is what the drivers do around the cores: turns,
// sockets, timers. Not simulated are bytes below the level of frames and
// messages, HTTP, the router's choice of pairs, and memory.
package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"runtime/debug"
	"time"
)

// Report is what a run was like.
type Report struct {
	Events   int
	Virtual  time.Duration
	Requests int
	Served   int            // with all their tokens
	Ends     map[string]int // the others, by code
	Tokens   int
}

// fleet is a world with its workers.
type fleet struct {
	*world
	plan     *Plan
	net      *network
	front    *front
	prefills []*prefill
	decodes  []*decode
	tampered int // long frames so far, for faults that count them
}

// Run runs a plan. log, when not nil, gets the transcript. The error is a
// *Violation.
func Run(p *Plan, log io.Writer) (*Report, error) {
	f := newFleet(p, log)
	f.live()
	rep := f.report()
	if f.err != nil {
		return rep, f.err
	}
	return rep, nil
}

// live plays the plan to its end. A core that panics has broken a rule like any other.
func (f *fleet) live() {
	defer func() {
		if p := recover(); p != nil {
			f.broken("panic", "%v\n%s", p, debug.Stack())
		}
	}()
	f.schedule()
	f.world.run(f.end())
	if f.err == nil {
		f.rest()
	}
}

// schedule puts requests, faults and probes at their times.
func (f *fleet) schedule() {
	if f.plan.Probes {
		for _, p := range f.prefills {
			f.front.probe(p.name)
		}
		for _, d := range f.decodes {
			f.front.probe(d.name)
		}
	}
	for i := range f.plan.Requests {
		q := &f.plan.Requests[i]
		f.after(q.At, func() { f.front.start(q) })
	}
	for i := range f.plan.Faults {
		fault := &f.plan.Faults[i]
		f.after(fault.At, func() { f.strike(fault) })
	}
}

func newFleet(p *Plan, log io.Writer) *fleet {
	w := &world{rng: rand.New(rand.NewPCG(p.Seed, 1)), log: log}
	n := &network{world: w, cfg: p.Net, names: map[string]*process{}, workers: map[*process]any{},
		blocked: map[path]int{}, held: map[path][]*socket{}, slow: map[path]time.Duration{}, trickle: map[path]trickle{}, delivered: map[int64]bool{}}
	f := &fleet{world: w, plan: p, net: n, front: &front{process: newProcess(w, "router"), net: n, plan: p, missed: map[string]int{}}}
	for i := range p.Prefills {
		w := newPrefill(n, p, i)
		f.prefills = append(f.prefills, w)
		n.names[w.name], n.workers[w.process] = w.process, w
	}
	for i := range p.Decodes {
		w := newDecode(n, p, i)
		f.decodes = append(f.decodes, w)
		n.names[w.name], n.workers[w.process] = w.process, w
	}
	return f
}

// end is when everything must be over: the last request, its time, and what a
// peer may take to notice that the other side has gone.
func (f *fleet) end() time.Duration {
	last := f.plan.Calm
	for _, q := range f.plan.Requests {
		last = max(last, q.At+q.Timeout)
	}
	return last + max(f.plan.BootstrapTimeout, f.plan.KVTimeout) + 15*time.Second
}

// rest judges what is left.
func (f *fleet) rest() {
	for _, c := range f.front.calls {
		switch {
		case !c.over:
			f.broken("rest", "request %d never ended", c.q.ID)
		case c.ended-c.began > c.q.Timeout:
			f.broken("bound", "request %d ended after %v, it had %v", c.q.ID, c.ended-c.began, c.q.Timeout)
		case c.q.Must && c.code != "":
			f.broken("heal", "request %d came %v after the last fault and ended with %s: %s", c.q.ID, healing, c.code, c.text)
		}
	}
	for _, d := range f.decodes {
		d.rest()
	}
	for _, p := range f.prefills {
		for _, r := range p.ranks {
			r.rest()
		}
	}
}

func (f *fleet) report() *Report {
	r := &Report{Events: f.events, Virtual: f.now, Requests: len(f.front.calls), Ends: map[string]int{}}
	for _, c := range f.front.calls {
		r.Tokens += len(c.tokens)
		if c.code == "" {
			r.Served++
		} else {
			r.Ends[c.code]++
		}
	}
	return r
}

// strike lets a fault begin, and end.
func (f *fleet) strike(x *Fault) {
	f.say("FAULT %s on %s %s for %v, %d", x.Kind, x.On, x.To, x.For, x.N)
	on := f.named(x.On)
	undo := func(do func()) {
		f.after(x.For, func() {
			f.say("END of %s on %s %s", x.Kind, x.On, x.To)
			do()
		})
	}
	switch x.Kind {
	case Stop:
		on.stop()
		undo(on.resume)
	case Starve:
		f.starve(on, f.now+x.For, time.Duration(x.N)*time.Millisecond)
	case Leap:
		f.leap(on, time.Duration(x.N)*time.Millisecond)
	case Kill, Reborn, Vanish, Impostor:
		f.kill(x, on, undo)
	case Drain:
		f.drain(on, time.Duration(x.N)*time.Millisecond, undo)
	case Cut:
		f.net.cut(on, f.named(x.To))
	case Block:
		undo(f.net.block(on, f.named(x.To)))
	case Slow:
		way := path{x.On, x.To}
		more := time.Duration(x.N) * time.Millisecond
		f.net.slow[way] += more
		undo(func() { f.net.slow[way] -= more })
	case Trickle:
		f.net.trickle[path{x.On, x.To}] = trickle{int64(x.N), f.now + x.For}
	case Registry:
		p := f.net.workers[on].(*prefill)
		p.mood = mood(x.N)
		undo(func() { p.mood = honest })
	case Rename:
		f.net.names[x.On] = f.named(x.To)
		undo(func() { f.net.names[x.On] = on })
	case Corrupt, Lose, Duplicate:
		f.net.tamper = f.tamper(x)
		undo(func() { f.net.tamper = nil })
	case Storm:
		for _, c := range f.front.calls {
			if !c.over && !c.q.Must {
				c.leave()
			}
		}
	}
}

// named is the process of that name, whatever the name leads to now.
func (f *fleet) named(name string) *process {
	for _, p := range f.prefills {
		if p.name == name {
			return p.process
		}
	}
	for _, d := range f.decodes {
		if d.name == name {
			return d.process
		}
	}
	if name == f.front.name {
		return f.front.process
	}
	panic(fmt.Sprintf("sim: a plan names %q, which does not exist", name))
}

// starve lets a process run only now and then.
func (f *fleet) starve(on *process, until, out time.Duration) {
	const runs = 50 * time.Millisecond
	if f.now >= until {
		return
	}
	on.stop()
	f.after(min(out, until-f.now), func() {
		on.resume()
		f.after(runs, func() { f.starve(on, until, out) })
	})
}

// leap moves a worker's clock, and so lets all its timers fire that have passed.
func (f *fleet) leap(on *process, by time.Duration) {
	if !on.alive {
		return
	}
	on.leapt += by
	for _, w := range f.loops(on) {
		w.wake(0)
	}
}

// loops are the loops of a worker; none: it is the router.
func (f *fleet) loops(of *process) (all []*worker) {
	switch w := f.net.workers[of].(type) {
	case *prefill:
		for _, r := range w.ranks {
			all = append(all, &r.worker)
		}
	case *decode:
		all = []*worker{&w.worker}
	}
	return all
}

// drain is SIGTERM: nothing new is taken, what is open may go on for a while,
// then it ends by name and the process with it. Who started it kills what is
// left of it and starts it again.
func (f *fleet) drain(on *process, wait time.Duration, undo func(func())) {
	if !on.alive || on.draining {
		return
	}
	on.draining = true
	life, end := on.life, on.clock()+wait
	if on == f.front.process {
		f.after(wait, func() {
			if on.life == life {
				f.front.stopAll()
			}
		})
		undo(func() {
			f.front.stopAll() // no request outlives its router
			on.life++
			on.draining = false
		})
		return
	}
	var look func()
	look = func() {
		switch open := f.jobs(on); {
		case open == 0:
			on.die(false)
		case on.clock() < end:
			on.in(10*time.Millisecond, look)
		default:
			for _, w := range f.loops(on) {
				w.push(abortAll{})
			}
			on.in(endWait, func() {
				if open := f.jobs(on); open > 0 && !on.heldUp() {
					f.broken("rule 13", "%s: %d requests are open %v after the drain", on.name, open, endWait)
				}
				on.die(false)
			})
		}
	}
	look()
	undo(func() {
		if on.life == life {
			on.die(false)
			f.restart(on)
		}
	})
}

// endWait is how long a worker that stops waits for its loops to end every request.
const endWait = 250 * time.Millisecond

func (f *fleet) jobs(of *process) (n int) {
	for _, w := range f.loops(of) {
		n += w.jobs()
	}
	return n
}

// restart begins the next life of a worker that is dead.
func (f *fleet) restart(on *process) {
	on.start()
	switch w := f.net.workers[on].(type) {
	case *prefill:
		w.boot()
	case *decode:
		w.boot()
	}
}

// kill ends a process; it starts again as the fault says.
func (f *fleet) kill(x *Fault, on *process, undo func(func())) {
	if !on.alive {
		return
	}
	on.die(x.Kind == Vanish)
	life := on.life
	undo(func() {
		if on.life != life || on.alive {
			return
		}
		if w, ok := f.net.workers[on].(*prefill); ok {
			if x.Kind == Reborn {
				w.tp, w.dp = x.N%10, max(1, x.N/10)
			}
			if w.other = x.Kind == Impostor && f.now < f.plan.Calm; w.other {
				f.after(f.plan.Calm-f.now, func() { f.convert(w) })
			}
		}
		f.restart(on)
	})
}

// convert starts an impostor again with the right model.
func (f *fleet) convert(p *prefill) {
	was := p.other
	if p.other = false; was && p.alive {
		p.die(false)
		f.restart(p.process)
	}
}

// tamper is what a lying prefill does to its long frames.
func (f *fleet) tamper(x *Fault) func(from, to *process, frame []byte) [][]byte {
	return func(from, to *process, frame []byte) [][]byte {
		if from.name != x.On || len(frame) < 200 {
			return [][]byte{frame}
		}
		if f.tampered++; f.tampered%x.N != 0 {
			return [][]byte{frame}
		}
		switch x.Kind {
		case Lose:
			return nil
		case Duplicate:
			return [][]byte{frame, frame}
		}
		bad := append([]byte(nil), frame...)
		bad[len(bad)-1-f.tampered%(len(bad)-60)] ^= 0x10
		return [][]byte{bad}
	}
}
