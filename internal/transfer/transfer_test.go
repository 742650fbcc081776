package transfer

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/metronome-serve/metronome/internal/kv"
)

// big has heads that fill a frame, so that a page travels in slices.
var big = kv.Geometry{Layers: 1, Heads: 4, TokenBytes: 100 << 10, PageSize: 4}

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
				if r.sends() != 0 || len(r.dBad.n)+len(r.pBad.n) != 0 {
					t.Error("sends left, or frames rejected", r.dBad.n, r.pBad.n)
				}
				r.close()
			})
		})
	}
}

// TestRecompute: the tokens, the index and the sampling of a preempted request
// reach P once, joined over all links.
func TestRecompute(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{dn: 2, pn: 4})
		tokens := []int32{5, 6, 7, 8, 9}
		r.r.Open(GrantSpec{Grant: 3, Room: 9, Links: r.links, Tokens: 5, Pages: pagesFrom(4, 2), Recompute: tokens, Index: 2, Sampling: []byte("hot")})
		synctest.Wait()
		want := []*Granted{{Key: GrantKey{1, 3}, Room: 9, Tokens: 5, Recompute: tokens, Index: 2, Sampling: []byte("hot")}}
		if d := cmp.Diff(want, pick[*Granted](&r.pLog)); d != "" {
			t.Fatal(d)
		}
		r.s.Open(1, SendSpec{Room: 9, Tokens: 5, Pages: pagesFrom(8, 2)})
		r.s.Bind(1, GrantKey{1, 3})
		r.compute(1, 0, 5, 2)
		r.s.First(1, First{Token: 4, PromptTokens: 5})
		synctest.Wait()
		if l := pick[*Landed](&r.dLog); len(l) != 1 || l[0].First.Token != 4 || !r.same(pagesFrom(8, 2), pagesFrom(4, 2)) {
			t.Errorf("%v", r.dLog.all)
		}
		// What a frame cannot carry fails at once and by name.
		long := make([]int32, MaxRecompute+1)
		r.r.Open(GrantSpec{Grant: 4, Room: 10, Links: r.links, Tokens: len(long), Pages: make([]kv.Page, small.PagesFor(len(long))), Recompute: long})
		synctest.Wait()
		if f := pick[*Failed](&r.dLog); len(f) != 1 || f[0].Cause.Code != CodeTransferFailed {
			t.Errorf("%v", f)
		}
		r.close()
	})
}

// TestCredit: what is in flight stays within the credit, and none of it is
// lost to rooms that are taken back, fail, or carry a bad checksum.
func TestCredit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := kv.Geometry{Layers: 4, Heads: 1, TokenBytes: 64 << 10, PageSize: 4} // 1 MiB a page
		r := newRig(t, options{g: g, pages: 40, buffer: 64 << 20, receiver: func(c *ReceiverConfig) { c.MaxCredit = minCredit }})
		r.serve()
		in := r.stream(false)
		for id := uint64(1); id <= 12; id++ {
			in.set(func() { in.hold = in.read })
			m := r.room(id, 20, 2)
			r.compute(id, 0, 20, 20)
			r.s.First(id, First{PromptTokens: 20})
			r.grant(m)
			time.Sleep(3 * time.Second) // frames of BUSY come on top
			synctest.Wait()
			if n := in.writes - in.read; n < minCredit/2 || n > minCredit+4096 {
				t.Errorf("room %d: %d bytes in flight, credit is %d", id, n, minCredit)
			}
			switch id % 4 {
			case 0:
				r.r.Revoke(id)
			case 1:
				r.s.CloseSend(id, &Cause{"internal", "for the test"})
			case 2:
				in.set(func() { in.flip[in.read+700_000] = 1 })
			}
			in.set(func() { in.hold = -1 })
			synctest.Wait()
			if landed, failed, quiesced := r.outcome(id); landed != 1 && quiesced != 1 || id%4 == 3 && (landed != 1 || failed != 0) {
				t.Errorf("room %d: landed %d, failed %d, quiesced %d", id, landed, failed, quiesced)
			}
			r.s.mu.Lock()
			for o := range r.s.ports {
				if o.window.free < minCredit*3/4 {
					t.Errorf("room %d: %d bytes of credit came back", id, o.window.free)
				}
			}
			r.s.mu.Unlock()
		}
		r.close()
	})
}

// TestMailbox: a peer that takes nothing costs bounded memory and nobody's
// time: GRANTs that have not gone out are taken back with their ABORT.
func TestMailbox(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{buffer: 200, receiver: func(c *ReceiverConfig) { c.MaxGrants = 4 }})
		r.stream(true).set(func() { r.stream(true).hold = r.stream(true).read })
		r.r.mu.Lock()
		l := r.r.links[r.links[0]]
		r.r.mu.Unlock()
		start := time.Now()
		for id := uint64(1); id <= 5000; id++ {
			r.grant(&testRoom{id: id, tokens: 4, dp: pagesFrom(0, 1)})
			if id%3 == 0 {
				synctest.Wait()
			}
			r.r.Revoke(id)
			r.r.Notice(l.link, int64(id), false)
			r.r.mu.Lock()
			frames, notices := len(l.queue)-l.notices, l.notices
			r.r.mu.Unlock()
			if frames > 8 || notices > maxNotices {
				t.Fatalf("%d frames and %d notices wait", frames, notices)
			}
		}
		if time.Since(start) != 0 {
			t.Error("a call waited")
		}
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if len(pick[*LinkEnded](&r.dLog)) != 0 {
			t.Error("the link ended early")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if e := pick[*LinkEnded](&r.dLog); len(e) != 1 {
			t.Errorf("%v", e)
		}
		r.close()
	})
}

// TestBusy: P says each second that it has not forgotten a room, from its
// GRANT to its END; D tells of it once a second.
func TestBusy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{dn: 2})
		r.grant(&testRoom{id: 1, tokens: 8, dp: pagesFrom(0, 2)})
		time.Sleep(30*time.Second + 500*time.Millisecond)
		synctest.Wait()
		if n := len(pick[*GrantHeard](&r.dLog)); n < 28 || n > 31 {
			t.Errorf("heard %d times in 30 s", n)
		}
		r.r.Revoke(1)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := len(pick[*GrantHeard](&r.dLog)); n > 31 {
			t.Errorf("heard %d times", n)
		}
		r.close()
	})
}

// TestTwoCores: two cores of one decode worker number their grants alike, and
// are told apart.
func TestTwoCores(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{})
		p := r.raw()
		m := goodHello(small)
		m.Hello = Hello{Instance: "d1", DP: 1}
		p.send(appendFrame(nil, kindHello, 0, m.append), grantFrame(1, grantMsg{room: 1, dRanks: 1, tokens: 8, pages: 2}))
		synctest.Wait()                                           // it is first
		r.grant(&testRoom{id: 1, tokens: 8, dp: pagesFrom(0, 2)}) // the same room: refused
		r.grant(&testRoom{id: 2, tokens: 8, dp: pagesFrom(2, 2)})
		synctest.Wait()
		g := pick[*Granted](&r.pLog)
		if len(g) != 2 || g[0].Key != (GrantKey{2, 1}) || g[1].Key != (GrantKey{1, 2}) {
			t.Errorf("%+v", g)
		}
		p.Close()
		r.close()
	})
}

// TestShares: every head of every shape is carried by exactly one link, and
// the two ranks agree where it lies.
func TestShares(t *testing.T) {
	for _, heads := range []int{1, 2, 4, 6, 8, 12} {
		g := kv.Geometry{Layers: 1, Heads: heads, TokenBytes: 1 << 16, PageSize: 4}
		for dn := 1; dn <= heads; dn++ {
			for pn := 1; pn <= heads; pn++ {
				if checkGeometry(g, dn) != nil || checkGeometry(g, pn) != nil {
					continue
				}
				seen := make([]int, heads)
				links, leads := 0, 0
				for d := range dn {
					for p := range pn {
						s, ok := newShare(g, dn, d, pn, p)
						if !ok {
							continue
						}
						links++
						if s.lead {
							leads++
						}
						next := 0
						for i := range s.slices {
							first, n := s.bounds(i)
							if first != next || n < 1 || g.ExtentBytes(n) > maxPayload {
								t.Errorf("slice %d is %d+%d", i, first, n)
							}
							next += n
							for h := s.head + first; h < s.head+first+n; h++ {
								seen[h]++
							}
						}
						if next != s.heads || s.dHead+d*heads/dn != s.head || s.pHead+p*heads/pn != s.head {
							t.Errorf("D %d/%d, P %d/%d: %+v", d, dn, p, pn, s)
						}
					}
				}
				for h, n := range seen {
					if n != 1 {
						t.Errorf("D %d, P %d: head %d is carried %d times", dn, pn, h, n)
					}
				}
				if links != pairs(dn, pn) || leads != 1 {
					t.Errorf("D %d, P %d: %d links, pairs says %d; %d leads", dn, pn, links, pairs(dn, pn), leads)
				}
			}
		}
	}
	for _, c := range []struct{ dn, pn, pairs int }{{1, 1, 1}, {2, 1, 2}, {1, 2, 2}, {4, 2, 4}, {2, 4, 4}, {4, 4, 4}} {
		if n := pairs(c.dn, c.pn); n != c.pairs {
			t.Errorf("D %d, P %d: %d links, want %d", c.dn, c.pn, n, c.pairs)
		}
	}
}

// TestWindow: credit is exact on both sides, P never waits for ever, and
// misuse of our own panics.
func TestWindow(t *testing.T) {
	w, in := newWindow(1000), newIntake(1000)
	for i := range 1000 {
		n := 1 + i*37%700
		if !w.fits(n) {
			t.Fatalf("stuck with %d bytes of credit", w.free)
		}
		w.take(n)
		if c := in.read(n); c > 0 {
			if err := w.refill(c); err != nil {
				t.Fatal(err)
			}
		}
		if w.free != w.limit-in.owed || in.owed >= 250 {
			t.Fatalf("P has %d, D owes %d", w.free, in.owed)
		}
	}
	for _, n := range []uint64{0, uint64(in.owed) + 1, 1 << 63} {
		if w.refill(n) == nil {
			t.Errorf("CREDIT of %d is taken", n)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("taking more than there is does not panic")
		}
	}()
	w.take(int(w.free) + 1)
}
