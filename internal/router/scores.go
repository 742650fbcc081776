//metronome:pure

package router

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"

	"github.com/metronome-serve/metronome/internal/api"
)

// scores are the log-probabilities of a request's prompts. The prefill computes
// them, so they are in its answer only, and the router puts them in front of
// decode's own lists: what SGLang's routers do with input_token_logprobs. The
// numbers are passed on as they were written.
type scores struct {
	kind  api.Kind
	items []promptPart
	any   bool // some list has an element
}

// promptPart is what one answer's lists begin with: the inside of each of
// promptLists, without brackets.
type promptPart struct {
	lists [4][]byte
	known bool // the prefill has told
	given bool // /v1/completions: it is in the client's hands
}

// promptLists are the lists that begin with the prompt's part, by the kind of
// the request. Those of /generate are in meta_info, of each event anew; those of
// /v1/completions are in a choice's logprobs, once.
func promptLists(k api.Kind) []string {
	if k == api.Generate {
		return []string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}
	}
	return []string{"tokens", "token_logprobs", "top_logprobs", "text_offset"}
}

func newScores(k api.Kind, items int) *scores {
	return &scores{kind: k, items: make([]promptPart, items)}
}

// holders calls f for each answer that data (a body, or one event's data) tells
// of, with the offset of the object that holds its lists.
func (s *scores) holders(data []byte, f func(p *promptPart, at int)) {
	one := func(place, at int, holder string) {
		if off, end := api.Peek(data, at, "index"); end > 0 {
			n, err := strconv.Atoi(string(data[off:end]))
			if err != nil {
				return
			}
			place = n
		}
		if off, end := api.Peek(data, at, holder); end > 0 && data[off] == '{' && place >= 0 && place < len(s.items) {
			f(&s.items[place], off)
		}
	}
	place := 0
	switch {
	case s.kind == api.Completion:
		list, end := api.Peek(data, 0, "choices")
		if end == 0 {
			return
		}
		for off := range api.PeekList(data, list) {
			one(place, off, "logprobs")
			place++
		}
	case len(data) > 0 && data[0] == '[':
		for off := range api.PeekList(data, 0) {
			one(place, off, "meta_info")
			place++
		}
	default:
		one(0, 0, "meta_info")
	}
}

// take learns from the prefill's answer. drawn is how many output tokens its
// lists end with.
func (s *scores) take(data []byte, drawn int) {
	s.holders(data, func(p *promptPart, at int) {
		if p.known {
			return
		}
		p.known = true
		for i, name := range promptLists(s.kind) {
			off, end := api.Peek(data, at, name)
			if end == 0 {
				continue
			}
			p.lists[i] = slices.Clone(inside(data, off, s.kind == api.Completion, drawn))
			s.any = s.any || len(p.lists[i]) > 0
		}
	})
}

// inside is a list without its brackets, and if cut without its last elements.
func inside(data []byte, at int, cut bool, last int) []byte {
	var ends []int
	first := 0
	for off, end := range api.PeekList(data, at) {
		if len(ends) == 0 {
			first = off
		}
		ends = append(ends, end)
	}
	n := len(ends)
	if cut {
		n -= last
	}
	if n <= 0 {
		return nil
	}
	return data[first:ends[n-1]]
}

// edit puts text in the place of a range.
type edit struct {
	from, to int
	text     []byte
}

// give appends decode's data with the prompt's part in it to dst.
func (s *scores) give(dst, data []byte) []byte {
	var edits []edit
	s.holders(data, func(p *promptPart, at int) {
		if p.given {
			return
		}
		p.given = s.kind == api.Completion
		for i, name := range promptLists(s.kind) {
			off, end := api.Peek(data, at, name)
			if end == 0 || len(p.lists[i]) == 0 || data[off] != '[' && data[off] != 'n' {
				continue
			}
			text := append([]byte{'['}, p.lists[i]...)
			if rest := inside(data, off, false, 0); len(rest) > 0 {
				text = append(append(text, ','), rest...)
			}
			edits = append(edits, edit{off, end, append(text, ']')})
		}
	})
	slices.SortFunc(edits, func(a, b edit) int { return cmp.Compare(a.from, b.from) })
	at := 0
	for _, e := range edits {
		dst = append(append(dst, data[at:e.from]...), e.text...)
		at = e.to
	}
	return append(dst, data[at:]...)
}

// giveEvents is give for a run of whole events.
func (s *scores) giveEvents(dst, run []byte) []byte {
	for len(run) > 0 {
		line := run
		if i := bytes.IndexByte(run, '\n'); i >= 0 {
			line = run[:i+1]
		}
		run = run[len(line):]
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if json := bytes.TrimSpace(data); ok && len(json) > 0 && json[0] == '{' {
			at := len(line) - len(data) + bytes.IndexByte(data, '{')
			dst = s.give(append(dst, line[:at]...), json)
			dst = append(dst, line[at+len(json):]...)
			continue
		}
		dst = append(dst, line...)
	}
	return dst
}
