// Package modeltest finds the models and reference outputs that tests of
// several packages need.
package modeltest

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/known"
)

// SmolLM2 is the path of SmolLM2-135M-Instruct in Q4_1: that of the variable
// METRONOME_TEST_SMOLLM2, or where metronome pull puts it. Without the file it
// skips the test; a wrong file fails it.
func SmolLM2(t testing.TB) string {
	t.Helper()
	path, err := findSmol()
	if errors.Is(err, fs.ErrNotExist) && os.Getenv("METRONOME_TEST_SMOLLM2") == "" {
		t.Skipf("needs SmolLM2-135M-Instruct: run metronome pull smollm2 (%v)", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// findSmol checks the hash once a process.
var findSmol = sync.OnceValues(func() (string, error) {
	m, _ := known.Find("smollm2")
	path := os.Getenv("METRONOME_TEST_SMOLLM2")
	if path == "" {
		dir, err := known.Dir()
		if err != nil {
			return "", err
		}
		path = m.Path(dir)
	}
	return path, m.Check(path)
})

// Path is the path of a file in the repository's testdata folder.
func Path(t testing.TB, name string) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, "testdata", filepath.FromSlash(name))
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above the working directory")
		}
	}
}

// JSON reads a file of reference outputs from the testdata folder.
func JSON(t testing.TB, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(Path(t, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}
