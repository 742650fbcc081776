package transfer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Everything that can happen to a transfer, at every byte that matters: each
// frame boundary, inside each head, and at the beginning, middle and end of each payload.

// play runs two rooms over one link up to a byte of one direction: nothing
// after it arrives. toP chooses the direction.
func play(t *testing.T, toP bool, at int) (r *rig, a, b *testRoom) {
	r = newRig(t, options{})
	r.serve()
	r.stream(toP).set(func() { r.stream(toP).hold = at })
	a, b = r.room(1, 9, 10), r.room(2, 10, 30)
	r.grant(a)
	r.grant(b)
	synctest.Wait()
	for _, m := range []*testRoom{a, b} {
		for from := 4; from < m.tokens+4; from += 4 {
			for layer := range r.g.Layers {
				r.s.LayerDone(m.id, layer, min(from, m.tokens))
				synctest.Wait()
			}
		}
		r.s.First(m.id, First{Token: 3, PromptTokens: m.tokens})
		synctest.Wait()
	}
	return r, a, b
}

func (r *rig) stream(toP bool) *pipe {
	end := r.ends[r.links[0]]
	if toP {
		return end.out
	}
	return end.in
}

// offsets gives the bytes that matter in one direction of play, and which of
// them lie inside a DATA frame after its head.
func offsets(t *testing.T, toP bool) (at []int, inside map[int]bool) {
	inside = map[int]bool{}
	var all []byte
	bubble(t, func(t *testing.T) {
		taps = func(d *conn) {
			p := d.in
			if toP {
				p = d.out
			}
			p.written = func(b []byte) { all = append(all, b...) }
		}
		r, _, _ := play(t, toP, -1)
		taps = nil
		r.close()
	})
	for pos, n := 0, 0; pos < len(all); n++ {
		size := int(binary.LittleEndian.Uint32(all[pos+4:]))
		if n > 0 { // the handshake has its own test
			at = append(at, pos, pos+20)
			if size > 0 {
				at = append(at, pos+headSize, pos+headSize+size/2, pos+headSize+size-1)
				if kind(all[pos+3]) == kindData {
					inside[pos+headSize], inside[pos+headSize+size/2], inside[pos+headSize+size-1] = true, true, true
				}
			}
		}
		pos += headSize + size
	}
	return append(at, len(all)), inside
}

// settled checks that a grant ended as it must, and gives whether it landed.
func (r *rig) settled(m *testRoom, revoked bool) bool {
	r.t.Helper()
	landed, failed, quiesced := r.outcome(m.id)
	switch {
	case landed == 1 && failed == 0 && (quiesced == 0 || revoked && quiesced == 1):
		if !r.same(m.pp, m.dp) && quiesced == 0 {
			r.t.Errorf("room %d landed with wrong pages", m.id)
		}
		return true
	case landed == 0 && failed <= 1 && quiesced == 1 && (failed == 1 || revoked):
		return false
	}
	r.t.Errorf("room %d: landed %d, failed %d, quiesced %d", m.id, landed, failed, quiesced)
	return false
}

// quiet checks that P let go of every request: Received, or SendQuiesced. Only
// those whose GRANT never came wait for P's own time limit, which is now.
func (r *rig) quiet() {
	r.t.Helper()
	for id := uint64(1); id <= 2; id++ {
		if r.mine(int64(id)) {
			if r.bound(id) {
				r.t.Errorf("request %d is still bound", id)
			}
			r.s.CloseSend(id, nil)
		}
	}
	for _, id := range []uint64{1, 2} {
		n := 0
		for _, e := range pick[*Received](&r.pLog) {
			n += equal(e.Req, id)
		}
		q := 0
		for _, e := range pick[*SendQuiesced](&r.pLog) {
			q += equal(e.Req, id)
		}
		if n > 1 || n+q < 1 {
			r.t.Errorf("request %d: received %d times, quiesced %d times", id, n, q)
		}
	}
	if n := r.sends(); n != 0 {
		r.t.Errorf("%d sends left", n)
	}
}

// guard poisons the pages of each grant at the moment it has quiesced.
func (r *rig) guard(rooms ...*testRoom) {
	r.dLog.on(func(e Event) {
		if q, ok := e.(*Quiesced); ok {
			for _, m := range rooms {
				if m.id == q.Grant {
					r.da.poison(m.dp)
				}
			}
		}
	})
}

func (r *rig) checkGuard(rooms ...*testRoom) {
	r.t.Helper()
	for _, m := range rooms {
		if _, _, q := r.outcome(m.id); q > 0 && !r.da.poisoned(m.dp) {
			r.t.Errorf("a byte was written into room %d after it had quiesced", m.id)
		}
	}
}

// TestRevokeEverywhere: D takes room 1 back at every byte. It quiesces at once
// unless its frame is half read; then at that frame's end. Room 2 is not touched.
func TestRevokeEverywhere(t *testing.T) {
	at, inside := offsets(t, false)
	for _, k := range at {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, a, b := play(t, false, k)
				r.guard(a, b)
				writing := r.writing()
				if inside[k] != (writing != 0) {
					t.Errorf("byte %d: inside %v, writing grant %d", k, inside[k], writing)
				}
				r.r.Revoke(1)
				synctest.Wait()
				mine := writing == 1
				if _, _, q := r.outcome(1); (q == 0) != mine {
					t.Errorf("quiesced %d times, half-read frame %v", q, mine)
				}
				r.stream(false).set(func() { r.stream(false).hold = -1 })
				synctest.Wait()
				r.settled(a, true)
				if !r.settled(b, false) {
					t.Error("room 2 did not land")
				}
				r.checkGuard(a, b)
				r.quiet()
				r.close()
			})
		})
	}
}

// TestRevokeStalled: the same, but the rest of the stream never comes. A half-read
// frame costs the link after two seconds, another byte only after the silence.
func TestRevokeStalled(t *testing.T) {
	at, _ := offsets(t, false)
	for _, k := range at {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r, a, b := play(t, false, k)
				r.guard(a, b)
				mine := r.writing() == 1
				r.r.Revoke(1)
				time.Sleep(hurryTime - time.Millisecond)
				synctest.Wait()
				if n := len(pick[*LinkEnded](&r.dLog)); n != 0 {
					t.Error("the link ended early")
				}
				time.Sleep(2 * time.Millisecond)
				synctest.Wait()
				if n := len(pick[*LinkEnded](&r.dLog)); (n == 1) != mine {
					t.Errorf("links ended: %d, half-read frame %v", n, mine)
				}
				if _, _, q := r.outcome(1); q != 1 {
					t.Errorf("quiesced %d times", q)
				}
				time.Sleep(10 * time.Second)
				synctest.Wait()
				r.stream(false).set(func() { r.stream(false).hold = -1 })
				synctest.Wait()
				if e := pick[*LinkEnded](&r.dLog); len(e) != 1 {
					t.Errorf("links ended: %v", e)
				}
				r.settled(a, true)
				r.settled(b, false)
				r.checkGuard(a, b)
				r.quiet()
				r.close()
			})
		})
	}
}

// TestCutEverywhere: the connection breaks at every byte of both directions.
// Each room has landed or fails on both sides, and all pages come back. Shows F-09.
func TestCutEverywhere(t *testing.T) {
	for _, toP := range []bool{false, true} {
		at, _ := offsets(t, toP)
		for _, k := range at {
			t.Run(fmt.Sprintf("toP=%v/%d", toP, k), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					r, a, b := play(t, toP, k)
					r.guard(a, b)
					r.stream(toP).set(func() { r.stream(toP).cut = k })
					r.stream(!toP).set(func() { r.stream(!toP).cut = r.stream(!toP).read })
					synctest.Wait()
					ended := pick[*LinkEnded](&r.dLog)
					if len(ended) != 1 {
						t.Errorf("links ended: %v", ended)
					}
					r.settled(a, false)
					r.settled(b, false)
					r.checkGuard(a, b)
					r.quiet()
					r.close()
				})
			})
		}
	}
}

// TestCloseEverywhere: D closes the link, or P stops, or P fails room 1, at every byte.
func TestCloseEverywhere(t *testing.T) {
	at, _ := offsets(t, false)
	for what, act := range map[string]func(*rig){
		"CloseLink": func(r *rig) { r.r.CloseLink(r.links[0], "for the test") },
		"Close":     func(r *rig) { r.r.Close() },
		"Stop":      func(r *rig) { r.stop() },
		"Fail":      func(r *rig) { r.s.CloseSend(1, &Cause{"deadline_exceeded", "too late"}) },
	} {
		for _, k := range at {
			t.Run(fmt.Sprintf("%s/%d", what, k), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					r, a, b := play(t, false, k)
					r.guard(a, b)
					act(r)
					synctest.Wait()
					if what == "Close" || what == "CloseLink" {
						if n := len(pick[*LinkEnded](&r.dLog)); n != 0 {
							t.Error("LinkEnded for a link that we closed")
						}
					}
					r.stream(false).set(func() { r.stream(false).hold = -1 })
					synctest.Wait()
					landed := r.settled(a, false)
					other := r.settled(b, false)
					if what == "Fail" && !other {
						t.Error("room 2 did not land")
					}
					if what == "Fail" && !landed {
						if f := pick[*Failed](&r.dLog); len(f) != 1 || f[0].Cause != (Cause{"deadline_exceeded", "too late"}) {
							t.Errorf("failed %+v", f)
						}
					}
					r.checkGuard(a, b)
					r.quiet()
					r.close()
				})
			})
		}
	}
}

// TestCorruptEverywhere: one bit flips at every byte that matters. A bad head
// closes the link, a bad payload fails its room only; nothing lands wrong. Shows F-09.
func TestCorruptEverywhere(t *testing.T) {
	for _, toP := range []bool{false, true} {
		at, inside := offsets(t, toP)
		for _, k := range slices.Compact(at[:len(at)-1]) {
			t.Run(fmt.Sprintf("toP=%v/%d", toP, k), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					taps = func(d *conn) {
						p := d.in
						if toP {
							p = d.out
						}
						p.flip[k] = 0x10
					}
					r, a, b := play(t, toP, -1)
					taps = nil
					r.guard(a, b)
					synctest.Wait()
					time.Sleep(time.Second)
					if inside[k] {
						if n := len(pick[*LinkEnded](&r.dLog)); n != 0 || r.dBad.of(whySum) != 1 {
							t.Errorf("links ended %d, rejected %v", n, r.dBad.n)
						}
						l1, f1, _ := r.outcome(1)
						l2, f2, _ := r.outcome(2)
						if l1+l2 != 1 || f1+f2 != 1 {
							t.Errorf("landed %d %d, failed %d %d", l1, l2, f1, f2)
						}
					}
					r.stop() // whatever is still open ends now
					synctest.Wait()
					r.settled(a, false)
					r.settled(b, false)
					r.quiet()
					r.close()
				})
			})
		}
	}
}

// TestHandshakeCutEverywhere: no cut in HELLO or WELCOME leaves anything behind.
func TestHandshakeCutEverywhere(t *testing.T) {
	for _, toP := range []bool{false, true} {
		for k := range 200 {
			bubble(t, func(t *testing.T) {
				r := newRig(t, options{unlinked: true})
				taps = func(d *conn) {
					p := d.in
					if toP {
						p = d.out
					}
					p.cut = k
				}
				_, err := r.r.Dial(t.Context(), LinkSpec{Link: 9, Addr: "p0"})
				taps = nil
				if err == nil && !toP && k < r.last.in.writes {
					t.Errorf("linked although WELCOME was cut at byte %d", k)
				}
				if err != nil && (IsLocal(err) || errors.As(err, new(*RefusedError))) {
					t.Errorf("%T: %v", err, err)
				}
				r.close()
			})
			if t.Failed() {
				return
			}
		}
	}
}
