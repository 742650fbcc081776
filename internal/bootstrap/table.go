//metronome:pure

package bootstrap

import (
	"fmt"
	"slices"
	"time"
)

// TableConfig is what a Table needs to know. Zero takes the default in brackets.
type TableConfig struct {
	Bind         string        // host that the registry listens on; "" is a wildcard
	AnnounceHTTP bool          // answers carry prefill_http_port also where an SGLang prefill told it
	RoomTTL      time.Duration // a room's DP rank is known for one to two of these [120s]
	RoomsMax     int           // rooms in each of two generations [1<<20]
}

// Table is what a bootstrap registry knows of its one prefill worker. It is
// pure and owned by one caller at a time.
//
// Sizes and the other facts about the worker are set by the first registration
// that tells them and stay (SGLang's rule), until a registration with another
// instance id starts a fresh record. An instance id once replaced is dead here:
// of two processes that both think they are this worker, the older gives way
// for good instead of the two replacing each other for ever.
//
// Invariants: registered counts the keys of addrs that lie within info's sizes;
// no instance is both current and dead.
type Table struct {
	cfg        TableConfig
	info       Info // TP 0: nothing is registered
	addrs      map[Rank]endpoint
	registered int
	dead       []string // replaced instance ids, oldest first
	rooms      rooms
}

type endpoint struct {
	ip   string
	port int
}

// deadMax bounds the memory of replaced instances; the oldest is forgotten.
const deadMax = 256

// NewTable makes an empty Table.
func NewTable(cfg TableConfig) *Table {
	if cfg.RoomTTL == 0 {
		cfg.RoomTTL = 120 * time.Second
	}
	if cfg.RoomsMax == 0 {
		cfg.RoomsMax = 1 << 20
	}
	return &Table{cfg: cfg, addrs: map[Rank]endpoint{}, rooms: rooms{ttl: cfg.RoomTTL, max: cfg.RoomsMax}}
}

// RefusalKind says what is wrong with a registration.
type RefusalKind uint8

// Refusals of a registration.
const (
	BadAddress   RefusalKind = iota + 1 // a loopback address at a registry bound elsewhere
	OtherLayout                         // differs from the other ranks of the worker
	DeadInstance                        // the instance was replaced here
	TableFull                           // more ranks than a worker can have
)

// Refusal is why a registration was not taken; the table is as before.
type Refusal struct {
	Kind RefusalKind
	Text string
}

func (r *Refusal) Error() string { return r.Text }

// Register takes one rank's registration, or says why not. A rank that
// registers again changes its address and counts once.
func (t *Table) Register(r Registration) *Refusal {
	if loopback(r.IP) && !loopback(t.cfg.Bind) {
		return &Refusal{BadAddress, fmt.Sprintf("rank_ip %s is a loopback address, but this registry listens on %s: decodes elsewhere would dial themselves; register an address that they can reach",
			r.IP, bindText(t.cfg.Bind))}
	}
	if slices.Contains(t.dead, r.Instance) {
		return &Refusal{DeadInstance, fmt.Sprintf("instance %s was replaced here by instance %s; a registry serves one prefill worker", r.Instance, t.info.Instance)}
	}
	fresh := t.info.TP == 0 || (r.Instance != "" && r.Instance != t.info.Instance)
	if !fresh {
		if refusal := t.compare(&r); refusal != nil {
			return refusal
		}
	} else {
		t.replace(r.Instance)
	}
	t.learn(&r.Info)
	if _, again := t.addrs[r.Rank]; !again && t.info.holds(r.Rank) {
		t.registered++
	}
	t.addrs[r.Rank] = endpoint{r.IP, r.Port}
	return nil
}

// compare finds what keeps a registration out of the record that is there.
// Other sizes do not: the first writer's stay, as in SGLang.
func (t *Table) compare(r *Registration) *Refusal {
	switch _, again := t.addrs[r.Rank]; {
	case r.SpecLayout != t.info.SpecLayout:
		return &Refusal{OtherLayout, "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks"}
	case r.AllocationPolicy != t.info.AllocationPolicy:
		return &Refusal{OtherLayout, "Inconsistent prefill allocation policies"}
	case r.Fingerprint != "" && t.info.Fingerprint != "" && r.Fingerprint != t.info.Fingerprint:
		return &Refusal{OtherLayout, fmt.Sprintf("model fingerprint %s differs from %s of the other prefill ranks", r.Fingerprint, t.info.Fingerprint)}
	case !again && len(t.addrs) >= maxRanks:
		return &Refusal{TableFull, fmt.Sprintf("%d ranks are registered, no more fit", len(t.addrs))}
	}
	return nil
}

func (t *Table) replace(instance string) {
	if t.info.Instance != "" {
		if len(t.dead) == deadMax {
			t.dead = slices.Delete(t.dead, 0, 1)
		}
		t.dead = append(t.dead, t.info.Instance)
	}
	t.info = Info{Instance: instance}
	t.registered = 0
	clear(t.addrs)
	t.rooms.clear()
}

// learn sets what no registration of this record has told yet.
func (t *Table) learn(told *Info) {
	if t.info.TP == 0 {
		instance := t.info.Instance
		t.info = *told
		t.info.Instance, t.info.PrefillHTTPPort = instance, 0
	}
	if t.info.KVDType == "" {
		t.info.KVDType = told.KVDType
	}
	if t.info.KVLayout == "" {
		t.info.KVLayout = told.KVLayout
	}
	if t.info.Fingerprint == "" {
		t.info.Fingerprint = told.Fingerprint
	}
	// A Metronome prefill tells its port only when asked to; SGLang's always do.
	if t.info.PrefillHTTPPort == 0 && (told.Instance != "" || t.cfg.AnnounceHTTP) {
		t.info.PrefillHTTPPort = told.PrefillHTTPPort
	}
}

// Info is the worker's parallel info as far as it is known, the number of its
// ranks that are registered, and whether that is all of them.
func (t *Table) Info() (info Info, registered int, ready bool) {
	return t.info, t.registered, t.info.TP > 0 && t.registered == t.info.DP*t.info.CP*t.info.TP*t.info.PP
}

// Address is where a rank said that it can be reached.
func (t *Table) Address(r Rank) (ip string, port int, ok bool) {
	e, ok := t.addrs[r]
	return e.ip, e.port, ok
}

// SetRank notes the DP rank that holds a room.
func (t *Table) SetRank(now time.Duration, room int64, dp int) { t.rooms.set(now, room, dp) }

// RankOf is the DP rank of a room, if it is known.
func (t *Table) RankOf(now time.Duration, room int64) (dp int, ok bool) {
	return t.rooms.get(now, room)
}

// rooms is a map whose entries live for one to two ttl: two generations, and
// the older is dropped whole when the younger reaches its age or is full. So
// expiry costs nothing per entry, and a flood of rooms drops the oldest ones: a
// room is asked for within seconds of its registration.
type rooms struct {
	ttl        time.Duration
	max        int // of one generation
	young, old map[int64]int
	born       time.Duration // of young
}

func (r *rooms) set(now time.Duration, room int64, dp int) {
	r.turn(now)
	if _, ok := r.young[room]; !ok && len(r.young) >= r.max {
		r.old, r.young, r.born = r.young, nil, now
	}
	if r.young == nil {
		r.young = make(map[int64]int)
	}
	r.young[room] = dp
}

func (r *rooms) get(now time.Duration, room int64) (int, bool) {
	r.turn(now)
	if dp, ok := r.young[room]; ok {
		return dp, true
	}
	dp, ok := r.old[room]
	return dp, ok
}

func (r *rooms) turn(now time.Duration) {
	switch age := now - r.born; {
	case age >= 2*r.ttl:
		r.old, r.young, r.born = nil, nil, now
	case age >= r.ttl:
		r.old, r.young, r.born = r.young, nil, r.born+r.ttl
	}
}

func (r *rooms) clear() { r.old, r.young = nil, nil }

func bindText(host string) string {
	if host == "" {
		return "all addresses"
	}
	return host
}
