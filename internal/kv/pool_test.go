package kv

import (
	"slices"
	"testing"
)

// text is n tokens: those of the word from its i-th letter on, so that texts
// with the same beginning share it.
func text(word string) []int32 {
	t := make([]int32, len(word))
	for i, c := range []byte(word) {
		t[i] = int32(c)
	}
	return t
}

func wantCount(t *testing.T, p *Pool, free, owned, cached, quarantined int) {
	t.Helper()
	if got, want := p.Count(), (Count{free, owned, cached, quarantined}); got != want {
		t.Errorf("pages are %v, want %v", got, want)
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

// table takes pages for the word and puts them into the index.
func table(t *testing.T, p *Pool, word string) *BlockTable {
	t.Helper()
	b := new(BlockTable)
	p.Match(b, text(word))
	if !p.Extend(b, len(word)) {
		t.Fatalf("no pages for %q: %v", word, p.Count())
	}
	p.Insert(b, text(word))
	return b
}

func wantPages(t *testing.T, b *BlockTable, want ...Page) {
	t.Helper()
	if !slices.Equal(b.Pages(), want) {
		t.Errorf("pages %v, want %v", b.Pages(), want)
	}
}

func TestPagesFor(t *testing.T) {
	for _, c := range []struct{ tokens, size, want int }{
		{0, 16, 0}, {1, 16, 1}, {16, 16, 1}, {17, 16, 2}, {5, 1, 5},
	} {
		if got := PagesFor(c.tokens, c.size); got != c.want {
			t.Errorf("PagesFor(%d, %d) = %d, want %d", c.tokens, c.size, got, c.want)
		}
	}
}

func TestExtendTakesAllOrNothing(t *testing.T) {
	p := NewPool(3, 4, 0)
	var a, b BlockTable
	if !p.Extend(&a, 5) || !p.Extend(&a, 8) {
		t.Fatal("8 tokens do not fit 3 pages of 4")
	}
	wantPages(t, &a, 0, 1)
	if p.Extend(&b, 5) {
		t.Error("5 tokens fit the one page that is left")
	}
	wantCount(t, p, 1, 2, 0, 0)
	gen := p.Generation(0)
	p.Release(&a)
	if !p.Extend(&b, 12) || p.Generation(0) != gen+1 {
		t.Errorf("page 0 is given out anew with generation %d, want %d", p.Generation(0), gen+1)
	}
	wantCount(t, p, 0, 3, 0, 0)
}

func TestMatchIsWholePages(t *testing.T) {
	p := NewPool(8, 2, 0)
	p.Release(table(t, p, "abcde")) // two whole pages and a half
	wantCount(t, p, 6, 0, 2, 0)
	for _, c := range []struct {
		word string
		want int
	}{
		{"", 0}, {"a", 0}, {"ab", 2}, {"abc", 2}, {"abcd", 4}, {"abcdef", 4}, {"abxd", 2}, {"xbcd", 0}, {"cd", 0},
	} {
		var b BlockTable
		if got := p.Match(&b, text(c.word)); got != c.want || b.Shared()*2 != got {
			t.Errorf("Match(%q) = %d, %d pages shared; want %d", c.word, got, b.Shared(), c.want)
		}
		p.Release(&b)
	}
	wantCount(t, p, 6, 0, 2, 0)
}

func TestSharedPagesAreNotWritable(t *testing.T) {
	p := NewPool(8, 2, 0)
	a := table(t, p, "abcdx")
	b := table(t, p, "abcdy")
	wantPages(t, b, 0, 1, 3)
	for g, want := range []bool{false, false, true, true} {
		if p.Writable(Page(g)) != want {
			t.Errorf("page %d writable: %v, want %v", g, !want, want)
		}
	}
	p.Release(a)
	wantCount(t, p, 5, 3, 0, 0)
	p.Release(b)
	wantCount(t, p, 6, 0, 2, 0)
}

func TestEvictionTakesTheOldestLeafFirst(t *testing.T) {
	p := NewPool(5, 1, 0)
	p.Release(table(t, p, "abc")) // pages 0 1 2
	p.Release(table(t, p, "ax"))  // pages 0 3
	p.Release(table(t, p, "ab"))  // used again: 0 1
	var b BlockTable
	for _, want := range []Page{4, 2, 3, 1, 0} { // free; c; x; then b, then a, which lost its last kid
		if !p.Extend(&b, b.Len()+1) || b.Pages()[b.Len()-1] != want {
			t.Fatalf("pages are given out as %v, want next %d", b.Pages(), want)
		}
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if p.Extend(&b, 6) {
		t.Error("a sixth page came out of five")
	}
}

// A cached page that something in use hangs on is not available.
func TestAvailableIsExact(t *testing.T) {
	p := NewPool(4, 1, 0)
	a := table(t, p, "ab") // pages 0 1
	var b BlockTable
	p.Extend(&b, 2)
	p.Insert(&b, text("ac")) // page 2 holds a as well: b goes on under page 0 with its page 3
	wantPages(t, &b, 2, 3)
	p.Release(a)
	wantCount(t, p, 0, 2, 2, 0)
	if p.Available() != 1 {
		t.Errorf("%d available; page 1 can go, page 0 cannot while page 3 is in use", p.Available())
	}
	p.Release(&b)
	wantCount(t, p, 1, 0, 3, 0)
	if p.Available() != 4 {
		t.Errorf("%d available, want all", p.Available())
	}
}

// Hashes find candidates only: pages with the same hash are told apart by
// parent and tokens. Shows F-73.
func TestCollidingPagesAreToldApart(t *testing.T) {
	p := NewPool(4, 1, 0)
	var b BlockTable
	p.Extend(&b, 4)
	p.Insert(&BlockTable{}, nil) // makes the index
	p.index(0, none, 1, text("a"))
	p.index(1, none, 1, text("b"))
	p.index(2, 0, 1, text("a"))
	for _, c := range []struct {
		at   Page
		word string
		want Page
	}{{none, "a", 0}, {none, "b", 1}, {0, "a", 2}, {1, "a", none}, {0, "b", none}} {
		if got := p.find(1, c.at, text(c.word)); got != c.want {
			t.Errorf("below %d, %q is page %d, want %d", c.at, c.word, got, c.want)
		}
	}
}

// A leaf that is used again leaves the heap from its middle, and the others
// keep their order (here 6 must rise above 7 when it takes the place of 8).
func TestEvictionOrderAfterReuse(t *testing.T) {
	p := NewPool(9, 1, 0)
	for w := range int32(9) { // page w
		var b BlockTable
		p.Extend(&b, 1)
		p.Insert(&b, []int32{w})
		p.Release(&b)
	}
	for _, w := range []int32{3, 4, 1, 7} {
		p.Match(new(BlockTable), []int32{w})
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
	var b BlockTable
	p.Extend(&b, 5)
	wantPages(t, &b, 0, 2, 5, 6, 8)
}

func TestShareGivesTwinsBack(t *testing.T) {
	p := NewPool(4, 1, 0)
	a := table(t, p, "ab")
	var b BlockTable
	p.Extend(&b, 2)
	handed := b.Pages()
	p.Share(&b, text("ac"))
	wantPages(t, &b, 0, 3)
	if !slices.Equal(handed, []Page{2, 3}) {
		t.Errorf("pages that were handed out became %v", handed)
	}
	wantCount(t, p, 1, 3, 0, 0)
	p.Release(a)
	p.Release(&b)
	wantCount(t, p, 1, 0, 3, 0)
}

func TestQuarantine(t *testing.T) {
	p := NewPool(4, 1, 0)
	a := table(t, p, "ab")
	b := table(t, p, "ac")
	p.Quarantine(a) // page 0 is still b's
	wantCount(t, p, 1, 2, 0, 1)
	p.Release(b)
	wantCount(t, p, 1, 0, 1, 2)
	if p.Available() != 2 {
		t.Errorf("%d available, want the free page and the cached one", p.Available())
	}
	c := table(t, p, "abd") // shares what is in quarantine
	wantPages(t, c, 0, 1, 3)
	p.Lift(a)
	wantCount(t, p, 0, 3, 1, 0)
	p.Release(c)
	wantCount(t, p, 0, 0, 4, 0)
}

func TestAdoptedPagesKeepTheirOwner(t *testing.T) {
	p := NewPool(4, 1, 0)
	a := table(t, p, "ab")
	b := Adopted(a.Disown())
	if a.Len() != 0 || p.Count()[Owned] != 2 {
		t.Errorf("after the hand-over %d pages stayed, %v", a.Len(), p.Count())
	}
	p.Release(&b)
	wantCount(t, p, 2, 0, 2, 0)
}

// What breaks the accounts is a fault of the caller and does not pass.
// TestEmptied: a table that was given back names no page any more.
func TestEmptied(t *testing.T) {
	p := NewPool(8, 1, 0)
	a, b := table(t, p, "ab"), table(t, p, "cd")
	chances := p.Chances()
	p.Release(a)
	if p.Chances() == chances {
		t.Error("who waits for pages is not told of a return")
	}
	p.Quarantine(b)
	p.Lift(b)
	if a.Len() != 0 || b.Len() != 0 {
		t.Errorf("%d and %d pages", a.Len(), b.Len())
	}
}

// TestTwinGoesOn: a table that computed what the index has already goes on
// below the index's page, and its own pages stay outside.
func TestTwinGoesOn(t *testing.T) {
	p := NewPool(8, 2, 0)
	a := table(t, p, "abcd")
	var b BlockTable
	if !p.Extend(&b, 4) {
		t.Fatal("no pages")
	}
	p.Insert(&b, text("abcd"))
	if !p.Extend(&b, 6) {
		t.Fatal("no pages")
	}
	p.Insert(&b, text("abcdef"))
	wantCount(t, p, 3, 5, 0, 0)
	p.Release(&b)
	wantCount(t, p, 5, 2, 1, 0)
	if n := p.Match(&b, text("abcdefg")); n != 6 || b.Pages()[0] != a.Pages()[0] {
		t.Errorf("%d tokens are found", n)
	}
}

// TestTwinBelowAnIdlePage: the index has a page that nobody uses, and a table
// with a twin of it puts its next page below: the idle one is kept by that.
func TestTwinBelowAnIdlePage(t *testing.T) {
	p := NewPool(8, 2, 0)
	p.Release(table(t, p, "ab"))
	var b BlockTable
	if !p.Extend(&b, 4) {
		t.Fatal("no pages")
	}
	p.Insert(&b, text("abcd"))
	wantCount(t, p, 5, 2, 1, 0)
	if n := p.Available(); n != 5 {
		t.Errorf("%d pages can be had, want the free ones", n)
	}
	p.Release(&b)
	wantCount(t, p, 6, 0, 2, 0)
}

// TestHashSeesEverything: pages that differ in one token or in what is before
// them have other hashes, so that a chain in the index is short.
func TestHashSeesEverything(t *testing.T) {
	p := NewPool(8, 3, 0)
	seen := map[uint64]string{}
	for _, word := range []string{"abc", "xbc", "axc", "abx", "cba"} {
		for at := none; at < 3; at++ {
			h := p.hash(at, text(word))
			if other := seen[h]; other != "" {
				t.Errorf("%q after page %d has the hash of %s", word, at, other)
			}
			seen[h] = word
		}
	}
}

func TestMisusePanics(t *testing.T) {
	for name, f := range map[string]func(p *Pool, b *BlockTable){
		"released twice": func(p *Pool, b *BlockTable) {
			twin := *b
			p.Release(b)
			p.Release(&twin)
		},
		"lift without quarantine": func(p *Pool, b *BlockTable) { p.Lift(b) },
		"released in quarantine": func(p *Pool, b *BlockTable) {
			p.Quarantine(b)
			p.Release(b)
		},
		"extended in quarantine": func(p *Pool, b *BlockTable) {
			p.Quarantine(b)
			p.Extend(b, 4)
		},
		"insert in quarantine": func(p *Pool, b *BlockTable) {
			p.Quarantine(b)
			p.Insert(b, text("ab"))
		},
		"match into pages": func(p *Pool, b *BlockTable) { p.Match(b, text("ab")) },
		"empty pool":       func(*Pool, *BlockTable) { NewPool(0, 1, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("passed")
				}
			}()
			p := NewPool(4, 1, 0)
			f(p, table(t, p, "ab"))
		})
	}
}

func BenchmarkMatch(b *testing.B) {
	const tokens, size = 8192, 16
	p := NewPool(tokens/size, size, 1)
	prompt := make([]int32, tokens)
	for i := range prompt {
		prompt[i] = int32(i * 7)
	}
	var t BlockTable
	p.Extend(&t, tokens)
	p.Insert(&t, prompt)
	p.Release(&t)
	for b.Loop() {
		p.Match(&t, prompt)
		p.Release(&t)
	}
}
