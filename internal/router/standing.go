//metronome:pure

package router

import "time"

// Passive judgement by what happens to real requests.
const (
	ejectStreak = 3           // failed legs in a row that eject a worker
	ejectFor    = time.Second // then one request is let through to try it
)

// standing is what is known of one worker's health: by its probes, which alone
// bring it in, and by the fate of its legs, which may eject it for a second at
// a time.
type standing struct {
	up     bool   // by the probes
	fails  int    // failed probes in a row
	judged uint64 // number of the newest probe taken into account
	cause  string // of the last failure, "" after a success

	streak  int           // failed legs in a row
	ejected bool          // by them
	until   time.Duration // while ejected: when it may be tried
	trial   bool          // while ejected: a request is trying it
}

// probed takes in the end of probe number seq (by order of start); cause is ""
// for a success. An answer that was overtaken by a later probe's says nothing.
func (s *standing) probed(seq uint64, cause string, limit int) {
	if seq <= s.judged {
		return
	}
	s.judged, s.cause = seq, cause
	if cause == "" {
		s.up, s.fails = true, 0
		return
	}
	if s.fails++; s.fails >= limit {
		s.up = false
	}
}

// down: the worker itself says that it cannot serve. The next good probe
// brings it back.
func (s *standing) down(cause string, limit int) { s.up, s.fails, s.cause = false, limit, cause }

// served: a leg did well.
func (s *standing) served() { s.streak, s.ejected, s.trial = 0, false, false }

// failed: a leg failed by the worker's fault. It ejects it after some, if the
// pool can spare it.
func (s *standing) failed(now time.Duration, cause string, spare bool) {
	s.cause = cause
	s.trial = false
	if s.streak++; s.ejected || s.streak >= ejectStreak && spare {
		s.ejected, s.until = true, now+ejectFor
	}
}

// usable tells whether a leg may be sent to it.
func (s *standing) usable(now time.Duration) bool {
	return s.up && (!s.ejected || !s.trial && now >= s.until)
}

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
