package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
	"pgregory.net/rapid"
)

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

// byteModel is a byte-level BPE model with random merges over a few letters,
// so that the tests need no fetched file. Bytes 1 and 2 have no token.
func byteModel(t testing.TB, seed uint64, pre string, merges int) *File {
	t.Helper()
	spell := map[byte]string{}
	for r, b := range byteAlphabet() {
		spell[b] = string(r)
	}
	var tokens, pairs []string
	kinds := []int32{3, 3, 4, 4}
	tokens = append(tokens, "<|end|>", "<|start|>", "<tool>", "<tool><x>")
	known := map[string]bool{}
	add := func(text string) {
		known[text] = true
		tokens = append(tokens, text)
		kinds = append(kinds, 1)
	}
	for b := range 256 {
		if b != 1 && b != 2 {
			add(spell[byte(b)])
		}
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	parts := strings.Split("a b c d Ġ 1 ! Ã ©", " ")
	for len(pairs) < merges {
		l, r := parts[rng.IntN(len(parts))], parts[rng.IntN(len(parts))]
		if known[l+r] || len(l+r) > 24 {
			continue
		}
		pairs = append(pairs, l+" "+r)
		parts = append(parts, l+r)
		if rng.IntN(8) > 0 {
			add(l + r)
		} else {
			known[l+r] = true // merges to what is no token: spelled in bytes in the end
		}
	}
	b := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"tokenizer.ggml.model", "gpt2"}, {"tokenizer.ggml.pre", pre}, {"tokenizer.ggml.tokens", tokens},
		{"tokenizer.ggml.token_type", kinds}, {"tokenizer.ggml.merges", pairs}, {"tokenizer.ggml.bos_token_id", uint32(1)},
		{"tokenizer.ggml.eos_token_id", uint32(0)}, {"tokenizer.ggml.add_bos_token", true}, {"tokenizer.ggml.add_eos_token", true},
	}}
	f, err := OpenBytes("bytes", b.bytes())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// pieceVocab is a SentencePiece vocabulary: bytes from id 4, then pieces.
type pieceVocab struct {
	tokens []string
	kinds  []int32
	scores []float32
}

func (v *pieceVocab) add(text string, kind int32, score float32) {
	v.tokens, v.kinds, v.scores = append(v.tokens, text), append(v.kinds, kind), append(v.scores, score)
}

// randomPieces is a vocabulary with few distinct scores, so that ties are common.
func randomPieces(seed uint64, n int) *pieceVocab {
	v := &pieceVocab{tokens: []string{"<unk>", "<s>", "</s>", "<tool>"}, kinds: []int32{2, 3, 3, 4}, scores: make([]float32, 4)}
	for b := range 256 {
		v.add(fmt.Sprintf("<0x%02X>", b), 6, 0)
	}
	rng := rand.New(rand.NewPCG(seed, 2))
	parts := strings.Split("▁ a b c é 1 < s >", " ")
	for _, p := range parts[:7] {
		v.add(p, 1, -100)
	}
	for n > 0 {
		text := parts[rng.IntN(len(parts))] + parts[rng.IntN(len(parts))]
		if slices.Contains(v.tokens, text) || len(text) > 24 {
			continue
		}
		parts = append(parts, text)
		v.add(text, 1, float32(rng.IntN(20))-15)
		n--
	}
	return v
}

// file is a model of the vocabulary with the defaults of SentencePiece: BOS,
// and a space in front of text.
func (v *pieceVocab) file(t testing.TB) *File {
	t.Helper()
	b := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"tokenizer.ggml.model", "llama"}, {"tokenizer.ggml.tokens", v.tokens},
		{"tokenizer.ggml.token_type", v.kinds}, {"tokenizer.ggml.scores", v.scores},
	}}
	f, err := OpenBytes("pieces", b.bytes())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// encode is SentencePiece's BPE as its definition reads: merge the adjacent
// pair whose text has the best score, the leftmost first, until none is a piece.
func (v *pieceVocab) encode(text string) (ids []int32) {
	tokens := map[string]int32{}
	for id, text := range v.tokens {
		if v.kinds[id] == 1 {
			tokens[text] = int32(id)
		}
	}
	var parts []string
	for _, r := range strings.ReplaceAll(text, " ", dash) {
		parts = append(parts, string(r))
	}
	for {
		best, at := float32(-1e30), -1
		for i := range len(parts) - 1 {
			if id, ok := tokens[parts[i]+parts[i+1]]; ok && v.scores[id] > best {
				best, at = v.scores[id], i
			}
		}
		if at < 0 {
			break
		}
		parts = slices.Replace(parts, at, at+2, parts[at]+parts[at+1])
	}
	for _, p := range parts {
		if id, ok := tokens[p]; ok {
			ids = append(ids, id)
			continue
		}
		for i := range len(p) {
			ids = append(ids, 4+int32(p[i]))
		}
	}
	return ids
}

// naiveBytes is byte-level BPE as its definition reads: split by the pattern,
// then merge the pair of lowest rank, the leftmost first, until there is none.
func naiveBytes(t *testing.T, f *File, tok *Tokenizer, text string) (ids []int32) {
	merges, _, err := f.texts("tokenizer.ggml.merges")
	if err != nil {
		t.Fatal(err)
	}
	pre, _, _ := f.text("tokenizer.ggml.pre")
	tokens := map[string]int32{}
	for id := range int32(tok.Vocab()) {
		if !tok.IsControl(id) {
			tokens[string(tok.Piece(id))] = id
		}
	}
	rank := map[string]int{}
	alphabet := byteAlphabet()
	for i, m := range merges {
		l, r, _ := strings.Cut(m, " ")
		l, _ = fromAlphabet(alphabet, l)
		r, _ = fromAlphabet(alphabet, r)
		if _, ok := rank[l+"\x00"+r]; !ok {
			rank[l+"\x00"+r] = i
		}
	}
	for _, word := range naiveSplit(pre, text) {
		if id, ok := tokens[word]; ok && pre == "llama-bpe" {
			ids = append(ids, id)
			continue
		}
		parts := strings.Split(word, "")
		parts = parts[:0]
		for i := range len(word) {
			parts = append(parts, word[i:i+1])
		}
		for {
			best, at := len(merges), -1
			for i := range len(parts) - 1 {
				if r, ok := rank[parts[i]+"\x00"+parts[i+1]]; ok && r < best {
					best, at = r, i
				}
			}
			if at < 0 {
				break
			}
			parts = slices.Replace(parts, at, at+2, parts[at]+parts[at+1])
		}
		for _, p := range parts {
			if id, ok := tokens[p]; ok {
				ids = append(ids, id)
				continue
			}
			for i := range len(p) {
				if id, ok := tokens[p[i:i+1]]; ok {
					ids = append(ids, id)
				}
			}
		}
	}
	return ids
}

// The patterns as their makers wrote them, but for \s+(?!\S)|\s+ at their end,
// which Go's regexp cannot express.
var (
	naiveSpace  = `\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}`
	naiveLetter = `\pL\x{2ebf0}-\x{2ee5d}` // those that Unicode 15.1 has added
	naiveLlama3 = `^(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?[\p{L}]+|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|[\s]*[\r\n]+)`
	naiveWords  = map[string]*regexp.Regexp{
		"gpt2":      naivePattern(`^(?:'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+)`),
		"llama-bpe": naivePattern(naiveLlama3),
		"qwen2":     naivePattern(strings.Replace(naiveLlama3, "{1,3}", "", 1)),
	}
	naiveSpaces = naivePattern(`^[\s]+`)
	naiveNumber = naivePattern(`[\p{N}]`)
)

// naivePattern spells the classes as Unicode 15.1 has them.
func naivePattern(pattern string) *regexp.Regexp {
	return regexp.MustCompile(strings.NewReplacer(`\s`, naiveSpace, `\p{L}`, naiveLetter).Replace(pattern))
}

func naiveSplit(pre, text string) (words []string) {
	if pre == "smollm" {
		from := 0
		for _, at := range naiveNumber.FindAllStringIndex(text, -1) {
			words = append(append(words, naiveSplit("gpt2", text[from:at[0]])...), text[at[0]:at[1]])
			from = at[1]
		}
		return append(words, naiveSplit("gpt2", text[from:])...)
	}
	for text != "" {
		n := len(naiveWords[pre].FindString(text))
		if n == 0 {
			spaces := naiveSpaces.FindString(text)
			n = len(spaces)
			// \s+(?!\S): give back one character if something other follows, unless it is the only one.
			if _, last := utf8.DecodeLastRuneInString(spaces); n < len(text) && last < n {
				n -= last
			}
		}
		words = append(words, text[:n])
		text = text[n:]
	}
	return words
}

// textGen makes texts of what splitters and tokenizers trip over.
func textGen() *rapid.Generator[string] {
	part := rapid.OneOf(
		rapid.SampledFrom(strings.Split("a|b|c|d|aa|ab|cd| |  |\n|\t|\r\n|'|'s|'re|'ll|'LL|'Ve|'M|'ſ|\U0002ebf0|1|23|4567|½|²|٣|é|É|ß|漢|字|😀|\u0301|\u00a0|\u3000|\u200b|\ufeff|!|...|_|▁|<|<s>|</s>|<tool>|<tool><x>|<|end|>|<|start|>|\x00|\x01|\x02|\u0378", "|")),
		rapid.String(),
	)
	return rapid.Custom(func(t *rapid.T) string { return strings.Join(rapid.SliceOfN(part, 0, 12).Draw(t, "parts"), "") })
}

// fourPres are the pre-tokenizers under one of their names.
var fourPres = []string{"gpt2", "smollm", "llama-bpe", "qwen2"}

func TestSplitProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := textGen().Draw(t, "text")
		for _, pre := range fourPres {
			var got []string
			preTokenizers[pre].split(text, func(w string) { got = append(got, w) })
			want := slices.DeleteFunc(naiveSplit(pre, text), func(w string) bool { return w == "" })
			if !slices.Equal(got, want) {
				t.Fatalf("%s splits %q into %q, want %q", pre, text, got, want)
			}
		}
	})
}

// TestClasses holds the classes of all characters fixed: a newer Go may bring
// newer Unicode tables, and then two builds would split texts differently.
// The counts are those of llama.cpp's tables (Unicode 15.1).
func TestClasses(t *testing.T) {
	sum, count := sha256.New(), [4]int{}
	for r := range rune(utf8.MaxRune + 1) {
		sum.Write([]byte{byte(classOf(r))})
		count[classOf(r)]++
	}
	if got := hex.EncodeToString(sum.Sum(nil))[:16]; got != "d30035ae5f30bff7" || count[letter] != 136726 || count[number] != 1831 || count[space] != 25 {
		t.Errorf("classes %s, %v of other, letter, number, space", got, count)
	}
}

// TestPreTokenizerSettings: what a name in tokenizer.ggml.pre means beside its pattern.
func TestPreTokenizerSettings(t *testing.T) {
	for pre, want := range map[string]string{"gpt2": "a|b", "smollm": "a|b", "qwen2": "a|b", "llama-bpe": "<s>|ab", "llama3": "<s>|ab", "smaug-bpe": "a|b"} {
		b := &builder{version: 3, align: 32, keys: []bkey{
			{"general.architecture", "llama"}, {"tokenizer.ggml.model", "gpt2"}, {"tokenizer.ggml.pre", pre},
			{"tokenizer.ggml.tokens", []string{"<s>", "a", "b", "ab", "c"}}, {"tokenizer.ggml.token_type", []int32{3, 1, 1, 1, 1}},
			{"tokenizer.ggml.merges", []string{"b c"}}, {"tokenizer.ggml.bos_token_id", uint32(0)},
		}}
		for _, said := range []bool{false, true} {
			if said {
				b.put("tokenizer.ggml.add_bos_token", false)
				want = strings.TrimPrefix(want, "<s>|")
			}
			f, err := OpenBytes("m", b.bytes())
			if err != nil {
				t.Fatal(err)
			}
			tok := tokenizer(t, f)
			var got []string
			for _, id := range tok.Encode("ab", true, false) {
				text, _ := tok.Text(id)
				got = append(got, text)
			}
			if strings.Join(got, "|") != want {
				t.Errorf("%s, add_bos_token said %v: %q, want %s", pre, said, got, want)
			}
		}
	}
}

func TestBytesProperty(t *testing.T) {
	for _, pre := range fourPres {
		f := byteModel(t, 7, pre, 300)
		tok := tokenizer(t, f)
		rapid.Check(t, func(t2 *rapid.T) {
			text := textGen().Draw(t2, "text")
			// User-defined tokens are cut out first: that is not the merging's matter.
			if strings.Contains(text, "<tool>") {
				return
			}
			got, want := tok.Encode(text, false, false), naiveBytes(t, f, tok, text)
			if !slices.Equal(got, want) {
				t2.Fatalf("%q: %v, want %v", text, got, want)
			}
			back := strings.Map(func(r rune) rune {
				if r == 1 || r == 2 {
					return -1
				}
				return r
			}, text)
			if got := tok.Decode(got); got != back {
				t2.Fatalf("%q comes back as %q", text, got)
			}
			if got := tok.Encode(text, true, false); !slices.Equal(got, slices.Concat([]int32{1}, want, []int32{0})) {
				t2.Fatalf("with BOS and EOS: %v", got)
			}
		})
	}
}

func TestPiecesProperty(t *testing.T) {
	v := randomPieces(3, 400)
	tok := tokenizer(t, v.file(t))
	rapid.Check(t, func(t *rapid.T) {
		text := textGen().Draw(t, "text")
		if strings.Contains(text, "<tool>") {
			return
		}
		var want []int32
		if text != "" {
			want = v.encode(" " + text)
		}
		got := tok.Encode(text, false, false)
		if !slices.Equal(got, want) {
			t.Fatalf("%q: %v, want %v", text, got, want)
		}
		if back := tok.Decode(got); back != strings.ReplaceAll(text, dash, " ") {
			t.Fatalf("%q comes back as %q", text, back)
		}
		if got := tok.Encode(text, true, false); !slices.Equal(got, append([]int32{1}, want...)) {
			t.Fatalf("with BOS: %v", got)
		}
	})
}

// TestSpecial: control tokens only where they are asked for, user-defined ones
// everywhere, the longest first, and text beside them as ever.
func TestSpecial(t *testing.T) {
	tok := tokenizer(t, byteModel(t, 7, "gpt2", 50))
	plain := func(s string) []int32 { return tok.Encode(s, false, false) }
	for _, c := range []struct {
		text    string
		special bool
		want    []int32
	}{
		{"<tool>", false, []int32{2}},
		{"<tool><x>", false, []int32{3}},
		{"<tool><x", false, slices.Concat([]int32{2}, plain("<x"))},
		{"ab<tool>cd", false, slices.Concat(plain("ab"), []int32{2}, plain("cd"))},
		{"<|end|>", true, []int32{0}},
		{"<|end|", true, plain("<|end|")},
		{"<|<|end|>", true, slices.Concat(plain("<|"), []int32{0})},
		{" <|start|> <|end|>a", true, slices.Concat(plain(" "), []int32{1}, plain(" "), []int32{0}, plain("a"))},
		{"<|start|><tool>", true, []int32{1, 2}},
	} {
		if got := tok.Encode(c.text, false, c.special); !slices.Equal(got, c.want) {
			t.Errorf("%q, special %v: %v, want %v", c.text, c.special, got, c.want)
		}
	}
	for _, id := range tok.Encode("<|end|><|start|>", false, false) {
		if tok.IsControl(id) {
			t.Errorf("plain text gave the control token %d", id)
		}
	}
}

// TestLooksControl: a user-defined token that is spelled like a control token
// is found only in trusted text, and still has its text in an answer.
func TestLooksControl(t *testing.T) {
	tok := tokenizer(t, controlsFile(t, []string{"</s>", "<|user|>", "<｜User｜>", "<tool>"}, 3, "", "</s>", ""))
	for id, c := range map[int32]struct {
		text  string
		plain bool
	}{1: {"<|user|>", false}, 2: {"<｜User｜>", false}, 3: {"<tool>", true}} {
		plain, trusted := tok.Encode(c.text, false, false), tok.Encode(c.text, false, true)
		if slices.Equal(plain, []int32{id}) != c.plain || !slices.Equal(trusted, []int32{id}) || tok.Decode(trusted) != c.text {
			t.Errorf("%s: %v, %v in trusted text, which is %q", c.text, plain, trusted, tok.Decode(trusted))
		}
	}
}

// TestSpacePrefix: a space goes in front of text, and again after each special token.
func TestSpacePrefix(t *testing.T) {
	v := randomPieces(3, 10)
	tok := tokenizer(t, v.file(t))
	want := slices.Concat([]int32{1}, v.encode(" a"), []int32{3}, v.encode(" b"), []int32{2}, v.encode(" c"))
	if got := tok.Encode("a<tool>b</s>c", true, true); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestRoles(t *testing.T) {
	tiny, bytes := tokenizer(t, tinyFile(t)), tokenizer(t, byteModel(t, 7, "gpt2", 10))
	if id, ok := tiny.BOS(); !ok || id != 1 || !slices.Equal(tiny.EOG(), []int32{2}) || !tiny.IsControl(0) || tiny.IsControl(3) || tiny.Vocab() != 2048 {
		t.Errorf("tiny: BOS %d, ends %v", id, tiny.EOG())
	}
	if id, ok := bytes.BOS(); !ok || id != 1 || !slices.Equal(bytes.EOG(), []int32{0}) {
		t.Errorf("bytes: BOS %d, ends %v", id, bytes.EOG())
	}
	for _, id := range []int32{-1, 2048, math.MaxInt32, math.MinInt32} {
		text, ok := tiny.Text(id)
		if ok || text != "" || tiny.Piece(id) != nil || tiny.IsControl(id) || tiny.Decode([]int32{id}) != "" {
			t.Errorf("%d is taken for a token", id)
		}
	}
	for id, want := range map[int32]string{2: "</s>", 13: "\n", 198: "\ufffd", 268: " the"} {
		if got, ok := tiny.Text(id); !ok || got != want {
			t.Errorf("token %d reads %q, want %q", id, got, want)
		}
	}
	if tiny.Piece(2) != nil || string(tiny.Piece(198)) != "\xc3" || tiny.Decode([]int32{1, 268, 2}) != " the" {
		t.Error("pieces of tiny")
	}
}

func TestSmolRoles(t *testing.T) {
	tok := tokenizer(t, smolFile(t))
	if id, ok := tok.BOS(); !ok || id != 1 || !slices.Equal(tok.EOG(), []int32{0, 2}) {
		t.Errorf("BOS %d, ends %v", id, tok.EOG())
	}
	if n := tok.MaxBytes(1); n < 20 || n > 400 {
		t.Errorf("the longest token has %d bytes", n)
	}
	for id := range int32(20) {
		if tok.IsControl(id) != (id < 17) {
			t.Errorf("token %d: control %v", id, tok.IsControl(id))
		}
	}
}

// TestRolesByName: a token that begins or ends texts is a control token even
// where the file calls it something else, so that no message can spell it.
func TestRolesByName(t *testing.T) {
	v := &pieceVocab{tokens: []string{"<unk>", "<s>", "</s>"}, kinds: []int32{2, 1, 1}, scores: make([]float32, 3)}
	for _, text := range []string{"<", "s", ">", "<s", "</", "</s", "/", "|", "<|end|>", "<|im_end|>", "[TURN]", "[", "]"} {
		v.add(text, 1, 0)
	}
	v.kinds[slices.Index(v.tokens, "<|end|>")] = 4
	f := v.file(t)
	turn := int32(slices.Index(v.tokens, "[TURN]"))
	f.keys["tokenizer.ggml.eot_token_id"] = value{kind: kindUint32, raw: binary.LittleEndian.AppendUint32(nil, uint32(turn))}
	tok := tokenizer(t, f)
	if want := []int32{2, turn - 2, turn - 1, turn}; !slices.Equal(tok.EOG(), want) {
		t.Errorf("ends %v, want %v", tok.EOG(), want)
	}
	for _, id := range append([]int32{1}, tok.EOG()...) {
		text, _ := tok.Text(id)
		if ids := tok.Encode(text, false, false); !tok.IsControl(id) || slices.Contains(ids, id) {
			t.Errorf("%s is text: control %v, ids %v", text, tok.IsControl(id), ids)
		}
		if ids := tok.Encode(text, false, true); !slices.Equal(ids, []int32{id}) {
			t.Errorf("%s in trusted text: %v", text, ids)
		}
	}
}

// TestMergeTwice: of a pair that a file ranks twice the first rank holds.
func TestMergeTwice(t *testing.T) {
	for _, c := range []struct {
		pairs []string
		want  string
	}{{[]string{"a b", "b c"}, "ab|c"}, {[]string{"b c", "a b"}, "a|bc"}, {[]string{"a b", "b c", "a b"}, "ab|c"}, {[]string{"b c", "a b", "b c"}, "a|bc"}} {
		b := &builder{version: 3, align: 32, keys: []bkey{
			{"general.architecture", "llama"}, {"tokenizer.ggml.model", "gpt2"}, {"tokenizer.ggml.pre", "gpt-2"},
			{"tokenizer.ggml.tokens", []string{"a", "b", "c", "ab", "bc"}}, {"tokenizer.ggml.token_type", []int32{1, 1, 1, 1, 1}},
			{"tokenizer.ggml.merges", c.pairs},
		}}
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		tok := tokenizer(t, f)
		var got []string
		for _, id := range tok.Encode("abc", true, false) {
			got = append(got, string(tok.Piece(id)))
		}
		if strings.Join(got, "|") != c.want {
			t.Errorf("%q: %q, want %s", c.pairs, got, c.want)
		}
	}
}

// TestTraps are the bytes on which tokenizers part.
func TestTraps(t *testing.T) {
	tok := tokenizer(t, byteModel(t, 7, "gpt2", 0))
	plain := func(s string) []int32 { return tok.Encode(s, false, false) }
	for text, same := range map[string]string{
		"a\x01b":           "ab",                       // a byte without token is dropped
		"\xff":             "\ufffd",                   // no UTF-8
		"a\xc3":            "a\ufffd",                  // cut off
		"\xc0\xaf":         "\ufffd\ufffd",             // overlong
		"\xf4\x90\x80\x80": "\ufffd\ufffd\ufffd\ufffd", // beyond Unicode
	} {
		if got, want := plain(text), plain(same); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v as %q", text, got, want, same)
		}
	}
	if got := plain("\xed\xa0\x80"); len(got) != 3 {
		t.Errorf("a lone surrogate: %v, want its three bytes", got)
	}
}

func TestDetok(t *testing.T) {
	tok := tokenizer(t, tinyFile(t))
	bytes := func(s string) (ids []int32) {
		for i := range len(s) {
			ids = append(ids, 3+int32(s[i]))
		}
		return ids
	}
	for _, c := range []struct{ in, want string }{
		{"héé", "héé"}, {"漢字", "漢字"}, {"😀", "😀"}, {"\xff", "\ufffd"}, {"\xc3", "\ufffd"}, {"\xc3a", "\ufffda"}, {"\xe6\xbc", "\ufffd"},
		{"\xe6\xbca", "\ufffda"}, {"\xf0\x9f\x98", "\ufffd"}, {"\xf0\x9fa", "\ufffda"}, {"\xc0\xaf", "\ufffd\ufffd"}, {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
		{"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"}, {"\xe0\x80\xaf", "\ufffd\ufffd\ufffd"}, {"\xf0\x80\x80", "\ufffd\ufffd\ufffd"}, {"\x80\x80", "\ufffd\ufffd"},
		{"\xe6\xe6\xbc\xa2", "\ufffd漢"},
	} {
		d := tok.NewDetok()
		got := ""
		for _, id := range bytes(c.in) {
			out := d.Push(id)
			if !utf8.ValidString(out) {
				t.Errorf("%q: Push gave %q", c.in, out)
			}
			got += out
		}
		got += d.Flush()
		if got != c.want || tok.Decode(bytes(c.in)) != c.want {
			t.Errorf("%q: streamed %q, decoded %q, want %q", c.in, got, tok.Decode(bytes(c.in)), c.want)
		}
	}
}

// TestDetokProperty: however a text is cut into tokens, the stream is the text
// of the whole, each piece of it whole characters, and given out as soon as it is certain.
func TestDetokProperty(t *testing.T) {
	tok := tokenizer(t, tinyFile(t))
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOf(rapid.OneOf(rapid.Int32Range(-2, 2060), rapid.Int32Range(3+0x80, 3+0xff))).Draw(t, "ids")
		d := tok.NewDetok()
		got, raw := "", ""
		for _, id := range ids {
			out := d.Push(id)
			if !utf8.ValidString(out) {
				t.Fatalf("Push gave %q", out)
			}
			got += out
			raw += string(tok.Piece(id))
			if wait := len(raw) - len(strings.TrimRightFunc(raw, func(r rune) bool { return r == utf8.RuneError })); wait == 0 && got != cleanText(raw) {
				t.Fatalf("%q is held back: %q so far", raw, got)
			}
		}
		if got += d.Flush(); got != tok.Decode(ids) || d.Flush() != "" {
			t.Fatalf("streamed %q, decoded %q", got, tok.Decode(ids))
		}
	})
}

func TestDetokAllocations(t *testing.T) {
	tok := tokenizer(t, tinyFile(t))
	d := tok.NewDetok()
	if n := testing.AllocsPerRun(100, func() { d.Push(268); d.Push(1) }); n != 0 {
		t.Errorf("%v allocations a token", n)
	}
}

// longTexts are texts on which a careless tokenizer is quadratic.
var longTexts = map[string]string{"letters": "a", "spaces": " ", "emoji": "😀", "less": "<", "pipes": "<|", "lines": "\n", "digits": "1", "marks": "é", "mixed": "a1\t\t \r\n !"}

// TestLongTexts encodes a mebibyte of each within a time that only an
// algorithm near linear can keep: a quadratic one needs hours.
func TestLongTexts(t *testing.T) {
	models := map[string]*Tokenizer{"tiny": tokenizer(t, tinyFile(t)), "bytes": tokenizer(t, byteModel(t, 7, "gpt2", 300)), "llama3": tokenizer(t, byteModel(t, 7, "llama-bpe", 300))}
	size := 1 << 20
	if testing.Short() {
		size = 1 << 16 // the race detector is slow
	}
	for name, tok := range models {
		for what, unit := range longTexts {
			text := strings.Repeat(unit, size/len(unit))
			start := time.Now()
			ids := tok.Encode(text, false, true)
			if d := time.Since(start); d > 30*time.Second {
				t.Errorf("%s: %d bytes of %s took %v", name, size, what, d)
			}
			if tok.Decode(ids) != text {
				t.Errorf("%s: %d bytes of %s do not come back", name, size, what)
			}
		}
	}
}

func TestTokenizerRefused(t *testing.T) {
	for _, c := range []struct {
		want   string
		change func(*builder)
	}{
		{`"tokenizer.ggml.model": "bert" is not supported`, func(f *builder) { f.put("tokenizer.ggml.model", "bert") }},
		{`"tokenizer.ggml.model": "" is not supported`, func(f *builder) { f.drop("tokenizer.ggml.model") }},
		{`"tokenizer.ggml.tokens": no tokens`, func(f *builder) { f.drop("tokenizer.ggml.tokens") }},
		{`"tokenizer.ggml.tokens": is string, an array`, func(f *builder) { f.put("tokenizer.ggml.tokens", "x") }},
		{`"tokenizer.ggml.tokens": is an array of int32, an array of string`, func(f *builder) { f.put("tokenizer.ggml.tokens", []int32{1}) }},
		{`"tokenizer.ggml.token_type": 0 kinds for 6 tokens`, func(f *builder) { f.drop("tokenizer.ggml.token_type") }},
		{`"tokenizer.ggml.token_type": 1 kinds for 6 tokens`, func(f *builder) { f.put("tokenizer.ggml.token_type", []int32{1}) }},
		{`token 5 has the unknown kind 7`, func(f *builder) { f.put("tokenizer.ggml.token_type", []int32{2, 3, 3, 1, 1, 7}) }},
		{`token 3 has 0 bytes`, func(f *builder) {
			f.put("tokenizer.ggml.tokens", []string{"<unk>", "<s>", "</s>", "", "b", "ab"})
			f.put("tokenizer.ggml.token_type", []int32{2, 3, 3, 4, 1, 1})
		}},
		{`token 3 has 2000 bytes`, func(f *builder) {
			f.put("tokenizer.ggml.tokens", []string{"<unk>", "<s>", "</s>", strings.Repeat("a", 2000), "b", "ab"})
		}},
		{`element 3, "\xff", is not UTF-8`, func(f *builder) { f.put("tokenizer.ggml.tokens", []string{"<unk>", "<s>", "</s>", "\xff", "b", "ab"}) }},
		{`byte token 3 is "a", <0x00> to <0xFF>`, func(f *builder) { f.put("tokenizer.ggml.token_type", []int32{2, 3, 3, 6, 1, 1}) }},
		{`"tokenizer.ggml.scores": 0 scores`, func(f *builder) { f.drop("tokenizer.ggml.scores") }},
		{`token 1 has no number for a score`, func(f *builder) {
			f.put("tokenizer.ggml.scores", []float32{0, float32(math.NaN()), 0, 0, 0, 0})
		}},
		{`"tokenizer.ggml.bos_token_id": is 6, 0 to 5`, func(f *builder) { f.put("tokenizer.ggml.bos_token_id", uint32(6)) }},
		{`"tokenizer.ggml.eot_token_id": is -1, 0 to 5`, func(f *builder) { f.put("tokenizer.ggml.eot_token_id", int32(-1)) }},
		{`"tokenizer.ggml.add_bos_token": is uint32, a bool`, func(f *builder) { f.put("tokenizer.ggml.add_bos_token", uint32(1)) }},
		{`"tokenizer.ggml.pre": "default" is not supported; gpt-2, smollm, llama-bpe and qwen2 are`, func(f *builder) {
			f.put("tokenizer.ggml.model", "gpt2")
			f.put("tokenizer.ggml.pre", "default")
		}},
		{`"tokenizer.ggml.pre": "" is not supported`, func(f *builder) { f.put("tokenizer.ggml.model", "gpt2") }},
		{`"tokenizer.ggml.merges" is missing`, func(f *builder) {
			f.put("tokenizer.ggml.model", "gpt2")
			f.put("tokenizer.ggml.pre", "gpt-2")
		}},
		{`merge 1, "ab", is not two words`, func(f *builder) {
			f.put("tokenizer.ggml.model", "gpt2")
			f.put("tokenizer.ggml.pre", "gpt-2")
			f.put("tokenizer.ggml.merges", []string{"a b", "ab"})
		}},
		{`bos or eos is to be added, but has no id`, func(f *builder) {
			f.put("tokenizer.ggml.model", "gpt2")
			f.put("tokenizer.ggml.pre", "gpt-2")
			f.put("tokenizer.ggml.merges", []string{"a b"})
			f.put("tokenizer.ggml.add_bos_token", true)
		}},
	} {
		v := &pieceVocab{tokens: []string{"<unk>", "<s>", "</s>"}, kinds: []int32{2, 3, 3}, scores: make([]float32, 3)}
		v.add("a", 1, 0)
		v.add("b", 1, 0)
		v.add("ab", 1, -1)
		b := &builder{version: 3, align: 32, keys: []bkey{
			{"general.architecture", "llama"}, {"tokenizer.ggml.model", "llama"}, {"tokenizer.ggml.tokens", v.tokens},
			{"tokenizer.ggml.token_type", v.kinds}, {"tokenizer.ggml.scores", v.scores},
		}}
		c.change(b)
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		if _, err = NewTokenizer(f); err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "m: ") {
			t.Errorf("error %v, want %s", err, c.want)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	prose, err := os.ReadFile(modeltest.Path(b, "smollm2/perplexity-text.txt"))
	if err != nil {
		b.Fatal(err)
	}
	for name, open := range map[string]func(testing.TB) *File{"tiny": tinyFile, "smollm2": smolFile} {
		b.Run(name, func(b *testing.B) {
			tok := tokenizer(b, open(b))
			texts := map[string]string{"prose": string(prose)}
			for what, unit := range longTexts {
				texts[what] = strings.Repeat(unit, (1<<20)/len(unit))
			}
			for what, text := range texts {
				b.Run(what, func(b *testing.B) {
					b.SetBytes(int64(len(text)))
					for b.Loop() {
						tok.Encode(text, true, false)
					}
				})
			}
		})
	}
}

func BenchmarkNewTokenizer(b *testing.B) {
	f := smolFile(b)
	for b.Loop() {
		if _, err := NewTokenizer(f); err != nil {
			b.Fatal(err)
		}
	}
}
