//metronome:pure

package sched

import (
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// DecodeConfig is frozen by NewDecode. Zero takes the default in brackets.
type DecodeConfig struct {
	MaxRunning     int           // sequences in a batch [64]
	MaxQueued      int           // requests whose peer is known and that do not run yet [512]
	MaxGrants      int           // requests granted or waiting, and grants taken back but not quiesced [2*MaxRunning]
	Context        int           // tokens of prompt and answer together [8192]
	ReservedTokens int           // growth that admission keeps free for each sequence ahead [512]
	Vocab          int           // a first token outside [0, Vocab) fails its transfer [0: not checked]
	KVTimeout      time.Duration // silence about a granted transfer [30s]
	Serve          bool          // pages come by Adopt and go by Preempt: there are no peers
	PrefixCache    bool          // share and keep the pages of common prefixes; in serve the same for both cores
	LateTurn       time.Duration // a turn that comes later than this after its deadline was held up, and the peers were not [LateTurn]
	Peers          PeersConfig   // not looked at with Serve
}

// Submit gives a request to the decode core.
type Submit struct {
	Req       ReqID
	Prompt    []int32       // the core keeps it; never written by either side again
	MaxTokens int           // 0: the prompt is computed, and no token comes
	StopIDs   []int32       // ids that end the answer (end-of-sequence among them unless ignored); emitted and counted as the last token
	Addr      string        // bootstrap address host:port; "": pages come by Adopt
	Room      int64         // 0 … 2^63-1
	Digest    uint64        // of the prompt: P delivers only what it computed for the same
	DPRank    int           // the prefill's DP rank when the request names it, else -1
	Deadline  time.Duration // since process start; Never: none
}

// Adopt gives the decode core a request whose prompt this process has just
// computed (serve): the pages are already in the shared pool and change owner.
// It is never refused. For a request that was preempted (Index > 0), Prompt is
// that of the Preempt: prompt and output so far.
type Adopt struct {
	Submit
	Pages []kv.Page // of HandOver; belongs to the core from now on
	First int32     // the output token that follows Prompt
	Index int       // its index: 0, or that of the Preempt
}

// PagesLanded: every link of the grant has all its pages, FIRST and END ok.
type PagesLanded struct {
	Grant  GrantID
	First  int32
	Cached int // prompt tokens that P took from its prefix cache
}

// TransferFailed: the grant cannot complete. Its pages stay in quarantine
// until TransferQuiesced.
type TransferFailed struct {
	Grant GrantID
	Cause *Error
}

// TransferQuiesced: no link will write the grant's pages any more. It follows
// every Revoke and every TransferFailed, once, also when a Revoke crosses a
// PagesLanded on its way. It does not follow PagesLanded alone.
type TransferQuiesced struct{ Grant GrantID }

// GrantHeard: DATA, BUSY or END arrived for the grant. The driver sends it at
// most once a second for each grant.
type GrantHeard struct{ Grant GrantID }

func (*Submit) event()           {}
func (*Adopt) event()            {}
func (*PagesLanded) event()      {}
func (*TransferFailed) event()   {}
func (*TransferQuiesced) event() {}
func (*GrantHeard) event()       {}

// Grant opens pages to P. Recompute says that P shall compute these tokens
// anew (after a preemption) instead of waiting for a request of its own.
type Grant struct {
	Grant     GrantID
	Req       ReqID
	Room      int64
	Digest    uint64    // of Submit; 0 with Recompute
	Links     []LinkID  // all links of the room, ascending
	Prefix    int       // tokens that D holds already: whole pages, not sent
	Tokens    int       // tokens that P must deliver up to: pages cover [Prefix, Tokens)
	Pages     []kv.Page // destination, in order; entry i holds positions Prefix+i*page …
	Recompute []int32   // nil, or prompt and output so far
	Index     int       // Recompute: index of the output token that FIRST will carry
}

// Notice tells P of a room that was never granted: it has ended at D, or it
// waits there for pages, so that P does not take a busy D for a dead one.
type Notice struct {
	Link  LinkID
	Room  int64
	Waits bool
}

// Preempt tells the driver of serve that a running request lost its pages and
// must be prefilled again by the prefill core of the same process. The decode
// core has forgotten it: a request is in one core at a time, and that one ends it.
type Preempt struct {
	Req    ReqID
	Tokens []int32 // prompt and output so far
	Index  int     // index of the next output token
}

// DecodeReady is what the driver must do after a Step. All slices are reused
// at the next Step, except what Batch points to.
type DecodeReady struct {
	Emits    []Emit
	Finishes []Finish
	Batch    *Batch // at most one outstanding; nil: none to start
	Grants   []Grant
	Revokes  []GrantID // drop the grant's entries on all links, send ABORT
	Notices  []Notice
	Preempts []Preempt    // serve only
	Peer     []PeerAction // for the peer network
	Fatal    *Error       // sticky; every open request has ended; exit 1 within 1 s
	Deadline time.Duration
}
