package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// TestAlarmsOrder: alarms fire by time and then by setting; one that is set
// while they fire waits for the next call.
func TestAlarmsOrder(t *testing.T) {
	var h alarms
	var fired []int
	all := make([]alarm, 50)
	for i := range all {
		all[i].due = func(now time.Duration) {
			fired = append(fired, i)
			if i == 7 {
				h.set(&all[7], now, 0)
			}
		}
	}
	for i := range all {
		h.set(&all[i], 0, time.Duration(i*37%10))
	}
	h.set(&all[3], 0, 100) // moved
	h.stop(&all[4])
	h.stop(&all[4])
	fire := func(now time.Duration) {
		for seq := h.seq; h.fire(now, seq); {
		}
	}
	fire(9)
	if len(fired) != 48 || h.next() != 9 || !all[7].isSet() || !all[3].isSet() || all[4].isSet() {
		t.Fatalf("fired %v, next %v", fired, h.next())
	}
	for i := 1; i < len(fired); i++ {
		a, b := fired[i-1], fired[i]
		if x, y := a*37%10, b*37%10; x > y || x == y && a > b {
			t.Errorf("%d (at %d) fired before %d (at %d)", a, x, b, y)
		}
	}
	fired = nil
	fire(9)
	fire(100)
	if fmt.Sprint(fired) != "[7 7 3]" {
		t.Errorf("then %v", fired)
	}
}

// TestAlarmsRearm: what passed while the process was stopped gets that time
// back, up to what it had, once; what had not passed stays as it is.
func TestAlarmsRearm(t *testing.T) {
	var h alarms
	short, long, later := &alarm{}, &alarm{}, &alarm{}
	for _, a := range []*alarm{short, long, later} {
		a.due = func(time.Duration) {}
	}
	h.set(short, 0, 2*time.Second)
	h.set(long, 0, 60*time.Second)
	h.set(later, 0, 90*time.Second)
	h.rearm(70*time.Second, 68*time.Second)
	if short.at != 72*time.Second || long.at != 130*time.Second || later.at != 90*time.Second {
		t.Errorf("re-armed for %v, %v, %v", short.at, long.at, later.at)
	}
	h.rearm(140*time.Second, 50*time.Second)
	if short.at != 72*time.Second || long.at != 130*time.Second || later.at != 190*time.Second {
		t.Errorf("re-armed again for %v, %v, %v", short.at, long.at, later.at)
	}
	h.set(short, 140*time.Second, 141*time.Second)
	h.rearm(150*time.Second, 9*time.Second)
	if short.at != 151*time.Second {
		t.Errorf("set anew, re-armed for %v", short.at)
	}
}

// TestForgetTakesVerdictsBack: a verdict that has not been taken yet goes with
// its request (the client went away in the turn in which its budget was spent).
func TestForgetTakesVerdictsBack(t *testing.T) {
	p := NewPeers(PeersConfig{Attempts: 1})
	for req := ReqID(1); req <= 3; req++ {
		if err := p.Want(0, Want{Req: req, Addr: "p", DPRank: -1}); err != nil {
			t.Fatal(err)
		}
	}
	a := p.Actions()[0]
	p.Step(time.Millisecond, &PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Fault: PeerFault})
	p.Tick(time.Second)
	p.Forget(time.Second, 2)
	got := p.Verdicts()
	if len(got) != 2 || got[0].Req != 1 || got[1].Req != 3 || got[0].Kind != Lost {
		t.Errorf("verdicts %+v", got)
	}
	if want := "Could not fetch prefill parallel info from p after 1 attempts: no cause given"; got[0].Err.Message != want {
		t.Errorf("got %q, want %q", got[0].Err.Message, want)
	}
}

// TestVerdictsStayValid: a slice that was handed out survives what its reader
// causes while it reads.
func TestVerdictsStayValid(t *testing.T) {
	p := known(t, PeersConfig{}, "p")
	for req := ReqID(1); req <= 2; req++ {
		if err := p.Want(0, Want{Req: req, Addr: "p", DPRank: -1}); err != nil {
			t.Fatal(err)
		}
	}
	got := p.Verdicts()
	if err := p.Want(0, Want{Req: 3, Addr: "p", DPRank: -1}); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Req != 1 || got[1].Req != 2 {
		t.Errorf("verdicts %+v", got)
	}
}

// TestTickIsBounded: a thousand deadlines that pass at once are judged over
// several turns, each of them due at once.
func TestTickIsBounded(t *testing.T) {
	p, actions := crowd(t)
	d := &PeerDone{Fault: PeerFault}
	turns, ended := 0, 0
	failAll(p, 5*time.Second, actions, d, func() { turns++ })
	if want := 1000/tickMax + 1; turns != want {
		t.Errorf("1,000 deadlines took %d turns, want %d", turns, want)
	}
	p, actions = crowd(t)
	p.cfg.Attempts = 1
	for _, a := range actions {
		p.Step(0, &PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Fault: PeerFault})
	}
	for p.Deadline() <= time.Second {
		p.Tick(time.Second)
		n := len(p.Verdicts())
		if n > tickMax+p.cfg.MaxPerAddr {
			t.Errorf("%d verdicts in one turn", n)
		}
		ended += n
	}
	if ended != 4096 {
		t.Errorf("%d of 4,096 requests ended", ended)
	}
}

// TestDeadIDsAreBounded: an address behind which ever other instances appear
// costs no ever growing memory.
func TestDeadIDsAreBounded(t *testing.T) {
	p := known(t, PeersConfig{}, "p")
	pr := p.peers["p"]
	for i := range 3 * maxDead {
		pr.instance = fmt.Sprintf("i%d", i)
		p.replaced(0, pr, "next")
	}
	last := fmt.Sprintf("i%d", 3*maxDead-1)
	if len(pr.dead) != maxDead || !pr.isDead(0, last) || pr.isDead(0, "i0") {
		t.Errorf("dead ids %v", pr.dead)
	}
}

func TestWantTwice(t *testing.T) {
	p := NewPeers(PeersConfig{})
	if err := p.Want(0, Want{Req: 1, Addr: "p", DPRank: -1}); err != nil {
		t.Fatal(err)
	}
	if err := p.Want(0, Want{Req: 1, Addr: "q", DPRank: -1}); err == nil || err.Code != Internal {
		t.Errorf("a request that wants twice: %v", err)
	}
}

// TestGrantedNeedsLinks: a grant on links that are not up is a broken core.
func TestGrantedNeedsLinks(t *testing.T) {
	p := NewPeers(PeersConfig{})
	if err := p.Want(0, Want{Req: 1, Addr: "p", DPRank: -1}); err != nil {
		t.Fatal(err)
	}
	for _, req := range []ReqID{1, 2} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("request %d was granted", req)
				}
			}()
			p.Granted(0, req)
		}()
	}
}

// answer completes every action that waits for it, all well.
func answer(p *Peers, now time.Duration) {
	for more := true; more; {
		more = false
		for _, a := range append([]PeerAction(nil), p.Actions()...) {
			if a.Kind == CancelTry || a.Kind == CloseLink {
				continue
			}
			more = true
			p.Step(now, &PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link, Info: &ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1}, Target: "10.0.0.1:1"})
		}
	}
}

// known is a Peers to which the addresses are known, links and all.
func known(tb testing.TB, cfg PeersConfig, addrs ...string) *Peers {
	p := NewPeers(cfg)
	for i, addr := range addrs {
		req := ReqID(1_000_000 + i)
		if err := p.Want(0, Want{Req: req, Addr: addr, DPRank: -1}); err != nil {
			tb.Fatal(err)
		}
		answer(p, 0)
		if v := p.Verdicts(); len(v) != 1 || v[0].Kind != Linked {
			tb.Fatalf("%s: %+v", addr, v)
		}
		p.Forget(0, req)
	}
	return p
}

// crowd is the worst that rule 19 admits: 4,096 requests wait for 1,000
// addresses whose fetches all hang.
func crowd(tb testing.TB) (*Peers, []PeerAction) {
	p := NewPeers(PeersConfig{Attempts: 1 << 40, ResolveTimeout: Never / 2})
	for i := range 4096 {
		if err := p.Want(0, Want{Req: ReqID(i + 1), Addr: fmt.Sprintf("10.0.%d.%d:8998", i%1000/256, i%1000%256), DPRank: -1}); err != nil {
			tb.Fatal(err)
		}
	}
	actions := append([]PeerAction(nil), p.Actions()...)
	if len(actions) != 1000 {
		tb.Fatalf("%d fetches for 1,000 addresses", len(actions))
	}
	return p, actions
}

// failAll is the worst moment of the crowd: all 1,000 fetches fail in one inbox,
// and all are started again, or ended, by the timer. It returns what is started
// and calls turn after each turn.
func failAll(p *Peers, now time.Duration, actions []PeerAction, d *PeerDone, turn func()) []PeerAction {
	for i := range actions {
		d.Kind, d.ID, d.Gen = FetchInfo, actions[i].ID, actions[i].Gen
		p.Step(now, d)
	}
	actions = actions[:0]
	for p.Deadline() <= now {
		p.Tick(now)
		p.Verdicts()
		actions = append(actions, p.Actions()...)
		turn()
	}
	return actions
}

// TestPeersTurnsDoNotAllocate: neither a turn in which nothing is due, nor one
// in which a thousand fetches fail and start again, nor one of heartbeats.
func TestPeersTurnsDoNotAllocate(t *testing.T) {
	p, actions := crowd(t)
	now := time.Duration(0)
	d := &PeerDone{Fault: PeerFault, Cause: "no answer within 5s"}
	if n := testing.AllocsPerRun(100, func() {
		now += time.Microsecond
		p.Tick(now)
		p.Actions()
		p.Verdicts()
	}); n != 0 {
		t.Errorf("a turn in which nothing is due allocates %v times", n)
	}
	if n := testing.AllocsPerRun(20, func() {
		now += 5 * time.Second
		actions = failAll(p, now, actions, d, func() {})
	}); n != 0 || len(actions) != 1000 {
		t.Errorf("a turn in which 1,000 fetches fail and start again allocates %v times (%d started)", n, len(actions))
	}

	p = known(t, PeersConfig{IdleTTL: Never / 2}, "p1", "p2", "p3")
	beats := 0
	now = 0
	ok := &PeerDone{Kind: ProbeHealth}
	heard := &LinkHeard{Link: 1}
	if n := testing.AllocsPerRun(1000, func() {
		now = max(now+time.Millisecond, p.Deadline())
		p.Step(now, heard)
		p.Tick(now)
		for _, a := range p.Actions() {
			beats++
			ok.ID, ok.Gen = a.ID, a.Gen
			p.Step(now, ok)
		}
	}); n != 0 || beats < 1000 {
		t.Errorf("a turn with heartbeats allocates %v times (%d probes)", n, beats)
	}
}

// turnClock times the longest turn of each iteration. It reports the median of
// those, which leaves out the noise of the machine.
type turnClock struct {
	last  time.Time
	worst []time.Duration
}

func (c *turnClock) start() { c.last, c.worst = time.Now(), append(c.worst, 0) }

func (c *turnClock) turn() {
	now := time.Now()
	w := &c.worst[len(c.worst)-1]
	*w = max(*w, now.Sub(c.last))
	c.last = now
}

func (c *turnClock) report(b *testing.B) {
	slices.Sort(c.worst)
	b.ReportMetric(float64(c.worst[len(c.worst)/2].Microseconds()), "µs/longest-turn")
}

// The bounds of the rules: a turn may cost 1 ms with the whole crowd waiting,
// and 2 µs when nobody is unknown. The floor of the first is memory: 1,000
// records, pacers and alarms of some 500 bytes each are touched once.
func BenchmarkPeersCrowdFailsAndStartsAgain(b *testing.B) {
	p, actions := crowd(b)
	now := time.Duration(0)
	d := &PeerDone{Fault: PeerFault, Cause: "no answer within 5s"}
	var clock turnClock
	b.ReportAllocs()
	for b.Loop() {
		now += 5 * time.Second
		clock.start()
		actions = failAll(p, now, actions, d, clock.turn)
	}
	clock.report(b)
}

func BenchmarkPeersCrowdNothingDue(b *testing.B) {
	p, _ := crowd(b)
	now := time.Duration(0)
	b.ReportAllocs()
	for b.Loop() {
		now++
		p.Tick(now)
		p.Actions()
		p.Verdicts()
	}
}

// BenchmarkPeersCrowdEnds: the budgets of all 1,000 addresses are spent, and all
// 4,096 requests end at once.
func BenchmarkPeersCrowdEnds(b *testing.B) {
	var clock turnClock
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		p, actions := crowd(b)
		p.cfg.Attempts = 1
		d := &PeerDone{Fault: PeerFault, Cause: "no answer within 5s"}
		b.StartTimer()
		clock.start()
		failAll(p, 5*time.Second, actions, d, clock.turn)
	}
	clock.report(b)
}

// BenchmarkPeersKnown is the life of a request whose prefill is known.
func BenchmarkPeersKnown(b *testing.B) {
	p := known(b, PeersConfig{}, "p1", "p2", "p3")
	req := ReqID(0)
	now := time.Duration(0)
	b.ReportAllocs()
	for b.Loop() {
		req++
		now++
		if err := p.Want(now, Want{Req: req, Addr: "p2", Room: int64(req), DPRank: -1}); err != nil {
			b.Fatal(err)
		}
		p.Verdicts()
		p.Granted(now, req)
		p.Landed(now, req)
		p.Tick(now)
		p.Actions()
	}
}

// TestDPRank: a request's own rank counts, also 0; then what follows from the topology.
func TestDPRank(t *testing.T) {
	for _, c := range []struct {
		dp     int
		follow bool
		want   Want
		rank   int
	}{
		{4, false, Want{DPRank: 0, Room: 7}, 0},
		{4, true, Want{DPRank: 2, Room: 7}, 2},
		{4, true, Want{DPRank: -1, Room: 7}, 3},
		{4, false, Want{DPRank: -1, Room: 7}, -1},
		{1, false, Want{DPRank: -1, Room: 7}, 0},
	} {
		pr := &peer{}
		pr.facts.DP, pr.facts.FollowRoom = c.dp, c.follow
		if got := pr.dpRank(&c.want); got != c.rank {
			t.Errorf("dp %d, follow room %v, %+v: rank %d, want %d", c.dp, c.follow, c.want, got, c.rank)
		}
	}
}

// TestQuiet: a record makes room for another address only when its last fetch
// is an interval ago, else a new record of the same address would fetch too soon.
func TestQuiet(t *testing.T) {
	p := NewPeers(PeersConfig{Interval: time.Second})
	pr := &peer{}
	pr.info.begun, pr.info.last = true, 5*time.Second
	for now, want := range map[time.Duration]bool{5500 * time.Millisecond: false, 6 * time.Second: true} {
		if p.quiet(now, pr) != want {
			t.Errorf("%v after a fetch at 5 s: quiet is %v", now, !want)
		}
	}
}
