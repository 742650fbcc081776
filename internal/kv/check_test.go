package kv

import (
	"strings"
	"testing"
)

// TestCheckFinds: each thing that the pool keeps up to date is seen by Check
// when it is wrong, so that a walk that ends without a word means something.
func TestCheckFinds(t *testing.T) {
	for _, c := range []struct {
		broken string
		break_ func(p *Pool, b *BlockTable)
		says   string
	}{
		{"a reference below none", func(p *Pool, b *BlockTable) { p.pages[p.free[0]].refs = -1 }, "-1 references"},
		{"a page outside the index with a place in it", func(p *Pool, b *BlockTable) { p.pages[p.free[0]].pos = 0 }, "not in the index but linked"},
		{"a parent that is gone", func(p *Pool, b *BlockTable) { p.pages[b.pages[1]].parent = p.free[0] }, "lost its parent"},
		{"a hash of other tokens", func(p *Pool, b *BlockTable) { p.pages[b.pages[1]].hash++ }, "does not find"},
		{"a leaf without its place", func(p *Pool, b *BlockTable) { p.pages[p.leaves[0]].pos = -1 }, "place -1"},
		{"leaves out of order", func(p *Pool, b *BlockTable) { p.pages[p.leaves[0]].used = 1 << 40 }, "was used before"},
		{"a kid too many", func(p *Pool, b *BlockTable) { p.pages[b.pages[0]].kids++ }, "counts 2 kids"},
		{"a count of states", func(p *Pool, b *BlockTable) { p.count[Owned]++ }, "kept"},
		{"a free page that is not on the stack", func(p *Pool, b *BlockTable) { p.free = p.free[1:] }, "on the stack"},
		{"the evictable ones", func(p *Pool, b *BlockTable) { p.evictable++ }, "evictable"},
		{"a page on the stack that is not free", func(p *Pool, b *BlockTable) { p.free[0] = b.pages[0] }, "owned"},
		{"a free page that is there twice", func(p *Pool, b *BlockTable) { p.free[0] = p.free[2] }, "there twice"},
	} {
		p := NewPool(12, 2, 1)
		b := table(t, p, "abcd")
		for _, word := range []string{"efgh", "ijkl", "mnop"} {
			p.Release(table(t, p, word))
		}
		if err := p.Check(); err != nil || len(p.free) < 3 || len(p.leaves) < 2 {
			t.Fatal("the pool is not as this test needs it:", err, p.Count())
		}
		c.break_(p, b)
		if err := p.Check(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: Check says %v, want …%s…", c.broken, err, c.says)
		}
	}
}

// TestCheckOwnersFinds: a page that a table holds and the pool does not know
// of, and the other way round.
func TestCheckOwnersFinds(t *testing.T) {
	p := NewPool(8, 2, 1)
	a, b := table(t, p, "abcd"), table(t, p, "efgh")
	p.Quarantine(b)
	if err := p.CheckOwners([]*BlockTable{a, b}); err != nil {
		t.Fatal(err)
	}
	for _, tables := range [][]*BlockTable{{a}, {b}, {a, b, b}, {a, a, b}} {
		if err := p.CheckOwners(tables); err == nil || !strings.Contains(err.Error(), "account for") {
			t.Errorf("%d tables: %v", len(tables), err)
		}
	}
}
