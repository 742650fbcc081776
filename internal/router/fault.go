//metronome:pure

package router

import (
	"fmt"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Leg is one half of a request: the request at the prefill worker or the one
// at the decode worker.
type Leg uint8

const (
	Prefill Leg = iota
	Decode
)

func (l Leg) String() string {
	if l == Prefill {
		return "prefill"
	}
	return "decode"
}

func (l Leg) other() Leg { return 1 - l }

// unreachable is the code for a worker of this leg that cannot be talked to.
func (l Leg) unreachable() api.Code {
	if l == Prefill {
		return api.PrefillUnreachable
	}
	return api.DecodeUnreachable
}

// none is the code for having no usable worker of this leg.
func (l Leg) none() api.Code {
	if l == Prefill {
		return api.NoPrefill
	}
	return api.NoDecode
}

// faultKind is the way in which a leg failed.
type faultKind uint8

const (
	faultConnect faultKind = iota + 1 // no answer: not reached, or the connection ended before the head
	faultCut                          // the answer began and broke off
	faultStatus                       // an error for an answer, as a status or inside a stream
	faultSilent                       // the answer began, then nothing came for too long
	faultOut                          // its probes fail while the request waits
	faultUnfit                        // it cannot do what is asked of it, and is well otherwise
)

// fault is a leg's failure as its driver saw it.
type fault struct {
	kind       faultKind
	status     int           // faultStatus: the HTTP status, or the one named inside the stream
	code       api.Code      // faultStatus: the worker's own word, when it is one of ours
	text       string        // what happened; faultStatus: the worker's message
	param      string        // faultStatus: the field at fault
	retryAfter time.Duration // faultStatus
	answer     *answer       // faultStatus: the whole answer, when it came as a status
}

// answer is a worker's complete answer, to be passed on unchanged.
type answer struct {
	status int
	header map[string][]string
	body   []byte
}

// verdict is what follows from a fault.
type verdict struct {
	blamed bool       // whether a worker is at fault
	blame  Leg        // which one: the next pair is without it
	health bool       // counts against that worker
	down   bool       // that worker says it is starting or draining: out until a probe succeeds
	retry  bool       // another pair may do better
	free   bool       // ... and it takes nothing from the retry budget: the worker does no work
	err    *api.Error // what the client hears when this was the last pair
	pass   *answer    // or this, unchanged
}

// judge says whose fault it is when a leg fails. The worker that reports an
// error is not always the one at fault: a decode that says prefill_unreachable
// speaks of the prefill, and a prefill whose transfer failed of the decode.
func judge(leg Leg, worker string, f fault) verdict {
	v := verdict{blamed: true, blame: leg, health: true, retry: true}
	if f.kind != faultStatus {
		v.free = f.kind == faultOut
		v.health = !v.free && f.kind != faultUnfit // its probes have seen to that
		v.err = api.Errorf(leg.unreachable(), "%s %s: %s", leg, worker, f.text)
		return v
	}
	v.err = statusError(leg, worker, f)
	switch {
	case f.code == api.DeadlineExceeded:
		// The request's own time is out: nobody's fault, and no time for another try.
		return verdict{err: v.err, pass: f.answer}
	case f.code == api.Overloaded || f.status == 429:
		v.health, v.pass = false, f.answer
	case f.status < 500:
		return verdict{err: v.err, pass: f.answer}
	case f.code == api.PrefillUnreachable && leg == Decode,
		f.code == api.DecodeUnreachable && leg == Prefill,
		f.code == api.KVTransferFailed:
		v.blame = leg.other()
	case f.code == api.PeerMismatch:
		v.blame, v.health = leg.other(), false // a wrong setting; the worker may be fine with others
	case f.code == api.Draining || f.code == api.Starting:
		v.health, v.down = false, true
	case f.status != 500 && f.status != 502 && f.status != 503:
		v.retry = false
	}
	return v
}

// statusError is what a client is told about an error answer: the worker's own
// words where it has one of our codes, else ours for its status.
func statusError(leg Leg, worker string, f fault) *api.Error {
	e := &api.Error{Code: f.code, Status: f.status, Param: f.param, RetryAfter: f.retryAfter,
		Message: fmt.Sprintf("%s %s: %s", leg, worker, f.text)}
	if f.code != "" {
		return e
	}
	e.Message = fmt.Sprintf("%s %s answered %d: %s", leg, worker, f.status, f.text)
	switch f.status {
	case 401:
		e.Code = api.Unauthorized
	case 403:
		e.Code = api.Forbidden
	case 404:
		e.Code = api.NotFound
	case 413:
		e.Code = api.BodyTooLarge
	case 429:
		e.Code = api.Overloaded
	case 500:
		e.Code = api.Internal
	case 503:
		e.Code = leg.none()
	default:
		if f.status < 400 || f.status >= 500 {
			e.Code, e.Status = leg.unreachable(), 0
		} else {
			e.Code = api.InvalidRequest
		}
	}
	return e
}
