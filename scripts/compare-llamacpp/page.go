//go:build linux

package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// spread is the median over the rounds, and the least and the most of them.
type spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func spreadOf(rounds []float64) spread {
	s := slices.Sorted(slices.Values(rounds))
	n := len(s)
	return spread{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1]}
}

func (s spread) String() string { return fmt.Sprintf("%.0f (%.0f to %.0f)", s.Median, s.Low, s.High) }

func (m *measured) ratio() float64 { return spreadOf(m.Ours).Median / spreadOf(m.Theirs).Median }

// limit is the share of the machine's that so many tokens a second are: of
// int8 products for a prompt, of reading the same weights for a batch.
func (c *comparison) limit(l line, rate float64) float64 {
	w := c.Work[l.File]
	if l.Prefill {
		return 2 * w.PrefillMacs * rate / 1e9 / c.Int8[l.Threads].Median
	}
	return (w.Weights + float64(l.Size)*w.KV) * rate / float64(l.Size) / 1e9 / c.Reading[place(l.File, l.Threads)].Median
}

const (
	begin = "<!-- written by make compare: begin -->\n"
	end   = "<!-- written by make compare: end -->\n"
)

// rewrite puts the table between the markers of a page.
func (c *comparison) rewrite(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, one := strings.Cut(string(text), begin)
	_, after, two := strings.Cut(rest, end)
	if !one || !two {
		return fmt.Errorf("%s has no markers to put the table between", path)
	}
	return os.WriteFile(path, []byte(before+begin+c.table()+end+after), 0o644)
}

// table is what the page says about the run.
func (c *comparison) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d cores of %s, %s kernels; %s against %s; %d rounds.\n", c.Date, c.Cores, c.CPU, c.Kernels, c.Versions[0], c.Versions[1], c.Rounds)
	fmt.Fprintf(&b, "Others took %.1f cores as the run began and %.1f as it ended%s.\n", c.Load[0], c.Load[1],
		map[bool]string{true: ": **the machine was not quiet**, figures are lower than they should be, and ratios are not to be relied on"}[max(c.Load[0], c.Load[1]) > 0.2])
	fmt.Fprintf(&b, "%s\n\n", c.summary())
	b.WriteString("| file | threads | | Metronome, tokens/s | llama.cpp, tokens/s | ratio | at least 1.0 | of the machine: ours, llama.cpp's |\n|---|---|---|---|---|---|---|---|\n")
	for _, m := range c.Lines {
		if m.Line.Neighbour {
			continue
		}
		us, them := spreadOf(m.Ours), spreadOf(m.Theirs)
		what := "of reading"
		if m.Line.Prefill {
			what = "of int8"
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s | %s | %s | %.0f %%, %.0f %% %s |\n", m.Line.File, m.Line.Threads, m.Line, us, them, bold(m.ratio()), reached(m.ratio() >= 1),
			100*c.limit(m.Line, us.Median), 100*c.limit(m.Line, them.Median), what)
	}
	c.neighbours(&b)
	if *plot != "" {
		fmt.Fprintf(&b, "\n![What was reached, below the machine's limits](%s)\n", filepath.Base(*plot))
	}
	return b.String()
}

func bold(ratio float64) string {
	if ratio < 1 {
		return fmt.Sprintf("**%.2f**", ratio)
	}
	return fmt.Sprintf("%.2f", ratio)
}

func reached(yes bool) string {
	if yes {
		return "reached"
	}
	return "not reached"
}

// summary counts the lines that reach the goals.
func (c *comparison) summary() string {
	all, one, more := 0, 0, 0
	for _, m := range c.Lines {
		if !m.Line.Neighbour {
			all++
			one += btoi(m.ratio() >= 1)
			more += btoi(m.ratio() >= 1.5)
		}
	}
	s := fmt.Sprintf("%d of %d lines are at 1.0 or more, %d of them at 1.5 or more.", one, all, more)
	for _, t := range slices.Sorted(maps.Keys(c.Stream)) {
		s += fmt.Sprintf("\nOn %d thread%s memory is read at %.1f GB/s (%.1f to %.1f), and there are %.0f GOPS of int8", t, map[bool]string{true: "s"}[t > 1],
			c.Stream[t].Median, c.Stream[t].Low, c.Stream[t].High, c.Int8[t].Median)
		last := c.Lines[len(c.Lines)-1].Line.File
		i := slices.IndexFunc(c.Lines, func(m *measured) bool { return m.Line == line{File: last, Threads: t, Size: 1} })
		if i >= 0 {
			share := c.limit(c.Lines[i].Line, spreadOf(c.Lines[i].Ours).Median)
			s += fmt.Sprintf("; the weights of %s alone at %.1f GB/s, and decode of one sequence reads at %.0f %% of the faster one (goal: 85 %%, %s)",
				last, c.Reading[place(last, t)].Median, 100*share, reached(share >= 0.85))
		}
		s += "."
	}
	return s
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// neighbours says what is left of each engine's speed beside a busy neighbour.
func (c *comparison) neighbours(b *strings.Builder) {
	head := "\nBeside a process that keeps one core busy, in the same rounds (goal: ours keeps 0.6):\n\n" +
		"| file | threads | | Metronome, tokens/s | of its quiet speed | at least 0.6 | llama.cpp, tokens/s | of its quiet speed |\n|---|---|---|---|---|---|---|---|\n"
	for _, m := range c.Lines {
		if !m.Line.Neighbour {
			continue
		}
		quiet := m.Line
		quiet.Neighbour = false
		i := slices.IndexFunc(c.Lines, func(q *measured) bool { return q.Line == quiet })
		if i < 0 {
			continue
		}
		us, them := spreadOf(m.Ours), spreadOf(m.Theirs)
		ours, theirs := us.Median/spreadOf(c.Lines[i].Ours).Median, them.Median/spreadOf(c.Lines[i].Theirs).Median
		fmt.Fprintf(b, "%s| %s | %d | %s | %s | %.2f | %s | %s | %.2f |\n", head, m.Line.File, m.Line.Threads, quiet, us, ours, reached(ours >= 0.6), them, theirs)
		head = ""
	}
}
