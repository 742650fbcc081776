package model

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// The fuzz targets run as plain tests over their seeds and testdata/fuzz.

// FuzzGGUF: whatever the bytes, a file is refused or all of it can be used.
func FuzzGGUF(f *testing.F) {
	f.Add(small().bytes())
	f.Add(byteModel(f, 7, "smollm", 20).data)
	f.Add(randomPieces(3, 20).file(f).data)
	whole := small()
	whole.put("tokenizer.ggml.model", "llama")
	whole.put("tokenizer.ggml.tokens", []string{"<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "<0x0A>"})
	whole.put("tokenizer.ggml.scores", []float32{0, 0, 0, -1, -2, -3, -4, 0})
	whole.put("tokenizer.ggml.token_type", []int32{2, 3, 3, 1, 1, 1, 1, 6})
	whole.put("tokenizer.chat_template", "{% for m in messages %}{{ bos_token + m.role + m['content'] }}{% endfor %}")
	f.Add(whole.bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := OpenBytes("fuzz", data)
		if err != nil {
			checkLine(t, err)
			return
		}
		for _, name := range file.Tensors() {
			tensor, ok := file.Tensor(name)
			values, bytes := tensor.Type.Block()
			if !ok || values == 0 || len(tensor.Data) != tensor.Values()/values*bytes {
				t.Errorf("tensor %q: %d bytes of %v in shape %v", name, len(tensor.Data), tensor.Type, tensor.Shape)
			}
		}
		if h, err := file.Hyper(); err != nil {
			checkLine(t, err)
		} else if h.Heads%h.KVHeads != 0 || h.Rope.Dim > h.HeadDim || h.Vocab < 1 || h.Layers < 1 || !(h.Eps > 0) || !(h.Rope.Theta > 1) {
			t.Errorf("hyper parameters %+v", h)
		}
		if len(file.Fingerprint()) != 64 {
			t.Error("no fingerprint")
		}
		tok, err := NewTokenizer(file)
		if err != nil {
			checkLine(t, err)
			return
		}
		checkTokens(t, tok, "ab <s>é\n")
		if tpl, err := NewTemplate(file, tok); err != nil {
			checkLine(t, err)
		} else if ids, err := tpl.Tokens([]Message{{"user", "ab"}}, true); err == nil {
			tok.Decode(ids)
		}
	})
}

// checkLine: an error is one line of bounded length.
func checkLine(t *testing.T, err error) {
	t.Helper()
	if s := err.Error(); strings.ContainsAny(s, "\n\r\x00") || !utf8.ValidString(s) {
		t.Errorf("error %q is not one line of text", s)
	}
}

// checkTokens: plain text gives ids of the vocabulary that are no control tokens.
func checkTokens(t *testing.T, tok *Tokenizer, text string) []int32 {
	t.Helper()
	ids := tok.Encode(text, false, false)
	for _, id := range ids {
		if id < 0 || int(id) >= tok.Vocab() {
			t.Errorf("%q gives token %d of %d", text, id, tok.Vocab())
		}
		if tok.IsControl(id) && id != tok.unknown {
			t.Errorf("%q gives the control token %d", text, id)
		}
	}
	if long := tok.Encode(text, true, true); len(long) > len(text)*4+4 {
		t.Errorf("%q gives %d tokens", text, len(long))
	}
	return ids
}

// FuzzTokenizer: round trips, streams and the definition of byte-pair encoding
// on texts of any bytes.
func FuzzTokenizer(f *testing.F) {
	for _, s := range []string{"", " ", "Hello,  world's\n", "a\x00\x01\xff", "<|end|><tool><x></s>", "▁the é漢😀", "\xed\xa0\x80\xc0\xaf", "abcdabcd  1234'll"} {
		f.Add(s)
	}
	var ref struct{ Tokenizer []struct{ Text string } }
	modeltest.JSON(f, "tiny-model/reference.json", &ref)
	for _, c := range ref.Tokenizer {
		f.Add(c.Text)
	}
	tiny := tokenizer(f, tinyFile(f))
	bytesFile := byteModel(f, 7, "smollm", 300)
	bytes := tokenizer(f, bytesFile)
	vocab := randomPieces(3, 400)
	pieces := tokenizer(f, vocab.file(f))
	f.Fuzz(func(t *testing.T, text string) {
		clean := cleanText(validText(text))
		ids := checkTokens(t, tiny, text)
		if got := tiny.Decode(ids); got != strings.ReplaceAll(clean, dash, " ") {
			t.Errorf("tiny: %q comes back as %q", text, got)
		}
		d := tiny.NewDetok()
		stream := ""
		for _, id := range ids {
			stream += d.Push(id)
		}
		if stream += d.Flush(); stream != tiny.Decode(ids) {
			t.Errorf("tiny: %q streams as %q", text, stream)
		}
		checkTokens(t, pieces, text)
		checkTokens(t, bytes, text)
		if len(text) > 200 || strings.Contains(text, "<tool>") {
			return
		}
		if got, want := bytes.Encode(text, false, false), naiveBytes(t, bytesFile, bytes, validText(text)); !slices.Equal(got, want) {
			t.Errorf("bytes: %q gives %v, want %v", text, got, want)
		}
		if text == "" || validText(text) != clean { // the definition's runes know no surrogates
			return
		}
		if got, want := pieces.Encode(text, false, false), vocab.encode(" "+clean); !slices.Equal(got, want) {
			t.Errorf("pieces: %q gives %v, want %v", text, got, want)
		}
	})
}

// FuzzTemplate: a template is refused or runs to an end, and nothing of a
// message is ever taken for the template's own.
func FuzzTemplate(f *testing.F) {
	var ref struct{ Cases []struct{ Template string } }
	modeltest.JSON(f, "jinja/cases.json", &ref)
	for _, c := range ref.Cases {
		f.Add(c.Template, "user", "a b,c\n")
	}
	tok := tokenizer(f, byteModel(f, 7, "gpt2", 20))
	f.Fuzz(func(t *testing.T, source, role, content string) {
		body, err := parseTemplate(source)
		if err != nil {
			checkLine(t, err)
			return
		}
		tpl := &Template{limits: few, body: body, tok: tok, vars: map[string]any{"tools": nil, "bos_token": literal("<|start|>")}}
		// Marks that no template writes: where they come out, a message speaks.
		const mark = "\U000F1234"
		msgs := []Message{{role + mark, mark + content + mark}, {"assistant", strings.Repeat(mark, 9)}}
		out, err := tpl.render(msgs, true)
		if err != nil {
			return // what a template raises may have any form
		}
		at := 0
		for _, o := range out.own {
			if o.from < at || o.to <= o.from || o.to > len(out.s) {
				t.Fatalf("the template's own bytes of %q are %v", out.s, out.own)
			}
			at = o.to
			if own := out.s[o.from:o.to]; strings.Contains(own, mark) && !strings.Contains(source, mark) && !strings.Contains(source, "\\U") {
				t.Fatalf("%q of a message counts as the template's own in %q", own, out.s)
			}
		}
		ids, err := tpl.Tokens(msgs, true)
		if err != nil {
			t.Fatal(err)
		}
		if !utf8.ValidString(out.s) && utf8.ValidString(source) {
			t.Errorf("rendered %q", out.s)
		}
		tok.Decode(ids)
	})
}
