package model

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// few are limits that tests reach quickly.
var few = limits{steps: 1 << 16, output: 1 << 20, made: 4 << 20}

// renderSource runs a template as NewTemplate and Render do.
func renderSource(src string, msgs []Message, generate bool) (string, error) {
	body, err := parseTemplate(src)
	if err != nil {
		return "", err
	}
	t := Template{limits: few, body: body, vars: map[string]any{"tools": nil, "documents": nil, "bos_token": literal("<s>"), "eos_token": literal("</s>")}}
	return t.Render(msgs, generate)
}

// jinjaReference is what testdata/jinja/reference.py writes.
type jinjaReference struct {
	Cases []struct {
		Template string
		Messages []Message
		Generate bool
		Text     *string // nil: Jinja2 gives an error
	}
	Chats    [][]Message
	Families []struct {
		Family   string
		Chat     int
		Generate bool
		Text     *string
	}
}

// compare holds our interpreter against the reference: same text, or an error
// on both sides.
func (ref *jinjaReference) compare(t *testing.T) {
	t.Helper()
	if len(ref.Cases) < 100 || len(ref.Families) < 12*len(ref.Chats) || len(ref.Chats) < 10 {
		t.Fatalf("%d cases, %d chats, %d renderings of families", len(ref.Cases), len(ref.Chats), len(ref.Families))
	}
	for _, c := range ref.Cases {
		msgs := c.Messages
		if msgs == nil {
			msgs = ref.Cases[0].Messages
		}
		got, err := renderSource(c.Template, msgs, c.Generate)
		compareJinja(t, c.Template, got, err, c.Text)
	}
	known := families(t)
	for _, c := range ref.Families {
		got, err := known[c.Family].tpl.Render(ref.Chats[c.Chat], c.Generate)
		compareJinja(t, fmt.Sprintf("%s, chat %d", c.Family, c.Chat), got, err, c.Text)
	}
}

func compareJinja(t *testing.T, what, got string, err error, want *string) {
	t.Helper()
	switch {
	case want == nil && err == nil:
		t.Errorf("%q gives %q, where Jinja2 gives an error", what, got)
	case want != nil && err != nil:
		t.Errorf("%q: %v, where Jinja2 gives %q", what, err, *want)
	case want != nil && got != *want:
		t.Errorf("%q\n gives %q\n  want %q", what, got, *want)
	case err != nil && (strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "line ")):
		t.Errorf("%q: the error %q is not one line with a place", what, err)
	}
}

// TestJinja compares with what Jinja2 has given.
func TestJinja(t *testing.T) {
	var ref jinjaReference
	modeltest.JSON(t, "jinja/cases.json", &ref)
	ref.compare(t)
}

// TestJinjaAlive compares with Jinja2 itself, which runs on the same templates
// and on random ones. METRONOME_TEST_JINJA is "seed count", for a longer search.
func TestJinjaAlive(t *testing.T) {
	venv := os.Getenv("METRONOME_VENV")
	if venv == "" {
		t.Skip("METRONOME_VENV is not set: make unit sets it to a Python environment with jinja2")
	}
	args := []string{"2", "60"}
	if s := os.Getenv("METRONOME_TEST_JINJA"); s != "" {
		args = strings.Fields(s)
	}
	t.Logf("seed and count: %s", args)
	path := filepath.Join(t.TempDir(), "cases.json")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	script := append([]string{modeltest.Path(t, "jinja/reference.py")}, append(args, path)...)
	if out, err := exec.CommandContext(ctx, filepath.Join(venv, "bin", "python"), script...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var ref jinjaReference
	if err := json.Unmarshal(b, &ref); err != nil {
		t.Fatal(err)
	}
	ref.compare(t)
}

// TestDocs: the page for users lists exactly what the interpreter has.
func TestDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/model.md")
	if err != nil {
		t.Fatal(err)
	}
	known := slices.DeleteFunc(slices.Sorted(maps.Keys(functions)), func(name string) bool { return functions[name].call == nil })
	for kind, names := range map[string][]string{
		"filters": slices.Sorted(maps.Keys(filters)), "tests": slices.Sorted(maps.Keys(tests)), "methods": slices.Sorted(maps.Keys(methods)),
		"functions": slices.Sorted(slices.Values(append(known, "dict", "namespace"))),
	} {
		if line := "- " + kind + " `" + strings.Join(names, " ") + "`"; !strings.Contains(string(page), line) {
			t.Errorf("docs/model.md lacks the line %s", line)
		}
	}
}
