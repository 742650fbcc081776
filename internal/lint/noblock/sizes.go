package noblock

import (
	"cmp"
	"go/token"
	"go/types"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// decoders give numbers that somebody else chose.
var decoders = regexp.MustCompile(`^(\(encoding/binary\.\w+\)\.Uint\d+|\(encoding/binary\.ByteOrder\)\.Uint\d+|encoding/binary\.(Read)?U?[vV]arint|strconv\.(Atoi|ParseInt|ParseUint|ParseFloat))$`)

// sizeDepth is how far a number is followed back, through calls and fields.
const sizeDepth = 8

// sizes judges the lengths of make in this module: one that was decoded from
// bytes must have been compared with something.
func (p *Program) sizes() (found []Finding) {
	s := &tracer{p: p, stores: map[string][]ssa.Value{}, compared: map[string]bool{}}
	var makes []ssa.Instruction
	for f := range p.graph.Nodes {
		if f == nil || !p.ours(f) {
			continue
		}
		for _, b := range f.Blocks {
			for _, in := range b.Instrs {
				s.note(in)
				switch in.(type) {
				case *ssa.MakeSlice, *ssa.MakeMap, *ssa.MakeChan:
					makes = append(makes, in)
				}
			}
		}
	}
	for _, in := range makes {
		for _, v := range lengths(in) {
			if from := s.origin(v, 0, map[ssa.Value]bool{}); from != "" {
				at := p.place(in.Pos())
				if a := p.allowed(at); a != nil {
					a.used = true
					continue
				}
				found = append(found, Finding{At: at.String(), What: "makes as much as " + from + " says, which is compared with nothing", Chain: []string{p.name(in.Parent()) + " " + at.String()}})
			}
		}
	}
	slices.SortFunc(found, func(a, b Finding) int { return cmp.Compare(a.At, b.At) })
	return found
}

func lengths(in ssa.Instruction) []ssa.Value {
	switch in := in.(type) {
	case *ssa.MakeSlice:
		return []ssa.Value{in.Len, in.Cap}
	case *ssa.MakeMap:
		return []ssa.Value{in.Reserve}
	case *ssa.MakeChan:
		return []ssa.Value{in.Size}
	}
	return nil
}

// tracer follows numbers back to where they come from.
type tracer struct {
	p        *Program
	stores   map[string][]ssa.Value // what is put into a field, anywhere
	compared map[string]bool        // fields that are compared with something, anywhere
}

// note collects what is done with fields.
func (t *tracer) note(in ssa.Instruction) {
	switch in := in.(type) {
	case *ssa.Store:
		if f, ok := in.Addr.(*ssa.FieldAddr); ok {
			t.stores[field(f)] = append(t.stores[field(f)], in.Val)
		}
	case *ssa.BinOp:
		if isComparison(in.Op) {
			for _, v := range []ssa.Value{in.X, in.Y} {
				t.compared[loaded(v)] = true
			}
		}
	}
}

func isComparison(op token.Token) bool {
	switch op {
	case token.LSS, token.LEQ, token.GTR, token.GEQ, token.EQL, token.NEQ:
		return true
	}
	return false
}

// field is a struct's field as one word, with its tag.
func field(f *ssa.FieldAddr) string {
	elem := f.X.Type().Underlying().(*types.Pointer).Elem()
	return elem.String() + "." + elem.Underlying().(*types.Struct).Field(f.Field).Name()
}

// loaded is the field that a value was read from, or "".
func loaded(v ssa.Value) string {
	switch v := v.(type) {
	case *ssa.Convert:
		return loaded(v.X)
	case *ssa.UnOp:
		if f, ok := v.X.(*ssa.FieldAddr); ok && v.Op == token.MUL {
			return field(f)
		}
	}
	return ""
}

// origin is what a length was decoded by, or "" when it is ours or checked.
func (t *tracer) origin(v ssa.Value, depth int, seen map[ssa.Value]bool) string {
	if v == nil || depth > sizeDepth || seen[v] || t.checked(v, 0) {
		return ""
	}
	seen[v] = true
	next := func(vs ...ssa.Value) string {
		for _, v := range vs {
			if from := t.origin(v, depth+1, seen); from != "" {
				return from
			}
		}
		return ""
	}
	switch v := v.(type) {
	case *ssa.Convert:
		return next(v.X)
	case *ssa.ChangeType:
		return next(v.X)
	case *ssa.Phi:
		return next(v.Edges...)
	case *ssa.BinOp:
		if v.Op == token.AND || v.Op == token.REM || v.Op == token.SHR {
			return "" // bounded by its other half
		}
		return next(v.X, v.Y)
	case *ssa.Extract:
		return t.result(v.Tuple, v.Index, next)
	case *ssa.Call:
		return t.result(v, 0, next)
	case *ssa.Parameter:
		return next(t.p.arguments(v)...)
	case *ssa.UnOp:
		if f, ok := v.X.(*ssa.FieldAddr); ok && !t.compared[field(f)] {
			if fromJSON(f) {
				return "the field " + strings.ReplaceAll(field(f), t.p.module+"/", "")
			}
			return next(t.stores[field(f)]...)
		}
	}
	return ""
}

// fromJSON says whether a decoder of JSON fills a number's field.
func fromJSON(f *ssa.FieldAddr) bool {
	s := f.X.Type().Underlying().(*types.Pointer).Elem().Underlying().(*types.Struct)
	_, tagged := reflect.StructTag(s.Tag(f.Field)).Lookup("json")
	return tagged
}

// result follows one result of a call.
func (t *tracer) result(v ssa.Value, i int, next func(...ssa.Value) string) string {
	call, ok := v.(*ssa.Call)
	if !ok {
		return ""
	}
	c := call.Common()
	if b, ok := c.Value.(*ssa.Builtin); ok {
		if b.Name() == "min" && slices.ContainsFunc(c.Args, func(v ssa.Value) bool { return next(v) == "" }) {
			return ""
		} else if b.Name() == "min" || b.Name() == "max" {
			return next(c.Args...)
		}
		return ""
	}
	if c.IsInvoke() {
		if name := "(" + c.Value.Type().String() + ")." + c.Method.Name(); decoders.MatchString(name) {
			return name
		}
		return ""
	}
	g := c.StaticCallee()
	if g == nil {
		return ""
	}
	if decoders.MatchString(g.String()) {
		return g.String()
	}
	if !t.p.ours(g) {
		return ""
	}
	for _, b := range g.Blocks {
		if r, ok := b.Instrs[len(b.Instrs)-1].(*ssa.Return); ok && i < len(r.Results) {
			if from := next(r.Results[i]); from != "" {
				return from
			}
		}
	}
	return ""
}

// checked says whether a value is compared with something, here or in a
// function that it is given to.
func (t *tracer) checked(v ssa.Value, depth int) bool {
	refs := v.Referrers()
	if refs == nil || depth > 2 {
		return false
	}
	for _, in := range *refs {
		switch in := in.(type) {
		case *ssa.BinOp:
			if isComparison(in.Op) {
				return true
			}
		case *ssa.Convert:
			if t.checked(in, depth+1) {
				return true
			}
		case *ssa.Call:
			g := in.Common().StaticCallee()
			if g == nil || !t.p.ours(g) || len(g.Params) != len(in.Call.Args) {
				continue
			}
			if i := slices.Index(in.Call.Args, v); i >= 0 && t.checked(g.Params[i], depth+1) {
				return true
			}
		}
	}
	return false
}
