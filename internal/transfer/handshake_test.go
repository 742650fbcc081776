package transfer

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// TestRefusals: what does not fit is refused by name with both values, on
// whichever side it is seen first, and is told apart for the scheduler. Shows F-19, F-69, F-79.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, code, text string
		receiver         func(*ReceiverConfig)
		sender           func(*SenderConfig)
		spec             LinkSpec
	}{
		{"token", RefuseUnauthorized, "token", nil, func(c *SenderConfig) { c.Tokens = func(s string) bool { return s == "secret" } }, LinkSpec{}},
		{"good token", "", "", func(c *ReceiverConfig) { c.Token = func() string { return "secret" } }, func(c *SenderConfig) { c.Tokens = func(s string) bool { return s == "secret" } }, LinkSpec{}},
		{"page size", RefuseMismatch, "page size differs: prefill has 4, decode has 8", func(c *ReceiverConfig) { c.Geometry.PageSize = 8 }, nil, LinkSpec{}},
		{"dtype", RefuseMismatch, "KV dtype differs: prefill has f16, decode has q8_0", func(c *ReceiverConfig) { c.Hello.KVDType = "q8_0" }, nil, LinkSpec{}},
		{"auto dtype", "", "", func(c *ReceiverConfig) { c.Hello.KVDType = "auto" }, nil, LinkSpec{}},
		{"no dtype", "", "", nil, func(c *SenderConfig) { c.Welcome.KVDType = "" }, LinkSpec{}},
		{"fingerprint", RefuseMismatch, "model fingerprint differs: prefill has fp, decode has fq", func(c *ReceiverConfig) { c.Hello.Fingerprint = "fq" }, nil, LinkSpec{}},
		{"no fingerprint", "", "", func(c *ReceiverConfig) { c.Hello.Fingerprint = "" }, nil, LinkSpec{}},
		{"layers", RefuseMismatch, "number of layers differs: prefill has 3, decode has 9", func(c *ReceiverConfig) { c.Geometry.Layers = 9 }, nil, LinkSpec{}},
		{"heads", RefuseMismatch, "number of KV heads differs: prefill has 4, decode has 8", func(c *ReceiverConfig) { c.Geometry.Heads = 8 }, nil, LinkSpec{}},
		{"token bytes", RefuseMismatch, "in bytes differs: prefill has 4, decode has 8", func(c *ReceiverConfig) { c.Geometry.TokenBytes = 8 }, nil, LinkSpec{}},
		{"dp rank", RefuseRank, "this is dp 0, tp 0; wanted is dp 1, cp 0, tp 0, pp 0", nil, nil, LinkSpec{DP: 1}},
		{"tp rank", RefuseRank, "wanted is dp 0, cp 0, tp 1, pp 0", nil, nil, LinkSpec{TP: 1}},
		{"cp rank", RefuseRank, "cp 1", nil, nil, LinkSpec{CP: 1}},
		{"pp rank", RefuseRank, "pp 1", nil, nil, LinkSpec{PP: 1}},
		{"mismatch at a replaced instance", "replaced", `instance "p1" answers where "p0" was expected`, func(c *ReceiverConfig) { c.Hello.Fingerprint = "fq" }, nil, LinkSpec{Instance: "p0"}},
		{"replaced instance", "replaced", `instance "p1" answers where "p0" was expected`, nil, nil, LinkSpec{Instance: "p0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, options{unlinked: true, sender: c.sender, receiver: c.receiver})
				c.spec.Link, c.spec.Addr = 1, "p0"
				w, err := r.r.Dial(t.Context(), c.spec)
				var no *RefusedError
				var other *ReplacedError
				switch {
				case c.code == "":
					if err != nil || w.Instance != "p1" {
						t.Errorf("%+v, %v", w, err)
					}
				case c.code == "replaced":
					if !errors.As(err, &other) || other.Welcome.Instance != "p1" || w.Instance != "p1" || err.Error() != "prefill "+c.text {
						t.Errorf("%T %v", err, err)
					}
				case !errors.As(err, &no) || no.Code != c.code || !strings.Contains(no.Text, c.text) || !strings.Contains(no.Text, "p0"):
					t.Errorf("%T %v, want %s: %s", err, err, c.code, c.text)
				case no.Mismatch() != (c.code == RefuseMismatch):
					t.Error("mismatch")
				}
				if IsLocal(err) {
					t.Error("local")
				}
				synctest.Wait()
				if n := r.ports(); (n == 1) != (c.code == "") {
					t.Errorf("%d links at P", n)
				}
				r.close()
			})
		})
	}
}

// TestWelcomeJudged: D does not trust P to refuse. Shows F-69.
func TestWelcomeJudged(t *testing.T) {
	for _, c := range []struct {
		name, text string
		w          welcome
		mismatch   bool
	}{
		{"dtype", "KV dtype differs", welcome{Welcome: Welcome{Instance: "p1", TP: 1, DP: 1, KVDType: "f32"}, geometry: small}, true},
		{"fingerprint", "fingerprint differs: prefill has fx, decode has fp", welcome{Welcome: Welcome{Instance: "p1", TP: 1, DP: 1, Fingerprint: "fx"}, geometry: small}, true},
		{"geometry", "number of layers", welcome{Welcome: Welcome{Instance: "p1", TP: 1, DP: 1}, geometry: kv.Geometry{Layers: 9, Heads: 4, TokenBytes: 4, PageSize: 4}}, true},
		{"tp", "4 KV heads do not divide over TP 3", welcome{Welcome: Welcome{Instance: "p1", TP: 3, DP: 1}, geometry: small}, true},
		{"rank", "it is dp 0, tp 1; wanted is dp 0, cp 0, tp 0, pp 0", welcome{Welcome: Welcome{Instance: "p1", TP: 2, DP: 1}, rank: 1, geometry: small}, false},
		{"rank beyond", "tp rank 2 of 2", welcome{Welcome: Welcome{Instance: "p1", TP: 2, DP: 1}, rank: 2, geometry: small}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				err := dialRaw(t, func(p *raw) {
					p.frame()
					p.conn.Write(appendFrame(nil, kindWelcome, 0, c.w.append))
				})
				var no *RefusedError
				if errors.As(err, &no) && no.Mismatch() != c.mismatch || err == nil || !strings.Contains(err.Error(), c.text) || c.mismatch && no == nil {
					t.Errorf("%T %v", err, err)
				}
			})
		})
	}
}

// dialRaw dials a P that the test plays.
func dialRaw(t *testing.T, play func(*raw)) error {
	ours, theirs := newConns(64 << 10)
	r := newRig(t, options{unlinked: true, receiver: func(c *ReceiverConfig) {
		c.Dial = func(context.Context, string) (net.Conn, error) { return ours, nil }
	}})
	go play(&raw{t, theirs})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := r.r.Dial(ctx, LinkSpec{Link: 1, Addr: "p0"})
	theirs.Close()
	r.close()
	return err
}

// TestStrangePrefill: D names what it met where it looked for a prefill. Shows F-18.
func TestStrangePrefill(t *testing.T) {
	for _, c := range []struct{ name, text, answer string }{
		{"ZMTP", "p0 does not speak KV transfer: it answers with a ZMTP greeting", "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"},
		{"HTTP", "answers with HTTP", "HTTP/1.1 400 Bad Request\r\n\r\n"},
		{"TLS", "a TLS handshake", "\x16\x03\x01\x00\x05"},
		{"bytes", "the bytes 01 02", "\x01\x02\x03"},
		{"silence", "deadline exceeded", ""},
		{"half a head", "deadline exceeded", "KV\x01"},
		{"another version", "protocol version differs: prefill worker at p0 has 2, decode has 1", string(edit(control(kindWelcome, 0), func(b []byte) { b[2] = 2 }))},
		{"PONG", "PONG in answer to HELLO", string(control(kindPong, 0))},
		{"WELCOME checksum", "checksum", string(edit(control(kindWelcome, 0, 1), func(b []byte) { b[32]++ }))},
		{"empty WELCOME", "WELCOME: instance is cut off", string(control(kindWelcome, 0))},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				start := time.Now()
				err := dialRaw(t, func(p *raw) {
					p.frame()
					p.conn.Write([]byte(c.answer))
				})
				if err == nil || !strings.Contains(err.Error(), c.text) || IsLocal(err) {
					t.Errorf("%T %v", err, err)
				}
				if d := time.Since(start); (d == 5*time.Second) != strings.Contains(c.text, "deadline") || d > 5*time.Second {
					t.Errorf("took %v", d)
				}
			})
		})
	}
}

// TestStrangeDecode: whatever connects to P's port is answered and closed, or
// closed after five seconds, and holds nothing.
func TestStrangeDecode(t *testing.T) {
	bad := func(f func(*hello)) string {
		m := goodHello(small)
		f(m)
		return string(appendFrame(nil, kindHello, 0, m.append))
	}
	for _, c := range []struct{ name, say, code, text string }{
		{"ZMTP", "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", RefuseForeign, "this is a metronome KV transfer port; it was sent a ZMTP greeting"},
		{"TLS", "\x16\x03\x01", RefuseForeign, "a TLS handshake"},
		{"GET", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP", "this is a metronome KV transfer port; it was sent HTTP"},
		{"zeros", "\x00\x00\x00", RefuseForeign, "the bytes 00 00"},
		{"another version", string(edit([]byte(bad(func(*hello) {})), func(b []byte) { b[2] = 9 })), RefuseMismatch, "protocol version differs: prefill has 1, decode has 9"},
		{"no HELLO", string(control(kindPing, 0)), RefuseInvalid, "PING before HELLO"},
		{"HELLO checksum", string(edit([]byte(bad(func(*hello) {})), func(b []byte) { b[32]++ })), RefuseInvalid, "checksum of HELLO"},
		{"no instance", bad(func(m *hello) { m.Instance = "" }), RefuseInvalid, "the instance is empty"},
		{"rank", bad(func(m *hello) { m.rank = 1 }), RefuseInvalid, "rank 1 of 1 ranks"},
		{"little credit", bad(func(m *hello) { m.credit = 5 }), RefuseInvalid, "credit is 5 bytes"},
		{"endless credit", bad(func(m *hello) { m.credit = 1 << 63 }), RefuseInvalid, "credit is"},
		{"no pages", bad(func(m *hello) { m.geometry.PageSize = 0 }), RefuseInvalid, "page size is 0"},
		{"tp", bad(func(m *hello) { m.tp = 3 }), RefuseMismatch, "4 KV heads do not divide over TP 3"},
		{"cut", string(control(kindHello, 0, 1)), RefuseInvalid, "cut off"},
		{"nothing", "", "", ""},
		{"half", "KV\x01", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, options{unlinked: true})
				p := r.raw()
				start := time.Now()
				p.send([]byte(c.say))
				switch c.code {
				case "":
					if _, err := p.conn.Read(make([]byte, 1)); err != io.EOF || time.Since(start) != 5*time.Second {
						t.Errorf("%v after %v", err, time.Since(start))
					}
				case "HTTP":
					b, _ := io.ReadAll(p.conn)
					if !strings.HasPrefix(string(b), "HTTP/1.1 400 Bad Request\r\n") || !strings.Contains(string(b), c.text) {
						t.Errorf("%q", b)
					}
				default:
					h, body := p.frame()
					var no refuse
					if err := no.parse(body); err != nil || h.kind != kindRefuse || no.code != c.code || !strings.Contains(no.text, c.text) {
						t.Errorf("%v %+v %v", h.kind, no, err)
					}
				}
				p.Close()
				synctest.Wait()
				if r.ports() != 0 {
					t.Error("something is left")
				}
				r.close()
			})
		})
	}
}

// TestStrangers: connections that say nothing cannot use up more than their
// share, and leave room again after five seconds.
func TestStrangers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, options{unlinked: true, sender: func(c *SenderConfig) { c.MaxStrangers = 4 }})
		var all []*raw
		for range 6 {
			all = append(all, r.raw())
		}
		synctest.Wait()
		for i, p := range all {
			if p.ended() != (i >= 4) {
				t.Errorf("connection %d: ended %v", i, p.ended())
			}
		}
		if r.pBad.of(whyFull) != 2 {
			t.Error(r.pBad.n)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		r.link()
		for _, p := range all {
			p.Close()
		}
		r.close()
	})
}

// TestDialFaults: whose fault a failed try is.
func TestDialFaults(t *testing.T) {
	for _, c := range []struct {
		err   error
		local bool
	}{
		{&net.OpError{Op: "dial", Err: syscall.EMFILE}, true},
		{&net.OpError{Op: "dial", Err: syscall.ENFILE}, true},
		{&net.OpError{Op: "dial", Err: syscall.EADDRNOTAVAIL}, true},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, false},
		{context.Canceled, true},
		{context.DeadlineExceeded, false},
		{&RefusedError{RefuseMismatch, "x"}, false},
	} {
		r, err := NewReceiver(ReceiverConfig{Geometry: small, Memory: newArena(small, 1, 4).memory(), Hello: Hello{Instance: "d"},
			Dial: func(context.Context, string) (net.Conn, error) { return nil, c.err }})
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Dial(t.Context(), LinkSpec{Link: 1})
		if !errors.Is(err, c.err) || IsLocal(err) != c.local {
			t.Errorf("%v: local %v", err, IsLocal(err))
		}
	}
}

// TestDialCancelled: a try ends when its context does, and says whose will it was.
func TestDialCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ours, theirs := newConns(1 << 10)
		r := newRig(t, options{unlinked: true, receiver: func(c *ReceiverConfig) {
			c.Dial = func(context.Context, string) (net.Conn, error) { return ours, nil }
		}})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		if _, err := r.r.Dial(ctx, LinkSpec{Link: 1}); !IsLocal(err) || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		theirs.Close()
		r.r.Close()
		if _, err := r.r.Dial(t.Context(), LinkSpec{Link: 1}); err == nil {
			t.Error("dialled after Close")
		}
		r.close()
	})
}

// TestConfigRefused: what cannot work is refused at the start.
func TestConfigRefused(t *testing.T) {
	mem := newArena(small, 1, 4).memory()
	for _, c := range []struct {
		text string
		r    ReceiverConfig
	}{
		{"0 layers", ReceiverConfig{Memory: mem, Hello: Hello{Instance: "d"}}},
		{"use smaller pages", ReceiverConfig{Memory: mem, Hello: Hello{Instance: "d"}, Geometry: kv.Geometry{Layers: 1, Heads: 1, TokenBytes: 4096, PageSize: 4096}}},
		{"do not divide over TP 0", ReceiverConfig{Geometry: small, Hello: Hello{Instance: "d"}}},
		{"instance id is empty", ReceiverConfig{Geometry: small, Memory: mem}},
		{"credit is 5 bytes", ReceiverConfig{Geometry: small, Memory: mem, MaxCredit: 5, Hello: Hello{Instance: "d"}}},
		{"at most 256", ReceiverConfig{Geometry: small, Memory: mem, Hello: Hello{Instance: strings.Repeat("x", 257)}}},
	} {
		if _, err := NewReceiver(c.r); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%v, want %q", err, c.text)
		}
	}
	if _, err := NewSender(SenderConfig{Geometry: small, Memory: mem, Welcome: Welcome{Instance: "p"}}); err == nil || !strings.Contains(err.Error(), "dp rank 0 of 0") {
		t.Error(err)
	}
}
