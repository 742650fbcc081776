package transfer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// raw is a peer that the test plays itself.
type raw struct {
	t *testing.T
	*conn
}

func (p *raw) send(b ...[]byte) {
	for _, b := range b {
		p.conn.Write(b)
	}
	synctest.Wait()
}

// frame reads one frame.
func (p *raw) frame() (head, []byte) {
	p.t.Helper()
	var hb [headSize]byte
	if _, err := io.ReadFull(p.conn, hb[:]); err != nil {
		p.t.Fatalf("no frame: %v", err)
	}
	le := binary.LittleEndian
	h, err := parseHead(&hb, kind(hb[3]).toP())
	if err != nil {
		p.t.Fatal(err)
	}
	body := make([]byte, le.Uint32(hb[4:]))
	if _, err := io.ReadFull(p.conn, body); err != nil {
		p.t.Fatal(err)
	}
	return h, body
}

// ended tells whether the other side has closed.
func (p *raw) ended() bool {
	synctest.Wait()
	p.conn.in.mu.Lock()
	defer p.conn.in.mu.Unlock()
	return p.conn.in.eof
}

func goodHello(g kv.Geometry) *hello {
	return &hello{Hello: Hello{Instance: "rogue", Fingerprint: "fp", KVDType: "f16"}, tp: 1, geometry: g, credit: 4 << 20}
}

func control(k kind, grant uint64, payload ...byte) []byte {
	return appendFrame(nil, k, grant, func(b []byte) []byte { return append(b, payload...) })
}

// edit changes a frame's head and seals it again.
func edit(b []byte, f func(b []byte)) []byte {
	b = append([]byte(nil), b...)
	f(b)
	seal(b)
	return b
}

// raw links a D of the test's own to the rig's Sender.
func (r *rig) raw() *raw {
	d, p := newConns(r.buffer)
	r.lns[0].conns <- p
	return &raw{r.t, d}
}

func grantFrame(id uint64, m grantMsg) []byte { return appendFrame(nil, kindGrant, id, m.append) }

// TestRogueDecode: a D that lies in any field loses its link, or only the
// room where no more is at stake; P goes on serving others.
func TestRogueDecode(t *testing.T) {
	good := grantMsg{room: 7, dRanks: 1, prefix: 0, tokens: 8, pages: 2}
	with := func(f func(*grantMsg)) []byte {
		m := good
		f(&m)
		return grantFrame(5, m)
	}
	recompute := func(f func(*grantMsg)) []byte {
		m := good
		m.recompute = make([]int32, 8)
		f(&m)
		return appendFrame(nil, kindRecompute, 5, m.append)
	}
	ok := grantFrame(5, good)
	for _, c := range []struct {
		name, why string
		frames    [][]byte
	}{
		{"not KV", whyHead, [][]byte{edit(ok, func(b []byte) { b[0] = 'X' })}},
		{"other version", whyHead, [][]byte{edit(ok, func(b []byte) { b[2] = 2 })}},
		{"head checksum", whyHead, [][]byte{append(ok[:36:36], append([]byte{1, 2, 3, 4}, ok[40:]...)...)}},
		{"type 0", whyHead, [][]byte{edit(ok, func(b []byte) { b[3] = 0 })}},
		{"type 64", whyHead, [][]byte{edit(ok, func(b []byte) { b[3] = 64 })}},
		{"type 255", whyHead, [][]byte{edit(ok, func(b []byte) { b[3] = 255 })}},
		{"a frame of P's", whyHead, [][]byte{control(kindPong, 0)}},
		{"long GRANT", whyHead, [][]byte{edit(ok, func(b []byte) { b[4]++ })}},
		{"endless RECOMPUTE", whyHead, [][]byte{edit(recompute(func(*grantMsg) {}), func(b []byte) { b[6], b[7] = 0xff, 0xff })}},
		{"GRANT of nothing", whyHead, [][]byte{edit(ok, func(b []byte) { b[8] = 0 })}},
		{"PING with a grant", whyHead, [][]byte{control(kindPing, 3)}},
		{"GRANT with a layer", whyHead, [][]byte{edit(ok, func(b []byte) { b[16] = 1 })}},
		{"GRANT with heads", whyHead, [][]byte{edit(ok, func(b []byte) { b[30] = 1 })}},
		{"cut GRANT", whyPayload, [][]byte{control(kindGrant, 5, 1, 2, 3)}},
		{"room of 64 bits", whyPayload, [][]byte{with(func(m *grantMsg) { m.room = -1 })}},
		{"ranks", whyPayload, [][]byte{with(func(m *grantMsg) { m.dRanks = 2 })}},
		{"odd prefix", whyPayload, [][]byte{with(func(m *grantMsg) { m.prefix = 3 })}},
		{"long prefix", whyPayload, [][]byte{with(func(m *grantMsg) { m.prefix = 12 })}},
		{"no tokens", whyPayload, [][]byte{with(func(m *grantMsg) { m.tokens = 0 })}},
		{"endless prompt", whyPayload, [][]byte{with(func(m *grantMsg) { m.tokens = math.MaxUint32 })}},
		{"too few pages", whyPayload, [][]byte{with(func(m *grantMsg) { m.pages = 1 })}},
		{"endless pages", whyPayload, [][]byte{with(func(m *grantMsg) { m.pages = math.MaxUint32 })}},
		{"the same grant twice", whyDuplicate, [][]byte{ok, ok}},
		{"RECOMPUTE of fewer", whyPayload, [][]byte{recompute(func(m *grantMsg) { m.recompute = m.recompute[1:] })}},
		{"RECOMPUTE that claims more", whyPayload, [][]byte{control(kindRecompute, 5, append(good.append(nil),
			0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f)...)}},
		{"RECOMPUTE with endless sampling", whyPayload, [][]byte{recompute(func(m *grantMsg) { m.sampling = make([]byte, MaxSample+1) })}},
		{"RECEIVED early", whyOrder, [][]byte{ok, control(kindReceived, 5)}},
		{"CREDIT of nothing", whyCredit, [][]byte{control(kindCredit, 0, make([]byte, 8)...)}},
		{"CREDIT too much", whyCredit, [][]byte{control(kindCredit, 0, 1, 0, 0, 0, 0, 0, 0, 0)}},
		{"CREDIT that overflows", whyCredit, [][]byte{control(kindCredit, 0, 255, 255, 255, 255, 255, 255, 255, 255)}},
		{"HELLO again", whyOrder, [][]byte{appendFrame(nil, kindHello, 0, goodHello(small).append)}},
		{"PING checksum", whySum, [][]byte{edit(control(kindPing, 0), func(b []byte) { b[32] = 1 })}},
		{"QUEUED with a grant", whyHead, [][]byte{control(kindQueued, 3, make([]byte, 8)...)}},
		{"QUEUED of a room of 64 bits", whyPayload, [][]byte{control(kindQueued, 0, 255, 255, 255, 255, 255, 255, 255, 255)}},
		{"ABORT checksum", whySum, [][]byte{edit(control(kindAbort, 0, make([]byte, 8)...), func(b []byte) { b[32]++ })}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, options{})
				r.serve()
				p := r.raw()
				p.send(appendFrame(nil, kindHello, 0, goodHello(small).append))
				if h, _ := p.frame(); h.kind != kindWelcome {
					t.Fatalf("%v in answer to HELLO", h.kind)
				}
				p.send(c.frames...)
				if !p.ended() {
					t.Error("the link lives on")
				}
				if r.pBad.of(c.why) != 1 || len(r.pBad.n) != 1 {
					t.Errorf("rejected %v, want one %s", r.pBad.n, c.why)
				}
				p.Close()
				r.works(50)
				r.close()
			})
		})
	}
}

// works checks that the rig's own link delivers a room.
func (r *rig) works(id uint64) {
	r.t.Helper()
	m := r.room(id, 9, 20)
	r.compute(id, 0, 9, 9)
	r.s.First(id, First{PromptTokens: 9})
	r.grant(m)
	synctest.Wait()
	if landed, _, _ := r.outcome(id); landed != 1 || !r.same(m.pp, m.dp) {
		r.t.Errorf("a room of another link did not land: %v", r.dLog.all)
	}
}

// TestRogueDecodeRoom: what fails one room only. Shows F-29.
func TestRogueDecodeRoom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{sender: func(c *SenderConfig) { c.MaxParked = 3 }})
		p := r.raw()
		p.send(appendFrame(nil, kindHello, 0, goodHello(small).append))
		p.frame()
		end := func(grant uint64, code string) {
			t.Helper()
			h, body := p.frame()
			cause, err := parseEnd(body)
			if h.kind != kindEnd || h.grant != grant || err != nil || cause == nil || cause.Code != code {
				t.Errorf("%v for grant %d with %v; want END for %d with %s", h.kind, h.grant, cause, grant, code)
			}
		}
		g := func(id uint64, room int64) []byte {
			return grantFrame(id, grantMsg{room: room, dRanks: 1, tokens: 8, pages: 2})
		}
		p.send(edit(g(1, 1), func(b []byte) { b[32]++ }))
		end(1, CodeTransferFailed)

		for id := uint64(2); id < 5; id++ {
			p.send(g(id, int64(id)))
		}
		p.send(g(5, 5)) // a fourth room
		end(5, CodeOverloaded)

		r.grant(&testRoom{id: 3, tokens: 8, dp: pagesFrom(0, 2)}) // room 3 belongs to the rogue
		synctest.Wait()
		if f := pick[*Failed](&r.dLog); len(f) != 1 || f[0].Cause.Code != CodeInvalid {
			t.Errorf("%v", r.dLog.all)
		}
		// Refuse, ABORT of a parked room, ABORT of nothing, a notice.
		granted := pick[*Granted](&r.pLog)
		r.s.Refuse(granted[0].Key, &Cause{"not_found", "no such room"})
		synctest.Wait()
		end(2, "not_found")
		p.send(control(kindAbort, 3, make([]byte, 8)...), control(kindAbort, 77, make([]byte, 8)...), control(kindAbort, 0, 9, 0, 0, 0, 0, 0, 0, 0))
		closed := pick[*Closed](&r.pLog)
		if len(closed) != 2 || closed[0].Key != granted[1].Key || closed[0].Room != 3 || closed[1].Key.Grant != 0 || closed[1].Room != 9 {
			t.Errorf("closed %+v", closed)
		}
		p.send(g(6, 6)) // there is room again
		if n := len(pick[*Granted](&r.pLog)); n != 4 {
			t.Errorf("granted %d", n)
		}
		p.Close()
		synctest.Wait()
		if n := len(pick[*Closed](&r.pLog)); n != 4 {
			t.Errorf("closed %d rooms in all, want 4", n)
		}
		if fmt.Sprint(r.pBad.n) != "map[bad_crc:1 foreign_room:1 overloaded:1]" {
			t.Error(r.pBad.n)
		}
		r.close()
	})
}

// TestGrantFlood: a D that grants without end and reads nothing is cut off;
// what it makes P keep is bounded. Shows F-29.
func TestGrantFlood(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{sender: func(c *SenderConfig) { c.MaxParked = 10 }, buffer: 4 << 10})
		p := r.raw()
		p.send(appendFrame(nil, kindHello, 0, goodHello(small).append))
		p.frame()
		for id := uint64(1); id < 5000 && !p.ended(); id++ {
			p.conn.Write(grantFrame(id, grantMsg{room: int64(id), dRanks: 1, tokens: 8, pages: 2}))
		}
		if !p.ended() || r.pBad.of(whyFull) == 0 {
			t.Errorf("ended %v, rejected %v", p.ended(), r.pBad.n)
		}
		p.Close()
		r.close()
	})
}

// TestHeldRecompute: parked RECOMPUTEs hold bounded memory.
func TestHeldRecompute(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{})
		r.s.mu.Lock()
		r.s.rooms.mostHeld = 1 << 20
		r.s.mu.Unlock()
		p := r.raw()
		p.send(appendFrame(nil, kindHello, 0, goodHello(small).append))
		p.frame()
		go io.Copy(io.Discard, p.conn)
		m := grantMsg{dRanks: 1, tokens: 20_000, pages: 5_000, recompute: make([]int32, 20_000)}
		for id := range uint64(50) {
			m.room = int64(id)
			p.send(appendFrame(nil, kindRecompute, id+1, m.append))
		}
		if n := len(pick[*Granted](&r.pLog)); n != 1<<20/80_000 || r.pBad.of(whyFull) != 50-n {
			t.Errorf("%d rooms parked, rejected %v", n, r.pBad.n)
		}
		p.Close()
		r.close()
	})
}

// rawP is a P of the test's own for a Receiver with one open grant of two pages.
func rawP(t *testing.T) (*rig, *raw) {
	ours, theirs := newConns(64 << 10)
	r := newRig(t, options{unlinked: true, receiver: func(c *ReceiverConfig) {
		c.MaxCredit = minCredit
		c.Dial = func(context.Context, string) (net.Conn, error) { return ours, nil }
	}})
	p := &raw{t, theirs}
	go func() {
		p.frame()
		w := welcome{Welcome: Welcome{Instance: "p1", TP: 1, DP: 1}, geometry: r.g}
		p.conn.Write(appendFrame(nil, kindWelcome, 0, w.append))
	}()
	if _, err := r.r.Dial(context.Background(), LinkSpec{Link: 1, Addr: "p0"}); err != nil {
		t.Fatal(err)
	}
	r.links = []uint64{1}
	r.da.poison(pagesFrom(0, 64))
	r.grant(&testRoom{id: 5, tokens: 8, dp: pagesFrom(10, 2)})
	synctest.Wait()
	if h, _ := p.frame(); h.kind != kindGrant {
		t.Fatal(h.kind)
	}
	return r, p
}

// dataFrame is DATA with a right checksum.
func dataFrame(h head, size int) []byte {
	b := make([]byte, headSize+size)
	h.kind, h.size = kindData, uint32(size)
	h.put((*[headSize]byte)(b))
	seal(b)
	return b
}

// TestRoguePrefill: a P that lies in any field loses its link before a byte
// is written anywhere but into pages that D opened for it. Shows F-71.
func TestRoguePrefill(t *testing.T) {
	g := small
	good := head{grant: 5, layer: 0, index: 0, count: 2, head: 0, heads: 4}
	size := 2 * g.ExtentBytes(4)
	with := func(f func(*head)) []byte {
		h := good
		f(&h)
		return dataFrame(h, size)
	}
	first := First{Token: 1, PromptTokens: 8}
	firstFrame := func(f First) []byte { return appendFrame(nil, kindFirst, 5, f.append) }
	all := [][]byte{with(func(h *head) {}), with(func(h *head) { h.layer = 1 }), with(func(h *head) { h.layer = 2 })}
	for _, c := range []struct {
		name, why string
		frames    [][]byte
	}{
		{"layer", whyRange, [][]byte{with(func(h *head) { h.layer = 3 })}},
		{"last layer", whyRange, [][]byte{with(func(h *head) { h.layer = math.MaxUint32 })}},
		{"index", whyRange, [][]byte{with(func(h *head) { h.index = 1 })}},
		{"index that overflows", whyRange, [][]byte{with(func(h *head) { h.index, h.count = math.MaxUint32, math.MaxUint32 })}},
		{"count 0", whyRange, [][]byte{dataFrame(head{grant: 5, heads: 4}, 0)}},
		{"count", whyRange, [][]byte{with(func(h *head) { h.count = 3 })}},
		{"head", whyRange, [][]byte{with(func(h *head) { h.head = 1 })}},
		{"last head", whyRange, [][]byte{with(func(h *head) { h.head = math.MaxUint16 })}},
		{"heads 0", whyRange, [][]byte{with(func(h *head) { h.heads = 0 })}},
		{"heads", whyRange, [][]byte{with(func(h *head) { h.heads = 5 })}},
		{"fewer heads", whyRange, [][]byte{with(func(h *head) { h.heads = 2 })}},
		{"size", whyRange, [][]byte{dataFrame(good, size-1)}},
		{"size 0", whyRange, [][]byte{dataFrame(good, 0)}},
		{"twice", whyDuplicate, [][]byte{all[0], all[0]}},
		{"half of it twice", whyDuplicate, [][]byte{all[0], dataFrame(head{grant: 5, index: 1, count: 1, heads: 4}, size/2)}},
		{"FIRST twice", whyOrder, [][]byte{firstFrame(first), firstFrame(first)}},
		{"FIRST with a negative token", whyPayload, [][]byte{firstFrame(First{Token: -1, PromptTokens: 8})}},
		{"FIRST with too much cached", whyPayload, [][]byte{firstFrame(First{PromptTokens: 8, Cached: 9})}},
		{"FIRST that claims more top tokens", whyPayload, [][]byte{control(kindFirst, 5, append((&first).append(nil)[:24], 9, 0)...)}},
		{"END with status 2", whyPayload, [][]byte{control(kindEnd, 5, 2, 0, 0, 0, 0)}},
		{"END ok with a cause", whyPayload, [][]byte{control(kindEnd, 5, 0, 1, 0, 'x', 0, 0)}},
		{"cut END", whyPayload, [][]byte{control(kindEnd, 5)}},
		{"cut BUSY", whyPayload, [][]byte{control(kindBusy, 0, 1, 2, 3)}},
		{"WELCOME again", whyOrder, [][]byte{control(kindWelcome, 0)}},
		{"REFUSE late", whyOrder, [][]byte{control(kindRefuse, 0)}},
		{"a frame of D's", whyHead, [][]byte{control(kindPing, 0)}},
		{"HTTP", whyHead, [][]byte{[]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, p := rawP(t)
				p.send(c.frames...)
				if e := pick[*LinkEnded](&r.dLog); len(e) != 1 || r.dBad.of(c.why) != 1 {
					t.Errorf("ended %v, rejected %v, want %s", e, r.dBad.n, c.why)
				}
				if l, f, q := r.outcome(5); l != 0 || f != 1 || q != 1 {
					t.Errorf("landed %d, failed %d, quiesced %d", l, f, q)
				}
				if !r.da.poisoned(pagesFrom(0, 10)) || !r.da.poisoned(pagesFrom(12, 52)) {
					t.Error("written into pages that were not granted")
				}
				p.Close()
				r.close()
			})
		})
	}
}

// TestRoguePrefillRoom: what fails one room only, or nothing; the link lives on. Shows F-71.
func TestRoguePrefillRoom(t *testing.T) {
	size := 2 * small.ExtentBytes(4)
	good := head{grant: 5, count: 2, heads: 4}
	first := First{PromptTokens: 7}
	ok := First{PromptTokens: 8}
	for _, c := range []struct {
		name, why string
		frame     []byte
		fails     string
	}{
		{"payload checksum", whySum, edit(dataFrame(good, size), func(b []byte) { b[32]++ }), "checksum"},
		{"FIRST checksum", whySum, edit(appendFrame(nil, kindFirst, 5, ok.append), func(b []byte) { b[32]++ }), "checksum"},
		{"END checksum", whySum, edit(control(kindEnd, 5, 0, 0, 0, 0, 0), func(b []byte) { b[32]++ }), "checksum"},
		{"END before the pages", "", control(kindEnd, 5, 0, 0, 0, 0, 0), "6 extents missing"},
		{"another prompt", "", appendFrame(nil, kindFirst, 5, first.append), "prompt of 7 tokens, decode has 8"},
		{"END failed", "", appendFrame(nil, kindEnd, 5, func(b []byte) []byte { return appendEnd(b, &Cause{"internal", "broken"}) }), "broken"},
		{"unknown grant", whyUnknown, dataFrame(head{grant: 6, layer: 99, count: 7}, 5000), ""},
		{"END of an unknown grant", "", control(kindEnd, 6, 0, 0, 0, 0, 0), ""},
		{"FIRST of an unknown grant", "", appendFrame(nil, kindFirst, 6, ok.append), ""},
		{"BUSY of an unknown grant", "", control(kindBusy, 0, make([]byte, 80)...), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, p := rawP(t)
				p.send(c.frame)
				if n := len(pick[*LinkEnded](&r.dLog)); n != 0 || p.ended() {
					t.Error("the link ended")
				}
				if c.why != "" && r.dBad.of(c.why) != 1 {
					t.Errorf("rejected %v, want %s", r.dBad.n, c.why)
				}
				f := pick[*Failed](&r.dLog)
				if c.fails == "" && len(f) != 0 || c.fails != "" && (len(f) != 1 || !strings.Contains(f[0].Cause.Message, c.fails)) {
					t.Errorf("failed %+v, want %q", f, c.fails)
				}
				if c.fails != "" {
					if h, _ := p.frame(); h.kind != kindAbort || h.grant != 5 {
						t.Errorf("%v after the failure, want ABORT", h.kind)
					}
				}
				p.Close()
				r.close()
			})
		})
	}
}

// TestSilence: a peer that says nothing for ten seconds is closed by name on
// both sides; one that only answers PING is not.
func TestSilence(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{})
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(pick[*LinkEnded](&r.dLog)); n != 0 || r.ports() != 1 {
			t.Error("an idle link ended")
		}
		if n := len(pick[*LinkHeard](&r.dLog)); n < 59 || n > 61 {
			t.Errorf("%d LinkHeard in a minute", n)
		}
		end := r.ends[r.links[0]]
		end.in.set(func() { end.in.hold = end.in.read })
		end.out.set(func() { end.out.hold = end.out.read })
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if len(pick[*LinkEnded](&r.dLog)) != 0 || r.ports() != 1 {
			t.Error("the link ended early")
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if e := pick[*LinkEnded](&r.dLog); len(e) != 1 || e[0].Cause != "silent for 10s" || r.ports() != 0 {
			t.Errorf("ended %v, %d ports", e, r.ports())
		}
		r.close()
	})
}

// TestTrickle: a frame that comes byte by byte does not last for ever.
func TestTrickle(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, p := rawP(t)
		go func() {
			for _, b := range dataFrame(head{grant: 5, count: 2, heads: 4}, 2*small.ExtentBytes(4)) {
				if _, err := p.conn.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(900 * time.Millisecond)
			}
		}()
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if e := pick[*LinkEnded](&r.dLog); len(e) != 1 {
			t.Errorf("ended %v", e)
		}
		p.Close()
		r.close()
	})
}

// TestStalledOurselves: a deadline that is noticed late means that this process
// was stopped; the wait is armed once more, and only once.
func TestStalledOurselves(t *testing.T) {
	a, b := newConns(1 << 10)
	defer b.Close()
	w := newWire(a, true, time.Second, time.Second)
	timeout := func() error { return w.fault(errTimeout{}, &w.mu.read, a.SetReadDeadline) }
	w.mu.read = due{at: time.Now().Add(-time.Hour), length: time.Minute}
	if err := timeout(); err != nil {
		t.Error(err)
	}
	if until := time.Until(w.mu.read.at); until < 50*time.Second {
		t.Errorf("armed for %v", until)
	}
	w.mu.read.at = time.Now().Add(-time.Hour)
	if timeout() == nil {
		t.Error("armed a third time")
	}
	w.kill(errors.New("over"))
	if err := timeout(); err == nil || err.Error() != "over" {
		t.Error(err)
	}
	a.Close()
}

// TestSecondLook: what lies in the socket when this process wakes is read,
// however long it stood still: the deadline that has passed meanwhile does not
// end the link. A peer that took nothing meanwhile has its chance as well.
func TestSecondLook(t *testing.T) {
	for stood := 8 * time.Second; stood <= 13*time.Second; stood += 250 * time.Millisecond {
		bubble(t, func(t *testing.T) {
			a, b := newConns(headSize)
			defer a.Close()
			defer b.Close()
			w := newWire(a, true, 10*time.Second, 10*time.Second)
			if err := w.armRead(w.silence); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Write(appendFrame(nil, kindPing, 0, nil)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(stood) // nobody reads: we stand still
			if err := w.fill(w.in[:]); err != nil {
				t.Errorf("read after %v: %v", stood, err)
			}
			if err := w.armWrite(w.slow); err != nil {
				t.Fatal(err)
			}
			time.Sleep(stood)
			if _, err := a.Write(w.in[:]); err != nil {
				err = w.fault(err, &w.mu.write, a.SetWriteDeadline)
				if _, again := a.Write(w.in[:]); err != nil || again != nil {
					t.Errorf("write after %v: %v, %v", stood, err, again)
				}
			}
		})
	}
}

// TestSecondLookOfRevoked: the two seconds for a frame that is being written
// into revoked pages end the link no sooner for our own standstill, and no
// later for a peer that is silent.
func TestSecondLookOfRevoked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		a, b := newConns(1 << 10)
		defer a.Close()
		defer b.Close()
		w := newWire(a, true, 10*time.Second, 10*time.Second)
		for _, stood := range []time.Duration{1100 * time.Millisecond, 2100 * time.Millisecond, time.Minute} {
			w.armRead(w.silence)
			w.hurry(hurryTime)
			b.Write(make([]byte, headSize))
			time.Sleep(stood)
			if err := w.fill(w.in[:]); err != nil {
				t.Errorf("after %v: %v", stood, err)
			}
		}
		w.armRead(w.silence)
		w.hurry(hurryTime)
		start := time.Now()
		if err := w.fill(w.in[:]); err == nil || time.Since(start) != hurryTime {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

type errTimeout struct{}

func (errTimeout) Error() string        { return "i/o timeout" }
func (errTimeout) Is(target error) bool { return target.Error() == "i/o timeout" }
