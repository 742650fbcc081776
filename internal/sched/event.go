//metronome:pure

package sched

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Never is the deadline of something that waits for no timer.
const Never = time.Duration(math.MaxInt64)

// LateTurn is how late a turn must come for its passed deadlines to be armed
// once more (rule 20): the process was stopped or starved, the peers were not.
const LateTurn = time.Second

// ReqID names one request in one process. The driver numbers them from 1 and
// uses none twice.
type ReqID uint64

// GrantID names the pages that D opens to P for one room. One grant has the
// same id on all links of its room. The decode core never uses one twice.
type GrantID uint64

// LinkID names one connection of a pair of ranks, as the decode core numbers
// them. A link that is dialled again has another id.
type LinkID uint64

// BatchID names one forward pass.
type BatchID uint64

// Event is a stimulus of a core. Events are passed by pointer and belong to
// the caller again when Step returns.
type Event interface{ event() }

// Phase of a request. It changes only in a become… function.
type Phase uint8

// Phases of a request in the decode core, then in the prefill core.
const (
	Pending     Phase = iota + 1 // waits for its peer: parallel info, DP rank, rank addresses, links
	Preallocate                  // links are up; waits for pages
	Transfer                     // granted; pages are arriving
	Waiting                      // has all its pages; waits for a place in the batch
	Running                      // in the batch
	Finished                     // ended; the record is gone

	Bootstrapping // P: waits for the grant, not computing
	Queued        // P: may compute; waits for a place in a prefill batch
	Computing     // P: some chunks are done or under way
	InFlight      // P: computed; pages are on their way or wait for the grant
	Done
)

// newborn is the phase of a record that has not been placed yet.
const newborn Phase = 0

// changes asserts that a phase, or a claim's stage, may follow the one before.
func changes[P Phase | claimStage](machine string, is, to P, from []P) {
	if !slices.Contains(from, is) {
		panic(fmt.Sprintf("sched: a request of %s cannot go from %v to %v", machine, is, to))
	}
	if onEdge != nil {
		onEdge(machine, uint8(is), uint8(to))
	}
}

// onEdge hears of every change in tests, which compare what was taken with what
// the become… functions allow.
var onEdge func(machine string, from, to uint8)

// Tick tells the core that its deadline may have passed. The driver empties
// the inbox first.
type Tick struct{}

// Abort ends one request, in whichever phase it is, with this cause.
// A request that has ended already ignores it.
type Abort struct {
	Req   ReqID
	Cause *Error
}

// BatchDone says that the engine has finished a batch. Tokens[i] is the
// sampled token of row i of the batch, or -1 where none was asked. Err fails
// every row of the batch; Errs[i], where Errs is that long, row i alone.
type BatchDone struct {
	Batch  BatchID
	Tokens []int32
	Err    *Error
	Errs   []*Error
}

// err is why row i failed, or nil.
func (b *BatchDone) err(i int) *Error {
	if b.Err == nil && i < len(b.Errs) {
		return b.Errs[i]
	}
	return b.Err
}

// token is what was drawn for row i, of which one is wanted.
func (b *BatchDone) token(i int) (int32, *Error) {
	if err := b.err(i); err != nil {
		return -1, err
	}
	if i >= len(b.Tokens) || b.Tokens[i] < 0 {
		return -1, errorf(Internal, "the engine gave no token for row %d of batch %d", i, b.Batch)
	}
	return b.Tokens[i], nil
}

// StopAt is the verdict of a request's writer: the answer ends before output
// token Index (stop string met). Later tokens are discarded and not counted.
type StopAt struct {
	Req   ReqID
	Index int
}

func (*Tick) event()      {}
func (*Abort) event()     {}
func (*BatchDone) event() {}
func (*StopAt) event()    {}

// Batch is one forward pass. Its memory belongs to the core and stays
// untouched until the core is stepped with its BatchDone.
type Batch struct {
	ID      BatchID
	Prefill bool
	Rows    []BatchRow
}

// BatchRow is one sequence in a batch: Tokens at positions Start, Start+1, …,
// attending to everything before them through Pages.
type BatchRow struct {
	Req    ReqID
	Tokens []int32
	Start  int
	Pages  []kv.Page // block table, covers at least Start+len(Tokens) positions
	Sample bool      // draw the token that follows the last one
	Index  int       // index of that token among the request's output tokens
}

// Emit hands one output token to the request's writer. Row is the row of the
// batch just done that it came from, or -1: it is the first token, which came
// with FIRST (or from the prefill core of the same process).
type Emit struct {
	Req   ReqID
	Token int32
	Index int
	Row   int
}

// Reason says how a request ended.
type Reason uint8

// Ends of a request.
const (
	Stop      Reason = iota + 1 // a stop id, the end-of-sequence id, or the writer's StopAt
	Length                      // max tokens or the context is full
	Failed                      // Err says why
	Prefilled                   // P only: D has everything
)

// Finish ends one request: exactly one for each that was submitted, after its
// last Emit.
type Finish struct {
	Req    ReqID
	Reason Reason
	Err    *Error // set when Reason is Failed
	// Completion is the number of output tokens that count.
	Completion int
	Times      Times
}

// Times are when a request first got so far in its core; 0: it did not.
type Times struct {
	Linked  time.Duration // decode: every link to its prefill is up
	Granted time.Duration // decode has opened pages for it
}
