package chaos

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/mutants"
)

// buildMutant builds the product with one deliberate breakage laid over its
// sources; the sources themselves stay as they are.
func buildMutant(t *testing.T, name string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	overlay, err := mutants.Overlay(name, dir)
	if err != nil {
		return "", err
	}
	return buildOverlay(overlay, filepath.Join(dir, "metronome-"+name))
}

// buildNextRevision builds the product as it would be after a change of its
// arithmetic: nothing but the numerics revision differs.
func buildNextRevision(t *testing.T) (string, error) {
	t.Helper()
	path, err := filepath.Abs("../engine/engine.go")
	if err != nil {
		return "", err
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	const old = "const Revision = "
	if strings.Count(string(src), old) != 1 {
		return "", fmt.Errorf("%s: want %q once", path, old)
	}
	dir := t.TempDir()
	overlay, err := mutants.WriteOverlay(map[string]string{path: strings.Replace(string(src), old, old+"1 + ", 1)}, dir)
	if err != nil {
		return "", err
	}
	return buildOverlay(overlay, filepath.Join(dir, "metronome-next"))
}

func buildOverlay(overlay, out string) (string, error) {
	cmd := exec.Command("go", "build", "-overlay", overlay, "-o", out, "github.com/metronome-serve/metronome/cmd/metronome")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", filepath.Base(out), err, msg)
	}
	return out, nil
}
