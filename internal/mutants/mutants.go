// Package mutants holds deliberate breakages: each the kind of mistake that a
// maintainer would make, with the check that must catch it. A mutant is a
// small replacement in one source file, laid over the build with go build's
// -overlay; no product build contains any.
package mutants

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Mutant replaces Old, which must occur exactly once in File, by New.
type Mutant struct {
	Name  string
	File  string // relative to the module
	Why   string // the mistake it stands for
	Edits []Edit
}

// Edit is one replacement.
type Edit struct{ Old, New string }

// Source is the mutated source of a mutant, and the path of the file that it
// stands for.
func Source(name string) (path, text string, err error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", "", fmt.Errorf("finding the module: %w", err)
	}
	root := strings.TrimSpace(string(out))
	for _, m := range All {
		if m.Name != name {
			continue
		}
		path = filepath.Join(root, filepath.FromSlash(m.File))
		src, err := os.ReadFile(path)
		if err != nil {
			return "", "", err
		}
		text = string(src)
		for _, e := range m.Edits {
			if n := strings.Count(text, e.Old); n != 1 {
				return "", "", fmt.Errorf("mutant %s: %q occurs %d times in %s, want once: the source has moved on, move the mutant too", name, e.Old, n, m.File)
			}
			text = strings.Replace(text, e.Old, e.New, 1)
		}
		return path, text, nil
	}
	return "", "", fmt.Errorf("there is no mutant %s", name)
}

// Overlay writes the mutated source and the overlay file for go build into
// dir, and returns the overlay's path.
func Overlay(name, dir string) (string, error) {
	path, text, err := Source(name)
	if err != nil {
		return "", err
	}
	mutated := filepath.Join(dir, filepath.Base(path))
	if err := os.WriteFile(mutated, []byte(text), 0o644); err != nil {
		return "", err
	}
	data, err := json.Marshal(map[string]map[string]string{"Replace": {path: mutated}})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, data, 0o644)
}
