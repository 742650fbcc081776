package worker

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/metronome-serve/metronome/internal/api"
)

// legs sends both legs of a request as a router does, and gives the decode's
// stream: its events, and after each one the journal so far.
func (x *pair) legs(t *testing.T, path, body string, journal []byte) (events []string, journals [][]byte) {
	t.Helper()
	scan, err := api.Scan([]byte(body))
	kind := map[string]api.Kind{"/v1/chat/completions": api.Chat, "/v1/completions": api.Completion, "/generate": api.Generate}[path]
	items, batch, err2 := scan.Items(kind)
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	host, port, _ := net.SplitHostPort(x.p.prefill.addr)
	in := api.Injection{Host: host, Rooms: make([]int64, items), Batch: batch, Journal: journal}
	in.Port, _ = strconv.Atoi(port)
	for i := range in.Rooms {
		in.Rooms[i] = rand.Int64()
	}
	segs, _, _ := scan.Splice(nil, nil, in)
	post := func(w *Worker) *http.Response {
		req, _ := http.NewRequest("POST", w.readyLine().HTTP+path, bytes.NewReader(bytes.Join(segs, nil)))
		req.Header.Set(api.JournalHeader, "1")
		req.Header.Set("X-Request-Id", "the-same")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	var g sync.WaitGroup
	g.Go(func() {
		resp := post(x.p)
		defer resp.Body.Close()
		if out, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
			t.Errorf("prefill leg: %d %s %v", resp.StatusCode, out, err)
		}
	})
	defer g.Wait()
	resp := post(x.d)
	defer resp.Body.Close()
	if got := resp.Header.Get(api.JournalHeader); resp.StatusCode != 200 || got != fmt.Sprint(len(journal)) {
		out, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s after %q: %d %s, journal %q", body, journal, resp.StatusCode, out, got)
	}
	er, cut := api.NewEventReader(resp.Body, nil), api.JournalCutter{}
	for {
		run, _, err := er.Next()
		for e := range strings.SplitSeq(string(run), "\n\n") {
			if e == "" {
				continue
			}
			clean, grown, ok := cut.Cut([]byte(e+"\n\n"), bytes.Clone(journal))
			if !ok {
				t.Fatalf("event %q", e)
			}
			events, journals, journal = append(events, string(clean)), append(journals, grown), grown
		}
		if err != nil {
			return events, journals
		}
	}
}

// A stream goes on after any of its events without a seam: event by event the
// same bytes, on all paths, whatever the sampling, the stop strings and the
// number of answers.
func TestStreamGoesOn(t *testing.T) {
	x := &pair{p: runWorker(t, Config{Role: Prefill, PrefixCache: true, Drain: 1}), d: runWorker(t, Config{Role: Decode})}
	const text = `"The beat goes on"`
	for _, c := range []struct{ name, path, body string }{
		{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":` + text + `}],"max_tokens":10,"temperature":0,"logprobs":true,"top_logprobs":2,"stream_options":{"include_usage":true}`},
		{"two choices", "/v1/chat/completions", `"messages":[{"role":"user","content":` + text + `}],"max_tokens":6,"n":2,"temperature":1.2,"seed":5,"top_p":0.95,"stream_options":{"include_usage":true}`},
		{"drawn seed", "/v1/chat/completions", `"messages":[{"role":"user","content":` + text + `}],"max_tokens":8,"temperature":1.5`},
		{"no limit", "/v1/chat/completions", `"messages":[{"role":"user","content":` + text + `}],"temperature":0,"stop":["STOP"]`},
		{"penalties", "/v1/completions", `"prompt":` + text + `,"max_tokens":12,"temperature":0.7,"seed":3,"presence_penalty":-1.5,"frequency_penalty":-1,"repetition_penalty":1.1,"logprobs":1`},
		{"prompts", "/v1/completions", `"prompt":[[5,6,7],[8,9,10,11]],"max_tokens":4,"temperature":0,"seed":1,"ignore_eos":true,"stop_token_ids":[STOPID]`},
		{"cumulative", "/generate", `"text":` + text + `,"sampling_params":{"max_new_tokens":9,"temperature":0,"stop":["STOP"]},"return_logprob":true,"top_logprobs_num":1`},
		{"batch", "/generate", `"text":["one",` + text + `],"sampling_params":{"max_new_tokens":4,"temperature":1,"seed":9}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			body := `{"stream":true,` + x.stops(t, c.path, c.body) + `}`
			want, journals := x.legs(t, c.path, body, nil)
			if !strings.HasSuffix(want[len(want)-1], "[DONE]\n\n") || len(want) < 5 {
				t.Fatalf("undisturbed: %q", want)
			}
			var g sync.WaitGroup
			every := 1
			if raceBuild {
				every = 4
			}
			for k := 0; k < len(want)-1; k += every {
				g.Go(func() {
					got, js := x.legs(t, c.path, body, journals[k])
					if byAnswer(got) != byAnswer(want[k+1:]) {
						t.Errorf("%s after event %d, %s\n got %q\nwant %q", body, k, journals[k], got, want[k+1:])
					}
					if a, b := js[len(js)-1], journals[len(journals)-1]; len(a) != len(b) {
						t.Errorf("the journal after event %d grew to %s, want %s", k, a, b)
					}
				})
			}
			g.Wait()
		})
	}
	settled(t, x.p)
	settled(t, x.d)
}

// byAnswer is a stream sorted by answer, stable within each: whose token comes
// first among several is a matter of time.
func byAnswer(events []string) string {
	sorted := slices.Clone(events)
	slices.SortStableFunc(sorted, func(a, b string) int {
		of := func(e string) int {
			for i := range 2 {
				if strings.Contains(e, fmt.Sprintf(`"index":%d`, i)) {
					return i
				}
			}
			return 2
		}
		return of(a) - of(b)
	})
	return strings.Join(sorted, "")
}

// stops puts a stop string that spans two tokens, or a stop id, of what the
// request without it is answered into the place that waits for it.
func (x *pair) stops(t *testing.T, path, body string) string {
	if !strings.Contains(body, "STOP") {
		return body
	}
	plain := strings.NewReplacer(`,"stop":["STOP"]`, "", `,"stop_token_ids":[STOPID]`, "").Replace(body)
	if !strings.Contains(plain, "max") {
		plain += `,"max_tokens":12`
	}
	_, journals := x.legs(t, path, `{"stream":true,`+plain+`}`, nil)
	j, err := api.ParseJournal(string(journals[len(journals)-1]), 2)
	if err != nil {
		t.Fatal(err)
	}
	said := j.Items[0].Tokens
	text := newFrontText(t, x.d)
	mid := min(len(said)/2, len(said)-2)
	two := text.decode([]int32{said[mid].ID, said[mid+1].ID})
	r := []rune(two)
	return strings.NewReplacer(`["STOP"]`, strconv.Quote(string(r[:len(r)-1])), "STOPID", fmt.Sprint(said[mid].ID)).Replace(body)
}

func newFrontText(t *testing.T, w *Worker) textCodec {
	text, err := newModelText(w.Model())
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// A journal is a router's alone: who does not ask for one may not hand one
// over, and what does not fit the request is refused.
func TestJournalIsRefused(t *testing.T) {
	d, serve := runWorker(t, Config{Role: Decode}), runWorker(t, Config{Role: Serve})
	for _, c := range []struct {
		w       *Worker
		header  bool
		journal string
	}{
		{d, false, "c 1;b 0 1 0 9;t 0 5;"},
		{serve, true, "c 1;b 0 1 0 9;t 0 5;"},
		{d, true, "c 1;b 0 1 0 9;t 0 5"},
		{d, true, "c 1;b 0 1 0 9;t 0 99999;"},
		{d, true, "c 1;b 0 1 0 9;t 0 5 bf000000 99999 bf000000;"},
		{d, true, "c 1;b 0 1 0 9;t 0 5;e 0;"},
		{d, true, "c 1;b 0 1 0 9;t 0 7;t 0 5;"}, // 7 is its stop id
	} {
		req, _ := http.NewRequest("POST", c.w.readyLine().HTTP+"/v1/completions", strings.NewReader(
			`{"prompt":"x","stream":true,"stop_token_ids":[7],"bootstrap_host":"h","bootstrap_room":1,"metronome_journal":"`+c.journal+`"}`))
		if c.header {
			req.Header.Set(api.JournalHeader, "1")
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		out, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 400 || !strings.Contains(string(out), `"param":"metronome_journal"`) {
			t.Errorf("%s worker, header %v, journal %s: %d %s", c.w.cfg.Role, c.header, c.journal, resp.StatusCode, out)
		}
	}
}
