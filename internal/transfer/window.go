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

// intake is D's side.
//
//	begin(n)  a DATA frame with n bytes of payload begins to arrive
//	end(n)    its payload has been read; gives the CREDIT to send, 0 for none yet
//
// Credit goes back in lumps of a quarter of the window, so that P always has
// three quarters when everything sent has been read, which is more than one frame.
type intake struct{ limit, open, owed int64 }

func newIntake(limit int) intake { return intake{limit: int64(limit)} }

func (w *intake) begin(n int) error {
	if int64(n) > w.limit-w.open {
		return breachf(whyCredit, "DATA of %d bytes, credit is %d", n, w.limit-w.open)
	}
	w.open += int64(n)
	return nil
}

func (w *intake) end(n int) (credit uint64) {
	w.owed += int64(n)
	if n < 0 || w.owed > w.open {
		panic(fmt.Sprintf("transfer: %d bytes consumed, %d arrived", w.owed, w.open))
	}
	if w.owed < w.limit/4 {
		return 0
	}
	credit = uint64(w.owed)
	w.open -= w.owed
	w.owed = 0
	return credit
}
