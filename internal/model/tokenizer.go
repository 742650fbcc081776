package model

import (
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Tokenizer turns text into token ids and back. It is immutable.
//
// Two kinds are known, by tokenizer.ggml.model: "llama", SentencePiece's BPE
// (scores, spaces as U+2581, byte fallback), and "gpt2", byte-level BPE (ranked
// merges inside words cut by tokenizer.ggml.pre). Both merge with the same
// algorithm over one table of pairs; they differ in how text becomes symbols.
type Tokenizer struct {
	texts    []string // as the file spells them
	pieces   []string // the bytes each token stands for; "" for control tokens
	control  []bool
	specials specials
	pairs    pairTable
	bytes    [256]int32 // the token of each byte; -1: none, the byte is dropped
	unknown  int32      // SentencePiece: stands for a byte without token; -1: none

	runes map[rune]int32       // SentencePiece: the symbol of a character
	ascii [utf8.RuneSelf]int32 // the same for ASCII; -1: none
	units [256]int32           // byte-level: the symbol of a byte
	split splitter             // byte-level: cuts words
	words map[string]int32     // byte-level: the tokens that a whole word is at once; nil where only merges count

	bos, eos       int32 // -1: none
	addBOS, addEOS bool
	spacePrefix    bool // SentencePiece: a space goes in front of text at the start and after a special token
	eog            []int32
	longest        int // bytes of the longest token
}

const (
	maxVocab = 1 << 20 // tokens that a file may define
	maxToken = 1 << 10 // bytes of one token's text
	dash     = "▁"     // U+2581, SentencePiece's spelling of a space
)

// The kinds of token of tokenizer.ggml.token_type.
const (
	tokenNormal  = 1
	tokenUnknown = 2
	tokenControl = 3
	tokenDefined = 4 // found as a whole in any text
	tokenUnused  = 5
	tokenByte    = 6 // <0x00> to <0xFF>
)

// NewTokenizer builds the file's tokenizer, or names what it does not know.
func NewTokenizer(f *File) (*Tokenizer, error) {
	name, _, err := f.text("tokenizer.ggml.model")
	if err != nil {
		return nil, err
	}
	if name != "llama" && name != "gpt2" {
		return nil, f.errorf("key \"tokenizer.ggml.model\": %q is not supported; llama and gpt2 are", name)
	}
	t := &Tokenizer{unknown: -1}
	kinds, err := t.readTokens(f)
	if err != nil {
		return nil, err
	}
	if name == "llama" {
		if err = t.readRoles(f, true, true, kinds); err == nil {
			err = t.buildPieces(f, kinds)
		}
	} else {
		var pre preTokenizer
		if pre, err = readPre(f); err == nil {
			err = t.readRoles(f, false, pre.addBOS, kinds)
		}
		if err == nil {
			err = t.buildMerges(f, pre, kinds)
		}
	}
	if err != nil {
		return nil, err
	}
	for id := range t.texts {
		t.longest = max(t.longest, len(t.pieces[id]))
		if t.control[id] {
			t.longest = max(t.longest, len(t.texts[id]))
		}
	}
	var list []special
	for id, k := range kinds {
		if k == tokenControl || k == tokenUnknown || k == tokenDefined {
			list = append(list, special{t.texts[id], int32(id), k != tokenDefined || looksControl(t.texts[id])})
		}
	}
	t.specials = newSpecials(list)
	return t, nil
}

// looksControl tells whether a text is spelled like a control token. Some files
// give such tokens, also those that begin a turn, the kind of tokens that any
// text may spell; a message that spells one must not get it.
func looksControl(text string) bool {
	return strings.HasPrefix(text, "<|") && strings.HasSuffix(text, "|>") || strings.HasPrefix(text, "<｜") && strings.HasSuffix(text, "｜>")
}

// readPre finds the pre-tokenizer that a byte-level vocabulary was made with.
func readPre(f *File) (preTokenizer, error) {
	name, _, err := f.text("tokenizer.ggml.pre")
	if err != nil {
		return preTokenizer{}, err
	}
	pre, ok := preTokenizers[name]
	if !ok {
		return pre, f.errorf("key \"tokenizer.ggml.pre\": %q is not supported; gpt-2, smollm, llama-bpe and qwen2 are", name)
	}
	return pre, nil
}

// readTokens reads the tokens' texts and returns their kinds.
func (t *Tokenizer) readTokens(f *File) (kinds []uint8, err error) {
	if t.texts, _, err = f.texts("tokenizer.ggml.tokens"); err != nil {
		return nil, err
	} else if len(t.texts) == 0 {
		return nil, f.errorf("key \"tokenizer.ggml.tokens\": no tokens")
	}
	v, ok, err := f.array("tokenizer.ggml.token_type", kindInt32, kindUint32)
	if err != nil {
		return nil, err
	} else if !ok || v.count != len(t.texts) {
		return nil, f.errorf("key \"tokenizer.ggml.token_type\": %d kinds for %d tokens", v.count, len(t.texts))
	}
	kinds = make([]uint8, len(t.texts))
	for id, text := range t.texts {
		k, _ := v.integerAt(id)
		if k < tokenNormal || k > tokenByte {
			return nil, f.errorf("key \"tokenizer.ggml.token_type\": token %d has the unknown kind %d", id, k)
		}
		if len(text) > maxToken || text == "" && k != tokenNormal && k != tokenUnused {
			return nil, f.errorf("key \"tokenizer.ggml.tokens\": token %d has %d bytes, 1 to %d would be right", id, len(text), maxToken)
		}
		kinds[id] = uint8(k)
	}
	return kinds, nil
}

// endTexts are tokens that end an answer by the custom of the models that have
// them, also where the file names only one of them as eos. Source: the list
// that llama.cpp keeps.
var endTexts = []string{
	"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
	"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
}

// readRoles reads which tokens begin and end things. A token with such a role
// is a control token, whatever kind the file gives it: otherwise a message
// could spell it. addBOS holds where the file does not say whether texts begin
// with BOS.
func (t *Tokenizer) readRoles(f *File, sentencePiece, addBOS bool, kinds []uint8) (err error) {
	role := func(key string, def int) int32 {
		id, ok, e := f.integer("tokenizer.ggml."+key, 0, len(kinds)-1)
		if e != nil {
			err = e
		}
		if !ok {
			id = def
		}
		if id < 0 || id >= len(kinds) {
			return -1
		}
		return int32(id)
	}
	// SentencePiece's own numbers hold where the file is silent.
	bos, eos, unk := -1, -1, -1
	if sentencePiece {
		bos, eos, unk = 1, 2, 0
	}
	t.bos, t.eos = role("bos_token_id", bos), role("eos_token_id", eos)
	ends := []int32{t.eos, role("eot_token_id", -1), role("eom_token_id", -1)}
	if unknown := role("unknown_token_id", unk); sentencePiece {
		t.unknown = unknown
	}
	if err != nil {
		return err
	}
	if t.addBOS, err = f.flag("tokenizer.ggml.add_bos_token", addBOS); err != nil {
		return err
	}
	if t.addEOS, err = f.flag("tokenizer.ggml.add_eos_token", false); err != nil {
		return err
	}
	if t.spacePrefix, err = f.flag("tokenizer.ggml.add_space_prefix", sentencePiece); err != nil {
		return err
	}
	t.spacePrefix = t.spacePrefix && sentencePiece
	if t.addBOS && t.bos < 0 || t.addEOS && t.eos < 0 {
		return f.errorf("tokenizer.ggml: bos or eos is to be added, but has no id")
	}
	for id, text := range t.texts {
		if slices.Contains(endTexts, text) {
			ends = append(ends, int32(id))
		}
	}
	t.control = make([]bool, len(kinds))
	for _, id := range append(ends, t.bos) {
		if id < 0 {
			continue
		}
		if t.texts[id] == "" {
			return f.errorf("tokenizer.ggml: token %d begins or ends texts, but has no name", id)
		}
		if kinds[id] != tokenUnknown {
			kinds[id] = tokenControl
		}
		if id != t.bos || slices.Contains(ends, id) {
			t.eog = append(t.eog, id)
		}
	}
	slices.Sort(t.eog)
	t.eog = slices.Compact(t.eog)
	for id, k := range kinds {
		t.control[id] = k == tokenControl || k == tokenUnknown
	}
	return nil
}

// buildPieces fills in what SentencePiece's BPE needs. A pair of symbols merges
// if its joined text is a token, the one with the best score first; so every
// way to cut a token into two known symbols becomes a pair.
func (t *Tokenizer) buildPieces(f *File, kinds []uint8) error {
	scores, ok, err := f.array("tokenizer.ggml.scores", kindFloat32)
	if err != nil {
		return err
	} else if !ok || scores.count != len(t.texts) {
		return f.errorf("key \"tokenizer.ggml.scores\": %d scores for %d tokens", scores.count, len(t.texts))
	}
	for b := range t.bytes {
		t.bytes[b] = -1
	}
	t.pieces = make([]string, len(t.texts))
	symbols := make(map[string]int32, len(t.texts)) // by text; ids beyond the vocabulary are characters that are no token
	rank := make([]float32, len(t.texts))
	for id, text := range t.texts {
		rank[id] = math.Float32frombits(binary.LittleEndian.Uint32(scores.raw[4*id:]))
		if math.IsNaN(float64(rank[id])) {
			return f.errorf("key \"tokenizer.ggml.scores\": token %d has no number for a score", id)
		}
		switch kinds[id] {
		case tokenByte:
			b, ok := byteToken(text)
			if !ok {
				return f.errorf("key \"tokenizer.ggml.tokens\": byte token %d is %q, <0x00> to <0xFF> would be right", id, text)
			}
			t.bytes[b], t.pieces[id] = int32(id), string([]byte{b})
		case tokenNormal, tokenDefined, tokenUnused:
			t.pieces[id] = strings.ReplaceAll(text, dash, " ")
			symbols[text] = int32(id)
		}
	}
	t.runes = map[rune]int32{}
	for _, text := range t.texts {
		for i, r := range text {
			if _, ok := t.runes[r]; ok {
				continue
			}
			s := text[i : i+utf8.RuneLen(r)]
			if _, ok := symbols[s]; !ok {
				symbols[s] = int32(len(symbols) + len(t.texts))
			}
			t.runes[r] = symbols[s]
		}
	}
	if s, ok := t.runes['▁']; ok {
		t.runes[' '] = s
	}
	for c := range t.ascii {
		t.ascii[c] = -1
		if s, ok := t.runes[rune(c)]; ok {
			t.ascii[c] = s
		}
	}
	t.pairs = newPairTable(4 * len(t.texts))
	for id, order := range denseRanks(rank) {
		text := t.texts[id]
		if symbols[text] != int32(id) || t.control[id] || kinds[id] == tokenByte {
			continue
		}
		for i := range text {
			left, ok := symbols[text[:i]]
			right, ok2 := symbols[text[i:]]
			if i > 0 && ok && ok2 {
				t.pairs.add(left, right, order, int32(id))
			}
		}
	}
	return nil
}

// denseRanks numbers scores from the highest down; equal scores get equal numbers.
func denseRanks(scores []float32) []uint32 {
	distinct := slices.Clone(scores)
	slices.Sort(distinct)
	distinct = slices.Compact(distinct)
	ranks := make([]uint32, len(scores))
	for i, s := range scores {
		at, _ := slices.BinarySearch(distinct, s)
		ranks[i] = uint32(len(distinct) - at)
	}
	return ranks
}

// byteToken reads <0x0A>.
func byteToken(text string) (byte, bool) {
	if len(text) != 6 || text[:3] != "<0x" || text[5] != '>' {
		return 0, false
	}
	hi, lo := strings.IndexByte("0123456789ABCDEF", text[3]), strings.IndexByte("0123456789ABCDEF", text[4])
	return byte(hi<<4 | lo), hi >= 0 && lo >= 0
}

// buildMerges fills in what byte-level BPE needs. Texts in the file are spelled
// in GPT-2's alphabet, one printable character per byte.
func (t *Tokenizer) buildMerges(f *File, pre preTokenizer, kinds []uint8) error {
	t.split = pre.split
	merges, ok, err := f.texts("tokenizer.ggml.merges")
	if err != nil {
		return err
	} else if !ok {
		return f.errorf("key \"tokenizer.ggml.merges\" is missing")
	}
	alphabet := byteAlphabet()
	t.pieces = make([]string, len(t.texts))
	symbols := make(map[string]int32, len(t.texts)) // by bytes; ids beyond the vocabulary are stretches that are no token
	for id, text := range t.texts {
		if t.control[id] {
			continue
		}
		piece, ok := fromAlphabet(alphabet, text)
		switch {
		case kinds[id] == tokenDefined || !ok:
			t.pieces[id] = text
		default:
			t.pieces[id] = piece
			symbols[piece] = int32(id)
		}
	}
	if pre.wholeWords {
		t.words = maps.Clone(symbols)
	}
	extra := int32(len(t.texts))
	symbol := func(s string) int32 {
		id, ok := symbols[s]
		if !ok {
			id = extra
			extra++
			symbols[s] = id
		}
		return id
	}
	t.pairs = newPairTable(len(merges))
	for i, m := range merges {
		left, right, ok := strings.Cut(m, " ")
		l, ok1 := fromAlphabet(alphabet, left)
		r, ok2 := fromAlphabet(alphabet, right)
		if !ok || !ok1 || !ok2 || l == "" || r == "" || len(l)+len(r) > maxToken {
			return f.errorf("key \"tokenizer.ggml.merges\": merge %d, %q, is not two words of the byte alphabet", i, m)
		}
		t.pairs.add(symbol(l), symbol(r), uint32(i), symbol(l+r))
	}
	for b := range t.units {
		t.units[b] = symbol(string([]byte{byte(b)}))
		t.bytes[b] = t.units[b]
		if int(t.bytes[b]) >= len(t.texts) {
			t.bytes[b] = -1
		}
	}
	return nil
}

// byteAlphabet is GPT-2's alphabet: printable Latin-1 characters stand for
// themselves, the other 68 bytes for U+0100 onwards.
func byteAlphabet() map[rune]byte {
	alphabet := map[rune]byte{}
	shifted := rune(0x100)
	for b := range 256 {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			alphabet[rune(b)] = byte(b)
			continue
		}
		alphabet[shifted] = byte(b)
		shifted++
	}
	return alphabet
}

func fromAlphabet(alphabet map[rune]byte, text string) (string, bool) {
	out := make([]byte, 0, len(text))
	for _, r := range text {
		b, ok := alphabet[r]
		if !ok {
			return "", false
		}
		out = append(out, b)
	}
	return string(out), true
}

// Encode gives the tokens of a text. With addSpecial, BOS and EOS are added
// where the file wants them. With parseSpecial, control tokens spelled in the
// text become those tokens: only for text that is trusted. Without it they are
// text like any other. Bytes that are no UTF-8 become U+FFFD; bytes for which
// the vocabulary has no token are dropped. Time is O(n log n) for any text.
func (t *Tokenizer) Encode(text string, addSpecial, parseSpecial bool) []int32 {
	text = validText(text)
	var trusted []span
	if parseSpecial {
		trusted = []span{{0, len(text)}}
	}
	var ids []int32
	if addSpecial && t.addBOS {
		ids = append(ids, t.bos)
	}
	ids = t.encode(ids, text, trusted)
	if addSpecial && t.addEOS {
		ids = append(ids, t.eos)
	}
	return ids
}

// encode appends the tokens of valid text, with control tokens only inside the
// trusted spans.
func (t *Tokenizer) encode(ids []int32, text string, trusted []span) []int32 {
	m := merger{pairs: &t.pairs}
	prefix := t.spacePrefix
	t.specials.cut(text, trusted, func(stretch string, id int32) {
		switch {
		case id >= 0:
			ids = append(ids, id)
			prefix = t.spacePrefix
		case t.split != nil:
			t.split(stretch, func(word string) { ids = t.encodeWord(&m, ids, word) })
		default:
			ids = t.encodePieces(&m, ids, stretch, prefix)
			prefix = false
		}
	})
	return ids
}

// encodeWord is byte-level BPE of one word.
func (t *Tokenizer) encodeWord(m *merger, ids []int32, word string) []int32 {
	if id, ok := t.words[word]; ok {
		return append(ids, id)
	}
	m.reset()
	for i := range len(word) {
		m.push(t.units[word[i]])
	}
	m.run()
	for i := 0; i < len(word); i = int(m.next[i]) {
		if id := m.sym[i]; int(id) < len(t.texts) {
			ids = append(ids, id)
		} else {
			ids = t.fallback(ids, word[i:m.next[i]])
		}
	}
	return ids
}

// encodePieces is SentencePiece's BPE of a stretch of text.
func (t *Tokenizer) encodePieces(m *merger, ids []int32, text string, prefix bool) []int32 {
	if prefix {
		text = " " + text
	}
	m.reset()
	for i := 0; i < len(text); {
		if c := text[i]; c < utf8.RuneSelf {
			m.push(t.ascii[c])
			i++
			continue
		}
		r, n := nextRune(text[i:])
		sym, ok := t.runes[r]
		if !ok {
			sym = -1
		}
		m.push(sym)
		i += n
	}
	m.run()
	at := 0
	for i := 0; i < len(m.sym); i = int(m.next[i]) {
		from := at
		for range int(m.next[i]) - i {
			_, n := nextRune(text[at:])
			at += n
		}
		if id := m.sym[i]; id >= 0 && int(id) < len(t.texts) {
			ids = append(ids, id)
		} else {
			ids = t.fallback(ids, text[from:at])
		}
	}
	return ids
}

// nextRune is the next character of validText's output; a lone surrogate in
// three bytes is one character, which no vocabulary has.
func nextRune(s string) (rune, int) {
	r, n := utf8.DecodeRuneInString(s)
	if r == utf8.RuneError && n == 1 && len(s) >= 3 {
		return -1, 3
	}
	return r, n
}

// fallback spells a stretch that is no token in bytes.
func (t *Tokenizer) fallback(ids []int32, s string) []int32 {
	for i := range len(s) {
		if id := t.bytes[s[i]]; id >= 0 {
			ids = append(ids, id)
		} else if t.unknown >= 0 {
			ids = append(ids, t.unknown)
		}
	}
	return ids
}

// Decode is the text of a whole sequence: Decode(Encode(s)) is s where the
// vocabulary has all its bytes. Control tokens and ids that are no tokens are
// left out. The space that SentencePiece puts in front of a text is taken off
// again; a continuation, where that space is real, goes through a Detok.
func (t *Tokenizer) Decode(ids []int32) string {
	var bytes strings.Builder
	for _, id := range ids {
		bytes.WriteString(t.piece(id))
	}
	text := cleanText(bytes.String())
	if t.spacePrefix {
		text = strings.TrimPrefix(text, " ")
	}
	return text
}

// NewDetok starts a stream of tokens.
func (t *Tokenizer) NewDetok() Detok { return Detok{t: t} }

// piece is the bytes of one token; "" for control tokens and for no token.
func (t *Tokenizer) piece(id int32) string {
	if uint(id) >= uint(len(t.pieces)) {
		return ""
	}
	return t.pieces[id]
}

// Piece is the bytes that a token stands for, perhaps part of a character; nil
// for control tokens and for ids that are no tokens.
func (t *Tokenizer) Piece(id int32) []byte {
	if s := t.piece(id); s != "" {
		return []byte(s)
	}
	return nil
}

// Text is a token as people read it in lists of log-probabilities: its text,
// with U+FFFD for bytes that are no whole character, or the name of a control
// token. ok is false for an id that is no token.
func (t *Tokenizer) Text(id int32) (text string, ok bool) {
	if uint(id) >= uint(len(t.texts)) {
		return "", false
	}
	if t.control[id] {
		return t.texts[id], true
	}
	return cleanText(t.pieces[id]), true
}

// IsControl tells whether a token is one that only the template and the model
// itself may produce.
func (t *Tokenizer) IsControl(id int32) bool {
	return uint(id) < uint(len(t.control)) && t.control[id]
}

// MaxBytes is the longest text in bytes that so many tokens can stand for. A
// text that is longer cannot fit a context of that size (unless it is made of
// bytes that the vocabulary drops), and need not be encoded to know it: Encode
// takes up to 40 bytes of memory for each byte of text.
func (t *Tokenizer) MaxBytes(tokens int) int { return tokens * t.longest }

// Vocab is the number of tokens.
func (t *Tokenizer) Vocab() int { return len(t.texts) }

// BOS is the token that begins a text, if the model has one. Encode adds it
// only where the file wants that.
func (t *Tokenizer) BOS() (id int32, ok bool) { return t.bos, t.bos >= 0 }

// EOS is the token that ends a text, if the model has one.
func (t *Tokenizer) EOS() (id int32, ok bool) { return t.eos, t.eos >= 0 }

// EOG are the tokens that end an answer, ascending. The caller must not change
// the slice.
func (t *Tokenizer) EOG() []int32 { return t.eog }
