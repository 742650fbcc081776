//metronome:pure

package bootstrap

// Headers beyond SGLang's wire.
const (
	InstanceHeader    = "X-Metronome-Instance"
	FingerprintHeader = "X-Metronome-Fingerprint"
)

// Info is a prefill worker's parallel info. On a Registration it is what one
// rank says of the whole worker.
type Info struct {
	TP, CP, DP, PP   int    // sizes, at least 1
	PageSize         int    // tokens; 0: not told
	KVDType          string // "": not told
	KVLayout         string // "": not told
	AllocationPolicy string // "" is "early"
	SpecLayout       string // dsv41_spec_layout as JSON with sorted keys; "": none
	FollowRoom       bool   // DP rank = room mod DP
	KVSharding       bool
	LayerSplit       bool
	PrefillHTTPPort  int // 0: not announced

	Instance    string // X-Metronome-Instance; "": SGLang's, or not told
	Fingerprint string // X-Metronome-Fingerprint; "": not told
}

// Registration is one prefill rank with the address where decodes reach it.
type Registration struct {
	Info
	Rank Rank
	IP   string // address or name, IPv6 without brackets
	Port int
}

// Rank is the place of one prefill rank.
type Rank struct{ DP, CP, TP, PP int }

// Bounds on what a registration or an answer may say. They are far above any
// real deployment and keep a lie from costing memory.
const (
	maxRanks = 1 << 16 // DP·CP·TP·PP
	maxWord  = 128     // bytes of a dtype, layout, policy, instance id, fingerprint
	maxHost  = 255     // bytes of a rank's address
	maxSpec  = 16 << 10
)
