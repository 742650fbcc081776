package engine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/metronome-serve/metronome/internal/model"
)

// A model's file that is cut short under the engine ends batches with an error
// that says so, on one thread and on several, and not the process.
func TestFileCutShort(t *testing.T) {
	for _, threads := range []int{1, 3} {
		path, w := weightsInFile(t)
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
			if err := run(); !errors.Is(err, ErrModelGone) {
				t.Errorf("%d threads: %v", threads, err)
			}
		}
	}
}

// One that is cut short before it is hashed is an error of New.
func TestFileCutShortWhileLoading(t *testing.T) {
	path, w := weightsInFile(t)
	if err := os.Truncate(path, 1<<16); err != nil {
		t.Fatal(err)
	}
	if _, err := New(w, Config{Pages: 8, PageSize: 16, Threads: 2, Context: 64, MaxBatchTokens: 64, KVDType: "f16", Precision: "native", TP: 1}); !errors.Is(err, ErrModelGone) {
		t.Errorf("New: %v", err)
	}
}

// weightsInFile is the built-in model in a file of its own.
func weightsInFile(t *testing.T) (path string, w *Weights) {
	path = filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(path, model.Builtin(), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if w, err = LoadWeights(f); err != nil {
		t.Fatal(err)
	}
	return path, w
}

type fault uintptr

func (f fault) Addr() uintptr { return uintptr(f) }

// Only a fault in the file is the file's: any other one is a mistake of ours,
// which must not be told as something else.
func TestOtherFaultsGoOn(t *testing.T) {
	f, err := model.OpenBytes("built-in", model.Builtin())
	if err != nil {
		t.Fatal(err)
	}
	tensor, _ := f.Tensor(f.Tensors()[0])
	inside := uintptr(unsafe.Pointer(&tensor.Data[0]))
	goesOn := func(p any, mapped func(uintptr) bool) (on bool) {
		defer func() { on = recover() != nil }()
		memoryGone(p, mapped)
		return
	}
	for _, c := range []struct {
		p      any
		mapped func(uintptr) bool
		want   bool
	}{{fault(inside), f.Holds, false}, {fault(8), f.Holds, true}, {fault(inside), nil, true}, {"other", f.Holds, true}, {ErrModelGone, f.Holds, false}, {nil, nil, false}} {
		if got := goesOn(c.p, c.mapped); got != c.want {
			t.Errorf("%v: goes on %v, want %v", c.p, got, c.want)
		}
	}
}
