package router

import (
	"bytes"
	"fmt"
	"io"
	"net/http"

	"github.com/metronome-serve/metronome/internal/api"
)

// This file drives scores: it takes the prefill's answer, holds decode's back
// until it is there, and passes the two on as one.

// takeScores reads a prefill's whole answer for what it tells of the prompt.
// Errors inside of it are found as drainPrefill finds them.
func (x *exchange) takeScores(a *attempt, resp *http.Response, drawn int) *fault {
	body, err := x.r.readScored(resp.Body, &a.held)
	if err != nil {
		return &fault{kind: faultCut, text: "the answer broke off: " + plainCause(a.ctx[Prefill], err)}
	}
	sc := newScores(x.kind, x.items)
	if !isStream(resp.Header) {
		if f := bodyFault(body, x.items); f != nil {
			return f
		}
		sc.take(body, drawn)
	} else if f := takeEvents(sc, body, drawn); f != nil {
		return f
	}
	if sc.any {
		a.scores = sc
	}
	close(a.scored)
	return nil
}

func takeEvents(sc *scores, body []byte, drawn int) *fault {
	for line := range bytes.Lines(body) {
		data := api.EventData(line)
		if f := bodyFault(data, len(sc.items)); f != nil {
			return f
		}
		sc.take(data, drawn)
	}
	return nil
}

// readScored reads an answer into memory that is booked with the bodies, up to
// scoredAnswer bytes. held is what has been booked.
func (r *Router) readScored(from io.Reader, held *int64) ([]byte, error) {
	var body []byte
	for {
		if len(body) == cap(body) {
			more := max(cap(body), 64<<10)
			if cap(body)+more > scoredAnswer {
				return nil, fmt.Errorf("with log-probabilities of the prompt it is longer than %d bytes, which is the most this router takes", scoredAnswer)
			}
			*held += int64(more)
			if r.bodies.Add(int64(more)) > r.cfg.MaxBodies {
				return nil, fmt.Errorf("there is no memory for it: requests and answers take up more than %d bytes", r.cfg.MaxBodies)
			}
			body = append(make([]byte, 0, cap(body)+more), body...)
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if err == io.EOF {
			return body, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// dropScores gives back the memory of an attempt's prefill answer: at the end
// of the decode leg or of the prefill leg, whichever comes last.
func (x *exchange) dropScores(a *attempt) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dropScoresLocked(a)
}

func (x *exchange) dropScoresLocked(a *attempt) {
	if a.oneOver {
		x.r.bodies.Add(-a.held)
	}
	a.oneOver = true
}

// awaitScores waits for the prefill's answer where the request needs it: it is
// due when decode begins. nil: there is nothing to add. It ends with the leg,
// which the machine ends when the prefill fails.
func (x *exchange) awaitScores(a *attempt) (*scores, *fault) {
	if wanted, _ := x.scan.PromptScores(x.kind); !wanted {
		return nil, nil
	}
	select {
	case <-a.scored:
		return a.scores, nil
	case <-a.ctx[Decode].Done():
		return nil, x.cut(a, a.ctx[Decode].Err())
	}
}

// relayScored is relayWhole for an answer that may need the prompt's part.
func (x *exchange) relayScored(a *attempt, resp *http.Response) {
	body, err := x.r.readScored(resp.Body, &x.held)
	if err != nil {
		x.decodeFailed(a, *x.cut(a, err))
		return
	}
	if f := bodyFault(body, x.items); f != nil {
		x.decodeFailed(a, *f)
		return
	}
	sc, f := x.awaitScores(a)
	if f != nil {
		x.decodeFailed(a, *f)
		return
	}
	if sc != nil {
		body = sc.give(nil, body)
	}
	if !x.mayRelay(a, resp) {
		return
	}
	x.head(resp, int64(len(body)))
	if x.write(body) {
		x.step(event{kind: evEnded, attempt: a.n, leg: Decode})
	}
}

// scoreEvents is copyEvents with the prompt's part in each event that has a
// place for it. Events are therefore held back until they are whole.
func (x *exchange) scoreEvents(a *attempt, sc *scores, events *api.EventReader, run []byte, whole bool, err error) *fault {
	var pending, out []byte
	for {
		if len(pending)+len(run) > scoredAnswer {
			return &fault{kind: faultCut, text: fmt.Sprintf("an event is longer than %d bytes, which is the most this router takes with log-probabilities of the prompt", scoredAnswer)}
		}
		pending = append(pending, run...)
		if whole && len(pending) > 0 {
			good, bad := splitError(pending, x.items)
			out = sc.giveEvents(out[:0], good)
			done := api.EndsDone(pending)
			pending = pending[:0]
			if !x.write(out) {
				return errClient
			}
			if bad != nil {
				return bad
			}
			if done {
				return nil
			}
		}
		if err != nil {
			return x.cut(a, err)
		}
		run, whole, err = events.Next()
	}
}
