//metronome:pure

package router

import (
	"hash/maphash"
	"math/bits"
)

// A prompt is remembered by its prefixes, each as a hash of all its bytes up to
// a mark. The marks are where every prompt has them: each prefixUnit bytes at
// first, then further and further apart, so that what two prompts share is
// known to an eighth of its length, and a prompt of 220 KB takes 57 entries, not
// one for every page of its KV.
//
// A hash that two prefixes shared would cost a wrong guess about where KV is and
// nothing else: workers compare the tokens themselves. It is seeded all the
// same (maphash), so that nobody can aim at another's worker.
const (
	prefixUnit  = 128     // bytes
	prefixStep  = 8       // a mark is followed by the next one after an eighth of its own offset
	prefixWays  = 8       // entries of a set
	prefixEntry = 24      // bytes of one
	prefixMost  = 1 << 20 // bytes of a prompt that are looked at: a millisecond at the most, whatever comes
)

// nextMark is the mark after the one at offset n.
func nextMark(n int) int { return n + max(prefixUnit, n/prefixStep/prefixUnit*prefixUnit) }

// prefixesOf are the hashes of a prompt's prefixes, one for each mark that the
// prompt reaches. They are appended to dst.
func prefixesOf(dst []uint64, seed maphash.Seed, prompt []byte) []uint64 {
	h := uint64(0)
	for at, next := 0, nextMark(0); next <= min(len(prompt), prefixMost); at, next = next, nextMark(next) {
		h = mix(h, maphash.Bytes(seed, prompt[at:next])) // one long piece is hashed faster than many short ones
		dst = append(dst, max(h, 1))                     // 0 is an entry that is free
	}
	return dst
}

// prefixIndex is what a pool's workers are thought to have in their prefix
// caches: for each prefix a bit for each worker that was sent it. Its memory is
// fixed: a table of sets as a processor's cache has them, in which the entry
// that was of no use for the longest time makes room. So a flood of prompts
// costs the memory of other prompts, and no more than that.
type prefixIndex struct {
	sets [][prefixWays]prefix
	turn uint32 // of the last note; wraps around
}

type prefix struct {
	hash    uint64
	workers uint64 // bit i: workers whose slot is i modulo 64
	used    uint32 // turn
}

// newPrefixIndex takes at most so many bytes, at least one set.
func newPrefixIndex(bytes int64) *prefixIndex {
	return &prefixIndex{sets: make([][prefixWays]prefix, max(1, bytes/(prefixWays*prefixEntry)))}
}

// set is where a hash belongs.
func (x *prefixIndex) set(hash uint64) *[prefixWays]prefix {
	i, _ := bits.Mul64(hash, uint64(len(x.sets)))
	return &x.sets[i]
}

// holders are the workers that were sent a prefix with this hash.
func (x *prefixIndex) holders(hash uint64) uint64 {
	set := x.set(hash)
	for i := range set {
		if set[i].hash == hash {
			return set[i].workers
		}
	}
	return 0
}

// note takes down that a prompt is sent to the worker in this slot.
func (x *prefixIndex) note(prefixes []uint64, slot int) {
	x.turn++
	for _, hash := range prefixes {
		set := x.set(hash)
		at := 0
		for i := range set {
			if set[i].hash == hash {
				at = i
				break
			}
			if x.age(&set[i]) > x.age(&set[at]) {
				at = i
			}
		}
		if e := &set[at]; e.hash != hash {
			*e = prefix{hash: hash}
		}
		set[at].workers |= 1 << (slot % 64)
		set[at].used = x.turn
	}
}

// age is how long an entry was of no use; a free one is the oldest.
func (x *prefixIndex) age(e *prefix) uint32 {
	if e.hash == 0 {
		return ^uint32(0)
	}
	return x.turn - e.used
}

// forget clears a slot: the worker in it begins with an empty cache.
func (x *prefixIndex) forget(slot int) {
	for s := range x.sets {
		for i := range x.sets[s] {
			x.sets[s][i].workers &^= 1 << (slot % 64)
		}
	}
}
