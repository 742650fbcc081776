//metronome:pure

package metric

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// Mark is a point that a request passes in one process.
type Mark uint8

// The marks, in the order in which a request passes them. A process has those
// that it can see; a prefill may compute (FirstLayer) before it is Granted.
const (
	Queued     Mark = iota // taken in: its body is read, on a worker its prompt is tokens
	Routed                 // router: the first pair is chosen, both legs are sent
	Resolved               // decode: every link to its prefill is up
	Granted                // prefill, decode: decode has opened its pages
	FirstLayer             // prefill, serve: one layer of the first chunk is computed
	FirstPage              // decode: the first page is coming in
	LastPage               // prefill: the last page is sent; decode: all pages are here and verified
	FirstToken             // prefill, decode, serve: it is drawn; router: the client is given the first byte
	LastToken              // the newest one is drawn; router: the client has been given the last byte
	Received               // prefill: decode has said that it has everything
	Ended
	marks
)

var markNames = [marks]string{"queued", "routed", "resolved", "granted", "first_layer", "first_page", "last_page", "first_token", "last_token", "received", "ended"}

func (m Mark) String() string { return markNames[m] }

// Timeline is when a request passed each mark in one process, as time since
// that process first saw it: no clock is compared with another machine's. It
// is of fixed size and holds no pointer, so setting a mark costs a store.
type Timeline struct{ at [marks]time.Duration } // 0: not passed

// Set notes that a mark is passed at this time since the request was first
// seen. The first time counts, except for LastToken.
func (t *Timeline) Set(m Mark, since time.Duration) {
	if t.at[m] == 0 || m == LastToken {
		t.at[m] = max(since, 1)
	}
}

// At is when a mark was passed; false: it was not.
func (t *Timeline) At(m Mark) (time.Duration, bool) { return t.at[m], t.at[m] > 0 }

// Moment is one mark of a timeline.
type Moment struct {
	Mark Mark
	At   time.Duration
}

// Moments are the marks that were passed, in the order of the constants.
func (t *Timeline) Moments() (list []Moment) {
	for m, at := range t.at {
		if at > 0 {
			list = append(list, Moment{Mark(m), at})
		}
	}
	return list
}

// ByTime are the same marks, the earliest first.
func (t *Timeline) ByTime() []Moment {
	list := t.Moments()
	slices.SortStableFunc(list, func(a, b Moment) int { return cmp.Compare(a.At, b.At) })
	return list
}

// ms is a duration in milliseconds, to the microsecond.
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// MarshalJSON writes an object of the passed marks, in milliseconds.
func (t Timeline) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for _, m := range t.Moments() {
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = strconv.AppendQuote(b, m.Mark.String())
		b = strconv.AppendFloat(append(b, ':'), ms(m.At), 'f', -1, 64)
	}
	return append(b, '}'), nil
}

// maxMS bounds what is taken from another process: about three years.
const maxMS = 1e11

// UnmarshalJSON reads what MarshalJSON writes. Marks of a later version are
// left out; what is no time is an error.
func (t *Timeline) UnmarshalJSON(b []byte) error {
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	var all map[string]float64
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	*t = Timeline{}
	for m, name := range markNames {
		v, ok := all[name]
		if !ok {
			continue
		}
		if math.IsNaN(v) || v < 0 || v > maxMS {
			return fmt.Errorf("%s is %v: milliseconds from 0 to %g would be right", name, v, float64(maxMS))
		}
		t.Set(Mark(m), time.Duration(v*float64(time.Millisecond)))
	}
	return nil
}
