//go:build linux

// Command compare-llamacpp measures our engine and llama.cpp's on the same
// files, in turn, and writes the table and the roofline of docs/performance.md.
//
//	compare-llamacpp -files a.gguf,b.gguf -threads 2,1 -rounds 5 -page docs/performance.md -plot docs/roofline.svg
//	compare-llamacpp -from result.json ...      writes both from what an earlier run found
//
// A round measures every line of the table once with each engine, one right
// after the other, and the order changes from round to round; so what else the
// machine does meets both. Each of the two is a process of its own that has
// the machine to itself. llama.cpp's flash attention is taken or left for each
// line, as was faster in the first round on the number of threads that comes
// first.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

var (
	files   = flag.String("files", "", "GGUF files, with commas between them")
	threads = flag.String("threads", "2,1", "numbers of threads, with commas between them")
	rounds  = flag.Int("rounds", 5, "how often each line is measured")
	binary  = flag.String("metronome", "bin/metronome", "our binary")
	peer    = flag.String("llama", "", "llama-batched-bench")
	version = flag.String("version", "", "what is said about llama.cpp")
	from    = flag.String("from", "", "measure nothing: results of an earlier run")
	result  = flag.String("json", "", "write the results to this file")
	page    = flag.String("page", "", "page with the markers that the table goes between")
	plot    = flag.String("plot", "", "write the roofline to this file")
	make150 = flag.String("generate", "", "write the generated model of 150 million parameters to this file")
	spin    = flag.Bool("spin", false, "be a busy neighbour")
)

// Sizes of prompts and batches, and the tokens that each decoding sequence
// holds: llama.cpp computes attention in steps of 256 positions, so its
// sequences hold 232 to 255 while ours hold 256.
var (
	prompts = []int{128, 512, 2048}
	batches = []int{1, 4, 8, 16}
)

const (
	held            = 256
	neighbourRounds = 2 // enough for what differs by far, and slow
)

func main() {
	flag.Parse()
	switch {
	case *spin:
		neighbour()
		return
	case *make150 != "":
		if err := os.WriteFile(*make150, modeltest.Large().GGUF(), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "compare-llamacpp:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "compare-llamacpp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	c := &comparison{}
	if *from != "" {
		b, err := os.ReadFile(*from)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, c); err != nil {
			return err
		}
	} else if err := c.measure(ctx); err != nil {
		return err
	}
	if *result != "" {
		b, err := json.MarshalIndent(c, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(*result, append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	if *plot != "" {
		if err := os.WriteFile(*plot, []byte(c.roofline()), 0o644); err != nil {
			return err
		}
	}
	if *page == "" {
		_, err := io.WriteString(os.Stdout, c.table())
		return err
	}
	return c.rewrite(*page)
}

// line is one line of the table.
type line struct {
	File      string `json:"file"`
	Threads   int    `json:"threads"`
	Prefill   bool   `json:"prefill"` // else decode
	Size      int    `json:"size"`    // tokens of the prompt, or sequences of the batch
	Neighbour bool   `json:"neighbour,omitempty"`
}

// place is what reading is known for.
func place(file string, threads int) string { return fmt.Sprintf("%s on %d", file, threads) }

func (l line) String() string {
	s := fmt.Sprintf("decode %d", l.Size)
	if l.Prefill {
		s = fmt.Sprintf("prefill %d", l.Size)
	}
	if l.Neighbour {
		s += " beside a busy neighbour"
	}
	return s
}

// measured is what the rounds gave for a line, in tokens a second.
type measured struct {
	Line   line      `json:"line"`
	Ours   []float64 `json:"ours"`
	Theirs []float64 `json:"theirs"`
	Flash  bool      `json:"flash"` // llama.cpp's flash attention, as it is faster here
}

// comparison is all that a run found.
type comparison struct {
	Date     string            `json:"date"`
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	Load     [2]float64        `json:"load"` // runnable tasks beside ours, at the start and at the end
	Versions [2]string         `json:"versions"`
	Kernels  string            `json:"kernels"`
	Rounds   int               `json:"rounds"`
	Lines    []*measured       `json:"lines"`
	Stream   map[int]spread    `json:"stream"`  // GB/s, by threads
	Int8     map[int]spread    `json:"int8"`    // GOPS
	Reading  map[string]spread `json:"reading"` // GB/s, by file and threads: its weights, or memory if that is faster
	Work     map[string]*work  `json:"work"`    // by file

	paths        map[string]string
	stream, int8 map[int][]float64 // of the machine, round by round
	reading      map[string][]float64
}

// config is what one process of each engine measures.
type config struct {
	file      string
	threads   int
	neighbour bool
}

func (c *comparison) measure(ctx context.Context) error {
	configs, err := c.plan()
	if err != nil {
		return err
	}
	c.Load[0] = othersLoad(ctx)
	for round := range *rounds {
		for i, cfg := range configs {
			if cfg.neighbour && round >= neighbourRounds {
				continue
			}
			fmt.Fprintf(os.Stderr, "%s round %d of %d, %d of %d: %s, %d threads%s\n", time.Now().Format("15:04:05"), round+1, *rounds, i+1, len(configs),
				cfg.file, cfg.threads, map[bool]string{true: ", beside a busy neighbour"}[cfg.neighbour])
			if err := c.both(ctx, round, cfg); err != nil {
				return err
			}
		}
	}
	c.Load[1] = othersLoad(ctx)
	c.Stream, c.Int8, c.Reading = map[int]spread{}, map[int]spread{}, map[string]spread{}
	for t := range c.stream {
		c.Stream[t], c.Int8[t] = spreadOf(c.stream[t]), spreadOf(c.int8[t])
	}
	for at, rounds := range c.reading {
		c.Reading[at] = spreadOf(rounds)
	}
	return nil
}

// plan says what is measured: all lines of every file, and beside a neighbour a
// few of the last file, at the most threads.
func (c *comparison) plan() ([]config, error) {
	c.Date, c.CPU, c.Cores, c.Rounds = time.Now().UTC().Format("2006-01-02"), cpuModel(), runtime.NumCPU(), *rounds
	c.paths, c.Work = map[string]string{}, map[string]*work{}
	c.stream, c.int8, c.reading = map[int][]float64{}, map[int][]float64{}, map[string][]float64{}
	c.Versions = [2]string{ourVersion(), *version}
	var configs []config
	add := func(cfg config, prefill bool, sizes ...int) {
		for _, n := range sizes {
			c.Lines = append(c.Lines, &measured{Line: line{cfg.file, cfg.threads, prefill, n, cfg.neighbour}})
		}
	}
	var busiest config
	for _, path := range strings.Split(*files, ",") {
		name := strings.TrimSuffix(filepath.Base(path), ".gguf")
		c.paths[name] = path
		for _, word := range strings.Split(*threads, ",") {
			n, err := strconv.Atoi(word)
			if err != nil || n < 1 {
				return nil, fmt.Errorf("-threads: %q is no list of numbers above 0", *threads)
			}
			cfg := config{file: name, threads: n}
			if name != busiest.file || n > busiest.threads {
				busiest = cfg
			}
			configs = append(configs, cfg)
			add(cfg, true, prompts...)
			add(cfg, false, batches...)
		}
	}
	if busiest.threads > 1 {
		busiest.neighbour = true
		configs = append(configs, busiest)
		add(busiest, true, 512)
		add(busiest, false, 1, 8)
	}
	return configs, nil
}

// both measures all lines of a configuration with both engines.
func (c *comparison) both(ctx context.Context, round int, cfg config) error {
	if cfg.neighbour {
		leave, err := startNeighbour()
		if err != nil {
			return err
		}
		defer leave()
	}
	var lines []*measured
	for _, m := range c.Lines {
		if (config{m.Line.File, m.Line.Threads, m.Line.Neighbour}) == cfg {
			lines = append(lines, m)
		}
	}
	turns := []func() error{
		func() error { return c.ours(ctx, cfg, lines) },
		func() error { return c.theirs(ctx, round, cfg, lines) },
	}
	if round%2 == 1 {
		turns[0], turns[1] = turns[1], turns[0]
	}
	for _, turn := range turns {
		if err := turn(); err != nil {
			return err
		}
	}
	for _, m := range lines {
		a, b := m.Ours[len(m.Ours)-1], m.Theirs[len(m.Theirs)-1]
		fmt.Fprintf(os.Stderr, "    %-40s ours %7.1f   llama.cpp %7.1f   %.2f x\n", m.Line, a, b, a/b)
	}
	return nil
}
