package engine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/metronome-serve/metronome/internal/model"
)

// A model's file that is cut short under the engine ends batches with an error
// that says so, on one thread and on several, and not the process.
func TestFileCutShort(t *testing.T) {
	for _, threads := range []int{1, 3} {
		path := filepath.Join(t.TempDir(), "m.gguf")
		if err := os.WriteFile(path, model.Builtin(), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := model.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		w, err := LoadWeights(f)
		if err != nil {
			t.Fatal(err)
		}
		e := newCPU(t, w, Config{Pages: 8, PageSize: 16, Threads: threads})
		run := func() error {
			return e.Run(&Batch{Rows: []Row{{Tokens: make([]int32, 40), Pages: pages(0, 8), Sample: &Sampling{}}}})
		}
		if err := run(); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, 1<<16); err != nil {
			t.Fatal(err)
		}
		for range 3 { // each batch, not the first only
			if err := run(); !errors.Is(err, errMemoryGone) {
				t.Errorf("%d threads: %v", threads, err)
			}
		}
	}
}
