//metronome:pure

package transfer

import (
	"fmt"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Memory is the KV bytes of one TP rank, as the engine keeps them.
type Memory interface {
	// Extent is the bytes of heads [head, head+heads) of one page in one
	// layer, contiguous and in place: heads*PageSize*TokenBytes bytes. Heads
	// count from the rank's own first head.
	Extent(layer int, page kv.Page, head, heads int) []byte
}

// Hello is what D says of itself on every link.
type Hello struct {
	Instance    string // random, new at every start; at most 128 bytes
	DP          int    // which of D's cores this is: grants are numbered per core
	Fingerprint string // of the model; "" matches any
	KVDType     string // "f16", "f32", "q8_0"; "" and "auto" match any
}

// Welcome is what P says of itself in answer.
type Welcome struct {
	Instance    string
	Fingerprint string
	TP, DP      int // sizes
	DPRank      int // of this sender
	PageSize    int // tokens
	KVDType     string
}

// LinkSpec names one link to dial.
type LinkSpec struct {
	Link      uint64 // the caller's number; used once
	Addr      string // rank_ip:rank_port
	LocalRank int    // which of our TP ranks

	DP, CP, TP, PP int    // the P rank that is wanted there
	Instance       string // the P instance expected there; "" any
}

// GrantSpec opens pages to P for one room.
type GrantSpec struct {
	Grant  uint64 // never used twice
	Room   int64
	Digest uint64    // of the prompt, which must be that of P's request; not looked at with Recompute
	Links  []uint64  // every link of the room: one for each pair of ranks that share heads
	Prefix int       // tokens that D holds already: whole pages, not sent
	Tokens int       // P delivers the positions [Prefix, Tokens)
	Pages  []kv.Page // destination; entry i holds the positions from Prefix+i*PageSize

	// Recompute, when not nil, asks P to compute these tokens anew (GRANT
	// becomes RECOMPUTE on the first link). FIRST then carries the output
	// token of this Index, drawn as Sampling says (opaque here).
	Recompute []int32
	Index     int
	Sampling  []byte
}

// First is the first token and what came with it.
type First struct {
	Token        int32
	Seed         uint64 // of the request; P draws one when the client gave none
	Logprob      float32
	Top          []TokenLogprob // at most MaxTop
	Cached       int            // prompt tokens that P took from its prefix cache
	PromptTokens int            // must equal GrantSpec.Tokens
}

// TokenLogprob is one of the likeliest tokens at a position.
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// Cause is why a room ended: a stable code (the words of the HTTP error body)
// and a text for people.
type Cause struct{ Code, Message string }

func (c *Cause) Error() string { return c.Code + ": " + c.Message }

// Codes of the causes that transfer itself gives.
const (
	CodeTransferFailed = "kv_transfer_failed"
	CodeOverloaded     = "overloaded"
	CodeInvalid        = "invalid_request"
)

// Event is what the Receiver tells D.
type Event interface{ event() }

// Landed: every page of the grant is here and verified on every link, and so
// are FIRST and each END. No Quiesced follows: nothing will write any more.
type Landed struct {
	Grant uint64
	First First
}

// Failed: the grant cannot complete. Quiesced follows.
type Failed struct {
	Grant uint64
	Cause Cause
}

// Quiesced: no link will write the grant's pages any more. It follows each
// Failed and each Revoke of an open grant, once. A Revoke that crosses with
// Landed gets one too; the grant is long unknown then and both are stale.
type Quiesced struct{ Grant uint64 }

// GrantHeard: DATA, BUSY, FIRST or END arrived for the grant; at most one a
// second for each grant.
type GrantHeard struct{ Grant uint64 }

// Begun: the first DATA of the grant is coming in.
type Begun struct{ Grant uint64 }

// LinkHeard: a frame arrived on the link; at most one in 250 ms for each link.
type LinkHeard struct{ Link uint64 }

// LinkEnded: an established link has failed. CloseLink gives none.
type LinkEnded struct {
	Link  uint64
	Cause string
}

func (*Landed) event()     {}
func (*Failed) event()     {}
func (*Quiesced) event()   {}
func (*GrantHeard) event() {}
func (*Begun) event()      {}
func (*LinkHeard) event()  {}
func (*LinkEnded) event()  {}

// GrantKey names a grant at P.
type GrantKey struct {
	Peer  uint64 // a D core, as this Sender numbers them from 1; none twice
	Grant uint64 // D's number
}

// SendSpec tells where a request's pages are.
type SendSpec struct {
	Room   int64
	Tokens int       // of the prompt
	Cached int       // tokens from P's prefix cache: final in every layer already
	Pages  []kv.Page // the whole prompt's block table; the Sender's until SendQuiesced or Received
}

// SenderEvent is what the Sender tells P.
type SenderEvent interface{ senderEvent() }

// Granted: the GRANTs of a room have come from every D rank at every P rank.
// The room stays parked until Bind or Refuse.
type Granted struct {
	Key       GrantKey
	Room      int64
	Digest    uint64
	Prefix    int
	Tokens    int
	Recompute []int32 // nil: a request of P's own is to come or there already
	Index     int
	Sampling  []byte
}

// Closed: D took the room back, or a link of it ended. Key.Grant is 0 when
// Granted was never told for it: find it by Room.
type Closed struct {
	Key   GrantKey
	Room  int64
	Cause *Cause
}

// Sent: the last DATA of the request has been written.
type Sent struct{ Req uint64 }

// Queued: a room waits at D for pages, so D is not gone, but busy. D says it
// again each second.
type Queued struct{ Room int64 }

// Received: D has everything and said so on every link.
type Received struct{ Req uint64 }

// SendFailed: the request does not fit the grant it was bound to.
type SendFailed struct {
	Req   uint64
	Cause *Cause
}

// SendQuiesced follows CloseSend: no frame that names the request's pages is
// queued or begun any more.
type SendQuiesced struct{ Req uint64 }

func (*Granted) senderEvent()      {}
func (*Closed) senderEvent()       {}
func (*Sent) senderEvent()         {}
func (*Queued) senderEvent()       {}
func (*Received) senderEvent()     {}
func (*SendFailed) senderEvent()   {}
func (*SendQuiesced) senderEvent() {}

// RefusedError is a handshake that one side answered with no, by name.
type RefusedError struct {
	Code string // one of the Refuse… words
	Text string // names both values
}

func (e *RefusedError) Error() string { return e.Text }

// Mismatch tells whether the two sides can never work together as they are
// configured (model, geometry, dtype, TP, protocol version).
func (e *RefusedError) Mismatch() bool { return e.Code == RefuseMismatch }

// Why a link is refused.
const (
	RefuseUnauthorized = "unauthorized" // token missing or wrong
	RefuseMismatch     = "mismatch"     // the two sides do not fit
	RefuseRank         = "rank"         // another rank than the one wanted: a stale address
	RefuseForeign      = "foreign"      // not this protocol
	RefuseInvalid      = "invalid"      // a HELLO that cannot be read
)

// ReplacedError is a handshake with another P instance than the one expected:
// the worker at that address was restarted. The link is closed.
type ReplacedError struct {
	Expected string
	Welcome  Welcome
}

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("prefill instance %q answers where %q was expected", e.Welcome.Instance, e.Expected)
}
