//metronome:pure

package api

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// JSON's grammar, for a reader that decodes nothing. Each function takes the offset of a value's
// first byte and returns the offset after its last.

// list tells whether a value is an array, what its first element begins with
// and how many elements it has.
type list struct {
	elems int
	first byte
	array bool
}

const maxDepth = 10000 // nesting; the limit of encoding/json

func syntax(b []byte, i int, where string) *Error {
	if i >= len(b) {
		return Errorf(InvalidRequest, "the body is not valid JSON: it ends too early, %s", where)
	}
	return Errorf(InvalidRequest, "the body is not valid JSON: unexpected %q at byte %d, %s", b[i], i, where)
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// stops marks the bytes of w that end a run of ordinary string bytes: a quote,
// a backslash, a control character. Only the lowest mark is exact (a borrow
// may mark a byte above it), and only that one is used. With its second bit
// turned a quote is the one byte beside the control characters that is below
// 0x21, so one comparison finds both.
func stops(w uint64) uint64 { return marks(w) & highs }

// marks has the marks of stops among other bits.
func marks(w uint64) uint64 {
	return ((w ^ ones*2 - ones*0x21) | (w ^ ones*'\\' - ones)) &^ w
}

// skipPlain skips ordinary string bytes, up to the one that ends them or to
// within eight bytes of the end: 32 at a time once eight were ordinary, which is
// what keeps a long prompt near the speed of memory.
func skipPlain(b []byte, i int) int {
	for tried := false; len(b)-i >= 8; tried = true {
		if m := stops(binary.LittleEndian.Uint64(b[i:])); m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
		i += 8
		for ; !tried && len(b)-i >= 32; i += 32 {
			c := b[i : i+32 : i+32] // one bounds check
			w0, w1 := binary.LittleEndian.Uint64(c[0:8]), binary.LittleEndian.Uint64(c[8:16])
			w2, w3 := binary.LittleEndian.Uint64(c[16:24]), binary.LittleEndian.Uint64(c[24:32])
			if (marks(w0)|marks(w1)|marks(w2)|marks(w3))&highs != 0 {
				break
			}
		}
	}
	return i
}

// skipString skips the string whose quote is at b[i].
func skipString(b []byte, i int) (int, *Error) {
	i++
	for {
		i = skipPlain(b, i)
		for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20 {
			i++
		}
		if i >= len(b) || b[i] < 0x20 {
			return 0, syntax(b, i, "in a string")
		}
		if b[i] == '"' {
			return i + 1, nil
		}
		if i++; i >= len(b) {
			return 0, syntax(b, i, "in an escape")
		}
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i++
		case 'u':
			for k := 0; k < 4; k++ {
				if i++; i >= len(b) || hexVal(b[i]) < 0 {
					return 0, syntax(b, i, `in a \u escape`)
				}
			}
			i++
		default:
			return 0, syntax(b, i, "in an escape")
		}
	}
}

func hexVal(c byte) rune {
	switch {
	case '0' <= c && c <= '9':
		return rune(c - '0')
	case 'a' <= c && c <= 'f':
		return rune(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return rune(c-'A') + 10
	}
	return -1
}

func isDigit(b []byte, i int) bool { return i < len(b) && '0' <= b[i] && b[i] <= '9' }

func skipDigits(b []byte, i int) int {
	for isDigit(b, i) {
		i++
	}
	return i
}

func skipNumber(b []byte, i int) (int, *Error) {
	if b[i] == '-' {
		i++
	}
	switch {
	case !isDigit(b, i):
		return 0, syntax(b, i, "in a number")
	case b[i] == '0':
		i++
	default:
		i = skipDigits(b, i)
	}
	if i < len(b) && b[i] == '.' {
		if i++; !isDigit(b, i) {
			return 0, syntax(b, i, "after a decimal point")
		}
		i = skipDigits(b, i)
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if !isDigit(b, i) {
			return 0, syntax(b, i, "in an exponent")
		}
		i = skipDigits(b, i)
	}
	return i, nil
}

// skipIDs skips token ids inside an array, up to the last of a row of them, and
// returns how many it has skipped: a short cut for long prompts of ids.
func skipIDs(b []byte, i int) (last, n int) {
	for isDigit(b, i) {
		j := i + 1
		if b[i] != '0' {
			j = skipDigits(b, j)
		}
		if at(b, j) == ',' && at(b, j+1) == ' ' { // as Python writes it
			j++
		} else if at(b, j) != ',' {
			break
		}
		if !isDigit(b, j+1) {
			break
		}
		i = j + 1
		n++
	}
	return i, n
}

func skipWord(b []byte, i int, word string) (int, *Error) {
	for k := 0; k < len(word); k++ {
		if i+k >= len(b) || b[i+k] != word[k] {
			return 0, syntax(b, i+k, "in "+word)
		}
	}
	return i + len(word), nil
}

// skipScalar skips a string, number or word.
func skipScalar(b []byte, i int) (int, *Error) {
	if i >= len(b) {
		return 0, syntax(b, i, "looking for a value")
	}
	switch c := b[i]; {
	case c == '"':
		return skipString(b, i)
	case c == '-' || '0' <= c && c <= '9':
		return skipNumber(b, i)
	case c == 't':
		return skipWord(b, i, "true")
	case c == 'f':
		return skipWord(b, i, "false")
	case c == 'n':
		return skipWord(b, i, "null")
	}
	return 0, syntax(b, i, "looking for a value")
}

// skipValue skips any value. outer is the depth it stands at. Nesting is kept
// in one bit a level (set: object), so that no depth takes memory.
func skipValue(b []byte, i, outer int) (int, list, *Error) {
	var l list
	if i >= len(b) || b[i] != '{' && b[i] != '[' {
		end, err := skipScalar(b, i)
		return end, l, err
	}
	n := nest{outer: outer}
	l.array = b[i] == '['
	if l.array {
		l.first = at(b, skipSpace(b, i+1))
	}
	for {
		// b[i] begins a value.
		var err *Error
		if i < len(b) && (b[i] == '{' || b[i] == '[') {
			if err = n.push(b, i); err != nil {
				return 0, l, err
			}
			object := b[i] == '{'
			if i = skipSpace(b, i+1); at(b, i) != closing(object) {
				if object {
					if i, err = skipName(b, i); err != nil {
						return 0, l, err
					}
				}
				if n.depth == 1 {
					l.elems = 1
				}
				continue
			}
		} else {
			if i < len(b) && b[i] <= '9' && !n.object() {
				var k int
				if i, k = skipIDs(b, i); n.depth == 1 {
					l.elems += k
				}
			}
			if i, err = skipScalar(b, i); err != nil {
				return 0, l, err
			}
		}
		// b[i] follows a value, or closes an empty object or array.
		for {
			i = skipSpace(b, i)
			if c := at(b, i); c == ',' {
				i = skipSpace(b, i+1)
				if n.object() {
					if i, err = skipName(b, i); err != nil {
						return 0, l, err
					}
				}
				if n.depth == 1 {
					l.elems++
				}
				break
			} else if c != closing(n.object()) {
				return 0, l, syntax(b, i, "after a value")
			}
			i++
			if n.pop() {
				return i, l, nil
			}
		}
	}
}

// at is b[i], or 0, which no JSON text holds outside of strings.
func at(b []byte, i int) byte {
	if i < len(b) {
		return b[i]
	}
	return 0
}

func closing(object bool) byte {
	if object {
		return '}'
	}
	return ']'
}

// skipName skips a field's name and colon, up to its value.
func skipName(b []byte, i int) (int, *Error) {
	if at(b, i) != '"' {
		return 0, syntax(b, i, "looking for a field's name")
	}
	i, err := skipString(b, i)
	if err != nil {
		return 0, err
	}
	if i = skipSpace(b, i); at(b, i) != ':' {
		return 0, syntax(b, i, "after a field's name")
	}
	return skipSpace(b, i+1), nil
}

// nest is a stack of one-bit entries: set for an object, clear for an array.
type nest struct {
	bits  [maxDepth/64 + 1]uint64
	depth int
	outer int
}

func (n *nest) push(b []byte, i int) *Error {
	if n.outer+n.depth >= maxDepth {
		return Errorf(InvalidRequest, "the body nests deeper than %d at byte %d", maxDepth, i)
	}
	w, bit := n.depth/64, uint64(1)<<(n.depth%64)
	n.bits[w] &^= bit
	if b[i] == '{' {
		n.bits[w] |= bit
	}
	n.depth++
	return nil
}

func (n *nest) pop() (empty bool) { n.depth--; return n.depth == 0 }

func (n *nest) object() bool {
	d := n.depth - 1
	return n.bits[d/64]>>(d%64)&1 == 1
}

// plain tells whether a string's bytes stand for themselves.
func plain(b []byte) bool {
	for _, c := range b {
		if c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// appendUnquoted appends the meaning of a valid string's inner bytes, as
// encoding/json gives it: what is not UTF-8 and lone surrogates are U+FFFD.
func appendUnquoted(dst, b []byte) []byte {
	for i := 0; i < len(b); {
		c := b[i]
		switch {
		case c == '\\' && b[i+1] == 'u':
			r := hex4(b[i+2:])
			i += 6
			if utf16.IsSurrogate(r) {
				pair := rune(utf8.RuneError)
				if i+6 <= len(b) && b[i] == '\\' && b[i+1] == 'u' {
					pair = utf16.DecodeRune(r, hex4(b[i+2:]))
				}
				if r = pair; r != utf8.RuneError {
					i += 6
				}
			}
			dst = utf8.AppendRune(dst, r)
		case c == '\\':
			dst = append(dst, unescape(b[i+1]))
			i += 2
		case c < utf8.RuneSelf:
			dst = append(dst, c)
			i++
		default:
			r, n := utf8.DecodeRune(b[i:])
			dst = utf8.AppendRune(dst, r)
			i += n
		}
	}
	return dst
}

func hex4(b []byte) rune {
	return hexVal(b[0])<<12 | hexVal(b[1])<<8 | hexVal(b[2])<<4 | hexVal(b[3])
}

func unescape(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c // a quote, a slash, a backslash
}
