package lint

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write docs/faults.md anew")

// scenario is a fault that was reported in public for a serving system of this
// kind, and that ours could have too.
type scenario struct {
	number int
	what   string // goes wrong
	open   string // why no test shows it; "" where one does
}

// A test carries the number of a scenario in its name (TestF06…), or in a
// sentence of its doc comment or of a transcript's head: "Shows F-06, F-12."
var (
	named    = regexp.MustCompile(`^(?:Test|Fuzz)F(\d\d)[A-Z]`)
	sentence = regexp.MustCompile(`Shows (F-\d\d(?:, F-\d\d)*)\.`)
	mention  = regexp.MustCompile(`Shows F\b`)
)

// tiers are those of CONTRIBUTING.md, by the folder of a test.
var tiers = map[string]string{
	"internal/kv": "1 table", "internal/api": "1 table", "internal/lint": "6 architecture", "internal/chaos": "5 processes",
	"internal/bootstrap": "3 one process", "internal/transfer": "3 one process", "internal/worker": "3 one process",
	"internal/router": "3 one process", "cmd/metronome": "3 one process", "internal/sim": "4 simulator",
}

func tierOf(folder string) string {
	if strings.Contains(folder, "/testdata") {
		return "2 transcript"
	}
	return tiers[folder]
}

// shown is a test that carries a number.
type shown struct{ tier, folder, name string }

func (s shown) String() string {
	return fmt.Sprintf("`%s` `%s`", strings.TrimPrefix(s.folder, "internal/"), s.name)
}

// TestFaults: each public fault has a test or a reason why not, no number
// stands where no test is, and the page says which.
func TestFaults(t *testing.T) {
	tests := map[int][]shown{}
	add := func(where, number, folder, name string) {
		var n int
		fmt.Sscanf(number, "%d", &n)
		s := shown{tierOf(folder), folder, name}
		if s.tier == "" {
			t.Errorf("%s: the tier of %s is not known", where, folder)
		}
		if !slices.ContainsFunc(scenarios, func(s scenario) bool { return s.number == n }) {
			t.Errorf("%s: there is no fault F-%s", where, number)
		}
		if slices.Contains(tests[n], s) {
			t.Errorf("%s: %s carries F-%s twice", where, name, number)
		}
		tests[n] = append(tests[n], s)
	}
	files(t, func(at string, text []byte) {
		switch {
		case strings.HasSuffix(at, ".go"):
			numbersOfGo(t, at, text, add)
		case strings.Contains(at, "/testdata/"):
			numbersOfTranscript(t, at, string(text), add)
		}
	}, ".go", ".txt")
	for _, s := range scenarios {
		if (len(tests[s.number]) == 0) != (s.open != "") {
			t.Errorf("F-%02d has %d tests, and as reason for having none it says %q", s.number, len(tests[s.number]), s.open)
		}
	}
	page, file := faultsPage(tests), filepath.Join(root, "docs/faults.md")
	if *rewrite {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != page {
		t.Errorf("docs/faults.md is not what the tests say (%v): go test ./internal/lint -run TestFaults -rewrite", err)
	}
}

type adder func(where, number, folder, name string)

// numbersOfGo adds the numbers of a Go file. A sentence that stands anywhere but
// above a test is a mistake.
func numbersOfGo(t *testing.T, at string, text []byte, add adder) {
	if !mention.Match(text) && !strings.Contains(string(text), "func TestF") && !strings.Contains(string(text), "func FuzzF") {
		return
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, at, text, parser.ParseComments)
	if err != nil {
		t.Error(err)
		return
	}
	docs := map[*ast.CommentGroup]bool{}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv != nil || !strings.HasSuffix(at, "_test.go") || !strings.HasPrefix(fn.Name.Name, "Test") && !strings.HasPrefix(fn.Name.Name, "Fuzz") {
			continue
		}
		docs[fn.Doc] = true
		if m := named.FindStringSubmatch(fn.Name.Name); m != nil {
			add(at, m[1], path.Dir(at), fn.Name.Name)
		}
		numbersOf(t, at, fn.Doc.Text(), path.Dir(at), fn.Name.Name, add)
	}
	for _, c := range f.Comments {
		if !docs[c] && mention.MatchString(c.Text()) && !strings.HasSuffix(at, "internal/lint/faults_test.go") {
			t.Errorf("%s: a number that stands at no test: %s", fset.Position(c.Pos()), c.Text())
		}
	}
}

// numbersOfTranscript adds the numbers of a transcript, whose place is its head.
func numbersOfTranscript(t *testing.T, at, text string, add adder) {
	head := ""
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") {
			break
		}
		head += strings.TrimPrefix(line, "#")
	}
	if n := len(mention.FindAllString(text, -1)); n != len(mention.FindAllString(head, -1)) {
		t.Errorf("%s: a number that stands below the transcript's head", at)
	}
	numbersOf(t, at, head, path.Dir(at), path.Base(at), add)
}

func numbersOf(t *testing.T, at, text, folder, name string, add adder) {
	all := sentence.FindAllStringSubmatch(text, -1)
	if len(all) != len(mention.FindAllString(text, -1)) {
		t.Errorf("%s: %s: the sentence is not \"Shows F-01, F-02.\"", at, name)
	}
	for _, m := range all {
		for _, number := range strings.Split(m[1], ", ") {
			add(at, strings.TrimPrefix(number, "F-"), folder, name)
		}
	}
}

func faultsPage(tests map[int][]shown) string {
	var b strings.Builder
	missing := slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool { return len(tests[s.number]) > 0 })
	fmt.Fprintf(&b, `# Public faults, and what shows that they are not ours

Faults that were reported in public for prefill/decode serving systems and their neighbours, and that this system could
have too. Each has a number, and the tests that show it carry the number: in their names, or in a sentence of their comment
(`+"`Shows F-06.`"+`). A test stands in the lowest tier that can show the fault ([tiers](../CONTRIBUTING.md)). This page is written
from the tests (`+"`go test ./internal/lint -run TestFaults -rewrite`"+`). Of %d faults %d are shown.

| fault | what goes wrong | lowest tier | shown by |
|---|---|---|---|
`, len(scenarios), len(scenarios)-len(missing))
	for _, s := range scenarios {
		list := tests[s.number]
		if len(list) == 0 {
			continue
		}
		slices.SortFunc(list, func(a, b shown) int {
			return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.folder, b.folder), cmp.Compare(a.name, b.name))
		})
		var names []string
		for _, s := range list {
			names = append(names, s.String())
		}
		fmt.Fprintf(&b, "| F-%02d | %s | %s | %s |\n", s.number, s.what, list[0].tier, strings.Join(names, ", "))
	}
	if len(missing) > 0 {
		b.WriteString("\n## Not shown\n\n| fault | what goes wrong | why no test shows it |\n|---|---|---|\n")
	}
	for _, s := range missing {
		fmt.Fprintf(&b, "| F-%02d | %s | %s |\n", s.number, s.what, s.open)
	}
	return b.String()
}
