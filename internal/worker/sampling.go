package worker

import (
	crand "crypto/rand"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/metronome-serve/metronome/internal/engine"
)

// Sampling travels from D to P inside RECOMPUTE, opaque to transfer: after a
// preemption P draws the next token and must draw the one that D would have
// drawn. Layout, little endian: version (1 byte); temperature, top p, min p,
// presence, frequency, repetition (float32 each); top k, choice, logprobs
// (int32 each); seed (uint64); number of biases (uint32), then id (int32) and
// bias (float32) of each.
const (
	samplingVersion = 1
	samplingHead    = 1 + 6*4 + 3*4 + 8 + 4
	maxBiases       = 1 << 16 // more than any vocabulary entry count a request may name
)

func encodeSampling(s *engine.Sampling) []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, samplingHead+8*len(s.LogitBias))
	b = append(b, samplingVersion)
	for _, f := range []float32{s.Temperature, s.TopP, s.MinP, s.Presence, s.Frequency, s.Repetition} {
		b = le.AppendUint32(b, math.Float32bits(f))
	}
	for _, i := range []int{s.TopK, s.Choice, s.Logprobs} {
		b = le.AppendUint32(b, uint32(int32(i)))
	}
	b = le.AppendUint64(b, s.Seed)
	b = le.AppendUint32(b, uint32(len(s.LogitBias)))
	for _, x := range s.LogitBias {
		b = le.AppendUint32(b, uint32(x.ID))
		b = le.AppendUint32(b, math.Float32bits(x.Add))
	}
	return b
}

// decodeSampling checks everything a peer could have put there: the sampler
// must never see a value that the HTTP side would have refused.
func decodeSampling(b []byte, vocab int) (engine.Sampling, error) {
	var s engine.Sampling
	le := binary.LittleEndian
	if len(b) < samplingHead {
		return s, fmt.Errorf("sampling is %d bytes, at least %d needed", len(b), samplingHead)
	}
	if b[0] != samplingVersion {
		return s, fmt.Errorf("sampling has version %d, this worker knows %d", b[0], samplingVersion)
	}
	at := 1
	u32 := func() uint32 { at += 4; return le.Uint32(b[at-4:]) }
	for _, f := range []*float32{&s.Temperature, &s.TopP, &s.MinP, &s.Presence, &s.Frequency, &s.Repetition} {
		*f = math.Float32frombits(u32())
	}
	for _, i := range []*int{&s.TopK, &s.Choice, &s.Logprobs} {
		*i = int(int32(u32()))
	}
	s.Seed = le.Uint64(b[at:])
	at += 8
	n := u32()
	if n > maxBiases || len(b) != samplingHead+8*int(n) {
		return s, fmt.Errorf("sampling of %d bytes cannot hold %d logit biases", len(b), n)
	}
	for range n {
		s.LogitBias = append(s.LogitBias, engine.Bias{ID: int32(u32()), Add: math.Float32frombits(u32())})
	}
	return s, s.Check(vocab)
}

// drawSeed chooses a seed for a request that brought none.
func drawSeed() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // never fails: it ends the process instead
	return binary.LittleEndian.Uint64(b[:])
}
