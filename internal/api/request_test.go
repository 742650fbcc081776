package api

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var parsers = map[Kind]func([]byte) (*Request, *Error){Chat: ParseChat, Completion: ParseCompletion, Generate: ParseGenerate}

func TestParseTakes(t *testing.T) {
	seed := func(v uint64) *uint64 { return &v }
	base := func(kind Kind, maxTokens int) Request {
		return Request{Kind: kind, N: 1, DPRank: -1, ItemNum: 1,
			Sampling: Sampling{MaxTokens: maxTokens, Temperature: 1, TopP: 1, Repetition: 1, Logprobs: -1, PromptFrom: -1}}
	}
	for _, tc := range []struct {
		name, body string
		want       func() Request
	}{
		{"chat", `{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":0,"stream":true,"stream_options":{"include_usage":true},"seed":-1}`, func() Request {
			r := base(Chat, -1)
			r.Model, r.Messages, r.Temperature, r.Stream, r.IncludeUsage, r.Seed = "m", []Message{{"user", "hi"}}, 0, true, true, seed(math.MaxUint64)
			return r
		}},
		{"chat parts and logprobs", `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],"logprobs":true,"top_logprobs":3,"max_completion_tokens":5,"stop":"x","n":2}`, func() Request {
			r := base(Chat, 5)
			r.Messages, r.Logprobs, r.Stop, r.N, r.ItemNum = []Message{{"user", "ab"}}, 3, []string{"x"}, 2, 2
			return r
		}},
		{"defaults may be spelled out", `{"messages":[{"role":"user","content":"hi"}],"tools":[],"response_format":{"type": "text"},"echo":null,"user":"u","Model":"not ours"}`, func() Request {
			r := base(Chat, -1)
			r.Messages = []Message{{"user", "hi"}}
			return r
		}},
		{"completion ids", `{"prompt":[1,2,3],"logprobs":2,"logit_bias":{"5":-100},"top_k":-1}`, func() Request {
			r := base(Completion, 16)
			r.Prompts, r.Logprobs, r.LogitBias = []Prompt{{IDs: []int32{1, 2, 3}}}, 2, []Bias{{5, -100}}
			return r
		}},
		{"completion list", `{"prompt":["a","b"],"n":2,"bootstrap_room":9223372036854775803,"bootstrap_host":"h","bootstrap_port":8998}`, func() Request {
			r := base(Completion, 16)
			r.Prompts, r.List, r.N, r.ItemNum = []Prompt{{Text: "a"}, {Text: "b"}}, true, 2, 4
			for i := range int64(4) {
				r.Pairs = append(r.Pairs, Pairing{"h", 8998, 9223372036854775803 + i})
			}
			return r
		}},
		{"generate", `{"text":"t","sampling_params":{"max_new_tokens":3,"sampling_seed":7,"stop_token_ids":[2],"ignore_eos":true,"temperature":0.5},"return_logprob":true,"rid":"r","bootstrap_host":["a"],"bootstrap_port":[null],"bootstrap_room":[0],"temperature":9}`, func() Request {
			r := base(Generate, 3)
			r.Prompts, r.Seed, r.StopIDs, r.IgnoreEOS, r.Temperature, r.Logprobs, r.RIDs = []Prompt{{Text: "t"}}, seed(7), []int32{2}, true, 0.5, 0, []string{"r"}
			r.Pairs = []Pairing{{"a", 0, 0}}
			return r
		}},
		{"echo", `{"prompt":[4,5],"max_tokens":0,"echo":true,"logprobs":1}`, func() Request {
			r := base(Completion, 0)
			r.Prompts, r.Echo, r.Logprobs, r.PromptFrom = []Prompt{{IDs: []int32{4, 5}}}, true, 1, 0
			return r
		}},
		{"prompt logprobs", `{"text":"t","return_logprob":true,"logprob_start_len":0,"top_logprobs_num":5,"sampling_params":{"max_new_tokens":0,"no_stop_trim":true}}`, func() Request {
			r := base(Generate, 0)
			r.Prompts, r.Logprobs, r.PromptFrom, r.KeepStop = []Prompt{{Text: "t"}}, 5, 0, true
			return r
		}},
		{"start without logprobs", `{"text":"t","logprob_start_len":3,"top_logprobs_num":5}`, func() Request {
			r := base(Generate, 128)
			r.Prompts = []Prompt{{Text: "t"}}
			return r
		}},
		{"one for each prompt", `{"text":["a","b"],"sampling_params":[{"max_new_tokens":3,"stop":"x","n":2},{"temperature":0,"n":2}],"return_logprob":[false,true],"logprob_start_len":[-1,2]}`, func() Request {
			r := base(Generate, 128)
			one, two := r.Sampling, r.Sampling
			one.MaxTokens, one.Stop = 3, []string{"x"}
			two.Temperature, two.Logprobs, two.PromptFrom = 0, 0, 2
			r.Prompts, r.List, r.N, r.ItemNum, r.Each = []Prompt{{Text: "a"}, {Text: "b"}}, true, 2, 4, []Sampling{one, two}
			return r
		}},
	} {
		want := tc.want()
		got, err := parsers[want.Kind]([]byte(tc.body))
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		if d := cmp.Diff(&want, got); d != "" {
			t.Errorf("%s: (-want +got)\n%s", tc.name, d)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, tc := range []struct {
		kind        Kind
		body        string
		code        Code
		param, text string
	}{
		{Chat, `{"messages":`, InvalidRequest, "", "not JSON"},
		{Chat, `[]`, InvalidRequest, "", "JSON object"},
		{Chat, `{}`, InvalidRequest, "messages", "missing"},
		{Chat, `{"messages":[]}`, InvalidRequest, "messages", "at least one"},
		{Chat, `{"messages":[{"role":"user"}]}`, InvalidRequest, "messages[0]", "content"},
		{Chat, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, Unsupported, "messages[0].content", "of type \"text\""},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}]}`, Unsupported, "tools", "not supported"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"temperature":"hot"}`, InvalidRequest, "temperature", "a number"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"temperature":1e999}`, InvalidRequest, "temperature", "a number"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"n":0}`, InvalidRequest, "n", "from 1"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"max_tokens":1.5}`, InvalidRequest, "max_tokens", "an integer"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"stream":1}`, InvalidRequest, "stream", "true or false"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"top_logprobs":1}`, InvalidRequest, "top_logprobs", "logprobs"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"n":1,"n":2}`, InvalidRequest, "n", "twice"},
		{Completion, `{"` + strings.Repeat("x", 99) + `":1,"` + strings.Repeat("x", 99) + `":2}`, InvalidRequest, strings.Repeat("x", 64), "twice"},
		{Completion, `{"prompt":{}}`, InvalidRequest, "prompt", "a string"},
		{Completion, `{"prompt":[1,"a"]}`, InvalidRequest, "prompt", "a list"},
		{Completion, `{"prompt":["1"],"prompt_logprobs":1}`, Unsupported, "prompt_logprobs", "not supported"},
		{Completion, `{"prompt":[-1]}`, InvalidRequest, "prompt", ""},
		{Completion, `{"prompt":"a","echo":1}`, InvalidRequest, "echo", "true or false"},
		{Chat, `{"messages":[{"role":"user","content":"a"}],"echo":true}`, Unsupported, "echo", ""},
		{Completion, `{"prompt":"a","max_tokens":-1}`, InvalidRequest, "max_tokens", "from 0"},
		{Completion, `{"prompt":"a","user":5}`, InvalidRequest, "user", "a string"},
		{Generate, `{"text":["a","b"],"sampling_params":[{},{},{}]}`, InvalidRequest, "sampling_params", "2 prompts"},
		{Generate, `{"text":["a","b"],"sampling_params":[{"n":1},{"n":2}]}`, InvalidRequest, "sampling_params.n", "the same"},
		{Generate, `{"text":"a","return_logprob":[true,false]}`, InvalidRequest, "return_logprob", "1 prompts"},
		{Generate, `{"text":"a","logprob_start_len":-2}`, InvalidRequest, "logprob_start_len", "from -1"},
		{Generate, `{"text":"a","return_logprob":"yes"}`, InvalidRequest, "return_logprob", "true or false"},
		{Completion, `{"prompt":"a","stop":[""]}`, InvalidRequest, "stop", "1 to"},
		{Completion, `{"prompt":"a","logit_bias":{"x":1}}`, InvalidRequest, "logit_bias", "token ids"},
		{Completion, `{"prompt":["a","b"],"bootstrap_room":[1,2,3]}`, InvalidRequest, "", "3 entries for 2"},
		{Completion, `{"prompt":["a","b"],"bootstrap_room":9223372036854775807}`, InvalidRequest, "", "no room numbers"},
		{Completion, `{"prompt":"a","bootstrap_room":9223372036854775808}`, InvalidRequest, "bootstrap_room", "an integer"},
		{Completion, `{"prompt":"a","bootstrap_room":1e3}`, InvalidRequest, "bootstrap_room", "an integer"},
		{Generate, `{"text":"a","input_ids":[1]}`, InvalidRequest, "input_ids", "once"},
		{Generate, `{"input_ids":"a"}`, InvalidRequest, "input_ids", "token ids"},
		{Generate, `{"text":"a","sampling_params":{"regex":"x"}}`, Unsupported, "regex", ""},
		{Generate, `{"text":"a","sampling_params":[]}`, InvalidRequest, "sampling_params", "an object"},
		{Generate, `{"text":["a","b"],"rid":["x","y","z"]}`, InvalidRequest, "rid", "2 answers"},
		{Generate, `{"text":"a","sampling_params":{"n":1,"n":2}}`, InvalidRequest, "sampling_params", "twice"},
		{Generate, `{"text":["a","b"],"sampling_params":[{},{"top_k":"x"}]}`, InvalidRequest, "top_k", "an integer"},
		{Generate, `{"text":"a","return_logprob":[]}`, InvalidRequest, "return_logprob", "one value"},
		{Completion, `{"prompt":"a","min_p":2}`, InvalidRequest, "min_p", "from 0"},
		{Completion, `{"prompt":"a","presence_penalty":3}`, InvalidRequest, "presence_penalty", "from -2"},
		{Completion, `{"prompt":"a","frequency_penalty":-3}`, InvalidRequest, "frequency_penalty", "from -2"},
		{Completion, `{"prompt":"a","repetition_penalty":0}`, InvalidRequest, "repetition_penalty", "from 0.01"},
		{Completion, `{"prompt":"a","seed":"x"}`, InvalidRequest, "seed", "an integer"},
		{Completion, `{"prompt":[]}`, InvalidRequest, "prompt", "empty list"},
		{Completion, `{}`, InvalidRequest, "prompt", "missing"},
		{Generate, `{}`, InvalidRequest, "text", "missing"},
		{Completion, `{"prompt":"a","logit_bias":{"1":101}}`, InvalidRequest, "logit_bias", "from -100"},
		{Completion, `{"prompt":"a","bootstrap_port":[]}`, InvalidRequest, "bootstrap_port", "list of integers"},
		{Completion, `{"prompt":"a","bootstrap_port":70000}`, InvalidRequest, "bootstrap_port", "from 1"},
		{Completion, `{"prompt":"a","disagg_prefill_dp_rank":-1}`, InvalidRequest, "disagg_prefill_dp_rank", "from 0"},
		{Completion, `{"prompt":"a","stop":7}`, InvalidRequest, "stop", "a string or a list"},
		{Completion, `{"prompt":"a","stop":["a",7]}`, InvalidRequest, "stop", "a string or a list"},
		{Chat, `{"messages":[{"role":"user","content":7}]}`, InvalidRequest, "messages[0].content", "text parts"},
		{Chat, `{"messages":[{"role":"assistant","content":"a","tool_calls":[{}]}]}`, Unsupported, "messages[0].tool_calls", "not supported"},
		{Generate, `{"text":"a","return_logprob":[null]}`, InvalidRequest, "return_logprob", "without null"},
		{Completion, `{"prompt":"a","top_p":0}`, InvalidRequest, "top_p", "above 0"},
		{Completion, `{"prompt":"a","top_p":2}`, InvalidRequest, "top_p", "from 0"},
		{Completion, `{"prompt":["a",1]}`, InvalidRequest, "prompt", "strings throughout"},
		{Completion, `{"prompt":[[1],"a"]}`, InvalidRequest, "prompt", ""},
		{Completion, `{"prompt":[` + strings.Repeat(`"a",`, MaxItems) + `"a"]}`, InvalidRequest, "prompt", "at most"},
		{Completion, `{"prompt":[` + strings.Repeat(`[1],`, MaxItems) + `[1]]}`, InvalidRequest, "prompt", "at most"},
	} {
		_, err := parsers[tc.kind]([]byte(tc.body))
		if err == nil {
			t.Errorf("%s: taken", tc.body)
			continue
		}
		if err.Code != tc.code || err.Param != tc.param || !strings.Contains(err.Message, tc.text) {
			t.Errorf("%s: got %s param %q %q, want %s param %q …%s…", tc.body, err.Code, err.Param, err.Message, tc.code, tc.param, tc.text)
		}
	}
}

// TestKeysOfOtherKinds: what only another kind of request means is ignored, like
// any key that is not known.
func TestKeysOfOtherKinds(t *testing.T) {
	for kind, body := range map[Kind]string{
		Completion: `{"prompt":"a","sampling_params":7,"return_logprob":7,"top_logprobs":"x","sampling_seed":"x","text":7,"input_ids":7,"messages":7}`,
		Generate:   `{"text":"a","prompt":7,"messages":7,"top_logprobs":"x"}`,
	} {
		if _, err := parsers[kind]([]byte(body)); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestTokens(t *testing.T) {
	tok := NewTokens("alpha", "beta")
	for header, want := range map[string]Code{"": Unauthorized, "Basic alpha": Unauthorized, "Bearer ": Unauthorized, "Bearer gamma": Forbidden,
		"Bearer alpha": "", "bearer beta": ""} {
		err := tok.Authorize(header)
		if (err == nil) != (want == "") || err != nil && err.Code != want {
			t.Errorf("%q: got %v, want %q", header, err, want)
		}
	}
	if err := (Tokens{}).Authorize(""); err != nil {
		t.Errorf("without tokens: %v", err)
	}
}

// What peers are told of JSON that does not fit names no type of Go.
func TestJSONFault(t *testing.T) {
	for text, want := range map[string]string{
		`[]`: "it is of type array", `{"a":5}`: "`a` is of type number", `{`: "unexpected end of JSON input", `{"a":"b"}`: "",
	} {
		var v struct {
			A string `json:"a"`
		}
		got := ""
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			got = JSONFault(err)
		}
		if got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

// What a client sends that only spells out the default is no wish for what we
// lack, however it spells it.
func TestDefaultsOfTheUnsupported(t *testing.T) {
	for field, want := range map[string]bool{
		`"length_penalty":1`: true, `"length_penalty":1.0`: true, `"length_penalty":1e0`: true, `"length_penalty":0.5`: false, `"length_penalty":"1.0"`: false,
		`"best_of":1.0`: true, `"best_of":2.0`: false, `"min_tokens":0.0`: true, `"min_tokens":-0`: true, `"min_tokens":1`: false,
		`"response_format": { "type" : "text" }`: true, `"response_format":{"type":"json_object"}`: false,
		`"stop_regex":[]`: true, `"stop_regex":["a"]`: false, `"image_data":[ ]`: true, `"image_data":["x"]`: false, `"session_params":{}`: false,
		`"logits_processors":[]`: true, `"guided_json":{}`: false, `"regex":""`: false, `"use_beam_search":false`: true, `"use_beam_search":0`: false,
	} {
		if _, e := ParseCompletion([]byte(`{"prompt":"a",` + field + `}`)); (e == nil) != want {
			t.Errorf("%s: %v", field, e)
		}
	}
}
