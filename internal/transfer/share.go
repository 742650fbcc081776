//metronome:pure

package transfer

import (
	"fmt"
	"strconv"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Rank r of n holds the KV heads [r*H/n, (r+1)*H/n). D rank d and P rank p are
// linked when their ranges meet, and their link carries the heads they share:
//
//	D TP = P TP   d meets p = d
//	D TP > P TP   d meets p = d / (D/P); each p meets D/P ranks of D
//	D TP < P TP   d meets p = d*(P/D) … (d+1)*(P/D)-1
//
// which is the mapping of SGLang for models without MLA.

// share is what one link carries: heads [head, head+heads) of the whole model,
// in slices. A slice is as many heads of one page in one layer as fit in a
// frame; the last may be shorter. Nearly always there is one slice.
type share struct {
	head, heads int
	dHead       int // the first of them, counted from D rank's own first
	pHead       int // the same at P
	slice       int // heads in a slice
	slices      int
	lead        bool // the link of D rank 0 with P rank 0: FIRST comes here
}

// newShare says what D rank d of dn and P rank p of pn share; false: nothing.
// The geometry and both sizes have been checked by checkGeometry.
func newShare(g kv.Geometry, dn, d, pn, p int) (share, bool) {
	dLow, dHigh := d*g.Heads/dn, (d+1)*g.Heads/dn
	pLow, pHigh := p*g.Heads/pn, (p+1)*g.Heads/pn
	low, high := max(dLow, pLow), min(dHigh, pHigh)
	if low >= high {
		return share{}, false
	}
	s := share{head: low, heads: high - low, dHead: low - dLow, pHead: low - pLow, lead: d == 0 && p == 0}
	s.slice = min(s.heads, maxPayload/g.ExtentBytes(1))
	s.slices = (s.heads + s.slice - 1) / s.slice
	return s, true
}

// bounds gives the heads of slice i, counted from the share's first.
func (s *share) bounds(i int) (head, heads int) {
	head = i * s.slice
	return head, min(s.slice, s.heads-head)
}

// pairs is how many links join dn ranks with pn: dn + pn - gcd(dn, pn).
func pairs(dn, pn int) int {
	a, b := dn, pn
	for b != 0 {
		a, b = b, a%b
	}
	return dn + pn - a
}

// checkGeometry tells whether pages of this geometry can be sent at all, and
// whether its heads divide over tp ranks.
func checkGeometry(g kv.Geometry, tp int) error {
	switch {
	case g.Layers < 1 || g.Layers > maxLayers:
		return fmt.Errorf("%d layers, there must be 1 to %d", g.Layers, maxLayers)
	case g.Heads < 1 || g.Heads > maxHeads:
		return fmt.Errorf("%d KV heads, there must be 1 to %d", g.Heads, maxHeads)
	case g.TokenBytes < 1 || g.PageSize < 1:
		return fmt.Errorf("pages of %d tokens with %d bytes a token and head", g.PageSize, g.TokenBytes)
	case g.PageSize > maxPayload/g.TokenBytes:
		return fmt.Errorf("one head of one page has %d × %d bytes, a frame carries at most %d: use smaller pages",
			g.PageSize, g.TokenBytes, maxPayload)
	case tp < 1 || g.Heads%tp != 0:
		return fmt.Errorf("%d KV heads do not divide over TP %d", g.Heads, tp)
	}
	return nil
}

// facts is what must be equal, or not told, on both sides of a link.
type facts struct {
	fingerprint, dtype string
	geometry           kv.Geometry
}

// differ names the first fact in which P and D differ, with both values. The
// fingerprint covers the others, so it comes last.
func differ(p, d facts) (string, bool) {
	pg, dg := p.geometry, d.geometry
	for _, f := range []struct{ what, p, d string }{
		{"page size", strconv.Itoa(pg.PageSize), strconv.Itoa(dg.PageSize)},
		{"KV dtype", word(p.dtype), word(d.dtype)},
		{"number of layers", strconv.Itoa(pg.Layers), strconv.Itoa(dg.Layers)},
		{"number of KV heads", strconv.Itoa(pg.Heads), strconv.Itoa(dg.Heads)},
		{"size of one token's KV in one head in bytes", strconv.Itoa(pg.TokenBytes), strconv.Itoa(dg.TokenBytes)},
		{"model fingerprint", p.fingerprint, d.fingerprint},
	} {
		if f.p != "" && f.d != "" && f.p != f.d {
			return fmt.Sprintf("%s differs: prefill has %s, decode has %s", f.what, f.p, f.d), true
		}
	}
	return "", false
}

// word: "auto" says as little as nothing.
func word(dtype string) string {
	if dtype == "auto" {
		return ""
	}
	return dtype
}
