// Package modeltest finds the models and reference outputs that tests of
// several packages need.
package modeltest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// smolSHA is the sha256 of the SmolLM2 file that scripts/fetch-smollm2.sh fetches.
const smolSHA = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

// SmolLM2 is the path of SmolLM2-135M-Instruct in Q4_1: that of the variable
// METRONOME_TEST_SMOLLM2, or where scripts/fetch-smollm2.sh puts it. Without
// the file it skips the test; a wrong file fails it.
func SmolLM2(t testing.TB) string {
	t.Helper()
	path, err := findSmol()
	if errors.Is(err, fs.ErrNotExist) && os.Getenv("METRONOME_TEST_SMOLLM2") == "" {
		t.Skipf("needs SmolLM2-135M-Instruct: run scripts/fetch-smollm2.sh (%v)", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// findSmol checks the hash once a process.
var findSmol = sync.OnceValues(func() (string, error) {
	path := os.Getenv("METRONOME_TEST_SMOLLM2")
	if path == "" {
		cache := os.Getenv("XDG_CACHE_HOME")
		if cache == "" {
			cache = filepath.Join(os.Getenv("HOME"), ".cache")
		}
		path = filepath.Join(cache, "metronome", "models", smolSHA, "SmolLM2-135M-Instruct.Q4_1.gguf")
	}
	h, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer h.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, h); err != nil {
		return "", err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != smolSHA {
		return "", fmt.Errorf("%s has sha256 %s, %s would be right", path, got, smolSHA)
	}
	return path, nil
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
