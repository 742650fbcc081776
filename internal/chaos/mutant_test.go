package chaos

import (
	"fmt"
	"os/exec"
	"path/filepath"
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
	out := filepath.Join(dir, "metronome-"+name)
	cmd := exec.Command("go", "build", "-overlay", overlay, "-o", out, "github.com/metronome-serve/metronome/cmd/metronome")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building mutant %s: %w\n%s", name, err, msg)
	}
	return out, nil
}
