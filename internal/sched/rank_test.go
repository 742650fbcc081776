package sched

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMapRank walks the table of SGLang's bootstrap protocol: D:P in TP, then
// cp and pp of the prefill.
func TestMapRank(t *testing.T) {
	p := func(tp, cp, pp int) ParallelInfo { return ParallelInfo{TP: tp, CP: cp, DP: 1, PP: pp} }
	split := p(1, 2, 1)
	split.LayerSplit = true
	shard := p(2, 4, 1)
	shard.KVSharding = true
	for _, c := range []struct {
		name   string
		d      ParallelInfo
		tp, pp int
		p      ParallelInfo
		want   RankMap
	}{
		{"1:1", p(1, 1, 1), 0, 0, p(1, 1, 1), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 1}},
		{"2:2 rank 1", p(2, 1, 1), 1, 0, p(2, 1, 1), RankMap{TP: []int{1}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 1}},
		{"4:2 rank 0", p(4, 1, 1), 0, 0, p(2, 1, 1), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0}, DstRanks: 2, Responses: 1}},
		{"4:2 rank 1", p(4, 1, 1), 1, 0, p(2, 1, 1), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0}, DstRanks: 2, Responses: 1}},
		{"4:2 rank 3", p(4, 1, 1), 3, 0, p(2, 1, 1), RankMap{TP: []int{1}, CP: []int{0}, PP: []int{0}, DstRanks: 2, Responses: 1}},
		{"8:1 rank 5", p(8, 1, 1), 5, 0, p(1, 1, 1), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0}, DstRanks: 8, Responses: 1}},
		{"2:4 rank 0", p(2, 1, 1), 0, 0, p(4, 1, 1), RankMap{TP: []int{0, 1}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 2}},
		{"2:4 rank 1", p(2, 1, 1), 1, 0, p(4, 1, 1), RankMap{TP: []int{2, 3}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 2}},
		{"1:8", p(1, 1, 1), 0, 0, p(8, 1, 1), RankMap{TP: []int{0, 1, 2, 3, 4, 5, 6, 7}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 8}},
		{"pp 1 to 4", p(1, 1, 1), 0, 0, p(1, 1, 4), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0, 1, 2, 3}, DstRanks: 1, Responses: 4}},
		{"pp 1 to 2, tp 2:4", p(2, 1, 1), 1, 0, p(4, 1, 2), RankMap{TP: []int{2, 3}, CP: []int{0}, PP: []int{0, 1}, DstRanks: 1, Responses: 4}},
		{"pp 2 to 2", p(1, 1, 2), 0, 1, p(1, 1, 2), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{1}, DstRanks: 1, Responses: 1}},
		{"cp 2: the first has all", p(1, 1, 1), 0, 0, p(1, 2, 1), RankMap{TP: []int{0}, CP: []int{0}, PP: []int{0}, DstRanks: 1, Responses: 1}},
		{"cp 2, layers split", p(1, 1, 1), 0, 0, split, RankMap{TP: []int{0}, CP: []int{0, 1}, PP: []int{0}, DstRanks: 1, Responses: 2}},
		{"cp 4, cache sharded, tp 1:2", p(1, 1, 1), 0, 0, shard, RankMap{TP: []int{0, 1}, CP: []int{0, 1, 2, 3}, PP: []int{0}, DstRanks: 1, Responses: 8}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := mismatch(&c.d, 1, "p", &c.p); got != nil {
				t.Fatalf("a pair that can be mapped is refused: %v", got)
			}
			if diff := cmp.Diff(c.want, MapRank(&c.d, c.tp, c.pp, &c.p)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestMapRankCovers: every rank of ours has sources that exist, each P rank is
// asked for by exactly DstRanks of ours, and what fits no mapping is refused.
func TestMapRankCovers(t *testing.T) {
	for d := 1; d <= 16; d++ {
		for n := 1; n <= 16; n++ {
			local, p := ParallelInfo{TP: d, CP: 1, DP: 1, PP: 1}, ParallelInfo{TP: n, CP: 1, DP: 1, PP: 1}
			divides := d%n == 0 || n%d == 0
			if err := mismatch(&local, 1, "p", &p); (err == nil) != divides {
				t.Errorf("tp %d to %d: %v", d, n, err)
			}
			if !divides {
				continue
			}
			asked := make([]int, n)
			dst := 0
			for e := range d {
				m := MapRank(&local, e, 0, &p)
				dst = m.DstRanks
				for _, r := range m.TP {
					asked[r]++
				}
			}
			for r, by := range asked {
				if by != dst {
					t.Errorf("tp %d to %d: rank %d is asked for by %d of ours, it is told %d", d, n, r, by, dst)
				}
			}
		}
	}
}

// TestMalformed: sizes that cannot be are no mismatch but a bad answer.
func TestMalformed(t *testing.T) {
	ok := ParallelInfo{TP: 2, CP: 1, DP: 4, PP: 1, PageSize: 16}
	if why := malformed(&ok); why != "" {
		t.Errorf("a good answer is malformed: %s", why)
	}
	for _, change := range []func(*ParallelInfo){
		func(p *ParallelInfo) { p.TP = 0 },
		func(p *ParallelInfo) { p.TP = -1 },
		func(p *ParallelInfo) { p.CP = 0 },
		func(p *ParallelInfo) { p.DP = 0 },
		func(p *ParallelInfo) { p.DP = 1 << 40 },
		func(p *ParallelInfo) { p.PP = -7 },
		func(p *ParallelInfo) { p.PageSize = -1 },
		func(p *ParallelInfo) { p.TP, p.CP, p.PP = 512, 2, 2 },
	} {
		p := ok
		change(&p)
		if why := malformed(&p); !strings.HasPrefix(why, "malformed answer: ") {
			t.Errorf("%+v: %q", p, why)
		}
	}
}

// TestLinkSetPairs: the set of an uneven pair has one link for each pair of
// ranks and one address for each rank of the prefill.
func TestLinkSetPairs(t *testing.T) {
	for _, c := range []struct{ d, p, pp, pairs, ranks int }{
		{1, 1, 1, 1, 1}, {2, 2, 1, 2, 2}, {4, 2, 1, 4, 2}, {2, 4, 1, 4, 4}, {1, 8, 1, 8, 8}, {2, 4, 2, 8, 8},
	} {
		p := NewPeers(PeersConfig{Local: ParallelInfo{TP: c.d}})
		pr := p.newPeer("p")
		pr.facts = ParallelInfo{TP: c.p, CP: 1, DP: 1, PP: c.pp}
		s := p.linksOf(pr, 0)
		if len(s.pairs) != c.pairs || len(s.ranks) != c.ranks {
			t.Errorf("%+v: %d pairs, %d ranks", c, len(s.pairs), len(s.ranks))
		}
		seen := map[string]bool{}
		for _, pa := range s.pairs {
			key := fmt.Sprint(pa.local, pa.rank.key)
			if seen[key] {
				t.Errorf("%+v: %s twice", c, key)
			}
			seen[key] = true
		}
	}
}
