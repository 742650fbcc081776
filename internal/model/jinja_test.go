package model

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

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

// TestJinja compares with Jinja2 itself: same text, or an error on both sides.
// METRONOME_TEST_JINJA names another file of cases, as testdata/jinja/reference.py
// writes them.
func TestJinja(t *testing.T) {
	path := "jinja/cases.json"
	if p := os.Getenv("METRONOME_TEST_JINJA"); p != "" {
		path = p
	}
	var ref struct {
		Cases []struct {
			Template string
			Messages []Message
			Generate bool
			Text     *string
		}
	}
	modeltest.JSON(t, path, &ref)
	if len(ref.Cases) < 100 {
		t.Fatalf("%d cases", len(ref.Cases))
	}
	for _, c := range ref.Cases {
		msgs := c.Messages
		if msgs == nil {
			msgs = ref.Cases[0].Messages
		}
		got, err := renderSource(c.Template, msgs, c.Generate)
		switch {
		case c.Text == nil && err == nil:
			t.Errorf("%q gives %q, where Jinja2 gives an error", c.Template, got)
		case c.Text != nil && err != nil:
			t.Errorf("%q: %v, where Jinja2 gives %q", c.Template, err, *c.Text)
		case c.Text != nil && got != *c.Text:
			t.Errorf("%q\n gives %q\n  want %q", c.Template, got, *c.Text)
		case err != nil && (strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "line ")):
			t.Errorf("%q: the error %q is not one line with a place", c.Template, err)
		}
	}
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
