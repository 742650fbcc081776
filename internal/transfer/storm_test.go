package transfer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// TestStorm: many rooms at once, taken back, failed, cut and dialled again at
// random. Pages are overwritten on both sides as soon as they are let go. What
// lands is right, and nothing is written or read after it was let go.
func TestStorm(t *testing.T) {
	for seed := range uint64(24) {
		shapes := [][2]int{{1, 1}, {2, 1}, {1, 2}, {4, 2}, {2, 4}}
		shape := shapes[seed%uint64(len(shapes))]
		t.Run(fmt.Sprintf("seed=%d_D%d_P%d", seed, shape[0], shape[1]), func(t *testing.T) {
			bubble(t, func(t *testing.T) { storm(t, seed, shape[0], shape[1]) })
		})
	}
}

const stormRooms, stormTokens = 60, 22

type stormRoom struct {
	testRoom
	want    map[string][]byte // what P computed
	revoked bool
}

func storm(t *testing.T, seed uint64, dn, pn int) {
	rng := rand.New(rand.NewPCG(seed, 1))
	n := small.PagesFor(stormTokens)
	r := newRig(t, options{dn: dn, pn: pn, pages: (stormRooms + 2) * n, buffer: 300})
	r.serve()
	rooms := map[uint64]*stormRoom{}
	var ids sync.Map // room number → *stormRoom, for the hooks
	serve := r.pLog.hook
	r.pLog.on(func(e SenderEvent) {
		serve(e)
		switch e := e.(type) {
		case *Granted:
			if !r.mine(e.Room) { // its request ended before
				r.s.Refuse(e.Key, &Cause{"not_found", "the request has ended"})
			}
		case *SendQuiesced:
			if m, ok := ids.Load(e.Req); ok {
				r.pa.poison(m.(*stormRoom).pp)
			}
		}
	})
	r.dLog.on(func(e Event) {
		if q, ok := e.(*Quiesced); ok {
			if m, ok := ids.Load(q.Grant); ok && !m.(*stormRoom).landed(r) {
				r.da.poison(m.(*stormRoom).dp)
			}
		}
	})
	for id := uint64(1); id <= stormRooms; id++ {
		m := &stormRoom{testRoom: testRoom{id: id, tokens: stormTokens - rng.IntN(8)}, want: map[string][]byte{}}
		k := small.PagesFor(m.tokens)
		m.pp, m.dp = pagesFrom(int(id)*n, k), pagesFrom(int(id)*n, k)
		r.pa.each(m.pp, func(layer, i, head int, b []byte) { m.want[fmt.Sprint(layer, i, head)] = bytes.Clone(b) })
		rooms[id] = m
		ids.Store(id, m)
		r.s.Open(id, SendSpec{Room: int64(id), Tokens: m.tokens, Pages: m.pp})
		steps := []func(){
			func() { r.grant(&m.testRoom) },
			func() { r.compute(id, 0, m.tokens, 1+rng.IntN(9)); r.s.First(id, First{PromptTokens: m.tokens}) },
		}
		rng.Shuffle(2, func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
		for _, f := range steps {
			f()
			r.disturb(rng, rooms, id)
		}
	}
	synctest.Wait()
	time.Sleep(time.Minute) // whatever was left half done is over now
	synctest.Wait()
	for id := range rooms {
		if r.mine(int64(id)) {
			r.s.CloseSend(id, &Cause{"deadline_exceeded", "the test ends"})
		}
	}
	synctest.Wait()
	landed := 0
	for id := uint64(1); id <= stormRooms; id++ {
		landed += rooms[id].verify(r)
	}
	t.Logf("%d of %d landed", landed, stormRooms)
	if landed == 0 {
		t.Error("nothing landed")
	}
	r.close()
}

// disturb does something harmful, sometimes.
func (r *rig) disturb(rng *rand.Rand, rooms map[uint64]*stormRoom, last uint64) {
	victim := rooms[1+rng.Uint64N(last)]
	switch rng.IntN(12) {
	case 0:
		victim.revoked = true
		r.r.Revoke(victim.id)
	case 1:
		r.s.CloseSend(victim.id, &Cause{"internal", "for the test"})
	case 2:
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond)
	case 3:
		if rng.IntN(3) == 0 { // one link breaks in the middle of something; all are dialled anew
			end := r.ends[r.links[rng.IntN(len(r.links))]]
			end.in.set(func() { end.in.cut = end.in.read + rng.IntN(200) })
			end.out.set(func() { end.out.cut = end.out.read + rng.IntN(200) })
			r.link()
		}
	case 4, 5, 6:
		runtime.Gosched()
	}
}

func (m *stormRoom) landed(r *rig) bool {
	landed, _, _ := r.outcome(m.id)
	return landed > 0
}

func (m *stormRoom) verify(r *rig) int {
	landed, failed, quiesced := r.outcome(m.id)
	switch {
	case landed == 1 && failed == 0 && (quiesced == 0 || m.revoked):
		r.da.each(m.dp, func(layer, i, head int, b []byte) {
			if !bytes.Equal(b, m.want[fmt.Sprint(layer, i, head)]) {
				r.t.Errorf("room %d landed wrong in layer %d, page %d, head %d", m.id, layer, i, head)
			}
		})
	case landed == 0 && (failed == 1 || m.revoked) && failed <= 1 && quiesced >= 1:
		if !r.da.poisoned(m.dp) {
			r.t.Errorf("a byte was written into room %d after it had quiesced", m.id)
		}
	default:
		r.t.Errorf("room %d: landed %d, failed %d, quiesced %d, revoked %v", m.id, landed, failed, quiesced, m.revoked)
	}
	return landed
}

// tcp is one P and one D over loopback.
func tcp(t testing.TB, g kv.Geometry, pages int, events func(Event), senderEvents func(*Sender, SenderEvent)) (*Sender, *Receiver, *arena, *arena) {
	pa, da := newArena(g, 1, pages), newArena(g, 1, pages)
	start := time.Now()
	now := func() time.Duration { return time.Since(start) }
	var s *Sender
	s, err := NewSender(SenderConfig{Geometry: g, Memory: pa.memory(), Now: now, Welcome: Welcome{Instance: "p", DP: 1},
		Events: func(e SenderEvent) { senderEvents(s, e) }})
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewReceiver(ReceiverConfig{Geometry: g, Memory: da.memory(), Now: now, Hello: Hello{Instance: "d"}, Events: events})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(ctx, ln, 0) })
	t.Cleanup(func() {
		r.Close()
		stop()
		wg.Wait()
	})
	if _, err := r.Dial(t.Context(), LinkSpec{Link: 1, Addr: ln.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	return s, r, pa, da
}

// realistic is the KV of a model of 1 to 3 billion parameters: 16 KiB a page and layer.
var realistic = kv.Geometry{Layers: 16, Heads: 4, TokenBytes: 256, PageSize: 16}

// TestTCP: a prompt arrives over real sockets, straight from arena to arena.
func TestTCP(t *testing.T) {
	const tokens = 600
	landed := make(chan Event, 100)
	received := make(chan struct{}, 1)
	s, r, pa, da := tcp(t, realistic, 80, func(e Event) { landed <- e }, func(s *Sender, e SenderEvent) {
		switch e := e.(type) {
		case *Granted:
			s.Bind(1, e.Key)
		case *Received:
			received <- struct{}{}
		}
	})
	for i := range pa.ranks[0] {
		pa.ranks[0][i] = byte(i * 7 >> 3)
	}
	pp, dp := pagesFrom(0, realistic.PagesFor(tokens)), pagesFrom(40, realistic.PagesFor(tokens))
	s.Open(1, SendSpec{Room: 1, Tokens: tokens, Pages: pp})
	r.Open(GrantSpec{Grant: 1, Room: 1, Links: []uint64{1}, Tokens: tokens, Pages: dp})
	for n := 150; n <= tokens; n += 150 {
		for l := range realistic.Layers {
			s.LayerDone(1, l, n)
		}
	}
	s.First(1, First{Token: 3, PromptTokens: tokens})
	for {
		e := <-landed
		if _, ok := e.(*Landed); ok {
			break
		} else if f, ok := e.(*Failed); ok {
			t.Fatal(f)
		}
	}
	<-received
	da.each(dp, func(layer, i, head int, b []byte) {
		if !bytes.Equal(b, pa.head(layer, pp[i], head)) {
			t.Fatalf("layer %d, page %d, head %d differ", layer, i, head)
		}
	})
}

// transferMany runs n rooms of the given tokens one after another over loopback
// and gives the payload bytes moved.
func transferMany(t testing.TB, g kv.Geometry, tokens int, n func() bool) int {
	landed := make(chan struct{}, 1)
	pages := g.PagesFor(tokens)
	s, r, _, _ := tcp(t, g, pages, func(e Event) {
		switch e := e.(type) {
		case *Landed:
			landed <- struct{}{}
		case *Failed:
			panic(e.Cause)
		}
	}, func(s *Sender, e SenderEvent) {
		if e, ok := e.(*Granted); ok {
			s.Bind(uint64(e.Room), e.Key)
		}
	})
	list := pagesFrom(0, pages)
	moved := 0
	for id := uint64(1); n(); id++ {
		s.Open(id, SendSpec{Room: int64(id), Tokens: tokens, Pages: list})
		for l := range g.Layers {
			s.LayerDone(id, l, tokens)
		}
		s.First(id, First{PromptTokens: tokens})
		r.Open(GrantSpec{Grant: id, Room: int64(id), Links: []uint64{1}, Tokens: tokens, Pages: list})
		<-landed
		moved += pages * g.PageBytes()
	}
	return moved
}

// TestNoAllocPerFrame: what a transfer allocates does not grow with its frames.
func TestNoAllocPerFrame(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	perRoom := func(layers int) float64 {
		g := kv.Geometry{Layers: layers, Heads: 1, TokenBytes: 3 << 10, PageSize: 16} // 48 KiB a page and layer: a frame each
		var before, after runtime.MemStats
		const rooms = 10
		i := 0
		transferMany(t, g, 16, func() bool {
			switch i++; i {
			case 3: // warmed up
				runtime.GC()
				runtime.ReadMemStats(&before)
			case 3 + rooms:
				runtime.ReadMemStats(&after)
				return false
			}
			return true
		})
		return float64(after.Mallocs-before.Mallocs) / rooms
	}
	few, many := perRoom(4), perRoom(204)
	t.Logf("%.1f allocations a room with 4 frames, %.1f with 204", few, many)
	if grown := (many - few) / 200; grown > 0.1 {
		t.Errorf("%.2f allocations a frame", grown)
	}
}

// BenchmarkLoopback moves prompts of 2,048 tokens over one link on loopback.
// The limit is what one core can copy into and out of the kernel while it sums
// every byte twice; BenchmarkLoopbackRaw is the same bytes from memory into a
// reader that looks at nothing.
func BenchmarkLoopback(b *testing.B) {
	for _, g := range []kv.Geometry{realistic, {Layers: 32, Heads: 8, TokenBytes: 512, PageSize: 16}, {Layers: 16, Heads: 1, TokenBytes: 256, PageSize: 16}} {
		b.Run(fmt.Sprintf("extent=%dKiB", g.ExtentBytes(g.Heads)>>10), func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			b.SetBytes(int64(g.PagesFor(2048) * g.PageBytes()))
			transferMany(b, g, 2048, func() bool {
				if i++; i == 2 {
					b.ResetTimer()
				}
				return i <= b.N+1
			})
		})
	}
}

func BenchmarkLoopbackRaw(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	src := make([]byte, 64<<20)
	for i := range src {
		src[i] = byte(i)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, MaxFrame)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
		}
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		for at := 0; at < len(src); at += MaxFrame {
			if _, err := c.Write(src[at : at+MaxFrame]); err != nil {
				b.Fatal(err)
			}
		}
	}
	c.Close()
	<-done
}

// BenchmarkNext is P's choice of the next frame with 64 rooms on a link.
func BenchmarkNext(b *testing.B) {
	g := kv.Geometry{Layers: 32, Heads: 8, TokenBytes: 256, PageSize: 16}
	t := newRooms(g, 1, 4096)
	sh, _ := newShare(g, 1, 0, 1, 0)
	o := &outlet{peer: 1, dTP: 1, share: sh, window: newWindow(maxCredit), streams: map[uint64]*stream{}}
	fill := func() {
		for id := uint64(1); id <= 64; id++ {
			t.closeSend(id, nil)
			t.grant(o, id, &grantMsg{room: int64(id), dRanks: 1, tokens: 4096, pages: 256})
			t.open(id, SendSpec{Tokens: 4096, Pages: make([]kv.Page, 256)})
			t.bind(0, id, GrantKey{1, id})
			for l := range g.Layers {
				t.layerDone(id, l, 4096)
			}
		}
		t.events, t.wake = t.events[:0], t.wake[:0]
	}
	fill()
	b.ReportAllocs()
	for b.Loop() {
		f, ok := t.next(o)
		if !ok {
			b.StopTimer()
			fill()
			b.StartTimer()
			continue
		}
		t.done(o)
		o.window.free += int64(f.head.size)
	}
}
