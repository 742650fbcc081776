package router

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// journalMax bounds the journal of one stream. A longer one is let go, and its
// stream can no more be moved.
const journalMax = 8 << 20

// journal is what a stream has said so far in its workers' words, so that
// another pair can go on with it. Under exchange.mu, because an attempt may be
// given up by others than the goroutine that passes its answer on.
type journal struct {
	kept   bool // the workers of the stream keep one
	lost   bool // it is not whole: too long, or there was no memory for it
	mid    bool // the client was last given a part of an event
	text   []byte
	cutter api.JournalCutter
}

// whole tells whether another pair could go on from here.
func (j *journal) whole() bool { return j.kept && !j.lost && !j.mid }

// admit takes a run of an attempt's events in before it goes to the client: it
// cuts the journal out and marks the client as the one that is waited for. It
// gives a fault when the attempt has been given up, because then what comes
// after the journal that the next one goes on from must not be passed on.
func (x *exchange) admit(a *attempt, run []byte, whole bool) ([]byte, *fault) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pair.phase != phaseRelaying || x.pair.attempt != a.n {
		return nil, errGivenUp
	}
	if j := &x.journal; j.kept {
		events, text, ok := j.cutter.Cut(run, j.text)
		if !ok {
			j.lost = true
			return nil, &fault{kind: faultCut, text: "the answer's journal is malformed"}
		}
		run = events
		x.keep(text)
	}
	x.journal.mid = !whole
	if len(run) > 0 {
		x.heard.Store(writing)
	}
	return run, nil
}

var errGivenUp = &fault{kind: faultCut, text: "the attempt was given up"}

// keep takes the longer journal, if there is memory for it.
func (x *exchange) keep(text []byte) {
	j := &x.journal
	if j.lost {
		j.text = text[:0]
		return
	}
	grown := int64(cap(text) - cap(j.text))
	x.held += grown
	if j.text = text; x.r.bodies.Add(grown) > x.r.cfg.MaxBodies || len(text) > journalMax {
		x.held -= int64(cap(text))
		x.r.bodies.Add(-int64(cap(text)))
		j.lost, j.text = true, nil
	}
}

// askJournal asks for a journal, and gives the one to go on from.
func (x *exchange) askJournal(a *attempt, in *api.Injection) {
	if !x.scan.Stream || x.r.cfg.Migrations == 0 {
		return
	}
	a.header[api.JournalHeader] = []string{"1"}
	if x.pair.moves > 0 {
		in.Journal, a.goesOn = x.journal.text, true
		a.taken = len(in.Journal)
	}
}

// goesOn tells whether an answer goes on from the journal that was given. A
// worker that knows nothing of journals would begin anew.
func (x *exchange) goesOn(a *attempt, resp *http.Response) *fault {
	if !a.goesOn || isStream(resp.Header) && resp.Header.Get(api.JournalHeader) == strconv.Itoa(a.taken) {
		return nil
	}
	return &fault{kind: faultUnfit, text: "it cannot go on with another worker's stream"}
}

// quietFor is how long decode has been silent while nobody waited for the client.
func (x *exchange) quietFor(now time.Duration) time.Duration {
	if h := x.heard.Load(); h != writing {
		return now - time.Duration(h)
	}
	return 0
}

// prefillQuiet is how many times longer than without its decode a stream must be
// silent to be moved without its prefill: most never need that one again.
const prefillQuiet = 5

// out tells the machine that the probes of a leg's worker fail.
func (x *exchange) out(now time.Duration, leg Leg) {
	avoid := x.avoid
	avoid[leg] = append(slices.Clone(avoid[leg]), x.cur.workers[leg])
	long := x.r.cfg.HealthTimeout
	if leg == Prefill {
		long *= prefillQuiet
	}
	x.stepLocked(event{kind: evOut, attempt: x.cur.n, leg: leg, spare: x.r.table.spare(now, avoid),
		goesOn: x.journal.whole() && x.quietFor(now) >= long})
}

// moved notes that a stream goes on. Whoever failed it before may serve it again
// later: a worker that was restarted is a new one.
func (x *exchange) moved(a *attempt) {
	x.avoid = [2][]*worker{}
	x.r.metrics.Migrations.Inc()
	x.r.cfg.Log.Info("stream moved", "request", x.id, "attempt", a.n, "decode", a.workers[Decode].name,
		"after", fmt.Sprintf("%d bytes", x.sent), "cause", x.pair.last.err.Message)
}
