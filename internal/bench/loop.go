package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
)

// Loop says what of the decode loop's core is measured.
type Loop struct {
	Running  int   // sequences of each batch
	Waiting  []int // lengths of the queue: requests whose prefills hang, 64 to an address
	Rounds   int
	Progress io.Writer
}

// LoopReport is what Loop.Run found, by length of the queue, in nanoseconds.
type LoopReport struct {
	Running, Rounds int
	Turn            map[int]Rate // a turn in which nothing happened
	Beat            map[int]Rate // the end of a batch, its tokens out, and the next batch
}

const (
	perAddress   = 64   // the default bound of requests that wait for one unresolved address
	mostWaiting  = 4096 // and that of all
	turns, beats = 20_000, 1_000
)

// core is a decode core in the middle of a batch, with requests that wait.
type core struct {
	d    *sched.Decode
	now  time.Duration
	done sched.BatchDone
	tick sched.Tick
}

// Run measures a core for each length of the queue, in turn.
func (b *Loop) Run(ctx context.Context) (*LoopReport, error) {
	if b.Running < 1 || b.Running > 1024 || b.Rounds < 1 || len(b.Waiting) == 0 || slices.Max(b.Waiting) > mostWaiting || slices.Min(b.Waiting) < 0 {
		return nil, &UnfitError{fmt.Errorf("%d running, queues of %v, %d rounds: 1 to 1024 running, queues of up to %d and a round would be right",
			b.Running, b.Waiting, b.Rounds, mostWaiting)}
	}
	turn, beat := map[int][]float64{}, map[int][]float64{}
	for round := range b.Rounds {
		for _, n := range b.Waiting {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			c, err := newCore(b.Running, n, beats) // each round its own: sequences never grow beyond one
			if err != nil {
				return nil, err
			}
			turn[n] = append(turn[n], cost(turns, c.turn))
			beat[n] = append(beat[n], cost(beats, c.beat))
		}
		fmt.Fprintf(b.Progress, "round %d of %d\n", round+1, b.Rounds)
	}
	return &LoopReport{b.Running, b.Rounds, rates(turn), rates(beat)}, nil
}

// cost is how long one of n calls takes, in nanoseconds.
func cost(n int, do func()) float64 {
	began := time.Now()
	for range n {
		do()
	}
	return float64(time.Since(began).Nanoseconds()) / float64(n)
}

// newCore lets so many sequences run that have room for that many tokens, and
// so many requests wait for prefills that never answer.
func newCore(running, waiting, tokens int) (*core, error) {
	const size = 16
	c := &core{d: sched.NewDecode(sched.DecodeConfig{MaxRunning: running, MaxQueued: running, MaxGrants: running, Context: tokens + 3, ReservedTokens: tokens + 1, KVTimeout: time.Hour},
		kv.NewPool(running*kv.PagesFor(tokens+3, size), size, 1))}
	for i := range running {
		c.d.Step(0, &sched.Submit{Req: sched.ReqID(i + 1), Prompt: []int32{1}, MaxTokens: tokens + 2, Addr: fmt.Sprintf("well%d:1", i/perAddress),
			Room: int64(i), DPRank: -1, Deadline: sched.Never})
	}
	for i := range waiting {
		c.d.Step(0, &sched.Submit{Req: sched.ReqID(running + i + 1), Prompt: []int32{1}, MaxTokens: 1, Addr: fmt.Sprintf("hung%d:1", i/perAddress),
			Room: int64(running + i), DPRank: -1, Deadline: sched.Never})
	}
	for range 100 { // resolve, look up, dial, grant, land, run
		c.d.Step(0, &c.tick)
		if b := c.obey(); b != nil {
			c.done.Batch, c.done.Tokens = b.ID, make([]int32, len(b.Rows))
			if len(b.Rows) == running {
				return c, nil
			}
			c.d.Step(0, &c.done)
		}
	}
	return nil, fmt.Errorf("the core runs %d sequences, not %d", len(c.done.Tokens), running)
}

// obey answers as healthy prefills would, and as hung ones would not. It
// gives the batch to run, if there is one.
func (c *core) obey() *sched.Batch {
	r := c.d.Ready()
	batch, peer, grants := r.Batch, slices.Clone(r.Peer), slices.Clone(r.Grants) // the next Step reuses them
	for _, a := range peer {
		done := &sched.PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link}
		switch {
		case !strings.HasPrefix(a.Addr, "well"):
			continue
		case a.Kind == sched.FetchInfo:
			done.Info = &sched.ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1, FollowRoom: true}
		case a.Kind == sched.LookupRank:
			done.Target = a.Addr
		case a.Kind == sched.DialLink:
			done.Welcome = sched.Welcome{TP: 1, DP: 1}
		}
		c.d.Step(c.now, done)
	}
	for _, g := range grants {
		c.d.Step(c.now, &sched.PagesLanded{Grant: g.Grant})
	}
	return batch
}

func (c *core) turn() {
	c.now += time.Microsecond
	c.d.Step(c.now, &c.tick)
	c.d.Ready()
}

func (c *core) beat() {
	c.now += time.Microsecond
	c.d.Step(c.now, &c.done)
	c.d.Step(c.now, &c.tick)
	c.done.Batch = c.d.Ready().Batch.ID
}

// JSON is one object; costs are medians in nanoseconds.
func (r *LoopReport) JSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Turn    map[string]float64 `json:"turn_ns"`
		Beat    map[string]float64 `json:"beat_ns"`
		Running int                `json:"running"`
		Rounds  int                `json:"rounds"`
	}{medians(r.Turn), medians(r.Beat), r.Running, r.Rounds})
}

// Text is a table for people.
func (r *LoopReport) Text(w io.Writer) error {
	fmt.Fprintf(w, "the decode core with %d running sequences; medians of %d rounds\n\n", r.Running, r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "waiting for hung prefills\tan idle turn\tend of a batch to the next\teach token\t")
	for _, n := range sizes(r.Turn) {
		fmt.Fprintf(t, "%d\t%.0f ns\t%.2f µs\t%.0f ns\t\n", n, r.Turn[n].Median, r.Beat[n].Median/1000, r.Beat[n].Median/float64(r.Running))
	}
	return t.Flush()
}
