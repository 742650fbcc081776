//metronome:pure

package kv

import (
	"fmt"
	"slices"
)

// Match fills the empty table with the longest run of whole pages in the index
// that begins tokens, and returns how many tokens they hold. The pages are
// shared: the table must not write them.
func (p *Pool) Match(t *BlockTable, tokens []int32) int {
	if len(t.pages) != 0 {
		panic("kv: match into a table that is not empty")
	}
	if p.buckets == nil {
		return 0
	}
	at := none
	for len(tokens) >= p.size {
		g := p.find(p.hash(at, tokens[:p.size]), at, tokens[:p.size])
		if g == none {
			break
		}
		p.share(g)
		if at == none {
			t.Grow(p.PagesFor(len(tokens) + 1)) // the rest will follow by Extend
		}
		t.pages = append(t.pages, g)
		at, tokens = g, tokens[p.size:]
	}
	t.shared, t.indexed = len(t.pages), len(t.pages)
	return len(t.pages) * p.size
}

// share adds a reference to an indexed page.
func (p *Pool) share(g Page) {
	n := &p.pages[g]
	was, idle := n.state(), !n.busy()
	n.refs++
	p.recount(was, Owned)
	if idle {
		p.evictable--
		p.unleaf(g)
		p.busy(n.parent, 1)
	}
}

// Insert puts the leading whole pages of the table into the index under the
// tokens that they hold; their rows must be final. Where the index has a page
// with the same tokens already, that one stays and the table's own page goes
// on without it; it cannot be evicted while the table holds pages below it.
func (p *Pool) Insert(t *BlockTable, tokens []int32) { p.insert(t, tokens, false) }

// Share is Insert for a table whose pages nobody outside names: where the index
// has the same page already, the table goes on with that one and gives its own
// back. Then all it holds in the index hangs on pages of its own.
func (p *Pool) Share(t *BlockTable, tokens []int32) { p.insert(t, tokens, true) }

func (p *Pool) insert(t *BlockTable, tokens []int32, swap bool) {
	t.mustBeOwned()
	if p.buckets == nil {
		p.tokens = make([]int32, len(p.pages)*p.size)
		p.buckets = slices.Repeat([]Page{none}, 1<<ceilLog2(len(p.pages)))
	}
	at, own := none, true
	if t.indexed > 0 {
		at = t.pages[t.indexed-1]
	}
	for i := t.indexed; i < len(t.pages) && (i+1)*p.size <= len(tokens); i++ {
		run := tokens[i*p.size : (i+1)*p.size]
		h := p.hash(at, run)
		g := p.find(h, at, run)
		if g == none {
			g = t.pages[i]
			p.index(g, at, h, run)
		} else if swap && g != t.pages[i] {
			p.swap(t, i, g)
		}
		own = own && g == t.pages[i]
		if own {
			t.indexed = i + 1
		}
		at = g
	}
}

// swap puts the indexed page g in the place of the table's page i. The entries
// that were handed out by Pages stay as they are.
func (p *Pool) swap(t *BlockTable, i int, g Page) {
	p.share(g)
	old := t.pages[i]
	n := &p.pages[old]
	if n.refs != 1 || n.holds != 0 || n.indexed {
		panic(fmt.Sprintf("kv: page %d is not the table's alone", old))
	}
	n.refs = 0
	p.recount(Owned, Free)
	p.free = append(p.free, old)
	p.chances++
	t.pages = append(make([]Page, 0, cap(t.pages)), t.pages...)
	t.pages[i] = g
}

// index makes an owned page a node below at.
func (p *Pool) index(g, at Page, h uint64, run []int32) {
	n := &p.pages[g]
	if n.indexed || n.refs == 0 {
		panic(fmt.Sprintf("kv: page %d cannot enter the index: indexed %v, %d references", g, n.indexed, n.refs))
	}
	copy(p.run(g), run)
	b := &p.buckets[h&uint64(len(p.buckets)-1)]
	p.chances++
	n.indexed, n.hash, n.parent, n.next = true, h, at, *b
	*b = g
	if at != none {
		p.pages[at].kids++
	}
	p.busy(at, 1)
}

// evict frees the least recently used cached leaf. There must be one.
func (p *Pool) evict() {
	g := p.leaves[0]
	p.unleaf(g)
	n := &p.pages[g]
	b := &p.buckets[n.hash&uint64(len(p.buckets)-1)]
	for *b != g {
		b = &p.pages[*b].next
	}
	*b = n.next
	up := n.parent
	n.indexed, n.parent, n.next = false, none, none
	p.evictable--
	p.recount(Cached, Free)
	p.free = append(p.free, g)
	if up != none {
		p.pages[up].kids--
		p.leaf(up)
	}
}

// idle is called when an indexed page has lost its last reference and hold.
func (p *Pool) idle(g Page) {
	n := &p.pages[g]
	if n.busyKids > 0 {
		return // what is below it keeps it
	}
	p.evictable++
	p.leaf(g)
	p.busy(n.parent, -1)
}

// busy tells g that one of its kids has become busy (1) or idle (-1), and goes
// up as long as that changes whether g itself is. Requests share whole paths
// from the first page, so this nearly always ends at once.
func (p *Pool) busy(g Page, d int32) {
	for g != none {
		n := &p.pages[g]
		was := n.busy()
		n.busyKids += d
		now := n.busy()
		if was == now {
			return
		}
		if now {
			p.evictable--
			p.unleaf(g)
		} else {
			p.evictable++ // and no leaf: it has kids
		}
		g = n.parent
	}
}

// find is the node below at that holds these tokens, or none.
func (p *Pool) find(h uint64, at Page, run []int32) Page {
	g := p.buckets[h&uint64(len(p.buckets)-1)]
	for ; g != none; g = p.pages[g].next {
		n := &p.pages[g]
		if n.hash == h && n.parent == at && slices.Equal(p.run(g), run) {
			return g
		}
	}
	return none
}

// run is the memory of the tokens of an indexed page.
func (p *Pool) run(g Page) []int32 { return p.tokens[int(g)*p.size : (int(g)+1)*p.size] }

// hash mixes two tokens a multiplication: it is most of the time of a lookup,
// some 3 ns a token.
func (p *Pool) hash(at Page, run []int32) uint64 {
	const k = 0xD6E8FEB86659FD93
	h := p.seed ^ uint64(at+1)*0x9E3779B97F4A7C15
	for ; len(run) >= 2; run = run[2:] {
		h = (h ^ uint64(uint32(run[0])) ^ uint64(uint32(run[1]))<<32) * k
		h ^= h >> 32
	}
	for _, t := range run {
		h = (h ^ uint64(uint32(t))) * k
		h ^= h >> 32
	}
	return h
}

func ceilLog2(n int) int {
	k := 0
	for 1<<k < n {
		k++
	}
	return k
}

// leaf puts g among the evictable leaves, if it is one: a heap by stamp.
func (p *Pool) leaf(g Page) {
	n := &p.pages[g]
	if n.kids > 0 || n.busy() {
		return
	}
	p.leaves = append(p.leaves, g)
	p.up(len(p.leaves) - 1)
}

// unleaf takes g from the evictable leaves, if it is there.
func (p *Pool) unleaf(g Page) {
	i := int(p.pages[g].pos)
	if i < 0 {
		return
	}
	last := len(p.leaves) - 1
	moved := p.leaves[last]
	p.leaves = p.leaves[:last]
	p.pages[g].pos = -1
	if i < last {
		p.leaves[i] = moved
		p.down(i)
		p.up(int(p.pages[moved].pos))
	}
}

func (p *Pool) up(i int) {
	g := p.leaves[i]
	for i > 0 {
		j := (i - 1) / 2
		if p.pages[p.leaves[j]].used <= p.pages[g].used {
			break
		}
		p.place(p.leaves[j], i)
		i = j
	}
	p.place(g, i)
}

func (p *Pool) down(i int) {
	g := p.leaves[i]
	for {
		j := 2*i + 1
		if j+1 < len(p.leaves) && p.pages[p.leaves[j+1]].used < p.pages[p.leaves[j]].used {
			j++
		}
		if j >= len(p.leaves) || p.pages[p.leaves[j]].used >= p.pages[g].used {
			break
		}
		p.place(p.leaves[j], i)
		i = j
	}
	p.place(g, i)
}

func (p *Pool) place(g Page, i int) {
	p.leaves[i] = g
	p.pages[g].pos = int32(i)
}
