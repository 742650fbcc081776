//metronome:pure

package model

import (
	"unicode"
	"unicode/utf8"
)

// A byte-level BPE merges only inside words. Which stretches are words is
// fixed by a regular expression that came with the vocabulary. Go's regexp has
// no look-ahead, so the splitters are written out by hand.

// splitter cuts a text into words that join to it again.
type splitter func(text string, word func(string))

// splitters are the pre-tokenizers, by the name in tokenizer.ggml.pre.
var splitters = map[string]splitter{
	"gpt-2":  splitGPT2,
	"gpt2":   splitGPT2,
	"smollm": splitSmolLM,
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

func classOf(r rune) class {
	switch {
	case unicode.IsSpace(r): // White_Space, which is what \s means in these patterns
		return space
	case unicode.IsLetter(r):
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

// wordGPT2 is the length of the first word of s, which is not empty.
func wordGPT2(s string) int {
	if s[0] == '\'' {
		if n := contraction(s[1:]); n > 0 {
			return 1 + n
		}
	}
	c, n := classAt(s)
	if s[0] == ' ' && len(s) > 1 {
		// One space goes with the word behind it.
		if next, m := classAt(s[1:]); next != space {
			c, n = next, 1+m
		}
	}
	last := n // where the last but the first character of the run began, for \s+(?!\S)
	for i := n; ; {
		if i == len(s) {
			return i
		}
		next, m := classAt(s[i:])
		if next != c {
			if c == space {
				return last // the only one where there is no more than one
			}
			return i
		}
		last = i
		i += m
	}
}

// contraction is the length of s, t, re, ve, m, ll or d at the start of s.
func contraction(s string) int {
	if len(s) > 0 && (s[0] == 's' || s[0] == 't' || s[0] == 'm' || s[0] == 'd') {
		return 1
	}
	if len(s) > 1 && (s[:2] == "re" || s[:2] == "ve" || s[:2] == "ll") {
		return 2
	}
	return 0
}
