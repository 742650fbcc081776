package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/bench"
	"github.com/metronome-serve/metronome/internal/engine"
)

type benchCmd struct {
	Engine   benchEngineCmd   `cmd:"" help:"Tokens a second of the engine, beside what the machine could do."`
	Transfer benchTransferCmd `cmd:"" help:"GB a second of KV transfer, beside a bare socket and memory."`
	Receiver benchReceiverCmd `cmd:"" name:"transfer-receiver" hidden:"" help:"The receiving side of bench transfer."`
	Loop     benchLoopCmd     `cmd:"" help:"Cost of a turn of the decode core, by length of its queue."`
	HTTP     benchHTTPCmd     `cmd:"" name:"http" help:"Time to the first token and between tokens of a server, beside another one."`
}

type benchEngineCmd struct {
	Model     string `arg:"" help:"Path of a GGUF file, a name that pull knows, or tiny (built in)."`
	Prefill   Counts `help:"Lengths of prompts in tokens, or none; by default those of these that the model has room for." default:"128,512,2048"`
	Decode    Counts `help:"Numbers of sequences that decode together, or none." default:"1,4,8,16,32"`
	Context   int    `help:"Tokens that each decoding sequence holds already." default:"256"`
	Chunk     int    `help:"Tokens of one prefill chunk." default:"512"`
	Threads   int    `help:"Threads of the engine; 0 means one for each CPU that the process may use." default:"0"`
	Rounds    int    `help:"How often each is measured, one after the other; medians are reported." default:"5"`
	Kernels   string `help:"Instructions that the engine computes with." default:"auto" enum:"auto,portable,avx2,avx512"`
	Precision string `help:"native computes on the weights as they are quantised, f32 on dequantised ones." default:"native" enum:"native,f32"`
	KVDType   string `help:"Type of KV values: f16, f32 or q8_0; f32 too if --precision f32 and nothing else is chosen." name:"kv-dtype" default:"f16" enum:"f16,f32,q8_0"`
	JSON      bool   `help:"Print the result as one JSON object." name:"json"`
	Config    string `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Counts is a list of numbers above 0, written like 1,4,8; none is an empty one.
type Counts []int

// UnmarshalText parses a list.
func (c *Counts) UnmarshalText(text []byte) error {
	*c = nil
	if string(text) == "none" {
		return nil
	}
	for _, word := range strings.Split(string(text), ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 1 || n > 1<<20 {
			return fmt.Errorf("%q is no list of numbers above 0; write it like 1,4,8, or none", text)
		}
		*c = append(*c, n)
	}
	return nil
}

// Run measures the engine.
func (c *benchEngineCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	if c.Threads > 1024 {
		return usagef("--threads is %d: want at most 1024", c.Threads)
	}
	if err := atLeast(number{"context", c.Context, 1}, number{"chunk", c.Chunk, 1}, number{"rounds", c.Rounds, 1}, number{"threads", c.Threads, 0}); err != nil {
		return err
	}
	if len(c.Prefill)+len(c.Decode) == 0 {
		return usagef("--prefill none --decode none: nothing is left to measure")
	}
	if c.Precision == "f32" && !s.chosen("kv-dtype") {
		c.KVDType = "f32"
	}
	if err := engine.UseKernels(c.Kernels); err != nil {
		return usagef("--kernels: %v", err)
	}
	path, err := modelPath(c.Model, "cpu")
	if err != nil {
		return err
	}
	if path == "tiny" {
		path = ""
	}
	f, err := openModel(path)
	if err != nil {
		return usageError{err}
	}
	defer f.Close()
	if h, err := f.Hyper(); err == nil && !s.chosen("prefill") {
		c.Prefill = slices.DeleteFunc(c.Prefill, func(n int) bool { return n > h.Context })
	}
	b := bench.Engine{Name: c.Model, File: f, Prefill: c.Prefill, Decode: c.Decode, Context: c.Context, Chunk: c.Chunk, Threads: c.Threads,
		Rounds: c.Rounds, KVDType: c.KVDType, Precision: c.Precision, Progress: os.Stderr}
	if b.Threads == 0 {
		b.Threads = engine.Cores
	} else if b.Threads > engine.Cores {
		fmt.Fprintf(os.Stderr, "more threads than CPUs: --threads %d on %d is slow\n", b.Threads, engine.Cores)
	}
	runtime.GOMAXPROCS(b.Threads + 2) // as a worker does
	r, err := b.Run(ctx)
	return printed(ctx, r, err, c.JSON)
}

type benchTransferCmd struct {
	Extent Size   `help:"Bytes of one page in one layer." default:"16KiB"`
	Size   Size   `help:"Bytes of one prompt's KV." default:"64MiB"`
	Rounds int    `help:"How often each is measured, one after the other; medians are reported." default:"15"`
	JSON   bool   `help:"Print the result as one JSON object." name:"json"`
	Config string `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Run measures KV transfer over loopback.
func (c *benchTransferCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	receiver := func(ctx context.Context, r *bench.TransferReceiver) *exec.Cmd {
		return exec.CommandContext(ctx, self, "bench", "transfer-receiver", "--kv="+r.KV, "--plain="+r.Plain, "--core="+strconv.Itoa(r.Core),
			"--extent="+strconv.FormatInt(r.Extent, 10), "--size="+strconv.FormatInt(r.Size, 10))
	}
	r, err := (&bench.Transfer{Extent: int64(c.Extent), Size: int64(c.Size), Rounds: c.Rounds, Receiver: receiver, Progress: os.Stderr}).Run(ctx)
	return printed(ctx, r, err, c.JSON)
}

// benchReceiverCmd is the other process of bench transfer.
type benchReceiverCmd struct {
	Extent Size   `help:"Bytes of one page in one layer."`
	Size   Size   `help:"Bytes of one prompt's KV."`
	KV     string `help:"Address of the sender." name:"kv"`
	Plain  string `help:"Address of the bare socket."`
	Core   int    `help:"Core to compute on; -1: the system chooses." default:"-1"`
	Config string `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Run takes what it is told on stdin to take.
func (c *benchReceiverCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	return (&bench.TransferReceiver{Extent: int64(c.Extent), Size: int64(c.Size), KV: c.KV, Plain: c.Plain, Core: c.Core}).Run(ctx, os.Stdin, stdout)
}

type benchLoopCmd struct {
	Running int    `help:"Sequences of each batch." default:"64"`
	Waiting Counts `help:"Lengths of the queue: requests that wait for prefills that hang; none is an empty queue alone." default:"64,512,4096"`
	Rounds  int    `help:"How often each is measured, one after the other; medians are reported." default:"9"`
	JSON    bool   `help:"Print the result as one JSON object." name:"json"`
	Config  string `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Run measures the decode core.
func (c *benchLoopCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	r, err := (&bench.Loop{Running: c.Running, Waiting: append([]int{0}, c.Waiting...), Rounds: c.Rounds, Progress: os.Stderr}).Run(ctx)
	return printed(ctx, r, err, c.JSON)
}

type benchHTTPCmd struct {
	URL         string        `arg:"" name:"url" help:"URL of a router, a worker, or serve."`
	Beside      string        `help:"URL of another one, measured in turn with the first." placeholder:"URL"`
	Prompt      int           `help:"Tokens of a prompt; no two prompts are alike." default:"512"`
	Tokens      int           `help:"Tokens of an answer." default:"64"`
	Rounds      int           `help:"How often each is measured, one after the other; medians are reported." default:"15"`
	IdleTimeout time.Duration `help:"Longest silence of a server, that before its first byte too." default:"60s"`
	TokenFile   string        `help:"File with the bearer token that we present." placeholder:"FILE"`
	JSON        bool          `help:"Print the result as one JSON object." name:"json"`
	Config      string        `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// Run measures one server, or two.
func (c *benchHTTPCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	if c.IdleTimeout <= 0 {
		return usagef("--idle-timeout is %v; it must be more than zero", c.IdleTimeout)
	}
	token, err := callersToken(c.TokenFile)
	if err != nil {
		return err
	}
	b := &bench.HTTP{URLs: []string{c.URL}, Token: token, Prompt: c.Prompt, Tokens: c.Tokens, Rounds: c.Rounds, Silence: c.IdleTimeout, Progress: os.Stderr}
	if c.Beside != "" {
		b.URLs = append(b.URLs, c.Beside)
	}
	r, err := b.Run(ctx)
	return printed(ctx, r, err, c.JSON)
}

// printed prints what was measured, and says why it is not all.
func printed[R interface {
	comparable
	JSON(io.Writer) error
	Text(io.Writer) error
}](ctx context.Context, r R, err error, asJSON bool) error {
	var nothing R
	print := r.Text
	if asJSON {
		print = r.JSON
	}
	if r != nothing {
		err = errors.Join(err, print(stdout))
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx) // whatever it broke off
	}
	return unfit(err)
}

// unfit makes what was asked and cannot be measured the caller's mistake.
func unfit(err error) error {
	if errors.As(err, new(*bench.UnfitError)) {
		return usageError{err}
	}
	return err
}
