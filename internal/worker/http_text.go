package worker

import (
	"strings"
	"unicode/utf8"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/model"
)

// textCodec turns text into tokens and back: a model's tokenizer and chat
// template, or the sim engine's bytes.
type textCodec interface {
	encode(text string, addSpecial, parseSpecial bool) []int32
	decode(ids []int32) string
	chat(msgs []api.Message, addGeneration bool) ([]int32, *api.Error)
	detok() detok
	text(id int32) (string, bool) // false: a control token or no text of its own
	bytes(id int32) []byte        // what a token stands for; the name of a control token
	eog() []int32                 // ids that end an answer
	ends() (bos, eos *string)     // the names of the tokens that begin and end a text; nil: none
	vocab() int
	maxBytes(tokens int) int // the longest text that can be so few tokens
}

// detok gives a stream of tokens as a stream of whole UTF-8.
type detok interface {
	Push(id int32) string
	Flush() string
}

// modelText is the tokenizer and chat template of a GGUF file.
type modelText struct {
	tok     *model.Tokenizer
	tmpl    *model.Template
	tmplErr error // why there is no template
}

func newModelText(f *model.File) (*modelText, error) {
	tok, err := model.NewTokenizer(f)
	if err != nil {
		return nil, err
	}
	m := &modelText{tok: tok}
	m.tmpl, m.tmplErr = model.NewTemplate(f, tok)
	return m, nil
}

func (m *modelText) encode(text string, addSpecial, parseSpecial bool) []int32 {
	return m.tok.Encode(text, addSpecial, parseSpecial)
}
func (m *modelText) decode(ids []int32) string    { return m.tok.Decode(ids) }
func (m *modelText) detok() detok                 { d := m.tok.NewDetok(); return &d }
func (m *modelText) text(id int32) (string, bool) { return m.tok.Text(id) }
func (m *modelText) bytes(id int32) []byte {
	if b := m.tok.Piece(id); b != nil {
		return b
	}
	s, _ := m.tok.Text(id)
	return []byte(s)
}
func (m *modelText) eog() []int32 { return m.tok.EOG() }
func (m *modelText) ends() (bos, eos *string) {
	name := func(id int32, ok bool) *string {
		if !ok {
			return nil
		}
		s, _ := m.tok.Text(id)
		return &s
	}
	return name(m.tok.BOS()), name(m.tok.EOS())
}
func (m *modelText) vocab() int              { return m.tok.Vocab() }
func (m *modelText) maxBytes(tokens int) int { return m.tok.MaxBytes(tokens) }

func (m *modelText) chat(msgs []api.Message, addGeneration bool) ([]int32, *api.Error) {
	if m.tmpl == nil {
		return nil, api.Errorf(api.Unsupported, "this model's chat template cannot be used: %v; /v1/completions and /generate work", m.tmplErr)
	}
	list := make([]model.Message, len(msgs))
	for i, msg := range msgs {
		list[i] = model.Message{Role: msg.Role, Content: msg.Content}
	}
	ids, err := m.tmpl.Tokens(list, addGeneration)
	if err != nil {
		return nil, &api.Error{Code: api.InvalidRequest, Param: "messages", Message: "the chat template refuses these messages: " + err.Error()}
	}
	return ids, nil
}

// byteText is the text of the sim engine: token i below 256 is the byte i.
type byteText struct{ size int }

func (b byteText) encode(text string, _, _ bool) []int32 {
	ids := make([]int32, len(text))
	for i := range len(text) {
		ids[i] = int32(text[i])
	}
	return ids
}

func (b byteText) decode(ids []int32) string {
	raw := make([]byte, 0, len(ids))
	for _, id := range ids {
		if id < 256 {
			raw = append(raw, byte(id))
		}
	}
	return strings.ToValidUTF8(string(raw), "\uFFFD")
}

func (b byteText) chat(msgs []api.Message, addGeneration bool) ([]int32, *api.Error) {
	var s strings.Builder
	for _, m := range msgs {
		s.WriteString(m.Role + ": " + m.Content + "\n")
	}
	if addGeneration {
		s.WriteString("assistant:")
	}
	return b.encode(s.String(), false, false), nil
}

func (b byteText) detok() detok { return &byteDetok{} }

func (b byteText) text(id int32) (string, bool) {
	if id >= 256 {
		return "", false
	}
	return strings.ToValidUTF8(string([]byte{byte(id)}), "\uFFFD"), true
}

func (b byteText) bytes(id int32) []byte {
	if id >= 256 {
		return nil
	}
	return []byte{byte(id)}
}

func (b byteText) eog() []int32             { return nil }
func (b byteText) ends() (bos, eos *string) { return nil, nil }
func (b byteText) vocab() int               { return b.size }

func (b byteText) maxBytes(tokens int) int { return tokens }

type byteDetok struct{ part []byte }

func (d *byteDetok) Push(id int32) string {
	if id >= 256 {
		return ""
	}
	d.part = append(d.part, byte(id))
	if !utf8.FullRune(d.part) {
		return ""
	}
	s := strings.ToValidUTF8(string(d.part), "\uFFFD")
	d.part = d.part[:0]
	return s
}

func (d *byteDetok) Flush() string {
	s := strings.ToValidUTF8(string(d.part), "\uFFFD")
	d.part = nil
	return s
}
