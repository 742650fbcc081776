//metronome:pure

package model

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// function is what a template can call: a function, a method, a filter or a
// test. Methods, filters and tests are applied to a value.
type function struct {
	params []string // names of the arguments; "" can only be given by place
	need   int      // how many must be given
	named  bool     // arguments can only be given by name
	call   func(*call) any
}

// call is one call that runs.
type call struct {
	run   *run
	name  string
	on    any
	args  []any
	given []bool
}

// string is argument i, which must be a string.
func (c *call) string(i int) str {
	s, ok := c.args[i].(str)
	if !ok {
		c.run.fail("'%s' of %s; a string would be right", c.name, typeName(c.args[i]))
	}
	return s
}

// number is argument i, or def if it is not given.
func (c *call) number(i, def int) int {
	if !c.given[i] {
		return def
	}
	n, ok := number64(c.args[i])
	if !ok {
		c.run.fail("'%s' of %s; a number would be right", c.name, typeName(c.args[i]))
	}
	return int(min(max(n, -1<<30), 1<<30))
}

// onText is the string that a method is called on.
func (c *call) onText() str {
	s, ok := c.on.(str)
	if !ok {
		c.run.fail("%s has no method '%s'", typeName(c.on), c.name)
	}
	return s
}

// onRecord is the dictionary that a method is called on.
func (c *call) onRecord() *record {
	rec, ok := c.on.(*record)
	if !ok || rec.mutable {
		c.run.fail("%s has no method '%s'", typeName(c.on), c.name)
	}
	return rec
}

// functions are called by name alone. One without call is known not to exist
// here: a template may ask whether it is defined, and not call it.
var functions = map[string]*function{
	"raise_exception": {params: []string{"message"}, need: 1, call: func(c *call) any {
		c.run.fail("%s", c.run.text(c.args[0]).s)
		return nil
	}},
	"range":        {params: []string{"", "", ""}, need: 1, call: callRange},
	"strftime_now": {params: []string{"format"}, need: 1}, // today's date would make answers depend on the day
}

func callRange(c *call) any {
	from, to, by := 0, c.number(0, 0), c.number(2, 1)
	if c.given[1] {
		from, to = to, c.number(1, 0)
	}
	if by == 0 {
		c.run.fail("'range' in steps of 0")
	}
	l := &list{}
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		if len(l.items) == maxRange {
			c.run.fail("'range' of more than %d numbers", maxRange)
		}
		l.items = append(l.items, int64(i))
	}
	c.run.tick(len(l.items))
	return l
}

// methods are called on a value.
var methods = map[string]*function{
	"strip":      {params: []string{""}, call: func(c *call) any { return c.trim(c.onText(), true, true) }},
	"lstrip":     {params: []string{""}, call: func(c *call) any { return c.trim(c.onText(), true, false) }},
	"rstrip":     {params: []string{""}, call: func(c *call) any { return c.trim(c.onText(), false, true) }},
	"split":      {params: []string{"sep", "maxsplit"}, call: callSplit},
	"startswith": {params: []string{""}, need: 1, call: func(c *call) any { return c.affix(strings.HasPrefix) }},
	"endswith":   {params: []string{""}, need: 1, call: func(c *call) any { return c.affix(strings.HasSuffix) }},
	"upper":      {call: func(c *call) any { return c.convert(c.onText(), upper) }},
	"lower":      {call: func(c *call) any { return c.convert(c.onText(), lower) }},
	"title":      {call: func(c *call) any { return c.convert(c.onText(), titleMethod) }},
	"capitalize": {call: func(c *call) any { return c.convert(c.onText(), capitalize) }},
	"replace":    {params: []string{"", "", ""}, need: 2, call: func(c *call) any { return c.replace(c.onText()) }},
	"join": {params: []string{""}, need: 1, call: func(c *call) any {
		var parts []str
		for _, item := range c.run.items(c.args[0]) {
			s, ok := item.(str)
			if !ok {
				c.run.fail("'join' of %s; strings would be right", typeName(item))
			}
			parts = append(parts, s)
		}
		return c.run.joinWith(c.onText(), parts)
	}},
	"get": {params: []string{"", ""}, need: 1, call: func(c *call) any {
		if v, ok := c.onRecord().values[c.string(0).s]; ok {
			return v
		}
		return c.args[1]
	}},
	"items":  {call: func(c *call) any { return pairs(c.onRecord()) }},
	"keys":   {call: func(c *call) any { return &list{items: c.run.items(c.onRecord())} }},
	"values": {call: func(c *call) any { return recordValues(c.onRecord()) }},
}

// filters are applied with |.
var filters = map[string]*function{
	"trim":       {params: []string{"chars"}, call: func(c *call) any { return c.trim(c.run.text(c.on), true, true) }},
	"upper":      {call: func(c *call) any { return c.convert(c.run.text(c.on), upper) }},
	"lower":      {call: func(c *call) any { return c.convert(c.run.text(c.on), lower) }},
	"title":      {call: func(c *call) any { return c.convert(c.run.text(c.on), titleFilter) }},
	"capitalize": {call: func(c *call) any { return c.convert(c.run.text(c.on), capitalize) }},
	"string":     {call: func(c *call) any { return c.run.text(c.on) }},
	"replace":    {params: []string{"old", "new", "count"}, need: 2, call: func(c *call) any { return c.replace(c.run.text(c.on)) }},
	"length":     {call: callLength},
	"count":      {call: callLength},
	"default":    {params: []string{"default_value", "boolean"}, call: callDefault},
	"d":          {params: []string{"default_value", "boolean"}, call: callDefault},
	"tojson":     {params: []string{"indent", "ensure_ascii"}, named: true, call: callToJSON},
	"indent":     {params: []string{"width", "first", "blank"}, call: callIndent},
	"reverse":    {call: callReverse},
	"map":        {}, "select": {}, "reject": {}, "selectattr": {}, "rejectattr": {}, // see parser.each
	"list":  {call: func(c *call) any { return &list{items: c.run.items(c.on)} }},
	"first": {call: callFirst},
	"last":  {call: callLast},
	"join": {params: []string{"d"}, call: func(c *call) any {
		var parts []str
		for _, item := range c.run.items(c.on) {
			parts = append(parts, c.run.text(item))
		}
		sep := str{}
		if c.given[0] {
			sep = c.run.text(c.args[0])
		}
		return c.run.joinWith(sep, parts)
	}},
	"items": {call: func(c *call) any {
		if _, ok := c.on.(*undefined); ok {
			return &list{}
		}
		return pairs(c.onRecord())
	}},
}

// tests are applied with is.
var tests = map[string]*function{
	"defined":   {call: func(c *call) any { _, ok := c.on.(*undefined); return !ok }},
	"undefined": {call: func(c *call) any { _, ok := c.on.(*undefined); return ok }},
	"none":      {call: func(c *call) any { return c.on == nil }},
	"string":    {call: func(c *call) any { _, ok := c.on.(str); return ok }},
	"boolean":   {call: func(c *call) any { _, ok := c.on.(bool); return ok }},
	"true":      {call: func(c *call) any { return c.on == true }},
	"false":     {call: func(c *call) any { return c.on == false }},
	"integer":   {call: func(c *call) any { _, ok := c.on.(int64); return ok }},
	"number":    {call: func(c *call) any { _, ok := number64(c.on); return ok }},
	"mapping":   {call: func(c *call) any { rec, ok := c.on.(*record); return ok && !rec.mutable }},
	"sequence":  {call: func(c *call) any { return hasItems(c.on) }},
	"iterable":  {call: func(c *call) any { _, ok := c.on.(*stream); return ok || hasItems(c.on) }},
	"odd":       {call: func(c *call) any { return c.modulo(2) == 1 }},
	"even":      {call: func(c *call) any { return c.modulo(2) == 0 }},
	"divisibleby": {params: []string{"num"}, need: 1, call: func(c *call) any {
		return c.modulo(int64(c.number(0, 0))) == 0
	}},
	"in": {params: []string{""}, need: 1, call: func(c *call) any { return c.run.in(c.on, c.args[0]) }},
	"eq": equalTest, "equalto": equalTest,
	"ne": {params: []string{""}, need: 1, call: func(c *call) any { return !c.run.equal(c.on, c.args[0], 0) }},
}

var equalTest = &function{params: []string{""}, need: 1, call: func(c *call) any { return c.run.equal(c.on, c.args[0], 0) }}

func hasItems(v any) bool {
	switch v := v.(type) {
	case str, *list, *undefined:
		return true
	case *record:
		return !v.mutable
	}
	return false
}

func (c *call) modulo(by int64) int64 {
	n, ok := number64(c.on)
	if !ok || by == 0 {
		c.run.fail("'%s' of %s by %d", c.name, typeName(c.on), by)
	}
	return floorMod(n, by)
}

func pairs(rec *record) *list {
	l := &list{}
	for _, name := range rec.names {
		l.items = append(l.items, &list{[]any{str{s: name}, rec.values[name]}, true})
	}
	return l
}

func recordValues(rec *record) *list {
	l := &list{}
	for _, name := range rec.names {
		l.items = append(l.items, rec.values[name])
	}
	return l
}

// trim takes white space, or the characters of the first argument, off the ends.
func (c *call) trim(s str, left, right bool) any {
	c.run.scan(s)
	cut := isSpace
	if c.given[0] && c.args[0] != nil {
		chars := c.string(0).s
		c.run.tick(1 + len(chars)*len(s.s)/256)
		cut = func(r rune) bool { return strings.ContainsRune(chars, r) }
	}
	return s.trim(left, right, cut)
}

func callSplit(c *call) any {
	s, limit := c.onText(), c.number(1, -1)
	c.run.scan(s)
	if !c.given[0] || c.args[0] == nil {
		return c.words(s, limit)
	}
	sep := c.string(0).s
	if sep == "" {
		c.run.fail("'split' at an empty string")
	}
	l := &list{}
	from := 0
	for limit < 0 || len(l.items) < limit {
		i := strings.Index(s.s[from:], sep)
		if i < 0 {
			break
		}
		c.run.tick(1)
		l.items = append(l.items, s.slice(from, from+i))
		from += i + len(sep)
	}
	l.items = append(l.items, s.slice(from, len(s.s)))
	return l
}

// words cuts at white space, at most limit times (limit < 0: always).
func (c *call) words(s str, limit int) any {
	l := &list{}
	s = s.trim(true, false, isSpace)
	for s.s != "" {
		c.run.tick(1 + len(s.own))
		n := strings.IndexFunc(s.s, isSpace)
		if n < 0 || limit >= 0 && len(l.items) == limit {
			l.items = append(l.items, s)
			break
		}
		l.items = append(l.items, s.slice(0, n))
		s = s.slice(n, len(s.s)).trim(true, false, isSpace)
	}
	return l
}

// affix is startswith or endswith, of a string or of any in a tuple.
func (c *call) affix(has func(s, affix string) bool) bool {
	s := c.onText().s
	l, ok := c.args[0].(*list)
	if !ok || !l.tuple {
		return has(s, c.string(0).s)
	}
	for _, item := range l.items {
		if a, ok := item.(str); ok && has(s, a.s) {
			return true
		}
	}
	return false
}

func (c *call) convert(s str, f func(before, r rune) string) any {
	c.run.charge(2 * len(s.s))
	c.run.tick(1 + len(s.s)/8)
	return s.convert(f)
}

func upper(_, r rune) string { return string(unicode.ToUpper(r)) }
func lower(_, r rune) string { return string(unicode.ToLower(r)) }

func capitalize(before, r rune) string {
	if before == 0 {
		return string(unicode.ToTitle(r))
	}
	return string(unicode.ToLower(r))
}

// titleMethod is Python's str.title: a letter after anything that has no case
// is a capital.
func titleMethod(before, r rune) string {
	if unicode.IsUpper(before) || unicode.IsLower(before) || unicode.IsTitle(before) {
		return string(unicode.ToLower(r))
	}
	return string(unicode.ToTitle(r))
}

// titleFilter is Jinja's: words begin after white space, hyphens and brackets.
func titleFilter(before, r rune) string {
	if before == 0 || isSpace(before) || strings.ContainsRune("-({[<", before) {
		return string(unicode.ToUpper(r))
	}
	return string(unicode.ToLower(r))
}

func (c *call) replace(s str) any {
	limit := -1
	if c.given[2] && c.args[2] != nil {
		limit = c.number(2, -1)
	}
	old, with := c.string(0), c.string(1)
	c.run.scan(s)
	if old.s == "" {
		c.run.fail("'replace' of an empty string")
	}
	n := strings.Count(s.s, old.s)
	if limit >= 0 {
		n = min(n, limit)
	}
	if len(with.s) > 0 && n > c.run.limits.made/len(with.s) {
		c.run.fail("'replace' makes too much text")
	}
	c.run.charge(len(s.s) + n*len(with.s))
	c.run.tick(n)
	var b strBuilder
	from := 0
	for range n {
		i := from + strings.Index(s.s[from:], old.s)
		b.add(s.slice(from, i))
		b.add(with)
		from = i + len(old.s)
	}
	b.add(s.slice(from, len(s.s)))
	return b.str()
}

func callLength(c *call) any {
	switch v := c.on.(type) {
	case str:
		c.run.scan(v)
		return characters(v.s)
	case *list:
		return int64(len(v.items))
	case *record:
		if !v.mutable {
			return int64(len(v.names))
		}
	case *undefined:
		return int64(0)
	}
	c.run.fail("%s has no length", typeName(c.on))
	return nil
}

func callDefault(c *call) any {
	_, missing := c.on.(*undefined)
	if missing || c.given[1] && truth(c.args[1]) && !truth(c.on) {
		if c.given[0] {
			return c.args[0]
		}
		return str{}
	}
	return c.on
}

func callFirst(c *call) any {
	items := c.run.items(c.on)
	if len(items) == 0 {
		return &undefined{"an item of nothing"}
	}
	if s, ok := c.on.(*stream); ok {
		s.make = func() []any { return items[1:] }
	}
	return items[0]
}

func callLast(c *call) any {
	if _, ok := c.on.(*stream); ok {
		c.run.fail("'last' of a generator; 'list' makes a list of it")
	}
	items := c.run.items(c.on)
	if len(items) == 0 {
		return &undefined{"an item of nothing"}
	}
	return items[len(items)-1]
}

func callReverse(c *call) any {
	if s, ok := c.on.(str); ok {
		return c.run.pick(s, int(characters(s.s))-1, -1, -1)
	}
	items := slices.Clone(c.run.items(c.on))
	slices.Reverse(items)
	return &stream{func() []any { return items }}
}

// callIndent puts spaces, or a text, in front of every line but the first.
// Lines end where Python's str.splitlines says.
func callIndent(c *call) any {
	s, ok := c.on.(str)
	if !ok {
		c.run.fail("'indent' of %s; a string would be right", typeName(c.on))
	}
	by, isText := c.args[0].(str)
	if !isText {
		n := max(0, c.number(0, 4))
		c.run.charge(n)
		by = str{s: strings.Repeat(" ", n)}
	}
	first, blank := truth(c.args[1]), truth(c.args[2])
	s = c.run.join(s, str{s: "\n"})
	var parts []str
	for i := 0; s.s != ""; i++ {
		n := strings.IndexFunc(s.s, isLineEnd)
		_, size := utf8.DecodeRuneInString(s.s[n:])
		if strings.HasPrefix(s.s[n:], "\r\n") {
			size = 2
		}
		c.run.tick(1 + len(s.own))
		if i > 0 {
			parts = append(parts, str{s: "\n"})
		}
		if i == 0 && first || i > 0 && (n > 0 || blank) {
			parts = append(parts, by)
		}
		parts = append(parts, s.slice(0, n))
		s = s.slice(n+size, len(s.s))
	}
	return c.run.join(parts...)
}

func isLineEnd(r rune) bool {
	return r >= '\n' && r <= '\r' || r >= 0x1c && r <= 0x1e || r == 0x85 || r == 0x2028 || r == 0x2029
}

// callToJSON writes JSON as Python's json.dumps does, with ensure_ascii off
// unless asked for, which is what transformers makes of this filter.
func callToJSON(c *call) any {
	j := jsonWriter{run: c.run, indent: -1, ascii: truth(c.args[1])}
	if c.given[0] && c.args[0] != nil {
		if j.indent = c.number(0, 0); j.indent < 0 || j.indent > 16 {
			c.run.fail("'tojson' with an indent of %d; 0 to 16 would be right", j.indent)
		}
	}
	j.value(c.on, 0)
	return j.out.str()
}

type jsonWriter struct {
	run    *run
	indent int // -1: all on one line
	ascii  bool
	out    strBuilder
}

func (j *jsonWriter) raw(s string) {
	j.run.charge(len(s))
	j.out.add(str{s: s})
}

// newline begins a line at a depth, or puts what stands for it on one line.
func (j *jsonWriter) newline(depth int, flat string) {
	if j.indent < 0 {
		j.raw(flat)
		return
	}
	j.raw("\n" + strings.Repeat(" ", j.indent*depth))
}

func (j *jsonWriter) value(v any, depth int) {
	if depth > maxNested {
		j.run.fail("'tojson' of values nested more than %d deep", maxNested)
	}
	switch v := v.(type) {
	case nil:
		j.raw("null")
	case bool:
		j.raw(fmt.Sprint(v))
	case int64:
		j.raw(fmt.Sprint(v))
	case str:
		j.string(v)
	case *list:
		j.items("[]", len(v.items), depth, func(i int) { j.value(v.items[i], depth+1) })
	case *record:
		if v.mutable {
			j.run.fail("'tojson' of a namespace")
		}
		j.items("{}", len(v.names), depth, func(i int) {
			j.string(str{s: v.names[i]})
			j.raw(": ")
			j.value(v.values[v.names[i]], depth+1)
		})
	default:
		j.run.fail("'tojson' of %s", typeName(v))
	}
}

func (j *jsonWriter) items(brackets string, n, depth int, item func(int)) {
	if n == 0 {
		j.raw(brackets)
		return
	}
	j.raw(brackets[:1])
	for i := range n {
		switch {
		case i > 0 && j.indent < 0:
			j.raw(", ")
		case i > 0:
			j.raw(",")
		}
		j.newline(depth+1, "")
		item(i)
	}
	j.newline(depth, "")
	j.raw(brackets[1:])
}

var jsonEscapes = map[rune]string{'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`, '\f': `\f`}

func (j *jsonWriter) string(s str) {
	j.run.charge(2 * len(s.s))
	j.run.tick(1 + len(s.s)/32)
	j.out.add(str{s: `"`})
	from := 0
	for i, r := range s.s {
		esc, ok := jsonEscapes[r]
		switch {
		case ok:
		case r >= 0x10000 && j.ascii:
			high, low := utf16.EncodeRune(r)
			esc = fmt.Sprintf(`\u%04x\u%04x`, high, low)
		case r < ' ' || r >= 0x7f && j.ascii:
			esc = fmt.Sprintf(`\u%04x`, r)
		default:
			continue
		}
		j.out.add(s.slice(from, i))
		j.out.add(str{s: esc})
		from = i + utf8.RuneLen(r)
	}
	j.out.add(s.slice(from, len(s.s)))
	j.out.add(str{s: `"`})
}

// joinWith puts sep between parts.
func (r *run) joinWith(sep str, parts []str) str {
	if len(parts) == 0 {
		return str{}
	}
	all := make([]str, 0, 2*len(parts))
	for i, p := range parts {
		if i > 0 {
			all = append(all, sep)
		}
		all = append(all, p)
	}
	return r.join(all...)
}
