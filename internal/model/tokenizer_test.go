package model

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

const smolSHA = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

var smolPath = sync.OnceValues(func() (string, error) {
	path := os.Getenv("METRONOME_TEST_SMOLLM2")
	if path == "" {
		cache := os.Getenv("XDG_CACHE_HOME")
		if cache == "" {
			cache = filepath.Join(os.Getenv("HOME"), ".cache")
		}
		path = filepath.Join(cache, "metronome", "models", smolSHA+".gguf")
	}
	h, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer h.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, h); err != nil {
		return "", err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != smolSHA {
		return "", fmt.Errorf("%s has sha256 %s, not %s", path, got, smolSHA)
	}
	return path, nil
})

// smolFile opens SmolLM2, or skips where it has not been fetched.
func smolFile(t testing.TB) *File {
	t.Helper()
	path, err := smolPath()
	if errors.Is(err, fs.ErrNotExist) && os.Getenv("METRONOME_TEST_SMOLLM2") == "" {
		t.Skipf("needs SmolLM2: run scripts/fetch-smollm2.sh (%v)", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
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

// readJSON reads a file of reference outputs.
func readJSON(t testing.TB, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
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
	readJSON(t, "tiny-model/reference.json", &ref)
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
	readJSON(t, "smollm2/tokenizer.json", &ref)
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
