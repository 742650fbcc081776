// Package edges compares the changes of phase that a core has made in its tests
// with those that its become… functions allow. A TestMain lets a Book hear of
// each change, and at the end of a whole run asks it to Compare:
//
//	book, err := edges.New(".", map[string]edges.Names{"Decode": {"Pending": 1, …}})
//	onEdge = book.Take
//	code := m.Run()
//	if edges.Whole() && code == 0 { err = book.Compare("../../docs/proof.md") }
//
// The page lists them, one row for each core; go test -rewrite writes the rows.
package edges

import (
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
)

// Names are the phases of one core by the identifiers of their constants.
type Names map[string]uint8

// Book holds, for each core, what is allowed and what has been taken. Take may
// be called from many goroutines.
type Book struct{ cores map[string]*core }

type core struct {
	names   Names
	allowed [][2]string // from, to; in the order of the source
	taken   [32][32]atomic.Bool
}

// New reads the become… methods of the named types in a package's folder. The
// phases among the arguments of their call of move or become are, in order,
// the one to go to and those to come from.
func New(dir string, cores map[string]Names) (*Book, error) {
	b := &Book{cores: map[string]*core{}}
	for name, names := range cores {
		b.cores[name] = &core{names: names}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), dir+"/"+e.Name(), nil, 0)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && becomes.MatchString(fn.Name.Name) && fn.Recv != nil {
				b.read(fn)
			}
		}
	}
	for name, c := range b.cores {
		if len(c.allowed) == 0 {
			return nil, fmt.Errorf("%s: no become… method of %s was found", dir, name)
		}
	}
	return b, nil
}

var becomes = regexp.MustCompile(`^become[A-Z]`)

func (b *Book) read(fn *ast.FuncDecl) {
	star, ok := fn.Recv.List[0].Type.(*ast.StarExpr)
	if !ok {
		return
	}
	c := b.cores[fmt.Sprint(star.X)]
	if c == nil {
		return
	}
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "move" && sel.Sel.Name != "become" {
			return true
		}
		var phases []string
		for _, a := range call.Args {
			if id, ok := a.(*ast.Ident); ok {
				if _, ok := c.names[id.Name]; ok {
					phases = append(phases, id.Name)
				}
			}
		}
		for i := 1; i < len(phases); i++ {
			c.allowed = append(c.allowed, [2]string{phases[i], phases[0]})
		}
		return true
	})
}

// Take notes one change.
func (b *Book) Take(name string, from, to uint8) {
	if c := b.cores[name]; c != nil {
		c.taken[from][to].Store(true)
	}
}

// Whole says whether this run of a test binary takes all tests.
func Whole() bool {
	for _, name := range []string{"test.run", "test.skip", "test.list", "test.bench", "test.fuzz"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return false
		}
	}
	return true
}

// Compare says which changes are allowed and were not taken, and whether the
// page lists them all.
func (b *Book) Compare(page string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	var wrong []error
	for name, c := range b.cores {
		for _, e := range c.allowed {
			if !c.taken[c.names[e[0]]][c.names[e[1]]].Load() {
				wrong = append(wrong, fmt.Errorf("%s: no test goes from %s to %s: write one, or allow it no more", name, e[0], e[1]))
			}
		}
		row := regexp.MustCompile(`(?m)^\| ` + "`" + name + "`" + ` \|.*$`)
		want := c.row(name)
		if old := row.Find(text); string(old) == want {
			continue
		} else if f := flag.Lookup("rewrite"); old == nil || f == nil || f.Value.String() != "true" {
			wrong = append(wrong, fmt.Errorf("%s: the row of %s should be (go test -rewrite writes it)\n%s", page, name, want))
			continue
		}
		text = row.ReplaceAllLiteral(text, []byte(want))
		wrong = append(wrong, os.WriteFile(page, text, 0o644))
	}
	return errors.Join(wrong...)
}

// row is the page's row: for each phase, in order, where it may go.
func (c *core) row(name string) string {
	to := map[string][]string{}
	var from []string
	for _, e := range c.allowed {
		to[e[0]] = append(to[e[0]], e[1])
		if !slices.Contains(from, e[0]) {
			from = append(from, e[0])
		}
	}
	order := func(a, b string) int { return int(c.names[a]) - int(c.names[b]) }
	slices.SortFunc(from, order)
	var parts []string
	for _, f := range from {
		slices.SortFunc(to[f], order)
		parts = append(parts, f+" → "+strings.Join(to[f], ", "))
	}
	return fmt.Sprintf("| `%s` | %d | %s |", name, len(c.allowed), strings.Join(parts, "; "))
}
