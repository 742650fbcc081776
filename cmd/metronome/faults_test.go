package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/worker"
)

// Public faults of other systems that requests alone bring about, each test by
// the fault's number, on all three ways.

// generated is one answer of /generate.
type generated struct {
	Text string  `json:"text"`
	IDs  []int32 `json:"output_ids"`
	Meta struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Finish     struct {
			Type    string
			Matched any
		} `json:"finish_reason"`
		Logprobs []json.RawMessage `json:"output_token_logprobs"`
	} `json:"meta_info"`
}

// greedy is the answer that the stop tests cut.
const greedy = `"text":"The quick brown fox","sampling_params":{"max_new_tokens":12,"temperature":0,"ignore_eos":true`

func (f *roles) base(t *testing.T) generated {
	return decode[generated](t, f.three(t, "base", "/generate", "{"+greedy+"}}"))
}

// texts joins what a stream of /v1/completions says, event by event.
func texts(t *testing.T, a answer) (text string, events int) {
	t.Helper()
	for line := range strings.Lines(string(a.body)) {
		data, ok := strings.CutPrefix(line, "data: {")
		if !ok {
			continue
		}
		var e struct {
			Choices []struct{ Text string }
		}
		if err := json.Unmarshal([]byte("{"+data), &e); err != nil {
			t.Fatal(err)
		}
		for _, c := range e.Choices {
			text += c.Text
			events++
		}
	}
	return text, events
}

// No character of a stop string is ever given out, unless asked for; text and
// count are the same streamed and not, wherever the stop begins and ends.
func TestF55StopStrings(t *testing.T) {
	f := startRoles(t, nil)
	base := f.base(t).Text
	cut := func(n, m int) string { return string([]rune(base)[n:m]) }
	for _, c := range []struct {
		name string
		stop any
		end  string // what the text is cut at
	}{
		{"one character of the first token", cut(0, 1), cut(0, 1)},
		{"from prefill's token into decode's", cut(0, 5), cut(0, 5)},
		{"seven tokens", cut(2, 28), cut(2, 28)},
		{"overlapping", []string{cut(9, 12), cut(9, 14)}, cut(9, 12)},
		{"the longer one first", []string{cut(9, 14), cut(9, 12)}, cut(9, 12)},
		{"four, one of which comes", []string{"🦊", "\n\n\n", cut(20, 23), "\x00"}, cut(20, 23)},
		{"one that almost comes", cut(3, 9) + "🦊", ""},
		{"the whole answer", base, base},
		{"none", []string{}, ""}, {"null", nil, ""},
	} {
		stop, _ := json.Marshal(c.stop)
		want, kept := base, base
		if c.end != "" {
			at := strings.Index(base, c.end)
			want, kept = base[:at], base[:at+len(c.end)]
		}
		for _, keep := range []bool{false, true} {
			got := decode[generated](t, f.three(t, c.name, "/generate", fmt.Sprintf(`{%s,"stop":%s,"no_stop_trim":%v}}`, greedy, stop, keep)))
			if keep {
				want = kept
			}
			if got.Text != want || (got.Meta.Finish.Type == "stop") != (c.end != "") || got.Meta.Completion != len(got.IDs) {
				t.Errorf("%s, kept %v: %+v, want text %q", c.name, keep, got, want)
			}
			body := fmt.Sprintf(`{"prompt":"The quick brown fox","max_tokens":12,"temperature":0,"ignore_eos":true,"stop":%s,"include_stop_str_in_output":%v,"stream":true}`, stop, keep)
			streamed := f.three(t, c.name, "/v1/completions", body)
			if text, events := texts(t, streamed); text != want || events != got.Meta.Completion+1 {
				t.Errorf("%s, kept %v: the stream says %q in %d events, want %q in %d", c.name, keep, text, events, want, got.Meta.Completion+1)
			}
		}
	}
	for _, stop := range []string{`""`, `[""]`, `["a",""]`} {
		if a := f.three(t, stop, "/generate", fmt.Sprintf(`{%s,"stop":%s}}`, greedy, stop)); a.status != 400 {
			t.Errorf("stop %s: %v", stop, a)
		}
	}
}

// A stop of one character that is four tokens, which come among others of the
// same four bytes (the seed is one that draws it early): nothing of it is given out.
func TestF55StopEmoji(t *testing.T) {
	f := startRoles(t, nil)
	const fox = "🦊"
	ids := decode[struct{ Tokens []int32 }](t, f.three(t, "fox", "/tokenize", `{"text":"`+fox+`","add_special_tokens":false}`)).Tokens
	if len(ids) < 4 {
		t.Fatalf("%s is %v", fox, ids)
	}
	bias := map[string]int{}
	for _, id := range ids[len(ids)-4:] { // its bytes; a space may come first
		bias[fmt.Sprint(id)] = 100
	}
	only, _ := json.Marshal(bias)
	params := fmt.Sprintf(`"temperature":7,"seed":54,"ignore_eos":true,"logit_bias":%s`, only)
	whole := decode[generated](t, f.three(t, "no stop", "/generate", fmt.Sprintf(`{"text":"a","sampling_params":{%s,"max_new_tokens":30}}`, params)))
	want, _, met := strings.Cut(whole.Text, fox)
	if !met || want == "" {
		t.Fatalf("no fox, or nothing else, in %q", whole.Text)
	}
	for _, keep := range []bool{false, true} {
		if keep {
			want += fox
		}
		got := decode[generated](t, f.three(t, fox, "/generate", fmt.Sprintf(`{"text":"a","sampling_params":{%s,"max_new_tokens":30,"stop":%q,"no_stop_trim":%v}}`, params, fox, keep)))
		streamed, _ := texts(t, f.three(t, fox, "/v1/completions", fmt.Sprintf(`{"prompt":"a",%s,"max_tokens":30,"stop":%q,"include_stop_str_in_output":%v,"stream":true}`, params, fox, keep)))
		if got.Text != want || streamed != want || got.Meta.Finish.Type != "stop" {
			t.Errorf("kept %v: %q (%s), streamed %q, want %q", keep, got.Text, got.Meta.Finish.Type, streamed, want)
		}
	}
}

// usages reads the usage of an answer or of each event that has one.
func usages(t *testing.T, a answer) (list []map[string]any, last bool) {
	t.Helper()
	lines := strings.Split(string(a.body), "\n")
	for i, line := range lines {
		line = strings.TrimPrefix(line, "data: ")
		var b struct {
			Choices []any
			Usage   map[string]any
		}
		if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &b) != nil || b.Usage == nil {
			continue
		}
		list = append(list, b.Usage)
		last = len(b.Choices) == 0 && i+2 < len(lines) && lines[i+2] == "data: [DONE]"
	}
	return list, last
}

// Usage is the same on all ways: a prompt counts once however many choices it
// has, the token that prefill draws counts once, and a stream tells it only
// when asked, last before the end.
func TestF57Usage(t *testing.T) {
	f := startRoles(t, nil)
	stop := string([]rune(f.base(t).Text)[10:13])
	for _, c := range []struct {
		name, path, fields string
		prompt, completion float64
	}{
		{"by length", "/v1/completions", `"prompt":"The quick brown fox","max_tokens":5`, 8, 5},
		{"by string", "/v1/completions", fmt.Sprintf(`"prompt":"The quick brown fox","max_tokens":12,"stop":%q`, stop), 8, 0},
		{"two choices", "/v1/completions", `"prompt":"The quick brown fox","max_tokens":4,"n":2`, 8, 8},
		{"two prompts, two choices", "/v1/completions", `"prompt":[[9,8,7,6],[5,6,7]],"max_tokens":3,"n":2`, 7, 12},
		{"no output", "/v1/completions", `"prompt":"The quick brown fox","max_tokens":0`, 8, 0},
		{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"n":2`, 0, 10},
	} {
		common := c.fields + `,"temperature":0,"ignore_eos":true`
		whole, _ := usages(t, f.three(t, c.name, c.path, "{"+common+"}"))
		if len(whole) != 1 || whole[0]["total_tokens"] != whole[0]["prompt_tokens"].(float64)+whole[0]["completion_tokens"].(float64) {
			t.Fatalf("%s: usage %v", c.name, whole)
		}
		u := whole[0]
		if c.prompt > 0 && u["prompt_tokens"] != c.prompt || c.completion > 0 && u["completion_tokens"] != c.completion {
			t.Errorf("%s: usage %v, want %v and %v", c.name, u, c.prompt, c.completion)
		}
		asked, last := usages(t, f.three(t, c.name, c.path, "{"+common+`,"stream":true,"stream_options":{"include_usage":true}}`))
		if len(asked) != 1 || !last || fmt.Sprint(asked[0]["prompt_tokens"], asked[0]["completion_tokens"]) != fmt.Sprint(u["prompt_tokens"], u["completion_tokens"]) {
			t.Errorf("%s: streamed usage %v (last %v), whole %v", c.name, asked, last, u)
		}
		if unasked, _ := usages(t, f.three(t, c.name, c.path, "{"+common+`,"stream":true}`)); len(unasked) != 0 {
			t.Errorf("%s: usage %v that nobody asked for", c.name, unasked)
		}
	}
	f.three(t, "generate", "/generate", "{"+greedy+`},"stream":true}`)
}

// Aborted in the middle of a stream: the client is told, with the error that a
// plain answer has too, and everything ends.
func TestF57Abort(t *testing.T) {
	f := startRoles(t, nil)
	for base, aborts := range map[string]string{f.serve: f.serve, f.router: f.decode} {
		body := `{"text":"a","rid":"long","stream":true,"sampling_params":{"max_new_tokens":900,"temperature":1,"ignore_eos":true}}`
		req, _ := http.NewRequestWithContext(t.Context(), "POST", base+"/generate", strings.NewReader(body))
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(resp.Body)
		if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
			t.Fatalf("%q %v", line, err)
		}
		if a := send(t.Context(), "POST", aborts+"/abort_request", []byte(`{"rid":"long"}`)); a.status != 200 || !bytes.Contains(a.body, []byte(`"aborted":1`)) {
			t.Errorf("%v", a)
		}
		last := ""
		for line, err := in.ReadString('\n'); err == nil; line, err = in.ReadString('\n') {
			if strings.TrimSpace(line) != "" {
				last = line
			}
		}
		resp.Body.Close()
		if !strings.Contains(last, `"error"`) || !strings.Contains(last, "abort") {
			t.Errorf("the stream ends with %.300q", last)
		}
	}
}

// What a router sends to prefill must not depend on how long the answer may
// be, and nulls are as good as absent.
func TestF59PrefillsCopy(t *testing.T) {
	f := startRoles(t, nil)
	for name, fields := range map[string]string{
		"stream with usage":      `"stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":5`,
		"choices and stops":      `"n":3,"max_tokens":6,"stop":["z"],"logprobs":true,"top_logprobs":2`,
		"everything null":        `"max_tokens":3,"stream":null,"n":null,"stop":null,"logprobs":null,"top_logprobs":null,"top_p":null,"top_k":null,"min_p":null,"logit_bias":null,"tools":null,"response_format":null,"stream_options":null,"user":null,"ignore_eos":true,"presence_penalty":null,"frequency_penalty":null,"repetition_penalty":null,"echo":null,"best_of":null,"max_completion_tokens":null,"min_tokens":null`,
		"a response format":      `"max_tokens":3,"response_format":{"type":"text"}`,
		"unknown fields":         `"max_tokens":3,"whatever":{"max_tokens":9},"seed_of":[1e400]`,
		"min_tokens":             `"max_tokens":60,"min_tokens":50`,
		"an image":               `"max_tokens":3,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]`,
		"tools":                  `"max_tokens":3,"tools":[{"type":"function","function":{"name":"f"}}]`,
		"a client's own pairing": `"max_tokens":3,"data_parallel_rank":7,"kv_transfer_params":{"x":1}`,
	} {
		body := `{"temperature":1,"seed":3,` + fields
		if !strings.Contains(fields, "messages") {
			body += `,"messages":[{"role":"user","content":"hi"}]`
		}
		a := f.three(t, name, "/v1/chat/completions", body+"}")
		code, _, _ := a.failure()
		refused := strings.Contains(fields, "function") || strings.Contains(fields, "image") || strings.Contains(name, "min_tokens")
		if refused != (a.status == 400 && code == "unsupported") || !refused && a.status != 200 {
			t.Errorf("%s: %v", name, a)
		}
	}
}

// A prompt or an answer that only one of the two pools can hold is refused
// within a second, and nobody waits for the other side.
func TestF61LimitsDiffer(t *testing.T) {
	for name, small := range map[string]worker.Role{"prefill": worker.Prefill, "decode": worker.Decode} {
		f := startRoles(t, func(role worker.Role, c *worker.Config) {
			if c.KVPages = 100; role == small {
				c.KVPages = 40 // 640 tokens
			}
		})
		ids := strings.TrimSuffix(strings.Repeat("7,", 900), ",")
		for _, c := range []struct {
			name, body string
			fits       bool
		}{
			{"a prompt of 900", `{"prompt":[` + ids + `],"max_tokens":4}`, false},
			{"an answer of 900", `{"prompt":[7,8],"max_tokens":900,"stop_token_ids":[7],"logit_bias":{"7":100}}`, small == worker.Prefill},
			{"both fit", `{"prompt":[7,8],"max_tokens":4}`, true},
		} {
			began := time.Now()
			a := f.ask("router", "/v1/completions", []byte(c.body))
			code, _, _ := a.failure()
			if c.fits != (a.status == 200) || !c.fits && (a.status != 400 || code != "context_length_exceeded") {
				t.Errorf("small %s, %s: %v", name, c.name, a)
			}
			if took := time.Since(began); !c.fits && took > time.Second && !raceBuild {
				t.Errorf("small %s, %s: it took %v", name, c.name, took)
			}
		}
		f.idle(t)
	}
}

// Batches of every size: answers in input order, each that of its prompt alone,
// a bad item is one clear error, a client may leave.
func TestF62Batches(t *testing.T) {
	f := startRoles(t, func(_ worker.Role, c *worker.Config) { c.MaxRunning = 16 })
	prompt := func(i int) string { return fmt.Sprintf("Number %d: %s", i, strings.Repeat("word ", i%7)) }
	alone := map[string]string{}
	for i := range 7 {
		body, _ := json.Marshal(map[string]any{"text": prompt(i), "sampling_params": map[string]any{"max_new_tokens": 3, "temperature": 0, "ignore_eos": true}})
		alone[prompt(i)] = decode[generated](t, f.ask("serve", "/generate", body)).Text
	}
	for _, n := range []int{1, 2, 33, 257} {
		list := make([]string, n)
		for i := range list {
			list[i] = prompt(i % 7)
		}
		body, _ := json.Marshal(map[string]any{"text": list, "sampling_params": map[string]any{"max_new_tokens": 3, "temperature": 0, "ignore_eos": true}})
		for i, g := range decode[[]generated](t, f.three(t, fmt.Sprint(n, " prompts"), "/generate", string(body))) {
			if g.Text != alone[list[i]] {
				t.Errorf("%d prompts: answer %d is %q, want %q", n, i, g.Text, alone[list[i]])
			}
		}
	}
	for name, c := range map[string]struct {
		path, body string
		status     int
	}{
		"ids, streamed":           {"/generate", `{"input_ids":[[5,6],[7],[8,9,10]],"stream":true,"sampling_params":{"max_new_tokens":3,"temperature":0}}`, 200},
		"choices, streamed":       {"/v1/completions", `{"prompt":["a","b"],"n":3,"seed":5,"stream":true,"max_tokens":3}`, 200},
		"parameters for each":     {"/generate", `{"text":["a","b"],"sampling_params":[{"max_new_tokens":1,"temperature":0},{"max_new_tokens":4,"seed":5}]}`, 200},
		"one empty inside":        {"/generate", `{"input_ids":[[5],[],[6]],"sampling_params":{"max_new_tokens":3}}`, 400},
		"one too long inside":     {"/v1/completions", `{"prompt":["a","` + strings.Repeat("long ", 20000) + `"],"max_tokens":3}`, 400},
		"more than can be taken":  {"/v1/completions", `{"prompt":[` + strings.TrimSuffix(strings.Repeat(`"a",`, 1025), ",") + `],"max_tokens":1}`, 400},
		"more with their choices": {"/v1/completions", `{"prompt":["a","b","c","d","e","f","g","h","i"],"n":128,"max_tokens":1}`, 400},
	} {
		if a := f.three(t, name, c.path, c.body); a.status != c.status {
			t.Errorf("%s: %v", name, a)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	send(ctx, "POST", f.router+"/v1/completions", []byte(`{"prompt":["a","b","c"],"n":10,"max_tokens":1000,"ignore_eos":true,"stream":true}`))
}

// The prompt's log-probabilities from prefill, and the output's, its first token
// once, are those of one process: from any offset, in batches and streams, and
// the same again when a prefix cache covers the offset.
func TestF63LogprobsOverBothLegs(t *testing.T) {
	f := startRoles(t, nil)
	long := strings.Repeat("The quick brown fox jumps over it. ", 3)
	for _, c := range []struct{ path, body string }{
		{"/generate", `{"text":%q,"sampling_params":{"max_new_tokens":1,"temperature":0},"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":5}`},
		{"/generate", `{"text":%q,"sampling_params":{"max_new_tokens":8,"temperature":0,"ignore_eos":true},"return_logprob":true,"logprob_start_len":40,"top_logprobs_num":5}`},
		{"/generate", `{"text":[%q,"The quick"],"sampling_params":{"max_new_tokens":8,"temperature":0,"ignore_eos":true},"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":5}`},
		{"/generate", `{"text":%q,"sampling_params":{"max_new_tokens":8,"temperature":0,"ignore_eos":true},"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":5,"stream":true}`},
		{"/v1/completions", `{"prompt":%q,"max_tokens":8,"temperature":0,"ignore_eos":true,"logprobs":5,"echo":true}`},
		{"/v1/completions", `{"prompt":%q,"max_tokens":8,"temperature":0,"ignore_eos":true,"logprobs":5,"stream":true}`},
	} {
		body := fmt.Sprintf(c.body, long)
		first := f.three(t, body, c.path, body)
		if first.status != 200 || !bytes.Contains(first.body, []byte("logprob")) {
			t.Errorf("%s: %v", body, first)
		}
		if again := f.three(t, body, c.path, body); again.plain() != first.plain() {
			t.Errorf("%s: with a prefix cache\n%.1500s\nwithout\n%.1500s", body, again.plain(), first.plain())
		}
	}
}

// Forbidden tokens and alternatives without a chance are finite numbers in
// valid JSON: three checks each answer, streamed and not.
func TestF64MinusInfinity(t *testing.T) {
	f := startRoles(t, nil)
	first := f.base(t).IDs[0]
	for _, stream := range []string{"", `,"stream":true`} {
		for name, c := range map[string][2]string{
			"masked":       {"/generate", fmt.Sprintf(`{%s,"logit_bias":{"%d":-100,"5":-100}},"return_logprob":true,"top_logprobs_num":20,"logprob_start_len":0%s}`, greedy, first, stream)},
			"top_k 1":      {"/generate", fmt.Sprintf(`{%s,"top_k":1,"temperature":1},"return_logprob":true,"top_logprobs_num":20%s}`, strings.Replace(greedy, `"temperature":0,`, "", 1), stream)},
			"chat":         {"/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"max_tokens":3,"seed":1,"logprobs":true,"top_logprobs":20,"logit_bias":{"9":100,"8":-100}` + stream + `}`},
			"tiny, forced": {"/v1/completions", `{"prompt":"a","max_tokens":3,"seed":1,"temperature":1e-30,"logprobs":20,"logit_bias":{"9":100}` + stream + `}`},
		} {
			if a := f.three(t, name, c[0], c[1]); a.status != 200 || bytes.Contains(a.body, []byte("Inf")) {
				t.Errorf("%s: %v", name, a)
			}
		}
	}
}

// Empty prompts in every form: 400, or the answer to what a template or the
// tokenizer makes of it; the processes stay up and nobody waits.
func TestF65EmptyPrompts(t *testing.T) {
	f := startRoles(t, nil)
	chat := func(content string) string {
		return `{"max_tokens":2,"seed":1,"messages":[{"role":"user","content":` + content + `}]}`
	}
	for _, c := range []struct {
		path, body string
		status     int
	}{
		{"/v1/completions", `{"prompt":"","max_tokens":2,"seed":1}`, 200}, // the token that begins a text
		{"/v1/completions", `{"prompt":[""],"max_tokens":2,"seed":1}`, 200},
		{"/v1/completions", `{"prompt":["a",""],"max_tokens":2,"seed":1}`, 200},
		{"/v1/completions", `{"prompt":[],"max_tokens":2}`, 400},
		{"/v1/completions", `{"prompt":[[]],"max_tokens":2}`, 400},
		{"/v1/completions", `{"prompt":[[1],[]],"max_tokens":2}`, 400},
		{"/v1/completions", `{"prompt":null,"max_tokens":2}`, 400},
		{"/v1/completions", `{"max_tokens":2}`, 400},
		{"/v1/completions", `{"prompt":"   ","max_tokens":2,"seed":1}`, 200},
		{"/v1/completions", `{"prompt":"\u0000","max_tokens":2,"seed":1}`, 200},
		{"/v1/completions", `{"prompt":"","max_tokens":0,"echo":true,"logprobs":1}`, 200},
		{"/generate", `{"text":"","sampling_params":{"max_new_tokens":2,"seed":1}}`, 200},
		{"/generate", `{"input_ids":[],"sampling_params":{"max_new_tokens":2}}`, 400},
		{"/generate", `{"input_ids":[[]],"sampling_params":{"max_new_tokens":2}}`, 400},
		{"/generate", `{"text":null,"input_ids":null}`, 400},
		{"/generate", `{}`, 400},
		{"/v1/chat/completions", `{"messages":[]}`, 400},
		{"/v1/chat/completions", `{"messages":null}`, 400},
		{"/v1/chat/completions", `{}`, 400},
		{"/v1/chat/completions", chat(`null`), 400},
		{"/v1/chat/completions", chat(`""`), 200},
		{"/v1/chat/completions", chat(`[]`), 200},
		{"/v1/chat/completions", chat(`"\u0000"`), 200},
	} {
		if a := f.three(t, c.body, c.path, c.body); a.status != c.status {
			t.Errorf("%s %s: %v, want %d", c.path, c.body, a, c.status)
		}
	}
}

// Odd text and odd JSON: a clear answer, the same text everywhere, no 500.
func TestF67OddBodies(t *testing.T) {
	f := startRoles(t, nil)
	chat := func(content string) string {
		return `{"max_tokens":2,"seed":1,"messages":[{"role":"user","content":` + content + `}]}`
	}
	for _, c := range []struct {
		name, body string
		status     int
	}{
		{"half a pair", chat(`"\ud83d"`), 200}, {"half a pair before text", chat(`"\ude00x"`), 200}, {"a pair", chat(`"\ud83e\udd8a"`), 200}, {"two halves, wrong way", chat(`"\udd8a\ud83e"`), 200},
		{"bytes that are no UTF-8", chat("\"a\xff\xc3(\xed\xa0\x80\""), 200}, {"NUL", chat(`"a\u0000b"`), 200}, {"marks", chat(`"\u202e\u200fabc\ufeff"`), 200},
		{"a bare NUL", chat("\"a\x00b\""), 400}, {"nested", chat(strings.Repeat("[", 20000) + strings.Repeat("]", 20000)), 400}, {"nested in an unknown field", `{"x":` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `,` + chat(`"a"`)[1:], 200},
		{"nested too deep there", `{"x":` + strings.Repeat(`{"a":`, 20000) + `1` + strings.Repeat("}", 20000) + `,` + chat(`"a"`)[1:], 400},
		{"a key twice", `{"max_tokens":1,` + chat(`"a"`)[1:], 400}, {"a key twice by escapes", `{"max\u005ftokens":1,` + chat(`"a"`)[1:], 400}, {"data behind", chat(`"a"`) + "x", 400}, {"an object behind", chat(`"a"`) + "{}", 400},
		{"BOM", "\ufeff" + chat(`"a"`), 400}, {"gzip", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", 400}, {"cut", chat(`"a"`)[:40], 400}, {"empty", "", 400}, {"a list", "[]", 400}, {"a number", "5", 400}, {"null", "null", 400}, {"space", " \n" + chat(`"a"`) + "\n ", 200},
		{"8 KiB", chat(`"` + strings.Repeat("a b ", 2000) + `"`), 400}, {"2 MiB", chat(`"` + strings.Repeat("a b ", 1<<19) + `"`), 400},
		{"8 KiB beside", `{"x":"` + strings.Repeat("y", 8<<10) + `",` + chat(`"a"`)[1:], 200}, {"2 MiB beside", `{"x":"` + strings.Repeat("y", 2<<20) + `",` + chat(`"a"`)[1:], 200},
	} {
		if a := f.three(t, c.name, "/v1/chat/completions", c.body); a.status != c.status {
			t.Errorf("%s: %v, want %d", c.name, a, c.status)
		}
	}
	over := []byte(chat(`"` + strings.Repeat("a", 32<<20) + `"`))
	for _, base := range []string{f.serve, f.router} { // the other workers have serve's handler
		if a := send(t.Context(), "POST", base+"/v1/chat/completions", over); a.status != 413 {
			if a.status != 0 { // refused by its length, the rest unread: the connection may break under the writer
				t.Errorf("one over the limit: %v", a)
			}
		}
		shortBody(t, strings.TrimPrefix(base, "http://"), chat(`"a"`))
		coded(t, base+"/v1/chat/completions", chat(`"a"`))
	}
}

// coded sends a body that says it is compressed, and is.
func coded(t *testing.T, url, body string) {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	z.Write([]byte(body))
	z.Close()
	req, _ := http.NewRequestWithContext(t.Context(), "POST", url, &b)
	req.Header.Set("Content-Encoding", "gzip")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 400 && resp.StatusCode != 415 {
		t.Errorf("%s: a compressed body: %s", url, resp.Status)
	}
}

// shortBody announces more than it sends, and less.
func shortBody(t *testing.T, addr, body string) {
	t.Helper()
	for _, delta := range []int{20, -20} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body)+delta, body)
		c.(*net.TCPConn).CloseWrite()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && resp.StatusCode != 400 { // or no answer: there is nobody to hear it
			t.Errorf("%s: Content-Length %+d: %v", addr, delta, resp.Status)
		}
		c.Close()
	}
}

// The first token is drawn like any other, once: by prefill, with the request's
// parameters, and an end there is an end.
func TestF68FirstToken(t *testing.T) {
	f := startRoles(t, nil)
	base := f.base(t)
	sampled := func(i int) string {
		return fmt.Sprintf(`{"text":"The quick brown fox","sampling_params":{"max_new_tokens":3,"temperature":1,"seed":%d,"ignore_eos":true,"min_p":0.01,"presence_penalty":1,"repetition_penalty":1.2},"return_logprob":true}`, i)
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	var mu sync.Mutex
	first := map[int32]int{}
	n := 200
	if testing.Short() {
		n = 60
	}
	for i := range n {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			g := decode[generated](t, f.three(t, fmt.Sprint("seed ", i), "/generate", sampled(i)))
			mu.Lock()
			defer mu.Unlock()
			first[g.IDs[0]]++
			if len(g.IDs) != 3 || len(g.Meta.Logprobs) != 3 {
				t.Errorf("seed %d: %+v", i, g)
			}
		})
	}
	wg.Wait()
	if len(first) < n/10 {
		t.Errorf("only %d different first tokens in %d draws", len(first), n)
	}
	for name, c := range map[string]struct {
		params, finish string
		tokens         int
		text           string
	}{
		"forbidden": {fmt.Sprintf(`"logit_bias":{"%d":-100}`, base.IDs[0]), "length", 12, ""}, "the end token": {`"ignore_eos":false,"logit_bias":{"2":100}`, "stop", 1, ""},
		"a stop id": {fmt.Sprintf(`"stop_token_ids":[%d]`, base.IDs[0]), "stop", 1, ""}, "a stop string": {fmt.Sprintf(`"stop":%q`, base.Text[:1]), "stop", 1, ""}, "one token": {`"n":1`, "length", 12, base.Text},
	} {
		body := fmt.Sprintf("{%s,%s}}", strings.Replace(greedy, `,"ignore_eos":true`, "", 1), c.params)
		g := decode[generated](t, f.three(t, name, "/generate", body))
		if g.Meta.Finish.Type != c.finish || g.Meta.Completion != c.tokens || len(g.IDs) != c.tokens || c.tokens == 1 && g.Text != c.text || name == "forbidden" && g.IDs[0] == base.IDs[0] {
			t.Errorf("%s: %+v", name, g)
		}
	}
	// A prompt that ends inside a character: what completes it is decode's and prefill's alike.
	f.three(t, "a part of a character", "/generate", `{"input_ids":[244,5,233],"sampling_params":{"max_new_tokens":8,"temperature":1,"seed":4}}`)
}

// A body that never arrives whole ends in the request's own time with 408, one
// that ends early is 400: serve says what the router says.
func TestBodiesThatDoNotArrive(t *testing.T) {
	f := startRoles(t, nil)
	for _, way := range []struct{ name, base string }{{"serve", f.serve}, {"router", f.router}} {
		for _, path := range []string{"/generate", "/v1/completions", "/v1/chat/completions"} {
			for _, c := range []struct {
				half         bool // the client closes its sending side
				status       int
				code, phrase string
			}{{false, 408, "deadline_exceeded", "did not arrive in time"}, {true, 400, "invalid_request", "did not arrive whole"}} {
				conn, err := net.Dial("tcp", strings.TrimPrefix(way.base, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				conn.SetDeadline(time.Now().Add(10 * time.Second))
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nX-Request-Timeout: 300ms\r\nContent-Length: 50\r\n\r\n{", path)
				if c.half {
					conn.(*net.TCPConn).CloseWrite()
				}
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatalf("%s %s: %v", way.name, path, err)
				}
				data, _ := io.ReadAll(resp.Body)
				conn.Close()
				got := answer{status: resp.StatusCode, body: data}
				code, _, _ := got.failure()
				if got.status != c.status || code != c.code || !strings.Contains(string(data), c.phrase) || (resp.Header.Get("X-Should-Retry") == "false") == c.half {
					t.Errorf("%s %s, half closed %v: %v, x-should-retry %q", way.name, path, c.half, got, resp.Header.Get("X-Should-Retry"))
				}
			}
		}
	}
}
