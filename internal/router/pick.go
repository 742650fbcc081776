//metronome:pure

package router

import (
	"fmt"
	"math/rand/v2"
)

// Policy says how a worker is chosen among the usable ones of its pool.
type Policy uint8

const (
	// RoundRobin takes them in turn.
	RoundRobin Policy = iota + 1
	// LeastLoad takes the one with the fewest tokens outstanding. Equals take
	// turns, so an idle pool is not always entered by the first.
	LeastLoad
	// Random takes any, all with the same chance.
	Random
	// PowerOfTwo draws two and takes the one with fewer tokens outstanding:
	// nearly as even as LeastLoad, and several routers that know nothing of each
	// other do not all rush to the same worker (Mitzenmacher 2001).
	PowerOfTwo
)

var policies = [...]string{RoundRobin: "round_robin", LeastLoad: "least_load", Random: "random", PowerOfTwo: "power_of_two"}

// policyNames is for messages.
const policyNames = "least_load, power_of_two, round_robin or random"

// ParsePolicy reads a policy's name.
func ParsePolicy(name string) (Policy, error) {
	for p, s := range policies {
		if s == name && s != "" {
			return Policy(p), nil
		}
	}
	if name == "cache_aware" || name == "consistent_hash" {
		return 0, fmt.Errorf("policy %s is not built yet; take %s", name, policyNames)
	}
	return 0, fmt.Errorf("unknown policy %q; take %s", name, policyNames)
}

// candidate is one worker as a picker sees it.
type candidate struct {
	usable bool
	last   resort
	load   int64 // tokens outstanding
}

// resort is the order in which usable workers are considered: one of a kind is
// taken only if there is none of the kinds before it. So neither a ramp nor a
// removal turns a request away.
type resort uint8

const (
	first   resort = iota
	full           // it ramps up and has all the legs it may have for now
	leaving        // it is to go, and nobody has taken its place yet
)

// picker chooses workers of one pool.
type picker struct {
	policy Policy
	rand   *rand.Rand
	next   int   // where the next turn begins
	among  []int // scratch
}

func newPicker(policy Policy, seed uint64) picker {
	return picker{policy: policy, rand: rand.New(rand.NewPCG(seed, 0))}
}

// pick is the index of the chosen worker, -1 when none is usable.
func (p *picker) pick(pool []candidate) int {
	p.among = p.among[:0]
	for last := first; last <= leaving && len(p.among) == 0; last++ {
		for k := range pool {
			if i := (p.next + k) % len(pool); pool[i].usable && pool[i].last == last {
				p.among = append(p.among, i)
			}
		}
	}
	if len(p.among) == 0 {
		return -1
	}
	best := p.among[0]
	switch p.policy {
	case LeastLoad:
		for _, i := range p.among {
			if pool[i].load < pool[best].load {
				best = i
			}
		}
	case Random:
		best = p.among[p.rand.IntN(len(p.among))]
	case PowerOfTwo:
		best = p.twoChoices(pool)
	}
	p.next = (best + 1) % len(pool)
	return best
}

func (p *picker) twoChoices(pool []candidate) int {
	n := len(p.among)
	if n == 1 {
		return p.among[0]
	}
	a, b := p.rand.IntN(n), p.rand.IntN(n-1)
	if b >= a {
		b++
	}
	if pool[p.among[b]].load < pool[p.among[a]].load { // of equals the first drawn, which is random
		a = b
	}
	return p.among[a]
}
