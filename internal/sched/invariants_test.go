package sched

import (
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// lively is a decode core with one request in each of three phases: 1 runs in
// an outstanding batch, 2 is granted, 3 waits for its peer.
func lively(t *testing.T) *Decode {
	t.Helper()
	d := NewDecode(DecodeConfig{Context: 64, Peers: PeersConfig{Local: ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1}}}, kv.NewPool(16, 4, 1))
	turn := func(evs ...Event) *DecodeReady {
		for _, ev := range append(evs, &Tick{}) {
			d.Step(time.Millisecond, ev)
		}
		return d.Ready()
	}
	answer := func(r *DecodeReady) (evs []Event) {
		for _, a := range r.Peer {
			done := &PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link}
			switch {
			case strings.HasPrefix(a.Addr, "hung"):
				continue
			case a.Kind == FetchInfo:
				done.Info = &ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1, FollowRoom: true}
			case a.Kind == LookupRank:
				done.Target = "p:1"
			}
			evs = append(evs, done)
		}
		return evs
	}
	submit := func(req ReqID, addr string) Event {
		return &Submit{Req: req, Prompt: []int32{1, 2, 3}, MaxTokens: 8, Addr: addr, Room: int64(req), DPRank: -1, Deadline: time.Hour}
	}
	r := turn(submit(1, "p"), submit(2, "p"), submit(3, "hung"))
	for evs := answer(r); len(evs) > 0; evs = answer(r) {
		r = turn(evs...)
	}
	r = turn(&PagesLanded{Grant: 1, First: 5})
	if d.Phase(1) != Running || d.Phase(2) != Transfer || d.Phase(3) != Pending || r.Batch == nil {
		t.Fatalf("the core is not as this test needs it:\n%s", d.Describe())
	}
	if err := d.Check(); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestCheckFinds: each invariant of a decode core is seen to be broken when it is.
func TestCheckFinds(t *testing.T) {
	for _, c := range []struct {
		broken string
		break_ func(d *Decode)
		says   string
	}{
		{"a request in the wrong queue", func(d *Decode) { d.reqs[3].phase = Waiting }, "stands in queue"},
		{"a queue out of order", func(d *Decode) { q := &d.in[Pending]; q.s = append(q.s, q.s[0]) }, "by arrival"},
		{"a grant lost", func(d *Decode) { d.reqs[2].grant = nil }, "grant"},
		{"pages before the grant", func(d *Decode) { d.reqs[3].table = d.reqs[1].table }, "pages"},
		{"a row of another", func(d *Decode) { d.rows[0] = nil }, "with row"},
		{"a timer lost", func(d *Decode) { d.reqs[3].deadline = time.Minute }, "its timer"},
		{"a request in no queue", func(d *Decode) { d.reqs[9] = d.reqs[3] }, "in queues"},
		{"too many that run", func(d *Decode) { d.cfg.MaxRunning = 0 }, "the limit is"},
		{"pages held for no batch", func(d *Decode) {
			d.running, d.reqs[1].row = false, -1
			d.held = append(d.held, kv.BlockTable{})
		}, "not outstanding"},
		{"two grants of one request", func(d *Decode) { d.grants[99] = &grant{id: 99, req: d.reqs[2]} }, "which has another"},
		{"a written page that is shared", func(d *Decode) { d.pool.Insert(&d.reqs[1].table, d.reqs[1].tokens) }, "which is shared"},
		{"a page that nobody owns", func(d *Decode) { d.pool.Extend(&kv.BlockTable{}, 4) }, "account for"},
	} {
		d := lively(t)
		c.break_(d)
		if err := d.Check(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: Check says %v, want …%s…", c.broken, err, c.says)
		}
	}
}

// busy is a prefill core with 1 in a batch and 2 in flight to its decode worker.
func busy(t *testing.T) *Prefill {
	t.Helper()
	p := NewPrefill(PrefillConfig{Context: 64}, kv.NewPool(16, 4, 1))
	turn := func(evs ...Event) *PrefillReady {
		for _, ev := range append(evs, &Tick{}) {
			p.Step(time.Millisecond, ev)
		}
		return p.Ready()
	}
	submit := func(req ReqID) []Event {
		return []Event{&SubmitPrefill{Req: req, Prompt: []int32{int32(req), 2, 3}, Room: int64(req), MaxHit: 2, Deadline: time.Hour},
			&RoomGranted{Key: GrantKey{Peer: 1, Grant: GrantID(req)}, Room: int64(req), Tokens: 3}}
	}
	r := turn(submit(2)...)
	r = turn(append(submit(1), &BatchDone{Batch: r.Batch.ID, Tokens: []int32{7}})...)
	if p.Phase(1) != Computing || p.Phase(2) != InFlight || p.Phase(9) != 0 || r.Batch == nil {
		t.Fatalf("the core is not as this test needs it:\n%s", p.Describe())
	}
	if err := CheckShared(nil, p); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestPrefillCheckFinds: each invariant of a prefill core is seen to be broken when it is.
func TestPrefillCheckFinds(t *testing.T) {
	for _, c := range []struct {
		broken string
		break_ func(p *Prefill)
		says   string
	}{
		{"a request in the wrong queue", func(p *Prefill) { p.reqs[2].phase = Queued }, "stands in queue"},
		{"a queue out of order", func(p *Prefill) { q := &p.in[InFlight]; q.s = append(q.s, q.s[0]) }, "by arrival"},
		{"pages lost", func(p *Prefill) { p.reqs[2].table = kv.BlockTable{} }, "0 pages"},
		{"bound to no grant", func(p *Prefill) { p.reqs[2].granted = false }, "granted false"},
		{"a row of another", func(p *Prefill) { p.rows[0] = nil }, "with row"},
		{"in flight before its end", func(p *Prefill) { p.reqs[2].computed-- }, "of 3 tokens"},
		{"a request in no queue", func(p *Prefill) { p.reqs[9] = p.reqs[2] }, "in queues"},
		{"pages held for no batch", func(p *Prefill) {
			p.running, p.reqs[1].row = false, -1
			p.held = append(p.held, &closing{})
		}, "not outstanding"},
		{"a written page that is shared", func(p *Prefill) {
			p.reqs[1].table = kv.BlockTable{}
			p.pool.Extend(&p.reqs[1].table, 4)
			p.pool.Insert(&p.reqs[1].table, []int32{1, 2, 3, 4})
			p.batch.Rows[0].Pages = p.reqs[1].table.Pages()
		}, "which is shared"},
		{"a page that nobody owns", func(p *Prefill) { p.pool.Extend(&kv.BlockTable{}, 4) }, "account for"},
	} {
		p := busy(t)
		c.break_(p)
		if err := CheckShared(nil, p); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: Check says %v, want …%s…", c.broken, err, c.says)
		}
	}
}

// TestCheckSharedLooksAtBoth: over one pool a fault of either core is seen, and
// a checked build does not go on with it.
func TestCheckSharedLooksAtBoth(t *testing.T) {
	d, p := lively(t), busy(t)
	if err := CheckShared(d, p); err == nil || !strings.Contains(err.Error(), "account for") {
		t.Errorf("two pools taken for one: %v", err)
	}
	d.reqs[3].phase = Waiting
	if err := CheckShared(d, p); err == nil || !strings.Contains(err.Error(), "stands in queue") {
		t.Errorf("a fault of the decode core: %v", err)
	}
	p.reqs[2].phase = Queued
	if err := CheckShared(nil, p); err == nil || !strings.Contains(err.Error(), "stands in queue") {
		t.Errorf("a fault of the prefill core: %v", err)
	}
	defer func() {
		if recover() == nil {
			t.Error("mustHold lets a broken invariant pass")
		}
	}()
	mustHold(p.Check())
}

// TestStaleBatch: the end of a batch that is not the one outstanding changes nothing.
func TestStaleBatch(t *testing.T) {
	p := busy(t)
	now, id := p.Describe(), p.batch.ID
	for _, ev := range []*BatchDone{{Batch: id + 1, Tokens: []int32{7}}, {Batch: id - 1, Tokens: []int32{7}}} {
		p.Step(time.Millisecond, ev)
		p.Ready()
		if got := p.Describe(); got != now {
			t.Errorf("batch %d is not outstanding:\n%swas\n%s", ev.Batch, got, now)
		}
	}
	p.Step(time.Millisecond, &BatchDone{Batch: id, Tokens: []int32{7}})
	p.Ready()
	now = p.Describe()
	p.Step(time.Millisecond, &BatchDone{Batch: id, Tokens: []int32{8}})
	p.Ready()
	if got := p.Describe(); got != now {
		t.Errorf("a batch ends twice:\n%swas\n%s", got, now)
	}
}
