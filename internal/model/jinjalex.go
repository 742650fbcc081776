//metronome:pure

package model

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The chat template language is the part of Jinja2 that chat templates use,
// with the white-space rules that transformers sets (trim_blocks and
// lstrip_blocks on, one line feed at the end of the source dropped).

// mark is the kind of a lexeme.
type mark uint8

const (
	markText  mark = iota // text outside of tags, white space already trimmed
	markPrint             // {{
	markTag               // {%
	markEnd               // }} or %}
	markName
	markString // text is what the literal means
	markInt
	markOp
	markEOF
)

// lexeme is one token of a template.
type lexeme struct {
	mark mark
	text string
	line int
}

// String names the lexeme in errors.
func (l lexeme) String() string {
	switch l.mark {
	case markText:
		return "text"
	case markString:
		return fmt.Sprintf("%.60q", l.text)
	case markEOF:
		return "the end of the template"
	}
	return "'" + l.text + "'"
}

// flaw is an error in a template, found when it is loaded or when it runs. It
// is thrown as a panic inside parser and evaluator and caught at their doors,
// because nearly every line of both can find one.
type flaw struct {
	line int
	text string
}

func (f *flaw) Error() string { return fmt.Sprintf("chat template: line %d: %s", f.line, f.text) }

// catch turns a thrown flaw into an error. Use: defer catch(&err).
func catch(err *error) {
	switch p := recover().(type) {
	case nil:
	case *flaw:
		*err = p
	default:
		panic(p)
	}
}

// lexer cuts a template into lexemes.
type lexer struct {
	src  string
	at   int
	line int
	out  []lexeme
}

func lexTemplate(src string) []lexeme {
	src = strings.ReplaceAll(src, "\r\n", "\n")
	src = strings.ReplaceAll(src, "\r", "\n")
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1}
	for l.at < len(l.src) {
		l.text()
	}
	l.emit(markEOF, "")
	return l.out
}

func (l *lexer) fail(format string, args ...any) {
	panic(&flaw{l.line, fmt.Sprintf(format, args...)})
}

func (l *lexer) emit(m mark, text string) { l.out = append(l.out, lexeme{m, text, l.line}) }

// skip moves on by n bytes and counts lines.
func (l *lexer) skip(n int) {
	l.line += strings.Count(l.src[l.at:l.at+n], "\n")
	l.at += n
}

// skipSpace skips white space.
func (l *lexer) skipSpace() {
	l.skip(len(l.src[l.at:]) - len(strings.TrimLeftFunc(l.src[l.at:], isSpace)))
}

// text reads text up to the next tag, and that tag.
func (l *lexer) text() {
	rest := l.src[l.at:]
	lineStart := l.at == 0 || l.src[l.at-1] == '\n'
	n := tagStart(rest)
	text := rest[:n]
	if n == len(rest) {
		l.emitText(text)
		l.skip(n)
		return
	}
	kind := rest[n+1]
	sign := byte(0)
	if n+2 < len(rest) && (rest[n+2] == '-' || rest[n+2] == '+') {
		sign = rest[n+2]
	}
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, isSpace)
	case sign != '+' && kind != '{':
		// lstrip_blocks: a tag that only white space precedes on its line takes it away.
		from := strings.LastIndexByte(text, '\n') + 1
		if (from > 0 || lineStart) && strings.TrimLeftFunc(text[from:], isSpace) == "" {
			text = text[:from]
		}
	}
	l.emitText(text)
	l.skip(n + 2)
	if sign != 0 {
		l.skip(1)
	}
	switch kind {
	case '#':
		l.comment()
	case '{':
		l.emit(markPrint, "{{")
		l.tag("}}")
	default:
		l.emit(markTag, "{%")
		l.tag("%}")
	}
}

func (l *lexer) emitText(text string) {
	if text != "" {
		l.emit(markText, text)
	}
}

// tagStart is where the first {{, {% or {# of s is; len(s) without one.
func tagStart(s string) int {
	for i := 0; i+1 < len(s); i++ {
		if s[i] == '{' && (s[i+1] == '{' || s[i+1] == '%' || s[i+1] == '#') {
			return i
		}
	}
	return len(s)
}

// comment skips to the end of a comment.
func (l *lexer) comment() {
	n := strings.Index(l.src[l.at:], "#}")
	if n < 0 {
		l.fail("a comment is not closed with #}")
	}
	sign := byte(0)
	if n > 0 {
		sign = l.src[l.at+n-1]
	}
	l.skip(n + 2)
	l.afterEnd(sign, true)
}

// afterEnd skips what the end of a tag takes with it: all white space after a
// minus, one line feed after a tag that prints nothing (trim_blocks).
func (l *lexer) afterEnd(sign byte, trim bool) {
	switch {
	case sign == '-':
		l.skipSpace()
	case sign != '+' && trim && strings.HasPrefix(l.src[l.at:], "\n"):
		l.skip(1)
	}
}

// operators, longer ones first.
var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".", ":", "|", ","}

// tag reads the inside of a tag and its end.
func (l *lexer) tag(end string) {
	depth := 0 // of brackets: inside them, }} is no end
	for {
		l.skipSpace()
		rest := l.src[l.at:]
		if rest == "" {
			l.fail("a tag is not closed with %s", end)
		}
		if depth == 0 && l.end(rest, end) {
			return
		}
		switch c := rest[0]; {
		case c == '_' || c < utf8.RuneSelf && unicode.IsLetter(rune(c)):
			n := strings.IndexFunc(rest, func(r rune) bool { return !isWord(r) })
			if n < 0 {
				n = len(rest)
			}
			l.emit(markName, rest[:n])
			l.skip(n)
		case c >= '0' && c <= '9':
			l.number(rest)
		case c == '\'' || c == '"':
			l.literal(rest)
		default:
			depth += l.operator(rest)
		}
	}
}

// end reads the end of a tag, if it is here.
func (l *lexer) end(rest, end string) bool {
	sign := byte(0)
	if rest[0] == '-' || rest[0] == '+' && end == "%}" {
		sign = rest[0]
		rest = rest[1:]
	}
	if !strings.HasPrefix(rest, end) {
		return false
	}
	l.emit(markEnd, end)
	l.skip(2)
	if sign != 0 {
		l.skip(1)
	}
	l.afterEnd(sign, end == "%}")
	return true
}

// isWord tells the characters of names. Jinja allows more letters than ASCII's;
// such names are refused as unexpected characters.
func isWord(r rune) bool {
	return r == '_' || r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r))
}

func (l *lexer) number(rest string) {
	n := 0
	for n < len(rest) && isWord(rune(rest[n])) {
		n++
	}
	if n+1 < len(rest) && rest[n] == '.' && rest[n+1] >= '0' && rest[n+1] <= '9' {
		l.fail("floating-point numbers are not supported")
	}
	if _, err := strconv.ParseInt(rest[:n], 10, 64); err != nil || n > 1 && rest[0] == '0' {
		l.fail("the number %q is not supported; decimal integers are", rest[:n])
	}
	l.emit(markInt, rest[:n])
	l.skip(n)
}

// operator reads an operator and returns by how much it opens brackets.
func (l *lexer) operator(rest string) int {
	for _, op := range operators {
		if !strings.HasPrefix(rest, op) {
			continue
		}
		l.emit(markOp, op)
		l.skip(len(op))
		switch op {
		case "(", "[", "{":
			return 1
		case ")", "]", "}":
			return -1
		}
		return 0
	}
	r, _ := utf8.DecodeRuneInString(rest)
	l.fail("unexpected character %q in a tag", r)
	return 0
}

// literal reads a string with Python's escapes.
func (l *lexer) literal(rest string) {
	var b strings.Builder
	for i := 1; i < len(rest); {
		switch c := rest[i]; {
		case c == rest[0]:
			l.emit(markString, b.String())
			l.skip(i + 1)
			return
		case c == '\\' && i+1 < len(rest):
			i += 1 + l.escape(&b, rest[i+1:])
		default:
			b.WriteByte(c)
			i++
		}
	}
	l.fail("a string is not closed with %c", rest[0])
}

// simpleEscapes are the escapes of one letter, with what they mean.
const simpleEscapes = "n\nt\tr\ra\ab\bf\fv\v\\\\''\"\""

// escape writes what the escape at the start of s, after its backslash, means
// and returns its length.
func (l *lexer) escape(b *strings.Builder, s string) int {
	digits := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[0]]
	switch c := s[0]; {
	case digits > 0:
		if len(s) <= digits {
			l.fail("the escape %q is cut off", "\\"+s)
		}
		r, err := strconv.ParseUint(s[1:1+digits], 16, 32)
		if err != nil || !utf8.ValidRune(rune(r)) || r > unicode.MaxRune {
			l.fail("the escape %q is no character", "\\"+s[:1+digits])
		}
		b.WriteRune(rune(r))
		return 1 + digits
	case c >= '0' && c <= '7':
		n, r := 0, rune(0)
		for n < 3 && n < len(s) && s[n] >= '0' && s[n] <= '7' {
			r = r*8 + rune(s[n]-'0')
			n++
		}
		b.WriteRune(r)
		return n
	case c == '\n':
		return 1
	case c == 'N' || c >= utf8.RuneSelf:
		r, _ := utf8.DecodeRuneInString(s)
		l.fail("the escape %q is not supported", "\\"+string(r))
	}
	for i := 0; i < len(simpleEscapes); i += 2 {
		if simpleEscapes[i] == s[0] {
			b.WriteByte(simpleEscapes[i+1])
			return 1
		}
	}
	b.WriteByte('\\') // Python keeps a backslash that escapes nothing
	return 0
}

// isSpace is Python's str.isspace: Unicode white space and the four separators
// of ASCII.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }
