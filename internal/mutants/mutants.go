// Package mutants holds deliberate breakages: each the kind of mistake that a
// maintainer would make, with the check that must catch it. A mutant is a
// small replacement in one source file, laid over the build with go build's
// -overlay; no product build contains any.
//
// The test builds the named check of each mutant twice, as it is and broken:
// the first must pass, the second must compile and fail. All mutants that make
// a loop wait are laid over one analysis by internal/lint/noblock, which must
// find each of them by its own chain of calls. A mutant that survives is a
// missing test. docs/mutants.md is what the last whole run found:
//
//	go test ./internal/mutants -all -rewrite
//
// Without -all only a part of the mutants is taken, chosen by their names. With
// it each that waits is also analysed alone, and each that the simulator sees must
// break a rule there in one of the first seeds.
package mutants

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// Mutant is Edits of File. What kills it is either Test or Waits, and the simulator beside it.
type Mutant struct {
	Name  string
	File  string // relative to the module
	Why   string // the mistake it stands for
	Edits []Edit
	Test  Test     // must fail
	Sim   bool     // simulated fleets break a rule by it, too
	Waits []string // functions that a chain of noblock passes through, in order; or words of what it waits for, as the last
}

// Edit replaces Old, which must occur exactly once in the file as the edits
// before it left it, by New.
type Edit struct{ Old, New string }

// Test names tests of one package, in the cheapest tier that sees the mutant.
type Test struct {
	Package string // relative to the module
	Run     string // of go test -run
	Args    string // further arguments of the test binary, by spaces
}

var root = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("finding the module: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
})

// Sources are the files that the named mutants change, all laid over one
// another, by absolute path.
func Sources(names ...string) (map[string]string, error) {
	dir, err := root()
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, name := range names {
		m := find(name)
		if m == nil {
			return nil, fmt.Errorf("there is no mutant %s", name)
		}
		path := filepath.Join(dir, filepath.FromSlash(m.File))
		text, ok := files[path]
		if !ok {
			src, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			text = string(src)
		}
		for _, e := range m.Edits {
			if n := strings.Count(text, e.Old); n != 1 {
				return nil, fmt.Errorf("mutant %s: %q occurs %d times in %s, want once: the source has moved on, move the mutant too", name, e.Old, n, m.File)
			}
			text = strings.Replace(text, e.Old, e.New, 1)
		}
		files[path] = text
	}
	return files, nil
}

func find(name string) *Mutant {
	for i := range All {
		if All[i].Name == name {
			return &All[i]
		}
	}
	return nil
}

// Overlay writes the mutated source of one mutant and the overlay file for go
// build into dir, and returns the overlay's path.
func Overlay(name, dir string) (string, error) {
	files, err := Sources(name)
	if err != nil {
		return "", err
	}
	return WriteOverlay(files, dir)
}

// WriteOverlay writes sources, by the absolute path of the file that each
// stands for, and their overlay file into dir, and returns the overlay's path.
func WriteOverlay(files map[string]string, dir string) (string, error) {
	replace := map[string]string{}
	for path, text := range files {
		mutated := filepath.Join(dir, filepath.Base(path))
		if err := os.WriteFile(mutated, []byte(text), 0o644); err != nil {
			return "", err
		}
		replace[path] = mutated
	}
	data, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, data, 0o644)
}
