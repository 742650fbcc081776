package router

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// script is a decode's stream: so many events, one at a time, and its end.
type script struct {
	event []byte
	left  int
}

func (s *script) Read(p []byte) (int, error) {
	if s.left--; s.left < 0 {
		return copy(p, api.Done), io.EOF
	}
	return copy(p, s.event), nil
}

// taker is a client that takes everything.
type taker struct{ events int }

func (t *taker) Header() http.Header              { return http.Header{} }
func (t *taker) WriteHeader(int)                  {}
func (t *taker) Write(p []byte) (int, error)      { t.events++; return len(p), nil }
func (t *taker) Flush()                           {}
func (t *taker) SetWriteDeadline(time.Time) error { return nil }

// An event on its way through the router allocates nothing, beside a journal
// or not. (net/http does once, for the head of the chunk that it writes.)
func TestRelayingAnEventAllocatesNothing(t *testing.T) {
	cfg := Default()
	cfg.Prefill, cfg.Decode = []string{"http://p:1"}, []string{"http://d:1"}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.stop()
	plain := []byte(`data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}` + "\n\n")
	token := api.AppendToken(nil, 0, &api.JournalToken{TokenLogprob: api.TokenLogprob{ID: 77}}, false)
	for name, event := range map[string][]byte{"plain": plain, "journal": append(api.JournalLine(nil, token), plain...)} {
		relay := func(n int) float64 {
			return testing.AllocsPerRun(20, func() {
				client := &taker{}
				x := &exchange{r: r, w: client, rc: http.NewResponseController(client), items: 1, pair: pair{phase: phaseRelaying, attempt: 1}}
				x.journal.kept = name == "journal"
				x.armed = 1
				events := api.NewEventReader(&script{event: event, left: n}, make([]byte, relayBuffer))
				if f := x.copyEvents(&attempt{n: 1}, events, nil, true, nil); f != nil {
					t.Fatalf("%s: %+v", name, f)
				}
				if client.events != n+1 || x.sent != int64(n*len(plain)+len(api.Done)) || x.journal.kept != (len(x.journal.text) > 0) || x.journal.lost {
					t.Fatalf("%s: %d writes of %d bytes for %d events", name, client.events, x.sent, n)
				}
			})
		}
		few, many := relay(100), relay(5100)
		if grown := (many - few) / 5000; grown > 0.01 { // the journal grows by doubling
			t.Errorf("%s: %.2f allocations an event, want none", name, grown)
		}
	}
}
