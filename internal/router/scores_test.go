package router

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/metronome-serve/metronome/internal/api"
)

// The prompt's part of the lists comes from the prefill, the rest from decode;
// every other byte of decode's answer stays as it is, numbers above all.
func TestScores(t *testing.T) {
	for _, c := range []struct {
		name            string
		kind            api.Kind
		items, drawn    int
		prefill, decode string
		want            string
	}{
		{"one answer", api.Generate, 1, 1,
			`{"text":"x","meta_info":{"id":"a","input_token_logprobs":[[null,1,"a"],[-1.50,2,"]"]],"input_top_logprobs":[null,[[-0.1,3,"\"}"]]]}}`,
			`{"text":"xyz","meta_info":{"id":"a", "input_top_logprobs": [], "input_token_logprobs":[] ,"n":9007199254740993}}`,
			`{"text":"xyz","meta_info":{"id":"a", "input_top_logprobs": [null,[[-0.1,3,"\"}"]]], "input_token_logprobs":[[null,1,"a"],[-1.50,2,"]"]] ,"n":9007199254740993}}`},
		{"decode has a part of its own", api.Generate, 1, 1,
			`{"meta_info":{"input_token_logprobs":[[null,1,null]],"input_top_logprobs":[null]}}`,
			`{"meta_info":{"input_token_logprobs":[[-2,2,null]],"input_top_logprobs":null}}`,
			`{"meta_info":{"input_token_logprobs":[[null,1,null],[-2,2,null]],"input_top_logprobs":[null]}}`},
		{"nothing to give", api.Generate, 1, 1,
			`{"meta_info":{"input_token_logprobs":[]}}`, `{"meta_info":{"input_token_logprobs":null}}`, `{"meta_info":{"input_token_logprobs":null}}`},
		{"a batch by place", api.Generate, 2, 1,
			`[{"meta_info":{"input_token_logprobs":[1]}},{"meta_info":{"input_token_logprobs":[2]}}]`,
			`[{"meta_info":{"input_token_logprobs":[]}},{"meta_info":{"input_token_logprobs":[]}}]`,
			`[{"meta_info":{"input_token_logprobs":[1]}},{"meta_info":{"input_token_logprobs":[2]}}]`},
		{"by index", api.Generate, 2, 1,
			`{"index":1,"meta_info":{"input_token_logprobs":[2]}}`,
			`{"meta_info":{"input_token_logprobs":[]},"index":1}`,
			`{"meta_info":{"input_token_logprobs":[2]},"index":1}`},
		{"another index", api.Generate, 2, 1,
			`{"index":1,"meta_info":{"input_token_logprobs":[2]}}`,
			`{"index":0,"meta_info":{"input_token_logprobs":[]}}`,
			`{"index":0,"meta_info":{"input_token_logprobs":[]}}`},
		{"no such index", api.Generate, 1, 1,
			`{"index":-1,"meta_info":{"input_token_logprobs":[2]}}`,
			`{"index":7,"meta_info":{"input_token_logprobs":[]}}`,
			`{"index":7,"meta_info":{"input_token_logprobs":[]}}`},
		{"no place for it", api.Generate, 1, 1,
			`{"meta_info":{"input_token_logprobs":[2]}}`, `{"meta_info":{}}`, `{"meta_info":{}}`},
		{"completions", api.Completion, 2, 1,
			`{"choices":[{"index":0,"logprobs":{"tokens":["a","b","c"],"token_logprobs":[null,-1,-2],"top_logprobs":[null,{"b":-1},{}],"text_offset":[0,1,2]}},{"index":1,"logprobs":{"tokens":["d","e"],"token_logprobs":[null,-3]}}]}`,
			`{"choices":[{"index":1,"logprobs":{"tokens":["e"],"token_logprobs":[-3]}},{"index":0,"logprobs":{"text_offset":[2],"tokens":["c"],"token_logprobs":[-2],"top_logprobs":[{}]}}]}`,
			`{"choices":[{"index":1,"logprobs":{"tokens":["d","e"],"token_logprobs":[null,-3]}},{"index":0,"logprobs":{"text_offset":[0,1,2],"tokens":["a","b","c"],"token_logprobs":[null,-1,-2],"top_logprobs":[null,{"b":-1},{}]}}]}`},
		{"completions by place", api.Completion, 2, 1,
			`{"choices":[{"logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1]}},{"logprobs":{"tokens":["c","d"],"token_logprobs":[null,-2]}}]}`,
			`{"choices":[{"logprobs":{"tokens":["b"],"token_logprobs":[-1]}},{"logprobs":{"tokens":["d"],"token_logprobs":[-2]}}]}`,
			`{"choices":[{"logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1]}},{"logprobs":{"tokens":["c","d"],"token_logprobs":[null,-2]}}]}`},
		{"completions without output", api.Completion, 1, 0,
			`{"choices":[{"index":0,"logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1]}}]}`,
			`{"choices":[{"index":0,"logprobs":{"tokens":[],"token_logprobs":[]}}]}`,
			`{"choices":[{"index":0,"logprobs":{"tokens":["a","b"],"token_logprobs":[null,-1]}}]}`},
		{"broken off", api.Generate, 1, 1, `{"meta_info":{"input_token_logprobs":[1,2`, `{"meta_info":{"input_token_logprobs":[]`, `{"meta_info":{"input_token_logprobs":[]`},
		{"not what it should be", api.Completion, 1, 1, `{"choices":[{"logprobs":3},5,null]}`, `{"choices":7}`, `{"choices":7}`},
	} {
		s := newScores(c.kind, c.items)
		s.take([]byte(c.prefill), c.drawn)
		if got := s.give(nil, []byte(c.decode)); string(got) != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
}

// In a stream /generate repeats the lists in each event, /v1/completions gives
// each token once; comments, line ends and [DONE] stay.
func TestScoreEvents(t *testing.T) {
	s := newScores(api.Generate, 1)
	s.take([]byte(`{"meta_info":{"input_token_logprobs":[1]}}`), 1)
	s.take([]byte(`{"meta_info":{"input_token_logprobs":[9]}}`), 1) // only the first counts
	in := ": hi\n\ndata: {\"meta_info\":{\"input_token_logprobs\":[]}}\r\n\r\ndata:{\"meta_info\":{\"input_token_logprobs\":[]}}\n\ndata: [DONE]\n\n"
	want := ": hi\n\ndata: {\"meta_info\":{\"input_token_logprobs\":[1]}}\r\n\r\ndata:{\"meta_info\":{\"input_token_logprobs\":[1]}}\n\ndata: [DONE]\n\n"
	if got := s.giveEvents(nil, []byte(in)); string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
	s = newScores(api.Completion, 1)
	s.take([]byte(`{"choices":[{"logprobs":{"tokens":["a","b"]}}]}`), 1)
	in = "data: {\"choices\":[{\"logprobs\":{\"tokens\":[\"b\"]}}]}\n\ndata: {\"choices\":[{\"logprobs\":{\"tokens\":[\"c\"]}}]}\n\n"
	want = "data: {\"choices\":[{\"logprobs\":{\"tokens\":[\"a\",\"b\"]}}]}\n\ndata: {\"choices\":[{\"logprobs\":{\"tokens\":[\"c\"]}}]}\n\n"
	if got := s.giveEvents(nil, []byte(in)); string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Whatever a worker sends, what comes out is JSON when what went in was.
func FuzzScores(f *testing.F) {
	f.Add([]byte(`{"meta_info":{"input_token_logprobs":[1]}}`), []byte(`{"meta_info":{"input_token_logprobs":[]}}`), true)
	f.Add([]byte(`{"choices":[{"logprobs":{"tokens":["a","b"]}}]}`), []byte(`{"choices":[{"logprobs":{"tokens":["b"],"tokens":null}}]}`), false)
	f.Fuzz(func(t *testing.T, prefill, decode []byte, generate bool) {
		kind := api.Completion
		if generate {
			kind = api.Generate
		}
		s := newScores(kind, 2)
		s.take(prefill, 1)
		got := s.give(nil, decode)
		if json.Valid(prefill) && json.Valid(decode) && !json.Valid(got) {
			t.Errorf("%q into %q gives %q", prefill, decode, got)
		}
		if !s.any && !bytes.Equal(got, decode) {
			t.Errorf("nothing to add, and %q became %q", decode, got)
		}
	})
}
