package model

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

func template(t testing.TB, f *File, tok *Tokenizer) *Template {
	t.Helper()
	tpl, err := NewTemplate(f, tok)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

func TestTinyChat(t *testing.T) {
	f := tinyFile(t)
	tpl := template(t, f, tokenizer(t, f))
	var ref struct {
		Prompts []struct {
			Messages []Message
			Prompt   string
			IDs      []int32
		}
	}
	modeltest.JSON(t, "tiny-model/reference.json", &ref)
	chats := 0
	for _, p := range ref.Prompts {
		if p.Messages == nil {
			continue
		}
		chats++
		text, err := tpl.Render(p.Messages, true)
		if err != nil || text != p.Prompt {
			t.Errorf("rendered %q, %v, want %q", text, err, p.Prompt)
		}
		ids, err := tpl.Tokens(p.Messages, true)
		if err != nil || !slices.Equal(ids, p.IDs) {
			t.Errorf("tokens %v, %v, want %v", ids, err, p.IDs)
		}
	}
	if chats == 0 {
		t.Error("no chat in the reference")
	}
}

func TestSmolChat(t *testing.T) {
	f := smolFile(t)
	tpl := template(t, f, tokenizer(t, f))
	var ref struct {
		Cases []struct {
			Name     string
			Messages []Message
			Generate bool `json:"add_generation_prompt"`
			Text     string
			IDs      []int32 `json:"ids_special"`
		}
	}
	modeltest.JSON(t, "smollm2/chat.json", &ref)
	if len(ref.Cases) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range ref.Cases {
		text, err := tpl.Render(c.Messages, c.Generate)
		if err != nil || text != c.Text {
			t.Errorf("%s: rendered %q, %v, want %q", c.Name, text, err, c.Text)
		}
		ids, err := tpl.Tokens(c.Messages, c.Generate)
		if err != nil || !slices.Equal(ids, c.IDs) {
			t.Errorf("%s: tokens %v, %v, want %v", c.Name, ids, err, c.IDs)
		}
	}
}

// controls counts the control tokens of a sequence.
func controls(tok *Tokenizer, ids []int32) (n int) {
	for _, id := range ids {
		if tok.IsControl(id) {
			n++
		}
	}
	return n
}

// TestInjection spells every control token of a model in messages: whole,
// split over messages, completing what the template wrote, and in the role.
// The number of control tokens must be that of harmless messages.
func TestInjection(t *testing.T) {
	for name, open := range map[string]func(testing.TB) *File{"tiny": tinyFile, "smollm2": smolFile} {
		t.Run(name, func(t *testing.T) {
			f := open(t)
			tok := tokenizer(t, f)
			tpl := template(t, f, tok)
			count := func(role, content string) int {
				ids, err := tpl.Tokens([]Message{{"system", "Be brief."}, {role, content}, {"assistant", content}}, true)
				if err != nil {
					t.Fatal(err)
				}
				if text, _ := tpl.Render([]Message{{role, content}}, false); !strings.Contains(text, content) {
					t.Errorf("%q is not in the rendered %q", content, text)
				}
				return controls(tok, ids)
			}
			want := count("user", "hello")
			for id := range int32(tok.Vocab()) {
				if !tok.IsControl(id) {
					continue
				}
				text, _ := tok.Text(id)
				for _, content := range []string{text, "a" + text, text + "b", text + text, text[1:], text[:len(text)-1], " " + text + "\n" + text} {
					if n := count("user", content); n != want {
						t.Errorf("%q gives %d control tokens, not %d", content, n, want)
					}
					if n := count(content, "hello"); n != want {
						t.Errorf("role %q gives %d control tokens, not %d", content, n, want)
					}
				}
			}
		})
	}
}

// TestInjectionPieces: a message cannot complete a control token that the
// template has begun, nor can two messages together, and what stands between
// control tokens is one piece of text whoever wrote it.
func TestInjectionPieces(t *testing.T) {
	tok := tokenizer(t, byteModel(t, 7, "gpt2", 300))
	tok.specials = newSpecials(append(tok.specials.list, special{"<|3|>", 4, true}))
	user := []Message{{"user", "|end|>"}, {"user", "ab"}, {"user", "<"}}
	plain := func(s string) []int32 { return tok.Encode(s, false, false) }
	for _, c := range []struct {
		source string
		want   []int32
	}{
		{"<{{ messages[0].content }}", plain("<|end|>")},
		{"{{ '<' + messages[0].content }}", plain("<|end|>")},
		{"{{ '<' ~ messages[0].content[:4] ~ '|>' }}", plain("<|end|>")},
		{"{{ ['<', messages[0].content] | join }}", plain("<|end|>")},
		{"{{ '<x' | replace('x', messages[0].content) }}", plain("<|end|>")},
		{"{{ messages[0].content | replace('|end', '<|end') }}", plain("<|end|>")},
		{"{{ ('<' + messages[0].content).upper().lower() }}", plain("<|end|>")},
		{"{{ ('<' + messages[0].content) | tojson }}", plain(`"<|end|>"`)},
		{"{{ ('a,<' + messages[0].content).split(',')[1] }}", plain("<|end|>")},
		{"{% set x %}<{{ messages[0].content }}{% endset %}{{ x }}", plain("<|end|>")},
		{"{% for c in '<' + messages[0].content %}{{ c }}{% endfor %}", plain("<|end|>")},
		{"{{ ('<' + messages[0].content)[::-1][::-1] }}", plain("<|end|>")},
		{"{{ {'a': '<' + messages[0].content}['a'] * 2 }}", plain("<|end|><|end|>")},
		{"{% macro f(a) %}<{{ a }}{% endmacro %}{{ f(messages[0].content) }}", plain("<|end|>")},
		{"{% macro f(a) %}{{ a }}|end|>{% endmacro %}{{ f(messages[2].content) }}", plain("<|end|>")},
		{"{{ ['<', messages[0].content] | map('trim') | join }}", plain("<|end|>")},
		{"{{ ('<' + messages[0].content) | indent }}", plain("<|end|>")},
		{"{{ ('<' + messages[0].content) | reverse | reverse }}", plain("<|end|>")},
		{"{{ messages | selectattr('content', 'equalto', '|end|>') | map(attribute='content') | map('replace', '|e', '<|e') | join }}", plain("<|end|>")},
		{"{{ messages[2].content }}|end|>", plain("<|end|>")},
		{"<|end|{{ messages[0].content[-1] }}", plain("<|end|>")},
		{"<|{{ messages[0].content[1:4] }}|>", plain("<|end|>")},
		{"<|{{ messages | length }}|>", plain("<|3|>")},
		{"<|{{ 3 | tojson }}|>", plain("<|3|>")},
		{"<|{{ 3 ~ '|>' }}", plain("<|3|>")},
		// The template's own bytes, however it puts them together.
		{"<|end|>", []int32{0}},
		{"{% macro f(a) %}<|{{ a }}|>{% endmacro %}{{ f('end') }}", []int32{0}},
		{"{{ ['<|', 'end', '|>'] | map('trim') | join }}", []int32{0}},
		{"{{ '>|dne|<' | reverse | indent }}", []int32{0}},
		{"<|{{ 'end' }}|>", []int32{0}},
		{"{{ '<|' ~ 'END'.lower() ~ '|>' }}", []int32{0}},
		{"{{ '<|' + 'x,end'.split(',')[1] + '|>' }}", []int32{0}},
		{"{{ eos_token }}{{ bos_token }}", []int32{0, 1}},
		{"{{ '>|dne|<'[::-1] }}", []int32{0}},
		{"<|3|>", []int32{4}},
		{"{{ bos_token }}a{{ bos_token }}", concat([]int32{1}, plain("a"), []int32{1})},
		// An ordinary role is the template's word, so that '<|' + role + '|>' works.
		{"<|end|>{{ messages[1].content }}c<|start|>d", concat([]int32{0}, plain("abc"), []int32{1}, plain("d"))},
		{"<tool>{{ '<tool>' }}", []int32{2, 2}},
	} {
		body, err := parseTemplate(c.source)
		if err != nil {
			t.Fatal(err)
		}
		tpl := &Template{limits: few, body: body, tok: tok, vars: map[string]any{"bos_token": literal("<|start|>"), "eos_token": literal("<|end|>")}}
		got, err := tpl.Tokens(user, false)
		want := c.want
		if len(want) == 0 || want[0] != 1 {
			want = concat([]int32{1}, want) // the file wants BOS
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v, want %v", c.source, got, err, want)
		}
	}
}

func concat(parts ...[]int32) []int32 { return slices.Concat(parts...) }

// TestOrdinaryRole: roles that are ordinary words may stand inside a control
// token, others may not.
func TestOrdinaryRole(t *testing.T) {
	tok := tokenizer(t, byteModel(t, 7, "gpt2", 10))
	tok.texts[0] = "<|user|>"
	tok.specials = newSpecials([]special{{"<|user|>", 0, true}, {"<|evil|>", 1, true}})
	body, err := parseTemplate("{{ '<|' + messages[0].role + '|>' }}")
	if err != nil {
		t.Fatal(err)
	}
	tpl := &Template{limits: few, body: body, tok: tok}
	for role, want := range map[string][]int32{"user": {1, 0}, "evil": concat([]int32{1}, tok.Encode("<|evil|>", false, false))} {
		if got, err := tpl.Tokens([]Message{{role, ""}}, false); err != nil || !slices.Equal(got, want) {
			t.Errorf("role %q: %v, %v, want %v", role, got, err, want)
		}
	}
}

// TestTemplateRefused: what is not known is refused when the model is loaded,
// with line and construct.
func TestTemplateRefused(t *testing.T) {
	for source, want := range map[string]string{
		"a\n{% call f() %}{% endcall %}":                  "line 2: the statement 'call' is not supported",
		"{% macro f() %}{{ caller() }}":                   "'caller' is not supported",
		"{% macro f() %}{{ varargs }}":                    "'varargs' is not supported",
		"{% macro f(a, a) %}":                             "the macro 'f' has two parameters 'a'",
		"{% macro f(a=1, b) %}":                           "the parameter 'b' without a default follows one with a default",
		"{% macro loop() %}":                              "'loop' cannot be assigned",
		"{% macro f() %}{% endmacro %}{{ f(a=1, 2) }}":    "an argument of 'f' without a name follows one with a name",
		"{% macro f(a) %}{% endmacro %}{{ f(a=1, a=2) }}": "two arguments 'a' for 'f'",
		"{% for x in y %}{% macro f() %}{% break %}":      "'break' outside of a loop",
		"{{ x | map }}":                                   "'map' is not given the name of a filter",
		"{{ x | map('nope') }}":                           `the filter "nope" is not supported by 'map'`,
		"{{ x | map('map', 'trim') }}":                    `the filter "map" is not supported by 'map'`,
		"{{ x | map(attribute='a', default='') }}":        "',' where ')' would be right",
		"{{ x | map(y='a') }}":                            "'map' has no argument 'y'",
		"{{ x | selectattr }}":                            "'selectattr' needs 1 arguments",
		"{{ x | selectattr('a', t) }}":                    "'selectattr' is not given the name of a test",
		"{{ x | select('nope') }}":                        `the test "nope" is not supported by 'select'`,
		"{{ x | select('eq') }}":                          "'eq' needs 1 arguments",
		"{{ x is defined if y else z }}":                  "'if' behind a test",
		"{% include 'x' %}":                               "line 1: the statement 'include' is not supported",
		"{% raw %}{% endraw %}":                           "the statement 'raw' is not supported",
		"{% generation %}":                                "the template ends where 'endgeneration' would be right",
		"{% endif %}":                                     "the statement 'endif' is not supported",
		"\n\n{{ x | sort }}":                              "line 3: the filter 'sort' is not supported",
		"{{ x | safe }}":                                  "the filter 'safe' is not supported",
		"{{ x is callable }}":                             "the test 'callable' is not supported",
		"{{ x.format(1) }}":                               "the method 'format' is not supported",
		"{{ x.append(1) }}":                               "the method 'append' is not supported",
		"{{ x.strip }}":                                   "the method 'strip' is not called",
		"{{ lipsum() }}":                                  "the function 'lipsum' is not supported",
		"{{ x()() }}":                                     "the function 'x' is not supported",
		"{{ x[0]() }}":                                    "only functions and methods with known names can be called",
		"{{ loop.cycle('a') }}":                           "the method 'cycle' is not supported",
		"{{ loop.depth }}":                                "'loop.depth' is not supported",
		"{{ 1.5 }}":                                       "floating-point numbers are not supported",
		"{{ 0x10 }}":                                      `the number "0x10" is not supported`,
		"{{ 99999999999999999999 }}":                      "is not supported; decimal integers are",
		"{{ 1 / 2 }}":                                     "the operator '/' is not supported",
		"{{ 2 ** 2 }}":                                    "the operator '**' is not supported",
		"{{ {1: 2} }}":                                    "a dictionary's key is '1'; a string is supported",
		"{{ namespace(1) }}":                              "'1' where a name would be right",
		"{{ x | tojson(2) }}":                             "the arguments of 'tojson' are given by name",
		"{{ x | tojson(sort_keys=true) }}":                "'tojson' has no argument 'sort_keys'",
		"{{ x | trim(1, 2) }}":                            "too many arguments for 'trim'",
		"{{ x | replace('a') }}":                          "'replace' needs 2 arguments",
		"{{ '\\N{DASH}' }}":                               `the escape "\\N" is not supported`,
		"{{ '\\ud800' }}":                                 `the escape "\\ud800" is no character`,
		"{{ x ? }}":                                       "unexpected character '?' in a tag",
		"{{ café }}":                                      "unexpected character 'é' in a tag",
		"{{ 'a":                                           "a string is not closed with '",
		"{{ a":                                            "a tag is not closed with }}",
		"{# a":                                            "a comment is not closed with #}",
		"{% if a %}\nb":                                   "line 2: the template ends where 'endif' would be right",
		"{% for x in y recursive %}{% endfor %}":          "'recursive' where '%}' would be right",
		"{% set loop = 1 %}":                              "'loop' cannot be assigned",
		"{{ " + strings.Repeat("(", 100) + strings.Repeat(")", 100) + " }}": "nested more than 64 deep",
		"{{ " + strings.Repeat("not ", 100) + " }}":                         "nested more than 64 deep",
		"{{ " + strings.Repeat("-", 100) + " }}":                            "nested more than 64 deep",
		"{{ " + strings.Repeat("[", 100) + strings.Repeat("]", 100) + " }}": "nested more than 64 deep",
		strings.Repeat("{% if a %}", 100):                                   "nested more than 64 deep",
	} {
		if _, err := parseTemplate(source); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %s", source, err, want)
		}
	}
	f := tinyFile(t)
	tok := tokenizer(t, f)
	for name, c := range map[string]struct {
		val  any
		want string
	}{
		"none": {nil, "the model has no chat template"},
		"kind": {uint32(1), `key "tokenizer.chat_template": is uint32, a string`},
		"long": {strings.Repeat("x", maxTemplate+1), "262145 bytes, up to 262144 would be right"},
		"utf8": {"\xff", "is not UTF-8"},
		"call": {"{% call %}", "m: chat template: line 1: the statement 'call' is not supported"},
	} {
		b := small()
		if c.val != nil {
			b.put("tokenizer.chat_template", c.val)
		}
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := NewTemplate(f, tok); err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, ErrNoTemplate) != (c.val == nil) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
}

// TestTemplateLimits: a template that wants too much ends soon, with an error
// that names the limit.
func TestTemplateLimits(t *testing.T) {
	long := strings.Repeat("x", 1<<16)
	for source, want := range map[string]string{
		"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}": "rendering takes more than 65536 steps",
		"{{ range(999999) }}":                                           "'range' of more than 100000 numbers",
		"{{ 'a' * 99999999999 }}":                                       "a string 99999999999 times",
		"{{ messages[0].content * 1000 }}":                              "rendering makes more than 4194304 bytes",
		"{{ 99999999999 * 99999999999 }}":                               "are too large",
		"{% for a in range(99) %}{{ messages[0].content }}{% endfor %}": "more than 1048576 bytes",
		"{% for a in range(999999) %}{% endfor %}":                      "'range' of more than",
		"{% set n = namespace(x=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == n.x[0] }}":           "nested more than 64 deep",
		"{% set n = namespace(x=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}":            "nested more than 64 deep",
		"{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}":                          "rendering makes more than",
		"{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}":           "rendering ",
		"{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}":                          "rendering takes more than",
		"{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x * 9 %}{% endfor %}":                            "rendering takes more than",
		"{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}":                                                               "macros call each other more than 64 deep",
		"{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}":                           "rendering takes more than",
		"{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = (n.x + n.x) | map('string') | list %}{% endfor %}": "rendering takes more than",
		"{% for a in range(9999) %}{{ messages[0].content | indent(99999) | length }}{% endfor %}":                             "rendering ",
		"{{ 'a\nb' | indent(999999999) }}":                                                                     "rendering makes more than",
		"{% for a in range(9999) %}{{ messages[0].content | reverse | length }}{% endfor %}":                   "rendering ",
		"{% for a in range(9999) %}{% if 'y' in messages[0].content %}{% endif %}{% endfor %}":                 "rendering takes more than",
		"{% for a in range(9999) %}{{ messages[0].content | upper | length }}{% endfor %}":                     "rendering ",
		"{% for a in range(9999) %}{{ messages[0].content.split('x') | length }}{% endfor %}":                  "rendering takes more than",
		"{% for a in range(9999) %}{{ messages[0].content[::-1] | length }}{% endfor %}":                       "rendering ",
		"{% for a in range(9999) %}{{ messages[0].content[5] }}{% endfor %}":                                   "rendering takes more than",
		"{% for a in range(9999) %}{{ messages[0].content | tojson | length }}{% endfor %}":                    "rendering ",
		"{% for a in range(9999) %}{{ messages[0].content | trim(messages[0].content) | length }}{% endfor %}": "rendering takes more than",
	} {
		_, err := renderSource(source, []Message{{"user", long}}, true)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", source, err, want)
		}
	}
}

// TestLongChat: the largest request that HTTP lets in is rendered.
func TestLongChat(t *testing.T) {
	f := tinyFile(t)
	tpl := template(t, f, tokenizer(t, f))
	content := strings.Repeat("word ", 6<<20)
	text, err := tpl.Render([]Message{{"user", content}}, true)
	if err != nil || text != "user: "+content+"\nassistant:" {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	many := make([]Message, 50_000)
	for i := range many {
		many[i] = Message{"user", "a"}
	}
	if text, err = tpl.Render(many, false); err != nil || len(text) != len(many)*len("user: a\n") {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

// TestRaised: what a template says about messages reaches the caller.
func TestRaised(t *testing.T) {
	_, err := renderSource("\n{{ raise_exception('roles must alternate, not ' ~ messages[0].role) }}", []Message{{"user", "x"}}, true)
	if err == nil || err.Error() != "chat template: line 2: roles must alternate, not user" {
		t.Error(err)
	}
	if got, err := renderSource("{{ messages[0].content }}", []Message{{"user", "a\xffb\xed\xa0\x80\xc3"}}, true); got != "a\ufffdb\ufffd\ufffd\ufffd\ufffd" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func BenchmarkTokens(b *testing.B) {
	f := smolFile(b)
	tpl := template(b, f, tokenizer(b, f))
	msgs := []Message{{"system", "Be brief."}, {"user", strings.Repeat("What is the way to the harbour? ", 20)}, {"assistant", "South."}, {"user", "Thanks."}}
	for b.Loop() {
		if _, err := tpl.Tokens(msgs, true); err != nil {
			b.Fatal(err)
		}
	}
}
