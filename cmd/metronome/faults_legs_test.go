package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/worker"
)

// Public faults of other systems about who a request is: its rooms and ids, its
// choices, its client, who may be gone, and its other leg, which may be refused.

// simulated makes workers of the sim engine, whose times a test can choose.
func simulated(change tune) tune {
	return func(role worker.Role, c *worker.Config) {
		c.Engine, c.Model, c.KVPages = "sim", "sim", 400
		if change != nil {
			change(role, c)
		}
	}
}

// reader reads a stream event by event.
type reader struct {
	leave func()
	resp  *http.Response
	in    *bufio.Reader
	err   error
}

// stream begins a request with the id and returns when its answer has begun,
// which without events is never, or has failed.
func stream(ctx context.Context, url, body, id string) *reader {
	ctx, cancel := context.WithCancel(ctx)
	r := &reader{leave: cancel}
	req, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if r.err = err; err != nil {
		return r
	}
	req.Header.Set("X-Request-Id", id)
	if r.resp, r.err = client.Do(req); r.err == nil {
		r.in = bufio.NewReader(r.resp.Body)
	}
	return r
}

// next is the next event's data, or "" at the end.
func (r *reader) next() string {
	for r.err == nil {
		var line string
		line, r.err = r.in.ReadString('\n')
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			return strings.TrimSpace(data)
		}
	}
	if r.resp != nil {
		r.resp.Body.Close()
	}
	return ""
}

// rest reads to the end and gives the last answer of a /generate stream.
func (r *reader) rest(t *testing.T) (g generated) {
	t.Helper()
	done := false
	for data := r.next(); data != ""; data = r.next() {
		if done = data == "[DONE]"; !done {
			g = generated{}
			if err := json.Unmarshal([]byte(data), &g); err != nil {
				t.Errorf("%q: %v", data, err)
			}
		}
	}
	if !done {
		t.Errorf("the stream has no end: %+v, %v", g, r.err)
	}
	return g
}

// choice is a choice of either OpenAI API or a whole answer of /generate.
type choice struct {
	Index   int
	Text    string
	Message struct{ Content string }
	Delta   struct{ Content string }
}

func (c choice) said() string { return c.Text + c.Message.Content + c.Delta.Content }

// choices are the texts of an answer in its order, which is that of the indexes.
func choices(t *testing.T, a answer) (texts []string) {
	t.Helper()
	var openai struct{ Choices []choice }
	var list []choice
	if json.Unmarshal(a.body, &list) == nil { // /generate: their order is all
		for _, c := range list {
			texts = append(texts, c.said())
		}
		return texts
	}
	for i, c := range decodeTo(t, a, &openai).Choices {
		if c.Index != i {
			t.Errorf("choice %d has index %d: %v", i, c.Index, a)
		}
		texts = append(texts, c.said())
	}
	return texts
}

func decodeTo[T any](t *testing.T, a answer, v *T) *T {
	t.Helper()
	if err := json.Unmarshal(a.body, v); err != nil || a.status != 200 {
		t.Fatalf("%v: %v", a, err)
	}
	return v
}

// streamed are the texts of a stream's choices by their indexes. Chunks of
// /generate are cumulative.
func streamed(t *testing.T, a answer, n int) []string {
	t.Helper()
	texts := make([]string, n)
	for line := range strings.Lines(string(a.body)) {
		data, ok := strings.CutPrefix(line, "data: {")
		if !ok {
			continue
		}
		var e struct {
			choice
			Choices []choice
		}
		if err := json.Unmarshal([]byte("{"+data), &e); err != nil {
			t.Fatal(err)
		}
		if e.Choices == nil {
			texts[e.Index] = e.said()
		}
		for _, c := range e.Choices {
			texts[c.Index] += c.said()
		}
	}
	return texts
}

// Choices of one prompt, and of a batch of prompts, come in their
// order with their indexes, streamed and not, fifty at a time, and are those of
// each prompt alone; a client that leaves when one of them is whole leaves nothing.
func TestF25Choices(t *testing.T) {
	f := startRoles(t, nil)
	crowd := 50
	if raceBuild { // computes some ten times slower
		crowd = 5
	}
	for _, c := range []struct{ path, one, two string }{
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"One"}],"n":3,"max_tokens":6,"temperature":1,"seed":5`, ""},
		{"/v1/completions", `"prompt":"One","n":3,"max_tokens":6,"temperature":1,"seed":5`, `"prompt":["Two words","One"],"n":3,"max_tokens":6,"temperature":1,"seed":5`},
		{"/generate", `"text":"One","sampling_params":{"n":3,"max_new_tokens":6,"temperature":1,"seed":5}`, `"text":["Two words","One"],"sampling_params":{"n":3,"max_new_tokens":6,"temperature":1,"seed":5}`},
	} {
		alone := choices(t, f.three(t, c.path, c.path, "{"+c.one+"}"))
		if len(alone) != 3 || alone[0] == alone[1] || alone[1] == alone[2] {
			t.Fatalf("%s: three choices are %q", c.path, alone)
		}
		if got := streamed(t, f.three(t, c.path, c.path, "{"+c.one+`,"stream":true}`), 3); fmt.Sprint(got) != fmt.Sprint(alone) {
			t.Errorf("%s: streamed %q, whole %q", c.path, got, alone)
		}
		if c.two == "" {
			continue
		}
		both := choices(t, f.three(t, c.path, c.path, "{"+c.two+"}"))
		if len(both) != 6 || fmt.Sprint(both[3:]) != fmt.Sprint(alone) {
			t.Errorf("%s: of two prompts the second has %q, alone %q", c.path, both, alone)
		}
		body := []byte("{" + c.two + `,"stream":true}`)
		var wg sync.WaitGroup
		for range crowd {
			wg.Go(func() {
				if got := streamed(t, f.ask("router", c.path, body), 6); fmt.Sprint(got) != fmt.Sprint(both) {
					t.Errorf("%s: one of many streams says %q, want %q", c.path, got, both)
				}
			})
		}
		wg.Wait()
	}
	for _, base := range []string{f.serve, f.router} {
		r := stream(t.Context(), base+"/v1/completions", `{"prompt":"One","n":3,"max_tokens":900,"temperature":1,"seed":5,"ignore_eos":true,"stop":["e"],"stream":true}`, "three")
		data := r.next()
		for ; data != "" && !strings.Contains(data, `"finish_reason":"stop"`); data = r.next() {
		}
		if data == "" {
			t.Errorf("no choice ended: %v", r.err)
		}
		r.leave()
		f.idleWithin(t, 2*time.Second)
	}
}

// Two rooms that are one as floats are two on both legs, at the same
// time, and so are two seeds.
func TestF27RoomsAndSeeds(t *testing.T) {
	f := startRoles(t, nil)
	rooms := []int64{9007199254740992, 9007199254740993}
	body := func(i int) string {
		return fmt.Sprintf(`"text":"Room %d","sampling_params":{"max_new_tokens":40,"temperature":0,"ignore_eos":true}`, i)
	}
	host, port, _ := strings.Cut(f.bootstrap, ":")
	var wg sync.WaitGroup
	begun := sync.WaitGroup{}
	begun.Add(2)
	for i, room := range rooms {
		leg := fmt.Sprintf(`{%s,"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":%d,"stream":true}`, body(i), host, port, room)
		wg.Go(func() { send(t.Context(), "POST", f.prefill+"/generate", []byte(leg)) })
		wg.Go(func() {
			r := stream(t.Context(), f.decode+"/generate", leg, "room")
			if r.next() == "" {
				t.Errorf("room %d: %v", room, r.err)
			}
			begun.Done()
			begun.Wait() // both are open
			if _, a := f.open(f.decode); !strings.Contains(string(a.body), fmt.Sprintf(`"room":%d,`, room)) {
				t.Errorf("the live table of decode has no room %d: %s", room, a.body)
			}
			want := decode[generated](t, f.ask("serve", "/generate", []byte("{"+body(i)+"}")))
			if got := r.rest(t); got.Text != want.Text {
				t.Errorf("room %d: %q, want %q", room, got.Text, want.Text)
			}
		})
	}
	wg.Wait()
	texts := map[string]bool{}
	for _, seed := range []int64{rooms[0], rooms[1], -rooms[0], -rooms[1]} {
		body := fmt.Sprintf(`{"text":"x","sampling_params":{"max_new_tokens":12,"temperature":1,"ignore_eos":true,"seed":%d}}`, seed)
		texts[decode[generated](t, f.three(t, fmt.Sprint("seed ", seed), "/generate", body)).Text] = true
	}
	if len(texts) != 4 {
		t.Errorf("four seeds give %d answers", len(texts))
	}
}

// Requests that have one id, by header and by field, are as many
// requests: the end of one ends no other, and no gauge goes below zero.
func TestF28SameIDs(t *testing.T) {
	f := startRoles(t, nil)
	body := func(prompt string, n int) string {
		return fmt.Sprintf(`{"text":%q,"rid":"same","stream":true,"sampling_params":{"max_new_tokens":%d,"temperature":0,"ignore_eos":true}}`, prompt, n)
	}
	want := map[string]string{}
	for _, p := range []string{"The second", "The third"} {
		n := map[string]int{"The second": 60, "The third": 5}[p]
		want[p] = stream(t.Context(), f.serve+"/generate", body(p, n), "alone").rest(t).Text
	}
	for _, base := range []string{f.serve, f.router} {
		first := stream(t.Context(), base+"/generate", body("The first", 900), "same")
		second := stream(t.Context(), base+"/generate", body("The second", 60), "same")
		if first.next() == "" || second.next() == "" {
			t.Fatalf("%v, %v", first.err, second.err)
		}
		first.leave()
		third := stream(t.Context(), base+"/generate", body("The third", 5), "same").rest(t)
		for _, at := range []string{f.serve, f.prefill, f.decode} {
			holds(t, at) // none below zero
		}
		if got := second.rest(t); got.Text != want["The second"] || third.Text != want["The third"] {
			t.Errorf("%s: the second says %q, the third %q, want %q", base, got.Text, third.Text, want)
		}
		f.idleWithin(t, 2*time.Second)
	}
}

// Clients leave while their requests are queued, before the first
// token, after one chunk, and at random tokens while others come and go: nothing
// runs on for them two seconds later, and requests that follow take as long as before.
func TestF31GoneClients(t *testing.T) {
	f := startRoles(t, simulated(func(_ worker.Role, c *worker.Config) {
		c.MaxRunning, c.SimPrefillRate, c.SimDecodeBase = 4, 400, 2*time.Millisecond
	}))
	body := func(prompt, n int) string {
		return fmt.Sprintf(`{"prompt":%q,"stream":true,"max_tokens":%d}`, strings.Repeat("x", prompt), n)
	}
	short := func(base string) time.Duration {
		began := time.Now()
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				a := send(t.Context(), "POST", base+"/v1/completions", []byte(body(10, 20)))
				if _, events := texts(t, a); events != 20+1 || !bytes.HasSuffix(a.body, []byte("data: [DONE]\n\n")) {
					t.Errorf("a short request: %v", a)
				}
			})
		}
		wg.Wait()
		return time.Since(began)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	draw := rand.New(rand.NewPCG(seed, 0))
	for base, computes := range map[string]string{f.serve: f.serve, f.router: f.prefill} {
		if raceBuild && base == f.serve {
			continue // it has nothing that the others have not
		}
		quiet := short(base)
		for _, c := range []struct {
			name   string
			prompt int
			events func() int // that a client reads before it leaves; 0: until all leave
			ready  func() bool
		}{
			{"queued", 10, nil, func() bool { // four of sixteen run
				rows, _ := f.open(base)
				return len(rows) == 16
			}},
			{"before the first token", 400, nil, func() bool {
				rows, _ := f.open(computes)
				return slices.ContainsFunc(rows, func(r row) bool { return r.Phase == "computing" })
			}},
			{"after one chunk", 10, func() int { return 1 }, nil},
			{"at any token", 10, func() int { return 1 + draw.IntN(40) }, nil},
		} {
			ctx, leave := context.WithCancel(t.Context())
			var clients, others sync.WaitGroup
			for range 16 {
				n := 0
				if c.events != nil {
					n = c.events()
				}
				clients.Go(func() {
					r := stream(ctx, base+"/v1/completions", body(c.prompt, 5000), "leaves")
					for i := 1; r.next() != "" && i != n; i++ {
					}
					r.leave()
				})
			}
			if c.ready != nil {
				f.until(t, 10*time.Second, c.name, func() []string { return map[bool][]string{false: {"not yet"}}[c.ready()] })
				leave()
			} else {
				others.Go(func() { short(base) })
			}
			clients.Wait()
			others.Wait()
			f.idleWithin(t, 2*time.Second)
			if took := short(base); took > 3*quiet+time.Second && !raceBuild {
				t.Errorf("%s: the short requests after it took %v, %v before", c.name, took, quiet)
			}
			leave()
		}
	}
}

// What decode refuses, or gives up because its client has left its
// full queue, is given up by prefill too: its pages are free and its queue is
// empty within two seconds, and the client hears what decode says.
func TestF35DecodeRefuses(t *testing.T) {
	f := startRoles(t, simulated(func(role worker.Role, c *worker.Config) {
		c.SimPrefillRate, c.SimDecodeBase, c.PrefixCache = 1000, 50*time.Millisecond, false
		if role == worker.Decode {
			c.KVPages, c.ReservedTokens = 20, 1 // 320 tokens
		}
	}))
	many := func(ctx context.Context, each func(i int, ctx context.Context)) {
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() { each(i, ctx) })
		}
		wg.Wait()
	}
	many(t.Context(), func(i int, ctx context.Context) {
		body := fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":10},"stream":%v}`, strings.Repeat("x", 350), i%2 == 0)
		a := send(ctx, "POST", f.router+"/generate", []byte(body))
		if code, _, _ := a.failure(); a.status != 400 || code != "context_length_exceeded" {
			t.Errorf("a prompt that only prefill can hold: %v", a)
		}
	})
	f.idleWithin(t, 2*time.Second)

	// Two fill decode's pool for good. Prefill may compute what decode has no pages for.
	holders, release := context.WithCancel(t.Context())
	for range 2 {
		r := stream(holders, f.router+"/generate", fmt.Sprintf(`{"text":%q,"stream":true,"sampling_params":{"max_new_tokens":160}}`, strings.Repeat("x", 140)), "holds")
		if r.next() == "" {
			t.Fatal(r.err)
		}
	}
	clients, leave := context.WithCancel(t.Context())
	var left sync.WaitGroup
	for range 50 {
		left.Go(func() {
			r := stream(clients, f.router+"/generate", fmt.Sprintf(`{"text":%q,"stream":true,"sampling_params":{"max_new_tokens":10}}`, strings.Repeat("y", 140)), "leaves")
			if r.next() != "" {
				t.Error("decode has pages for more than two")
			}
		})
	}
	f.until(t, 10*time.Second, "decode's queue is not full, or prefill has computed nothing for it", func() []string {
		rows, _ := f.open(f.decode)
		legs, _ := f.open(f.prefill)
		computed := slices.DeleteFunc(legs, func(r row) bool { return r.Phase != "in flight" })
		return map[bool][]string{false: {fmt.Sprint(len(rows), len(computed))}}[len(rows) == 52 && len(computed) >= 3]
	})
	leave()
	f.until(t, 2*time.Second, "prefill holds what nobody wants", func() []string { return holds(t, f.prefill) })
	if rows, _ := f.open(f.decode); len(rows) != 2 {
		t.Errorf("decode has %d requests, want the two that run", len(rows))
	}
	release()
	left.Wait()
}
