package sim

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/sched"
)

// Plan is everything that a run depends on: the fleet, what is asked of it,
// and what goes wrong. The same plan gives the same run, event for event.
type Plan struct {
	Seed     uint64 // of delays inside the run
	Prefills []int  // TP of each
	DP       []int  `json:",omitempty"` // DP ranks of each prefill; left out: 1
	Decodes  []int

	PrefillPages, DecodePages, PageSize int
	MaxRunning, MaxQueued, Chunk        int
	Reserved                            int // tokens
	PrefixCache                         bool
	PrefillRate                         float64 // tokens/s
	DecodeBase                          time.Duration

	Attempts         int
	Interval         time.Duration
	Timeout          time.Duration // of an attempt
	Heartbeat        time.Duration // interval
	ResolveTimeout   time.Duration
	MaxPerAddr       int // requests that wait for one unresolved address
	KVTimeout        time.Duration
	BootstrapTimeout time.Duration
	Probes           bool          // the router probes its workers
	Boot             time.Duration // how long a prefill takes to register
	FollowRoom       bool          // a room's DP rank follows from its number, else the registry is asked
	Retries          int           // further pairs before the first byte
	Migrations       int           // moves of a stream after it
	Blocking         bool          `json:",omitempty"` // decode workers wait for registries on their loops

	Net      NetPlan
	Calm     time.Duration // when every fault has gone
	Requests []Request
	Faults   []Fault
}

// NetPlan is the network between healthy hosts.
type NetPlan struct {
	Delay, Jitter time.Duration // of each message: from Delay to Delay + Jitter
	Bandwidth     int64         // bytes/s of each connection
}

// Request is one request of a client.
type Request struct {
	ID              int
	At              time.Duration
	Prefix, Length  int // of the prompt: so many tokens, the first of which depend on Prefix alone
	MaxTokens       int
	Seed            uint64 // 0: none, the prefill draws one
	Temperature     int    // 0: greedy
	Prefill, Decode int    // of the first attempt; the next ones go round
	Named           int    `json:",omitempty"` // the DP rank that it names, from 1; 0: none
	Timeout         time.Duration
	Leaves          time.Duration // the client goes away so long after its request; 0: it stays
	Must            bool          // it comes when all is well and must be served
}

// prompt is a request's tokens: half of them are shared by all with its Prefix.
func (q *Request) prompt() []int32 {
	tokens := make([]int32, q.Length)
	for i := range tokens {
		tokens[i] = int32(uint(q.Prefix*31+i*7) % 251)
		if i >= q.Length/2 {
			tokens[i] = int32(uint(q.ID*17+i*11) % 251)
		}
	}
	return tokens
}

// Fault is something that goes wrong, and how long it lasts.
type Fault struct {
	Kind   FaultKind
	At     time.Duration
	For    time.Duration
	On, To string // process names; To where the kind has two
	N      int    // a count or a choice, by kind
}

// FaultKind is a kind of fault.
type FaultKind string

// The kinds of faults. Each seed draws which of them exist in its world.
const (
	Stop      FaultKind = "stop"      // SIGSTOP, SIGCONT after For
	Starve    FaultKind = "starve"    // no memory or no processor: On runs 50 ms, then not for N ms, and so on
	Leap      FaultKind = "leap"      // the clock of On leaps N ms forward
	Kill      FaultKind = "kill"      // SIGKILL; the same worker starts again after For
	Reborn    FaultKind = "reborn"    // the same, with TP N%10 and DP N/10
	Impostor  FaultKind = "impostor"  // the same, with another model, until Calm
	Vanish    FaultKind = "vanish"    // the host answers nothing any more; it starts again after For
	Cut       FaultKind = "cut"       // every connection between On and To is reset
	Block     FaultKind = "block"     // nothing arrives from On at To
	Slow      FaultKind = "slow"      // messages from On to To take N ms longer
	Trickle   FaultKind = "trickle"   // N bytes/s pass from On to To on each connection
	Registry  FaultKind = "registry"  // the registry of On has mood N
	Rename    FaultKind = "rename"    // the name On leads to To
	Corrupt   FaultKind = "corrupt"   // one byte of every Nth long frame from On changes
	Lose      FaultKind = "lose"      // every Nth long frame from On is left out
	Duplicate FaultKind = "duplicate" // every Nth long frame from On comes twice
	Storm     FaultKind = "storm"     // the clients of all open requests go away
	Drain     FaultKind = "drain"     // SIGTERM, with N ms for what is open; SIGKILL and another start after For
)

var faultKinds = []FaultKind{Drain, Stop, Starve, Leap, Kill, Reborn, Impostor, Vanish, Cut, Block, Slow, Trickle, Registry, Rename, Corrupt, Lose, Duplicate, Storm}

// Shape is what a drawn plan looks like from outside.
type Shape struct {
	Prefills, Decodes, Requests int
}

// Draw makes the plan of a seed.
func Draw(seed uint64, s Shape) *Plan {
	r := rand.New(rand.NewPCG(seed, 0x6d6574726f6e6f6d))
	pick := func(of ...int) int { return of[r.IntN(len(of))] }
	span := func(low, high time.Duration) time.Duration { return low + time.Duration(r.Int64N(int64(high-low)+1)) }
	p := &Plan{
		Seed: seed, PageSize: pick(4, 8, 16), PrefillPages: pick(24, 64, 256), DecodePages: pick(24, 64, 256),
		MaxRunning: pick(2, 8, 32), MaxQueued: pick(16, 512), Chunk: pick(16, 64, 512), Reserved: pick(1, 16, 512),
		PrefixCache: r.IntN(4) > 0, PrefillRate: float64(pick(2000, 20000)), DecodeBase: time.Duration(pick(2, 8)) * time.Millisecond,
		Attempts: pick(2, 4, 15), Interval: time.Duration(pick(300, 1000)) * time.Millisecond, Timeout: time.Duration(pick(300, 1000, 5000)) * time.Millisecond,
		Heartbeat: time.Duration(pick(1, 5)) * time.Second, ResolveTimeout: time.Duration(pick(10, 120)) * time.Second,
		KVTimeout: time.Duration(pick(3, 30)) * time.Second, BootstrapTimeout: time.Duration(pick(5, 60)) * time.Second,
		Retries: r.IntN(3), Migrations: r.IntN(3), MaxPerAddr: pick(4, 64),
		Net: NetPlan{Delay: span(20*time.Microsecond, 2*time.Millisecond), Jitter: span(0, 5*time.Millisecond),
			Bandwidth: int64(pick(1, 10, 1000)) * 1_000_000},
		Calm: span(5*time.Second, 30*time.Second),
	}
	p.Prefills, p.Decodes = make([]int, s.Prefills), make([]int, s.Decodes)
	for i := range p.Prefills {
		p.Prefills[i] = pick(1, 1, 2, 4)
	}
	for i := range p.Decodes {
		p.Decodes[i] = pick(1, 1, 2)
	}
	p.drawFaults(r, span)
	p.drawRequests(r, s)
	p.mustRequests(s)
	p.drawRanks(r, pick)
	p.Boot, p.Probes = span(0, 200*time.Millisecond), r.IntN(2) == 0
	return p
}

// drawRanks gives the prefills of half of the worlds DP ranks.
func (p *Plan) drawRanks(r *rand.Rand, pick func(...int) int) {
	p.FollowRoom = r.IntN(3) == 0
	if r.IntN(2) == 0 {
		return
	}
	for range p.Prefills {
		p.DP = append(p.DP, pick(1, 2, 3))
	}
	for i := range p.Requests {
		if q := &p.Requests[i]; r.IntN(6) == 0 && !q.Must {
			q.Named = pick(1, 1, 2, 3)
		}
	}
	for i := range p.Faults {
		if f := &p.Faults[i]; f.Kind == Reborn {
			f.N += 10 * pick(1, 2, 3)
		}
	}
}

// dp is the number of DP ranks of a prefill.
func (p *Plan) dp(prefill int) int {
	if prefill < len(p.DP) {
		return max(1, p.DP[prefill])
	}
	return 1
}

func (p *Plan) drawRequests(r *rand.Rand, s Shape) {
	room := min(p.PrefillPages, p.DecodePages) * p.PageSize
	busy := p.Calm
	if r.IntN(3) == 0 {
		busy = time.Second // all at once
	}
	for i := range s.Requests {
		q := Request{ID: i + 1, At: time.Duration(r.Int64N(int64(busy))), Prefix: r.IntN(4), Length: 1 + r.IntN(min(60, room/3)),
			MaxTokens: 1 + r.IntN(24), Prefill: r.IntN(s.Prefills), Decode: r.IntN(s.Decodes), Temperature: r.IntN(2),
			Timeout: time.Duration(5+r.IntN(40)) * time.Second}
		if r.IntN(3) > 0 {
			q.Seed = r.Uint64()
		}
		if r.IntN(10) == 0 {
			q.Leaves = time.Duration(r.Int64N(int64(3 * time.Second)))
		}
		p.Requests = append(p.Requests, q)
	}
}

// mustRequests are those that come when all is well: one for each pair.
func (p *Plan) mustRequests(s Shape) {
	at := p.Calm + healing
	if slices.ContainsFunc(p.Faults, func(f Fault) bool { return f.Kind == Rename || f.Kind == Registry && f.N == int(misranks) }) {
		at += returning + p.BootstrapTimeout
	}
	for i := range s.Prefills {
		for j := range s.Decodes {
			p.Requests = append(p.Requests, Request{ID: len(p.Requests) + 1, At: at, Prefix: 9, Length: 20, MaxTokens: 5,
				Prefill: i, Decode: j, Timeout: 20 * time.Second, Must: true})
		}
	}
}

// A new request must be served so long after the last fault: what is known of a
// prefill lives until the answer to its next heartbeat, 5 s and a way there and
// back from the one that still met the impostor. A prefill whose
// name led elsewhere is believed again only some time after (rule 15), and the
// two legs of what was asked meanwhile wait at different prefills for a room
// that never comes, until one of them gives up.
const (
	healing   = 6 * time.Second
	returning = 10 * time.Second
)

func (p *Plan) drawFaults(r *rand.Rand, span func(low, high time.Duration) time.Duration) {
	var kinds []FaultKind
	for _, k := range faultKinds {
		if r.IntN(3) == 0 {
			kinds = append(kinds, k)
		}
	}
	if len(kinds) == 0 || r.IntN(20) == 0 {
		return
	}
	var names []string
	for i := range p.Prefills {
		names = append(names, fmt.Sprintf("p%d", i))
	}
	for i := range p.Decodes {
		names = append(names, fmt.Sprintf("d%d", i))
	}
	for range 1 + r.IntN(12) {
		f := Fault{Kind: kinds[r.IntN(len(kinds))], At: span(0, p.Calm*9/10), On: names[r.IntN(len(names))]}
		f.For = min(span(10*time.Millisecond, 15*time.Second), p.Calm-f.At)
		if r.IntN(2) == 0 {
			f.For = min(span(10*time.Millisecond, time.Second), f.For)
		}
		f.N = p.drawFault(r, &f, names)
		p.Faults = append(p.Faults, f)
	}
}

// drawFault fills in what a kind of fault needs, and gives its N.
func (p *Plan) drawFault(r *rand.Rand, f *Fault, names []string) int {
	prefill := func() string { return names[r.IntN(len(p.Prefills))] }
	decode := func() string { return names[len(p.Prefills)+r.IntN(len(p.Decodes))] }
	switch f.Kind {
	case Cut, Block, Slow, Trickle:
		f.On, f.To = prefill(), decode()
		if r.IntN(4) == 0 {
			f.On = "router"
		}
		if r.IntN(2) == 0 {
			f.On, f.To = f.To, f.On
		}
		if f.Kind == Trickle {
			return 50 + r.IntN(20000)
		}
		return 1 + r.IntN(1500)
	case Starve:
		return 1 + r.IntN(1500)
	case Leap:
		return 1 + r.IntN(20000)
	case Registry:
		f.On = prefill()
		return 1 + r.IntN(moods-1)
	case Rename, Impostor:
		f.On, f.To = prefill(), prefill()
	case Reborn:
		f.On = prefill()
		return []int{1, 2, 4}[r.IntN(3)]
	case Corrupt, Lose, Duplicate:
		f.On = prefill()
		return 1 + r.IntN(5)
	case Drain:
		if r.IntN(5) == 0 {
			f.On = "router"
		}
		return 1 + r.IntN(8000)
	}
	return 0
}

// peers is what a decode core is told of its peers.
func (p *Plan) peers(local sched.ParallelInfo, seed uint64) sched.PeersConfig {
	return sched.PeersConfig{Timeout: p.Timeout, Attempts: p.Attempts, Interval: p.Interval, HeartbeatInterval: p.Heartbeat,
		ResolveTimeout: p.ResolveTimeout, MaxPerAddr: p.MaxPerAddr, Reject: true, Local: local, Seed: seed}
}

// Encode writes a plan for people and for Decode.
func (p *Plan) Encode() []byte {
	b, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		panic(err) // it has no cycles, channels or functions
	}
	return append(b, '\n')
}

// Decode reads what Encode wrote.
func Decode(b []byte) (*Plan, error) {
	p := new(Plan)
	if err := json.Unmarshal(b, p); err != nil {
		return nil, fmt.Errorf("not a plan: %w", err)
	}
	switch {
	case len(p.Prefills) == 0 || len(p.Decodes) == 0 || len(p.Prefills)+len(p.Decodes) > 256:
		return nil, fmt.Errorf("a plan with %d prefills and %d decodes; 1 to 256 workers would be right", len(p.Prefills), len(p.Decodes))
	case p.PageSize < 1 || p.PrefillPages < 1 || p.DecodePages < 1 || p.Net.Bandwidth < 1 || p.Chunk < p.PageSize:
		return nil, fmt.Errorf("a plan with %d and %d pages of %d tokens, chunks of %d, %d bytes/s", p.PrefillPages, p.DecodePages, p.PageSize, p.Chunk, p.Net.Bandwidth)
	}
	return p, nil
}
