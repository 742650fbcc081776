package sched_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/metronome-serve/metronome/internal/sched/schedtest"
)

// TestTranscripts plays the dialogues between cores and driver. After a change,
// run it with -rewrite and read the difference before committing it.
func TestTranscripts(t *testing.T) {
	for _, pattern := range []string{"testdata/decode*.txt", "testdata/prefill*.txt", "testdata/serve*.txt"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no transcripts in %s: %v", pattern, err)
		}
		for _, f := range files {
			t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
				text, err := os.ReadFile(f)
				if err != nil || !strings.HasPrefix(string(text), "# ") {
					t.Fatalf("%s must open with a sentence that says what it shows: %v", f, err)
				}
				var s schedtest.Script
				datadriven.RunTest(t, f, s.Run)
			})
		}
	}
}
