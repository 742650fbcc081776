package model

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// llamaReference is testdata/tokenizers/reference.json: what llama.cpp makes of
// texts with small vocabularies, one for each pre-tokenizer and SentencePiece.
type llamaReference struct {
	Texts  []string
	Vocabs map[string]struct {
		Tokens, Merges []string
		Types          []int32
		Scores         []float32
	}
	Runs []struct {
		Name, Vocab string
		Keys        map[string]json.RawMessage
		IDs         [][]int32
		Special     map[string][]int32 // by text: with control tokens parsed, where that differs
	}
}

func readLlamaReference(t testing.TB) *llamaReference {
	t.Helper()
	ref := &llamaReference{}
	modeltest.JSON(t, "tokenizers/reference.json", ref)
	if len(ref.Texts) < 300 || len(ref.Runs) != 7 {
		t.Fatalf("%d texts, %d runs", len(ref.Texts), len(ref.Runs))
	}
	return ref
}

// tokenizer builds the tokenizer of a run.
func (ref *llamaReference) tokenizer(t testing.TB, run int) *Tokenizer {
	t.Helper()
	r := ref.Runs[run]
	if r.Vocab == "" {
		return tokenizer(t, tinyFile(t))
	}
	v := ref.Vocabs[r.Vocab]
	b := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"tokenizer.ggml.tokens", v.Tokens}, {"tokenizer.ggml.token_type", v.Types},
	}}
	if v.Merges != nil {
		b.put("tokenizer.ggml.merges", v.Merges)
	} else {
		b.put("tokenizer.ggml.scores", v.Scores)
	}
	for key, raw := range r.Keys {
		text := string(raw)
		switch {
		case text == "true" || text == "false":
			b.put(key, text == "true")
		case text[0] == '"':
			b.put(key, strings.Trim(text, `"`))
		default:
			n, err := strconv.ParseUint(text, 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			b.put(key, uint32(n))
		}
	}
	f, err := OpenBytes(r.Name, b.bytes())
	if err != nil {
		t.Fatal(err)
	}
	return tokenizer(t, f)
}

// TestLlamaReference: the tokens are llama.cpp's, for every text, with control
// tokens parsed and not, and with BOS where it adds one by itself.
func TestLlamaReference(t *testing.T) {
	ref := readLlamaReference(t)
	for i, run := range ref.Runs {
		t.Run(run.Name, func(t *testing.T) {
			tok := ref.tokenizer(t, i)
			if len(run.IDs) != len(ref.Texts) {
				t.Fatalf("%d results for %d texts", len(run.IDs), len(ref.Texts))
			}
			tokens, forged := 0, 0
			for j, text := range ref.Texts {
				got := tok.Encode(text, true, false)
				if controls(tok, run.IDs[j]) > controls(tok, tok.Encode("", true, false)) {
					// llama.cpp lets SentencePiece's merges end in a control token: plain text could forge one.
					if forged++; controls(tok, got) != 1 {
						t.Errorf("%q: %v has a control token beside BOS", text, got)
					}
				} else if !slices.Equal(got, run.IDs[j]) {
					t.Errorf("%q: %v, want %v", text, got, run.IDs[j])
				}
				want, ok := run.Special[strconv.Itoa(j)]
				if !ok {
					want = run.IDs[j]
				}
				if got := tok.Encode(text, true, true); !slices.Equal(got, want) {
					t.Errorf("%q with control tokens: %v, want %v", text, got, want)
				}
				tokens += len(want)
			}
			if forged > 0 && (run.Vocab != "pieces" || forged > 1) {
				t.Errorf("%d texts with forged control tokens", forged)
			}
			t.Logf("%d texts, %d tokens, %d texts with control tokens", len(ref.Texts), tokens, len(run.Special))
		})
	}
}
