package transfer

import (
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/kv"
)

// TestEndsOfLinksThatHaveGone: an end whose link has gone has nothing to write,
// and what still comes for it changes nothing.
func TestEndsOfLinksThatHaveGone(t *testing.T) {
	g := kv.Geometry{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 8}
	d, p := NewDecodeEnd(g, make([]Memory, 1), 4), NewPrefillEnd(g, make([]Memory, 1), 4)
	d.Leave(7, "gone")
	d.Finish(7)
	d.Notice(7, 1, false)
	p.Leave(7, "gone")
	p.Done(7)
	if n := len(d.Next(7)) + len(p.Next(7)) + len(p.Busy(7)) + len(d.Events()) + len(p.Events()); n > 0 {
		t.Errorf("%d bytes and events", n)
	}
}

// TestEndsRefuse: what cannot be a link or a frame.
func TestEndsRefuse(t *testing.T) {
	g := kv.Geometry{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 8}
	d, p := NewDecodeEnd(g, make([]Memory, 2), 4), NewPrefillEnd(g, make([]Memory, 2), 4)
	if d.Join(1, 0, Welcome{TP: 2}, 1, "p:1") == nil {
		t.Error("a decode rank takes a link to a prefill rank with whom it shares no head")
	}
	if p.Join(1, 0, Hello{}, 2, 1) == nil {
		t.Error("a prefill rank takes a link to a decode rank with whom it shares no head")
	}
	if err := d.Join(2, 0, Welcome{TP: 2}, 0, "p:1"); err != nil {
		t.Fatal(err)
	}
	if err := p.Join(2, 0, Hello{}, 2, 0); err != nil {
		t.Fatal(err)
	}
	ping := Ping()
	unknown := append([]byte(nil), ping...)
	unknown[3] = 255
	for _, frame := range [][]byte{nil, ping[:headSize-1], append(append([]byte(nil), ping...), 0), unknown} {
		if _, err := d.Take(0, 2, frame); err == nil {
			t.Errorf("the decode end takes %x", frame)
		}
		if err := p.Take(2, frame); err == nil {
			t.Errorf("the prefill end takes %x", frame)
		}
	}
	if err := p.Take(2, ping); err != nil {
		t.Error(err)
	}
	if len(p.Next(2)) == 0 {
		t.Error("PING is not answered")
	}
}

// TestGeometryBounds: pages that no frame can carry are refused.
func TestGeometryBounds(t *testing.T) {
	good := kv.Geometry{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 8}
	if err := checkGeometry(good, 2); err != nil {
		t.Fatal(err)
	}
	for _, g := range []kv.Geometry{
		{Layers: 0, Heads: 2, PageSize: 4, TokenBytes: 8}, {Layers: maxLayers + 1, Heads: 2, PageSize: 4, TokenBytes: 8},
		{Layers: 1, Heads: 0, PageSize: 4, TokenBytes: 8}, {Layers: 1, Heads: maxHeads + 2, PageSize: 4, TokenBytes: 8},
		{Layers: 1, Heads: 2, PageSize: 0, TokenBytes: 8}, {Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 0},
		{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: maxPayload}, {Layers: 1, Heads: 3, PageSize: 4, TokenBytes: 8},
	} {
		if checkGeometry(g, 2) == nil {
			t.Errorf("%+v over 2 ranks is taken", g)
		}
	}
}

// TestBadSumOfControl: a control frame whose checksum is wrong breaks its link,
// whatever it says.
func TestBadSumOfControl(t *testing.T) {
	g := kv.Geometry{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 8}
	d, p := NewDecodeEnd(g, make([]Memory, 1), 4), NewPrefillEnd(g, make([]Memory, 1), 4)
	if d.Join(1, 0, Welcome{TP: 1}, 0, "p:1") != nil || p.Join(1, 0, Hello{}, 1, 0) != nil {
		t.Fatal("no link")
	}
	grants := func(b []byte) []byte { return appendGrants(b, []uint64{1, 2}) }
	busy := appendFrame(nil, kindBusy, 0, grants)
	if _, err := d.Take(0, 1, busy); err != nil {
		t.Fatal(err)
	}
	busy[headSize] ^= 1
	if _, err := d.Take(0, 1, busy); err == nil {
		t.Error("decode takes BUSY with a wrong checksum")
	}
	credit := appendFrame(nil, kindCredit, 0, func(b []byte) []byte { return append(b, 0, 0, 0, 0, 0, 0, 0, 0) })
	credit[headSize] ^= 1
	if err := p.Take(1, credit); err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("prefill takes CREDIT with a wrong checksum: %v", err)
	}
}

// TestOpenRefuses: a grant that its own core has made wrongly does not go out;
// each thing that can be wrong is enough.
func TestOpenRefuses(t *testing.T) {
	good := GrantSpec{Grant: 1, Room: 1, Prefix: 4, Tokens: 9, Pages: []kv.Page{1, 2}, Links: []uint64{1}}
	for name, spoil := range map[string]func(*GrantSpec){
		"no number":         func(s *GrantSpec) { s.Grant = 0 },
		"a negative room":   func(s *GrantSpec) { s.Room = -1 },
		"a negative prefix": func(s *GrantSpec) { s.Prefix = -4 },
		"a part of a page":  func(s *GrantSpec) { s.Prefix = 3 },
		"no tokens":         func(s *GrantSpec) { s.Tokens = 4; s.Prefix = 8 },
		"a page too few":    func(s *GrantSpec) { s.Pages = s.Pages[:1] },
		"no link":           func(s *GrantSpec) { s.Links = nil },
		"good":              func(*GrantSpec) {},
		"good: one token":   func(s *GrantSpec) { s.Prefix, s.Tokens, s.Pages = 0, 1, s.Pages[:1] },
	} {
		func() {
			defer func() {
				if good := strings.HasPrefix(name, "good"); (recover() == nil) != good {
					t.Errorf("%s: opened is %v", name, !good)
				}
			}()
			spec := good
			spoil(&spec)
			newTable(kv.Geometry{Layers: 1, Heads: 2, PageSize: 4, TokenBytes: 8}, 4).open(0, spec)
		}()
	}
}

// TestWindowExactly: a frame that takes all the credit there is may begin.
func TestWindowExactly(t *testing.T) {
	w := newWindow(10)
	if !w.fits(10) || w.fits(11) {
		t.Errorf("of 10 bytes: 10 fit is %v, 11 is %v", w.fits(10), w.fits(11))
	}
	w.take(10)
	if w.fits(1) {
		t.Error("1 byte fits into none")
	}
}

// TestStringBounds: a string may be as long as is allowed and no longer; what
// we write ourselves is cut.
func TestStringBounds(t *testing.T) {
	for text, good := range map[string]bool{"abc": true, "abcd": false} {
		c := cursor{b: appendStr(nil, text, 100)}
		if got := c.str("it", 3); (c.bad == "") != good || good && got != text {
			t.Errorf("%q of at most 3 bytes: %q, %s", text, got, c.bad)
		}
	}
	c := cursor{b: appendStr(nil, "abcd", 3)}
	if got := c.str("it", 3); got != "abc" || c.bad != "" {
		t.Errorf("cut to 3 bytes: %q, %s", got, c.bad)
	}
}
