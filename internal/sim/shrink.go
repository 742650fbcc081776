package sim

import (
	"errors"
	"slices"
)

// Shrink makes a plan that breaks a rule smaller, as long as it still breaks
// the same rule: fewer faults, fewer requests, then fewer workers. It runs at
// most tries plans. tell, when not nil, hears of each smaller one.
func Shrink(p *Plan, tries int, tell func(*Plan)) *Plan {
	s := &shrinker{best: p, left: tries, tell: tell}
	_, err := Run(p, nil)
	if !errors.As(err, &s.broke) {
		return p
	}
	for again := true; again && s.left > 0; {
		again = s.faults() || s.requests() || s.workers()
	}
	return s.best
}

type shrinker struct {
	best  *Plan
	broke *Violation
	left  int
	tell  func(*Plan)
}

// try keeps a plan if it breaks the same rule.
func (s *shrinker) try(p *Plan) bool {
	if s.left == 0 {
		return false
	}
	s.left--
	_, err := Run(p, nil)
	var v *Violation
	if !errors.As(err, &v) || v.Rule != s.broke.Rule {
		return false
	}
	s.best = p
	if s.tell != nil {
		s.tell(p)
	}
	return true
}

// thin takes ever smaller runs of n things out, and says whether any was not needed.
func (s *shrinker) thin(n func() int, without func(from, to int) *Plan) (any bool) {
	for size := n(); size > 0; size /= 2 {
		for from := 0; from < n(); {
			if s.try(without(from, min(from+size, n()))) {
				any = true
				continue
			}
			from += size
		}
	}
	return any
}

func (s *shrinker) faults() bool {
	return s.thin(func() int { return len(s.best.Faults) }, func(from, to int) *Plan {
		q := *s.best
		q.Faults = slices.Delete(slices.Clone(q.Faults), from, to)
		return &q
	})
}

func (s *shrinker) requests() bool {
	return s.thin(func() int { return len(s.best.Requests) }, func(from, to int) *Plan {
		q := *s.best
		q.Requests = slices.Delete(slices.Clone(q.Requests), from, to)
		return &q
	})
}

// workers leaves the last prefill or decode out where nothing names it.
func (s *shrinker) workers() (any bool) {
	for _, leg := range [...]string{"p", "d"} {
		q := *s.best
		of := &q.Prefills
		if leg == "d" {
			of = &q.Decodes
		}
		last := len(*of) - 1
		name := leg + string(rune('0'+last))
		if last < 1 || last > 9 || slices.ContainsFunc(q.Faults, func(f Fault) bool { return f.On == name || f.To == name }) {
			continue
		}
		*of = (*of)[:last]
		q.Requests = slices.Clone(q.Requests)
		for i := range q.Requests {
			q.Requests[i].Prefill %= len(q.Prefills)
			q.Requests[i].Decode %= len(q.Decodes)
		}
		any = s.try(&q) || any
	}
	return any
}
