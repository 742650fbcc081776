package bootstrap

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// rank is a registration of a worker with tp and dp ranks.
func rank(tp, tpRank, dp, dpRank int) Registration {
	return Registration{
		Info: Info{TP: tp, CP: 1, DP: dp, PP: 1, PageSize: 16, KVDType: "f16", FollowRoom: true},
		Rank: Rank{TP: tpRank, DP: dpRank}, IP: "10.0.0.1", Port: 7000 + 100*dpRank + tpRank,
	}
}

func (r Registration) of(instance string) Registration { r.Instance = instance; return r }

func must(t *testing.T, table *Table, regs ...Registration) {
	t.Helper()
	for _, r := range regs {
		if refusal := table.Register(r); refusal != nil {
			t.Fatalf("Register(%v): %v", r, refusal)
		}
	}
}

func wantReady(t *testing.T, table *Table, registered int, ready bool) {
	t.Helper()
	if _, n, ok := table.Info(); n != registered || ok != ready {
		t.Fatalf("%d ranks registered, ready %v; want %d, %v", n, ok, registered, ready)
	}
}

func TestReadyCountsDistinctRanks(t *testing.T) {
	table := NewTable(TableConfig{})
	wantReady(t, table, 0, false)
	for range 5 {
		must(t, table, rank(2, 0, 2, 0)) // SGLang's registry would be ready after four
	}
	wantReady(t, table, 1, false)
	must(t, table, rank(2, 1, 2, 0), rank(2, 0, 2, 1))
	wantReady(t, table, 3, false)
	must(t, table, rank(2, 1, 2, 1))
	wantReady(t, table, 4, true)
	if ip, port, ok := table.Address(Rank{TP: 1, DP: 1}); ip != "10.0.0.1" || port != 7101 || !ok {
		t.Errorf("rank dp 1 tp 1 is at %s:%d, %v", ip, port, ok)
	}
	if _, _, ok := table.Address(Rank{TP: 2, DP: 1}); ok {
		t.Error("a rank that never registered has an address")
	}
}

func TestFirstWriterWins(t *testing.T) {
	table := NewTable(TableConfig{})
	first := rank(1, 0, 1, 0)
	first.KVDType = ""
	must(t, table, first)
	later := rank(4, 0, 1, 0)
	later.PageSize, later.FollowRoom, later.LayerSplit, later.KVSharding = 64, false, true, true
	later.KVDType, later.KVLayout, later.Port = "bf16", "head_major", 7777
	must(t, table, later)
	info, _, ready := table.Info()
	want := first.Info
	want.KVDType, want.KVLayout = "bf16", "head_major" // not told before
	if info != want || !ready {
		t.Errorf("after a registration with other sizes:\n got %+v, ready %v\nwant %+v, ready", info, ready, want)
	}
	if _, port, _ := table.Address(Rank{}); port != 7777 {
		t.Errorf("rank 0 is at port %d, want the later 7777", port)
	}
	must(t, table, rank(4, 3, 1, 0)) // outside the sizes in force: kept, not counted
	wantReady(t, table, 1, true)
}

func TestHTTPPortOnlyWhenAnnounced(t *testing.T) {
	sglang := rank(1, 0, 1, 0)
	sglang.PrefillHTTPPort = 30000
	for _, c := range []struct {
		name     string
		announce bool
		reg      Registration
		want     int
	}{
		{"SGLang always tells it", false, sglang, 0},
		{"the operator asks for it", true, sglang, 30000},
		{"ours tells it only when asked to", false, sglang.of("a"), 30000},
	} {
		table := NewTable(TableConfig{AnnounceHTTP: c.announce})
		must(t, table, c.reg)
		if info, _, _ := table.Info(); info.PrefillHTTPPort != c.want {
			t.Errorf("%s: the answer has port %d, want %d", c.name, info.PrefillHTTPPort, c.want)
		}
	}
}

// Nothing is left of an instance that another one has replaced. Shows F-19, F-21.
func TestAnotherInstanceStartsAFreshRecord(t *testing.T) {
	table := NewTable(TableConfig{})
	must(t, table, rank(1, 0, 1, 0)) // SGLang's, without an id
	must(t, table, rank(2, 0, 1, 0).of("a"))
	wantReady(t, table, 1, false)
	must(t, table, rank(2, 1, 1, 0).of("a"))
	wantReady(t, table, 2, true)
	table.SetRank(0, 5, 1)

	b := rank(1, 0, 1, 0).of("b")
	b.PageSize = 32
	must(t, table, b)
	wantReady(t, table, 1, true)
	if info, _, _ := table.Info(); info.Instance != "b" || info.PageSize != 32 || info.TP != 1 {
		t.Errorf("after the replacement: %+v", info)
	}
	if _, _, ok := table.Address(Rank{TP: 1}); ok {
		t.Error("an address of the replaced instance is still there")
	}
	if _, ok := table.RankOf(0, 5); ok {
		t.Error("a room of the replaced instance is still there")
	}
	// The replaced instance cannot come back, so that two live ones do not
	// replace each other for ever.
	if refusal := table.Register(rank(2, 0, 1, 0).of("a")); refusal == nil || refusal.Kind != DeadInstance {
		t.Errorf("the replaced instance was let in again: %v", refusal)
	}
	wantReady(t, table, 1, true)
	// A PUT without an id keeps to the record (first writer wins).
	must(t, table, rank(8, 0, 1, 0))
	if info, _, _ := table.Info(); info.Instance != "b" || info.TP != 1 {
		t.Errorf("a registration without instance changed the record: %+v", info)
	}
	for i := range 2 * deadMax {
		must(t, table, rank(1, 0, 1, 0).of(fmt.Sprint("c", i)))
	}
	if len(table.dead) != deadMax {
		t.Errorf("%d dead instances are kept, want %d", len(table.dead), deadMax)
	}
}

func TestRanksOfOneWorkerMustAgree(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(*Registration)
	}{
		{"allocation policy", func(r *Registration) { r.AllocationPolicy = "prefill_complete" }},
		{"spec layout", func(r *Registration) { r.SpecLayout = `{"block":4}` }},
		{"fingerprint", func(r *Registration) { r.Fingerprint = "beef" }},
	} {
		table := NewTable(TableConfig{})
		good := rank(2, 0, 1, 0).of("a")
		good.Fingerprint = "cafe"
		must(t, table, good)
		bad := rank(2, 1, 1, 0).of("a")
		c.spoil(&bad)
		if refusal := table.Register(bad); refusal == nil || refusal.Kind != OtherLayout {
			t.Errorf("another %s: refusal %v", c.name, refusal)
		}
		wantReady(t, table, 1, false)
		// As a new worker it is welcome.
		must(t, table, bad.of("b"))
	}
}

// An address that only its own host can reach is not taken where others would read it. Shows F-82.
func TestLoopbackAddresses(t *testing.T) {
	for _, c := range []struct {
		bind, ip string
		ok       bool
	}{
		{"127.0.0.1", "127.0.0.1", true},
		{"localhost", "::1", true},
		{"::1", "127.0.0.9", true},
		{"127.0.0.1", "10.0.0.1", true},
		{"10.0.0.1", "10.0.0.2", true},
		{"10.0.0.1", "127.0.0.1", false},
		{"0.0.0.0", "127.0.0.1", false},
		{"", "localhost", false},
		{"::", "::ffff:127.0.0.1", false},
		{"registry.example", "::1", false},
	} {
		table := NewTable(TableConfig{Bind: c.bind})
		r := rank(1, 0, 1, 0)
		r.IP = c.ip
		refusal := table.Register(r)
		if (refusal == nil) != c.ok {
			t.Errorf("%s at a registry on %q: refusal %v", c.ip, c.bind, refusal)
		}
		if refusal != nil && c.bind != "" && (!strings.Contains(refusal.Text, c.ip) || !strings.Contains(refusal.Text, c.bind)) {
			t.Errorf("the refusal does not name both addresses: %s", refusal)
		}
		wantReady(t, table, map[bool]int{true: 1}[c.ok], c.ok)
	}
}

// Sizes may be as large as the number of ranks allows, alone and multiplied.
func TestSizesAreBounded(t *testing.T) {
	for info, want := range map[Info]bool{
		{DP: 1, CP: 1, TP: maxRanks, PP: 1}: true, {DP: 1, CP: 1, TP: maxRanks + 1, PP: 1}: false, {DP: 1, CP: 1, TP: 0, PP: 1}: false,
		{DP: 2, CP: 1, TP: maxRanks / 2, PP: 1}: true, {DP: 3, CP: 1, TP: maxRanks / 2, PP: 1}: false,
	} {
		if info.sized() != want {
			t.Errorf("%+v: sized is %v", info, !want)
		}
	}
}

// A worker has a bounded number of ranks. Shows F-78.
func TestTableIsBounded(t *testing.T) {
	table := NewTable(TableConfig{})
	must(t, table, rank(1, 0, 1, 0))
	for i := 1; i < maxRanks; i++ {
		r := rank(1, 0, 1, 0)
		r.Rank.TP = i
		must(t, table, r)
	}
	r := rank(1, 0, 1, 0)
	r.Rank.TP = maxRanks
	if refusal := table.Register(r); refusal == nil || refusal.Kind != TableFull {
		t.Errorf("rank %d was taken: %v", maxRanks, refusal)
	}
	must(t, table, rank(1, 0, 1, 0)) // those that are there may change their address
	wantReady(t, table, 1, true)
}

// A room is forgotten. Shows F-29.
func TestRoomsLiveOneToTwoIntervals(t *testing.T) {
	table := NewTable(TableConfig{})
	const ttl = 120 * time.Second
	for _, c := range []struct{ set, dies time.Duration }{
		{0, 2 * ttl}, {ttl - 1, 2 * ttl}, {ttl, 3 * ttl}, {ttl + 1, 3 * ttl}, {10 * ttl, 12 * ttl},
	} {
		table.rooms = rooms{ttl: ttl, max: 100}
		table.RankOf(0, 0)
		table.SetRank(c.set, 7, 3)
		for _, now := range []time.Duration{c.set, c.set + ttl - 1} {
			if dp, ok := table.RankOf(now, 7); dp != 3 || !ok {
				t.Errorf("a room set at %v is %d, %v at %v; want 3", c.set, dp, ok, now)
			}
		}
		if _, ok := table.RankOf(c.set+2*ttl, 7); ok {
			t.Errorf("a room set at %v is still known at %v", c.set, c.set+2*ttl)
		}
	}
	table.rooms = rooms{ttl: ttl, max: 100}
	table.SetRank(0, 7, 3)
	table.SetRank(ttl, 7, 4) // a later one is over the older
	if dp, _ := table.RankOf(ttl, 7); dp != 4 {
		t.Errorf("a room set again is %d, want 4", dp)
	}
}

// Rooms without end cost bounded memory, and those of now stay known. Shows F-29.
func TestFloodOfRoomsDropsTheOldest(t *testing.T) {
	table := NewTable(TableConfig{RoomsMax: 1000})
	for i := range int64(100_000) {
		table.SetRank(0, i, int(i%8))
		if n := len(table.rooms.young) + len(table.rooms.old); n > 2000 {
			t.Fatalf("%d rooms are kept, want at most 2000", n)
		}
		if dp, ok := table.RankOf(0, max(0, i-999)); !ok || dp != int(max(0, i-999)%8) {
			t.Fatalf("after room %d the room %d is forgotten; the last 1000 must stay", i, max(0, i-999))
		}
	}
}

// TestShort: what a peer said is told in one line that ends.
func TestShort(t *testing.T) {
	for in, want := range map[string]string{
		"a\nb\x00c":              "a b c",
		" fine ":                 "fine",
		strings.Repeat("x", 120): strings.Repeat("x", 120),
		strings.Repeat("x", 121): strings.Repeat("x", 120) + "…",
	} {
		if got := short(in); got != want {
			t.Errorf("%q becomes %q", in, got)
		}
	}
}

// TestLongHosts: a name may be as long as names can be.
func TestLongHosts(t *testing.T) {
	for n, want := range map[int]bool{maxHost: true, maxHost + 1: false} {
		if _, err := CheckHost(strings.Repeat("a", n)); (err == nil) != want {
			t.Errorf("a name of %d bytes: %v", n, err)
		}
	}
}

// TestHostLetters: every letter of the alphabet may stand in a name, and a name
// of this machine is one however it is written.
func TestHostLetters(t *testing.T) {
	for _, host := range []string{"abcxyz.ABCXYZ", "a-0_9.z"} {
		if got, err := CheckHost(host); got != host || err != nil {
			t.Errorf("%q: %q, %v", host, got, err)
		}
	}
	for _, host := range []string{"a@b", "a[b", "a`b", "a{b", "a/b", "a:b"} {
		if _, err := CheckHost(host); err == nil {
			t.Errorf("%q is taken for a name", host)
		}
	}
	for host, want := range map[string]bool{"LocalHost.": true, "localhost": true, "127.0.0.1": true, "::1": true, "localhosts": false, "10.0.0.1": false} {
		if loopback(host) != want {
			t.Errorf("%q: loopback is %v", host, !want)
		}
	}
}
