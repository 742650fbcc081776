package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/sim"
)

type simCmd struct {
	Seed     uint64        `help:"First seed; 0 draws one." default:"0"`
	Seeds    int           `help:"How many seeds; 0: until --for or --hours is over, else 1000." default:"0"`
	For      time.Duration `help:"Run ever new seeds for so long." default:"0s"`
	Hours    float64       `help:"The same in hours." default:"0"`
	Prefills int           `help:"Prefill workers of the fleet." default:"2"`
	Decodes  int           `help:"Decode workers of the fleet." default:"2"`
	Requests int           `help:"Requests of a run." default:"50"`
	Verbose  bool          `help:"Print the transcript of each run."`
	Replay   string        `help:"Run the plan in this file and print its transcript." placeholder:"FILE"`
	Out      string        `help:"Where the shrunk plan of a failure is written." default:"failure.json"`
	Compare  string        `help:"Show a decode loop that waits for its peers beside ours: blocking." enum:"blocking," default:""`
	SVG      string        `help:"With --compare: draw the gaps between tokens into this file." name:"svg" placeholder:"FILE"`
	Config   string        `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Run runs simulated fleets. A rule that is broken ends it with status 1.
func (c *simCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	if c.Prefills < 1 || c.Decodes < 1 || c.Prefills+c.Decodes > 256 || c.Requests < 0 || c.Seeds < 0 || c.Hours < 0 {
		return usagef("%d prefills, %d decodes, %d requests, %d seeds: at least one worker of each kind, at most 256 in all, would be right",
			c.Prefills, c.Decodes, c.Requests, c.Seeds)
	}
	if c.For < 0 || !(c.Hours >= 0) {
		return usagef("--for %v --hours %v: times of at least 0 would be right", c.For, c.Hours)
	}
	if c.SVG != "" && c.Compare == "" {
		return usagef("--svg %s: only --compare blocking draws; add it, or leave --svg out", c.SVG)
	}
	for flag, file := range map[string]string{"svg": c.SVG, "out": c.Out} { // known before hours of work, not after
		if info, err := os.Stat(filepath.Dir(file)); err != nil || !info.IsDir() {
			return usagef("--%s %s: there is no folder %s", flag, file, filepath.Dir(file))
		}
	}
	if c.Compare != "" {
		return c.compare()
	}
	if c.Replay != "" {
		return c.replay()
	}
	for c.Seed == 0 {
		c.Seed = rand.Uint64N(1 << 40)
	}
	shape := sim.Shape{Prefills: c.Prefills, Decodes: c.Decodes, Requests: c.Requests}
	if c.Verbose {
		return c.verbose(ctx, shape)
	}
	hunt := ctx
	if limit := c.For + time.Duration(c.Hours*float64(time.Hour)); limit > 0 {
		var cancel context.CancelFunc
		hunt, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	} else if c.Seeds == 0 {
		c.Seeds = 1000
	}
	fmt.Fprintf(stdout, "seeds from %d on, %d × %d workers, %d requests each, %d at once\n", c.Seed, c.Prefills, c.Decodes, c.Requests, runtime.GOMAXPROCS(0))
	began, told := time.Now(), time.Now()
	t := sim.Hunt(hunt, c.Seed, c.Seeds, shape, 1, func(t *sim.Tally) {
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			fmt.Fprintf(stdout, "%v: %d seeds, %d requests, %d events\n", time.Since(began).Round(time.Second), t.Seeds, t.Requests, t.Events)
		}
	})
	took := time.Since(began)
	fmt.Fprintf(stdout, "%d seeds in %v (%.0f a minute), %d requests: %d served with %d tokens, the others by name:%s\n", t.Seeds, took.Round(time.Millisecond),
		float64(t.Seeds)/took.Minutes(), t.Requests, t.Served, t.Tokens, byName(t.Ends))
	if len(t.Found) == 0 {
		return ctx.Err()
	}
	return c.shrink(t.Found[0], shape)
}

func byName(ends map[string]int) string {
	var b strings.Builder
	for _, code := range slices.Sorted(maps.Keys(ends)) {
		fmt.Fprintf(&b, " %s %d", code, ends[code])
	}
	return b.String()
}

// shrink makes what was found small and tells how to see it.
func (c *simCmd) shrink(f sim.Found, shape sim.Shape) error {
	fmt.Fprintf(stdout, "seed %d breaks a rule: %v\nmaking it smaller\n", f.Seed, f.Violation)
	p := sim.Shrink(sim.Draw(f.Seed, shape), 500, nil)
	if err := os.WriteFile(c.Out, p.Encode(), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%d faults, %d requests are left in %s; its transcript:\n", len(p.Faults), len(p.Requests), c.Out)
	_, err := sim.Run(p, stdout)
	return fmt.Errorf("seed %d: %w", f.Seed, err)
}

func (c *simCmd) replay() error {
	b, err := os.ReadFile(c.Replay)
	if err != nil {
		return usageError{err}
	}
	p, err := sim.Decode(b)
	if err != nil {
		return usageError{fmt.Errorf("%s: %w", c.Replay, err)}
	}
	_, err = sim.Run(p, stdout)
	return err
}

func (c *simCmd) verbose(ctx context.Context, shape sim.Shape) error {
	var all error
	for i := range uint64(max(1, c.Seeds)) {
		if ctx.Err() != nil {
			return errors.Join(all, ctx.Err())
		}
		fmt.Fprintf(stdout, "seed %d\n", c.Seed+i)
		_, err := sim.Run(sim.Draw(c.Seed+i, shape), stdout)
		all = errors.Join(all, err)
	}
	return all
}

// compare plays the same scene with a loop that waits and with ours.
func (c *simCmd) compare() error {
	fmt.Fprintln(stdout, "One stream over a healthy prefill, a token each 20 ms; at 5 s others ask for prefills whose registries hang,")
	fmt.Fprintln(stdout, "and a newcomer for another healthy one. 15 attempts of 5 s, 1 s apart. Virtual time; what the clients see in 55 s:")
	fmt.Fprintf(stdout, "\n%5s  %-20s %12s %14s  %s\n", "hung", "decode loop", "longest gap", "gaps over 1 s", "newcomer's first token after")
	for _, hung := range []int{1, 2, 4} {
		old, ours := sim.Compare(hung, true), sim.Compare(hung, false)
		for _, r := range []*sim.Comparison{old, ours} {
			name, long, first := "fetches on the loop", 0, "never"
			if !r.Blocking {
				name = "Metronome"
			}
			for _, g := range r.Gaps {
				if g.For > time.Second {
					long++
				}
			}
			if r.Newcomer > 0 {
				first = r.Newcomer.Round(time.Millisecond).String()
			}
			fmt.Fprintf(stdout, "%5d  %-20s %12v %14d  %s\n", hung, name, r.Longest.Round(time.Millisecond), long, first)
		}
		if hung == 1 && c.SVG != "" {
			if err := os.WriteFile(c.SVG, sim.Chart(old, ours), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
