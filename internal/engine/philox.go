package engine

import "math/bits"

// philox is Philox4x32 with ten rounds: a counter-based random generator, which
// makes four words of a counter and a key and keeps no state. (Salmon, Moraes,
// Dror and Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.)
func philox(key uint64, ctr [4]uint32) [4]uint32 {
	k0, k1 := uint32(key), uint32(key>>32)
	for range 10 {
		h0, l0 := bits.Mul32(0xd2511f53, ctr[0])
		h1, l1 := bits.Mul32(0xcd9e8d57, ctr[2])
		ctr = [4]uint32{h1 ^ ctr[1] ^ k0, l1, h0 ^ ctr[3] ^ k1, l0}
		k0 += 0x9e3779b9
		k1 += 0xbb67ae85
	}
	return ctr
}

// uniform is the number in [0, 1) that decides the token at a position of one
// answer. It depends on nothing else, so an answer goes on identically on
// another worker, after a preemption, or beside other requests.
func uniform(seed uint64, choice, position int) float64 {
	r := philox(seed, [4]uint32{uint32(position), uint32(uint64(position) >> 32), uint32(choice), 0})
	return float64(float64(uint64(r[0])<<21|uint64(r[1])>>11) * 0x1p-53)
}
