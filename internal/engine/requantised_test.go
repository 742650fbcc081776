//go:build references

package engine

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

var requantised = flag.String("requantised", "../../.cache/llamacpp/requantised", "folder of the files that scripts/llamacpp/references.sh made")

// TestRequantised compares real models in every format with llama.cpp, whose
// quantiser wrote the files. They are too large for the repository: make
// references makes and tests them.
func TestRequantised(t *testing.T) {
	var ref recorded
	modeltest.JSON(t, "llamacpp/requantised.json", &ref)
	for name, r := range ref.Models {
		t.Run(name, func(t *testing.T) {
			w := openModel(t, filepath.Join(*requantised, name+".gguf"))
			var texts [][]int32
			if b, err := os.ReadFile(filepath.Join(*requantised, name+".ids")); err != nil {
				t.Fatal(err)
			} else if err := json.Unmarshal(b, &texts); err != nil {
				t.Fatal(err)
			}
			compareExact(t, w, r, texts)
			compareNative(t, w, r, texts)
		})
	}
}
