//metronome:pure

package router

import (
	"fmt"
	"hash/maphash"
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
	// CacheAware takes the one that has the least to do until this prompt is
	// done: its tokens outstanding, less those at the prompt's beginning that it
	// was sent before. So a prompt goes where its prefix is, unless that worker
	// is further behind than the prefix saves; a prefix that all requests share
	// spreads over the pool. Without a known prefix it is LeastLoad.
	CacheAware
	// ConsistentHash takes the same one for the same key, by rendezvous hashing
	// (Thaler and Ravishankar 1998): when a worker comes or goes only the keys
	// that it gets or had move, and routers that know nothing of each other
	// agree. A worker that has more than its share is passed over for the key's
	// next one (bounded loads, Mirrokni and others 2018), so a hot key sinks
	// none. A request without a key goes by LeastLoad.
	ConsistentHash
)

var policies = [...]string{RoundRobin: "round_robin", LeastLoad: "least_load", Random: "random", PowerOfTwo: "power_of_two",
	CacheAware: "cache_aware", ConsistentHash: "consistent_hash"}

// policyNames is for messages.
const policyNames = "least_load, cache_aware, consistent_hash, power_of_two, round_robin or random"

// ParsePolicy reads a policy's name.
func ParsePolicy(name string) (Policy, error) {
	for p, s := range policies {
		if s == name && s != "" {
			return Policy(p), nil
		}
	}
	return 0, fmt.Errorf("unknown policy %q; take %s", name, policyNames)
}

// candidate is one worker as a picker sees it.
type candidate struct {
	usable bool
	last   resort
	load   int64  // tokens outstanding
	legs   int    // open
	slot   int    // in the prefix index
	name   uint64 // hash of its name
	cached int64  // tokens of the prompt that it is thought to have; set by pick, CacheAware only
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

// wish is what a request wants of a pool.
type wish struct {
	cost     int64    // tokens that it adds
	keyed    bool     // key means something
	key      uint64   // hash of the request's routing key
	prefixes []uint64 // of the prompt
}

// bytesPerToken is of text, and of ids with their commas: as well as can be told
// without the tokenizer.
const bytesPerToken = 4

// Bounds of ConsistentHash: a worker that has boundLegs legs is passed over
// while it would have more than boundShare of the mean load. Below that a key
// stays where it is, also when few keys make the load uneven.
const (
	boundShare = 1.25
	boundLegs  = 4
)

// hashKey is FNV-1a, the same in all routers and at all times, for workers' names
// and routing keys. Who makes keys collide only gets them to the same worker.
func hashKey(s string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 0x100000001b3
	}
	return h
}

// picker chooses workers of one pool.
type picker struct {
	policy Policy
	rand   *rand.Rand
	next   int   // where the next turn begins
	among  []int // scratch

	index *prefixIndex // CacheAware only
	seed  maphash.Seed // of the prefixes
}

func newPicker(policy Policy, seed uint64) picker {
	return picker{policy: policy, rand: rand.New(rand.NewPCG(seed, 0))}
}

// pick is the index of the chosen worker, -1 when none is usable.
func (p *picker) pick(pool []candidate, w wish) int {
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
	case Random:
		best = p.among[p.rand.IntN(len(p.among))]
	case PowerOfTwo:
		best = p.twoChoices(pool)
	case CacheAware:
		p.look(pool, w.prefixes)
		best = p.least(pool)
	case ConsistentHash:
		if w.keyed {
			best = p.byKey(pool, w)
			break
		}
		fallthrough
	case LeastLoad:
		best = p.least(pool)
	}
	p.next = (best + 1) % len(pool)
	return best
}

// least is the one that has the least to do until the request is done. Of
// equals it is the one that has more of the prompt, which saves work.
func (p *picker) least(pool []candidate) int {
	best := p.among[0]
	for _, i := range p.among[1:] {
		a, b := &pool[i], &pool[best]
		if d := (a.load - a.cached) - (b.load - b.cached); d < 0 || d == 0 && a.cached > b.cached {
			best = i
		}
	}
	return best
}

// look sets how much of the prompt each worker has: the longest of its prefixes
// that the worker was sent.
func (p *picker) look(pool []candidate, prefixes []uint64) {
	at := 0
	for n := range prefixes {
		at = nextMark(at)
		holders := p.index.holders(prefixes[n])
		for _, i := range p.among {
			if holders>>(pool[i].slot%64)&1 != 0 {
				pool[i].cached = int64(at) / bytesPerToken
			}
		}
	}
}

// byKey is the usable one whose name mixes highest with the key and that has no more than
// its share.
func (p *picker) byKey(pool []candidate, w wish) int {
	total := w.cost
	for _, i := range p.among {
		total += pool[i].load
	}
	share := int64(boundShare * float64(total) / float64(len(p.among)))
	best, least := -1, -1
	for _, i := range p.among {
		c := &pool[i]
		if least < 0 || c.load < pool[least].load {
			least = i
		}
		if c.legs >= boundLegs && c.load+w.cost > share {
			continue
		}
		if best < 0 || mix(w.key, c.name) > mix(w.key, pool[best].name) {
			best = i
		}
	}
	if best < 0 { // one request is larger than a share
		return least
	}
	return best
}

// mix is one hash of two (the last steps of MurmurHash3).
func mix(a, b uint64) uint64 {
	h := a ^ b*0x9e3779b97f4a7c15
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
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
