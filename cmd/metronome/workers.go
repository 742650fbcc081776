package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
)

// workersFile is what --workers FILE holds: workers as the flags --prefill and
// --decode take them.
type workersFile struct {
	Prefill []string `yaml:"prefill"`
	Decode  []string `yaml:"decode"`
}

// parseWorkers reads a --workers file: YAML with the lists prefill and decode,
// or lines with a role and a URL. A file that names nobody is refused: it is
// more likely broken than meant.
func parseWorkers(data []byte) (w workersFile, err error) {
	var keys map[string]any
	if yaml.Unmarshal(data, &keys) == nil && len(keys) > 0 {
		for _, k := range slices.Sorted(maps.Keys(keys)) {
			if k != "prefill" && k != "decode" {
				return w, fmt.Errorf("unknown key %q; the lists are prefill and decode", k)
			}
		}
		if err = yaml.Unmarshal(data, &w); err != nil {
			return workersFile{}, fmt.Errorf("not the lists prefill and decode: %s", plainYAML(err))
		}
	} else if w, err = workerLines(string(data)); err != nil {
		return workersFile{}, err
	}
	if len(w.Prefill)+len(w.Decode) == 0 {
		return workersFile{}, errors.New("names no worker")
	}
	return w, nil
}

func workerLines(text string) (w workersFile, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		if i := strings.IndexByte(line, '#'); i >= 0 {
			line = line[:i]
		}
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
		case len(words) == 2 && words[0] == "prefill":
			w.Prefill = append(w.Prefill, words[1])
		case len(words) == 2 && words[0] == "decode":
			w.Decode = append(w.Decode, words[1])
		default:
			return w, fmt.Errorf("line %d is neither YAML nor like: prefill http://10.0.0.1:30000,8998", n)
		}
	}
	return w, nil
}
