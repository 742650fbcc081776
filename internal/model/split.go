//metronome:pure

package model

import (
	"unicode"
	"unicode/utf8"
)

// A byte-level BPE merges only inside words. Which stretches are words is
// fixed by a regular expression that came with the vocabulary. Go's regexp has
// no look-ahead, so the splitters are written out by hand.

// preTokenizer is what a name in tokenizer.ggml.pre stands for.
type preTokenizer struct {
	split splitter
	// wholeWords: a word that is a token is that token, whatever its merges
	// say (ignore_merges).
	wholeWords bool
	// addBOS: texts begin with BOS where the file says nothing about it.
	addBOS bool
}

// splitter cuts a text into words that join to it again.
type splitter func(text string, word func(string))

var (
	preGPT2    = preTokenizer{split: splitGPT2}
	preSmolLM  = preTokenizer{split: splitSmolLM}
	preLlama3  = preTokenizer{split: splitLlama3, wholeWords: true, addBOS: true}
	preLlama3M = preTokenizer{split: splitLlama3}
	preQwen2   = preTokenizer{split: splitQwen2}
)

// preTokenizers are the pre-tokenizers by the names that files give them.
// Source: the names and settings that llama.cpp knows, as far as they occur
// with the supported architectures.
var preTokenizers = map[string]preTokenizer{
	"gpt-2": preGPT2, "gpt2": preGPT2,
	"smollm":    preSmolLM,
	"llama-bpe": preLlama3, "llama3": preLlama3, "llama-v3": preLlama3, "falcon3": preLlama3,
	"smaug-bpe": preLlama3M,
	"qwen2":     preQwen2, "deepseek-r1-qwen": preQwen2, "megrez": preQwen2,
}

// splitGPT2 cuts as the pattern of GPT-2 does:
//
//	's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func splitGPT2(text string, word func(string)) {
	for len(text) > 0 {
		n := wordGPT2(text)
		word(text[:n])
		text = text[n:]
	}
}

// splitSmolLM first sets every \p{N} apart, then cuts what lies between as
// GPT-2. The pieces between are texts of their own: a look-ahead does not see
// the digit after them.
func splitSmolLM(text string, word func(string)) {
	from := 0
	for i := 0; i < len(text); {
		c, n := classAt(text[i:])
		if c == number {
			splitGPT2(text[from:i], word)
			word(text[i : i+n])
			from = i + n
		}
		i += n
	}
	splitGPT2(text[from:], word)
}

// splitLlama3 cuts as the pattern of Llama 3 does, with numbers of up to three digits:
//
//	(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//
// The contractions are those in ASCII: 'ſ is none.
func splitLlama3(text string, word func(string)) {
	for len(text) > 0 {
		n := wordLlama3(text, 3)
		word(text[:n])
		text = text[n:]
	}
}

// splitQwen2 cuts as the pattern of Qwen 2 does: that of Llama 3 with every
// \p{N} apart.
func splitQwen2(text string, word func(string)) {
	for len(text) > 0 {
		n := wordLlama3(text, 1)
		word(text[:n])
		text = text[n:]
	}
}

// class is what the patterns tell apart.
type class uint8

const (
	other class = iota
	letter
	number
	space
)

// asciiClass answers for most text without a search.
var asciiClass = func() (table [utf8.RuneSelf]class) {
	for r := range table {
		table[r] = classOf(rune(r))
	}
	return table
}()

// classOf goes by Unicode 15.1, as llama.cpp does: Go's tables are of 15.0,
// which lacks the ideographs U+2EBF0 to U+2EE5D. A test notices when they change.
func classOf(r rune) class {
	switch {
	case unicode.IsSpace(r): // White_Space, which is what \s means in these patterns
		return space
	case unicode.IsLetter(r) || r >= 0x2ebf0 && r <= 0x2ee5d:
		return letter
	case unicode.IsNumber(r):
		return number
	}
	return other
}

// classAt is the class and the length of the first character of s, which is
// not empty. A byte that is not UTF-8 is a character of class other.
func classAt(s string) (class, int) {
	if s[0] < utf8.RuneSelf {
		return asciiClass[s[0]], 1
	}
	r, n := utf8.DecodeRuneInString(s)
	return classOf(r), n
}

// stretch is the length of the characters of class c at the start of s, at
// most limit of them; limit < 0: all.
func stretch(s string, c class, limit int) int {
	i := 0
	for i < len(s) && limit != 0 {
		next, n := classAt(s[i:])
		if next != c {
			break
		}
		i += n
		limit--
	}
	return i
}

// wordGPT2 is the length of the first word of s, which is not empty.
func wordGPT2(s string) int {
	if n := contraction(s, 0); n > 0 {
		return n
	}
	from := 0
	if s[0] == ' ' && len(s) > 1 {
		from = 1 // one space goes with the word behind it
	}
	if c, _ := classAt(s[from:]); c != space {
		return from + stretch(s[from:], c, -1)
	}
	return spaces(s, stretch(s, space, -1))
}

// wordLlama3 is the length of the first word of s, which is not empty.
func wordLlama3(s string, digits int) int {
	if n := contraction(s, 'a'-'A'); n > 0 {
		return n
	}
	c, n := classAt(s)
	switch {
	case c == letter:
		return stretch(s, letter, -1)
	case c == number:
		return stretch(s, number, digits)
	case s[0] != '\r' && s[0] != '\n':
		// One character of any other kind goes with the letters behind it.
		if letters := stretch(s[n:], letter, -1); letters > 0 {
			return n + letters
		}
	}
	from := 0
	if s[0] == ' ' {
		from = 1
	}
	if n := stretch(s[from:], other, -1); n > 0 {
		n += from
		for n < len(s) && (s[n] == '\r' || s[n] == '\n') {
			n++
		}
		return n
	}
	n = stretch(s, space, -1)
	for i := n; i > 0; i-- {
		if s[i-1] == '\r' || s[i-1] == '\n' {
			return i // \s*[\r\n]+ ends with the last of them
		}
	}
	return spaces(s, n)
}

// spaces is \s+(?!\S)|\s+ where s begins with n bytes of white space: the last
// character of them is left to the word behind, unless it is the only one.
func spaces(s string, n int) int {
	if _, last := utf8.DecodeLastRuneInString(s[:n]); n < len(s) && last < n {
		return n - last
	}
	return n
}

// contraction is the length of 's, 't, 're, 've, 'm, 'll or 'd at the start of
// s; fold is 'a'-'A' to take capitals too, 0 not to.
func contraction(s string, fold byte) int {
	if s[0] != '\'' || len(s) < 2 {
		return 0
	}
	a, b := s[1]|fold, byte(0)
	if len(s) > 2 {
		b = s[2] | fold
	}
	switch {
	case a == 's' || a == 't' || a == 'm' || a == 'd':
		return 2
	case a == 'r' && b == 'e' || a == 'v' && b == 'e' || a == 'l' && b == 'l':
		return 3
	}
	return 0
}
