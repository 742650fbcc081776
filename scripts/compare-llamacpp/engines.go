//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// work is what a model asks of a machine, as our bench tells it.
type work struct {
	PrefillMacs float64 `json:"prefill_macs"` // for one token of a prompt
	DecodeMacs  float64 `json:"decode_macs"`  // for one token of a batch
	Weights     float64 `json:"weight_bytes"` // read by each decode batch
	KV          float64 `json:"kv_bytes"`     // of one sequence, read by each decode batch
}

// ours runs `metronome bench engine` for one round.
func (c *comparison) ours(ctx context.Context, cfg config, lines []*measured) error {
	list := func(prefill bool) string {
		if n := sizes(lines, prefill); len(n) > 0 {
			return join(n)
		}
		return "none"
	}
	out, err := output(ctx, *binary, "bench", "engine", c.paths[cfg.file], "--prefill", list(true), "--decode", list(false), "--context", strconv.Itoa(held),
		"--threads", strconv.Itoa(cfg.threads), "--rounds", "1", "--json")
	if err != nil {
		return err
	}
	var r struct {
		Prefill, Decode map[int]float64
		Work            work
		Machine         struct {
			Kernels string
			Stream  float64 `json:"stream_gb_per_s"`
			Weights float64 `json:"weights_gb_per_s"`
			Int8    float64 `json:"int8_gops"`
		}
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return fmt.Errorf("our bench: %w", err)
	}
	for _, m := range lines {
		x := r.Decode[m.Line.Size]
		if m.Line.Prefill {
			x = r.Prefill[m.Line.Size]
		}
		if x == 0 {
			return fmt.Errorf("our bench says nothing about %s", m.Line)
		}
		m.Ours = append(m.Ours, x)
	}
	c.Kernels, c.Work[cfg.file] = r.Machine.Kernels, &r.Work
	if !cfg.neighbour {
		t, at := cfg.threads, place(cfg.file, cfg.threads)
		c.stream[t], c.int8[t] = append(c.stream[t], r.Machine.Stream), append(c.int8[t], r.Machine.Int8)
		c.reading[at] = append(c.reading[at], max(r.Machine.Stream, r.Machine.Weights))
	}
	return nil
}

// theirs runs llama-batched-bench. Where nothing is known about a line or the
// same one on other threads, with flash attention and without it; then as was
// faster.
func (c *comparison) theirs(ctx context.Context, round int, cfg config, lines []*measured) error {
	got := map[bool]map[*measured]float64{true: {}, false: {}}
	both := round == 0 && c.flash(lines)
	for _, flash := range []bool{true, false} {
		for _, prefill := range []bool{true, false} {
			var some []*measured
			for _, m := range lines {
				if m.Line.Prefill == prefill && (both || m.Flash == flash) {
					some = append(some, m)
				}
			}
			if len(some) == 0 {
				continue
			}
			if err := c.batchedBench(ctx, cfg, flash, prefill, some, got[flash]); err != nil {
				return err
			}
		}
	}
	for _, m := range lines {
		if both {
			m.Flash = got[true][m] > got[false][m]
		}
		m.Theirs = append(m.Theirs, got[m.Flash][m])
	}
	return nil
}

// flash takes over what is known about flash attention from the lines of another
// configuration, and says whether nothing is.
func (c *comparison) flash(lines []*measured) (unknown bool) {
	for _, m := range lines {
		i := slices.IndexFunc(c.Lines, func(q *measured) bool {
			return len(q.Theirs) > 0 && q.Line.File == m.Line.File && q.Line.Prefill == m.Line.Prefill && q.Line.Size == m.Line.Size
		})
		if i < 0 {
			return true
		}
		m.Flash = c.Lines[i].Flash
	}
	return false
}

// batchedBench is one process of llama.cpp's, or another where one did not say
// all: its last lines are sometimes lost as it exits.
func (c *comparison) batchedBench(ctx context.Context, cfg config, flash, prefill bool, lines []*measured, got map[*measured]float64) error {
	var err error
	for range 3 {
		if err = c.onceBatched(ctx, cfg, flash, prefill, lines, got); !errors.Is(err, errSilent) {
			return err
		}
	}
	return err
}

var errSilent = errors.New("llama-batched-bench does not say all")

// onceBatched runs it. Prompts: the first is not counted, and short ones are
// repeated. Decode: all sequences share one prompt of which each has a copy,
// and go on for 24 tokens. The last of either is there to be lost.
func (c *comparison) onceBatched(ctx context.Context, cfg config, flash, prefill bool, lines []*measured, got map[*measured]float64) error {
	const goOn = 24
	n := sizes(lines, prefill)
	threads := strconv.Itoa(cfg.threads)
	args := []string{"-m", c.paths[cfg.file], "-t", threads, "-tb", threads, "-b", "2048", "-ub", "512", "--output-format", "jsonl",
		"-fa", map[bool]string{true: "on", false: "off"}[flash]}
	if prefill {
		all := []int{prompts[0]}
		for _, size := range n {
			for range max(1, 256/size) {
				all = append(all, size)
			}
		}
		all = append(all, prompts[0])
		args = append(args, "-npp", join(all), "-ntg", "1", "-npl", "1", "-c", strconv.Itoa(slices.Max(n)+held))
	} else {
		args = append(args, "-npp", strconv.Itoa(held-goOn), "-ntg", strconv.Itoa(goOn), "-npl", join(append(n, 1)), "-pps", "-c", strconv.Itoa(slices.Max(n)*held))
	}
	out, err := output(ctx, *peer, args...)
	if err != nil {
		return err
	}
	first := prefill
	tokens, seconds := map[int]float64{}, map[int]float64{}
	for text := range bytes.Lines(out) {
		if !bytes.HasPrefix(text, []byte("{")) {
			continue
		}
		var r struct {
			PP, TG, PL int
			TPP        float64 `json:"t_pp"`
			TTG        float64 `json:"t_tg"`
		}
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("llama-batched-bench: %w", err)
		}
		switch {
		case first:
			first = false
		case prefill:
			tokens[r.PP] += float64(r.PP)
			seconds[r.PP] += r.TPP
		default:
			tokens[r.PL] += float64(r.PL * r.TG)
			seconds[r.PL] += r.TTG
		}
	}
	for _, m := range lines {
		if seconds[m.Line.Size] == 0 {
			return fmt.Errorf("%w: nothing about %s", errSilent, m.Line)
		}
		got[m] = tokens[m.Line.Size] / seconds[m.Line.Size]
	}
	return nil
}

func sizes(lines []*measured, prefill bool) []int {
	var n []int
	for _, m := range lines {
		if m.Line.Prefill == prefill {
			n = append(n, m.Line.Size)
		}
	}
	return n
}

func join(n []int) string {
	var words []string
	for _, x := range n {
		words = append(words, strconv.Itoa(x))
	}
	return strings.Join(words, ",")
}

// output is what a program printed; one that takes ten minutes hangs.
func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), errors.Join(err, ctx.Err()), said.Bytes()[max(0, said.Len()-2000):])
	}
	return out, nil
}

func ourVersion() string {
	out, err := exec.Command(*binary, "version").Output()
	if err != nil {
		return "metronome"
	}
	return strings.TrimSpace(string(out))
}

// cpuModel is the processor's name.
func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	_, name, _ := strings.Cut(string(text), "model name")
	name, _, _ = strings.Cut(strings.TrimLeft(name, "\t :"), "\n")
	return name
}
