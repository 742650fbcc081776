//metronome:pure

package sched

import (
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// PrefillConfig is frozen by NewPrefill. Zero takes the default in brackets.
type PrefillConfig struct {
	MaxRunning       int           // prompts in a batch [64]
	MaxQueued        int           // requests that do not compute yet [512]
	MaxParked        int           // grants whose request has not come yet [4096]
	Chunk            int           // tokens of one batch, over all its rows; at least a page [512]
	Context          int           // tokens of a prompt [8192]
	BootstrapTimeout time.Duration // how long a request waits for its grant or a word of it, and a grant for its request [300s]
	PrefixCache      bool          // share and keep the pages of common prefixes; in serve the same for both cores
}

// SubmitPrefill gives a request to the prefill core.
type SubmitPrefill struct {
	Req       ReqID
	Prompt    []int32
	Room      int64  // -1: local (serve): no grant, pages are handed over
	Digest    uint64 // of the prompt: a grant must have the same; 0 with Grant
	MaxTokens int    // local: output tokens still wanted, which must fit beside the prompt; else 0
	Index     int    // index of the output token to draw after the prompt: 0, or more in a recompute
	MaxHit    int    // 0: no prefix hit; a prefix hit covers at most this many tokens; never more than len(Prompt)-1
	Deadline  time.Duration
	Begun     bool // the answer has begun on another worker: it goes before those that have not
	// Grant is set when the request came as RECOMPUTE: it has no HTTP leg.
	// RoomGranted with the same key follows it.
	Grant GrantKey
}

// GrantKey names a grant at P: D's instance (0 … for each D process met, as
// the driver numbers them) and D's number for it.
type GrantKey struct {
	Peer  uint64
	Grant GrantID
}

// RoomGranted: every D rank that shares this room has sent its GRANT on every
// link. The driver joins them (transfer.Sender).
type RoomGranted struct {
	Key    GrantKey
	Room   int64
	Digest uint64 // of D's prompt
	Prefix int    // tokens that D holds already
	Tokens int    // prompt tokens, must equal the request's
}

// RoomClosed: D took the grant back (ABORT), or a link of it ended.
// Cause says which. A grantless ABORT (notice) has Key.Grant 0 and the room.
type RoomClosed struct {
	Key   GrantKey
	Room  int64
	Cause *Error
}

// RoomQueued: the room waits at D for pages. D is busy, not gone.
type RoomQueued struct{ Room int64 }

// Received: D has everything and said so on every link. The request is done.
type Received struct{ Req ReqID }

// SendFailed: the pages of a request cannot be delivered.
type SendFailed struct {
	Req   ReqID
	Cause *Error
}

// SendQuiesced: after CloseSend, no frame that names the request's pages is
// queued or begun any more.
type SendQuiesced struct{ Req ReqID }

func (*SubmitPrefill) event() {}
func (*RoomGranted) event()   {}
func (*RoomClosed) event()    {}
func (*RoomQueued) event()    {}
func (*Received) event()      {}
func (*SendFailed) event()    {}
func (*SendQuiesced) event()  {}

// OpenSend tells the sender where a request's pages are. It comes before the
// first batch of the request, and again (same Req) when the request was
// restarted after it gave its pages up before its grant.
type OpenSend struct {
	Req    ReqID
	Room   int64
	Tokens int       // prompt tokens
	Cached int       // tokens that lie in the prefix cache already: final in every layer
	Pages  []kv.Page // the whole prompt's block table; belongs to the sender until SendQuiesced or Received
}

// BindSend joins an open send to the grant that D opened for its room: from
// now on final pages go out.
type BindSend struct {
	Req ReqID
	Key GrantKey
}

// CloseSend ends a send: queued frames are dropped, a begun one is finished,
// END goes out with the cause (nil when D asked for it). SendQuiesced follows,
// also when a Received or SendFailed of the same request crosses it.
type CloseSend struct {
	Req   ReqID
	Cause *Error
}

// RefuseGrant answers a grant that no request will serve (END with the cause).
type RefuseGrant struct {
	Key   GrantKey
	Cause *Error
}

// HandOver (serve) passes a computed prompt to the decode core: the pages
// change owner, and the prefill core has forgotten the request. The driver
// steps the decode core with the Adopt at once, whatever else it knows.
type HandOver struct {
	Req    ReqID
	Prompt []int32
	Pages  []kv.Page
	First  int32 // the output token that follows Prompt
	Index  int   // its index
	Row    int   // the row of the batch just done that it came from
	Cached int   // prompt tokens that were in the prefix cache
}

// PrefillReady is what the driver must do after a Step, in the order of the
// fields. All slices are reused at the next Step, except what Batch points to.
type PrefillReady struct {
	Firsts    []Emit // the sampled first token of a request, for FIRST; Row as in Emit
	Opens     []OpenSend
	Binds     []BindSend
	Closes    []CloseSend
	Refuses   []RefuseGrant
	HandOvers []HandOver
	Finishes  []Finish
	Batch     *Batch // at most one outstanding; nil: none to start
	Deadline  time.Duration
}
