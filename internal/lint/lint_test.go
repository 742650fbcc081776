package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"golang.org/x/tools/go/packages"
)

const (
	module = "github.com/metronome-serve/metronome"
	root   = "../.."
)

// inner are the arrows of packages that ARCHITECTURE.md leaves out, for they
// are below others.
var inner = map[string][]string{
	"internal/sched/oracle":     {"internal/sched", "internal/kv"},
	"internal/sched/schedtest":  {"internal/sched", "internal/sched/oracle", "internal/kv"},
	"internal/lint/cmd/noblock": {"internal/lint/noblock"},
	"internal/model/modeltest":  {"internal/model/known"},
	"scripts/compare-llamacpp":  {"internal/model/modeltest"},
}

// The right sides of an arrow that are no list of packages.
const (
	anyPackage   = "all"
	standardOnly = "nothing of other modules"
)

// arrows reads from ARCHITECTURE.md which packages of this module each one may
// import, besides those below itself. A package that is not there may import
// none of them.
func arrows(t *testing.T) map[string][]string {
	t.Helper()
	_, block, ok := strings.Cut(readText(t, filepath.Join(root, "ARCHITECTURE.md")), "\nImports run only this way")
	_, block, _ = strings.Cut(block, "\n\n")
	block, _, _ = strings.Cut(block, "\n\n")
	found := maps.Clone(inner)
	for _, part := range regexp.MustCompile(`\s{2,}`).Split(block, -1) {
		from, to, arrow := strings.Cut(part, " → ")
		if part != "" && !arrow {
			t.Fatalf("no arrow: %q", part)
		}
		for f := range strings.SplitSeq(from, ", ") {
			for p := range strings.SplitSeq(to, ", ") {
				found[inside(f)] = append(found[inside(f)], inside(p))
			}
		}
	}
	if !ok || len(found) < 10 {
		t.Fatalf("ARCHITECTURE.md has %d arrows", len(found))
	}
	return found
}

// inside is the path of a package that ARCHITECTURE.md names.
func inside(name string) string {
	if name == anyPackage || name == standardOnly || strings.HasPrefix(name, "cmd/") {
		return name
	}
	return "internal/" + name
}

// longFunctions may have more than maxLines lines, each for the reason given.
// The list shrinks: an entry that is not needed fails the test.
var longFunctions = map[string]string{}

const maxLines = 70

// realProcessTests are the folders whose tests drive other processes and may sleep.
var realProcessTests = []string{"internal/chaos", "cmd/metronome"}

// forbidden words appear in no file: they name things outside the repository
// or work that was left undone.
var forbidden = regexp.MustCompile(`\bTO` + `DO\b|\bFIX` + `ME\b|\bXX` + `X\b|/wo` + `rk/|/ro` + `ot/`)

// loaded is the whole module, type-checked once without its tests.
var loaded = sync.OnceValues(func() ([]*packages.Package, error) {
	pkgs, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedImports | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedModule,
		Dir:  root,
	}, "./...")
	if err != nil {
		return nil, err
	}
	for _, p := range pkgs {
		for _, e := range p.Errors {
			return nil, e
		}
	}
	return pkgs, nil
})

func load(t *testing.T) []*packages.Package {
	t.Helper()
	pkgs, err := loaded()
	if err != nil {
		t.Fatalf("loading the module: %v", err)
	}
	if len(pkgs) < 5 {
		t.Fatalf("only %d packages were found in %s", len(pkgs), root)
	}
	return pkgs
}

// short is a package's path within the module.
func short(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, module), "/") }

func inModule(path string) bool { return path == module || strings.HasPrefix(path, module+"/") }

// at is a position with its file relative to the module.
func at(p *packages.Package, pos token.Pos) string {
	where := p.Fset.Position(pos)
	if abs, err := filepath.Abs(root); err == nil {
		if rel, err := filepath.Rel(abs, where.Filename); err == nil {
			where.Filename = rel
		}
	}
	return fmt.Sprintf("%s:%d", where.Filename, where.Line)
}

func TestImports(t *testing.T) {
	may := arrows(t)
	for _, p := range load(t) {
		from := short(p.PkgPath)
		for path := range p.Imports {
			to := short(path)
			switch {
			case inModule(path):
				if below := strings.HasPrefix(to, from+"/"); !below && !slices.Contains(may[from], to) && !slices.Contains(may[from], anyPackage) {
					t.Errorf("%s imports %s: the arrows of ARCHITECTURE.md allow it only %v", from, to, may[from])
				}
			case slices.Contains(may[from], standardOnly) && strings.Contains(strings.SplitN(path, "/", 2)[0], "."):
				t.Errorf("%s imports %s: it may use the standard library only", from, path)
			}
		}
	}
}

// Nothing in the binary can make native objects of a peer's bytes, or load code.
func TestF79NoNativeObjects(t *testing.T) {
	pkgs, err := packages.Load(&packages.Config{Mode: packages.NeedName | packages.NeedImports | packages.NeedDeps, Dir: root}, "./cmd/metronome")
	if err != nil || len(pkgs) != 1 {
		t.Fatalf("%d packages, %v", len(pkgs), err)
	}
	seen := 0
	packages.Visit(pkgs, nil, func(p *packages.Package) {
		seen++
		if slices.Contains([]string{"encoding/gob", "encoding/xml", "net/rpc", "plugin"}, p.PkgPath) {
			t.Errorf("the product depends on %s", p.PkgPath)
		}
	})
	if seen < 100 {
		t.Errorf("only %d packages were looked at", seen)
	}
}

func TestEveryPackageHasADoc(t *testing.T) {
	for _, p := range load(t) {
		documented := slices.ContainsFunc(p.Syntax, func(f *ast.File) bool { return f.Doc != nil && len(f.Doc.Text()) > 40 })
		if !documented {
			t.Errorf("%s has no package comment that says what it is and how to drive it", short(p.PkgPath))
		}
	}
}

func TestFunctionLength(t *testing.T) {
	used := map[string]bool{}
	for _, p := range load(t) {
		for _, f := range p.Syntax {
			if ast.IsGenerated(f) {
				continue
			}
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok {
					continue
				}
				lines := p.Fset.Position(fn.End()).Line - p.Fset.Position(fn.Pos()).Line + 1
				if lines <= maxLines {
					continue
				}
				name := funcName(p, fn)
				if used[name] = true; longFunctions[name] == "" {
					t.Errorf("%s: %s has %d lines, want at most %d", at(p, fn.Pos()), name, lines, maxLines)
				}
			}
		}
	}
	for name := range longFunctions {
		if !used[name] {
			t.Errorf("%s is listed as a long function and is none: take it off the list", name)
		}
	}
}

// funcName is pkg.Func or pkg.Type.Method, pkg being the last part of the path.
func funcName(p *packages.Package, fn *ast.FuncDecl) string {
	name := fn.Name.Name
	if fn.Recv != nil && len(fn.Recv.List) > 0 {
		recv := fn.Recv.List[0].Type
		if star, ok := recv.(*ast.StarExpr); ok {
			recv = star.X
		}
		switch generic := recv.(type) {
		case *ast.IndexExpr:
			recv = generic.X
		case *ast.IndexListExpr:
			recv = generic.X
		}
		if id, ok := recv.(*ast.Ident); ok {
			name = id.Name + "." + name
		}
	}
	path := p.PkgPath
	return path[strings.LastIndex(path, "/")+1:] + "." + name
}

// ledgerHeading begins the table of goroutines in ARCHITECTURE.md.
var ledgerHeading = regexp.MustCompile(`(?im)^##+ .*goroutines.*$`)

// Every place that starts a goroutine is a row of the ledger in ARCHITECTURE.md
// (who owns it, what stops it, who waits for it), and every row is such a place.
func TestGoroutineLedger(t *testing.T) {
	var starts []string
	for _, p := range load(t) {
		for _, f := range p.Syntax {
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok {
					continue
				}
				for _, pos := range goroutines(p, fn) {
					name := funcName(p, fn)
					if from := short(p.PkgPath); from == "internal/sched" || from == "internal/kv" {
						t.Errorf("%s: %s starts a goroutine: a core has none", at(p, pos), name)
					}
					if !slices.Contains(starts, name) {
						starts = append(starts, name)
					}
				}
			}
		}
	}
	slices.Sort(starts)
	rows, err := ledger()
	if err != nil {
		t.Fatal(err)
	}
	var missing []string
	for _, name := range starts {
		if !slices.Contains(rows, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		t.Errorf("the ledger of goroutines in ARCHITECTURE.md lacks these rows:\n%s", form(missing))
	}
	for _, name := range rows {
		if !slices.Contains(starts, name) {
			t.Errorf("the ledger of goroutines in ARCHITECTURE.md names %s, which starts none", name)
		}
	}
}

func form(names []string) string {
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "| `%s` | owner | what stops it | who waits for it |\n", name)
	}
	return b.String()
}

// ledger reads the first cells of the table under the ledger's heading.
func ledger() ([]string, error) {
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		return nil, err
	}
	head := ledgerHeading.FindIndex(text)
	if head == nil {
		return nil, fmt.Errorf("ARCHITECTURE.md has no heading with the word goroutines")
	}
	var rows []string
	for _, line := range strings.Split(string(text[head[1]:]), "\n") {
		if strings.HasPrefix(line, "#") {
			break
		}
		if cell, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ := strings.Cut(cell, "`")
			rows = append(rows, name)
		}
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("the ledger of goroutines in ARCHITECTURE.md is empty")
	}
	return rows, nil
}

// goroutines are the places in a function that start one: a go statement, or
// the standard library's ways to the same end.
func goroutines(p *packages.Package, fn *ast.FuncDecl) []token.Pos {
	var found []token.Pos
	ast.Inspect(fn, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = append(found, n.Pos())
		case *ast.CallExpr:
			callee, ok := n.Fun.(*ast.SelectorExpr)
			if !ok {
				break
			}
			if f, ok := p.TypesInfo.Uses[callee.Sel].(*types.Func); ok && startsGoroutine[f.FullName()] {
				found = append(found, n.Pos())
			}
		}
		return true
	})
	return found
}

var startsGoroutine = map[string]bool{
	"(*sync.WaitGroup).Go": true, "context.AfterFunc": true, "time.AfterFunc": true,
	"(*golang.org/x/sync/errgroup.Group).Go": true, "(*golang.org/x/sync/errgroup.Group).TryGo": true,
}

// files calls check with every file of the repository that has one of the
// endings (any, if none is given), by its path within the module.
func files(t *testing.T, check func(path string, text []byte), endings ...string) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".git") && rel != "." && d.Name() != ".github" || d.Name() == "node_modules" || rel == ".cache" || rel == "bin" { // not of the repository
				return filepath.SkipDir
			}
			return nil
		}
		if d.Name() == ".git" { // of a work tree
			return nil
		}
		if len(endings) > 0 && !slices.Contains(endings, filepath.Ext(path)) {
			return nil
		}
		info, err := d.Info()
		if err != nil || !info.Mode().IsRegular() || info.Size() > 4<<20 {
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil {
			n++
			check(filepath.ToSlash(rel), text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n == 0 {
		t.Fatalf("no file %v was found", endings)
	}
}

func TestForbiddenWords(t *testing.T) {
	files(t, func(path string, text []byte) {
		if bytes.IndexByte(text, 0) >= 0 || !utf8.Valid(text) {
			return // binary
		}
		for i, line := range bytes.Split(text, []byte("\n")) {
			if word := forbidden.Find(line); word != nil {
				t.Errorf("%s:%d: the word %q has no place here", path, i+1, word)
			}
		}
	})
}

func TestNoSleepInTests(t *testing.T) {
	files(t, func(path string, text []byte) {
		if !strings.HasSuffix(path, "_test.go") || slices.ContainsFunc(realProcessTests, func(dir string) bool { return strings.HasPrefix(path, dir+"/") }) {
			return
		}
		if bytes.Contains(text, []byte("\t\"testing/synctest\"\n")) {
			return // virtual time
		}
		for i, line := range bytes.Split(text, []byte("\n")) {
			if bytes.Contains(line, []byte("time."+"Sleep(")) {
				t.Errorf("%s:%d: a test waits for an event or in virtual time (testing/synctest), not for the clock", path, i+1)
			}
		}
	}, ".go")
}
