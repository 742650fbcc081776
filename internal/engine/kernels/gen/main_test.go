package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestFiles: what is checked in is what gen writes.
func TestFiles(t *testing.T) {
	for name, want := range files() {
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what gen writes: run go generate in the package above", name)
		}
	}
}
