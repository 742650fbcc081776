//metronome:pure

package sched

import (
	"time"
)

// PeersConfig is what Peers needs to know. Zero takes the default in brackets.
type PeersConfig struct {
	Timeout           time.Duration // of one attempt, total [5s]
	Attempts          int           // per episode [15]
	Interval          time.Duration // start to start [1s]
	HeartbeatInterval time.Duration // [5s]
	HeartbeatTimeout  time.Duration // of one probe, total [3s]; connecting may take 2 s of it
	HeartbeatFailures int           // consecutive, to evict [2]
	ResolveTimeout    time.Duration // parallel info to link, in all [120s]
	MaxPerAddr        int           // requests waiting for one unresolved address [64]
	MaxUnresolved     int           // requests waiting for unresolved addresses in all [4096]
	MaxRecords        int           // [4096]
	IdleTTL           time.Duration // unused records go after [10m]
	RejectTTL         time.Duration // a known-bad record without instance id goes after [30s]
	Reject            bool          // --on-mismatch=reject; false: fatal

	Local ParallelInfo // our own sizes, page size, KV dtype, fingerprint, …
	DCP   int          // our decode context parallel size [1]
	Seed  uint64       // of the jitter
}

// ParallelInfo is a prefill's topology as its bootstrap registry tells it, or
// our own (PeersConfig.Local). Zero values of page size, dtype, layout,
// instance and fingerprint mean "not told" and match anything.
type ParallelInfo struct {
	TP, CP, DP, PP   int
	PageSize         int
	KVDType          string
	KVLayout         string
	AllocationPolicy string // "" is "early"
	FollowRoom       bool   // DP rank = room mod DP
	KVSharding       bool
	LayerSplit       bool
	Instance         string
	Fingerprint      string
}

// Welcome is what P says of itself in a link's handshake.
type Welcome struct {
	Instance    string
	Fingerprint string
	TP, DP      int
	PageSize    int
	KVDType     string
}

// RankKey names one prefill rank behind an address.
type RankKey struct{ DP, CP, TP, PP int }

// PeerKind is a kind of work on the peer network.
type PeerKind uint8

// Work that Peers asks for. All of it happens off the loop.
const (
	FetchInfo   PeerKind = iota + 1 // GET /route, all -1
	QueryRanks                      // POST /query_dp_ranks
	LookupRank                      // GET /route of one rank
	DialLink                        // connect and shake hands with one rank
	CloseLink                       // close a link; no completion. Text is the cause
	ProbeHealth                     // GET /health (heartbeat)
	CancelTry                       // end the try ID early; its own completion still comes
)

// PeerAction asks the driver for one try. Its completion is a PeerDone with
// the same Kind, ID and Gen.
type PeerAction struct {
	Kind    PeerKind
	ID      uint64 // unique in this core
	Gen     uint64 // the record's generation when the try started
	First   bool   // the first dial of an address goes before retries
	Addr    string // bootstrap address
	Timeout time.Duration
	Rooms   []int64 // QueryRanks; belongs to the driver
	Rank    RankKey // LookupRank, DialLink
	Link    LinkID  // DialLink, CloseLink
	LocalTP int     // DialLink: which of our ranks
	Target  string  // DialLink: rank_ip:rank_port
	// Instance is the instance id that DialLink expects, "": any. The driver
	// need not enforce it: Peers compares the WELCOME's itself.
	Instance string
	Attempt  int    // which start of its episode this is, from 1; for logs
	Text     string // CloseLink: why
}

// PeerDone is the completion of one try.
type PeerDone struct {
	Kind  PeerKind
	ID    uint64
	Gen   uint64
	Addr  string
	Link  LinkID
	Fault Fault
	Cause string // of a failure: short, for log and error

	Info     *ParallelInfo // FetchInfo
	Ranks    map[int64]int // QueryRanks: room → DP rank, unknown rooms left out
	Target   string        // LookupRank: ip:port
	Welcome  Welcome       // DialLink
	Instance string        // ProbeHealth: the answer's instance header, or ""
}

// Fault says whose failure a try was.
type Fault uint8

// Faults of a try.
const (
	OK         Fault = iota
	PeerFault        // the peer's: spends an attempt
	LocalFault       // ours (no descriptor, no port) or our own cancellation: spends nothing
	// MismatchFault (DialLink only): P refused us, or its WELCOME does not fit;
	// Cause names both values. When the refusal was about the instance id, the
	// driver sets Welcome.Instance to P's: that is a replacement, no mismatch.
	MismatchFault
)

// LinkHeard: a frame arrived on the link. At most once in 250 ms per link.
type LinkHeard struct{ Link LinkID }

// LinkEnded: an established link has closed by itself; not sent after a
// CloseLink. The grants on it fail by TransferFailed of their own.
type LinkEnded struct {
	Link  LinkID
	Cause string
}

func (*PeerDone) event()  {}
func (*LinkHeard) event() {}
func (*LinkEnded) event() {}

// Want asks Peers for the links of one request.
type Want struct {
	Req    ReqID
	Addr   string
	Room   int64
	DPRank int // -1: Peers finds out
}

// VerdictKind is what Peers found out about one request.
type VerdictKind uint8

// Verdicts.
const (
	Linked   VerdictKind = iota + 1 // all links are up
	Unlinked                        // a Linked request without a grant lost its peer; Peers goes on looking
	Lost                            // the request ends with Err: budget spent, mismatch, deadline, or its granted room's peer went away
)

// Verdict is handed out once for each change.
type Verdict struct {
	Kind  VerdictKind
	Req   ReqID
	Links []LinkID // Linked: all links of the room, ascending
	Err   *Error   // Lost
}
