package model

import (
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
