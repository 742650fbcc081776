package model

import (
	"strings"
	"unicode/utf8"
)

// replacement stands for bytes that are no text.
const replacement = string(utf8.RuneError)

// validText makes a text encodable: every byte that is not part of UTF-8
// becomes U+FFFD. Lone surrogates written as three bytes stay, as in
// llama.cpp: they encode as their bytes and decode as U+FFFD. Overlong forms
// are replaced, which llama.cpp decodes: they exist only to deceive filters.
func validText(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r != utf8.RuneError || n > 1:
			b.WriteString(s[i : i+n])
		case len(s)-i >= 3 && s[i] == 0xed && s[i+1]&0xe0 == 0xa0 && s[i+2]&0xc0 == 0x80:
			n = 3
			b.WriteString(s[i : i+n])
		default:
			b.WriteString(replacement)
		}
		i += n
	}
	return b.String()
}

// sequence looks at the start of b, which is not empty: n bytes are a whole
// character, or the longest beginning of one that went wrong, or (open) one
// that the end of b cuts off. That is the rule by which decoders agree on how
// many U+FFFD stand for bad bytes (Unicode, "substitution of maximal subparts").
func sequence(b string) (n int, whole, open bool) {
	low, high, size := byte(0x80), byte(0xbf), 0
	switch c := b[0]; {
	case c < 0x80:
		return 1, true, false
	case c < 0xc2 || c > 0xf4:
		return 1, false, false
	case c < 0xe0:
		size = 2
	case c < 0xf0:
		size = 3
	default:
		size = 4
	}
	switch b[0] {
	case 0xe0:
		low = 0xa0
	case 0xed:
		high = 0x9f
	case 0xf0:
		low = 0x90
	case 0xf4:
		high = 0x8f
	}
	for n = 1; n < size; n++ {
		if n == len(b) {
			return n, false, true
		}
		if b[n] < low || b[n] > high {
			return n, false, false
		}
		low, high = 0x80, 0xbf
	}
	return n, true, false
}

// Detok turns a stream of tokens into text. What it has given out is always
// whole characters: the bytes of one that is split over tokens wait for the
// rest. All its output together is the text of all the bytes together, with
// U+FFFD for those that are no UTF-8. The zero value is not ready: see NewDetok.
type Detok struct {
	t    *Tokenizer
	tail string // the beginning of a character, at most 3 bytes
}

// Push takes the next token and returns the text that is now certain. Control
// tokens and ids that are no tokens have no text. Nothing is allocated for a
// token of whole characters.
func (d *Detok) Push(id int32) string {
	piece := d.t.piece(id)
	if d.tail == "" && utf8.ValidString(piece) {
		return piece
	}
	out, tail := decodeText(d.tail + piece)
	d.tail = tail
	return out
}

// Flush ends the stream: a character that was begun and never finished is U+FFFD.
func (d *Detok) Flush() string {
	if d.tail == "" {
		return ""
	}
	d.tail = ""
	return replacement
}

// decodeText gives the text of b and the beginning of a character at its end.
func decodeText(b string) (text, tail string) {
	var out strings.Builder
	for i := 0; i < len(b); {
		n, whole, open := sequence(b[i:])
		switch {
		case whole:
			out.WriteString(b[i : i+n])
		case open:
			return out.String(), b[i:]
		default:
			out.WriteString(replacement)
		}
		i += n
	}
	return out.String(), ""
}

// cleanText is b as UTF-8, as decodeText gives it.
func cleanText(b string) string {
	if utf8.ValidString(b) {
		return b
	}
	text, tail := decodeText(b)
	if tail != "" {
		text += replacement
	}
	return text
}
