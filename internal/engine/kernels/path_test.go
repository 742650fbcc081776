package kernels

import (
	"strings"
	"testing"
)

// TestUse: a path that the processor lacks is refused by name, and nothing
// changes.
func TestUse(t *testing.T) {
	had, was := better, now
	defer func() { better, now = had, was }()
	better = nil
	if err := Use("auto"); err != nil || Path() != "portable" {
		t.Errorf("auto without better paths: %s, %v", Path(), err)
	}
	if err := Use("avx512"); err == nil || !strings.Contains(err.Error(), "avx512") || Path() != "portable" {
		t.Errorf("avx512 on a processor without: %s, %v", Path(), err)
	}
	better = []*path{{name: "best"}, {name: "good"}}
	for _, c := range [][2]string{{"auto", "best"}, {"good", "good"}, {"portable", "portable"}} {
		if err := Use(c[0]); err != nil || Path() != c[1] {
			t.Errorf("Use(%q): %s, %v, want %s", c[0], Path(), err, c[1])
		}
	}
}
