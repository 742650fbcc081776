package noblock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// Finding is one place from which a loop can wait.
type Finding struct {
	At    string   // file:line of the call or the wait, in this module
	What  string   // what it waits for
	Chain []string // functions from the loop to what waits, each with the place that it calls from
}

func (f Finding) String() string {
	return f.At + ": " + f.What + "\n\t" + strings.Join(f.Chain, "\n\t")
}

// Exception is a place that is allowed to wait.
type Exception struct{ At, Reason string }

// Allowed lists the exceptions.
func (p *Program) Allowed() (list []Exception) {
	for _, a := range p.allows {
		list = append(list, Exception{a.at.file, a.reason}) // no line: lists of exceptions should not change with every edit
	}
	slices.SortFunc(list, func(a, b Exception) int {
		return cmp.Or(strings.Compare(a.At, b.At), strings.Compare(a.Reason, b.Reason))
	})
	return list
}

// Check looks at all loops and returns what can wait, in the order of the
// source.
func (p *Program) Check() (found []Finding) {
	found = append(p.walk(p.loops), p.sizes()...)
	for _, a := range p.allows {
		switch {
		case a.reason == "":
			found = append(found, Finding{At: a.at.String(), What: "an exception without a reason"})
		case !a.used:
			found = append(found, Finding{At: a.at.String(), What: "this exception allows nothing: remove it"})
		}
	}
	return inSource(found)
}

// CheckBaselines is Check from the functions marked //metronome:baseline, which
// are there to wait: that nothing is found from them would be a fault of this
// package.
func (p *Program) CheckBaselines() []Finding { return inSource(p.walk(p.baselines)) }

func (p *Program) walk(loops []*ssa.Function) (found []Finding) {
	for _, loop := range loops {
		w := &walk{p: p, loop: loop, from: map[*ssa.Function]step{loop: {}}}
		w.run()
		found = append(found, w.found...)
	}
	return found
}

// inSource is findings in the order of the source, each once.
func inSource(found []Finding) []Finding {
	slices.SortStableFunc(found, func(a, b Finding) int { return cmp.Or(strings.Compare(a.At, b.At), strings.Compare(a.What, b.What)) })
	return slices.CompactFunc(found, func(a, b Finding) bool { return a.At == b.At && a.What == b.What })
}

// step is how a function was reached first: the shortest way.
type step struct {
	caller *ssa.Function
	site   ssa.CallInstruction
}

// walk goes through everything that one loop reaches.
type walk struct {
	p     *Program
	loop  *ssa.Function
	from  map[*ssa.Function]step
	order []*ssa.Function
	next  map[*ssa.Function]end // outside this module: the way to what waits
	found []Finding
}

// end is the way from a function to what waits: a call of another function, or
// the wait itself.
type end struct {
	to   *ssa.Function
	at   place
	what string
}

func (w *walk) run() {
	w.order = []*ssa.Function{w.loop}
	for i := 0; i < len(w.order); i++ {
		f := w.order[i]
		if _, leaf := waitsBySelf(f); leaf || lockOps[f.String()] != 0 {
			continue
		}
		w.sites(f, func(site ssa.CallInstruction) {
			if w.p.ours(f) && w.p.allowed(w.p.place(site.Pos())) != nil {
				return
			}
			for _, g := range w.p.callees(f, site) {
				if _, known := w.from[g]; !known {
					w.from[g] = step{f, site}
					w.order = append(w.order, g)
				}
			}
		})
	}
	w.ends()
	for _, f := range w.order {
		if w.p.ours(f) {
			w.judge(f)
		}
	}
}

// sites calls do with each call of a function that runs on its goroutine.
func (w *walk) sites(f *ssa.Function, do func(ssa.CallInstruction)) {
	for _, b := range f.Blocks {
		for _, in := range b.Instrs {
			if site, ok := in.(ssa.CallInstruction); ok {
				do(site)
			}
		}
	}
}

// ends finds, for the functions outside this module, which of them can wait
// without coming back into it: callbacks are judged where they stand.
func (w *walk) ends() {
	w.next = map[*ssa.Function]end{}
	callers := map[*ssa.Function][]step{}
	var work []*ssa.Function
	mark := func(f *ssa.Function, e end) {
		if _, ok := w.next[f]; !ok && !w.p.ours(f) {
			w.next[f] = e
			work = append(work, f)
		}
	}
	for _, f := range w.order {
		if w.p.ours(f) {
			continue
		}
		what, leaf := waitsBySelf(f)
		if what != "" {
			mark(f, end{what: what})
		}
		if leaf || lockOps[f.String()] != 0 {
			continue
		}
		for _, b := range f.Blocks {
			for _, in := range b.Instrs {
				if what := waitsHere(in); what != "" {
					mark(f, end{at: w.p.place(in.Pos()), what: what})
				}
			}
		}
		w.sites(f, func(site ssa.CallInstruction) {
			for _, g := range w.p.callees(f, site) {
				callers[g] = append(callers[g], step{f, site})
			}
		})
	}
	spread := func() {
		for ; len(work) > 0; work = work[1:] {
			for _, c := range callers[work[0]] {
				mark(c.caller, end{to: work[0], at: w.p.place(c.site.Pos())})
			}
		}
	}
	spread()
	for _, f := range w.order { // mutexes last: judging one is the dearest, and most who wait have been found
		if _, ok := w.next[f]; ok || w.p.ours(f) {
			continue
		}
		w.sites(f, func(site ssa.CallInstruction) {
			if what := w.here(f, site); what != "" {
				mark(f, end{at: w.p.place(site.Pos()), what: what})
			}
		})
		spread()
	}
}

// here says what an instruction waits for: by itself, or for a mutex.
func (w *walk) here(f *ssa.Function, in ssa.Instruction) string {
	if what := waitsHere(in); what != "" {
		return what
	}
	site, ok := in.(ssa.CallInstruction)
	if !ok {
		return ""
	}
	for _, g := range w.p.callees(f, site) {
		if mayWait(g) {
			if key, h := w.p.locks.held(site); h != nil {
				return "takes " + strings.ReplaceAll(key, w.p.module+"/", "") + ", which " + h.String()
			}
		}
	}
	return ""
}

// judge looks at one function of this module.
func (w *walk) judge(f *ssa.Function) {
	selects := 0
	for _, b := range f.Blocks {
		for _, in := range b.Instrs {
			if s, ok := in.(*ssa.Select); ok && s.Blocking && f == w.loop {
				if selects++; selects == 1 {
					continue // the one place
				}
			}
			w.instr(f, in)
		}
	}
}

// instr reports what one instruction of this module waits for. An exception
// that stands there is used if there is anything.
func (w *walk) instr(f *ssa.Function, in ssa.Instruction) {
	what := w.here(f, in)
	site, isCall := in.(ssa.CallInstruction)
	if a := w.p.allowed(w.p.place(in.Pos())); a != nil {
		a.used = a.used || what != "" || isCall && slices.ContainsFunc(w.p.callees(f, site), func(g *ssa.Function) bool {
			return lockOps[g.String()] == 0 && w.waits(g, map[*ssa.Function]bool{})
		})
		return
	}
	if what != "" {
		w.report(f, in, what, nil)
	}
	if !isCall {
		return
	}
	for _, g := range w.p.callees(f, site) {
		if e, ok := w.next[g]; ok {
			w.report(f, in, w.tell(g, e), g)
			return
		}
	}
}

// tell says what a call outside this module waits for.
func (w *walk) tell(g *ssa.Function, e end) string {
	last := g
	for e.to != nil {
		last, e = e.to, w.next[e.to]
	}
	what := e.what
	if last != g {
		what = "reaches " + w.p.name(last) + ", which " + what
	}
	if k := kind(g); k != "" {
		return k + ": " + w.p.name(g) + " " + what
	}
	return w.p.name(g) + " " + what
}

// waits says whether a function behind an exception can wait.
func (w *walk) waits(f *ssa.Function, seen map[*ssa.Function]bool) bool {
	if seen[f] {
		return false
	}
	seen[f] = true
	if what, leaf := waitsBySelf(f); what != "" || leaf {
		return what != ""
	}
	for _, b := range f.Blocks {
		for _, in := range b.Instrs {
			if w.here(f, in) != "" {
				return true
			}
			if site, ok := in.(ssa.CallInstruction); ok {
				for _, g := range w.p.callees(f, site) {
					if lockOps[g.String()] == 0 && w.waits(g, seen) {
						return true
					}
				}
			}
		}
	}
	return false
}

// report tells of a wait with the way to it.
func (w *walk) report(f *ssa.Function, in ssa.Instruction, what string, g *ssa.Function) {
	at := w.p.place(in.Pos())
	chain := []string{fmt.Sprintf("%s %s", w.p.name(f), at)}
	for s := w.from[f]; s.caller != nil; s = w.from[s.caller] {
		if s.caller.Synthetic == "" || s.caller.Origin() != nil { // wrappers say nothing
			chain = append(chain, fmt.Sprintf("%s %s", w.p.name(s.caller), w.p.place(s.site.Pos())))
		}
	}
	slices.Reverse(chain)
	for g != nil {
		chain = append(chain, w.p.name(g))
		g = w.next[g].to
	}
	w.found = append(w.found, Finding{At: at.String(), What: what, Chain: chain})
}
