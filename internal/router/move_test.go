package router

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// tokens is a decode that keeps a journal: n tokens 10 ms apart, and [DONE]. It
// goes on from a journal that it is given. after is called before the token with
// that index is sent, and may break off.
func tokens(n int, after func(s *stub, w http.ResponseWriter, r *http.Request, i int)) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	return func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
		var in struct {
			Journal string `json:"metronome_journal"`
		}
		if err := json.Unmarshal(body, &in); err != nil || r.Header.Get(api.JournalHeader) == "" {
			panic(fmt.Sprint("no journal is asked for: ", err))
		}
		j, err := api.ParseJournal(in.Journal, 1)
		if err != nil {
			panic(err)
		}
		time.Sleep(20 * time.Millisecond)
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set(api.JournalHeader, strconv.Itoa(len(in.Journal)))
		for i := len(j.Items[0].Tokens); i < n; i++ {
			if after != nil {
				after(s, w, r, i)
			}
			var records []byte
			if i == 0 {
				records = api.AppendBegun(api.AppendCreated(nil, 1), 0, 1, 0, n)
			}
			records = api.AppendToken(records, 0, &api.JournalToken{TokenLogprob: api.TokenLogprob{ID: int32(i)}}, false)
			w.Write(append(api.JournalLine(nil, records), tokenEvent(i)...))
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
		io.WriteString(w, api.Done)
	}
}

func tokenEvent(i int) string { return fmt.Sprintf("data: {\"token\":%d}\n\n", i) }

// said is the stream of n tokens as a client sees it, without its end.
func said(n int) (s string) {
	for i := range n {
		s += tokenEvent(i)
	}
	return s
}

// breaks are the ways in which a decode fails in the middle of a stream, after
// the token before this one.
var breaks = map[string]func(s *stub, w http.ResponseWriter, r *http.Request){
	"cut": func(_ *stub, _ http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) },
	"reset": func(_ *stub, w http.ResponseWriter, _ *http.Request) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		c.(*memConn).reset()
	},
	"killed": func(s *stub, _ http.ResponseWriter, r *http.Request) {
		s.kill()
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	},
	"cut inside an event":             broken(":j t 0 2;\ndata: {\"tok"),
	"cut inside a journal line":       broken(":j t 0"),
	"an error event":                  broken(`data: {"error":{"code":"draining","message":"bye"}}` + "\n\n"),
	"it speaks of its prefill":        broken(`data: {"error":{"code":"kv_transfer_failed","message":"gone"}}` + "\n\n"),
	"closed in order, without [DONE]": func(_ *stub, w http.ResponseWriter, _ *http.Request) { panic(clean{}) },
	"silent": func(_ *stub, _ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	},
}

// clean ends a stub's answer in order.
type clean struct{}

func broken(last string) func(*stub, http.ResponseWriter, *http.Request) {
	return func(_ *stub, w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, last)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

// breaking is a decode of n tokens that breaks before number at.
func breaking(n, at int, how func(*stub, http.ResponseWriter, *http.Request)) func(*stub, http.ResponseWriter, *http.Request, []byte) {
	serve := tokens(n, func(s *stub, w http.ResponseWriter, r *http.Request, i int) {
		if i == at {
			how(s, w, r)
		}
	})
	return func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
		defer func() {
			if e := recover(); e != nil && e != (clean{}) {
				panic(e)
			}
		}()
		serve(s, w, r, body)
	}
}

// Shows F-50. However a decode fails in the middle of a stream, another one goes
// on with it, and the client sees nothing of that.
func TestStreamMoves(t *testing.T) {
	for name, how := range breaks {
		t.Run(name, func(t *testing.T) {
			inFleet(t, 2, 2, func(c *Config) { c.IdleTimeout = time.Second }, func(t *testing.T, f *fleet) {
				f.d[0].serve, f.d[1].serve = breaking(5, 2, how), tokens(5, nil)
				got := f.post("/v1/chat/completions", `{"stream":true,"messages":[],"metronome_journal":"evil"}`, api.JournalHeader, "99")
				if want := said(5) + api.Done; got.status != 200 || got.err != nil || got.body != want || got.header.Get(api.JournalHeader) != "" {
					t.Fatalf("%+v\nwant %q", got, want)
				}
				if limit := 200 * time.Millisecond; got.took > limit && name != "silent" {
					t.Errorf("took %v", got.took)
				}
				first, second := string(f.d[0].requests()[0]), string(f.d[1].requests()[0])
				if strings.Contains(first, "journal") || !strings.Contains(second, `"metronome_journal":"c 1;b 0 1 0 5;t 0 0;t 0 1;"`) || strings.Count(second, "journal") != 1 {
					t.Errorf("decodes were sent\n%s\n%s", first, second)
				}
				if ps := f.p[1].requests(); len(ps) != 1 || string(ps[0]) != second {
					t.Errorf("the prefill was sent\n%s", ps)
				}
				if got := f.get("/metrics"); !strings.Contains(got.body, "metronome_migrations_total 1\n") || !strings.Contains(got.body, "metronome_retries_total 0\n") {
					t.Errorf("metrics: %s", got.body)
				}
			})
		})
	}
}

// A stream that cannot be moved ends with the error event: its workers keep no
// journal, there is nobody else, moves or memory are used up, half an event is
// out, or the next decode knows nothing of journals.
func TestStreamCannotMove(t *testing.T) {
	cut := breaking(5, 2, breaks["cut"])
	long := func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) { // breaks in an event longer than the buffer
		tokens(1, nil)(s, skipDone{w}, r, body)
		io.WriteString(w, ":j t 0 1;\ndata: "+strings.Repeat("x", 2*relayBuffer))
		w.(http.Flusher).Flush()
		time.Sleep(time.Millisecond)
		panic(http.ErrAbortHandler)
	}
	for _, c := range []struct {
		name   string
		change func(*Config)
		d      []func(*stub, http.ResponseWriter, *http.Request, []byte)
		says   string
		asked  int // requests at the second decode
	}{
		{"no journal", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){stream(0, tokenEvent(0), tokenEvent(1)), hang}, "broke off", 0},
		{"nobody else", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){cut}, "broke off", 0},
		{"not wanted", func(c *Config) { c.Migrations = 0 }, []func(*stub, http.ResponseWriter, *http.Request, []byte){stream(0, tokenEvent(0), tokenEvent(1)), hang}, "broke off", 0},
		{"moved once", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){cut, breaking(5, 3, breaks["cut"]), tokens(5, nil)}, "broke off", 1},
		{"half an event", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){long, tokens(5, nil)}, "broke off", 0},
		{"no memory", func(c *Config) { c.MaxBodies = 140 }, []func(*stub, http.ResponseWriter, *http.Request, []byte){breaking(60, 50, breaks["cut"]), tokens(5, nil)}, "broke off", 0},
		{"malformed", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){breaking(5, 2, broken(":j t 0 \"\n"+tokenEvent(2))), tokens(5, nil)}, "malformed", 0},
		{"the next one is foreign", nil, []func(*stub, http.ResponseWriter, *http.Request, []byte){cut, stream(0, tokenEvent(0), tokenEvent(1), api.Done)}, "cannot go on", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFleet(t, 1, len(c.d), c.change, func(t *testing.T, f *fleet) {
				for i, d := range c.d {
					f.d[i].serve = d
				}
				got := f.post("/generate", `{"stream":true,"text":"x"}`)
				if got.status != 200 || got.err != nil || got.code(t) != "decode_unreachable" || !strings.Contains(got.body, c.says) || strings.Contains(got.body, "[DONE]") {
					t.Fatalf("%+v", got)
				}
				if strings.Contains(got.body, ":j") || !strings.HasPrefix(got.body, said(1)) {
					t.Errorf("the client got %q", got.body)
				}
				if len(c.d) > 1 && len(f.d[1].requests()) != c.asked {
					t.Errorf("%d requests at the second decode, want %d", len(f.d[1].requests()), c.asked)
				}
			})
		})
	}
}

// skipDone is a writer without the end of a stream.
type skipDone struct{ http.ResponseWriter }

func (s skipDone) Write(b []byte) (int, error) {
	if string(b) == api.Done {
		return len(b), nil
	}
	return s.ResponseWriter.Write(b)
}
func (s skipDone) WriteString(b string) (int, error) { return s.Write([]byte(b)) }
func (s skipDone) Flush()                            { s.ResponseWriter.(http.Flusher).Flush() }

// A stream that is being moved may be refused by the next pair, and is tried on
// others; it takes nothing from the retry budget.
func TestMoveIsTriedAgain(t *testing.T) {
	inFleet(t, 2, 3, nil, func(t *testing.T, f *fleet) {
		for f.r.mayRetry() {
		}
		f.d[0].serve, f.d[2].serve = breaking(5, 3, breaks["cut"]), tokens(5, nil)
		f.d[1].serve = says(503, `{"error":{"code":"draining","message":"bye"}}`)
		if got := f.post("/v1/completions", `{"stream":true,"prompt":"x"}`); got.body != said(5)+api.Done {
			t.Fatalf("%+v", got)
		}
		if got := f.get("/metrics"); !strings.Contains(got.body, "metronome_migrations_total 1\n") {
			t.Error(got.body)
		}
	})
}

// A stream may come back to a worker that has failed it before, once it went on
// elsewhere: two decodes are restarted in turn, and it outlives both.
func TestStreamMovesBack(t *testing.T) {
	inFleet(t, 1, 2, func(c *Config) { c.Migrations = 2 }, func(t *testing.T, f *fleet) {
		f.d[0].serve = func(s *stub, w http.ResponseWriter, r *http.Request, body []byte) {
			if strings.Contains(string(body), "journal") {
				tokens(9, nil)(s, w, r, body)
				return
			}
			breaking(9, 2, breaks["cut"])(s, w, r, body)
		}
		f.d[1].serve = breaking(9, 6, breaks["an error event"])
		if got := f.post("/generate", `{"text":"x","stream":true}`); got.body != said(9)+api.Done {
			t.Fatalf("%+v", got)
		}
	})
}

// A decode whose machine is gone without a word takes its silent streams with
// it only until its probes fail; one that still sends keeps them.
func TestSilentStreamMovesWhenProbesFail(t *testing.T) {
	for _, sends := range []bool{false, true} {
		inFleet(t, 1, 2, nil, func(t *testing.T, f *fleet) {
			dead := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
			n, at := 5, 2
			if sends {
				n, at = 1000, 1000
			}
			f.d[0].serve = breaking(n, at, func(s *stub, w http.ResponseWriter, r *http.Request) {
				s.setHealth(dead)
				breaks["silent"](s, w, r)
			})
			f.d[1].serve = tokens(n, nil)
			if sends {
				f.d[0].setHealth(dead)
				time.Sleep(20 * time.Millisecond)
				f.d[0].setHealth(nil)
				time.AfterFunc(time.Second, func() { f.d[0].setHealth(dead) })
			}
			got := f.post("/v1/chat/completions", chat)
			if want := said(n) + api.Done; got.body != want {
				t.Fatalf("%+v", got)
			}
			synctest.Wait()
			moved := len(f.d[1].requests())
			if !sends && (got.took > 3*time.Second || moved != 1) || sends && moved != 0 {
				t.Errorf("sends %v: took %v, %d requests at the other decode", sends, got.took, moved)
			}
		})
	}
}

// A stream that waits for KV from a prefill that is gone (its decode wants the
// prompt computed anew) does not wait for decode to give that prefill up; one
// that needs nothing of it is left alone.
func TestSilentStreamMovesWithoutItsPrefill(t *testing.T) {
	for _, silent := range []bool{true, false} {
		inFleet(t, 2, 2, nil, func(t *testing.T, f *fleet) {
			dead := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
			f.d[0].serve = breaking(2000, 2, func(s *stub, w http.ResponseWriter, r *http.Request) {
				f.p[0].setHealth(dead)
				if silent {
					breaks["silent"](s, w, r)
				}
			})
			f.d[1].serve = tokens(2000, nil)
			got := f.post("/v1/chat/completions", chat)
			if got.body != said(2000)+api.Done {
				t.Fatalf("%+v", got)
			}
			moved := len(f.d[1].requests())
			if silent && (moved != 1 || len(f.p[1].requests()) != 1 || got.took > 27*time.Second) || !silent && moved != 0 {
				t.Errorf("silent %v: %d requests at the other decode, %d at the other prefill, took %v", silent, moved, len(f.p[1].requests()), got.took)
			}
		})
	}
}
