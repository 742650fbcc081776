package model

import (
	"errors"
	"slices"
)

// Message is one turn of a chat.
type Message struct{ Role, Content string }

// ErrNoTemplate is what NewTemplate gives for a file without a chat template:
// the model completes texts, but knows no chat.
var ErrNoTemplate = errors.New("the model has no chat template")

// maxTemplate bounds the source of a template in bytes.
const maxTemplate = 256 << 10

// Template lays out messages as the text that the model was trained on. It is
// immutable.
//
// The file's Jinja2 source runs in an interpreter of our own whose texts carry
// their origin. A control token comes only from bytes that stand in the
// template itself (or are one of its variables bos_token, eos_token, unk_token,
// pad_token), with one of the ordinary roles between them or not: what a message says is text, also where it spells such a token,
// and also where template and message spell one together.
type Template struct {
	body   []stmt
	tok    *Tokenizer
	vars   map[string]any // what every rendering knows
	limits limits
}

// roles are the words that a message's role may be without being foreign text:
// some templates build a control token around it ('<|' + role + '|>').
var roles = []string{"system", "developer", "user", "assistant", "tool"}

func role(s string) str {
	if slices.Contains(roles, s) {
		return literal(s)
	}
	return str{s: cleanText(s)}
}

// NewTemplate reads the file's chat template. What the interpreter does not
// know is refused here, with the line and the construct.
func NewTemplate(f *File, t *Tokenizer) (*Template, error) {
	src, ok, err := f.text("tokenizer.chat_template")
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, f.errorf("%w", ErrNoTemplate)
	}
	if len(src) > maxTemplate {
		return nil, f.errorf("chat template: %d bytes, up to %d would be right", len(src), maxTemplate)
	}
	body, err := parseTemplate(src)
	if err != nil {
		return nil, f.errorf("%w", err)
	}
	// The same names as transformers gives; tools and documents are none there too when there are none.
	vars := map[string]any{"tools": nil, "documents": nil}
	for name, key := range map[string]string{"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"} {
		id, ok, err := f.integer("tokenizer.ggml."+key+"_token_id", 0, t.Vocab()-1)
		if err != nil {
			return nil, err
		}
		if ok {
			vars[name] = literal(t.texts[id])
		}
	}
	return &Template{body, t, vars, usual}, nil
}

// Render gives the text that Jinja2 as transformers configures it gives.
// addGeneration asks for the beginning of the assistant's answer. An error is
// the messages' fault: the template refuses them, or they are too much.
func (t *Template) Render(msgs []Message, addGeneration bool) (string, error) {
	s, err := t.render(msgs, addGeneration)
	return s.s, err
}

// Tokens gives the tokens of a chat, as a model's prompt. Text between two
// control tokens is encoded as one piece, whoever wrote it. BOS goes in front
// where the file wants it and the template has not written it. Bytes that are
// no UTF-8 become U+FFFD.
func (t *Template) Tokens(msgs []Message, addGeneration bool) ([]int32, error) {
	s, err := t.render(msgs, addGeneration)
	if err != nil {
		return nil, err
	}
	ids := t.tok.encode(nil, s.s, s.own)
	if t.tok.addBOS && (len(ids) == 0 || ids[0] != t.tok.bos) {
		ids = slices.Insert(ids, 0, t.tok.bos)
	}
	return ids, nil
}

func (t *Template) render(msgs []Message, addGeneration bool) (out str, err error) {
	defer catch(&err)
	messages := &list{}
	for _, m := range msgs {
		messages.items = append(messages.items, &record{
			names:  []string{"role", "content"},
			values: map[string]any{"role": role(m.Role), "content": str{s: cleanText(m.Content)}},
		})
	}
	vars := &scope{vars: t.vars}
	r := run{limits: t.limits, out: &strBuilder{}, scope: &scope{up: vars, vars: map[string]any{
		"messages": messages, "add_generation_prompt": addGeneration,
	}}}
	r.body(t.body)
	return r.out.str(), nil
}
