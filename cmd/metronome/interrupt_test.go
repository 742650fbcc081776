//go:build unix

package main

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Whoever prints and is not heard ends with status 1 and says so, whatever the
// command: one that would go on for long, or serve, ends at once.
func TestOutputLost(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("needs /dev/full:", err)
	}
	defer full.Close()
	for _, args := range []string{
		"version", "version --verbose", "models", "models --json", "config decode", "--help", "decode --help", "sim --seeds 100000000", "sim --seeds 100000000 --verbose",
		"sim --compare blocking", "bench loop --rounds 1 --waiting none --running 2", "bench loop --rounds 1 --waiting none --running 2 --json",
		"serve tiny --listen 127.0.0.1:0", "prefill tiny --listen 127.0.0.1:0 --bootstrap-listen 127.0.0.1:0 --json", "router --listen 127.0.0.1:0", "registry --listen 127.0.0.1:0", "up --port 0",
	} {
		var said strings.Builder
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "metronome", strings.Fields(args)...)
		cmd.Stdout, cmd.Stderr = full, &said
		cmd.Run()
		if got := cmd.ProcessState.ExitCode(); got != exitFailure || !strings.Contains(said.String(), ": the output is lost: write /dev/stdout: no space left on device\n") {
			t.Errorf("metronome %s: exit status %d, %q", args, got, said.String())
		}
	}
}

// A reader that has had enough ends what it reads from, as in every shell.
func TestPipeClosed(t *testing.T) {
	cmd := exec.Command("metronome", "sim", "--seeds", "100000000", "--verbose")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	bufio.NewReader(out).ReadString('\n')
	out.Close()
	cmd.Wait()
	if got := cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(); got != syscall.SIGPIPE {
		t.Errorf("it ended by %v", cmd.ProcessState)
	}
}

// Nothing is printed past the writer that says when it is lost.
func TestOneOutput(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if past := regexp.MustCompile(`os\.Stdout|fmt\.Print`).Find(text); past != nil && name != "output.go" && !strings.HasSuffix(name, "_test.go") {
			t.Errorf("%s uses %s", name, past)
		}
	}
}

// A signal ends a command in its own words: up that waits for a worker stops
// cleanly, and what measures or fetches says that it was interrupted. Each is
// signalled when it has said the word that shows it at work.
func TestInterrupted(t *testing.T) {
	for _, c := range []struct {
		args, word string
		status     int
		says       string
	}{
		{"up --port 0 --registry 127.0.0.1:1", "not registered", 0, ""},
		{"bench loop --rounds 10000 --waiting none --running 2", "round 1 ", 1, "metronome bench: interrupted\n"},
		{"sim --seeds 100000000", "seeds from ", 1, "metronome sim: interrupted\n"},
		{"sim --seeds 100000000 --verbose", "seed ", 1, "metronome sim: interrupted\n"},
		{"bench transfer --rounds 100000 --size 1MiB", "round 1 ", 1, "metronome bench: interrupted\n"},
	} {
		cmd := exec.Command("metronome", strings.Fields(c.args)...)
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout = cmd.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		in, told, rest := bufio.NewScanner(stderr), false, ""
		for in.Scan() {
			line := in.Text()
			switch {
			case !told && strings.Contains(line, c.word):
				told = true
				cmd.Process.Signal(syscall.SIGTERM)
			case strings.HasPrefix(line, "metronome "):
				rest += line + "\n"
			}
		}
		err = cmd.Wait()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); !told || got != c.status || rest != c.says {
			t.Errorf("metronome %s: at work %v, exit status %d, %q; want %d, %q", c.args, told, got, rest, c.status, c.says)
		}
	}
}
