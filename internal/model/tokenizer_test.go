package model

import (
	"encoding/hex"
	"slices"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// smolFile opens SmolLM2, or skips where it has not been fetched.
func smolFile(t testing.TB) *File {
	t.Helper()
	f, err := Open(modeltest.SmolLM2(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func tinyFile(t testing.TB) *File {
	t.Helper()
	f, err := OpenBytes("tiny", Builtin())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func tokenizer(t testing.TB, f *File) *Tokenizer {
	t.Helper()
	tok, err := NewTokenizer(f)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestTinyReference(t *testing.T) {
	tok := tokenizer(t, tinyFile(t))
	var ref struct {
		Prompts []struct {
			Prompt string
			IDs    []int32
			Torch  struct {
				IDs  []int32
				Text string
			} `json:"torch_f16_weights"`
		}
		Tokenizer []struct {
			Text string
			IDs  []int32
		}
	}
	modeltest.JSON(t, "tiny-model/reference.json", &ref)
	if len(ref.Tokenizer) != 100 || len(ref.Prompts) != 8 {
		t.Fatalf("%d tokenizer cases and %d prompts", len(ref.Tokenizer), len(ref.Prompts))
	}
	for _, c := range ref.Tokenizer {
		got := tok.Encode(c.Text, false, false)
		if !slices.Equal(got, c.IDs) {
			t.Errorf("%q: %v, want %v", c.Text, got, c.IDs)
		}
		if back := tok.Decode(got); back != c.Text && c.Text != "▁" && c.Text != "▁the▁king" && c.Text != "a▁b" {
			t.Errorf("%q comes back as %q", c.Text, back)
		}
	}
	for _, p := range ref.Prompts {
		if got := tok.Encode(p.Prompt, true, false); !slices.Equal(got, p.IDs) {
			t.Errorf("%q: %v, want %v", p.Prompt, got, p.IDs)
		}
		if got := tok.Decode(p.Torch.IDs); got != p.Torch.Text {
			t.Errorf("%v decodes to %q, want %q", p.Torch.IDs, got, p.Torch.Text)
		}
	}
}

func TestSmolReference(t *testing.T) {
	tok := tokenizer(t, smolFile(t))
	var ref struct {
		Cases []struct {
			Name      string
			Hex       string  `json:"text_hex"`
			Plain     []int32 `json:"ids_plain"`
			Special   []int32 `json:"ids_special"`
			Roundtrip bool
		}
	}
	modeltest.JSON(t, "smollm2/tokenizer.json", &ref)
	for _, c := range ref.Cases {
		text, err := hex.DecodeString(c.Hex)
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.Encode(string(text), true, false); !slices.Equal(got, c.Plain) {
			t.Errorf("%s %q: %v, want %v", c.Name, text, got, c.Plain)
		}
		if got := tok.Encode(string(text), true, true); !slices.Equal(got, c.Special) {
			t.Errorf("%s %q with special tokens: %v, want %v", c.Name, text, got, c.Special)
		}
		var back []byte
		for _, id := range c.Plain {
			back = append(back, tok.Piece(id)...)
		}
		if c.Roundtrip != (string(back) == string(text)) {
			t.Errorf("%s %q comes back as %q", c.Name, text, back)
		}
	}
}
