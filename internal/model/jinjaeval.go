//metronome:pure

package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// limits is what one rendering may use. A template is outside input, and so
// are the messages: whatever they are, rendering ends soon and in bounded memory.
type limits struct {
	steps  int // statements and operations
	output int // bytes of the result
	made   int // bytes of all texts made on the way
}

// usual is about a second of work, and twice the largest request body of result.
var usual = limits{steps: 1 << 22, output: 64 << 20, made: 256 << 20}

const (
	maxRange  = 100_000 // numbers in one range()
	maxNested = 64      // depth to which values are compared and written, and macros call macros
)

// run is one rendering.
type run struct {
	limits limits
	line   int // of the statement that runs, for errors
	steps  int
	made   int
	calls  int // macros that run
	out    *strBuilder
	scope  *scope
}

// scope holds the names set in one body; a loop opens one per turn.
type scope struct {
	vars map[string]any
	up   *scope
}

func (s *scope) find(name string) (any, bool) {
	for ; s != nil; s = s.up {
		if v, ok := s.vars[name]; ok {
			return v, true
		}
	}
	return nil, false
}

func (r *run) fail(format string, args ...any) {
	panic(&flaw{r.line, fmt.Sprintf(format, args...)})
}

// tick counts n steps of work.
func (r *run) tick(n int) {
	if r.steps += n; r.steps > r.limits.steps {
		r.fail("rendering takes more than %d steps", r.limits.steps)
	}
}

// charge counts bytes of text before they are made.
func (r *run) charge(n int) {
	if r.made += n; n < 0 || r.made > r.limits.made {
		r.fail("rendering makes more than %d bytes of text", r.limits.made)
	}
	r.tick(1)
}

// scan counts the work of looking through a text.
func (r *run) scan(s str) { r.tick(1 + len(s.s)/256) }

func (r *run) write(s str) {
	r.charge(len(s.s))
	if r.out.b.Len()+len(s.s) > r.limits.output {
		r.fail("the rendered chat has more than %d bytes", r.limits.output)
	}
	r.out.add(s)
}

// jump says how a body was left.
type jump string

const (
	onward     jump = ""
	breakOut   jump = "break"
	continueOn jump = "continue"
)

// stmt is a statement; its types are here and nowhere else.
type stmt interface{ exec(r *run) jump }

type textStmt struct{ text str }

type printStmt struct {
	line  int
	value expr
}

type ifStmt struct {
	line      int
	conds     []expr
	bodies    [][]stmt
	otherwise []stmt
}

type forStmt struct {
	line            int
	names           []string
	over, filter    expr // filter may be nil
	body, otherwise []stmt
}

type setStmt struct {
	line  int
	names []string
	attr  string // set a.b = …
	value expr   // nil: the text of body
	body  []stmt
}

// scopeStmt is a body with names of its own.
type scopeStmt struct{ body []stmt }

type macroStmt struct {
	line     int
	name     string
	params   []string
	defaults []expr // nil: none
	body     []stmt
}

func (r *run) body(body []stmt) jump {
	for _, s := range body {
		r.tick(1)
		if j := s.exec(r); j != onward {
			return j
		}
	}
	return onward
}

func (j jump) exec(*run) jump { return j }

func (s *textStmt) exec(r *run) jump {
	r.write(s.text)
	return onward
}

func (s *printStmt) exec(r *run) jump {
	r.line = s.line
	r.write(r.text(r.eval(s.value)))
	return onward
}

func (s *ifStmt) exec(r *run) jump {
	for i, cond := range s.conds {
		r.line = s.line
		if truth(r.eval(cond)) {
			return r.body(s.bodies[i])
		}
	}
	return r.body(s.otherwise)
}

func (s *setStmt) exec(r *run) jump {
	r.line = s.line
	var v any
	if s.value != nil {
		v = r.eval(s.value)
	} else {
		v = r.capture(func() { r.inScope(func() { r.body(s.body) }) })
	}
	if s.attr == "" {
		r.assign(s.names, v)
		return onward
	}
	target, _ := r.scope.find(s.names[0])
	ns, ok := target.(*record)
	if !ok || !ns.mutable {
		r.fail("'%s' is not a namespace", s.names[0])
	}
	ns.set(s.attr, v)
	return onward
}

// assign gives a value to a name, or its items to several.
func (r *run) assign(names []string, v any) {
	if len(names) == 1 {
		r.scope.vars[names[0]] = v
		return
	}
	items := r.items(v)
	if len(items) != len(names) {
		r.fail("%d values for %d names", len(items), len(names))
	}
	for i, n := range names {
		r.scope.vars[n] = items[i]
	}
}

// inScope runs f with names of its own.
func (r *run) inScope(f func()) {
	outer := r.scope
	r.scope = &scope{map[string]any{}, outer}
	f()
	r.scope = outer
}

func (s *forStmt) exec(r *run) jump {
	r.line = s.line
	items := r.items(r.eval(s.over))
	if s.filter != nil {
		var kept []any
		for _, item := range items {
			r.inScope(func() {
				r.assign(s.names, item)
				if truth(r.eval(s.filter)) {
					kept = append(kept, item)
				}
			})
		}
		items = kept
	}
	if len(items) == 0 {
		var left jump
		r.inScope(func() { left = r.body(s.otherwise) })
		return left
	}
	for i := range items {
		left := onward
		r.inScope(func() {
			r.tick(1)
			r.scope.vars["loop"] = &loop{items, i}
			r.assign(s.names, items[i])
			left = r.body(s.body)
		})
		if left == breakOut {
			break
		}
	}
	return onward
}

// capture is the text that f writes.
func (r *run) capture(f func()) str {
	outer := r.out
	r.out = &strBuilder{}
	f()
	text := r.out.str()
	r.out = outer
	return text
}

func (s *scopeStmt) exec(r *run) jump {
	r.inScope(func() { r.body(s.body) })
	return onward
}

// macro is a macro and the names that it sees: those of the place where it stands.
type macro struct {
	*macroStmt
	scope *scope
}

func (s *macroStmt) exec(r *run) jump {
	r.scope.vars[s.name] = &macro{s, r.scope}
	return onward
}

func (e *macroExpr) eval(r *run) any {
	v, _ := r.scope.find(e.name)
	m, ok := v.(*macro)
	if !ok {
		r.fail("'%s' is no macro here", e.name)
	}
	vars := map[string]any{}
	places := len(e.args) - len(e.names)
	if places > len(m.params) {
		r.fail("%d arguments for the macro '%s', which takes %d", places, m.name, len(m.params))
	}
	for i, arg := range e.args {
		name := ""
		if i < places {
			name = m.params[i]
		} else if name = e.names[i-places]; !slices.Contains(m.params[places:], name) {
			r.fail("the macro '%s' takes no argument '%s' here", m.name, name)
		}
		vars[name] = r.eval(arg)
	}
	if r.calls++; r.calls > maxNested {
		r.fail("macros call each other more than %d deep", maxNested)
	}
	outer, line := r.scope, r.line
	r.scope = &scope{vars, m.scope}
	for i, name := range m.params {
		if _, given := vars[name]; given {
			continue
		}
		vars[name] = &undefined{name}
		if m.defaults[i] != nil {
			vars[name] = r.eval(m.defaults[i])
		}
	}
	text := r.capture(func() { r.body(m.body) })
	r.scope, r.line = outer, line
	r.calls--
	return text
}

// loop is the variable of that name: where a for statement is.
type loop struct {
	items []any
	at    int
}

// loopAttrs are the attributes of loop.
var loopAttrs = []string{"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"}

func (l *loop) attr(name string) any {
	n := len(l.items)
	switch name {
	case "index":
		return int64(l.at + 1)
	case "index0":
		return int64(l.at)
	case "revindex":
		return int64(n - l.at)
	case "revindex0":
		return int64(n - l.at - 1)
	case "first":
		return l.at == 0
	case "last":
		return l.at == n-1
	case "length":
		return int64(n)
	case "previtem":
		if l.at > 0 {
			return l.items[l.at-1]
		}
	case "nextitem":
		if l.at < n-1 {
			return l.items[l.at+1]
		}
	}
	return &undefined{"loop." + name}
}

// expr is an expression; its types are here and nowhere else.
type expr interface{ eval(r *run) any }

type (
	constExpr struct{ value any }
	nameExpr  struct{ name string }
	listExpr  struct {
		items []expr
		tuple bool
	}
	recordExpr struct {
		names   []string
		values  []expr
		mutable bool
	}
	condExpr  struct{ then, cond, otherwise expr }
	logicExpr struct {
		left, right expr
		or          bool
	}
	notExpr     struct{ value expr }
	negExpr     struct{ value expr }
	compareExpr struct {
		first expr
		ops   []string
		rest  []expr
	}
	mathExpr struct {
		op          string
		left, right expr
	}
	concatExpr struct{ parts []expr }
	itemExpr   struct{ of, key expr }
	sliceExpr  struct {
		of    expr
		parts [3]expr // from, to, by; nil: not given
	}
	macroExpr struct {
		name  string
		args  []expr
		names []string // of the last arguments
	}
	eachExpr struct {
		on   expr
		name string // map, select, reject, selectattr or rejectattr
		attr expr   // nil: none
		f    *function
		call string // what f is called
		args []expr
	}
	callExpr struct {
		f    *function
		name string
		on   expr   // what a method, filter or test is applied to; nil for a function
		args []expr // nil: not given
	}
)

func (r *run) eval(e expr) any {
	r.tick(1)
	return e.eval(r)
}

func (e *constExpr) eval(*run) any { return e.value }

func (e *nameExpr) eval(r *run) any {
	if v, ok := r.scope.find(e.name); ok {
		return v
	}
	if f, ok := functions[e.name]; ok && f.call != nil {
		return f
	}
	return &undefined{e.name}
}

func (e *listExpr) eval(r *run) any {
	l := &list{tuple: e.tuple}
	for _, item := range e.items {
		l.items = append(l.items, r.eval(item))
	}
	return l
}

func (e *recordExpr) eval(r *run) any {
	rec := &record{values: map[string]any{}, mutable: e.mutable}
	for i, name := range e.names {
		rec.set(name, r.eval(e.values[i]))
	}
	return rec
}

func (e *condExpr) eval(r *run) any {
	switch {
	case truth(r.eval(e.cond)):
		return r.eval(e.then)
	case e.otherwise != nil:
		return r.eval(e.otherwise)
	}
	return &undefined{"the missing else"}
}

func (e *logicExpr) eval(r *run) any {
	left := r.eval(e.left)
	if truth(left) == e.or {
		return left
	}
	return r.eval(e.right)
}

func (e *notExpr) eval(r *run) any { return !truth(r.eval(e.value)) }

func (e *negExpr) eval(r *run) any {
	v := r.eval(e.value)
	n, ok := number64(v)
	if !ok {
		r.fail("a sign in front of %s", typeName(v))
	}
	return r.math("-", 0, n)
}

func (e *compareExpr) eval(r *run) any {
	left := r.eval(e.first)
	for i, op := range e.ops {
		right := r.eval(e.rest[i])
		if !r.compare(op, left, right) {
			return false
		}
		left = right
	}
	return true
}

func (r *run) compare(op string, a, b any) bool {
	switch op {
	case "==":
		return r.equal(a, b, 0)
	case "!=":
		return !r.equal(a, b, 0)
	case "in":
		return r.in(a, b)
	case "not in":
		return !r.in(a, b)
	}
	order := 0
	x, ok1 := number64(a)
	y, ok2 := number64(b)
	s, ok3 := a.(str)
	t, ok4 := b.(str)
	switch {
	case ok1 && ok2 && x < y:
		order = -1
	case ok1 && ok2 && x > y:
		order = 1
	case ok1 && ok2:
	case ok3 && ok4:
		r.scan(s)
		order = strings.Compare(s.s, t.s)
	default:
		r.fail("'%s' between %s and %s", op, typeName(a), typeName(b))
	}
	return map[string]bool{"<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0}[op]
}

// equal compares by value, as Python does.
func (r *run) equal(a, b any, depth int) bool {
	r.tick(1)
	if depth > maxNested {
		r.fail("values nested more than %d deep are compared", maxNested)
	}
	if x, ok := number64(a); ok {
		y, ok := number64(b)
		return ok && x == y
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case str:
		r.scan(a)
		b, ok := b.(str)
		return ok && a.s == b.s
	case *undefined:
		_, ok := b.(*undefined)
		return ok
	case *list:
		b, ok := b.(*list)
		return ok && a.tuple == b.tuple && slices.EqualFunc(a.items, b.items, func(x, y any) bool { return r.equal(x, y, depth+1) })
	case *record:
		b, ok := b.(*record)
		if !ok || a.mutable || b.mutable || len(a.names) != len(b.names) {
			return ok && a == b
		}
		for _, name := range a.names {
			other, ok := b.values[name]
			if !ok || !r.equal(a.values[name], other, depth+1) {
				return false
			}
		}
		return true
	}
	return a == b
}

func (r *run) in(a, b any) bool {
	switch b := b.(type) {
	case str:
		if a, ok := a.(str); ok {
			r.scan(b)
			return strings.Contains(b.s, a.s)
		}
		r.fail("%s in a string", typeName(a))
	case *record:
		key, ok := a.(str)
		_, there := b.values[key.s]
		return ok && there && !b.mutable
	}
	return slices.ContainsFunc(r.items(b), func(x any) bool { return r.equal(a, x, 0) })
}

// items are what a for statement goes over.
func (r *run) items(v any) []any {
	var items []any
	switch v := v.(type) {
	case *list:
		items = v.items
	case *record:
		if v.mutable {
			r.fail("a namespace has no items")
		}
		for _, name := range v.names {
			items = append(items, str{s: name})
		}
	case str:
		for i, c := range v.s {
			r.tick(1)
			items = append(items, v.slice(i, i+utf8.RuneLen(c)))
		}
	case *stream:
		items = v.take()
	case *undefined:
	default:
		r.fail("%s has no items", typeName(v))
	}
	r.tick(len(items))
	return items
}

func (e *mathExpr) eval(r *run) any {
	a, b := r.eval(e.left), r.eval(e.right)
	if s, ok := a.(str); ok && e.op == "+" {
		if t, ok := b.(str); ok {
			return r.join(s, t)
		}
	}
	if s, ok := a.(*list); ok && e.op == "+" {
		if t, ok := b.(*list); ok && s.tuple == t.tuple {
			r.tick(len(s.items) + len(t.items))
			return &list{slices.Concat(s.items, t.items), s.tuple}
		}
	}
	x, ok1 := number64(a)
	y, ok2 := number64(b)
	if e.op == "*" && ok1 != ok2 {
		if ok1 {
			a, y = b, x
		}
		return r.repeat(a, y)
	}
	if !ok1 || !ok2 {
		r.fail("'%s' between %s and %s", e.op, typeName(a), typeName(b))
	}
	return r.math(e.op, x, y)
}

// math computes with whole numbers as Python does, but refuses what leaves 63 bits.
func (r *run) math(op string, x, y int64) any {
	const half = 1 << 31
	small := x > -half && x < half && y > -half && y < half
	switch {
	case op == "+" && small:
		return x + y
	case op == "-" && small:
		return x - y
	case op == "*" && small:
		return x * y
	case (op == "//" || op == "%") && y == 0:
		r.fail("division by zero")
	case small && op == "//":
		return (x - floorMod(x, y)) / y
	case small && op == "%":
		return floorMod(x, y)
	}
	r.fail("the numbers of '%d %s %d' are too large", x, op, y)
	return nil
}

// floorMod has the sign of y.
func floorMod(x, y int64) int64 {
	m := x % y
	if m != 0 && (m < 0) != (y < 0) {
		m += y
	}
	return m
}

// repeat is a text or a list n times.
func (r *run) repeat(v any, n int64) any {
	n = max(n, 0)
	if n > int64(r.limits.made) {
		r.fail("%s %d times", typeName(v), n)
	}
	r.tick(int(n))
	switch v := v.(type) {
	case str:
		r.charge(len(v.s) * int(n))
		var b strBuilder
		for range n {
			b.add(v)
		}
		return b.str()
	case *list:
		r.tick(len(v.items) * int(n))
		return &list{slices.Repeat(v.items, int(n)), v.tuple}
	}
	r.fail("%s %d times", typeName(v), n)
	return nil
}

// join makes one text of several.
func (r *run) join(parts ...str) str {
	size := 0
	for _, p := range parts {
		size += len(p.s)
	}
	r.charge(size)
	r.tick(len(parts))
	var b strBuilder
	b.b.Grow(size)
	for _, p := range parts {
		b.add(p)
	}
	return b.str()
}

func (e *concatExpr) eval(r *run) any {
	parts := make([]str, len(e.parts))
	for i, p := range e.parts {
		parts[i] = r.text(r.eval(p))
	}
	return r.join(parts...)
}

// text is a value as it prints. Numbers are not the template's own text: how
// long a message is must not spell a control token.
func (r *run) text(v any) str {
	switch v := v.(type) {
	case str:
		return v
	case *undefined:
		return str{}
	case nil:
		return str{s: "None"}
	case bool:
		if v {
			return str{s: "True"}
		}
		return str{s: "False"}
	case int64:
		return str{s: fmt.Sprint(v)}
	}
	r.fail("%s cannot be printed", typeName(v))
	return str{}
}

func (e *itemExpr) eval(r *run) any {
	of := r.eval(e.of)
	return r.item(of, r.eval(e.key))
}

func (r *run) item(of, key any) any {
	name, named := key.(str)
	at, numbered := number64(key)
	switch of := of.(type) {
	case *undefined:
		r.fail("'%s' is undefined", of.name)
	case *loop:
		return of.attr(name.s)
	case *record:
		if v, ok := of.values[name.s]; ok && named {
			return v
		}
	case *list:
		if i, ok := index(at, len(of.items)); ok && numbered {
			return of.items[i]
		}
	case str:
		r.scan(of)
		if i, ok := index(at, int(characters(of.s))); ok && numbered {
			return r.pick(of, i, i+1, 1)
		}
	}
	if named && len(name.s) <= 64 && !strings.ContainsFunc(name.s, unicode.IsControl) {
		return &undefined{name.s}
	}
	return &undefined{"an item"} // an error names it, in one line
}

// index resolves an index that may count from the end.
func index(at int64, n int) (int, bool) {
	if at < 0 {
		at += int64(n)
	}
	return int(at), at >= 0 && at < int64(n)
}

func (e *sliceExpr) eval(r *run) any {
	of := r.eval(e.of)
	var n int
	switch v := of.(type) {
	case *undefined:
		r.fail("'%s' is undefined", v.name)
	case *list:
		n = len(v.items)
	case str:
		n = int(characters(v.s))
		r.scan(v)
	default:
		r.fail("a slice of %s", typeName(of))
	}
	r.tick(1 + n/8)
	from, to, by := r.bounds(e.parts, n)
	if s, ok := of.(str); ok {
		return r.pick(s, from, to, by)
	}
	l := of.(*list)
	var items []any
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		items = append(items, l.items[i])
	}
	return &list{items, l.tuple}
}

// bounds resolves a slice of n items as Python does.
func (r *run) bounds(parts [3]expr, n int) (from, to, by int) {
	at := func(i int) (int, bool) {
		if parts[i] == nil {
			return 0, false
		}
		v := r.eval(parts[i])
		if v == nil {
			return 0, false
		}
		x, ok := number64(v)
		if !ok {
			r.fail("a slice by %s", typeName(v))
		}
		return int(min(max(x, -1<<30), 1<<30)), true
	}
	by, ok := at(2)
	switch {
	case !ok:
		by = 1
	case by == 0:
		r.fail("a slice in steps of 0")
	}
	low, high := 0, n
	from, to = 0, n
	if by < 0 {
		low, high = -1, n-1
		from, to = n-1, -1
	}
	clamp := func(i, def int) int {
		x, ok := at(i)
		if !ok {
			return def
		}
		if x < 0 {
			x += n
		}
		return min(max(x, low), high)
	}
	return clamp(0, from), clamp(1, to), by
}

// pick takes the characters from, from+by, … before to.
func (r *run) pick(s str, from, to, by int) str {
	if by == 1 {
		if from >= to {
			return str{}
		}
		start := offset(s.s, from)
		return s.slice(start, start+offset(s.s[start:], to-from))
	}
	r.charge(8 * len(s.s))
	starts := make([]int, 0, len(s.s)+1)
	for i := range s.s {
		starts = append(starts, i)
	}
	starts = append(starts, len(s.s))
	var b strBuilder
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		b.add(s.slice(starts[i], starts[i+1]))
	}
	return b.str()
}

// offset is where character n of s begins.
func offset(s string, n int) int {
	for i := range s {
		if n == 0 {
			return i
		}
		n--
	}
	return len(s)
}

func (e *callExpr) eval(r *run) any {
	var on any
	if e.on != nil {
		on = r.eval(e.on)
	}
	c := r.prepare(e.name, e.args)
	c.on = on
	if e.f.call == nil {
		r.fail("'%s' is undefined", e.name)
	}
	return e.f.call(&c)
}

// prepare evaluates the arguments of a call.
func (r *run) prepare(name string, args []expr) call {
	c := call{run: r, name: name, args: make([]any, len(args)), given: make([]bool, len(args))}
	for i, a := range args {
		if a != nil {
			c.args[i], c.given[i] = r.eval(a), true
		}
	}
	return c
}

func (e *eachExpr) eval(r *run) any {
	on := r.eval(e.on)
	var path []any
	if e.attr != nil {
		path = r.path(r.eval(e.attr))
	}
	c := r.prepare(e.call, e.args)
	return &stream{func() (out []any) {
		if !truth(on) {
			return nil // also what has no items, as in Jinja
		}
		for _, item := range r.items(on) {
			v := item
			for _, key := range path {
				v = r.item(v, key)
			}
			if e.f != nil {
				c := c
				c.on = v
				r.tick(1)
				v = e.f.call(&c)
			}
			switch {
			case e.name == "map":
				out = append(out, v)
			case truth(v) == strings.HasPrefix(e.name, "select"):
				out = append(out, item)
			}
		}
		return out
	}}
}

// path cuts an attribute's name: 'a.b.0' is item 0 of b of a.
func (r *run) path(attr any) (path []any) {
	s, ok := attr.(str)
	if n, isNumber := number64(attr); isNumber {
		return []any{n}
	} else if !ok {
		r.fail("%s as the name of an attribute", typeName(attr))
	}
	r.scan(s)
	for _, part := range strings.Split(s.s, ".") {
		r.tick(1)
		if n, err := strconv.ParseUint(part, 10, 31); err == nil {
			path = append(path, int64(n))
			continue
		}
		path = append(path, str{s: part})
	}
	return path
}
