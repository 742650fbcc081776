//go:build !race && !invariants

package sched_test

import (
	"testing"

	"github.com/metronome-serve/metronome/internal/sched"
)

func TestABeatDoesNotAllocate(t *testing.T) {
	const n, runs = 64, 1000
	e, done := steady(t, n, 4096)
	tick := &sched.Tick{}
	if got := testing.AllocsPerRun(runs, func() {
		if r := beat(e, done, tick); len(r.Emits) != n || len(r.Batch.Rows) != n {
			t.Fatalf("%d tokens, %d rows, want %d", len(r.Emits), len(r.Batch.Rows), n)
		}
	}); got != 0 {
		t.Errorf("%v allocations a beat with %d running, want none", got, n)
	}
}
