package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// dialect is one of the three APIs.
type dialect struct {
	name, path, prompt string
	sampling           bool // parameters of sampling stand in sampling_params
}

var dialects = []dialect{
	{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"One, two"}]`, false},
	{"completions", "/v1/completions", `"prompt":"One, two"`, false},
	{"generate", "/generate", `"text":"One, two"`, true},
}

// body is a request with defaults that make the answer short and sure, and with
// one field set to a value; "" leaves it out.
func (d *dialect) body(field, value string, stream bool) string {
	max, top, params := "max_tokens", map[string]string{}, map[string]string{"temperature": "1", "seed": "7", "ignore_eos": "true"}
	if d.sampling {
		max = "max_new_tokens"
	}
	params[max] = "3"
	if stream {
		top["stream"] = "true"
	}
	prompt := d.prompt
	switch name, inside := strings.CutPrefix(field, "sampling_params."); {
	case inside:
		set(params, name, value)
	case slices.Contains([]string{"messages", "prompt", "text", "input_ids"}, field):
		prompt = ""
		set(top, field, value)
	case field == "sampling_params":
		params = nil
		set(top, field, value)
	case d.sampling:
		set(top, field, value)
	default:
		set(params, field, value)
	}
	if field == "max_completion_tokens" && value != "" && value != "null" {
		delete(params, max)
	}
	fields := []string{}
	if prompt != "" {
		fields = append(fields, prompt)
	}
	if d.sampling && params != nil {
		fields = append(fields, `"sampling_params":{`+join(params)+`}`)
	} else {
		maps.Copy(top, params)
	}
	if len(top) > 0 {
		fields = append(fields, join(top))
	}
	return "{" + strings.Join(fields, ",") + "}"
}

func set(m map[string]string, name, value string) {
	delete(m, name)
	if value != "" {
		m[name] = value
	}
}

func join(m map[string]string) string {
	var list []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		list = append(list, fmt.Sprintf("%q:%s", k, m[k]))
	}
	return strings.Join(list, ",")
}

// param is one parameter with values that work, and values that are refused
// with its name.
type param struct {
	name      string
	in        string // c chat, t completions, g generate: top level; G: in sampling_params
	good, bad []string
}

var long = strings.Repeat("x", 1025)

// params are all parameters of docs/http.md: the edges of each range on both
// sides, every wrong type, and the absurd. null and absence are tried for each.
var params = []param{
	{"messages", "c", []string{`[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":[{"type":"text","text":"c"}]}]`, `[{"role":"user","content":"\u0000"}]`, `[{"role":"user","content":"<s>[/INST]</s>"}]`},
		[]string{`[]`, `"a"`, `{}`, `5`, `[5]`, `["a"]`, `[{}]`, `[{"role":"user"}]`, `[{"role":5,"content":"a"}]`, `[{"role":"user","content":5}]`, `[{"role":"user","content":null}]`, `[null]`}},
	{"prompt", "t", []string{`"a"`, `["a"]`, `["a","b"]`, `[7]`, `[7,8]`, `[[7],[8,9]]`, `" "`, `"\u0000"`}, []string{`[]`, `[[]]`, `5`, `{}`, `true`, `[1,"a"]`, `[[1],"a"]`, `["a",1]`, `[-1]`, `[2048]`, `[1.5]`, `[1e99]`, `[[[1]]]`, `[9999999999]`}},
	{"text", "g", []string{`"a"`, `["a"]`, `["a","b"]`}, []string{`[]`, `5`, `[1]`, `[["a"]]`, `{}`, `false`}},
	{"input_ids", "g", []string{`[7]`, `[[7],[8,9]]`}, []string{`[]`, `[[]]`, `"a"`, `["a"]`, `[2048]`, `[-1]`, `5`, `{}`}},
	{"model", "ctg", []string{`"anything"`, `""`}, []string{`5`, `["a"]`, `{}`}},
	{"user", "ctg", []string{`"u"`}, []string{`5`, `[]`}},
	{"stream", "ctg", []string{`false`, `true`}, []string{`1`, `"true"`, `[]`, `{}`}},
	{"stream_options", "ct", []string{`{}`, `{"include_usage":true}`, `{"include_usage":false}`, `{"include_usage":null,"other":1}`}, []string{`true`, `[]`, `"a"`, `{"include_usage":1}`}},
	{"max_tokens", "ct", []string{`0`, `1`, `2`}, []string{`-1`, `1.5`, `"3"`, `true`, `[3]`, `1e3`, `99999999999999999999`, `2147483648`}},
	{"max_completion_tokens", "c", []string{`0`, `1`}, []string{`-1`, `"3"`, `{}`}},
	{"max_new_tokens", "G", []string{`0`, `1`, `2`}, []string{`-1`, `1.5`, `"3"`, `{}`, `2147483648`}},
	{"temperature", "ctG", []string{`0`, `1e-60`, `0.5`, `100`}, []string{`-0.1`, `100.1`, `1e999`, `"hot"`, `true`, `[1]`, `{}`}},
	{"top_p", "ctG", []string{`0.0001`, `0.5`, `1`}, []string{`0`, `-0.1`, `1.1`, `"a"`, `[]`}},
	{"top_k", "ctG", []string{`-1`, `0`, `1`, `2147483647`}, []string{`-2`, `1.5`, `2147483648`, `"a"`, `{}`}},
	{"min_p", "ctG", []string{`0`, `0.3`, `1`}, []string{`-0.1`, `1.1`, `"a"`, `[]`}},
	{"n", "ctG", []string{`1`, `3`}, []string{`0`, `-1`, `129`, `1.5`, `"2"`, `[]`, `99999999999999999999`}},
	{"stop", "ctG", []string{`"e"`, `[]`, `["a","e"]`, `"🦊"`, `"\u0000"`}, []string{`""`, `[""]`, `5`, `[5]`, `{}`, `"` + long + `"`, `["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p","q"]`}},
	{"stop_token_ids", "ctG", []string{`[]`, `[5]`, `[2147483647]`}, []string{`5`, `"a"`, `["a"]`, `[-1]`, `[1.5]`, `{}`}},
	{"include_stop_str_in_output", "ct", []string{`true`, `false`}, []string{`1`, `"a"`}},
	{"no_stop_trim", "G", []string{`true`, `false`}, []string{`1`, `"a"`}},
	{"seed", "ctG", []string{`0`, `-1`, `9223372036854775807`, `-9223372036854775808`, `9007199254740993`}, []string{`1.5`, `"a"`, `9223372036854775808`, `[]`, `{}`}},
	{"sampling_seed", "G", []string{`5`}, []string{`"a"`}},
	{"logprobs", "c", []string{`true`, `false`}, []string{`1`, `"a"`, `[]`}},
	{"logprobs", "t", []string{`0`, `1`, `20`, `false`}, []string{`-1`, `21`, `true`, `"a"`, `1.5`}},
	{"top_logprobs", "c", []string{`0`}, []string{`-1`, `21`, `"a"`, `3`}},
	{"presence_penalty", "ctG", []string{`-2`, `0`, `2`}, []string{`-2.1`, `2.1`, `"a"`, `true`}},
	{"frequency_penalty", "ctG", []string{`-2`, `0`, `2`}, []string{`-2.1`, `2.1`, `"a"`, `[]`}},
	{"repetition_penalty", "ctG", []string{`0.01`, `1`, `2`}, []string{`0`, `0.009`, `-1`, `2.1`, `"a"`}},
	{"logit_bias", "ctG", []string{`{}`, `{"5":-100}`, `{"5":100,"6":0.5}`}, []string{`{"5":101}`, `{"5":-101}`, `{"a":1}`, `{"-1":1}`, `{"2048":1}`, `{"5":"a"}`, `[]`, `5`, `{"5":1,"5":2}`, `{"5":null}`}},
	{"echo", "t", []string{`true`, `false`}, []string{`1`, `"a"`}},
	{"ignore_eos", "ctG", []string{`true`, `false`}, []string{`1`, `"a"`}},
	{"sampling_params", "g", []string{`{"temperature":0,"max_new_tokens":2}`, `[{"temperature":0,"max_new_tokens":2}]`}, []string{`5`, `"a"`, `[]`, `[5]`, `[{},{}]`}},
	{"return_logprob", "g", []string{`true`, `false`, `[true]`}, []string{`1`, `"a"`, `[]`, `[true,true]`, `{}`}},
	{"top_logprobs_num", "g", []string{`0`, `20`, `[2]`}, []string{`-1`, `21`, `"a"`, `[1,2]`}},
	{"logprob_start_len", "g", []string{`-1`, `0`, `2`, `[1]`}, []string{`-2`, `"a"`, `1.5`, `[0,1]`}},
	{"rid", "g", []string{`"mine"`, `["mine"]`}, []string{`5`, `[5]`, `""`, `["a","b"]`, `"` + long + `"`}},
	{"anything_else", "ctgG", []string{`5`, `"a"`, `[[[]]]`, `{"n":{}}`, `18446744073709551617`, `1e400`}, nil},
}

// refused are fields that would change the answer and that we lack: refused by
// name, unless they say what is done anyway.
var refused = []struct{ name, in, same, other string }{
	{"tools", "c", `[]`, `[{"type":"function"}]`}, {"tool_choice", "c", `"none"`, `"required"`}, {"functions", "c", `[]`, `[{}]`}, {"function_call", "c", `"none"`, `"auto"`},
	{"response_format", "ct", `{"type":"text"}`, `{"type":"json_object"}`}, {"best_of", "t", `1`, `2`}, {"suffix", "t", `""`, `"x"`},
	{"regex", "ctG", `null`, `"a*"`}, {"json_schema", "ctG", `null`, `"{}"`}, {"ebnf", "ctG", `null`, `"a"`}, {"structural_tag", "ctG", `null`, `"a"`}, {"guided_json", "ct", `null`, `{}`},
	{"echo", "c", `false`, `true`}, {"modalities", "c", `["text"]`, `["audio"]`}, {"audio", "c", `null`, `{}`}, {"reasoning_effort", "c", `null`, `"high"`}, {"verbosity", "c", `"medium"`, `"low"`},
	{"chat_template_kwargs", "c", `{}`, `{"a":1}`}, {"continue_final_message", "c", `false`, `true`}, {"image_data", "g", `null`, `"x"`}, {"input_embeds", "g", `null`, `[[1]]`}, {"lora_path", "g", `null`, `"x"`},
	{"return_hidden_states", "g", `false`, `true`}, {"custom_logit_processor", "g", `null`, `"x"`}, {"token_ids_logprob", "g", `null`, `[1]`}, {"session_params", "g", `null`, `{}`},
	{"min_tokens", "ct", `0`, `5`}, {"min_new_tokens", "G", `0`, `5`}, {"stop_regex", "G", `null`, `"a"`}, {"prompt_logprobs", "ct", `null`, `1`}, {"skip_special_tokens", "ctG", `true`, `false`},
	{"use_beam_search", "ct", `false`, `true`}, {"length_penalty", "ct", `1`, `2`}, {"truncate_prompt_tokens", "ct", `null`, `5`}, {"allowed_token_ids", "ct", `null`, `[1]`}, {"bad_words", "ct", `[]`, `["a"]`},
}

// trial is one request and what must come of it.
type trial struct {
	name, path, body string
	field            string // at fault; "": 200
	code             string // with field
	like             string // another body whose answer from serve must be the same
}

// places are the dialects that have the parameter, with its full name in each.
func places(name, in string) map[*dialect]string {
	m := map[*dialect]string{}
	for _, c := range in {
		switch c {
		case 'c':
			m[&dialects[0]] = name
		case 't':
			m[&dialects[1]] = name
		case 'g':
			m[&dialects[2]] = name
		case 'G':
			m[&dialects[2]] = "sampling_params." + name
		}
	}
	return m
}

func trials() (list []trial) {
	for _, p := range params {
		for d, field := range places(p.name, p.in) {
			for _, stream := range []bool{false, true} {
				if p.name == "stream" && stream {
					continue
				}
				one := func(value string) trial {
					return trial{name: fmt.Sprintf("%s %s=%.60s stream=%v", d.name, field, value, stream), path: d.path, body: d.body(field, value, stream)}
				}
				for _, v := range p.good {
					list = append(list, one(v))
				}
				for _, v := range p.bad {
					b := one(v)
					b.field, b.code = p.name, "invalid_request"
					list = append(list, b)
				}
				if slices.Contains([]string{"messages", "prompt", "text", "input_ids", "seed", "sampling_seed"}, p.name) {
					continue // needed, or the answer is drawn anew each time
				}
				null := one("null")
				null.like = d.body(field, "", stream)
				if p.name == "sampling_params" || p.name == "max_tokens" && d.name == "chat" {
					continue // SGLang's defaults have no seed; a chat then fills the context
				}
				list = append(list, null)
			}
		}
	}
	for _, p := range refused {
		for d, field := range places(p.name, p.in) {
			for _, value := range []string{p.same, "null", p.other} {
				r := trial{name: fmt.Sprintf("%s %s=%s", d.name, field, value), path: d.path, body: d.body(field, value, false), like: d.body(field, "", false)}
				if value == p.other {
					r.field, r.code, r.like = p.name, "unsupported", ""
				}
				list = append(list, r)
			}
		}
	}
	slices.SortFunc(list, func(a, b trial) int { return strings.Compare(a.name, b.name) })
	return list
}

// Every parameter of every API, with every kind of value, streamed and not:
// serve, the router and the workers give the same answer, every value works or is
// refused by the parameter's name, null is as good as absent, nothing is a 500
// and nothing hangs.
func TestConformance(t *testing.T) {
	f := startRoles(t, nil)
	all := trials()
	if !raceBuild { // where all are made
		n := 0
		all = slices.DeleteFunc(all, func(trial) bool { n++; return n%8 > 0 })
	}
	t.Logf("%d requests, each in three ways", len(all))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, c := range all {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			got := f.three(t, c.name, c.path, c.body)
			code, param, _ := got.failure()
			switch {
			case c.field == "" && got.status != 200:
				t.Errorf("%s: %v", c.name, got)
			case c.field != "" && (got.status != 400 || code != c.code || !strings.Contains(param, c.field)):
				t.Errorf("%s: want 400 %s naming %s, got %v", c.name, c.code, c.field, got)
			}
			if c.like != "" {
				if want := f.ask("serve", c.path, []byte(c.like)); got.plain() != want.plain() {
					t.Errorf("%s: not as if the field were absent:\n%.600s\n%.600s", c.name, got.plain(), want.plain())
				}
			}
		})
	}
	wg.Wait()
}

// Every parameter that docs/http.md names is in the table, and the other way round.
func TestConformanceIsComplete(t *testing.T) {
	doc, err := os.ReadFile("../../docs/http.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range params {
		if p.bad != nil && !strings.Contains(string(doc), "`"+p.name+"`") && !strings.Contains(string(doc), "`"+p.name+".") {
			t.Errorf("docs/http.md does not name %s", p.name)
		}
	}
	_, section, _ := strings.Cut(string(doc), "## Parameters")
	section, _, _ = strings.Cut(section, "\n\nKeys match")
	for i, name := range strings.Split(section, "`") {
		name, _, _ = strings.Cut(name, ".")
		if i%2 == 1 && !strings.HasPrefix(name, "/") && !slices.ContainsFunc(params, func(p param) bool { return p.name == name }) {
			t.Errorf("%s of docs/http.md is in no trial", name)
		}
	}
}

// decode is the answer as JSON.
func decode[T any](t *testing.T, a answer) (v T) {
	t.Helper()
	if err := json.Unmarshal(a.body, &v); err != nil || a.status != 200 {
		t.Fatalf("%v: %v", a, err)
	}
	return v
}
