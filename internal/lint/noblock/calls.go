package noblock

import (
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// The call graph joins all callers of a function. For a few functions of the
// standard library that call what they are given, this would join the whole
// program: whoever formats an int would be taken to call every String method
// that anybody formats. This file looks at what is given in place.

// formats are functions that do not wait but for the methods of what they
// format; the number is where the operands are, a writer before them.
var formats = map[string]int{
	"fmt.Sprint": 0, "fmt.Sprintln": 0, "fmt.Sprintf": 1, "fmt.Errorf": 1, "fmt.Append": 1, "fmt.Appendln": 1, "fmt.Appendf": 2,
	"fmt.Fprint": 1, "fmt.Fprintln": 1, "fmt.Fprintf": 2,
}

// callees are the functions that a call of f may reach on the same goroutine.
func (p *Program) callees(f *ssa.Function, site ssa.CallInstruction) []*ssa.Function {
	fs, ok := p.called[site]
	if !ok {
		fs = p.inPlace(f, site)
		p.called[site] = fs
	}
	return fs
}

func (p *Program) inPlace(f *ssa.Function, site ssa.CallInstruction) []*ssa.Function {
	if _, ok := site.(*ssa.Go); ok {
		return nil
	}
	g := site.Common().StaticCallee()
	if g == nil {
		if once, ok := p.pools.once(p.locks, site.Common().Value); ok {
			return once
		}
		return p.edges(f)[site]
	}
	args := site.Common().Args
	switch name := g.String(); {
	case name == "(*sync.Once).Do": // called in place
		if given, ok := functions(args[1]); ok {
			return given
		}
	case name == "(*sync.Pool).Get":
		if made, ok := p.pools.makers(p.locks, args[0]); ok {
			return made
		}
	case name == "io.WriteString":
		return p.written(g, args[0])
	case pathOf(g) == "fmt":
		at, ok := formats[name]
		if !ok {
			break
		}
		given, ok := p.elements(args[at], 0)
		if !ok {
			break
		}
		fs := p.formatted(given)
		if strings.HasPrefix(name, "fmt.F") {
			fs = append(fs, p.written(g, args[0])...)
		}
		return fs
	}
	return p.edges(f)[site]
}

// written are the methods by which g writes to its first parameter, of those
// only the ones that the given writer can have.
func (p *Program) written(g *ssa.Function, to ssa.Value) (fs []*ssa.Function) {
	for site, callees := range p.edges(g) {
		if site.Common().IsInvoke() {
			fs = append(fs, slices.DeleteFunc(slices.Clone(callees), func(m *ssa.Function) bool { return !fits(m, to) })...)
		}
	}
	return inOrder(fs)
}

// formatted are the methods that fmt calls on values.
func (p *Program) formatted(vs []ssa.Value) (fs []*ssa.Function) {
	handle := p.prog.ImportedPackage("fmt").Type("pp")
	union := p.edges(p.prog.LookupMethod(types.NewPointer(handle.Type()), handle.Package().Pkg, "handleMethods"))
	seen := map[types.Type]bool{}
	for _, v := range vs {
		if made, ok := v.(*ssa.MakeInterface); ok {
			fs = append(fs, p.printed(made.X.Type(), seen)...)
			continue
		}
		for site, methods := range union {
			if site.Common().IsInvoke() {
				fs = append(fs, slices.DeleteFunc(slices.Clone(methods), func(m *ssa.Function) bool { return !fits(m, v) })...)
			}
		}
	}
	return inOrder(fs)
}

// printed are the methods of a type, and of what it consists of, that fmt calls.
func (p *Program) printed(t types.Type, seen map[types.Type]bool) (fs []*ssa.Function) {
	if seen[t] {
		return nil
	}
	seen[t] = true
	for _, name := range []string{"Format", "GoString", "Error", "String"} {
		if sel := p.prog.MethodSets.MethodSet(t).Lookup(nil, name); sel != nil {
			fs = append(fs, p.prog.MethodValue(sel))
		}
	}
	if len(fs) > 0 {
		return fs
	}
	switch t := t.Underlying().(type) {
	case *types.Pointer:
		return p.printed(t.Elem(), seen)
	case *types.Slice:
		return p.printed(t.Elem(), seen)
	case *types.Array:
		return p.printed(t.Elem(), seen)
	case *types.Map:
		return append(p.printed(t.Key(), seen), p.printed(t.Elem(), seen)...)
	case *types.Struct:
		for f := range t.Fields() {
			if f.Exported() {
				fs = append(fs, p.printed(f.Type(), seen)...)
			}
		}
	}
	return fs
}

// elements are the values in a slice of operands, if they can be seen: here, or
// where a caller makes the slice.
func (p *Program) elements(v ssa.Value, depth int) (vs []ssa.Value, ok bool) {
	if depth > keyDepth {
		return nil, false
	}
	join := func(parts []ssa.Value) bool {
		for _, part := range parts {
			more, ok := p.elements(part, depth+1)
			if !ok {
				return false
			}
			vs = append(vs, more...)
		}
		return true
	}
	switch v := v.(type) {
	case *ssa.Const:
		return nil, true // none
	case *ssa.Phi:
		return vs, join(v.Edges)
	case *ssa.Parameter:
		given := p.arguments(v)
		return vs, len(given) > 0 && join(given)
	case *ssa.Call:
		if b, isAppend := v.Call.Value.(*ssa.Builtin); isAppend && b.Name() == "append" {
			return vs, join(v.Call.Args)
		}
	case *ssa.Slice:
		array, ok := v.X.(*ssa.Alloc)
		if !ok {
			return p.elements(v.X, depth+1)
		}
		for _, ref := range *array.Referrers() {
			at, ok := ref.(*ssa.IndexAddr)
			if !ok {
				continue
			}
			for _, use := range *at.Referrers() {
				if st, ok := use.(*ssa.Store); ok {
					vs = append(vs, st.Val)
				}
			}
		}
		return vs, true
	}
	return nil, false
}

// fits says whether a method can be that of the value in an interface.
func fits(method *ssa.Function, v ssa.Value) bool {
	recv := method.Signature.Recv()
	if recv == nil {
		return true
	}
	switch v := v.(type) {
	case *ssa.MakeInterface:
		return types.Identical(recv.Type(), v.X.Type())
	case *ssa.ChangeInterface:
		return types.Implements(recv.Type(), v.X.Type().Underlying().(*types.Interface))
	}
	is, ok := v.Type().Underlying().(*types.Interface)
	return !ok || types.Implements(recv.Type(), is)
}

func inOrder(fs []*ssa.Function) []*ssa.Function {
	slices.SortFunc(fs, func(a, b *ssa.Function) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(fs)
}

// pools are the functions that make what a sync.Pool lacks, by the pool, and
// those behind what sync.OnceFunc and its like return, by where that is kept.
type pools struct {
	known    map[string][]*ssa.Function
	literals []*ssa.Function // of pools that were made elsewhere and copied
	onces    map[string][]*ssa.Function
	unseen   map[string]bool // what is there cannot be seen
}

func newPools(p *Program) *pools {
	ps := &pools{known: map[string][]*ssa.Function{}, onces: map[string][]*ssa.Function{}, unseen: map[string]bool{}}
	local := map[ssa.Value][]*ssa.Function{} // in a literal that is copied to its place
	each := func(do func(*ssa.Store)) {
		for f := range p.graph.Nodes {
			if f == nil {
				continue
			}
			for _, b := range f.Blocks {
				for _, in := range b.Instrs {
					if st, ok := in.(*ssa.Store); ok {
						do(st)
					}
				}
			}
		}
	}
	each(func(st *ssa.Store) {
		at, ok := st.Addr.(*ssa.FieldAddr)
		if !ok || field(at) != "sync.Pool.New" {
			return
		}
		made, seen := functions(st.Val)
		if _, ok := at.X.(*ssa.Alloc); ok {
			local[at.X] = append(local[at.X], made...)
			ps.literals = append(ps.literals, made...)
		}
		for _, key := range p.locks.key(at.X, 0) {
			ps.known[key] = append(ps.known[key], made...)
			ps.unseen[key] = ps.unseen[key] || !seen
		}
	})
	each(func(st *ssa.Store) {
		if call, ok := st.Val.(*ssa.Call); ok && makesOnce(call) {
			given, _ := functions(call.Call.Args[0])
			for _, key := range p.locks.key(st.Addr, 0) {
				ps.onces[key] = append(ps.onces[key], given...)
			}
		} else if _, isFunc := st.Val.Type().Underlying().(*types.Signature); isFunc {
			for _, key := range p.locks.key(st.Addr, 0) { // sync.Pool.New has no key that is asked for
				ps.unseen[key] = true
			}
		}
		if from, ok := st.Val.(*ssa.UnOp); ok && local[from.X] != nil {
			for _, key := range p.locks.key(st.Addr, 0) {
				ps.known[key] = append(ps.known[key], local[from.X]...)
			}
		}
	})
	return ps
}

// makesOnce says whether a call is sync.OnceFunc or one of its like, of a
// function that can be seen.
func makesOnce(call *ssa.Call) bool {
	g := call.Call.StaticCallee()
	if g == nil || pathOf(g) != "sync" || !strings.HasPrefix(g.Name(), "Once") || g.Signature.Recv() != nil {
		return false
	}
	_, ok := functions(call.Call.Args[0])
	return ok
}

// once are the functions behind a function value that is read from a place
// where only results of sync.OnceFunc and its like are known to be.
func (ps *pools) once(l *locks, v ssa.Value) (fs []*ssa.Function, ok bool) {
	from, ok := v.(*ssa.UnOp)
	if !ok || len(ps.onces) == 0 {
		return nil, false
	}
	for _, key := range l.key(from.X, 0) {
		known := ps.onces[key]
		if known == nil || ps.unseen[key] {
			return nil, false
		}
		fs = append(fs, known...)
	}
	return fs, true
}

// makers are the functions that a Get of a pool may call. A pool goes by its
// variable or field, as a mutex does.
func (ps *pools) makers(l *locks, pool ssa.Value) (fs []*ssa.Function, ok bool) {
	_, global := pool.(*ssa.Global)
	for _, key := range l.key(pool, 0) {
		if ps.unseen[key] {
			return nil, false
		}
		if made, ok := ps.known[key]; ok || global { // a global one without New has none
			fs = append(fs, made...)
		} else {
			fs = append(fs, ps.literals...)
		}
	}
	return fs, true
}

// functions are what a function value is, if that can be seen in place.
func functions(v ssa.Value) (fs []*ssa.Function, ok bool) {
	switch v := v.(type) {
	case *ssa.Function:
		return []*ssa.Function{v}, true
	case *ssa.MakeClosure:
		return []*ssa.Function{v.Fn.(*ssa.Function)}, true
	case *ssa.ChangeType:
		return functions(v.X)
	}
	return nil, false
}

// edges are the functions that each call of f may reach.
func (p *Program) edges(f *ssa.Function) map[ssa.CallInstruction][]*ssa.Function {
	if m := p.bySite[f]; m != nil {
		return m
	}
	m := map[ssa.CallInstruction][]*ssa.Function{}
	if n := p.graph.Nodes[f]; n != nil {
		for _, e := range n.Out {
			if e.Site != nil {
				m[e.Site] = append(m[e.Site], e.Callee.Func)
			}
		}
	}
	p.bySite[f] = m
	return m
}
