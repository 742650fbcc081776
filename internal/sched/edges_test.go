package sched

import (
	"fmt"
	"os"
	"testing"

	"github.com/metronome-serve/metronome/internal/lint/edges"
)

// TestMain: every change of phase that a become… function allows is made by
// some test, and docs/proof.md lists them.
func TestMain(m *testing.M) {
	book, err := edges.New(".", map[string]edges.Names{
		"Decode": {"newborn": 0, "Pending": uint8(Pending), "Preallocate": uint8(Preallocate), "Transfer": uint8(Transfer), "Waiting": uint8(Waiting),
			"Running": uint8(Running), "Finished": uint8(Finished)},
		"Prefill": {"newborn": 0, "Bootstrapping": uint8(Bootstrapping), "Queued": uint8(Queued), "Computing": uint8(Computing),
			"InFlight": uint8(InFlight), "Done": uint8(Done)},
		"Peers": {"fresh": uint8(fresh), "needInfo": uint8(needInfo), "needRank": uint8(needRank), "needLinks": uint8(needLinks),
			"isLinked": uint8(isLinked), "isGranted": uint8(isGranted)},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	onEdge = book.Take
	code := m.Run()
	if code == 0 && edges.Whole() {
		if err := book.Compare("../../docs/proof.md"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}
