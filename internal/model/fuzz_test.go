package model

import (
	"maps"
	"os"
	"path/filepath"
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
	for _, kind := range slices.Sorted(maps.Keys(formats)) {
		if values, _ := kind.Block(); values > 0 {
			f.Add(manyColumns(kind).bytes())
		}
	}
	f.Add(byteModel(f, 7, "smollm", 20).data)
	f.Add(byteModel(f, 7, "llama-bpe", 20).data)
	f.Add(controlsFile(f, []string{"<|a|>", "</s>"}, 0, "<|a|>", "</s>", "{% macro f(m) %}{{ m.role }}{% endmacro %}{{ messages | map(attribute='content') | join }}{{ f(messages[0]) }}").data)
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
	if s := err.Error(); strings.ContainsAny(s, "\n\r\x00") || !utf8.ValidString(s) || len(s) > 500 {
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
	var files []*File
	var byteLevel []*Tokenizer
	for _, pre := range fourPres {
		files = append(files, byteModel(f, 7, pre, 300))
		byteLevel = append(byteLevel, tokenizer(f, files[len(files)-1]))
	}
	vocab := randomPieces(3, 400)
	pieces := tokenizer(f, vocab.file(f))
	f.Fuzz(func(t *testing.T, text string) {
		clean := cleanText(validText(text))
		checkRoundTrip(t, tiny, text, strings.ReplaceAll(clean, dash, " "))
		checkTokens(t, pieces, text)
		for i, tok := range byteLevel {
			got := checkTokens(t, tok, text)
			if len(text) > 200 || strings.Contains(text, "<tool>") {
				continue
			}
			if want := naiveBytes(t, files[i], tok, validText(text)); !slices.Equal(got, want) {
				t.Errorf("%s: %q gives %v, want %v", fourPres[i], text, got, want)
			}
			checkRoundTrip(t, tok, text, strings.Map(func(r rune) rune {
				if r == 1 || r == 2 {
					return -1 // they have no token there
				}
				return r
			}, clean))
		}
		if len(text) > 200 || strings.Contains(text, "<tool>") || text == "" || validText(text) != clean {
			return // the definition's runes know no surrogates
		}
		if got, want := pieces.Encode(text, false, false), vocab.encode(" "+clean); !slices.Equal(got, want) {
			t.Errorf("pieces: %q gives %v, want %v", text, got, want)
		}
	})
}

// checkRoundTrip: a text comes back as want, at once and as a stream of tokens.
func checkRoundTrip(t *testing.T, tok *Tokenizer, text, want string) {
	t.Helper()
	ids := checkTokens(t, tok, text)
	if got := tok.Decode(ids); got != want {
		t.Errorf("%q comes back as %q, want %q", text, got, want)
	}
	d := tok.NewDetok()
	stream := ""
	for _, id := range ids {
		out := d.Push(id)
		if !utf8.ValidString(out) {
			t.Errorf("%q: a stream of %q", text, out)
		}
		stream += out
	}
	if stream += d.Flush(); stream != want && stream != " "+want {
		t.Errorf("%q streams as %q, want %q", text, stream, want)
	}
}

// FuzzInjection: what messages say changes no control token of a chat, with
// the templates in the manner of real models.
func FuzzInjection(f *testing.F) {
	all := families(f)
	names := slices.Sorted(maps.Keys(all))
	for i, name := range names {
		for _, c := range all[name].controls {
			f.Add(uint8(i), "x", c, c[1:]+c[:1])
			f.Add(uint8(i), c[:1], c[1:], "</think>"+c+"<think>\n")
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, a, b, c string) {
		if a == "" || b == "" || c == "" || len(a)+len(b)+len(c) > 4096 {
			return // Phi 3 leaves empty messages out
		}
		fam := all[names[int(which)%len(names)]]
		chat := func(a, b, c string) []Message {
			return []Message{{"user", a}, {"assistant", b}, {"user", c}}
		}
		want, err := fam.controlsOf(chat("a", "b", "c"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := fam.controlsOf(chat(a, b, c))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s with %q, %q, %q: control tokens %v, %v, want %v", names[int(which)%len(names)], a, b, c, got, err, want)
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
	sources, err := filepath.Glob(modeltest.Path(f, "jinja/families/*.jinja"))
	if err != nil || len(sources) < 12 {
		f.Fatal(len(sources), err)
	}
	for _, path := range sources {
		source, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(source), "user", "a b,c\n")
	}
	tok := tokenizer(f, byteModel(f, 7, "gpt2", 20))
	f.Fuzz(func(t *testing.T, source, role, content string) {
		body, err := parseTemplate(source)
		if err != nil {
			checkLine(t, line("%w", err)) // as NewTemplate does
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
