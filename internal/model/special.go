//metronome:pure

package model

import "sort"

// special is a token that is found in text as a whole, before any merging:
// a control token, or one that the vocabulary's maker defined.
type special struct {
	text    string
	id      int32
	control bool // only where the text is trusted; others everywhere
}

// specials is sorted by text. It finds the tokens at a place by narrowing a
// range of it byte by byte, so it needs no memory of its own.
type specials struct {
	list  []special
	first [256]bool // bytes with which one begins
}

func newSpecials(list []special) specials {
	s := specials{list: list}
	sort.SliceStable(list, func(i, j int) bool { return list[i].text < list[j].text })
	for _, sp := range list {
		s.first[sp.text[0]] = true
	}
	return s
}

// longest is the longest special token at the start of text; control tokens
// count only if they end within the first trusted bytes.
func (s *specials) longest(text string, trusted int) (found special, ok bool) {
	list := s.list
	for d := 0; d < len(text) && len(list) > 0; d++ {
		c := text[d]
		from := sort.Search(len(list), func(i int) bool { return len(list[i].text) > d && list[i].text[d] >= c })
		list = list[from:]
		to := sort.Search(len(list), func(i int) bool { return list[i].text[d] > c })
		list = list[:to]
		// In a sorted range with a common beginning the shortest is the first.
		for _, sp := range list {
			if len(sp.text) > d+1 {
				break
			}
			if !sp.control || d < trusted {
				found, ok = sp, true
			}
		}
	}
	return found, ok
}

// span is a range of bytes [from, to) of a text.
type span struct{ from, to int }

// cut goes over a text once, left to right, and hands out the special tokens
// in it (id) and the stretches between (id < 0, never empty). At each place
// the longest token wins. trusted are the ranges, ascending and apart, in
// which control tokens may lie.
func (s *specials) cut(text string, trusted []span, part func(stretch string, id int32)) {
	from := 0
	for at := 0; at < len(text); at++ {
		if !s.first[text[at]] {
			continue
		}
		for len(trusted) > 0 && trusted[0].to <= at {
			trusted = trusted[1:]
		}
		room := 0
		if len(trusted) > 0 && trusted[0].from <= at {
			room = trusted[0].to - at
		}
		sp, ok := s.longest(text[at:], room)
		if !ok {
			continue
		}
		if at > from {
			part(text[from:at], -1)
		}
		part("", sp.id)
		from = at + len(sp.text)
		at = from - 1
	}
	if from < len(text) {
		part(text[from:], -1)
	}
}
