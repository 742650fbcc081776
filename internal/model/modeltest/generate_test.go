package modeltest

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

var write = flag.String("write", "", "folder that TestModels writes the generated models to")

// TestModels: the same files come out everywhere, and no two are alike.
func TestModels(t *testing.T) {
	seen := map[string]string{}
	size := 0
	for _, m := range Models() {
		b := m.GGUF()
		size += len(b)
		sum := fmt.Sprintf("%x", sha256.Sum256(b))
		if other, ok := seen[sum]; ok {
			t.Errorf("%s is %s", m.Name, other)
		}
		seen[sum] = m.Name
		if *write != "" {
			ids, err := json.Marshal(m.Texts())
			path := filepath.Join(*write, m.Name)
			if err := errors.Join(err, os.WriteFile(path+".gguf", b, 0o644), os.WriteFile(path+".ids", ids, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d models, %d bytes", len(seen), size)
}
