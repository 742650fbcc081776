package modeltest

import "fmt"

// vocabulary is a tokenizer of a few hundred tokens, for text in English, and
// for anything else by its bytes.
type vocabulary struct {
	texts  []string
	kinds  []int32
	scores []float32 // SentencePiece
	merges []string  // byte-level
	bos    int
	eos    int
}

// words are built up letter by letter, so that every merge has its parts.
var words = []string{
	"the", "and", "of", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "be", "by", "are", "or", "an",
	"not", "this", "we", "all", "can", "one", "two",
}

// piecesVocabulary is SentencePiece's: control tokens, bytes, pieces with scores.
func piecesVocabulary() *vocabulary {
	v := &vocabulary{bos: 1, eos: 2}
	add := func(text string, kind int32, score float32) {
		v.texts, v.kinds, v.scores = append(v.texts, text), append(v.kinds, kind), append(v.scores, score)
	}
	add("<unk>", 2, 0)
	add("<s>", 3, 0)
	add("</s>", 3, 0)
	for b := range 256 {
		add(fmt.Sprintf("<0x%02X>", b), 6, 0)
	}
	seen := map[string]bool{}
	piece := func(text string) {
		if !seen[text] {
			seen[text] = true
			add(text, 1, -float32(len(seen)))
		}
	}
	for _, w := range words {
		w = "▁" + w
		for end := len("▁") + 1; end <= len(w); end++ {
			piece(w[:end])
		}
	}
	piece("▁")
	for c := 'a'; c <= 'z'; c++ {
		piece(string(c))
	}
	return v
}

// bytesVocabulary is byte-level: the units of all bytes, merges, control tokens.
func bytesVocabulary() *vocabulary {
	v := &vocabulary{}
	add := func(text string, kind int32) { v.texts, v.kinds = append(v.texts, text), append(v.kinds, kind) }
	other := rune(256)
	for b := range rune(256) {
		// GPT-2's table: printable Latin-1 stands for itself, the rest from U+0100 up.
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			add(string(b), 1)
		} else {
			add(string(other), 1)
			other++
		}
	}
	seen := map[string]bool{}
	for _, w := range words {
		w = "Ġ" + w
		for end := len("Ġ"); end < len(w); end++ {
			if text := w[:end+1]; !seen[text] {
				seen[text] = true
				add(text, 1)
				v.merges = append(v.merges, w[:end]+" "+w[end:end+1])
			}
		}
	}
	v.bos, v.eos = len(v.texts), len(v.texts)+1
	for _, text := range []string{"<|endoftext|>", "<|im_end|>", "<|im_start|>"} {
		add(text, 3)
	}
	return v
}

func (v *vocabulary) put(f *file, pre string) {
	key := func(name string, x any) { f.put("tokenizer.ggml."+name, x) }
	if v.scores != nil {
		key("model", "llama")
		key("scores", v.scores)
	} else {
		key("model", "gpt2")
		key("pre", pre)
		key("merges", v.merges)
	}
	key("tokens", v.texts)
	key("token_type", v.kinds)
	key("bos_token_id", v.bos)
	key("eos_token_id", v.eos)
	key("add_bos_token", v.scores != nil)
}
