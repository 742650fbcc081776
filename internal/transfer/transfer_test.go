package transfer

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/metronome-serve/metronome/internal/kv"
)

// big has heads that fill a frame, so that a page travels in slices.
var big = kv.Geometry{Layers: 2, Heads: 4, TokenBytes: 150 << 10, PageSize: 4}

// TestTransfer: whole prompts arrive bit for bit, whatever the TP sizes, the
// chunks, the prefix that D holds, and the order of GRANT, Bind and compute.
func TestTransfer(t *testing.T) {
	for _, c := range []struct {
		g                             kv.Geometry
		dn, pn                        int
		tokens, prefix, cached, chunk int
		late                          bool // computed before the grant
	}{
		{small, 1, 1, 16, 0, 0, 16, false},
		{small, 1, 1, 17, 0, 0, 5, false},
		{small, 1, 1, 17, 8, 4, 5, false},
		{small, 1, 1, 17, 8, 12, 5, true},
		{small, 2, 1, 17, 0, 0, 5, false},
		{small, 1, 2, 17, 0, 0, 5, false},
		{small, 4, 2, 33, 4, 0, 7, false},
		{small, 2, 4, 33, 4, 0, 7, true},
		{small, 4, 4, 33, 4, 0, 7, true},
		{kv.Geometry{Layers: 2, Heads: 6, TokenBytes: 4, PageSize: 4}, 3, 2, 33, 4, 8, 7, true},
		{big, 1, 1, 5, 0, 0, 5, false},
		{big, 2, 1, 9, 4, 0, 3, true},
	} {
		t.Run(fmt.Sprintf("D%d_P%d_%d_%d_%d_%v", c.dn, c.pn, c.tokens, c.prefix, c.cached, c.late), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, options{g: c.g, dn: c.dn, pn: c.pn, pages: c.g.PagesFor(c.tokens) + 6})
				n := c.g.PagesFor(c.tokens)
				pp, dp := pagesFrom(3, n), pagesFrom(5, n-c.prefix/c.g.PageSize)
				first := First{Token: 7, Seed: 1 << 63, Logprob: -0.5, Top: []TokenLogprob{{7, -0.5}, {9, -3}}, Cached: c.cached, PromptTokens: c.tokens}
				open := func() {
					r.r.Open(GrantSpec{Grant: 11, Room: 5, Links: r.links, Prefix: c.prefix, Tokens: c.tokens, Pages: dp})
					synctest.Wait()
				}
				run := func() {
					r.s.Open(1, SendSpec{Room: 5, Tokens: c.tokens, Cached: c.cached, Pages: pp})
					r.compute(1, c.cached, c.tokens, c.chunk)
					r.s.First(1, first)
				}
				if c.late {
					run()
					open()
				} else {
					open()
					run()
				}
				g := pick[*Granted](&r.pLog)
				if len(g) != 1 || g[0].Room != 5 || g[0].Prefix != c.prefix || g[0].Tokens != c.tokens {
					t.Fatalf("granted %+v", g)
				}
				if len(pick[*Landed](&r.dLog)) != 0 {
					t.Fatal("landed before Bind")
				}
				r.s.Bind(1, g[0].Key)
				synctest.Wait()
				l := pick[*Landed](&r.dLog)
				if len(l) != 1 || l[0].Grant != 11 {
					t.Fatalf("D's events: %v", r.dLog.all)
				}
				if d := cmp.Diff(first, l[0].First); d != "" {
					t.Error(d)
				}
				if !r.same(pp[c.prefix/c.g.PageSize:], dp) {
					t.Error("pages differ")
				}
				if got := pick[*Received](&r.pLog); len(got) != 1 || got[0].Req != 1 {
					t.Errorf("P's events: %v", r.pLog.all)
				}
				if len(r.s.rooms.sends) != 0 || len(r.dBad.n)+len(r.pBad.n) != 0 {
					t.Error("sends left, or frames rejected", r.dBad.n, r.pBad.n)
				}
				r.close()
			})
		})
	}
}
