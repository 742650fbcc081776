package mutants_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/tools/go/packages"

	"github.com/metronome-serve/metronome/internal/mutants"
)

var (
	random     = flag.Int("random", 10, "how many random mutations of the cores TestRandom tries")
	randomSeed = flag.Uint64("random-seed", 1, "which ones")
)

// cores are what TestRandom mutates, and the tests that must notice: first
// quick ones, then all of the package's that are short.
var cores = []struct{ pkg, files, quick string }{
	{"internal/sched", "*.go", "Transcripts"},
	{"internal/kv", "*.go", "."},
	{"internal/transfer", "table.go rooms.go window.go share.go mailbox.go frame.go", "Transcripts|Frame|Window|Share|Mailbox"},
	{"internal/router", "pair.go pick.go scores.go standing.go overload.go fault.go leases.go prefixes.go", "Pair|Pick|Scores|Standing|Overload|Lease|Prefix"},
	{"internal/bootstrap", "table.go info.go wire.go", "."},
}

// survivors lists the mutations that no test can notice, each with the reason.
const survivors = "testdata/survivors.txt"

// TestRandom breaks the cores at random places, each in a small way, and says
// which of the breakages no test of the package notices. One that survives is
// a missing test, or changes nothing that anybody could see: those stand in
// testdata/survivors.txt with the reason. Few are tried by default; more by
//
//	go test ./internal/mutants -run TestRandom -random 200 -random-seed 7 -timeout 2h -v
//
// All breakages of a package are built into one test binary, and
// METRONOME_MUTATION chooses one of them. They are: a condition negated, < for
// <= and the like, && for ||, + for -, a statement left out.
func TestRandom(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the tests of the cores anew")
	}
	reasons := equivalents(t)
	tried, killed, explained := 0, 0, 0
	for _, c := range cores {
		sites, files := mutate(t, c.pkg, strings.Fields(c.files))
		for _, s := range sites {
			if reasons[s.name] != "" {
				reasons[s.name] = "used"
			}
		}
		overlay, err := mutants.WriteOverlay(files, t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		bin, err := build(t, c.pkg, overlay)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := mutated(bin, c.pkg, "-1", "."); err != nil {
			t.Fatalf("%s fails without a mutation: %v\n%s", c.pkg, err, tail(out))
		}
		n := min(len(sites), (*random+len(cores)-1)/len(cores))
		for _, i := range draw(sites)[:n] {
			tried++
			s := sites[i]
			if _, err := mutated(bin, c.pkg, fmt.Sprint(i), c.quick); err != nil {
				killed++
			} else if _, err := mutated(bin, c.pkg, fmt.Sprint(i), "."); err != nil {
				killed++
			} else if reasons[s.name] != "" {
				explained++
			} else {
				t.Errorf("survives: %s (line %d)", s.name, s.line)
			}
		}
		t.Logf("%s: %d of %d places", c.pkg, n, len(sites))
	}
	for name, reason := range reasons {
		if reason != "used" {
			t.Errorf("%s names a place that is no more: %s", survivors, name)
		}
	}
	t.Logf("seed %d: %d mutations, %d killed, %d explained", *randomSeed, tried, killed, explained)
}

// draw puts the places in an order that follows from the seed and each name
// alone: a change elsewhere draws no others.
func draw(sites []site) []int {
	order, rank := make([]int, len(sites)), make([]uint32, len(sites))
	for i := range sites {
		order[i], rank[i] = i, crc32.ChecksumIEEE(fmt.Appendf(nil, "%d %s", *randomSeed, sites[i].name))
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(rank[a], rank[b]) })
	return order
}

// equivalents reads the list: a line for the mutation, then one, indented, for
// the reason why nobody can see it.
func equivalents(t *testing.T) map[string]string {
	text, err := os.ReadFile(survivors)
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]string{}
	last := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		reason, indented := strings.CutPrefix(line, "\t")
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case indented && last != "" && len(reason) > 10:
			list[last], last = reason, ""
		case !indented && last == "":
			last = line
		default:
			t.Fatalf("%s: want a mutation and its reason in turn, not %q", survivors, line)
		}
	}
	if last != "" {
		t.Fatalf("%s gives no reason for %s", survivors, last)
	}
	return list
}

// mutated runs the tests with one mutation. What fills the memory or runs for
// ever ends, too.
func mutated(bin, pkg, which, tests string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 70*time.Second)
	defer cancel()
	args := []string{"-test.short", "-test.failfast", "-test.timeout=60s", "-test.run=" + tests}
	cmd := exec.CommandContext(ctx, bin, args...)
	if runtime.GOOS == "linux" {
		cmd = exec.CommandContext(ctx, "sh", append([]string{"-c", `ulimit -v 8000000; exec "$0" "$@"`, bin}, args...)...)
	}
	cmd.Dir = filepath.Join(module, filepath.FromSlash(pkg))
	cmd.Env = append(os.Environ(), "METRONOME_MUTATION="+which)
	return cmd.CombinedOutput()
}

// site is one place that can be mutated. Its name has no line numbers, which
// change.
type site struct {
	name string
	line int
}

// mutate builds every mutation into the files of a package that are pure.
func mutate(t *testing.T, pkg string, names []string) (sites []site, files map[string]string) {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join(module, filepath.FromSlash(pkg)))
	if err != nil {
		t.Fatal(err)
	}
	pkgs, err := packages.Load(&packages.Config{Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports | packages.NeedDeps, Dir: dir}, ".")
	if err != nil || len(pkgs) != 1 || len(pkgs[0].Errors) > 0 {
		t.Fatal(err, pkgs)
	}
	p := pkgs[0]
	files = map[string]string{}
	for _, f := range p.Syntax {
		path := p.Fset.Position(f.Package).Filename
		wantedFile := slices.ContainsFunc(names, func(n string) bool { ok, _ := filepath.Match(n, filepath.Base(path)); return ok })
		src, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !wantedFile || !strings.HasPrefix(string(src), "//metronome:pure") {
			continue
		}
		m := &mutator{p: p, src: string(src), file: filepath.Base(pkg) + "/" + filepath.Base(path), first: len(sites), names: map[string]int{}}
		for _, d := range f.Decls {
			// What describes and checks is not what decides.
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil && !strings.Contains(fn.Name.Name, "Check") && !strings.Contains(fn.Name.Name, "escribe") && fn.Name.Name != "String" {
				m.fn = fn.Name.Name
				m.visit(fn.Body)
			}
		}
		if len(m.edits) > 0 {
			files[path] = m.apply()
			sites = append(sites, m.sites...)
		}
	}
	files[filepath.Join(dir, "mutation_switch.go")] = "package " + p.Name + mutationSwitch
	return sites, files
}

const mutationSwitch = `

import (
	"os"
	"strconv"
)

var mutationChosen = func() int {
	n, err := strconv.Atoi(os.Getenv("METRONOME_MUTATION"))
	if err != nil {
		return -1
	}
	return n
}()

func mutation(n int) bool { return n == mutationChosen }
`

// mutator collects the edits of one file.
type mutator struct {
	p     *packages.Package
	src   string
	file  string
	fn    string
	first int // number of the file's first site
	sites []site
	names map[string]int // how often each was given
	edits []insertion
}

// insertion puts text before the byte at.
type insertion struct {
	at   int
	text string
}

func (m *mutator) offset(p token.Pos) int { return m.p.Fset.Position(p).Offset }
func (m *mutator) textOf(n ast.Node) string {
	return m.src[m.offset(n.Pos()):m.offset(n.End())]
}

// add makes a site of a node: before and after go around it, with the number
// for each %d.
func (m *mutator) add(n ast.Node, kind, before, after string) {
	id := m.first + len(m.sites)
	name := fmt.Sprintf("%s %s: %s: %s", m.file, m.fn, kind, strings.Join(strings.Fields(m.textOf(n)), " "))
	if m.names[name]++; m.names[name] > 1 {
		name = fmt.Sprintf("%s #%d", name, m.names[name])
	}
	m.sites = append(m.sites, site{name, m.p.Fset.Position(n.Pos()).Line})
	number := func(s string) string { return strings.ReplaceAll(s, "%d", fmt.Sprint(id)) }
	m.edits = append(m.edits, insertion{m.offset(n.Pos()), number(before)}, insertion{m.offset(n.End()), number(after)})
}

// visit walks a body. A site inside another's text is left out where the text
// is repeated.
func (m *mutator) visit(n ast.Node) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			m.condition(n.Cond)
		case *ast.ForStmt:
			if n.Cond != nil {
				m.condition(n.Cond)
			}
		case *ast.SwitchStmt:
			if n.Tag == nil {
				for _, c := range n.Body.List {
					for _, e := range c.(*ast.CaseClause).List {
						m.condition(e)
					}
				}
			}
		case *ast.BlockStmt:
			m.statements(n.List)
		case *ast.CaseClause:
			m.statements(n.Body)
		case *ast.BinaryExpr:
			return m.binary(n)
		}
		return true
	})
}

func (m *mutator) condition(e ast.Expr) {
	if tv := m.p.TypesInfo.Types[e]; tv.Value == nil && types.Identical(tv.Type.Underlying(), types.Typ[types.Bool]) || tv.Type == types.Typ[types.UntypedBool] && tv.Value == nil {
		m.add(e, "negated", "mutation(%d) != (", ")")
	}
}

func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt, *ast.IncDecStmt:
			if !strings.HasPrefix(m.textOf(s), "panic(") {
				m.add(s, "left out", "if !mutation(%d) { ", " }")
			}
		case *ast.AssignStmt:
			if s.Tok != token.DEFINE {
				m.add(s, "left out", "if !mutation(%d) { ", " }")
			}
		}
	}
}

var others = map[token.Token]string{
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">", token.LAND: "||", token.LOR: "&&", token.ADD: "-", token.SUB: "+",
}

// binary mutates an expression by a copy of its text with another operator.
func (m *mutator) binary(e *ast.BinaryExpr) (deeper bool) {
	other, ok := others[e.Op]
	tv := m.p.TypesInfo.Types[e]
	if !ok || tv.Value != nil {
		return true
	}
	x, y := m.textOf(e.X), m.textOf(e.Y)
	switch e.Op {
	case token.ADD, token.SUB:
		b, ok := tv.Type.Underlying().(*types.Basic)
		if !ok || b.Info()&types.IsNumeric == 0 {
			return true
		}
		kind := types.TypeString(tv.Type, func(p *types.Package) string {
			if p == m.p.Types {
				return ""
			}
			return p.Name()
		})
		m.add(e, "with "+other, "func() "+kind+" { if mutation(%d) { return ("+x+") "+other+" ("+y+") }; return ", " }()")
	default:
		m.add(e, "with "+other, "(mutation(%d) && (("+x+") "+other+" ("+y+")) || !mutation(%d) && (", "))")
	}
	return true
}

// apply is the file with all its sites.
func (m *mutator) apply() string {
	// Of insertions at one place those of inner nodes come first at an end and
	// last at a beginning; add has put outer ones first.
	type numbered struct {
		insertion
		seq   int
		begin bool
	}
	var list []numbered
	for i, e := range m.edits {
		list = append(list, numbered{e, i, i%2 == 0})
	}
	slices.SortStableFunc(list, func(a, b numbered) int {
		switch {
		case a.at != b.at:
			return a.at - b.at
		case a.begin != b.begin:
			if a.begin {
				return 1 // an end before a beginning
			}
			return -1
		case a.begin:
			return a.seq - b.seq
		}
		return b.seq - a.seq
	})
	var out strings.Builder
	at := 0
	for _, e := range list {
		out.WriteString(m.src[at:e.at])
		out.WriteString(e.text)
		at = e.at
	}
	out.WriteString(m.src[at:])
	return out.String()
}
