//metronome:pure

package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxNesting bounds how deep tags and expressions of a template may nest.
const maxNesting = 64

// parser reads statements and expressions by recursive descent, with Jinja2's
// grammar and precedence. Whatever it does not know it refuses with the line
// and the construct, so that nothing unknown is left for a request to find.
type parser struct {
	toks  []lexeme
	at    int
	depth int
	loops int // for statements around this place

	macros  map[string]bool // the names of the template's macros, wherever they stand
	inMacro bool
}

// parseTemplate reads a whole template.
func parseTemplate(src string) (body []stmt, err error) {
	defer catch(&err)
	if !utf8.ValidString(src) {
		return nil, &flaw{1, "the source is not UTF-8"} // everything later counts in characters
	}
	p := &parser{toks: lexTemplate(src), macros: map[string]bool{}}
	for i := range len(p.toks) - 2 {
		if t := p.toks[i : i+3]; t[0].mark == markTag && t[1] == (lexeme{markName, "macro", t[1].line}) && t[2].mark == markName {
			p.macros[t[2].text] = true
		}
	}
	body, _ = p.block()
	return body, nil
}

func (p *parser) fail(format string, args ...any) {
	panic(&flaw{p.toks[p.at].line, fmt.Sprintf(format, args...)})
}

// next takes a lexeme. The last one, the end, is never passed.
func (p *parser) next() lexeme {
	t := p.toks[p.at]
	if t.mark != markEOF {
		p.at++
	}
	return t
}

// is tells whether the next lexeme is this one.
func (p *parser) is(m mark, text string) bool {
	return p.toks[p.at].mark == m && p.toks[p.at].text == text
}

// skip takes the next lexeme if it is this one.
func (p *parser) skip(m mark, text string) bool {
	if p.is(m, text) {
		p.at++
		return true
	}
	return false
}

func (p *parser) want(m mark, text string) {
	if !p.skip(m, text) {
		p.fail("%v where '%s' would be right", p.toks[p.at], text)
	}
}

// name takes a name, which may not be one of the language's own words.
func (p *parser) name() string {
	t := p.next()
	if t.mark != markName {
		p.at--
		p.fail("%v where a name would be right", t)
	}
	return t.text
}

// enter counts nesting; use: defer p.enter()().
func (p *parser) enter() func() {
	if p.depth++; p.depth > maxNesting {
		p.fail("nested more than %d deep", maxNesting)
	}
	return func() { p.depth-- }
}

// block reads statements up to a tag with one of the names in until, which it
// takes, or up to the end of the template.
func (p *parser) block(until ...string) (body []stmt, end string) {
	defer p.enter()()
	for {
		switch t := p.next(); t.mark {
		case markText:
			body = append(body, &textStmt{literal(t.text)})
		case markPrint:
			body = append(body, &printStmt{t.line, p.tuple()})
			p.want(markEnd, "}}")
		case markTag:
			name := p.name()
			if slices.Contains(until, name) {
				return body, name
			}
			p.at--
			body = append(body, p.statement(t.line))
		case markEOF:
			if len(until) > 0 {
				p.fail("the template ends where '%s' would be right", until[len(until)-1])
			}
			return body, ""
		}
	}
}

// statement reads a tag and what belongs to it.
func (p *parser) statement(line int) stmt {
	switch name := p.name(); name {
	case "if":
		return p.ifTag(line)
	case "for":
		return p.forTag(line)
	case "set":
		return p.setTag(line)
	case "macro":
		return p.macroTag(line)
	case "generation":
		// transformers' mark of what the assistant said; it prints its body.
		p.want(markEnd, "%}")
		s := &scopeStmt{body: p.apart("endgeneration")}
		p.want(markEnd, "%}")
		return s
	case "break", "continue":
		if p.loops == 0 {
			p.fail("'%s' outside of a loop", name)
		}
		p.want(markEnd, "%}")
		return jump(name)
	default:
		p.at--
		p.fail("the statement '%s' is not supported", name)
		return nil
	}
}

func (p *parser) ifTag(line int) stmt {
	s := &ifStmt{line: line}
	for end := "elif"; end == "elif"; {
		cond := p.or() // Jinja has no x if c else y here
		p.want(markEnd, "%}")
		var body []stmt
		body, end = p.block("elif", "else", "endif")
		s.conds, s.bodies = append(s.conds, cond), append(s.bodies, body)
		if end == "else" {
			p.want(markEnd, "%}")
			s.otherwise, _ = p.block("endif")
		}
	}
	p.want(markEnd, "%}")
	return s
}

func (p *parser) forTag(line int) stmt {
	s := &forStmt{line: line, names: p.targets()}
	p.want(markName, "in")
	s.over = p.or()
	if p.skip(markName, "if") {
		s.filter = p.expr()
	}
	p.want(markEnd, "%}")
	p.loops++
	var end string
	s.body, end = p.block("else", "endfor")
	p.loops--
	if end == "else" {
		p.want(markEnd, "%}")
		s.otherwise, _ = p.block("endfor")
	}
	p.want(markEnd, "%}")
	return s
}

func (p *parser) setTag(line int) stmt {
	s := &setStmt{line: line, names: p.targets()}
	if len(s.names) == 1 && p.skip(markOp, ".") {
		s.attr = p.name()
	}
	switch {
	case p.skip(markOp, "="):
		s.value = p.tuple()
	case p.is(markEnd, "%}") && s.attr == "" && len(s.names) == 1:
		p.want(markEnd, "%}")
		s.body = p.apart("endset")
	default:
		p.fail("%v where '=' would be right", p.toks[p.at])
	}
	p.want(markEnd, "%}")
	return s
}

// apart reads a body that no jump can leave.
func (p *parser) apart(until string) []stmt {
	loops := p.loops
	p.loops = 0
	body, _ := p.block(until)
	p.loops = loops
	return body
}

func (p *parser) macroTag(line int) stmt {
	m := &macroStmt{line: line, name: p.name()}
	p.assignable(m.name)
	p.want(markOp, "(")
	for !p.skip(markOp, ")") {
		if len(m.params) > 0 {
			p.want(markOp, ",")
			if p.skip(markOp, ")") {
				break
			}
		}
		name := p.name()
		p.assignable(name)
		if slices.Contains(m.params, name) {
			p.fail("the macro '%s' has two parameters '%s'", m.name, name)
		}
		var def expr
		if p.skip(markOp, "=") {
			def = p.expr()
		} else if n := len(m.defaults); n > 0 && m.defaults[n-1] != nil {
			p.fail("the parameter '%s' without a default follows one with a default", name)
		}
		m.params, m.defaults = append(m.params, name), append(m.defaults, def)
	}
	p.want(markEnd, "%}")
	outer := p.inMacro
	p.inMacro = true
	m.body = p.apart("endmacro")
	p.inMacro = outer
	p.want(markEnd, "%}")
	return m
}

// targets reads the names that are assigned to: a, or a, b in brackets or not.
func (p *parser) targets() []string {
	bracket := p.skip(markOp, "(")
	names := []string{p.name()}
	for p.skip(markOp, ",") {
		names = append(names, p.name())
	}
	if bracket {
		p.want(markOp, ")")
	}
	for _, n := range names {
		p.assignable(n)
	}
	return names
}

// assignable refuses the language's own words as names.
func (p *parser) assignable(name string) {
	switch name {
	case "true", "false", "none", "True", "False", "None", "loop", "in", "if", "else", "and", "or", "not", "is", "caller", "varargs", "kwargs":
		p.fail("'%s' cannot be assigned", name)
	}
}

// tuple reads an expression, or several with commas, which make a tuple.
func (p *parser) tuple() expr {
	first := p.expr()
	if !p.is(markOp, ",") {
		return first
	}
	items := []expr{first}
	for p.skip(markOp, ",") {
		if p.toks[p.at].mark == markEnd || p.is(markOp, ")") {
			break
		}
		items = append(items, p.expr())
	}
	return &listExpr{items, true}
}

// expr reads: x if c else y.
func (p *parser) expr() expr {
	defer p.enter()()
	e := p.or()
	for p.skip(markName, "if") {
		c := &condExpr{then: e, cond: p.or()}
		if p.skip(markName, "else") {
			c.otherwise = p.expr()
		}
		e = c
	}
	return e
}

func (p *parser) or() expr {
	e := p.and()
	for p.skip(markName, "or") {
		e = &logicExpr{left: e, right: p.and(), or: true}
	}
	return e
}

func (p *parser) and() expr {
	e := p.not()
	for p.skip(markName, "and") {
		e = &logicExpr{left: e, right: p.not()}
	}
	return e
}

func (p *parser) not() expr {
	if p.skip(markName, "not") {
		defer p.enter()()
		return &notExpr{p.not()}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	e := p.sum()
	var c *compareExpr
	for {
		op := ""
		switch t := p.toks[p.at]; {
		case t.mark == markOp && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, t.text):
			op = p.next().text
		case p.skip(markName, "in"):
			op = "in"
		case p.is(markName, "not") && p.toks[p.at+1].mark == markName && p.toks[p.at+1].text == "in":
			p.at += 2
			op = "not in"
		default:
			if c != nil {
				return c
			}
			return e
		}
		if c == nil {
			c = &compareExpr{first: e}
		}
		c.ops = append(c.ops, op)
		c.rest = append(c.rest, p.sum())
	}
}

func (p *parser) sum() expr {
	e := p.concat()
	for p.is(markOp, "+") || p.is(markOp, "-") {
		op := p.next().text
		e = &mathExpr{op, e, p.concat()}
	}
	return e
}

func (p *parser) concat() expr {
	e := p.product()
	if !p.is(markOp, "~") {
		return e
	}
	c := &concatExpr{[]expr{e}}
	for p.skip(markOp, "~") {
		c.parts = append(c.parts, p.product())
	}
	return c
}

func (p *parser) product() expr {
	e := p.unary(true)
	for {
		switch {
		case p.is(markOp, "*") || p.is(markOp, "//") || p.is(markOp, "%"):
			op := p.next().text
			e = &mathExpr{op, e, p.unary(true)}
		case p.is(markOp, "/") || p.is(markOp, "**"):
			p.fail("the operator '%s' is not supported", p.next().text)
		default:
			return e
		}
	}
}

// unary reads a sign or an operand; filters and tests bind looser than a sign.
func (p *parser) unary(filters bool) expr {
	defer p.enter()()
	var e expr
	switch {
	case p.skip(markOp, "-"):
		e = &negExpr{p.unary(false)}
	case p.skip(markOp, "+"):
		e = &negExpr{&negExpr{p.unary(false)}}
	default:
		e = p.postfix(p.primary())
	}
	for filters {
		switch {
		case p.skip(markOp, "|"):
			e = p.filter(e)
		case p.skip(markName, "is"):
			e = p.test(e)
		default:
			return e
		}
	}
	return e
}

func (p *parser) primary() expr {
	switch t := p.next(); {
	case t.mark == markName:
		return p.word(t.text)
	case t.mark == markString:
		text := t.text
		for p.toks[p.at].mark == markString {
			text += p.next().text
		}
		return &constExpr{literal(text)}
	case t.mark == markInt:
		n, _ := strconv.ParseInt(t.text, 10, 64) // the lexer has checked it
		return &constExpr{n}
	case t.mark == markOp && t.text == "(":
		if p.skip(markOp, ")") {
			return &listExpr{tuple: true}
		}
		e := p.tuple()
		p.want(markOp, ")")
		return e
	case t.mark == markOp && t.text == "[":
		l := &listExpr{}
		for !p.skip(markOp, "]") {
			if len(l.items) > 0 {
				p.want(markOp, ",")
				if p.skip(markOp, "]") {
					break
				}
			}
			l.items = append(l.items, p.expr())
		}
		return l
	case t.mark == markOp && t.text == "{":
		return p.dict()
	default:
		if t.mark != markEOF {
			p.at--
		}
		p.fail("%v where a value would be right", t)
		return nil
	}
}

// word reads a name as a value, or a call of a function.
func (p *parser) word(name string) expr {
	switch name {
	case "true", "True":
		return &constExpr{true}
	case "false", "False":
		return &constExpr{false}
	case "none", "None":
		return &constExpr{nil}
	case "and", "or", "not", "if", "else", "in", "is":
		p.at--
		p.fail("'%s' where a value would be right", name)
	}
	if p.inMacro && (name == "caller" || name == "varargs" || name == "kwargs") {
		p.at--
		p.fail("'%s' is not supported", name)
	}
	if !p.is(markOp, "(") {
		return &nameExpr{name}
	}
	if p.macros[name] {
		return p.macroCall(name)
	}
	switch name {
	case "namespace", "dict":
		names, values := p.keywords(name)
		return &recordExpr{names, values, name == "namespace"}
	}
	f, ok := functions[name]
	if !ok {
		p.at--
		p.fail("the function '%s' is not supported", name)
	}
	return &callExpr{f: f, name: name, args: p.args(name, f)}
}

func (p *parser) dict() expr {
	d := &recordExpr{}
	for !p.skip(markOp, "}") {
		if len(d.names) > 0 {
			p.want(markOp, ",")
			if p.skip(markOp, "}") {
				break
			}
		}
		key := p.next()
		if key.mark != markString {
			p.at--
			p.fail("a dictionary's key is %v; a string is supported", key)
		}
		p.want(markOp, ":")
		d.names = append(d.names, key.text)
		d.values = append(d.values, p.expr())
	}
	return d
}

// keywords reads (a=x, b=y).
func (p *parser) keywords(name string) (names []string, values []expr) {
	p.want(markOp, "(")
	for !p.skip(markOp, ")") {
		if len(names) > 0 {
			p.want(markOp, ",")
		}
		names = append(names, p.name())
		if !p.is(markOp, "=") {
			p.fail("'%s' takes only arguments with names here", name)
		}
		p.want(markOp, "=")
		values = append(values, p.expr())
	}
	return names, values
}

// macroCall reads the arguments of a macro: by place, then by name.
func (p *parser) macroCall(name string) expr {
	e := &macroExpr{name: name}
	p.want(markOp, "(")
	for first := true; !p.skip(markOp, ")"); first = false {
		if !first {
			p.want(markOp, ",")
			if p.skip(markOp, ")") {
				break
			}
		}
		if p.named() {
			n := p.name()
			if slices.Contains(e.names, n) {
				p.fail("two arguments '%s' for '%s'", n, name)
			}
			p.want(markOp, "=")
			e.names = append(e.names, n)
		} else if len(e.names) > 0 {
			p.fail("an argument of '%s' without a name follows one with a name", name)
		}
		e.args = append(e.args, p.expr())
	}
	return e
}

// named tells whether an argument with a name comes next.
func (p *parser) named() bool {
	return p.toks[p.at].mark == markName && p.toks[p.at+1].mark == markOp && p.toks[p.at+1].text == "="
}

// postfix reads attributes, items, slices and method calls after a value.
func (p *parser) postfix(e expr) expr {
	for {
		switch {
		case p.skip(markOp, "."):
			e = p.attribute(e)
		case p.skip(markOp, "["):
			e = p.item(e)
		case p.is(markOp, "("):
			p.fail("only functions and methods with known names can be called")
		default:
			return e
		}
	}
}

func (p *parser) attribute(e expr) expr {
	name := p.name()
	m, known := methods[name]
	if p.is(markOp, "(") {
		if !known {
			p.at--
			p.fail("the method '%s' is not supported", name)
		}
		return &callExpr{f: m, name: name, on: e, args: p.args(name, m)}
	}
	if known {
		p.at--
		p.fail("the method '%s' is not called", name)
	}
	if n, ok := e.(*nameExpr); ok && n.name == "loop" && !slices.Contains(loopAttrs, name) {
		p.at--
		p.fail("'loop.%s' is not supported", name)
	}
	return &itemExpr{e, &constExpr{literal(name)}}
}

func (p *parser) item(e expr) expr {
	var parts [3]expr
	n := 0
	for ; n < 3; n++ {
		if !p.is(markOp, ":") && !p.is(markOp, "]") {
			parts[n] = p.expr()
		}
		if !p.skip(markOp, ":") {
			break
		}
	}
	p.want(markOp, "]")
	if n > 0 {
		return &sliceExpr{e, parts}
	}
	if parts[0] == nil {
		p.fail("an index is empty")
	}
	return &itemExpr{e, parts[0]}
}

// args reads the arguments of a call, by place or by name, into the function's
// places; what is not given is nil.
func (p *parser) args(name string, f *function) []expr {
	p.want(markOp, "(")
	return p.moreArgs(name, f, true)
}

// moreArgs is args behind the bracket, or (first false) behind an argument.
func (p *parser) moreArgs(name string, f *function, first bool) []expr {
	args := make([]expr, len(f.params))
	place, named := 0, false
	for ; !p.skip(markOp, ")"); first = false {
		if !first {
			p.want(markOp, ",")
			if p.skip(markOp, ")") {
				break
			}
		}
		at := place
		if p.named() {
			at, named = slices.Index(f.params, p.toks[p.at].text), true
			if at < 0 {
				p.fail("'%s' has no argument '%s'", name, p.toks[p.at].text)
			}
			p.at += 2
		} else if f.named {
			p.fail("the arguments of '%s' are given by name", name)
		} else if named {
			p.fail("an argument of '%s' without a name follows one with a name", name)
		}
		if at >= len(args) || args[at] != nil {
			p.fail("too many arguments for '%s'", name)
		}
		args[at] = p.expr()
		place++
	}
	return p.enough(name, f, args)
}

func (p *parser) enough(name string, f *function, args []expr) []expr {
	for i := range f.need {
		if args[i] == nil {
			p.fail("'%s' needs %d arguments", name, f.need)
		}
	}
	return args
}

func (p *parser) filter(e expr) expr {
	name := p.name()
	f, ok := filters[name]
	if !ok {
		p.at--
		p.fail("the filter '%s' is not supported", name)
	}
	if f.call == nil {
		return p.each(e, name)
	}
	args := make([]expr, len(f.params))
	if p.is(markOp, "(") {
		args = p.args(name, f)
	}
	return &callExpr{f: f, name: name, on: e, args: p.enough(name, f, args)}
}

// each reads the arguments of a filter that applies an attribute, a filter or a
// test to every item: map, select, reject, selectattr, rejectattr. The name of
// the filter or test must stand there, so that what is not known is refused now.
func (p *parser) each(on expr, name string) expr {
	e := &eachExpr{on: on, name: name}
	brackets := p.skip(markOp, "(")
	if strings.HasSuffix(name, "attr") || name == "map" && brackets && p.named() {
		if !brackets {
			p.fail("'%s' needs 1 arguments", name)
		}
		if name == "map" {
			if n := p.name(); n != "attribute" {
				p.at--
				p.fail("'map' has no argument '%s'", n)
			}
			p.want(markOp, "=")
		}
		if e.attr = p.expr(); name == "map" || p.skip(markOp, ")") {
			if name == "map" {
				p.want(markOp, ")")
			}
			return e
		}
		p.want(markOp, ",")
	}
	if name != "map" && (!brackets || e.attr == nil && p.skip(markOp, ")")) {
		return e // by truth
	}
	f := p.next()
	kind, table := "test", tests
	if name == "map" {
		kind, table = "filter", filters
	}
	if !brackets || f.mark != markString {
		p.at--
		p.fail("'%s' is not given the name of a %s", name, kind)
	}
	if e.f = table[f.text]; e.f == nil || e.f.call == nil {
		p.at--
		p.fail("the %s %.60q is not supported by '%s'", kind, f.text, name)
	}
	e.call, e.args = f.text, p.moreArgs(f.text, e.f, false)
	return e
}

func (p *parser) test(e expr) expr {
	negate := p.skip(markName, "not")
	name := p.name()
	f, ok := tests[name]
	if !ok {
		p.at--
		p.fail("the test '%s' is not supported", name)
	}
	args := make([]expr, len(f.params))
	switch {
	case p.is(markOp, "("):
		args = p.args(name, f)
	case len(args) > 0:
		args[0] = p.postfix(p.primary())
	case p.is(markName, "if") || p.is(markName, "in") || p.is(markName, "not"):
		p.fail("%v behind a test, which Jinja takes for its argument", p.toks[p.at])
	}
	var t expr = &callExpr{f: f, name: name, on: e, args: p.enough(name, f, args)}
	if p.is(markName, "is") {
		p.fail("tests cannot be chained")
	}
	if negate {
		t = &notExpr{t}
	}
	return t
}
