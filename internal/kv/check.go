//metronome:pure

package kv

import (
	"fmt"
	"slices"
)

// Check recomputes from the pages what the pool keeps up to date, and returns
// the first difference. It is for tests and checked builds: it looks at every page.
func (p *Pool) Check() error {
	var count Count
	kids, busyKids := make([]int32, len(p.pages)), make([]int32, len(p.pages))
	evictable, leaves := 0, 0
	for i := range p.pages {
		n, g := &p.pages[i], Page(i)
		count[n.state()]++
		if n.refs < 0 || n.holds < 0 {
			return fmt.Errorf("kv: page %d has %d references and %d holds", g, n.refs, n.holds)
		}
		if !n.indexed {
			if n.parent != none || n.next != none || n.kids != 0 || n.busyKids != 0 || n.pos >= 0 {
				return fmt.Errorf("kv: page %d is not in the index but linked there", g)
			}
			continue
		}
		if n.parent != none {
			if !p.pages[n.parent].indexed {
				return fmt.Errorf("kv: cached page %d has lost its parent %d", g, n.parent)
			}
			kids[n.parent]++
			if n.busy() {
				busyKids[n.parent]++
			}
		}
		if p.find(n.hash, n.parent, p.run(g)) != g || p.hash(n.parent, p.run(g)) != n.hash {
			return fmt.Errorf("kv: the index does not find page %d", g)
		}
		if !n.busy() {
			evictable++
		}
		leaf := !n.busy() && n.kids == 0
		if leaf {
			leaves++
		}
		if leaf != (n.pos >= 0) || leaf && p.leaves[n.pos] != g {
			return fmt.Errorf("kv: page %d: leaf %v, place %d", g, leaf, n.pos)
		}
		if n.pos > 0 && p.pages[p.leaves[(n.pos-1)/2]].used > n.used {
			return fmt.Errorf("kv: page %d was used before the leaf that is to go before it", g)
		}
	}
	for i := range p.pages {
		if n := &p.pages[i]; n.kids != kids[i] || n.busyKids != busyKids[i] {
			return fmt.Errorf("kv: page %d counts %d kids, %d busy; has %d, %d", i, n.kids, n.busyKids, kids[i], busyKids[i])
		}
	}
	switch {
	case count != p.count:
		return fmt.Errorf("kv: counted %v, kept %v", count, p.count)
	case count[Free] != len(p.free):
		return fmt.Errorf("kv: %d pages are free, %d on the stack", count[Free], len(p.free))
	case evictable != p.evictable || leaves != len(p.leaves):
		return fmt.Errorf("kv: %d evictable, %d leaves; kept %d, %d", evictable, leaves, p.evictable, len(p.leaves))
	}
	return p.checkFree()
}

func (p *Pool) checkFree() error {
	seen := slices.Clone(p.free)
	slices.Sort(seen)
	for i, g := range seen {
		if i > 0 && seen[i-1] == g || p.pages[g].state() != Free {
			return fmt.Errorf("kv: page %d on the free stack is there twice or %v", g, p.pages[g].state())
		}
	}
	return nil
}

// CheckOwners compares each page's references and holds with the tables that
// should account for them: the ones in use and the quarantined ones.
func (p *Pool) CheckOwners(tables []*BlockTable) error {
	refs, holds := make([]int32, len(p.pages)), make([]int32, len(p.pages))
	for _, t := range tables {
		for _, g := range t.pages {
			if t.held {
				holds[g]++
			} else {
				refs[g]++
			}
		}
	}
	for i := range p.pages {
		if n := &p.pages[i]; n.refs != refs[i] || n.holds != holds[i] {
			return fmt.Errorf("kv: page %d has %d references and %d holds; the tables account for %d and %d",
				i, n.refs, n.holds, refs[i], holds[i])
		}
	}
	return nil
}

func (s State) String() string { return [...]string{"free", "owned", "cached", "quarantined"}[s] }

func (c Count) String() string {
	return fmt.Sprintf("free %d, owned %d, cached %d, quarantined %d", c[Free], c[Owned], c[Cached], c[Quarantined])
}
