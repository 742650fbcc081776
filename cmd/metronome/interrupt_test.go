//go:build unix

package main

import (
	"bufio"
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

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
		{"bench transfer --rounds 100000 --size 1MiB", "round 1 ", 1, "metronome bench: interrupted\n"},
	} {
		cmd := exec.Command("metronome", strings.Fields(c.args)...)
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
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
