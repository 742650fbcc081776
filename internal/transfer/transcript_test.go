package transfer

import (
	"encoding/hex"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/metronome-serve/metronome/internal/kv"
)

// The transcripts in testdata show the pure parts at work. go test -rewrite
// writes them anew.

// args of one command; absent ones are zero.
type args struct{ *datadriven.TestData }

func (a args) text(key string) string {
	if !a.HasArg(key) {
		return ""
	}
	var v []string
	for _, c := range a.CmdArgs {
		if c.Key == key {
			v = c.Vals
		}
	}
	return strings.Join(v, " ")
}

func (a args) number(key string) int {
	n, _ := strconv.Atoi(a.text(key))
	return n
}

func (a args) list(key string) (out []int) {
	for _, c := range a.CmdArgs {
		if c.Key == key {
			for _, v := range c.Vals {
				n, _ := strconv.Atoi(v)
				out = append(out, n)
			}
		}
	}
	return out
}

func (a args) pages(key string) (out []kv.Page) {
	for _, n := range a.list(key) {
		out = append(out, kv.Page(n))
	}
	return out
}

// ranks reads d=(rank,size) and p=(rank,size); the default is 0 of 1.
func (a args) ranks() (d, dn, p, pn int) {
	dn, pn = 1, 1
	if v := a.list("d"); v != nil {
		d, dn = v[0], v[1]
	}
	if v := a.list("p"); v != nil {
		p, pn = v[0], v[1]
	}
	return
}

func printed(e any) string {
	s := fmt.Sprintf("%+v", reflect.ValueOf(e).Elem().Interface())
	return strings.TrimPrefix(fmt.Sprintf("%T", e), "*transfer.") + s
}

func geometryOf(a args) kv.Geometry {
	g := kv.Geometry{Layers: 2, Heads: 4, TokenBytes: 4, PageSize: 4}
	if v := a.list("geometry"); v != nil {
		g = kv.Geometry{Layers: v[0], Heads: v[1], TokenBytes: v[2], PageSize: v[3]}
	}
	return g
}

func TestTableTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/table", func(t *testing.T, path string) {
		var tab *table
		var now time.Duration
		lanes := map[int]*lane{}
		begun := map[int]*part{}
		heads := map[int]head{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			a := args{d}
			say := func(format string, v ...any) { fmt.Fprintf(&out, format+"\n", v...) }
			fault := func(err error) {
				if err != nil {
					say("link fault %s: %v", err.(*breach).why, err)
				}
			}
			id := a.number("link")
			l := lanes[id]
			grant := uint64(a.number("grant"))
			switch d.Cmd {
			case "table":
				tab = newTable(geometryOf(a), max(a.number("most"), 1))
			case "at":
				now, _ = time.ParseDuration(a.text("time"))
			case "link":
				dr, dn, pr, pn := a.ranks()
				s, ok := newShare(tab.geometry, dn, dr, pn, pr)
				if !ok {
					return "these ranks share no heads\n"
				}
				lanes[id] = &lane{link: uint64(id), rank: dr, share: s, addr: fmt.Sprintf("p%d", pr), peer: "P" + a.text("instance"), pairs: pairs(dn, pn)}
				tab.join(lanes[id])
				say("heads %d to %d in %d slices", s.head, s.head+s.heads-1, s.slices)
			case "leave":
				tab.leave(l, "cut")
			case "open":
				s := GrantSpec{Grant: grant, Room: int64(a.number("room")), Prefix: a.number("prefix"), Tokens: a.number("tokens"), Pages: a.pages("pages")}
				for _, n := range a.list("links") {
					s.Links = append(s.Links, uint64(n))
				}
				if n := a.number("recompute"); n > 0 {
					s.Recompute = make([]int32, n)
				}
				tab.open(now, s)
			case "data", "begin":
				h := head{kind: kindData, grant: grant, layer: uint32(a.number("layer")), index: uint32(a.number("index")), count: uint32(a.number("count"))}
				h.head, h.heads = uint16(l.share.head), uint16(l.share.slice)
				if v := a.list("heads"); v != nil {
					h.head, h.heads = uint16(v[0]), uint16(v[1])
				}
				h.size = h.count * uint32(tab.geometry.ExtentBytes(int(h.heads)))
				p, err := tab.begin(now, l, &h)
				fault(err)
				switch {
				case p == nil && err == nil:
					say("to nowhere")
				case p != nil && d.Cmd == "data":
					tab.end(p, &h, !a.HasArg("bad"))
				case p != nil:
					say("into pages %v", p.g.spec.Pages[h.index:h.index+h.count])
					begun[id], heads[id] = p, h
				}
			case "end":
				h := heads[id]
				tab.end(begun[id], &h, !a.HasArg("bad"))
			case "first":
				fault(tab.first(now, l, grant, &First{Token: 1, PromptTokens: a.number("prompt")}))
			case "finish":
				var cause *Cause
				if a.HasArg("cause") {
					cause = &Cause{a.text("cause"), "P says so"}
				}
				_, err := tab.finish(now, l, grant, cause)
				fault(err)
			case "busy":
				tab.busy(now, l, grant)
			case "revoke":
				tab.revoke(grant)
			default:
				t.Fatalf("unknown command %s", d.Cmd)
			}
			for _, e := range tab.events {
				say("%s", printed(e))
			}
			for _, o := range tab.orders {
				say("send %v on link %d", o.kind, o.l.link)
			}
			for _, l := range tab.hurry {
				say("hurry link %d", l.link)
			}
			tab.events, tab.orders, tab.hurry = nil, nil, nil
			return out.String()
		})
	})
}

func TestRoomsTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/rooms", func(t *testing.T, path string) {
		var tab *rooms
		outlets := map[int]*outlet{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			a := args{d}
			say := func(format string, v ...any) { fmt.Fprintf(&out, format+"\n", v...) }
			fault := func(err error) {
				if err != nil {
					say("link fault %s: %v", err.(*breach).why, err)
				}
			}
			o := outlets[a.number("link")]
			grant, req := uint64(a.number("grant")), uint64(a.number("req"))
			key := GrantKey{1, grant}
			if n := a.number("peer"); n > 0 {
				key.Peer = uint64(n)
			}
			var cause *Cause
			if a.HasArg("cause") {
				cause = &Cause{a.text("cause"), "P says so"}
			}
			switch d.Cmd {
			case "rooms":
				tab = newRooms(geometryOf(a), max(a.number("tp"), 1), max(a.number("parked"), 1))
			case "link":
				dr, dn, pr, pn := a.ranks()
				s, _ := newShare(tab.geometry, dn, dr, pn, pr)
				o = &outlet{peer: key.Peer, dTP: dn, dRank: dr, pRank: pr, share: s, window: newWindow(uint64(max(a.number("credit"), 1<<20))), streams: map[uint64]*stream{}}
				outlets[a.number("link")] = o
				say("heads %d to %d in %d slices", s.head, s.head+s.heads-1, s.slices)
			case "grant":
				m := grantMsg{room: int64(a.number("room")), digest: uint64(a.number("digest")), dRanks: o.dTP, prefix: a.number("prefix"), tokens: a.number("tokens")}
				m.pages = kv.PagesFor(m.tokens, tab.geometry.PageSize) - m.prefix/tab.geometry.PageSize
				if n := a.number("recompute"); n > 0 {
					m.recompute = make([]int32, n)
				}
				refused, err := tab.grant(o, grant, &m)
				fault(err)
				if refused != "" {
					say("refused: %s", refused)
				}
			case "abort":
				tab.abort(o, grant, int64(a.number("room")))
			case "received":
				_, err := tab.received(o, grant)
				fault(err)
			case "credit":
				fault(tab.refill(o, uint64(a.number("bytes"))))
			case "leave":
				tab.leave(o, "cut")
			case "open":
				tab.open(req, SendSpec{Room: int64(a.number("room")), Tokens: a.number("tokens"), Cached: a.number("cached"), Pages: a.pages("pages")})
			case "layer":
				tab.layerDone(req, a.number("layer"), a.number("tokens"))
			case "layers":
				for l := range tab.geometry.Layers {
					tab.layerDone(req, l, a.number("tokens"))
				}
			case "bind":
				tab.bind(0, req, key)
			case "first":
				tab.first(req, &First{Token: 1})
			case "close":
				tab.closeSend(req, cause)
			case "refuse":
				tab.refuse(key, cause)
			case "next":
				for range max(a.number("n"), 1) {
					f, ok := tab.next(o)
					switch {
					case !ok:
						say("nothing")
					case f.head.kind == kindData:
						say("DATA grant %d layer %d entries %d+%d heads %d+%d from pages %v", f.head.grant, f.head.layer, f.head.index, f.head.count, f.head.head, f.head.heads, f.pages)
						if !a.HasArg("begun") {
							tab.done(o)
						}
					default:
						say("%v grant %d %v", f.head.kind, f.head.grant, f.cause)
					}
				}
			case "done":
				tab.done(o)
			case "busy":
				say("BUSY %v", tab.busy(o, nil))
			default:
				t.Fatalf("unknown command %s", d.Cmd)
			}
			for _, e := range tab.events {
				s := printed(e)
				if c, ok := e.(*Closed); ok {
					s = fmt.Sprintf("Closed{%+v room %d: %v}", c.Key, c.Room, c.Cause)
				} else if c, ok := e.(*SendFailed); ok {
					s = fmt.Sprintf("SendFailed{%d: %v}", c.Req, c.Cause)
				}
				say("%s", s)
			}
			tab.events, tab.wake = nil, nil
			checkRooms(t, tab, outlets)
			return out.String()
		})
	})
}

// checkRooms checks the invariants that rooms promises after every call.
func checkRooms(t testing.TB, tab *rooms, outlets map[int]*outlet) {
	t.Helper()
	streams := 0
	owners := map[int64]int{}
	for key, r := range tab.rooms {
		owners[r.msg.room]++
		streams += len(r.streams)
		if len(r.streams) == 0 || len(r.streams) > r.need || r.key != key {
			t.Errorf("grant %v has %d streams of %d", key, len(r.streams), r.need)
		}
		if r.send != nil && (r.send.room != r || tab.sends[r.send.req] != r.send) {
			t.Errorf("grant %v and its send do not agree", key)
		}
	}
	for id, n := range owners {
		if w := tab.owners[id]; w == nil || w.n != n {
			t.Errorf("room %d has %d grants and owner %+v", id, n, w)
		}
	}
	if len(owners) != len(tab.owners) {
		t.Errorf("%d rooms have grants, %d have owners", len(owners), len(tab.owners))
	}
	for i, o := range outlets {
		parked, held, queued := 0, 0, 0
		for id, s := range o.streams {
			streams--
			if tab.rooms[GrantKey{o.peer, id}] != s.r || s.o != o {
				t.Errorf("link %d has a stream of grant %d that no room has", i, id)
			}
			if s.r.send == nil {
				parked++
				held += s.held
			}
			if s.queued {
				queued++
			}
		}
		if parked != o.parked || held != o.held || queued != len(o.ready) {
			t.Errorf("link %d: parked %d, counted %d; held %d, counted %d; queued %d, ready %d",
				i, parked, o.parked, held, o.held, queued, len(o.ready))
		}
		if o.window.free < 0 || o.window.free > o.window.limit {
			t.Errorf("link %d: %d of %d bytes of credit", i, o.window.free, o.window.limit)
		}
	}
	if streams != 0 {
		t.Errorf("%d streams belong to no link", streams)
	}
}

// TestWireLayout pins the bytes of every frame: a change here is a new version.
func TestWireLayout(t *testing.T) {
	hello := goodHello(kv.Geometry{Layers: 30, Heads: 3, TokenBytes: 256, PageSize: 16})
	hello.token, hello.expect, hello.tp, hello.rank, hello.tpr = "tok", "p1", 2, 1, 1
	welcome := welcome{Welcome: Welcome{Instance: "p1", Fingerprint: "fp", TP: 2, DP: 1, KVDType: "f16"}, rank: 1, geometry: hello.geometry}
	grant := grantMsg{room: 1<<62 + 1, digest: 0x0807060504030201, dRanks: 2, prefix: 16, tokens: 40, pages: 2}
	again := grantMsg{room: 9, dRanks: 2, tokens: 3, pages: 1, recompute: []int32{5, 6, 7}, index: 2, sampling: []byte("s")}
	first := First{Token: 7, Seed: 1 << 63, Logprob: -0.5, Top: []TokenLogprob{{7, -0.5}}, Cached: 16, PromptTokens: 40}
	frames := map[string][]byte{
		"HELLO":      appendFrame(nil, kindHello, 0, hello.append),
		"WELCOME":    appendFrame(nil, kindWelcome, 0, welcome.append),
		"REFUSE":     appendFrame(nil, kindRefuse, 0, (&refuse{"mismatch", "no"}).append),
		"GRANT":      appendFrame(nil, kindGrant, 3, grant.append),
		"RECOMPUTE":  appendFrame(nil, kindRecompute, 3, again.append),
		"ABORT":      control(kindAbort, 3, 9, 0, 0, 0, 0, 0, 0, 0),
		"RECEIVED":   control(kindReceived, 3),
		"CREDIT":     control(kindCredit, 0, 0, 0, 32, 0, 0, 0, 0, 0),
		"PING":       control(kindPing, 0),
		"PONG":       control(kindPong, 0),
		"QUEUED":     control(kindQueued, 0, 9, 0, 0, 0, 0, 0, 0, 0),
		"DATA":       dataFrame(head{grant: 3, layer: 29, index: 1, count: 1, head: 2, heads: 1}, 16),
		"FIRST":      appendFrame(nil, kindFirst, 3, first.append),
		"BUSY":       control(kindBusy, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0),
		"END":        control(kindEnd, 3, appendEnd(nil, nil)...),
		"END-failed": control(kindEnd, 3, appendEnd(nil, &Cause{"internal", "why"})...),
	}
	datadriven.RunTest(t, "testdata/frames.txt", func(t *testing.T, d *datadriven.TestData) string {
		return hex.Dump(frames[d.CmdArgs[0].Key])
	})
}
