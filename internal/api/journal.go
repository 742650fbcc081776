//metronome:pure

package api

import (
	"bytes"
	"math"
	"strconv"
)

// JournalHeader is how a router asks a worker for the journal of a stream
// (any value). A worker that keeps one answers with the number of bytes of
// journal that it took up, "0" for a new stream. Clients' own are removed.
const JournalHeader = "X-Metronome-Journal"

// TimelineHeader is how a router asks a worker for what it knows of a request
// at its end, and where the worker says it: in the head of a whole answer or an
// error, after a stream as a trailer. A JSON object of at most MaxTimeline bytes.
const TimelineHeader = "X-Metronome-Timeline"

// MaxTimeline bounds the value of TimelineHeader that is looked at.
const MaxTimeline = 4 << 10

// JournalField is the field of a request's body by which a router hands a
// journal to the worker that is to go on with the stream.
const JournalField = "metronome_journal"

// Journal is what a stream has said so far, as far as another worker must know
// it to go on without a seam: after it come exactly the events that the first
// worker would have sent.
//
// As text it is a list of records, each ended by a semicolon, in the order of
// the events:
//
//	c UNIX                    the stream's time of creation; the first record
//	b ITEM SEED CACHED MAX    item's answer begins: its seed, the prompt tokens that were cached, its tokens at most
//	t ITEM ID [LP [ID LP]…]   one token, with its log-probability and the best ones if they were asked for
//	e ITEM                    item's last event
//	u                         the usage event
//
// Numbers are decimal, log-probabilities the bits of a float32 in hex. In a
// stream the records of an event stand in a comment line before it. A router
// keeps the text and looks at no record.
type Journal struct {
	Created int64
	Items   []ItemJournal // one for each answer
	Usage   bool          // the usage event has been sent
	Size    int           // bytes of text
}

// ItemJournal is one answer of a stream.
type ItemJournal struct {
	Begun  bool
	Seed   uint64
	Cached int
	Max    int
	Tokens []JournalToken
	Ended  bool // its last event has been sent
}

// MaxTopLogprobs is how many of the most probable tokens can be asked for
// beside each one.
const MaxTopLogprobs = 20

// JournalToken is one output token.
type JournalToken struct {
	TokenLogprob
	Top []TokenLogprob
}

// TokenLogprob is a token with its log-probability, 0 where none was asked for.
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// journalMark begins the comment lines of a stream that hold its journal.
const journalMark = ":j "

// JournalLine appends the comment line of these records.
func JournalLine(b, records []byte) []byte {
	b = append(b, journalMark...)
	b = append(b, records...)
	return append(b, '\n')
}

// AppendCreated appends the record of a stream's time of creation.
func AppendCreated(b []byte, unix int64) []byte {
	return append(strconv.AppendInt(append(b, "c "...), unix, 10), ';')
}

// AppendBegun appends the record of an answer's beginning.
func AppendBegun(b []byte, item int, seed uint64, cached, most int) []byte {
	b = strconv.AppendInt(append(b, "b "...), int64(item), 10)
	b = strconv.AppendUint(append(b, ' '), seed, 10)
	b = strconv.AppendInt(append(b, ' '), int64(cached), 10)
	return append(strconv.AppendInt(append(b, ' '), int64(most), 10), ';')
}

// AppendToken appends the record of one token, with log-probabilities if the
// request asks for them.
func AppendToken(b []byte, item int, t *JournalToken, logprobs bool) []byte {
	b = strconv.AppendInt(append(b, "t "...), int64(item), 10)
	b = strconv.AppendInt(append(b, ' '), int64(t.ID), 10)
	if logprobs {
		b = strconv.AppendUint(append(b, ' '), uint64(math.Float32bits(t.Logprob)), 16)
		for _, o := range t.Top {
			b = strconv.AppendInt(append(b, ' '), int64(o.ID), 10)
			b = strconv.AppendUint(append(b, ' '), uint64(math.Float32bits(o.Logprob)), 16)
		}
	}
	return append(b, ';')
}

// AppendEnded appends the record of an answer's last event.
func AppendEnded(b []byte, item int) []byte {
	return append(strconv.AppendInt(append(b, "e "...), int64(item), 10), ';')
}

// AppendUsage appends the record of the usage event.
func AppendUsage(b []byte) []byte { return append(b, "u;"...) }

// ParseJournal reads the journal of a stream of so many answers. It checks the
// grammar and the order of the records; whether the tokens are the model's is
// the worker's to check.
func ParseJournal(text string, items int) (*Journal, *Error) {
	j := &Journal{Items: make([]ItemJournal, items), Size: len(text)}
	p := journalParser{rest: text}
	for n := 0; p.rest != ""; n++ {
		if !j.record(&p, n == 0) || p.bad || !p.take(";") {
			return nil, &Error{Code: InvalidRequest, Param: JournalField,
				Message: "`" + JournalField + "` is no journal of a stream (record " + strconv.Itoa(n+1) + "); only a router sends it"}
		}
	}
	return j, nil
}

// record takes one record and tells whether it may stand here.
func (j *Journal) record(p *journalParser, first bool) bool {
	switch {
	case first:
		j.Created = int64(p.take1("c ", math.MaxInt64))
		return true
	case p.take("u"):
		done := !j.Usage
		j.Usage = true
		return done
	}
	kind := p.kind()
	i := p.number(10, uint64(max(len(j.Items)-1, 0)))
	if p.bad || int(i) >= len(j.Items) {
		return false
	}
	it := &j.Items[i]
	switch {
	case it.Ended || j.Usage || it.Begun == (kind == 'b'):
		return false
	case kind == 'b':
		it.Begun, it.Seed = true, p.take1(" ", math.MaxUint64)
		it.Cached, it.Max = int(p.take1(" ", math.MaxInt32)), int(p.take1(" ", math.MaxInt32))
	case kind == 'e':
		it.Ended = true
	case kind == 't' && len(it.Tokens) < it.Max:
		it.Tokens = append(it.Tokens, p.token())
	default:
		return false
	}
	return true
}

// journalParser reads a journal's text. bad is set when something else stands
// there than was expected.
type journalParser struct {
	rest string
	bad  bool
}

func (p *journalParser) take(s string) bool {
	if len(p.rest) < len(s) || p.rest[:len(s)] != s {
		return false
	}
	p.rest = p.rest[len(s):]
	return true
}

// kind takes a record's letter and the space after it.
func (p *journalParser) kind() byte {
	if len(p.rest) < 2 || p.rest[1] != ' ' {
		p.bad = true
		return 0
	}
	k := p.rest[0]
	p.rest = p.rest[2:]
	return k
}

// number takes digits of a base that give at most most.
func (p *journalParser) number(base int, most uint64) uint64 {
	n := 0
	for n < len(p.rest) && (p.rest[n] >= '0' && p.rest[n] <= '9' || base == 16 && p.rest[n] >= 'a' && p.rest[n] <= 'f') {
		n++
	}
	v, err := strconv.ParseUint(p.rest[:n], base, 64)
	p.bad = p.bad || err != nil || v > most
	p.rest = p.rest[n:]
	return v
}

func (p *journalParser) take1(before string, most uint64) uint64 {
	p.bad = p.bad || !p.take(before)
	return p.number(10, most)
}

func (p *journalParser) token() (t JournalToken) {
	t.ID = int32(p.take1(" ", math.MaxInt32))
	if p.take(" ") {
		t.Logprob = p.float()
	}
	for !p.bad && len(t.Top) < MaxTopLogprobs && p.take(" ") {
		id := int32(p.number(10, math.MaxInt32))
		p.bad = p.bad || !p.take(" ")
		t.Top = append(t.Top, TokenLogprob{id, p.float()})
	}
	return t
}

func (p *journalParser) float() float32 {
	f := math.Float32frombits(uint32(p.number(16, math.MaxUint32)))
	p.bad = p.bad || f-f != 0
	return f
}

// JournalCutter takes the journal out of a stream on its way to the client. It
// is for streams of our own workers, whose lines end in LF.
type JournalCutter struct {
	mid bool // the last run ended inside an event
	lf  bool // and there at a line's end
}

// Cut moves the records of a run (of an EventReader) to the end of journal and
// closes the gaps that they leave in the run. It returns the shorter run, the
// longer journal, and false when a journal line holds what no journal has.
//
// One pass over the run; nothing is allocated but the journal's growth.
func (c *JournalCutter) Cut(run, journal []byte) (events, grown []byte, ok bool) {
	n := 0 // bytes of events so far
	for i := 0; i < len(run); {
		if !c.mid && bytes.HasPrefix(run[i:], []byte(journalMark)) {
			k := bytes.IndexByte(run[i:], '\n')
			if k < 0 || !plainRecords(run[i+len(journalMark):i+k]) {
				return nil, journal, false
			}
			journal = append(journal, run[i+len(journalMark):i+k]...)
			i += k + 1
			continue
		}
		k := len(run) - i
		switch end := bytes.Index(run[i:], []byte("\n\n")); {
		case c.mid && c.lf && run[i] == '\n':
			k, c.mid = 1, false
		case end >= 0:
			k, c.mid = end+2, false
		default:
			c.mid = true
		}
		n += copy(run[n:], run[i:i+k])
		i += k
		c.lf = run[n-1] == '\n'
	}
	return run[:n], journal, true
}

// plainRecords tells whether records can stand in a JSON string as they are.
func plainRecords(b []byte) bool {
	for _, c := range b {
		if c < ' ' || c > 'z' || c == '"' || c == '\\' {
			return false
		}
	}
	return len(b) > 0
}
