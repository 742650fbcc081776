package sim

import (
	"bytes"
	stdcmp "cmp"
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var (
	firstSeed = flag.Uint64("seed", 1, "the first seed of TestSeeds")
	seeds     = flag.Int("seeds", 0, "how many seeds TestSeeds runs; 0: 100, or 15 when short")
	enough    = flag.Int("enough", 5, "after how many seeds that break a rule TestSeeds stops")
)

var shape = Shape{Prefills: 2, Decodes: 2, Requests: 50}

// TestSeeds runs a fixed set of seeds. What breaks a rule is printed as
// `metronome sim --verbose --seed N` shows it.
func TestSeeds(t *testing.T) {
	n := stdcmp.Or(*seeds, 100)
	if *seeds == 0 && testing.Short() {
		n = 15
	}
	tally := Hunt(context.Background(), *firstSeed, n, shape, *enough, nil)
	for _, f := range tally.Found {
		t.Errorf("seed %d: %v", f.Seed, f.Violation)
	}
	if tally.Served < tally.Requests/2 {
		t.Errorf("%d of %d requests were served: such worlds show little", tally.Served, tally.Requests)
	}
	t.Logf("%d seeds, %d requests, %d served, %v", tally.Seeds, tally.Requests, tally.Served, tally.Ends)
}

// TestQuietWorld: without faults, with room for all, everything is served.
func TestQuietWorld(t *testing.T) {
	p := Draw(1, shape)
	p.Faults = nil
	p.PrefillPages, p.DecodePages, p.MaxRunning, p.MaxQueued, p.Reserved = 512, 512, 32, 512, 16
	for i := range p.Requests {
		p.Requests[i].Leaves = 0
	}
	rep, err := Run(p, nil)
	if err != nil || rep.Served != rep.Requests {
		t.Errorf("%d of %d served, the others %v; %v", rep.Served, rep.Requests, rep.Ends, err)
	}
}

// TestSamePlanSameRun: a plan that has been written and read again gives the
// same transcript, event for event.
func TestSamePlanSameRun(t *testing.T) {
	for seed := uint64(1); seed <= 5; seed++ {
		p := Draw(seed, shape)
		q, err := Decode(p.Encode())
		if err != nil {
			t.Fatal(err)
		}
		var a, b bytes.Buffer
		Run(p, &a)
		Run(q, &b)
		if d := cmp.Diff(a.String(), b.String()); d != "" || a.Len() == 0 {
			t.Errorf("seed %d: two runs differ:\n%s", seed, d)
		}
	}
}

// TestShrink: of a world in which one fault and one request break a rule,
// little more than these is left.
func TestShrink(t *testing.T) {
	p := Draw(7, shape)
	p.Retries = 0 // else the other prefill serves
	p.Faults = slices.DeleteFunc(p.Faults, func(f Fault) bool { return f.Kind == Registry })
	p.Faults = append(p.Faults, Fault{Kind: Registry, At: 0, For: p.Calm + time.Minute, On: "p0", N: int(hangs)}) // it never heals
	_, err := Run(p, nil)
	var v *Violation
	if !errors.As(err, &v) || v.Rule != "heal" {
		t.Fatalf("a registry that hangs for ever: %v", err)
	}
	small := Shrink(p, 300, nil)
	if _, err := Run(small, nil); !errors.As(err, &v) || v.Rule != "heal" {
		t.Errorf("the smaller plan breaks nothing: %v", err)
	}
	if len(small.Requests) > 1 || len(small.Faults) > 1 || len(small.Prefills)*len(small.Decodes) > 2 {
		t.Errorf("%d requests, %d faults, %v and %v are left", len(small.Requests), len(small.Faults), small.Prefills, small.Decodes)
	}
}

// TestDecodeRefuses: a plan from outside is checked.
func TestDecodeRefuses(t *testing.T) {
	for _, text := range []string{"", "{}", `{"Prefills":[1],"Decodes":[1]}`, `[1]`} {
		if _, err := Decode([]byte(text)); err == nil {
			t.Errorf("%q is taken for a plan", text)
		}
	}
}

func BenchmarkSeeds(b *testing.B) {
	seed := uint64(1)
	for b.Loop() {
		if _, err := Run(Draw(seed, shape), nil); err != nil {
			b.Fatal(err)
		}
		seed++
	}
	b.ReportMetric(60*float64(b.N)/b.Elapsed().Seconds(), "seeds/min")
}

// TestCompare: a loop that asks registries itself stands still for 5 s for
// each address that hangs, cycle by cycle, as was measured on the original
// (5.00 s for one, 10.02 s for two, 20.03 s for four), and a healthy newcomer
// waits as long. Ours does not notice. A rig that cannot see it is broken.
func TestCompare(t *testing.T) {
	for _, hung := range []int{1, 2, 4} {
		old, ours := Compare(hung, true), Compare(hung, false)
		want := time.Duration(hung) * 5 * time.Second
		if old.Longest < want || old.Longest > want+100*time.Millisecond {
			t.Errorf("%d hung: a loop that waits has a gap of %v, want %v", hung, old.Longest, want)
		}
		if old.Newcomer > 0 && old.Newcomer < want {
			t.Errorf("%d hung: the newcomer waits %v, want %v at least", hung, old.Newcomer, want)
		}
		if ours.Longest > sceneBeat+10*time.Millisecond || ours.Newcomer == 0 || ours.Newcomer > 50*time.Millisecond {
			t.Errorf("%d hung: our longest gap is %v, the newcomer waits %v", hung, ours.Longest, ours.Newcomer)
		}
	}
}

// TestStreamKeepsOrder: however a direction is blocked and slow, what is sent
// arrives in its order, all of it, and before the end of the stream (seeds
// 70000618 and 71001636 had it otherwise).
func TestStreamKeepsOrder(t *testing.T) {
	for seed := range uint64(300) {
		w := &world{rng: rand.New(rand.NewPCG(seed, 1))}
		n := &network{world: w, cfg: NetPlan{Delay: time.Millisecond, Jitter: 10 * time.Millisecond, Bandwidth: 1e9}, blocked: map[path]int{}, held: map[path][]*socket{}, slow: map[path]time.Duration{}}
		a, b := newProcess(w, "a"), newProcess(w, "b")
		var got, want []int
		s := &socket{net: n, owner: a, life: a.life}
		s.peer = &socket{net: n, owner: b, life: b.life, peer: s, take: func(m any) { got = append(got, m.(int)) }, ended: func(string) { got = append(got, -1) }}
		a.sockets = append(a.sockets, s)
		for i := range 20 {
			want = append(want, i)
			w.after(w.between(0, time.Millisecond)+time.Duration(i)*time.Millisecond, func() { s.send(i, 100) })
		}
		for range 3 {
			w.after(w.between(0, 30*time.Millisecond), func() { w.after(w.between(0, 20*time.Millisecond), n.block(a, b)) })
		}
		w.after(w.between(0, 20*time.Millisecond), func() { n.slow[path{"a", "b"}] = 30 * time.Millisecond })
		w.after(w.between(20*time.Millisecond, 40*time.Millisecond), func() { n.slow[path{"a", "b"}] = 0 })
		w.run(w.between(21*time.Millisecond, 80*time.Millisecond))
		s.close("over")
		w.run(10 * time.Second)
		if want = append(want, -1); !slices.Equal(got, want) {
			t.Fatalf("seed %d: sent %v, got %v", seed, want, got)
		}
	}
}
