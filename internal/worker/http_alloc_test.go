package worker

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// sink is a client that takes everything.
type sink struct {
	header http.Header
	events int
}

func (s *sink) Header() http.Header              { return s.header }
func (s *sink) WriteHeader(int)                  {}
func (s *sink) Write(p []byte) (int, error)      { s.events++; return len(p), nil }
func (s *sink) Flush()                           {}
func (s *sink) SetWriteDeadline(time.Time) error { return nil }

// A token on its way from the loop to the wire allocates nothing, in every
// form, beside a journal or not. Log-probabilities, where they are asked for,
// do; so does net/http, once for the head of each chunk.
func TestStreamingATokenAllocatesNothing(t *testing.T) {
	if raceBuild {
		t.Skip("the race detector lets pools forget")
	}
	for _, c := range []struct {
		name string
		kind api.Kind
		form func(*api.Request) dialect
	}{
		{"chat", api.Chat, func(r *api.Request) dialect { return &openAI{req: r, id: "id", model: "m", text: byteText{256}} }},
		{"completion", api.Completion, func(r *api.Request) dialect { return &openAI{req: r, id: "id", model: "m", text: byteText{256}} }},
		{"generate", api.Generate, func(r *api.Request) dialect { return &sglang{req: r, ids: []string{"id"}, text: byteText{256}} }},
		{"deltas", api.Generate, func(r *api.Request) dialect {
			return &sglang{req: r, ids: []string{"id"}, deltas: true, text: byteText{256}}
		}},
	} {
		for _, journaled := range []bool{false, true} {
			box := NewBox(1<<20, nil)
			ch := &choice{job: &Job{Prompt: make([]int32, 9), StopIDs: []int32{2}, Box: box}, sampling: &api.Sampling{Logprobs: -1}, det: byteText{256}.detok(), stops: []string{"<end>"}}
			form, client := c.form(&api.Request{Kind: c.kind, ItemNum: 1}), &sink{header: http.Header{}}
			out, index := newEventWriter(client), 0
			var j *journal
			if journaled {
				j = &journal{}
			}
			token := func() {
				box.put(Item{Out: engine.Output{Token: 'a' + int32(index%26)}, Index: index}, &ch.job.Box.line)
				index++
				it, _ := box.TryNext()
				delta, _ := ch.take(it)
				if err := out.event(j.token(ch), form.event(ch, delta)); err != nil {
					t.Fatal(err)
				}
			}
			for range 100 {
				token()
			}
			if n := testing.AllocsPerRun(1000, token); n != 0 {
				t.Errorf("%s, journal %v: %v allocations a token, want none", c.name, journaled, n)
			}
			if client.events != index || !strings.HasSuffix(string(out.buf), "}\n\n") {
				t.Errorf("%s: %d events for %d tokens, the last is %q", c.name, client.events, index, out.buf)
			}
		}
	}
}
