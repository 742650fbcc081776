package lint

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pages calls f with every page of the repository that is written for people.
func pages(t *testing.T, f func(path, text string)) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("no page %s: %v", pattern, err)
		}
		for _, path := range found {
			f(path, readText(t, path))
		}
	}
}

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A link between pages leads to a file, and a test that a page names is there.
func TestPagesNameWhatIsThere(t *testing.T) {
	links, tests := regexp.MustCompile(`\]\(([^):# ]+)\)`), regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z][A-Za-z0-9]*)`")
	var code bytes.Buffer
	files(t, func(path string, text []byte) {
		if strings.HasSuffix(path, "_test.go") {
			code.Write(text)
		}
	})
	pages(t, func(path, text string) {
		for _, m := range links.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s leads to %s, which is not there", path, m[1])
			}
		}
		for _, m := range tests.FindAllStringSubmatch(text, -1) {
			if filepath.Base(path) == "mutants.md" { // patterns of names
				continue
			}
			if !bytes.Contains(code.Bytes(), []byte("\nfunc "+m[1]+"(")) {
				t.Errorf("%s names %s, and there is no such test", path, m[1])
			}
		}
	})
}

// Every page of docs is reached from ARCHITECTURE.md, and so is every package.
func TestArchitectureNamesAll(t *testing.T) {
	text := readText(t, filepath.Join(root, "ARCHITECTURE.md"))
	for _, pattern := range []string{"docs/*.md", "internal/*"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			name, want := strings.TrimPrefix(filepath.ToSlash(path), root+"/"), ""
			if want = "](" + name + ")"; strings.HasPrefix(name, "internal/") {
				want = "\n    " + name + "/"
			}
			if !strings.Contains(text, want) {
				t.Errorf("ARCHITECTURE.md does not name %s", name)
			}
		}
	}
}

// CONTRIBUTING.md names the targets of the Makefile that a person runs, and no others.
func TestTargets(t *testing.T) {
	makefile, page := readText(t, filepath.Join(root, "Makefile")), readText(t, filepath.Join(root, "CONTRIBUTING.md"))
	named := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)(?:^    |`+"`"+`)make ([a-z-]+)`).FindAllStringSubmatch(page, -1) {
		named[m[1]] = true
		if !strings.Contains(makefile, "\n"+m[1]+":") {
			t.Errorf("CONTRIBUTING.md names make %s, which the Makefile lacks", m[1])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):.*## by hand`).FindAllStringSubmatch(makefile, -1) {
		if !named[m[1]] {
			t.Errorf("make %s is run by hand, and CONTRIBUTING.md does not name it", m[1])
		}
	}
}

// runs are the rows of docs/runs.md that must be there, with what each said.
var runs = map[string][]string{
	"soak":         {"10m0s", "soak: ", "MiB at the end"},
	"lm-eval tiny": {"own_choice", "own_words", "agree on 24 questions, bit for bit"},
	"clients": {"PASS: TestRealClients/openai_for_Python", "PASS: TestRealClients/openai_for_Node", "PASS: TestRealClients/curl",
		"PASS: TestBrowser", "PASS: TestLoadGenerator"},
}

// The last run of everything that is run by hand is there, and was good.
func TestRuns(t *testing.T) {
	page := readText(t, filepath.Join(root, "docs/runs.md"))
	row := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (\\d{4}-\\d\\d-\\d\\d) \\| ([^|]+) \\| ([^|]+) \\| (.+) \\|$")
	found := map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(page, -1) {
		run, verdict, said := m[1], m[4], m[5]
		found[run] = true
		if verdict != "ok" {
			t.Errorf("the run %s of %s: %s", run, m[2], verdict)
		}
		for _, part := range runs[run] {
			if !strings.Contains(said, part) {
				t.Errorf("the run %s of %s did not say %q", run, m[2], part)
			}
		}
		agree(t, run, said)
	}
	for run := range runs {
		if !found[run] {
			t.Errorf("docs/runs.md has no run %s", run)
		}
	}
}

// agree holds what a load generator reported against our metrics.
func agree(t *testing.T, run, said string) {
	pairs := regexp.MustCompile(`([a-z, -]+): aiperf ([0-9.]+), metrics ([0-9.]+)`).FindAllStringSubmatch(said, -1)
	if run == "clients" && len(pairs) != 6 {
		t.Errorf("the run clients compares %d figures, not 6", len(pairs))
	}
	for _, m := range pairs {
		theirs, _ := strconv.ParseFloat(m[2], 64)
		ours, _ := strconv.ParseFloat(m[3], 64)
		if theirs == 0 || math.Abs(theirs-ours) > 0.02*theirs {
			t.Errorf("%s: aiperf reported %s, our metrics said %s", strings.TrimSpace(m[1]), m[2], m[3])
		}
	}
}

// In what compare-router wrote, no row of ours is bold: each failure and each
// fidelity row held.
func TestRouterBesideOthers(t *testing.T) {
	text := readText(t, filepath.Join(root, "docs/compare-router.md"))
	_, rows, ok := strings.Cut(text, "## Failures and fidelity")
	lines := slices.Collect(strings.Lines(rows))
	lines = slices.DeleteFunc(lines, func(s string) bool { return !strings.HasPrefix(s, "| ") })
	if !ok || len(lines) < 15 {
		t.Fatalf("docs/compare-router.md has %d rows on failures and fidelity", len(lines))
	}
	for _, line := range lines {
		if strings.Contains(line, "**") {
			t.Errorf("ours does not hold: %s", line)
		}
	}
}
