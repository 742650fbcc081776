package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestHugePages: the system was asked for large pages behind a mapped file.
func TestHugePages(t *testing.T) {
	if mode, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled"); err != nil || strings.Contains(string(mode), "[never]") {
		t.Skip("this system has no large pages")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "large"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4 << 20); err != nil {
		t.Fatal(err)
	}
	_, unmap, err := mapFile(f, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, mine, found := strings.Cut(string(maps), f.Name())
	_, flags, _ := strings.Cut(mine, "VmFlags:")
	flags, _, _ = strings.Cut(flags, "\n")
	if !found || !strings.Contains(flags+" ", " hg ") {
		t.Fatalf("flags of the mapping are %q", flags)
	}
}
