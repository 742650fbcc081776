package api

import (
	"strings"
	"testing"
)

// The small bodies are read by the rules of the large ones: keys match exactly,
// none comes twice, null is absent, and a wrong type is named by its field.
func TestSmallBodies(t *testing.T) {
	parse := map[string]func(string) *Error{
		"tokenize":   func(b string) *Error { _, e := ParseTokenize([]byte(b)); return e },
		"detokenize": func(b string) *Error { _, e := ParseDetokenize([]byte(b), 10); return e },
		"abort":      func(b string) *Error { _, _, e := ParseAbort([]byte(b)); return e },
	}
	for _, c := range []struct{ path, good, bad, param string }{
		{"tokenize", `{"text":"a","messages":null}`, `{"text":5}`, "text"},
		{"tokenize", `{"text":"a","parse_special":null}`, `{"text":"a","parse_special":"x"}`, "parse_special"},
		{"tokenize", `{"prompt":"a","model":5}`, `{"prompt":["a"]}`, "prompt"},
		{"tokenize", `{"text":""}`, `{"text":"a","text":"b"}`, "text"},
		{"tokenize", `{"text":"a","Text":"b"}`, `{"Text":"b"}`, ""},
		{"tokenize", `{"messages":[{"role":"user","content":"a"}]}`, `{"messages":[{"role":5,"content":"a"}]}`, "messages[0].role"},
		{"tokenize", `{"text":"a","add_special_tokens":false}`, `{"text":"a","add_special_tokens":0}`, "add_special_tokens"},
		{"tokenize", `{"text":"a","add_generation_prompt":false}`, `{"text":"a","add_generation_prompt":"no"}`, "add_generation_prompt"},
		{"tokenize", `{"text":"a","prompt":null}`, `{"text":"a","prompt":"a"}`, ""},
		{"tokenize", ` {"text":"a"} `, `["a"]`, ""},
		{"detokenize", `{"tokens":[]}`, `{}`, "tokens"},
		{"detokenize", `{"tokens":[9]}`, `{"tokens":[10]}`, "tokens"},
		{"detokenize", `{"tokens":[0]}`, `{"tokens":[1.5]}`, "tokens"},
		{"detokenize", `{"tokens":[0],"TOKENS":5}`, `{"tokens":null}`, "tokens"},
		{"abort", `{"rid":"a","abort_all":false}`, `{"rid":5}`, "rid"},
		{"abort", `{"rid":"","abort_all":true}`, `{"abort_all":"true"}`, "abort_all"},
		{"abort", `{"rid":"a","abort_all":null}`, `{"rid":"a","abort_all":true}`, ""},
		{"abort", `{"rid":"a"}`, `{"Abort_All":true}`, ""},
		{"abort", `{"abort_all":true}`, `{`, ""},
	} {
		if e := parse[c.path](c.good); e != nil {
			t.Errorf("%s %s: %v", c.path, c.good, e)
		}
		e := parse[c.path](c.bad)
		if e == nil || e.HTTPStatus() != 400 || e.Param != c.param || strings.Contains(e.Message, "Go ") {
			t.Errorf("%s %s: %+v, want 400 with param %q", c.path, c.bad, e, c.param)
		}
	}
}

func TestTokenizeDefaults(t *testing.T) {
	for body, want := range map[string]Tokenize{
		`{"text":"a"}`:                           {Text: "a", Begin: true, Generation: true},
		`{"text":"a","parse_special":true}`:      {Text: "a", Begin: true, Generation: true, Special: true},
		`{"prompt":"a"}`:                         {Text: "a", Begin: true, Generation: true, Special: true},
		`{"prompt":"a","parse_special":false}`:   {Text: "a", Begin: true, Generation: true},
		`{"text":"","add_special_tokens":false}`: {Generation: true},
	} {
		if got, e := ParseTokenize([]byte(body)); e != nil || got.Text != want.Text || got.Special != want.Special || got.Begin != want.Begin || got.Generation != want.Generation || got.Messages != nil {
			t.Errorf("%s: %+v, %v", body, got, e)
		}
	}
}
