package transfer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/metronome-serve/metronome/internal/kv"
)

// TestFramesRoundTrip: what one side writes, the other reads.
func TestFramesRoundTrip(t *testing.T) {
	name := rapid.StringN(1, 40, maxName)
	u31 := rapid.IntRange(0, math.MaxInt32)
	rapid.Check(t, func(t *rapid.T) {
		g := kv.Geometry{Layers: rapid.IntRange(1, maxLayers).Draw(t, "layers"), Heads: rapid.IntRange(1, maxHeads).Draw(t, "heads"),
			TokenBytes: rapid.IntRange(1, maxPayload).Draw(t, "bytes"), PageSize: rapid.IntRange(1, maxPayload).Draw(t, "page")}
		tp := rapid.IntRange(1, 65535).Draw(t, "tp")
		h := hello{Hello: Hello{name.Draw(t, "i"), u31.Draw(t, "dp"), name.Draw(t, "f"), name.Draw(t, "k")}, token: name.Draw(t, "token"),
			tp: tp, rank: rapid.IntRange(0, tp-1).Draw(t, "rank"), dp: u31.Draw(t, "d"), cp: u31.Draw(t, "c"), tpr: u31.Draw(t, "t"), pp: u31.Draw(t, "p"),
			expect: name.Draw(t, "e"), geometry: g, credit: rapid.Uint64Range(minCredit, maxCredit).Draw(t, "credit")}
		var h2 hello
		check(t, h2.parse(h.append(nil)), h, h2)

		dp := rapid.IntRange(1, math.MaxInt32).Draw(t, "dps")
		w := welcome{Welcome: Welcome{name.Draw(t, "i"), name.Draw(t, "f"), tp, dp, rapid.IntRange(0, dp-1).Draw(t, "dpr"), g.PageSize, name.Draw(t, "k")}, rank: h.rank, geometry: g}
		var w2 welcome
		check(t, w2.parse(w.append(nil)), w, w2)

		m := grantMsg{room: rapid.Int64Min(0).Draw(t, "room"), digest: rapid.Uint64().Draw(t, "digest"), dRanks: tp, tokens: rapid.IntRange(1, maxTokens).Draw(t, "tokens"), pages: rapid.IntRange(0, maxTokens).Draw(t, "pages")}
		m.prefix = rapid.IntRange(0, m.tokens).Draw(t, "prefix")
		var m2 grantMsg
		check(t, m2.parse(kindGrant, m.append(nil)), m, m2)
		m.recompute = rapid.SliceOfN(rapid.Int32(), 1, 200).Draw(t, "recompute")
		m.tokens, m.prefix, m.index = len(m.recompute), 0, rapid.IntRange(0, maxTokens).Draw(t, "index")
		m.sampling = rapid.SliceOfN(rapid.Byte(), 1, 100).Draw(t, "sampling")
		check(t, m2.parse(kindRecompute, m.append(nil)), m, m2)

		f := First{Token: rapid.Int32Min(0).Draw(t, "token"), Seed: rapid.Uint64().Draw(t, "seed"), Logprob: rapid.Float32().Draw(t, "logprob"),
			PromptTokens: rapid.IntRange(1, maxTokens).Draw(t, "prompt")}
		f.Cached = rapid.IntRange(0, f.PromptTokens).Draw(t, "cached")
		for range rapid.IntRange(0, MaxTop).Draw(t, "top") {
			f.Top = append(f.Top, TokenLogprob{rapid.Int32().Draw(t, "id"), -1})
		}
		var f2 First
		check(t, f2.parse(f.append(nil)), f, f2)

		c := &Cause{name.Draw(t, "code"), rapid.StringN(0, 100, maxText).Draw(t, "text")}
		c2, err := parseEnd(appendEnd(nil, c))
		check(t, err, c, c2)

		a := head{kind: kindData, size: rapid.Uint32Range(0, maxPayload).Draw(t, "size"), grant: rapid.Uint64Min(1).Draw(t, "grant"),
			layer: rapid.Uint32().Draw(t, "layer"), index: rapid.Uint32().Draw(t, "index"), count: rapid.Uint32().Draw(t, "count"),
			head: rapid.Uint16().Draw(t, "head"), heads: rapid.Uint16().Draw(t, "heads"), sum: rapid.Uint32().Draw(t, "sum")}
		var b [headSize]byte
		a.put(&b)
		a2, err := parseHead(&b, false)
		check(t, err, a, a2)
	})
}

func check[T any](t *rapid.T, err error, want, got T) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(hello{}, welcome{}, grantMsg{}, head{})); d != "" {
		t.Fatal(d)
	}
}

// TestEveryCutPayload: no prefix of a payload is taken for a whole one.
func TestEveryCutPayload(t *testing.T) {
	h := goodHello(small)
	w := welcome{Welcome: Welcome{Instance: "p", TP: 1, DP: 1}, geometry: small}
	g := grantMsg{room: 1, dRanks: 1, tokens: 3, pages: 1}
	again := g
	again.recompute, again.sampling = []int32{1, 2, 3}, []byte{4}
	f := First{PromptTokens: 3, Top: []TokenLogprob{{1, -1}}}
	for name, c := range map[string]struct {
		b     []byte
		parse func([]byte) error
	}{
		"HELLO":     {h.append(nil), new(hello).parse},
		"WELCOME":   {w.append(nil), new(welcome).parse},
		"REFUSE":    {(&refuse{"a", "b"}).append(nil), new(refuse).parse},
		"GRANT":     {g.append(nil), func(b []byte) error { return new(grantMsg).parse(kindGrant, b) }},
		"RECOMPUTE": {again.append(nil), func(b []byte) error { return new(grantMsg).parse(kindRecompute, b) }},
		"FIRST":     {f.append(nil), new(First).parse},
		"END":       {appendEnd(nil, &Cause{"a", "b"}), func(b []byte) error { _, err := parseEnd(b); return err }},
		"ABORT":     {make([]byte, 8), func(b []byte) error { _, err := parseRoom(kindAbort, b); return err }},
		"CREDIT":    {make([]byte, 8), func(b []byte) error { _, err := parseCredit(b); return err }},
	} {
		if err := c.parse(c.b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for n := range c.b {
			if c.parse(c.b[:n]) == nil {
				t.Errorf("%s: the first %d of %d bytes are taken", name, n, len(c.b))
			}
		}
		if c.parse(append(c.b, 0)) == nil {
			t.Errorf("%s: a byte too many is taken", name)
		}
	}
}

// reseal turns fuzz input into frames that get past the checksums: a head's
// spare first byte says which of magic, size and checksums are made right.
func reseal(data []byte) []byte {
	var out []byte
	le := binary.LittleEndian
	for len(data) > 0 {
		var h [headSize]byte
		n := copy(h[:], data)
		data = data[n:]
		fix := h[0]
		size := min(int(le.Uint32(h[4:])%4096), len(data))
		if fix&1 == 0 {
			le.PutUint32(h[4:], uint32(size))
		}
		h[0], h[1], h[2] = 'K', 'V', version
		if fix&2 == 0 {
			le.PutUint32(h[32:], crc32.Checksum(data[:size], castagnoli))
		}
		if fix&4 == 0 {
			le.PutUint32(h[36:], crc32.Checksum(h[:36], castagnoli))
		}
		out = append(append(out, h[:]...), data[:size]...)
		data = data[size:]
	}
	return out
}

// replay gives a wire whose peer has said all of b and hung up.
func replay(b []byte, toP bool) *wire {
	ours, theirs := newConns(len(b) + 1)
	theirs.Write(b)
	theirs.CloseWrite()
	return newWire(ours, toP, time.Minute, time.Minute)
}

// fuzzSeeds are frames in the form that reseal reads.
func fuzzSeeds(f *testing.F, frames ...[]byte) {
	for _, b := range frames {
		b = bytes.Clone(b)
		b[0] = 0
		f.Add(b)
	}
	f.Add(bytes.Join(frames, nil))
}

// FuzzFramesToP: whatever D sends, P neither crashes nor keeps anything of it. Shows F-79.
func FuzzFramesToP(f *testing.F) {
	g := grantMsg{room: 1, dRanks: 1, tokens: 8, pages: 2}
	again := g
	again.recompute = make([]int32, 8)
	fuzzSeeds(f, grantFrame(1, g), appendFrame(nil, kindRecompute, 2, again.append), control(kindAbort, 1, make([]byte, 8)...),
		control(kindReceived, 1), control(kindCredit, 0, 1, 0, 0, 0, 0, 0, 0, 0), control(kindPing, 0), control(kindQueued, 0, make([]byte, 8)...),
		appendFrame(nil, kindHello, 0, goodHello(small).append))
	f.Fuzz(func(t *testing.T, data []byte) {
		var s *Sender
		s, err := NewSender(SenderConfig{Geometry: small, Memory: newArena(small, 1, 8).memory(), MaxParked: 3,
			Welcome: Welcome{Instance: "p", DP: 1}, Now: func() time.Duration { return 0 },
			Events: func(e SenderEvent) {
				if g, ok := e.(*Granted); ok && g.Room%2 == 0 { // every other room is served at once
					req := s.lastPeer + 1
					s.lastPeer++
					s.Open(req, SendSpec{Room: g.Room, Tokens: g.Tokens, Pages: make([]kv.Page, small.PagesFor(g.Tokens))})
					s.Bind(req, g.Key)
					s.First(req, First{PromptTokens: g.Tokens})
				}
			}})
		if err != nil {
			t.Fatal(err)
		}
		sh, _ := newShare(small, 1, 0, 1, 0)
		p := &port{wire: replay(reseal(data), true), s: s, mem: s.cfg.Memory[0], outlet: outlet{peer: 1, dTP: 1, share: sh,
			window: newWindow(minCredit), streams: map[uint64]*stream{}}}
		s.ports[&p.outlet] = p
		s.peers[p.name] = &peer{1, 1}
		err = p.frames()
		if b := (*breach)(nil); err == nil || !errors.As(err, &b) && err.Error() != "the peer closed the connection" {
			t.Errorf("%T %v", err, err)
		}
		checkRooms(t, s.rooms, map[int]*outlet{1: &p.outlet})
		p.kill(err)
		s.leave(p)
		if len(s.rooms.rooms)+len(s.rooms.owners)+len(s.peers)+len(s.ports)+p.parked+p.held != 0 {
			t.Error("something is left")
		}
	})
}

// FuzzFramesToD: whatever P sends, D neither crashes nor writes into a page
// that it did not open, and each grant ends as it must. Shows F-79.
func FuzzFramesToD(f *testing.F) {
	ok := First{PromptTokens: 8}
	size := 2 * small.ExtentBytes(4)
	data := func(layer uint32) []byte { return dataFrame(head{grant: 1, layer: layer, count: 2, heads: 4}, size) }
	fuzzSeeds(f, data(0), data(1), data(2), appendFrame(nil, kindFirst, 1, ok.append), control(kindEnd, 1, 0, 0, 0, 0, 0),
		control(kindEnd, 2, appendEnd(nil, &Cause{"internal", "x"})...), control(kindBusy, 0, 1, 0, 0, 0, 0, 0, 0, 0), control(kindPong, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		var events log[Event]
		arena := newArena(small, 1, 8)
		all := pagesFrom(0, 8)
		arena.poison(all)
		r, err := NewReceiver(ReceiverConfig{Geometry: small, Memory: arena.memory(), Hello: Hello{Instance: "d"}, Events: events.add,
			MaxCredit: minCredit, Now: func() time.Duration { return 0 }})
		if err != nil {
			t.Fatal(err)
		}
		sh, _ := newShare(small, 1, 0, 1, 0)
		l := &link{r: r, wire: replay(reseal(data), false), intake: newIntake(minCredit), lane: lane{link: 1, share: sh, addr: "p", pairs: 1}}
		r.links[1] = l
		r.table.join(&l.lane)
		r.Open(GrantSpec{Grant: 1, Room: 1, Links: []uint64{1}, Tokens: 8, Pages: []kv.Page{2, 3}})
		r.Open(GrantSpec{Grant: 2, Room: 2, Links: []uint64{1}, Prefix: 4, Tokens: 12, Pages: []kv.Page{5, 4}})
		l.read()
		for _, id := range []uint64{1, 2} {
			landed, failed, quiesced := (&rig{dLog: log[Event]{all: events.all}}).outcome(id)
			if landed+failed != 1 || quiesced != failed {
				t.Errorf("grant %d: landed %d, failed %d, quiesced %d", id, landed, failed, quiesced)
			}
		}
		if !arena.poisoned([]kv.Page{0, 1, 6, 7}) {
			t.Error("written into pages that were not granted")
		}
		if len(r.table.grants)+len(r.links)+len(l.parts) != 0 {
			t.Error("something is left")
		}
	})
}
