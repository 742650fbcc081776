//metronome:pure

package kv

import (
	"fmt"
	"slices"
)

// State of a page.
type State uint8

// States of a page. They follow from its counts, see the package comment.
const (
	Free State = iota
	Owned
	Cached
	Quarantined
)

// Count is the number of pages in each state, indexed by State.
type Count [4]int

// none is no page: the parent of the index's first pages, the end of a chain.
const none Page = -1

type page struct {
	refs  int32  // block tables that name it
	holds int32  // quarantined block tables that name it
	gen   uint32 // bumped whenever the page is given out anew

	// The page as a node of the prefix index.
	indexed  bool
	parent   Page
	next     Page   // in the chain of its bucket
	kids     int32  // nodes below it
	busyKids int32  // of these, how many are busy
	hash     uint64 // of parent and tokens
	used     uint64 // stamp of the last use
	pos      int32  // place among the evictable leaves, or -1
}

func (g *page) state() State {
	switch {
	case g.refs > 0:
		return Owned
	case g.holds > 0:
		return Quarantined
	case g.indexed:
		return Cached
	}
	return Free
}

// busy says that the page cannot be evicted, now or after the pages below it.
func (g *page) busy() bool { return g.refs > 0 || g.holds > 0 || g.busyKids > 0 }

// Pool accounts for the pages of one arena. It is owned by one goroutine.
type Pool struct {
	size    int // tokens of a page
	seed    uint64
	pages   []page
	free    []Page // a stack
	count   Count
	reserve int
	chances uint64

	tokens    []int32 // of the indexed pages, size for each; made at the first Insert
	buckets   []Page
	leaves    []Page // heap of the cached pages with nothing below them, least recently used first
	evictable int    // cached pages that are not busy
	stamp     uint64
}

// NewPool accounts for that many pages of pageSize tokens. The seed is mixed
// into the index's hashes, so that nobody can prepare prompts that collide.
func NewPool(pages, pageSize int, seed uint64) *Pool {
	if pages < 1 || pageSize < 1 {
		panic(fmt.Sprintf("kv: a pool of %d pages of %d tokens", pages, pageSize))
	}
	p := &Pool{size: pageSize, seed: seed, pages: make([]page, pages), free: make([]Page, pages)}
	for i := range p.pages {
		p.pages[i].parent, p.pages[i].next, p.pages[i].pos = none, none, -1
		p.free[i] = Page(pages - 1 - i) // page 0 is given out first
	}
	p.count[Free] = pages
	return p
}

// PageSize is the number of tokens in a page.
func (p *Pool) PageSize() int { return p.size }

// Total is the number of pages.
func (p *Pool) Total() int { return len(p.pages) }

// PagesFor is how many pages hold the given number of tokens.
func (p *Pool) PagesFor(tokens int) int { return PagesFor(tokens, p.size) }

// Count is the number of pages in each state.
func (p *Pool) Count() Count { return p.count }

// Available is how many pages Extend can give out now: free ones and cached
// ones that can be evicted.
func (p *Pool) Available() int { return len(p.free) + p.evictable }

// SetReserve says how many available pages admission must leave for sequences
// that run already. Extend does not look at it; whoever admits does.
func (p *Pool) SetReserve(pages int) {
	if pages < p.reserve {
		p.chances++
	}
	p.reserve = pages
}

// Reserved is what SetReserve has set.
func (p *Pool) Reserved() int { return p.reserve }

// Chances counts what may let somebody be admitted who was not before: pages
// that come back, a reserve that shrinks, pages that can be shared.
func (p *Pool) Chances() uint64 { return p.chances }

// State of one page.
func (p *Pool) State(g Page) State { return p.pages[g].state() }

// Generation of one page. It changes whenever the page is given out anew.
func (p *Pool) Generation(g Page) uint32 { return p.pages[g].gen }

// Writable says that the page has one owner and nobody else can come to read
// it: it is not in the index.
func (p *Pool) Writable(g Page) bool {
	n := &p.pages[g]
	return n.refs == 1 && !n.indexed
}

// Extend appends fresh pages to the table until it covers that many tokens,
// evicting cached ones where no page is free. It takes all it needs or none.
func (p *Pool) Extend(t *BlockTable, tokens int) bool {
	t.mustBeOwned()
	n := p.PagesFor(tokens) - len(t.pages)
	if n <= 0 {
		return true
	}
	if n > p.Available() {
		return false
	}
	t.pages = slices.Grow(t.pages, n)
	for range n {
		if len(p.free) == 0 {
			p.evict()
		}
		g := p.free[len(p.free)-1]
		p.free = p.free[:len(p.free)-1]
		p.pages[g].gen++
		p.pages[g].refs = 1
		p.count[Free]--
		p.count[Owned]++
		t.pages = append(t.pages, g)
	}
	return true
}

// Release gives the table's references back and empties it.
func (p *Pool) Release(t *BlockTable) {
	t.mustBeOwned()
	p.drop(t)
}

// Quarantine ends the table's ownership but keeps its pages from being given
// out until Lift: something outside may still touch them.
func (p *Pool) Quarantine(t *BlockTable) {
	t.mustBeOwned()
	t.held = true
	for _, g := range t.pages {
		n := &p.pages[g]
		was := n.state()
		n.holds++ // before refs, so that the page is busy throughout
		n.refs--
		p.recount(was, n.state())
	}
}

// Lift ends a quarantine and empties the table.
func (p *Pool) Lift(t *BlockTable) {
	if !t.held {
		panic("kv: lift of a table that is not in quarantine")
	}
	p.drop(t)
}

// drop takes one reference or hold from each page, the deepest first, so that
// each is idle before its parent is asked.
func (p *Pool) drop(t *BlockTable) {
	p.chances++
	for _, g := range slices.Backward(t.pages) {
		n := &p.pages[g]
		was := n.state()
		if t.held {
			n.holds--
		} else {
			n.refs--
		}
		if n.refs < 0 || n.holds < 0 {
			panic(fmt.Sprintf("kv: page %d given back twice", g))
		}
		p.stamp++
		n.used = p.stamp
		now := n.state()
		p.recount(was, now)
		switch {
		case now == Free:
			p.free = append(p.free, g)
		case now == Cached && was != Cached:
			p.idle(g)
		}
	}
	*t = BlockTable{}
}

func (p *Pool) recount(was, now State) {
	p.count[was]--
	p.count[now]++
}

func (t *BlockTable) mustBeOwned() {
	if t.held {
		panic("kv: the table is in quarantine")
	}
}
