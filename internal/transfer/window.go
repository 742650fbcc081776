//metronome:pure

package transfer

import "fmt"

// Byte credit bounds the payload that is in flight on one link. D gives the
// whole window in HELLO; P takes from it before it begins a DATA frame, and D
// gives back what it has read, whatever became of it: a page, a room that was
// aborted, or a frame with a bad checksum. So rooms that end can leak none.

// window is P's side.
//
//	fits(n)    may a frame with n bytes of payload begin?
//	take(n)    it begins
//	refill(n)  CREDIT came
type window struct{ limit, free int64 }

func newWindow(limit uint64) window { return window{int64(limit), int64(limit)} }

func (w *window) fits(n int) bool { return int64(n) <= w.free }

func (w *window) take(n int) {
	if n < 0 || int64(n) > w.free {
		panic(fmt.Sprintf("transfer: take %d of %d bytes of credit", n, w.free))
	}
	w.free -= int64(n)
}

func (w *window) refill(n uint64) error {
	if n == 0 || n > uint64(w.limit-w.free) {
		return breachf(whyCredit, "CREDIT of %d bytes, %d are in flight", n, w.limit-w.free)
	}
	w.free += int64(n)
	return nil
}

// intake is D's side: read counts the payload of a DATA frame that has been
// read, and gives the CREDIT to send, 0 for none yet. Credit goes back in lumps
// of a quarter of the window, so that P has three quarters when everything
// sent has been read, which is more than one frame. A P that sends more than
// its credit waits in the socket: D has nothing to lose by it.
type intake struct{ limit, owed int64 }

func newIntake(limit int) intake { return intake{limit: int64(limit)} }

func (w *intake) read(n int) (credit uint64) {
	if w.owed += int64(n); w.owed >= w.limit/4 {
		credit, w.owed = uint64(w.owed), 0
	}
	return credit
}
