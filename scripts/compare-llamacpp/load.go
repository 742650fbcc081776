//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// neighbour keeps one core busy until it is killed or its parent is gone.
func neighbour() {
	for parent := os.Getppid(); os.Getppid() == parent; {
		for range 1 << 24 {
		}
	}
}

// startNeighbour starts this program as a busy neighbour; the function that it
// gives ends it.
func startNeighbour() (func(), error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-spin")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		cmd.Process.Kill()
		cmd.Wait()
	}, nil
}

// othersLoad is how many cores' worth of time others take while we wait, over
// two seconds: 0 on a quiet machine or where nothing tells.
func othersLoad(ctx context.Context) float64 {
	before := busy()
	began := time.Now()
	select {
	case <-ctx.Done():
	case <-time.After(2 * time.Second):
	}
	const tick = 100 // a second, on every Linux
	return max(0, float64(busy()-before)/tick/time.Since(began).Seconds())
}

// busy is the time that all cores were not idle, in ticks.
func busy() (ticks int) {
	text, _ := os.ReadFile("/proc/stat")
	first, _, _ := strings.Cut(string(text), "\n")
	for i, word := range strings.Fields(first) {
		// cpu user nice system idle iowait irq softirq steal
		if n, err := strconv.Atoi(word); err == nil && i != 4 && i != 5 && i <= 8 {
			ticks += n
		}
	}
	return ticks
}
