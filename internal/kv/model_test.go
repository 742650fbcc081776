package kv

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// model is the pool as one would write it without care for speed: sets, and the
// states found by looking at everything.
type model struct {
	size, total int
	tables      []*BlockTable
	words       []string        // what each table holds
	nodes       map[string]Page // the index: the text from the beginning to the page's end
	used        map[Page]int
	stamp       int
}

func (m *model) refs(g Page, held bool) (n int) {
	for _, t := range m.tables {
		if t.held == held && slices.Contains(t.pages, g) {
			n++
		}
	}
	return n
}

func (m *model) node(g Page) (string, bool) {
	for s, h := range m.nodes {
		if h == g {
			return s, true
		}
	}
	return "", false
}

func (m *model) state(g Page) State {
	switch _, indexed := m.node(g); {
	case m.refs(g, false) > 0:
		return Owned
	case m.refs(g, true) > 0:
		return Quarantined
	case indexed:
		return Cached
	}
	return Free
}

func (m *model) count() (c Count) {
	for g := range m.total {
		c[m.state(Page(g))]++
	}
	return c
}

// evictions is the order in which the cached pages would go: the leaf that was
// used longest ago, again and again.
func (m *model) evictions() (order []Page) {
	left := map[string]Page{}
	for s, g := range m.nodes {
		left[s] = g
	}
	for {
		best := none
		for s, g := range left {
			leaf := m.state(g) == Cached
			for o := range left {
				leaf = leaf && !(len(o) > len(s) && o[:len(s)] == s)
			}
			if leaf && (best == none || m.used[g] < m.used[best]) {
				best = g
			}
		}
		if best == none {
			return order
		}
		s, _ := m.node(best)
		delete(left, s)
		order = append(order, best)
	}
}

func (m *model) drop(t *BlockTable) {
	i := slices.Index(m.tables, t)
	for _, g := range slices.Backward(t.pages) {
		m.stamp++
		m.used[g] = m.stamp
	}
	m.tables, m.words = slices.Delete(m.tables, i, i+1), slices.Delete(m.words, i, i+1)
}

// insert is Insert and Share.
func (m *model) insert(t *BlockTable, word string, before []Page, share bool) error {
	for i := range before {
		end := (i + 1) * m.size
		if end > len(word) {
			break
		}
		g, ok := m.nodes[word[:end]]
		if !ok {
			m.nodes[word[:end]] = before[i]
			g = before[i]
		}
		if share && t.pages[i] != g || !share && t.pages[i] != before[i] {
			return fmt.Errorf("page %d of %q is %d; it was %d, the index has %d", i, word, t.pages[i], before[i], g)
		}
	}
	return nil
}

// extended checks which pages came out, and forgets what was evicted.
func (m *model) extended(t *BlockTable, fresh []Page, free int, evictions []Page) error {
	for i, g := range fresh {
		switch {
		case i < free && slices.Contains(evictions, g), i >= free && g != evictions[i-free]:
			return fmt.Errorf("%d pages were free and %v could go, but %v came out", free, evictions, fresh)
		case i >= free:
			s, _ := m.node(g)
			delete(m.nodes, s)
		}
	}
	return nil
}

func TestPoolAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			size: rapid.IntRange(1, 3).Draw(t, "size"), total: rapid.IntRange(1, 10).Draw(t, "pages"),
			nodes: map[string]Page{}, used: map[Page]int{},
		}
		p := NewPool(m.total, m.size, rapid.Uint64().Draw(t, "seed"))
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		table := func(held bool) *BlockTable {
			var some []*BlockTable
			for _, b := range m.tables {
				if b.held == held {
					some = append(some, b)
				}
			}
			if len(some) == 0 {
				t.Skip("no such table")
			}
			return rapid.SampledFrom(some).Draw(t, "table")
		}
		index := func(share bool) func(t *rapid.T) {
			return func(t *rapid.T) {
				b := table(false)
				word := m.words[slices.Index(m.tables, b)]
				before := slices.Clone(b.pages)
				handed := b.Pages()
				defer func() {
					if !slices.Equal(handed, before) {
						t.Fatalf("pages that were handed out changed from %v to %v", before, handed)
					}
				}()
				if share {
					p.Share(b, text(word))
				} else {
					p.Insert(b, text(word))
				}
				must(m.insert(b, word, before, share))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"new": func(t *rapid.T) {
				word := rapid.StringOfN(rapid.SampledFrom([]rune("ab")), 0, 12, -1).Draw(t, "word")
				b := new(BlockTable)
				got := p.Match(b, text(word))
				want := 0
				for _, ok := m.nodes[word[:min(want+m.size, len(word))]]; ok && want+m.size <= len(word); {
					want += m.size
					_, ok = m.nodes[word[:min(want+m.size, len(word))]]
				}
				if got != want {
					t.Fatalf("Match(%q) = %d, want %d", word, got, want)
				}
				m.tables, m.words = append(m.tables, b), append(m.words, word)
			},
			"extend": func(t *rapid.T) {
				b := table(false)
				n := rapid.IntRange(0, len(m.words[slices.Index(m.tables, b)])).Draw(t, "tokens")
				had, free, evictions := len(b.pages), m.count()[Free], m.evictions()
				need := max(0, PagesFor(n, m.size)-had)
				if got := p.Extend(b, n); got != (need <= free+len(evictions)) {
					t.Fatalf("Extend to %d tokens: %v, with %d free, %v to go, %d needed", n, got, free, evictions, need)
				} else if got {
					must(m.extended(b, b.pages[had:], free, evictions))
				}
			},
			"insert": index(false),
			"share": func(t *rapid.T) {
				b := table(false)
				for _, g := range b.pages { // nobody outside names them
					if _, indexed := m.node(g); !indexed && m.refs(g, true) > 0 {
						t.Skip("in quarantine")
					}
				}
				index(true)(t)
			},
			"release": func(t *rapid.T) {
				b := table(false)
				m.drop(b)
				p.Release(b)
			},
			"quarantine": func(t *rapid.T) { p.Quarantine(table(false)) },
			"lift": func(t *rapid.T) {
				b := table(true)
				m.drop(b)
				p.Lift(b)
			},
			"": func(t *rapid.T) {
				must(p.Check())
				must(p.CheckOwners(m.tables))
				if got, want := p.Count(), m.count(); got != want {
					t.Fatalf("pages are %v, want %v", got, want)
				}
				if got, want := p.Available(), m.count()[Free]+len(m.evictions()); got != want {
					t.Fatalf("%d available, want %d", got, want)
				}
				for g := range m.total {
					_, indexed := m.node(Page(g))
					if got, want := p.Writable(Page(g)), m.refs(Page(g), false) == 1 && m.refs(Page(g), true) == 0 && !indexed; got != want {
						t.Fatalf("page %d writable: %v, want %v", g, got, want)
					}
				}
			},
		})
	})
}
