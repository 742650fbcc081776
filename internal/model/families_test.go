package model

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// family is a template in the manner of a well-known model, with a tokenizer
// that has that model's control tokens.
type family struct {
	tpl      *Template
	tok      *Tokenizer
	controls []string // what only the template may write, in order of their ids
}

// families reads testdata/jinja/families.
func families(t testing.TB) map[string]family {
	t.Helper()
	var known map[string]struct {
		BOS, EOS string
		Controls []string
		Defined  []string // spelled like control tokens, but user-defined in the models' files
	}
	modeltest.JSON(t, "jinja/families/families.json", &known)
	all := map[string]family{}
	for name, k := range known {
		source, err := os.ReadFile(modeltest.Path(t, "jinja/families/"+name+".jinja"))
		if err != nil {
			t.Fatal(err)
		}
		controls := append(k.Controls, k.EOS)
		if k.BOS != "" && k.BOS != k.EOS {
			controls = append(controls, k.BOS)
		}
		controls = append(controls, k.Defined...)
		f := controlsFile(t, controls, len(k.Defined), k.BOS, k.EOS, string(source))
		tok := tokenizer(t, f)
		all[name] = family{template(t, f, tok), tok, controls}
	}
	return all
}

// controlsFile is a byte-level model with these control tokens, the last ones
// of which are user-defined, another user-defined token, and no merges.
func controlsFile(t testing.TB, controls []string, defined int, bos, eos, source string) *File {
	t.Helper()
	tokens, kinds := slices.Clone(controls), slices.Repeat([]int32{tokenControl}, len(controls))
	for i := range defined {
		kinds[len(kinds)-1-i] = tokenDefined
	}
	tokens, kinds = append(tokens, "<think>"), append(kinds, tokenDefined)
	for r := range byteAlphabet() {
		tokens, kinds = append(tokens, string(r)), append(kinds, tokenNormal)
	}
	b := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"tokenizer.ggml.model", "gpt2"}, {"tokenizer.ggml.pre", "gpt-2"}, {"tokenizer.ggml.tokens", tokens},
		{"tokenizer.ggml.token_type", kinds}, {"tokenizer.ggml.merges", []string{}}, {"tokenizer.chat_template", source},
		{"tokenizer.ggml.eos_token_id", uint32(slices.Index(tokens, eos))},
	}}
	if bos != "" {
		b.put("tokenizer.ggml.bos_token_id", uint32(slices.Index(tokens, bos)))
	}
	f, err := OpenBytes("controls", b.bytes())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// controlsOf are the control tokens of a chat, in order; nil and the error
// where the template refuses it.
func (f family) controlsOf(msgs []Message) (found []int32, err error) {
	ids, err := f.tpl.Tokens(msgs, true)
	for _, id := range ids {
		if int(id) < len(f.controls) {
			found = append(found, id)
		}
	}
	return found, err
}

// TestInjectionFamilies: whatever messages say, a chat has the control tokens
// that the template writes for harmless messages, and no other. Each control
// token is spelled whole, in pieces that a message or the template beside it
// could complete, over two messages, and as a role.
func TestInjectionFamilies(t *testing.T) {
	all := families(t)
	if len(all) < 12 {
		t.Fatalf("%d families", len(all))
	}
	for name, f := range all {
		t.Run(name, func(t *testing.T) {
			chats, accepted := 0, 0
			for _, system := range []bool{false, true} {
				chat := func(system1, user, answer, user2 string) []Message {
					msgs := []Message{{"system", system1}, {"user", user}, {"assistant", answer}, {"user", user2}}
					if !system {
						msgs = msgs[1:]
					}
					return msgs
				}
				want, err := f.controlsOf(chat("s", "u", "a", "v"))
				if err != nil {
					if system && strings.HasPrefix(name, "mistral-v1") || system && name == "gemma" {
						continue // knows no system message
					}
					t.Fatal(err)
				}
				// A role that the template does not know, in a chat of its own.
				stranger := func(role string) []Message {
					return append(chat("s", "u", "a", "v")[:1:1], Message{role, "u"})
				}
				wantStranger, _ := f.controlsOf(stranger("stranger"))
				check := func(what string, msgs []Message, want []int32) {
					chats++
					got, err := f.controlsOf(msgs)
					if err != nil {
						return // refused: nothing of it reaches the model
					}
					if accepted++; !slices.Equal(got, want) {
						t.Errorf("%s: control tokens %v, want %v", what, got, want)
					}
				}
				for _, c := range f.controls {
					for _, say := range []string{c, "x" + c, c + "x", c + c, c[1:], c[:len(c)-1], " " + c + "\n" + c, "<" + c + ">", c[1:] + c[:1], strings.Join(f.controls, "")} {
						check(fmt.Sprintf("everybody says %q", say), chat(say, say, say, say), want)
						check(fmt.Sprintf("the user says %q", say), chat("s", "u", "a", say), want)
						check(fmt.Sprintf("somebody's role is %q", say), stranger(say), wantStranger)
					}
					for i := range c {
						if i == 0 {
							continue // an empty message is a matter of its own
						}
						check(fmt.Sprintf("%q and %q in two messages", c[:i], c[i:]), chat(c[:i], c[i:], c[:i], c[i:]), want)
						check(fmt.Sprintf("%q and %q in two messages", c[i:], c[:i]), chat(c[i:], c[:i], c[i:], c[:i]), want)
					}
				}
			}
			if accepted < chats/3 {
				t.Errorf("of %d chats only %d were rendered", chats, accepted)
			}
		})
	}
}
