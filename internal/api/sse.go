//metronome:pure

package api

import (
	"bytes"
	"io"
)

// Done is the event that ends a complete stream. A stream that ends without it
// was cut.
const Done = "data: [DONE]\n\n"

// eventHold is how much of an unfinished event an EventReader keeps back.
const eventHold = 64 << 10

// EventReader cuts an upstream's bytes into whole events without changing
// them. Each call of Next costs at most one read that waits, so an event is
// passed on when it arrives and never waits for the one after it.
//
//	for {
//		run, whole, err := er.Next()
//		… write run …
//		if err != nil { break } // io.EOF: the upstream ended
//	}
//
// Its memory is bounded by the buffer it is given: an event longer than the
// buffer is handed on in pieces.
type EventReader struct {
	r     io.Reader
	buf   []byte
	n     int   // bytes in buf
	used  int   // of which the last Next handed out
	seen  int   // of which looked at for line ends
	start int   // where the line under way begins; negative: in a piece handed out before
	prev  byte  // the byte before buf[0]
	mid   bool  // what was handed out ends inside an event
	err   error // what ended the upstream
}

// NewEventReader reads events from r through buf, which belongs to the reader
// until it is no longer used. An empty buf makes one of 64 KiB.
func NewEventReader(r io.Reader, buf []byte) *EventReader {
	if len(buf) == 0 {
		buf = make([]byte, eventHold)
	}
	return &EventReader{r: r, buf: buf}
}

// Next returns the whole events that are at hand, at least one, waiting for the
// upstream only when there is none. whole is false when the run ends inside an
// event: one that is longer than the buffer, or that the upstream broke off.
// The run is valid until the next call; an error comes with the last run, which
// may be empty.
func (e *EventReader) Next() (run []byte, whole bool, err error) {
	if e.used > 0 {
		e.prev = e.buf[e.used-1]
		e.n = copy(e.buf, e.buf[e.used:e.n])
		e.seen -= e.used
		e.start -= e.used
		e.used = 0
	}
	for tries := 0; ; tries++ {
		if end := e.lastBoundary(); end > 0 {
			e.used, e.mid = end, false
			return e.buf[:end], true, nil
		}
		if e.err != nil || e.n == len(e.buf) {
			e.used = e.n
			e.mid = e.mid || e.n > 0
			return e.buf[:e.n], !e.mid, e.err
		}
		var n int
		n, e.err = e.r.Read(e.buf[e.n:])
		e.n += n
		if n > 0 {
			tries = 0
		} else if e.err == nil && tries == 100 {
			e.err = io.ErrNoProgress
		}
	}
}

// lastBoundary is the offset after the last empty line at hand, 0 for none.
// Lines end in LF or CRLF.
func (e *EventReader) lastBoundary() int {
	end := 0
	for {
		k := bytes.IndexByte(e.buf[e.seen:e.n], '\n')
		if k < 0 {
			e.seen = e.n
			return end
		}
		k += e.seen
		if n := k - e.start; n == 0 || n == 1 && e.before(k) == '\r' {
			end = k + 1
		}
		e.seen, e.start = k+1, k+1
	}
}

func (e *EventReader) before(k int) byte {
	if k == 0 {
		return e.prev
	}
	return e.buf[k-1]
}

// EndsDone tells whether a run of whole events ends with the [DONE] event.
func EndsDone(run []byte) bool {
	run = bytes.TrimRight(run, "\r\n")
	return bytes.HasSuffix(run, done) && (len(run) == len(done) || run[len(run)-len(done)-1] == '\n')
}

var done = []byte("data: [DONE]")

// EventData returns the data of the first event of a run that has any, "" for
// comments and the like. It refers to the run.
func EventData(run []byte) []byte {
	for len(run) > 0 {
		line, rest, _ := bytes.Cut(run, []byte{'\n'})
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			return bytes.TrimSpace(data)
		}
		run = rest
	}
	return nil
}
