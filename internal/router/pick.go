//metronome:pure

package router

import "fmt"

// Policy says how a worker is chosen among the usable ones of its pool.
type Policy uint8

const (
	// RoundRobin takes them in turn.
	RoundRobin Policy = iota + 1
	// LeastLoad takes the one with the least work outstanding: bytes of prompt
	// for a prefill, items (rows of its batch) for a decode. Equals take turns,
	// so an idle pool is not always entered by the first.
	LeastLoad
)

// ParsePolicy reads a policy's name.
func ParsePolicy(name string) (Policy, error) {
	switch name {
	case "round_robin":
		return RoundRobin, nil
	case "least_load":
		return LeastLoad, nil
	case "random", "power_of_two", "cache_aware", "consistent_hash":
		return 0, fmt.Errorf("policy %s is not built yet; take least_load or round_robin", name)
	}
	return 0, fmt.Errorf("unknown policy %q; take least_load or round_robin", name)
}

// candidate is one worker as a picker sees it.
type candidate struct {
	usable bool
	load   int64
}

// picker chooses workers of one pool.
type picker struct {
	policy Policy
	next   int // where the next turn begins
}

// pick is the index of the chosen worker, -1 when none is usable.
func (p *picker) pick(pool []candidate) int {
	best := -1
	for k := range pool {
		i := (p.next + k) % len(pool)
		c := &pool[i]
		if !c.usable || best >= 0 && (p.policy == RoundRobin || c.load >= pool[best].load) {
			continue
		}
		best = i
	}
	if best >= 0 {
		p.next = (best + 1) % len(pool)
	}
	return best
}
