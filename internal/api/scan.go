package api

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"slices"
	"strconv"
)

// Bounds on what one request body may hold. The size of the whole body is
// bounded by whoever reads it.
const (
	maxFields = 1024 // top-level fields
	maxCuts   = 16   // separate runs of pairing fields
)

// Scanned is what a router needs to know of a request body, found in one pass
// that decodes nothing. It refers to the body, which must not change while it
// is in use.
type Scanned struct {
	Stream      bool
	PromptBytes int // bytes of the values of messages, prompt, text and input_ids: an upper bound of the prompt's size
	MaxTokens   int // of one choice, as the request says; 0: it does not, or not in a number that makes sense

	body     []byte
	model    span // the raw values, quotes and all; empty: absent
	rid      span
	user     span
	sampling span
	said     span // the longest of the prompt's fields
	prompt   list
	text     list
	inputIDs list
	n        int // choices asked for, at least 1

	echo, logprobs, returnLogprob bool
	noOutput                      bool // max_tokens is 0

	open  int  // just past the opening brace
	kept  bool // whether a field of the client's remains
	cuts  [maxCuts]span
	ncuts int
}

// span is a range of bytes of the body.
type span struct{ off, end int }

// Scan validates body exactly as encoding/json does (invalid UTF-8 inside
// strings is let through, nesting is bounded at 10,000) and finds the fields a
// router cares about. Beyond that it refuses what two readers could understand
// in two ways: a top-level value that is no object, a field that comes twice
// (also when only its escapes differ), and wrong types in the fields it reads.
// It takes no memory for a body with up to 32 top-level fields.
func Scan(body []byte) (Scanned, *Error) {
	v := visitor{Scanned: Scanned{body: body, n: 1}}
	i := skipSpace(body, 0)
	if i == len(body) {
		return Scanned{}, Errorf(InvalidRequest, "the body is empty; a JSON object was expected")
	}
	if body[i] != '{' {
		return Scanned{}, Errorf(InvalidRequest, "the body must be a JSON object")
	}
	end, err := v.members(body, i)
	if err == nil {
		if i = skipSpace(body, end); i < len(body) {
			err = syntax(body, i, "after the top-level object")
		}
	}
	if err == nil {
		err = v.samplingChoices()
	}
	return v.Scanned, err
}

// visitor walks the members of the top-level object and notes what is found.
type visitor struct {
	Scanned
	few  [32]uint64 // hashes of the names so far: the first ones,
	many []uint64   // and the others
	nfew int        // used of few
	last int        // end of the last kept member, 0: none yet
	cut  int        // start of the run of pairing fields under way, -1: none
}

// members scans the object at b[i] and returns the offset after it.
func (v *visitor) members(b []byte, i int) (int, *Error) {
	v.open, v.cut = i+1, -1
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
	b := v.body
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
		if err := v.addCut(span{v.cut, name.off}); err != nil {
			return err
		}
		v.cut = -1
	}
	v.kept, v.last = true, val.end
	return v.Scanned.field(key, val, l)
}

// finish closes the cut that reaches to the object's end. It takes along the
// comma after the last field that stays.
func (v *visitor) finish(end int) *Error {
	if v.cut < 0 {
		return nil
	}
	if v.kept {
		v.cut = v.last
	}
	return v.addCut(span{v.cut, end})
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
	h := maphash.Bytes(hashSeed, key)
	if slices.Contains(v.few[:v.nfew], h) || slices.Contains(v.many, h) {
		return twice(string(key))
	}
	switch {
	case v.nfew < len(v.few):
		v.few[v.nfew] = h
		v.nfew++
	case v.nfew+len(v.many) < maxFields:
		v.many = append(v.many, h)
	default:
		return Errorf(InvalidRequest, "more than %d top-level fields", maxFields)
	}
	return nil
}

// isPairing tells the fields that pair the two legs of a request, choose a
// rank or a peer for it, or hand over what was said of its answer. They are the router's to set: a client's own are
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
	[]byte("disagg_prefill_dp_rank"), []byte("kv_transfer_params"), []byte(JournalField),
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
	case "user":
		if raw[0] == '"' {
			s.user = val
		}
	case "messages":
		s.says(val)
	case "prompt":
		s.prompt = l
		s.says(val)
	case "text":
		s.text = l
		s.says(val)
	case "input_ids":
		s.inputIDs = l
		s.says(val)
	case "sampling_params":
		s.sampling = val
	case "echo":
		s.echo = raw[0] == 't'
	case "logprobs":
		s.logprobs = !null && raw[0] != 'f'
	case "return_logprob":
		s.returnLogprob = raw[0] == 't' || raw[0] == '['
	case "n":
		return s.choices("n", raw)
	case "max_tokens", "max_completion_tokens":
		s.maxTokens(raw)
	}
	return nil
}

// says takes up a field that holds the prompt, or could.
func (s *Scanned) says(val span) {
	n := val.end - val.off
	s.PromptBytes += n
	if n > s.said.end-s.said.off {
		s.said = val
	}
}

// maxTokens notes how long an answer may become; what it says about it is the
// worker's to judge.
func (s *Scanned) maxTokens(raw []byte) {
	s.noOutput = string(raw) == "0"
	if n, err := strconv.ParseInt(string(raw[:min(len(raw), 20)]), 10, 32); err == nil && n > 0 {
		s.MaxTokens = int(n)
	}
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

// samplingChoices looks for n and max_new_tokens inside sampling_params, which is an object or,
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
		switch string(key) {
		case "n":
			if err := s.choices("sampling_params.n", b[val:vend]); err != nil {
				return err
			}
		case "max_new_tokens":
			s.maxTokens(b[val:vend])
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

// User is who the request is for (OpenAI's user), "" when it does not say.
func (s *Scanned) User() string { return s.str(s.user) }

// Prompt is the prompt as the body has it, escapes and brackets and all: two
// bodies in which it begins with the same bytes ask for answers to prompts that
// begin alike. Of several fields that could hold it, it is the longest.
func (s *Scanned) Prompt() []byte { return s.body[s.said.off:s.said.end] }

func (s *Scanned) str(v span) string {
	if v.end == 0 {
		return ""
	}
	return string(appendUnquoted(nil, s.body[v.off+1:v.end-1]))
}

// PromptScores tells whether the prefill's answer may hold log-probabilities of
// the prompt that belong into decode's, and how many drawn tokens follow them
// in the prefill's lists.
func (s *Scanned) PromptScores(k Kind) (wanted bool, drawn int) {
	drawn = 1
	if s.noOutput {
		drawn = 0
	}
	return k == Generate && s.returnLogprob || k == Completion && s.echo && s.logprobs, drawn
}

// Items is the number of rooms the request needs of this kind, one for each
// choice of each prompt, and whether the pairing fields are lists. At least 1;
// more than MaxItems is an error.
func (s *Scanned) Items(k Kind) (items int, batch bool, err *Error) {
	prompts, batch, field := 1, false, ""
	take := func(name string, l list, isBatch bool) {
		if isBatch && l.elems > 0 {
			prompts, batch, field = l.elems, true, name
		}
	}
	n := s.n
	switch k {
	case Completion:
		take("prompt", s.prompt, s.prompt.array && (s.prompt.first == '"' || s.prompt.first == '['))
	case Generate:
		take("text", s.text, s.text.array)
		take("input_ids", s.inputIDs, s.inputIDs.array && s.inputIDs.first == '[')
	}
	if prompts > MaxItems {
		return 0, false, wrongType(field, "a list of at most "+strconv.Itoa(MaxItems)+" prompts")
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

	Journal []byte // of the stream that the attempt goes on with, as JournalCutter gave it; nil: none
}

// Splice appends the body of one attempt to dst as a list of segments: the
// client's bytes, referred to and not copied, without its own pairing fields
// and with p's in front. The inserted text is appended to buf. It returns the
// longer lists and the length of the new body.
func (s *Scanned) Splice(dst [][]byte, buf []byte, p Injection) (segs [][]byte, text []byte, n int) {
	mark := len(buf)
	buf = appendPairing(buf, p)
	if p.Journal != nil {
		buf = append(buf, `,"`+JournalField+`":"`...)
	}
	cut := len(buf) // the journal comes here, and is not copied
	if p.Journal != nil {
		buf = append(buf, '"')
	}
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
	add(buf[mark:cut])
	add(p.Journal)
	add(buf[cut:])
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
