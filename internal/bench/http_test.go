package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// answers is a server that streams so many tokens, or what it is told to.
type answers struct {
	mu      sync.Mutex
	prompts [][]int32
	order   *[]*answers
	text    string // instead of an answer
	status  int
	cached  int
}

func (a *answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		IDs      []int32 `json:"input_ids"`
		Stream   bool
		Sampling struct {
			Max int `json:"max_new_tokens"`
		} `json:"sampling_params"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !body.Stream || r.URL.Path != "/generate" || r.Header.Get("Authorization") != "Bearer secret" {
		http.Error(w, "no", http.StatusTeapot)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.prompts = append(a.prompts, body.IDs)
	*a.order = append(*a.order, a)
	if a.status != 0 {
		w.WriteHeader(a.status)
	}
	if a.text != "" {
		io.WriteString(w, a.text)
		return
	}
	for i := range body.Sampling.Max {
		fmt.Fprintf(w, "data: {\"text\":\"x\",\"meta_info\":{\"prompt_tokens\":%d,\"cached_tokens\":%d,\"completion_tokens\":%d}}\n\n", len(body.IDs), a.cached, i+1)
		w.(http.Flusher).Flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// Two servers are asked in turn, each first in every other round, for prompts
// that are never alike.
func TestHTTP(t *testing.T) {
	var order []*answers
	a, b := &answers{order: &order}, &answers{order: &order}
	sa, sb := httptest.NewServer(a), httptest.NewServer(b)
	defer sa.Close()
	defer sb.Close()
	m := &HTTP{URLs: []string{sa.URL, sb.URL + "/"}, Token: "secret", Prompt: 40, Tokens: 3, Rounds: 3, Progress: io.Discard}
	r, err := m.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := []*answers{a, b, b, a, a, b, b, a}; !slices.Equal(order, want) {
		t.Error("they were not asked in turn")
	}
	seen := map[string]bool{}
	for _, ids := range slices.Concat(a.prompts, b.prompts) {
		if len(ids) != 40 || seen[fmt.Sprint(ids)] {
			t.Errorf("the prompt %v", ids)
		}
		seen[fmt.Sprint(ids)] = true
	}
	for i := range 2 {
		if r.TTFT[i].Low <= 0 || r.ITL[i].Median <= 0 {
			t.Errorf("%+v", r)
		}
	}
	var text, object strings.Builder
	if r.Text(&text) != nil || r.JSON(&object) != nil || !strings.Contains(text.String(), "the first ÷ the second") || !strings.Contains(object.String(), `"ttft_ratio":`) {
		t.Errorf("%s\n%s", text.String(), object.String())
	}
}

// What is no whole answer gives no figure.
func TestHTTPTakesNoHalfAnswer(t *testing.T) {
	event := `data: {"meta_info":{"prompt_tokens":4,"cached_tokens":0,"completion_tokens":%d}}` + "\n\n"
	for want, a := range map[string]*answers{
		"status 503: full":                   {status: 503, text: "full"},
		"the stream broke off":               {text: fmt.Sprintf(event, 1)},
		`{"error":{"code":"internal"}}`:      {text: `data: {"error":{"code":"internal"}}` + "\n\n"},
		"2 tokens for a prompt of 4, of whi": {text: fmt.Sprintf(event, 2) + "data: [DONE]\n\n"},
		"of which 4 were cached":             {cached: 4},
		"an event that is none":              {text: "data: moo\n\ndata: [DONE]\n\n"},
	} {
		a.order = new([]*answers)
		s := httptest.NewServer(a)
		_, err := (&HTTP{URLs: []string{s.URL}, Token: "secret", Prompt: 4, Tokens: 3, Rounds: 1, Progress: io.Discard}).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		s.Close()
	}
}

// A server that falls silent is named, before its first byte and after, and an
// interrupt ends the wait; what was measured before is told in both cases.
func TestHTTPEndsTheWait(t *testing.T) {
	for _, c := range []struct {
		name      string
		text      string // what comes before the silence
		interrupt bool
	}{
		{"no byte", "", false},
		{"half an answer", "data: {}\n\n", false},
		{"interrupted", "", true},
	} {
		a := &answers{order: new([]*answers)}
		ctx, interrupt := context.WithCancel(t.Context())
		asked := 0
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if asked++; asked <= 3 { // one to warm up, two that count
				a.ServeHTTP(w, r)
				return
			}
			io.Copy(io.Discard, r.Body)
			io.WriteString(w, c.text)
			w.(http.Flusher).Flush()
			if c.interrupt {
				interrupt()
			}
			<-r.Context().Done()
		}))
		m := &HTTP{URLs: []string{s.URL}, Token: "secret", Prompt: 4, Tokens: 3, Rounds: 9, Silence: 100 * time.Millisecond, Progress: io.Discard}
		if c.interrupt {
			m.Silence = time.Hour
		}
		r, err := m.Run(ctx)
		if r == nil || r.Rounds != 2 {
			t.Errorf("%s: the report is %+v, not of two rounds", c.name, r)
		}
		if c.interrupt && !errors.Is(err, context.Canceled) || !c.interrupt && (err == nil || err.Error() != s.URL+": nothing came for 100ms") {
			t.Errorf("%s: %v", c.name, err)
		}
		interrupt()
		s.Close()
	}
}
