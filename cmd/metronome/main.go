// Command metronome is the whole of Metronome in one binary: router, prefill
// and decode workers, bootstrap registry, and the tools around them. It is the
// only place that reads flags, files and the environment.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

// Exit statuses.
const (
	exitOK      = 0
	exitFailure = 1 // at run time
	exitUsage   = 2 // wrong flag, file or address
)

// usageError is the caller's mistake: one line and exit status 2.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

type cli struct {
	Up       upCmd       `cmd:"" help:"Start a whole fleet on this machine: router, prefill and decode workers."`
	Serve    serveCmd    `cmd:"" help:"Start one process that does both halves."`
	Router   routerCmd   `cmd:"" help:"Start a router in front of prefill and decode workers."`
	Prefill  prefillCmd  `cmd:"" help:"Start a prefill worker."`
	Decode   decodeCmd   `cmd:"" help:"Start a decode worker."`
	Registry registryCmd `cmd:"" help:"Start a bootstrap registry alone."`
	Pull     pullCmd     `cmd:"" help:"Fetch a known model."`
	Models   modelsCmd   `cmd:"" help:"List the models that are here, with size, architecture, quantisation and context."`
	Bench    benchCmd    `cmd:"" help:"Measure engine, KV transfer, loop or a server, beside what the machine or another one does."`
	Sim      simCmd      `cmd:"" help:"Run simulated fleets by seed, with faults, and check every rule."`
	Explain  explainCmd  `cmd:"" help:"Print what happened to one request, in every process that touched it."`
	Settings configCmd   `cmd:"" name:"config" help:"Print every setting of a role with value, unit, origin and meaning."`
	Version  versionCmd  `cmd:"" help:"Print the version."`

	Baseline baselineCmd `cmd:"" name:"blocking-decode" hidden:"" help:"Start a decode worker whose loop asks registries itself and waits, for comparisons."`
}

// notBuilt are commands that are planned and not built yet.
var notBuilt = []string{"chaos", "replay", "top"}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	if len(args) > 0 {
		for _, name := range notBuilt {
			if args[0] == name {
				fmt.Fprintf(os.Stderr, "metronome %s: not built yet; see metronome --help for the commands that are\n", name)
				return exitUsage
			}
		}
	}
	var c cli
	set := &settings{}
	exit := -1
	k, err := kong.New(&c, kong.Name("metronome"), kong.Description(description), kong.UsageOnError(), kong.Writers(stdout, os.Stderr),
		kong.Resolvers(set), kong.Help(helpWithExamples), kong.Exit(func(code int) { exit = code }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}))
	if err != nil {
		fmt.Fprintln(os.Stderr, "metronome:", err)
		return exitFailure
	}
	args = joined(k.Model.Node, usual(args))
	if err := set.load(args); err != nil {
		return report(args, err)
	}
	parsed, err := k.Parse(args)
	if lost := stdout.judge(nil); lost != nil { // that of --help
		return report(args, lost)
	}
	if exit >= 0 {
		return exit
	}
	if err != nil {
		return report(args, usageError{set.blame(hint(err))})
	}
	set.parsed = parsed
	if err := set.checkAmounts(); err != nil {
		return report(args, set.blame(err))
	}
	ctx, stop := stopSignals()
	defer stop()
	ctx, lost := context.WithCancel(ctx)
	defer lost()
	stdout.onLoss(lost)
	parsed.BindTo(ctx, (*context.Context)(nil))
	return report(args, interrupted(ctx, stdout.judge(set.blame(parsed.Run(set)))))
}

// interrupted is what a command says that a signal ended before it was done.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return errors.New("interrupted")
	}
	return err
}

// usual are the arguments that people mean by what they write first.
func usual(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help":
		return append(args[1:len(args):len(args)], "--help")
	case args[0] == "--version":
		return []string{"version"}
	}
	return args
}

// joined makes --flag false of a yes/no flag one word, as --flag=false, which all
// other flags take as two.
func joined(app *kong.Node, args []string) []string {
	yesNo := map[string]bool{}
	for _, command := range app.Leaves(false) {
		for _, f := range command.Flags {
			if f.IsBool() && f.Name != "help" {
				yesNo["--"+f.Name] = true
			}
		}
	}
	var out []string
	for _, a := range args {
		if n := len(out); n > 0 && yesNo[out[n-1]] && (a == "true" || a == "false") {
			out[n-1] += "=" + a
		} else {
			out = append(out, a)
		}
	}
	return out
}

// hint tells who has named no command, or left something out, where it is listed.
func hint(err error) error {
	var p *kong.ParseError
	if !errors.As(err, &p) {
		return err
	}
	if flag, _, ended := strings.Cut(err.Error(), `: expected string value but got "EOL"`); ended {
		return fmt.Errorf("%s: its value is missing", flag)
	}
	switch at := p.Context.Selected(); {
	case at == nil:
		return fmt.Errorf("%w; metronome --help lists the commands", err)
	case strings.HasPrefix(err.Error(), "unknown flag "):
		return fmt.Errorf("%w; %s --help lists those that there are", err, at.FullPath())
	case strings.HasPrefix(err.Error(), "expected "):
		return fmt.Errorf("%w; %s --help shows what may follow", err, at.FullPath())
	}
	return err
}

const description = "Metronome serves large language models with prefill and decode on separate workers, and its decode loop never waits for the network."

// report prints an error as one line and chooses the exit status.
func report(args []string, err error) int {
	if err == nil {
		return exitOK
	}
	var code exitCode
	if errors.As(err, &code) && code.quiet {
		return code.code
	}
	name := "metronome"
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		name += " " + args[0]
	}
	msg := strings.Join(strings.Fields(strings.ReplaceAll(err.Error(), "\n", "; ")), " ")
	fmt.Fprintf(os.Stderr, "%s: %s\n", name, msg)
	var usage usageError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &code):
		return code.code
	}
	return exitFailure
}

// exitCode is an error with an exit status of its own; quiet when the line has
// been printed already.
type exitCode struct {
	code  int
	quiet bool
	err   error
}

func (e exitCode) Error() string { return e.err.Error() }
func (e exitCode) Unwrap() error { return e.err }

// stopSignals ends the context at the first SIGTERM or SIGINT; the second one
// ends the process at once.
func stopSignals() (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, syscall.SIGTERM, os.Interrupt)
	go func() {
		<-ch
		cancel()
		if _, again := <-ch; again {
			os.Exit(exitFailure)
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		close(ch)
		cancel()
	}
}
