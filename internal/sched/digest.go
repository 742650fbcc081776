//metronome:pure

package sched

import (
	"crypto/sha256"
	"encoding/binary"
)

// Digest names a prompt: the first 64 bits of its SHA-256, four bytes a token,
// little-endian. The two legs of a room compare it, so that no request can be
// given the KV of another prompt, however it came by its room. It costs time
// proportional to the prompt; the loops are given it ready-made.
func Digest(prompt []int32) uint64 {
	h := sha256.New()
	var b [4096]byte
	for len(prompt) > 0 {
		n := min(len(prompt), len(b)/4)
		for i, t := range prompt[:n] {
			binary.LittleEndian.PutUint32(b[4*i:], uint32(t))
		}
		h.Write(b[:4*n])
		prompt = prompt[n:]
	}
	return binary.LittleEndian.Uint64(h.Sum(nil))
}
