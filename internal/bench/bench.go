// Package bench measures: the engine against the limits of the machine, KV
// transfer against a bare socket, a turn of the loop by the length of its
// queues. All that one run compares is measured in rounds, one after the other,
// so that a busy machine touches all of it alike; what is reported is the
// median over the rounds, with the least and the most beside it.
//
// A driver fills one of the configurations and calls its Run; a line about
// each round goes to Progress.
package bench

import (
	"maps"
	"math"
	"slices"
	"strconv"
)

// UnfitError is what was asked and cannot be measured.
type UnfitError struct{ Err error }

func (e *UnfitError) Error() string { return e.Err.Error() }
func (e *UnfitError) Unwrap() error { return e.Err }

// Rate is the median over the rounds, and the least and the most of them.
type Rate struct{ Median, Low, High float64 }

// rate sums up what the rounds gave; an even number of them has two in the middle.
func rate(rounds []float64) Rate {
	s := slices.Sorted(slices.Values(rounds))
	n := len(s)
	return Rate{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1]}
}

// tidy rounds to four digits: more is noise.
func tidy(x float64) float64 {
	if x == 0 {
		return 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(math.Abs(x)))-3)
	if unit >= 1 {
		return math.Round(x/unit) * unit
	}
	inverse := math.Round(1 / unit)
	return math.Round(x*inverse) / inverse
}

func rates(rounds map[int][]float64) map[int]Rate {
	all := map[int]Rate{}
	for n, x := range rounds {
		all[n] = rate(x)
	}
	return all
}

// medians are what JSON gives, by size.
func medians(rates map[int]Rate) map[string]float64 {
	m := map[string]float64{}
	for n, x := range rates {
		m[strconv.Itoa(n)] = tidy(x.Median)
	}
	return m
}

func sizes(rates map[int]Rate) []int { return slices.Sorted(maps.Keys(rates)) }
