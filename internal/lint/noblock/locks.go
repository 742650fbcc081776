package noblock

import (
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// locks judges mutexes: is one held, anywhere in the program, across something
// that waits? A mutex is known by the field or variable it stands in.
type locks struct {
	p     *Program
	sites map[string][]*ssa.Function // functions that take or give back the mutex themselves
	long  map[string]*hold           // the judged ones; nil: held for moments only
	doing map[string]bool            // being judged: a lock cannot wait for itself
}

// hold is a proof that a mutex is held across a wait.
type hold struct {
	at   place
	in   string // function
	what string
	way  []string // functions from the one that takes the mutex to that one
}

const (
	takes = iota + 1
	givesBack
)

// lockOps are the operations on mutexes.
var lockOps = map[string]int{
	"(*sync.Mutex).Lock": takes, "(*sync.Mutex).TryLock": takes, "(*sync.Mutex).Unlock": givesBack,
	"(*sync.RWMutex).Lock": takes, "(*sync.RWMutex).RLock": takes, "(*sync.RWMutex).TryLock": takes, "(*sync.RWMutex).TryRLock": takes,
	"(*sync.RWMutex).Unlock": givesBack, "(*sync.RWMutex).RUnlock": givesBack,
	"(*internal/sync.Mutex).Lock": takes, "(*internal/sync.Mutex).TryLock": takes, "(*internal/sync.Mutex).Unlock": givesBack,
}

// mayWait are the operations that wait while another holds the mutex.
func mayWait(f *ssa.Function) bool {
	return lockOps[f.String()] == takes && f.Name() != "TryLock" && f.Name() != "TryRLock"
}

// index finds out who takes and gives back which mutex.
func (l *locks) index() {
	l.sites, l.long, l.doing = map[string][]*ssa.Function{}, map[string]*hold{}, map[string]bool{}
	for f, n := range l.p.graph.Nodes {
		if f == nil {
			continue
		}
		for _, e := range n.Out {
			if e.Site != nil && lockOps[e.Callee.Func.String()] != 0 {
				for _, key := range l.keys(e.Site) {
					if !slices.Contains(l.sites[key], f) {
						l.sites[key] = append(l.sites[key], f)
					}
				}
			}
		}
	}
}

// keys are the mutexes that a lock operation may be about.
func (l *locks) keys(site ssa.CallInstruction) []string {
	c := site.Common()
	v := c.Value // of an interface: sync.Locker
	if !c.IsInvoke() && len(c.Args) > 0 {
		v = c.Args[0]
	}
	return l.key(v, 0)
}

// keyDepth is how far a mutex is followed through parameters and variables.
const keyDepth = 6

// short are mutexes that are known to be held for moments only, though the flow
// of values seems to say otherwise.
var short = map[string]bool{
	// A node of a sync.Map: lookups return it locked, or none.
	"internal/sync.indirect[K comparable, V any].mu": true,
	"math/big.cacheBase10.Mutex":                     true, // taken and given back under one condition, twice asked
}

// unknownKey stands for every mutex that could not be followed.
const unknownKey = "a mutex that could not be followed"

func (l *locks) key(v ssa.Value, depth int) (keys []string) {
	if depth > keyDepth {
		return []string{unknownKey}
	}
	all := func(vs ...ssa.Value) {
		for _, v := range vs {
			for _, k := range l.key(v, depth+1) {
				if !slices.Contains(keys, k) {
					keys = append(keys, k)
				}
			}
		}
	}
	with := func(v ssa.Value, more string) {
		all(v)
		for i := range keys {
			keys[i] += more
		}
	}
	switch v := v.(type) {
	case *ssa.FieldAddr:
		ptr := v.X.Type().Underlying().(*types.Pointer)
		field := "." + ptr.Elem().Underlying().(*types.Struct).Field(v.Field).Name()
		if named, ok := types.Unalias(ptr.Elem()).(*types.Named); ok {
			return []string{named.Origin().String() + field}
		}
		with(v.X, field)
	case *ssa.IndexAddr:
		with(v.X, "[]")
	case *ssa.Global:
		return []string{v.String()}
	case *ssa.Alloc:
		return []string{l.p.place(v.Pos()).String() + " " + v.Comment}
	case *ssa.UnOp:
		all(v.X)
	case *ssa.Phi:
		all(v.Edges...)
	case *ssa.ChangeType:
		all(v.X)
	case *ssa.MakeInterface:
		all(v.X)
	case *ssa.ChangeInterface:
		all(v.X)
	case *ssa.Parameter:
		all(l.p.arguments(v)...)
	case *ssa.FreeVar:
		all(l.p.bindings(v)...)
	}
	if len(keys) == 0 {
		return []string{unknownKey}
	}
	return keys
}

// arguments are what callers pass for a parameter.
func (p *Program) arguments(v *ssa.Parameter) (vs []ssa.Value) {
	f := v.Parent()
	i := slices.Index(f.Params, v)
	n := p.graph.Nodes[f]
	if n == nil {
		return nil
	}
	for _, e := range n.In {
		if e.Site == nil {
			continue
		}
		c := e.Site.Common()
		args := c.Args
		if c.IsInvoke() {
			args = append([]ssa.Value{c.Value}, args...)
		}
		if len(args) == len(f.Params) && !slices.Contains(vs, args[i]) {
			vs = append(vs, args[i])
		}
	}
	return vs
}

// bindings are what a captured variable stands for.
func (p *Program) bindings(v *ssa.FreeVar) (vs []ssa.Value) {
	f := v.Parent()
	i := slices.Index(f.FreeVars, v)
	if f.Parent() == nil {
		return nil // a bound method: its receiver
	}
	for _, b := range f.Parent().Blocks {
		for _, in := range b.Instrs {
			if c, ok := in.(*ssa.MakeClosure); ok && c.Fn == f {
				vs = append(vs, c.Bindings[i])
			}
		}
	}
	return vs
}

// held says where the mutex of a lock operation is held across a wait, or nil.
func (l *locks) held(site ssa.CallInstruction) (string, *hold) {
	for _, key := range l.keys(site) {
		if key == unknownKey {
			return key, &hold{what: "may be held across anything"}
		}
		if h := l.judge(key); h != nil {
			return key, h
		}
	}
	return "", nil
}

// judge follows all paths on which the mutex is held.
func (l *locks) judge(key string) *hold {
	if h, done := l.long[key]; done || l.doing[key] || short[key] {
		return h
	}
	l.doing[key] = true
	defer delete(l.doing, key)
	j := &judgement{locks: l, key: key, effects: map[*ssa.Function]effect{}, from: map[visit]visit{}}
	j.summarise()
	for _, f := range l.sites[key] {
		j.enter(visit{f, false}, visit{})
	}
	for f := range j.effects { // such a function holds it, or its callers do
		j.enter(visit{f, false}, visit{})
		for _, e := range l.p.graph.Nodes[f].In {
			if e.Caller.Func != nil {
				j.enter(visit{e.Caller.Func, false}, visit{})
			}
		}
	}
	slices.SortStableFunc(j.todo, func(a, b visit) int { return strings.Compare(a.f.String(), b.f.String()) })
	for len(j.todo) > 0 && j.found == nil {
		v := j.todo[0]
		j.todo = j.todo[1:]
		j.now = v
		j.flow(v.f, v.held, true)
	}
	l.long[key] = j.found
	return j.found
}

// judgement is the work on one mutex.
type judgement struct {
	*locks
	key     string
	effects map[*ssa.Function]effect // of functions that leave the mutex otherwise than they found it
	from    map[visit]visit          // how a visit came about first
	todo    []visit
	now     visit
	found   *hold
}

// visit is a function that may run while the mutex is held, or not.
type visit struct {
	f    *ssa.Function
	held bool
}

// effect is how a function leaves the mutex: held or not, when it was not held
// at the call, and when it was.
type effect struct{ free, held bool }

func (j *judgement) enter(v, from visit) {
	if _, ok := j.from[v]; !ok {
		j.from[v] = from
		j.todo = append(j.todo, v)
	}
}

// summarise finds the effects: first of the functions that touch the mutex
// themselves, then of their callers, until nothing changes.
func (j *judgement) summarise() {
	work := slices.Clone(j.sites[j.key])
	for range 10_000 { // the effects settle long before; the bound keeps a fault from hanging
		if len(work) == 0 {
			return
		}
		f := work[0]
		work = work[1:]
		e := effect{free: j.flow(f, false, false), held: j.flow(f, true, false)}
		old, ok := j.effects[f]
		if !ok {
			old = effect{false, true}
		}
		if e == old {
			continue
		}
		j.effects[f] = e
		for _, in := range j.p.graph.Nodes[f].In {
			if _, isGo := in.Site.(*ssa.Go); !isGo && in.Caller.Func != nil && !slices.Contains(work, in.Caller.Func) {
				work = append(work, in.Caller.Func)
			}
		}
	}
}

// flow runs through a function and returns whether the mutex may be held at its
// end. With look it also judges what happens while it is held.
func (j *judgement) flow(f *ssa.Function, held, look bool) bool {
	if len(f.Blocks) == 0 {
		return held
	}
	in := make([]bool, len(f.Blocks))
	reached := make([]bool, len(f.Blocks))
	in[0], reached[0] = held, true
	work := []*ssa.BasicBlock{f.Blocks[0]}
	end := false
	for len(work) > 0 {
		b := work[len(work)-1]
		work = work[:len(work)-1]
		now := in[b.Index]
		for _, instr := range b.Instrs {
			now = j.instr(f, instr, now, look)
			if _, ok := instr.(*ssa.Return); ok {
				end = end || now
			}
		}
		for _, s := range b.Succs {
			if !reached[s.Index] || now && !in[s.Index] {
				reached[s.Index] = true
				in[s.Index] = in[s.Index] || now
				work = append(work, s)
			}
		}
	}
	return end
}

// instr is the effect of one instruction.
func (j *judgement) instr(f *ssa.Function, in ssa.Instruction, now, look bool) bool {
	if _, ok := in.(*ssa.RunDefers); ok {
		return j.deferred(f, now, look)
	}
	if now && look {
		if what := waitsHere(in); what != "" {
			j.witness(f, in, what)
		}
	}
	switch site := in.(type) {
	case *ssa.Call:
		return j.call(f, site, now, look)
	case *ssa.Defer, *ssa.Go:
		return now
	}
	return now
}

// deferred runs the deferred calls of a function, the last one first as far as
// the order of the source tells.
func (j *judgement) deferred(f *ssa.Function, now, look bool) bool {
	var defers []*ssa.Defer
	for _, b := range f.Blocks {
		for _, in := range b.Instrs {
			if d, ok := in.(*ssa.Defer); ok {
				defers = append(defers, d)
			}
		}
	}
	for _, d := range slices.Backward(defers) {
		now = j.call(f, d, now, look)
	}
	return now
}

// call is the effect of a call, whoever may be called.
func (j *judgement) call(f *ssa.Function, site ssa.CallInstruction, now, look bool) bool {
	after, any := false, false
	for _, g := range j.p.callees(f, site) {
		any = true
		switch op := lockOps[g.String()]; {
		case op != 0 && slices.Contains(j.keys(site), j.key):
			after = after || op == takes
			continue
		case mayWait(g) && now && look:
			if key, h := j.held(site); h != nil {
				j.witness(f, site, "takes "+key+", which "+h.String())
			}
			fallthrough
		case op != 0:
			after = after || now
			continue
		}
		what, leaf := waitsBySelf(g)
		if what != "" && now && look {
			j.witness(f, site, what)
		}
		if e, ok := j.effects[g]; ok {
			after = after || now && e.held || !now && e.free
		} else {
			after = after || now
		}
		if now && look && !leaf {
			j.enter(visit{g, true}, j.now)
		}
	}
	return after || !any && now
}

func (j *judgement) witness(f *ssa.Function, in ssa.Instruction, what string) {
	if j.found != nil {
		return
	}
	j.found = &hold{at: j.p.place(in.Pos()), in: j.p.name(f), what: what}
	for v := j.now; v.f != nil; v = j.from[v] {
		j.found.way = append(j.found.way, j.p.name(v.f))
	}
	slices.Reverse(j.found.way)
}

func (h *hold) String() string {
	if h.in == "" {
		return h.what
	}
	where := h.in
	if len(h.way) > 1 {
		where = strings.Join(h.way, " calls ")
	}
	return "is held where " + where + " (" + h.at.String() + ") " + h.what
}
