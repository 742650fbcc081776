package engine

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSource reads the source of the engine and its kernels for breaches of
// rules 1 and 3 of docs/numerics.md.
func TestSource(t *testing.T) {
	for _, dir := range []string{".", "kernels"} {
		for _, b := range check(t, dir, parseDir(t, dir)) {
			t.Error(b)
		}
	}
}

// TestSourceCatches makes sure that breaches are found.
func TestSourceCatches(t *testing.T) {
	const src = `package p
import "math"
func f(a, b, c float32, d []float64, n int) float32 {
	c += a * b                       // 1
	c = c - (a * b)                  // 2
	d[0] = d[1]*d[2] + d[0]          // 3
	z := a * b                       // 4: with the sum of the next line
	c += z
	z *= a                           // 5: likewise
	c += float32(a*b) + a/b
	c += float32(a*b*(c*c)) + float32(a*b/c)
	n += n * n                       // integers
	d[0] = math.Exp(d[0])            // 6: not ours
	d[0] = math.Sqrt(math.Abs(d[0])) // exact
	const k = 2.0*3 + 1
	return -(a * b) + f(a*b, z, z, d, n) // 7, 8: f may be inlined
}`
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "p.go", src, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := check(t, "p", source{fset, []*ast.File{f}}); len(got) != 8 {
		t.Errorf("found %d breaches, want 8:\n%s", len(got), strings.Join(got, "\n"))
	}
}

type source struct {
	fset  *token.FileSet
	files []*ast.File
}

func parseDir(t *testing.T, dir string) source {
	s := source{fset: token.NewFileSet()}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(s.fset, filepath.Join(dir, e.Name()), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		s.files = append(s.files, f)
	}
	return s
}

func check(t *testing.T, path string, s source) []string {
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: importer.ForCompiler(s.fset, "source", nil)}
	if _, err := conf.Check(path, s.fset, s.files, info); err != nil {
		t.Fatal(err)
	}
	var found []string
	at := func(n ast.Node, what string) { found = append(found, s.fset.Position(n.Pos()).String()+": "+what) }
	isFloat := func(e ast.Expr) bool {
		tv := info.Types[e]
		b, ok := tv.Type.Underlying().(*types.Basic)
		return ok && b.Info()&types.IsFloat != 0 && tv.Value == nil
	}
	for _, f := range s.files {
		var stack []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case nil:
				stack = stack[:len(stack)-1]
				return true
			case *ast.BinaryExpr:
				if n.Op == token.MUL && isFloat(n) && !rounded(info, stack) {
					at(n, "a product that may be fused with a sum: convert it")
				}
			case *ast.AssignStmt:
				if n.Tok == token.MUL_ASSIGN && isFloat(n.Lhs[0]) {
					at(n, "a product that may be fused with a sum: convert it")
				}
			case *ast.SelectorExpr:
				if o := info.Uses[n.Sel]; o != nil && o.Pkg() != nil && o.Pkg().Path() == "math" && !exact(o) {
					at(n, "math."+o.Name()+" may differ between machines")
				}
			}
			stack = append(stack, n)
			return true
		})
	}
	return found
}

// rounded says whether a product with these parents is converted, or multiplied
// on: the language lets a compiler fuse it with a sum anywhere else, also in
// another statement.
func rounded(info *types.Info, parents []ast.Node) bool {
	for i := len(parents) - 1; i >= 0; i-- {
		switch p := parents[i].(type) {
		case *ast.ParenExpr:
			continue
		case *ast.CallExpr:
			return info.Types[p.Fun].IsType()
		case *ast.BinaryExpr:
			return p.Op == token.MUL || p.Op == token.QUO
		}
		return false
	}
	return false
}

// exact says whether a member of package math is the same everywhere.
func exact(o types.Object) bool {
	if _, ok := o.(*types.Const); ok {
		return true
	}
	switch o.Name() {
	case "Sqrt", "Abs", "Floor", "RoundToEven", "Inf", "NaN", "Float32bits", "Float32frombits", "Float64bits", "Float64frombits":
		return true
	}
	return false
}
