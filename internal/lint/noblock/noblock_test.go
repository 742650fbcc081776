package noblock

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// text is a finding in one line, for regular expressions.
func text(f Finding) string { return f.What + " | " + strings.Join(f.Chain, " → ") }

const root = "../../.."

// TestProduct: nothing that a loop reaches waits, and the exceptions are those
// of ARCHITECTURE.md. From the baseline's loop, in the same program, the GETs
// that it waits for are found. More of what is found when something does wait
// is shown by internal/mutants.
func TestProduct(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the call graph of the whole program")
	}
	t.Parallel()
	p, err := Load(root, nil, "./cmd/metronome")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range p.Check() {
		t.Error(f)
	}
	t.Run("baseline", func(t *testing.T) { baseline(t, p) })
	page, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(page), "\n## Exceptions of noblock\n")
	if !ok {
		t.Fatal("ARCHITECTURE.md has no section \"Exceptions of noblock\"")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	listed := regexp.MustCompile(`(?m)^\| `+"`"+`(.+)`+"`"+` \| (.*) \|$`).FindAllStringSubmatch(section, -1)
	var want, have []string
	for _, row := range listed {
		want = append(want, row[1]+": "+row[2])
	}
	for _, e := range p.Allowed() {
		have = append(have, e.At+": "+e.Reason)
	}
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("the code has the exceptions %q, ARCHITECTURE.md lists %q", have, want)
	}
}

// baseline: the loop that waits for registries is found out, by the way through
// each of its GETs.
func baseline(t *testing.T, p *Program) {
	for _, get := range []string{"FetchInfo", "QueryRanks", "LookupRank"} {
		way := regexp.MustCompile(`network I/O.* \| \(\*internal/worker\.loop\)\.runBlocking.* → \(\*internal/worker\.loop\)\.askRegistries.* → .*Client\)\.` + get + ` `)
		if !slices.ContainsFunc(p.CheckBaselines(), func(f Finding) bool { return way.MatchString(text(f)) }) {
			t.Errorf("noblock does not see that the baseline waits for %s", get)
		}
	}
}

// TestSamples: each sample that waits is found, with the way to it, and nothing
// besides.
func TestSamples(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the call graph of a program")
	}
	t.Parallel()
	p, err := Load("testdata/samples", nil, ".")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]Finding{}
	for _, f := range p.Check() {
		found[f.At] = append(found[f.At], f)
	}
	names, err := filepath.Glob("testdata/samples/*.go")
	if err != nil || len(names) < 3 {
		t.Fatal(names, err)
	}
	n := 0
	for _, name := range names {
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(src), "\n") {
			at := fmt.Sprintf("%s:%d", filepath.Base(name), i+1)
			_, want, ok := strings.Cut(line, "// want: ")
			if !ok {
				continue
			}
			n++
			if len(found[at]) == 0 {
				t.Errorf("%s: nothing is found, want %s", at, want)
			}
			for _, f := range found[at] {
				if !regexp.MustCompile(want).MatchString(text(f)) {
					t.Errorf("%s: found %s\nwant %s", at, text(f), want)
				}
			}
			delete(found, at)
		}
	}
	for at, fs := range found {
		if at == reasonless(t) {
			if len(fs) != 1 || fs[0].What != "an exception without a reason" {
				t.Errorf("%s: %v", at, fs)
			}
			continue
		}
		t.Errorf("nothing waits here, but found: %v", fs)
	}
	if n < 30 {
		t.Errorf("only %d expectations were read", n)
	}
	if list := p.Allowed(); len(list) != 4 {
		t.Errorf("exceptions: %v", list)
	}
}

// reasonless is where the samples have an exception without a reason: a comment
// there would be one.
func reasonless(t *testing.T) string {
	src, err := os.ReadFile("testdata/samples/rules.go")
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(string(src), "\n") {
		if strings.TrimSpace(line) == allowMark {
			return fmt.Sprintf("rules.go:%d", i+1)
		}
	}
	t.Fatal("the samples have lost their exception without a reason")
	return ""
}
