package mutants_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/lint/noblock"
	"github.com/metronome-serve/metronome/internal/mutants"
)

var (
	all     = flag.Bool("all", false, "run every mutant, not only the part that is chosen by name")
	rewrite = flag.Bool("rewrite", false, "write docs/mutants.md anew; mutants that do not run keep what they said")
	only    = flag.String("only", "", "run the mutants whose names match this expression")
)

const (
	module = "../.."
	page   = module + "/docs/mutants.md"
	limit  = 2 * time.Minute // of one run of one check
	parts  = 3               // a run without -all takes one mutant of so many
)

// kills is what this run has found, by mutant: the first failing line, and what
// the simulator says.
var kills struct {
	sync.Mutex
	first, sim map[string]string
}

func killed(list *map[string]string, name, line string) {
	kills.Lock()
	defer kills.Unlock()
	if *list == nil {
		*list = map[string]string{}
	}
	(*list)[name] = line
	if *rewrite {
		writePage()
	}
}

// TestMutants runs the checks and compares docs/mutants.md with the source.
func TestMutants(t *testing.T) {
	t.Run("Wellformed", wellformed)
	if testing.Short() {
		t.Run("Page", comparePage)
		t.Skip("the rest builds the checks anew for each mutant")
	}
	t.Run("Run", func(t *testing.T) {
		t.Run("Waits", waits)
		t.Run("Killed", killedByTests)
		if *all || *only != "" { // a whole program or simulator anew for each mutant
			t.Run("Alone", waitsAlone)
			t.Run("Sim", killedBySim)
		}
	})
	t.Run("Page", comparePage)
}

// wellformed: each mutant has one check, and its edits still fit the source.
func wellformed(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants.All {
		if m.Sim && m.Test.Run == "" {
			t.Errorf("%s: a wait is nothing that the simulator sees", m.Name)
		}
		if names[m.Name] || m.Why == "" || (m.Test.Run == "") == (len(m.Waits) == 0) {
			t.Errorf("%s: a mutant has a name of its own, a reason, and either a test or a wait", m.Name)
		}
		names[m.Name] = true
		if _, err := mutants.Sources(m.Name); err != nil {
			t.Error(err)
		}
	}
}

// wanted says whether this run takes a mutant.
func wanted(m *mutants.Mutant) bool {
	if *only != "" {
		return regexp.MustCompile(*only).MatchString(m.Name)
	}
	return *all || crc32.ChecksumIEEE([]byte(m.Name))%parts == 0
}

// killedByTests: the check of each mutant passes without it, and fails with it.
func killedByTests(t *testing.T) {
	byPackage := map[string][]*mutants.Mutant{}
	for i := range mutants.All {
		if m := &mutants.All[i]; m.Test.Run != "" && wanted(m) {
			byPackage[m.Test.Package] = append(byPackage[m.Test.Package], m)
		}
	}
	two := make(chan struct{}, 2) // builds and runs at once
	for _, pkg := range sorted(byPackage) {
		ms := byPackage[pkg]
		t.Run(filepath.Base(pkg), func(t *testing.T) {
			t.Parallel()
			t.Run("unbroken", func(t *testing.T) {
				two <- struct{}{}
				defer func() { <-two }()
				unbroken(t, pkg, tests(ms))
			})
			for _, m := range ms {
				t.Run(m.Name, func(t *testing.T) {
					t.Parallel()
					two <- struct{}{}
					defer func() { <-two }()
					if line := mustDie(t, m, m.Test); line != "" {
						killed(&kills.first, m.Name, line)
					}
				})
			}
		})
	}
}

func tests(ms []*mutants.Mutant) (list []mutants.Test) {
	for _, m := range ms {
		list = append(list, m.Test)
	}
	return list
}

// inFleets is the simulator's look at a mutant.
var inFleets = mutants.Test{Package: "internal/sim", Run: "TestSeeds", Args: "-seeds=500 -enough=1"}

var broken = regexp.MustCompile(`seed \d+: at \S+ (.*)`)

// killedBySim: the first seeds break no rule without a mutant, and one with it.
func killedBySim(t *testing.T) {
	unbroken(t, inFleets.Package, []mutants.Test{inFleets})
	for i := range mutants.All {
		m := &mutants.All[i]
		if !m.Sim || !wanted(m) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			line := mustDie(t, m, inFleets)
			if says := broken.FindStringSubmatch(line); says != nil {
				killed(&kills.sim, m.Name, says[1])
			} else if line != "" {
				t.Errorf("no rule is broken: %s", line)
			}
		})
	}
}

func sorted[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// unbroken: the checks of a package pass on the code as it is.
func unbroken(t *testing.T, pkg string, tests []mutants.Test) {
	bin, err := build(t, pkg, "")
	if err != nil {
		t.Fatal(err)
	}
	var done []mutants.Test
	for _, c := range tests {
		if slices.Contains(done, c) {
			continue
		}
		done = append(done, c)
		out, err := run(bin, c)
		if err != nil || bytes.Contains(out, []byte("testing: warning: no tests to run")) {
			t.Errorf("%s fails, or names no test, without a mutant: %v\n%s", command(c), err, tail(out))
		}
	}
}

// mustDie: the check fails on the mutant by itself and in time. It returns the
// line that says why.
func mustDie(t *testing.T, m *mutants.Mutant, c mutants.Test) string {
	overlay, err := mutants.Overlay(m.Name, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	bin, err := build(t, c.Package, overlay)
	if err != nil {
		t.Fatalf("it does not compile, which kills nothing: %v", err)
	}
	out, err := run(bin, c)
	switch {
	case err == nil:
		t.Errorf("it survives: %s\n%s passes: write the test that fails", m.Why, command(c))
	case bytes.Contains(out, []byte("panic: test timed out after")) || !bytes.Contains(out, []byte("--- FAIL")) && !bytes.Contains(out, []byte("panic:")) && !bytes.Contains(out, []byte("fatal error:")):
		t.Errorf("%s does not fail by itself: %v\n%s", command(c), err, tail(out))
	default:
		t.Log(firstLine(out))
		return firstLine(out)
	}
	return ""
}

// build makes a package's test binary, with an overlay unless it is "".
func build(t *testing.T, pkg, overlay string) (string, error) {
	bin := filepath.Join(t.TempDir(), "check.test")
	cmd := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay="+overlay, "-o", bin, "./"+pkg)
	cmd.Dir = module
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the tests of %s: %w\n%s", pkg, err, out)
	}
	return bin, nil
}

func run(bin string, c mutants.Test) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit+10*time.Second)
	defer cancel()
	args := append([]string{"-test.short", "-test.failfast", "-test.timeout=" + limit.String(), "-test.run=" + c.Run}, strings.Fields(c.Args)...)
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir = filepath.Join(module, filepath.FromSlash(c.Package))
	return cmd.CombinedOutput()
}

// command is how a reader runs the check.
func command(c mutants.Test) string {
	s := "go test ./" + c.Package + " -run '" + c.Run + "'"
	if c.Args != "" {
		s += " -args " + c.Args
	}
	return s
}

var (
	told  = regexp.MustCompile(`^\s*(\S+_test\.go|\S+\.go):\d+: (.*)$`)
	crash = regexp.MustCompile(`^(panic|fatal error): (.*)$`)
)

// firstLine is the first line that says what failed, without line numbers,
// which change.
func firstLine(out []byte) string {
	lines := strings.Split(string(out), "\n")
	for i, l := range lines {
		if m := crash.FindStringSubmatch(l); m != nil {
			return m[0]
		}
		if m := told.FindStringSubmatch(l); m != nil {
			text := strings.TrimSpace(m[2])
			for j := i + 1; text == "" && j < len(lines); j++ {
				text = strings.TrimSpace(lines[j])
			}
			return filepath.Base(m[1]) + ": " + text
		}
	}
	return ""
}

func tail(out []byte) []byte {
	if n := len(out) - 4000; n > 0 {
		return out[n:]
	}
	return out
}

// waits: noblock finds each mutant that makes a loop wait, all in one analysis.
// A mutant's own finding is one that fits no other's way. There are more findings:
// a wait under a lock is found at every place that takes the lock.
func waits(t *testing.T) {
	t.Parallel()
	var names []string
	for _, m := range mutants.All {
		if len(m.Waits) > 0 && (*only == "" || wanted(&m)) {
			names = append(names, m.Name)
		}
	}
	if len(names) == 0 {
		return
	}
	for _, f := range analyse(t, names...) {
		var by []string
		for _, m := range mutants.All {
			if len(m.Waits) > 0 && passes(append(slices.Clone(f.Chain), f.What), m.Waits) {
				by = append(by, m.Name)
			}
		}
		if len(by) == 1 {
			killed(&kills.first, by[0], f.At[:strings.LastIndex(f.At, ":")]+": "+f.What)
		}
	}
	for _, name := range names {
		kills.Lock()
		if kills.first[name] == "" {
			t.Errorf("%s: noblock has no finding of its own for it", name)
		}
		kills.Unlock()
	}
}

// waitsAlone: as the product has no finding, all that is found with one mutant
// laid over it is the mutant's, and it is found by its own way.
func waitsAlone(t *testing.T) {
	for i := range mutants.All {
		m := &mutants.All[i]
		if len(m.Waits) == 0 || !wanted(m) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			found := analyse(t, m.Name)
			if !slices.ContainsFunc(found, func(f noblock.Finding) bool { return passes(append(slices.Clone(f.Chain), f.What), m.Waits) }) {
				t.Errorf("noblock finds %v, none by way of %v", found, m.Waits)
			}
		})
	}
}

// analyse is what noblock finds with these mutants laid over the product.
func analyse(t *testing.T, names ...string) []noblock.Finding {
	files, err := mutants.Sources(names...)
	if err != nil {
		t.Fatal(err)
	}
	overlay := map[string][]byte{}
	for path, text := range files {
		overlay[path] = []byte(text)
	}
	p, err := noblock.Load(module, overlay, "./cmd/metronome")
	if err != nil {
		t.Fatal(err)
	}
	return p.Check()
}

// passes says whether a chain passes through these in their order.
func passes(chain, way []string) bool {
	for _, f := range chain {
		if len(way) > 0 && strings.Contains(f, way[0]) {
			way = way[1:]
		}
	}
	return len(way) == 0
}

const preface = `# Mutants

A mutant is a deliberate breakage of one source file: the mistake that a maintainer would make, and the check that must catch
it (` + "`internal/mutants`" + `). None is ever in a product build. This page is written by running them
(` + "`go test ./internal/mutants -all -rewrite`" + `), and each check must pass on the unbroken code first. CI lays the mutants that make a loop
wait over one analysis by noblock and runs a third of the others; ` + "`make long`" + ` runs them all, those that wait also alone, and those that the
simulator sees in its first 500 seeds (` + "`go test ./internal/sim -run TestSeeds -args -seeds=500 -enough=1`" + `). The last column is the first rule that a
fleet breaks; where it is empty the simulator sees nothing of the mutant, or was not asked.

| mutant | the mistake | file | killed by | it says | the simulator says |
|---|---|---|---|---|---|
`

// row is a mutant's row of the page but for the last column.
func row(m *mutants.Mutant) string {
	by := "`internal/lint/noblock`"
	if m.Test.Run != "" {
		by = "`" + strings.TrimPrefix(m.Test.Package, "internal/") + "` `" + cell(strings.TrimSpace(m.Test.Run+" "+m.Test.Args)) + "`"
	}
	return fmt.Sprintf("| %s | %s | `%s` | %s | ", m.Name, m.Why, strings.TrimPrefix(m.File, "internal/"), by)
}

// cell fits a text into a column.
func cell(s string) string {
	s = strings.NewReplacer("|", `\|`, "`", "'").Replace(s)
	if r := []rune(s); len(r) > 100 {
		s = string(r[:100]) + "…"
	}
	return s
}

// writePage is called with kills locked, after each kill: a long run that is
// cut short has lost nothing.
func writePage() {
	old, _ := os.ReadFile(page)
	var b strings.Builder
	b.WriteString(preface)
	for i := range mutants.All {
		m := &mutants.All[i]
		_, rest, _ := strings.Cut(string(old), "\n"+row(m))
		rest, _, _ = strings.Cut(rest, "\n")
		says, sim, _ := strings.Cut(rest, " | ")
		sim = strings.TrimSuffix(sim, " |")
		if line := kills.first[m.Name]; line != "" {
			says = "`" + cell(line) + "`"
		}
		if line := kills.sim[m.Name]; line != "" {
			sim = cell(line)
		} else if !m.Sim {
			sim = ""
		}
		if says != "" {
			fmt.Fprintf(&b, "%s%s | %s |\n", row(m), says, sim)
		}
	}
	if err := os.WriteFile(page, []byte(b.String()), 0o644); err != nil {
		panic(err)
	}
}

// comparePage: the page tells of exactly the mutants of the source, as they are.
func comparePage(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	rest, ok := strings.CutPrefix(string(text), preface)
	if !ok {
		t.Fatal("docs/mutants.md opens otherwise than this test: run go test ./internal/mutants -all -rewrite")
	}
	rows := strings.Split(strings.TrimSuffix(rest, "\n"), "\n")
	for i := range mutants.All {
		if i >= len(rows) || !strings.HasPrefix(rows[i], row(&mutants.All[i])) || strings.Contains(rows[i], "| `` |") || strings.HasSuffix(rows[i], "|  |") == mutants.All[i].Sim {
			t.Fatalf("docs/mutants.md does not tell of %s as the source does: run go test ./internal/mutants -all -rewrite", mutants.All[i].Name)
		}
	}
	if len(rows) != len(mutants.All) {
		t.Errorf("docs/mutants.md has %d mutants, the source %d", len(rows), len(mutants.All))
	}
}
