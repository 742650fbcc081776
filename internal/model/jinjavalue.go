//metronome:pure

package model

import (
	"strings"
	"unicode/utf8"
)

// The values of a template are nil (none), bool, int64, str, and pointers to
// the types below. A str carries its origin.

// str is a text and which of its bytes are the template's own: written in the
// template's source, not taken from a message and not computed. Only in those
// may a control token be found.
type str struct {
	s   string
	own []span // ascending, not empty, not touching
}

// literal is a text that stands in the template.
func literal(s string) str {
	if s == "" {
		return str{}
	}
	return str{s, []span{{0, len(s)}}}
}

// slice is s[from:to], in bytes.
func (s str) slice(from, to int) str {
	out := str{s: s.s[from:to]}
	for _, o := range s.own {
		if o.from, o.to = max(o.from, from)-from, min(o.to, to)-from; o.from < o.to {
			out.own = append(out.own, o)
		}
	}
	return out
}

// trim takes the characters that cut names off the ends.
func (s str) trim(left, right bool, cut func(rune) bool) str {
	from, to := 0, len(s.s)
	if left {
		from = to - len(strings.TrimLeftFunc(s.s, cut))
	}
	if right {
		to = from + len(strings.TrimRightFunc(s.s[from:], cut))
	}
	return s.slice(from, to)
}

// strBuilder joins texts and keeps their origin.
type strBuilder struct {
	b   strings.Builder
	own []span
}

func (b *strBuilder) add(s str) {
	at := b.b.Len()
	b.b.WriteString(s.s)
	for _, o := range s.own {
		o.from, o.to = o.from+at, o.to+at
		if n := len(b.own); n > 0 && b.own[n-1].to == o.from {
			b.own[n-1].to = o.to
			continue
		}
		b.own = append(b.own, o)
	}
}

func (b *strBuilder) str() str { return str{b.b.String(), b.own} }

// convert maps every character, keeping its origin. f sees the character
// before it too, 0 at the start.
func (s str) convert(f func(before, r rune) string) str {
	var b strBuilder
	own := s.own
	before := rune(0)
	for i, r := range s.s {
		for len(own) > 0 && own[0].to <= i {
			own = own[1:]
		}
		out := str{s: f(before, r)}
		if len(own) > 0 && own[0].from <= i {
			out = literal(out.s)
		}
		b.add(out)
		before = r
	}
	return b.str()
}

// undefined is a name or an item that is not there. It prints as nothing, is
// false, and almost everything else done with it is an error.
type undefined struct{ name string }

// list is a list or a tuple.
type list struct {
	items []any
	tuple bool
}

// stream is what map, select and their like give: items that are made when they
// are asked for, and only once.
type stream struct{ make func() []any }

func (s *stream) take() (items []any) {
	if s.make != nil {
		items = s.make()
		s.make = nil
	}
	return items
}

// record is a dictionary, in the order of its keys, or a namespace: a record
// whose items a set statement may change.
type record struct {
	names   []string
	values  map[string]any
	mutable bool
}

func (r *record) set(name string, v any) {
	if _, ok := r.values[name]; !ok {
		r.names = append(r.names, name)
	}
	r.values[name] = v
}

// typeName is what Python calls the type of a value, for errors.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "none"
	case bool:
		return "a bool"
	case int64:
		return "a number"
	case str:
		return "a string"
	case *list:
		if v.tuple {
			return "a tuple"
		}
		return "a list"
	case *record:
		if v.mutable {
			return "a namespace"
		}
		return "a dictionary"
	case *undefined:
		return "undefined"
	case *stream:
		return "a generator"
	case *macro:
		return "a macro"
	}
	return "a function"
}

// truth is what if makes of a value.
func truth(v any) bool {
	switch v := v.(type) {
	case bool:
		return v
	case int64:
		return v != 0
	case str:
		return v.s != ""
	case *list:
		return len(v.items) > 0
	case *record:
		return v.mutable || len(v.names) > 0
	case *function, *macro, *stream, *loop:
		return true
	}
	return false
}

// number takes a bool for a number too, as Python does.
func number64(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// characters is the length of a text as Python counts it.
func characters(s string) int64 { return int64(utf8.RuneCountInString(s)) }
