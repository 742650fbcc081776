package api

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Bounds on what one request body may hold. The size of the whole body is
// bounded by whoever reads it.
const (
	maxDepth  = 10000 // nesting; the limit of encoding/json
	maxFields = 1024  // top-level fields
	maxCuts   = 16    // separate runs of pairing fields
)

// Scanned is what a router needs to know of a request body, found in one pass
// that decodes nothing. It refers to the body, which must not change while it
// is in use.
type Scanned struct {
	Stream      bool
	PromptBytes int // bytes of the values of messages, prompt, text and input_ids: an upper bound of the prompt's size

	body     []byte
	model    span // the raw values, quotes and all; empty: absent
	rid      span
	sampling span
	prompt   list
	text     list
	inputIDs list
	n        int // choices asked for, at least 1

	open  int  // just past the opening brace
	kept  bool // whether a field of the client's remains
	cuts  [maxCuts]span
	ncuts int
}

// span is a range of bytes of the body.
type span struct{ off, end int }

// list tells whether a value is an array, what its first element begins with
// and how many elements it has.
type list struct {
	elems int
	first byte
	array bool
}

// Scan validates body exactly as encoding/json does (invalid UTF-8 inside
// strings is let through, nesting is bounded at 10,000) and finds the fields a
// router cares about. Beyond that it refuses what two readers could understand
// in two ways: a top-level value that is no object, a field that comes twice
// (also when only its escapes differ), and wrong types in the fields it reads.
// It takes no memory for a body with up to 32 top-level fields.
func Scan(body []byte) (Scanned, *Error) {
	s := Scanned{body: body, n: 1}
	var prints [32]uint64
	v := visitor{s: &s, prints: prints[:0]}
	i := skipSpace(body, 0)
	if i == len(body) {
		return s, Errorf(InvalidRequest, "the body is empty; a JSON object was expected")
	}
	if body[i] != '{' {
		return s, Errorf(InvalidRequest, "the body must be a JSON object")
	}
	end, err := v.members(body, i)
	if err == nil {
		if i = skipSpace(body, end); i < len(body) {
			err = syntax(body, i, "after the top-level object")
		}
	}
	if err == nil {
		err = s.samplingChoices()
	}
	return s, err
}

// visitor walks the members of the top-level object and notes what is found.
type visitor struct {
	s      *Scanned
	prints []uint64 // hashes of the names so far
	last   int      // end of the last kept member, 0: none yet
	cut    int      // start of the run of pairing fields under way, -1: none
}

// members scans the object at b[i] and returns the offset after it.
func (v *visitor) members(b []byte, i int) (int, *Error) {
	v.s.open, v.cut = i+1, -1
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		return i + 1, nil
	}
	for {
		if i >= len(b) || b[i] != '"' {
			return 0, syntax(b, i, "looking for a field's name")
		}
		name := span{off: i}
		var err *Error
		if name.end, err = skipString(b, i); err != nil {
			return 0, err
		}
		if i = skipSpace(b, name.end); i >= len(b) || b[i] != ':' {
			return 0, syntax(b, i, "after a field's name")
		}
		val := span{off: skipSpace(b, i+1)}
		var l list
		if val.end, l, err = skipValue(b, val.off, 1); err != nil {
			return 0, err
		}
		if err = v.member(name, val, l); err != nil {
			return 0, err
		}
		if i = skipSpace(b, val.end); i < len(b) && b[i] == '}' {
			return i + 1, v.finish(val.end)
		}
		if i >= len(b) || b[i] != ',' {
			return 0, syntax(b, i, "after a field's value")
		}
		i = skipSpace(b, i+1)
	}
}

// member notes one field. A pairing field opens a cut or prolongs the one that
// is open; any other closes it at its own first byte.
func (v *visitor) member(name, val span, l list) *Error {
	b := v.s.body
	key := b[name.off+1 : name.end-1]
	var room [64]byte
	if !plain(key) {
		key = appendUnquoted(room[:0], key)
	}
	if err := v.unique(key); err != nil {
		return err
	}
	if isPairing(key) {
		if v.cut < 0 {
			v.cut = name.off
		}
		return nil
	}
	if v.cut >= 0 {
		if err := v.s.addCut(span{v.cut, name.off}); err != nil {
			return err
		}
		v.cut = -1
	}
	v.s.kept, v.last = true, val.end
	return v.s.field(key, val, l)
}

// finish closes the cut that reaches to the object's end. It takes along the
// comma after the last field that stays.
func (v *visitor) finish(end int) *Error {
	if v.cut < 0 {
		return nil
	}
	if v.s.kept {
		v.cut = v.last
	}
	return v.s.addCut(span{v.cut, end})
}

func (s *Scanned) addCut(c span) *Error {
	if s.ncuts == maxCuts {
		return Errorf(InvalidRequest, "too many pairing fields (bootstrap_host and its like, which clients do not send)")
	}
	s.cuts[s.ncuts] = c
	s.ncuts++
	return nil
}

var hashSeed = maphash.MakeSeed() // so that nobody can aim for collisions

// unique refuses a name that has come before. The names seen are compared by
// hash one after the other: with the bound on fields that is cheaper than any
// table.
func (v *visitor) unique(key []byte) *Error {
	if len(v.prints) == maxFields {
		return Errorf(InvalidRequest, "more than %d top-level fields", maxFields)
	}
	h := maphash.Bytes(hashSeed, key)
	for _, p := range v.prints {
		if p == h {
			return &Error{Code: InvalidRequest, Message: fmt.Sprintf("the field %.64q comes twice", key), Param: paramName(key)}
		}
	}
	v.prints = append(v.prints, h)
	return nil
}

// paramName is a field's name as it goes into an error.
func paramName(key []byte) string { return string(key[:min(len(key), 64)]) }

// isPairing tells the fields that pair the two legs of a request, or choose a
// rank or a peer for it. They are the router's to set: a client's own are
// removed. Names are folded as encoding/json folds them, because a worker may
// read them so.
func isPairing(key []byte) bool {
	if len(key) < len("decode_tp_size") || len(key) > len("disagg_prefill_dp_rank")+8 {
		return false
	}
	for _, f := range pairingFields {
		if bytes.EqualFold(key, f) {
			return true
		}
	}
	return false
}

var pairingFields = [][]byte{
	[]byte("bootstrap_host"), []byte("bootstrap_port"), []byte("bootstrap_room"), []byte("bootstrap_pair_key"),
	[]byte("decode_tp_size"), []byte("routed_dp_rank"), []byte("data_parallel_rank"),
	[]byte("disagg_prefill_dp_rank"), []byte("kv_transfer_params"),
}

// field takes up the fields a router reads.
func (s *Scanned) field(key []byte, val span, l list) *Error {
	raw := s.body[val.off:val.end]
	null := raw[0] == 'n'
	switch string(key) {
	case "stream":
		if !null && raw[0] != 't' && raw[0] != 'f' {
			return wrongType("stream", "a boolean")
		}
		s.Stream = raw[0] == 't'
	case "model":
		if !null {
			if raw[0] != '"' {
				return wrongType("model", "a string")
			}
			s.model = val
		}
	case "rid":
		if raw[0] == '"' {
			s.rid = val
		}
	case "messages":
		s.PromptBytes += len(raw)
	case "prompt":
		s.prompt = l
		s.PromptBytes += len(raw)
	case "text":
		s.text = l
		s.PromptBytes += len(raw)
	case "input_ids":
		s.inputIDs = l
		s.PromptBytes += len(raw)
	case "sampling_params":
		s.sampling = val
	case "n":
		return s.choices("n", raw)
	}
	return nil
}

// choices takes up a number of choices. Nonsense below one is the worker's to
// refuse; here it only has to be a number that a room can be drawn for.
func (s *Scanned) choices(field string, raw []byte) *Error {
	if raw[0] == 'n' {
		return nil
	}
	n, err := strconv.Atoi(string(raw[:min(len(raw), 21)]))
	if err != nil {
		return wrongType(field, "an integer")
	}
	if n > MaxItems {
		return &Error{Code: InvalidRequest, Message: fmt.Sprintf("%s is %d; at most %d choices can be asked for", field, n, MaxItems), Param: field}
	}
	s.n = max(n, 1)
	return nil
}

// samplingChoices looks for n inside sampling_params, which is an object or,
// for a batch, a list of objects that must agree: the first one counts.
func (s *Scanned) samplingChoices() *Error {
	b, i := s.body, s.sampling.off
	if s.sampling.end == 0 {
		return nil
	}
	if b[i] == '[' {
		i = skipSpace(b, i+1)
	}
	if b[i] != '{' {
		return nil
	}
	// From here on the text is known to be valid.
	for i = skipSpace(b, i+1); b[i] == '"'; i = skipSpace(b, i) {
		end, _ := skipString(b, i)
		key := b[i+1 : end-1]
		val := skipSpace(b, skipSpace(b, end)+1)
		vend, _, _ := skipValue(b, val, 1)
		if string(key) == "n" {
			return s.choices("sampling_params.n", b[val:vend])
		}
		if i = skipSpace(b, vend); b[i] == ',' {
			i++
		}
	}
	return nil
}

// Model is the model asked for, "" when none is named.
func (s *Scanned) Model() string { return s.str(s.model) }

// RID is the request's own id (SGLang's rid), "" when it has none or a list.
func (s *Scanned) RID() string { return s.str(s.rid) }

func (s *Scanned) str(v span) string {
	if v.end == 0 {
		return ""
	}
	return string(appendUnquoted(nil, s.body[v.off+1:v.end-1]))
}

// Items is the number of rooms the request needs of this kind, one for each
// choice of each prompt, and whether the pairing fields are lists. At least 1;
// more than MaxItems is an error.
func (s *Scanned) Items(k Kind) (items int, batch bool, err *Error) {
	prompts, batch := 1, false
	take := func(l list, isBatch bool) {
		if isBatch && l.elems > 0 {
			prompts, batch = l.elems, true
		}
	}
	n := s.n
	switch k {
	case Completion:
		take(s.prompt, s.prompt.array && (s.prompt.first == '"' || s.prompt.first == '['))
	case Generate:
		take(s.text, s.text.array)
		take(s.inputIDs, s.inputIDs.array && s.inputIDs.first == '[')
	}
	if prompts > MaxItems/n {
		return 0, false, Errorf(InvalidRequest, "%d prompts with %d choices each are more than %d", prompts, n, MaxItems)
	}
	return prompts * n, batch || n > 1, nil
}

// Injection is what a router puts into both legs of one attempt.
type Injection struct {
	Host  string  // of the prefill's bootstrap registry; IPv6 in brackets
	Port  int     // 0: null, the worker then uses its own setting
	Rooms []int64 // one for each item, fresh for each attempt
	Batch bool    // lists rather than scalars
}

// Splice appends the body of one attempt to dst as a list of segments: the
// client's bytes, referred to and not copied, without its own pairing fields
// and with p's in front. The inserted text is appended to buf. It returns the
// longer lists and the length of the new body.
func (s *Scanned) Splice(dst [][]byte, buf []byte, p Injection) (segs [][]byte, text []byte, n int) {
	mark := len(buf)
	buf = appendPairing(buf, p)
	if s.kept {
		buf = append(buf, ',')
	}
	add := func(seg []byte) {
		if len(seg) > 0 {
			dst = append(dst, seg)
			n += len(seg)
		}
	}
	add(s.body[:s.open])
	add(buf[mark:])
	at := s.open
	for _, c := range s.cuts[:s.ncuts] {
		add(s.body[at:c.off])
		at = c.end
	}
	add(s.body[at:])
	return dst, buf, n
}

func appendPairing(b []byte, p Injection) []byte {
	host := func(b []byte) []byte { return appendString(b, p.Host) }
	port := func(b []byte) []byte {
		if p.Port == 0 {
			return append(b, "null"...)
		}
		return strconv.AppendInt(b, int64(p.Port), 10)
	}
	if !p.Batch {
		b = host(append(b, `"bootstrap_host":`...))
		b = port(append(b, `,"bootstrap_port":`...))
		b = append(b, `,"bootstrap_room":`...)
		return strconv.AppendInt(b, p.Rooms[0], 10)
	}
	repeat := func(b []byte, one func([]byte) []byte) []byte {
		for i := range p.Rooms {
			if i > 0 {
				b = append(b, ',')
			}
			b = one(b)
		}
		return append(b, ']')
	}
	b = repeat(append(b, `"bootstrap_host":[`...), host)
	b = repeat(append(b, `,"bootstrap_port":[`...), port)
	i := -1
	return repeat(append(b, `,"bootstrap_room":[`...), func(b []byte) []byte {
		i++
		return strconv.AppendInt(b, p.Rooms[i], 10)
	})
}

// What follows is the grammar. Each function takes the offset of a value's
// first byte and returns the offset after its last.

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
// may mark a byte above it), and only that one is used.
func stops(w uint64) uint64 {
	q := w ^ ones*'"'
	e := w ^ ones*'\\'
	return ((q-ones)&^q | (e-ones)&^e | (w-ones*0x20)&^w) & highs
}

// skipString skips the string whose quote is at b[i]: eight bytes at a time,
// which is what keeps a long prompt near the speed of memory.
func skipString(b []byte, i int) (int, *Error) {
	i++
	for {
		for i+8 <= len(b) {
			m := stops(binary.LittleEndian.Uint64(b[i:]))
			if m != 0 {
				i += bits.TrailingZeros64(m) / 8
				break
			}
			i += 8
		}
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
		} else if i, err = skipScalar(b, i); err != nil {
			return 0, l, err
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
