//metronome:pure

package router

import "time"

// Passive judgement by what happens to real requests, and the ramp of a worker
// that has come in.
const (
	ejectStreak = 3               // failed legs in a row that eject a worker
	ejectFor    = time.Second     // then one request is let through to try it, and one more each second
	doubtFor    = 5 * time.Second // without another failure, after which failures say nothing of now
	rampLegs    = 4               // legs that a worker which has come in may have open at first
	rampFor     = 5 * time.Second // after which it is taken for warm in any case
)

// standing is what is known of one worker's health: by its probes, which alone
// bring it in, and by the fate of its legs, which may eject it. The ejection is
// a circuit breaker: open for ejectFor, then half open, one trial a second,
// until a leg does well. A trial needs no book-keeping: it only puts the next
// one off, so one that never ends locks nobody out.
//
// Who comes in ramps up as TCP starts slowly: rampLegs open legs, one more for
// each leg that did well, whatever the rate of requests. So a cold worker is
// used at once and is not flooded.
type standing struct {
	up     bool   // by the probes
	fails  int    // failed probes in a row
	judged uint64 // number of the newest probe taken into account
	cause  string // of the last failure, "" after a success

	streak  int           // failed legs in a row
	ejected bool          // by them
	until   time.Duration // while ejected: when it may be tried
	doubt   time.Duration // until when its failed legs make it count as not ready, ejected or not

	window int           // legs it may have open while it ramps up
	warm   time.Duration // when the ramp is over
}

// probed takes in the end of probe number seq (by order of start); cause is ""
// for a success. An answer that was overtaken by a later probe's says nothing.
func (s *standing) probed(now time.Duration, seq uint64, cause string, limit int) {
	if seq <= s.judged {
		return
	}
	s.judged, s.cause = seq, cause
	if cause == "" {
		if !s.up {
			s.ramp(now)
		}
		s.up, s.fails = true, 0
		return
	}
	if s.fails++; s.fails >= limit {
		s.up = false
	}
}

func (s *standing) ramp(now time.Duration) { s.window, s.warm = rampLegs, now+rampFor }

// down: the worker itself says that it cannot serve. The next good probe
// brings it back.
func (s *standing) down(cause string, limit int) { s.up, s.fails, s.cause = false, limit, cause }

// picked: a leg is sent to it.
func (s *standing) picked(now time.Duration) {
	if s.ejected {
		s.until = now + ejectFor
	}
}

// served: a leg did well.
func (s *standing) served(now time.Duration) {
	if s.ejected {
		s.ramp(now)
	}
	s.streak, s.ejected, s.doubt = 0, false, 0
	s.window++
}

// failed: a leg failed by the worker's fault. It ejects it after some, if the
// pool can spare it. While it is ejected, failures of older legs are no news.
func (s *standing) failed(now time.Duration, cause string, spare bool) {
	s.cause = cause
	if s.streak++; s.streak < ejectStreak {
		return
	}
	s.doubt = now + doubtFor
	if !s.ejected && spare {
		s.ejected, s.until = true, now+ejectFor
	}
}

// usable tells whether a leg may be sent to it.
func (s *standing) usable(now time.Duration) bool { return s.up && (!s.ejected || now >= s.until) }

// full tells whether its ramp has no room for a further leg beside open ones.
func (s *standing) full(now time.Duration, open int) bool { return now < s.warm && open >= s.window }

// ready tells whether requests may be expected to do well there: it is usable,
// and what requests met there of late does not say otherwise.
func (s *standing) ready(now time.Duration) bool { return s.usable(now) && now >= s.doubt }

// state is one word for metrics and tables.
func (s *standing) state() string {
	switch {
	case !s.up && s.judged == 0:
		return "starting"
	case !s.up:
		return "out"
	case s.ejected:
		return "ejected"
	}
	return "ready"
}
