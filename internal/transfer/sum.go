package transfer

import (
	"hash/crc32"
	"unsafe"
)

// A checksum at the speed of memory. A core of 2.5 GHz sums 20 GB/s of what its
// cache holds by hash/crc32, which adds eight bytes at a time, and 60 GB/s by
// multiplying polynomials; it waits most of the time for what its cache does not
// hold: 6 GB/s. So each piece is summed while others are on their way to the
// cache: on P those that are summed next, on D those that the next read will write to.

// piece is what is summed between two looks ahead: not much more than the lines
// that a core can wait for at a time.
const piece = 2 << 10

// folded is what fold takes at a time, and least the shortest run that is worth it.
const (
	folded = 256
	least  = 2 * folded
)

// update adds bytes to a checksum, as crc32.Update does.
func update(sum uint32, b []byte) uint32 {
	if n := len(b) &^ (folded - 1); folds && n >= least {
		sum = ^fold(^sum, unsafe.SliceData(b), n)
		b = b[n:]
	}
	return crc32.Update(sum, castagnoli, b)
}

// lead is how far P looks ahead.
const lead = 4 << 10

// spans walks over buffers as if they were one.
type spans struct {
	bufs [][]byte
	at   int // into the first
}

// left tells whether bytes are left; then the first buffer has some.
func (s *spans) left() bool {
	for len(s.bufs) > 0 && s.at == len(s.bufs[0]) {
		s.bufs, s.at = s.bufs[1:], 0
	}
	return len(s.bufs) > 0
}

// take gives the next bytes, at most so many and as far as one buffer goes; nil: none are left.
func (s *spans) take(most int) []byte {
	if !s.left() {
		return nil
	}
	b := s.bufs[0][s.at:]
	b = b[:min(len(b), most)]
	s.at += len(b)
	return b
}

// pass goes n bytes on and looks at each stretch.
func (s *spans) pass(n int, look func(*byte, int)) {
	for n > 0 {
		b := s.take(n)
		if b == nil {
			return
		}
		look(unsafe.SliceData(b), len(b))
		n -= len(b)
	}
}

func skipped(*byte, int) {}

// sum adds n bytes of s to a checksum, and looks as far ahead as it goes.
func (s *spans) sum(sum uint32, n int, ahead *spans, look func(*byte, int)) uint32 {
	for n > 0 {
		b := s.take(min(n, piece))
		if b == nil {
			return sum
		}
		ahead.pass(len(b), look)
		sum = update(sum, b)
		n -= len(b)
	}
	return sum
}
