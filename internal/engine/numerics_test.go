package engine

import (
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

// TestSource reads the source of the engine and its kernels for breaches of
// rules 1 and 3 of docs/numerics.md.
func TestSource(t *testing.T) {
	path, err := filepath.Abs("kernels/breaches.go")
	if err != nil {
		t.Fatal(err)
	}
	const mode = packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports
	pkgs, err := packages.Load(&packages.Config{Mode: mode, Overlay: map[string][]byte{path: []byte(badSource)}}, ".", "./kernels")
	if err != nil {
		t.Fatal(err)
	}
	if packages.PrintErrors(pkgs) > 0 || len(pkgs) != 2 {
		t.Fatal("the packages cannot be loaded")
	}
	caught := 0
	for _, p := range pkgs {
		for _, b := range check(p) {
			if strings.HasPrefix(b, path) {
				caught++
			} else {
				t.Error(b)
			}
		}
	}
	if caught != 9 {
		t.Errorf("caught %d of the 9 planted breaches", caught)
	}
}

// badSource is read with the kernels, to make sure that breaches are found.
const badSource = `package kernels
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
	c -= z / 2                       // 7: times a half
	return -(a * b) + f(a*b, z, z, d, n) // 8, 9: f may be inlined
}`

func check(s *packages.Package) (found []string) {
	info := s.TypesInfo
	at := func(n ast.Node, what string) { found = append(found, s.Fset.Position(n.Pos()).String()+": "+what) }
	isFloat := func(e ast.Expr) bool {
		tv := info.Types[e]
		b, ok := tv.Type.Underlying().(*types.Basic)
		return ok && b.Info()&types.IsFloat != 0 && tv.Value == nil
	}
	for _, f := range s.Syntax {
		var stack []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case nil:
				stack = stack[:len(stack)-1]
				return true
			case *ast.BinaryExpr:
				// A division by a constant may be compiled to a product.
				product := n.Op == token.MUL || (n.Op == token.QUO && info.Types[n.Y].Value != nil)
				if product && isFloat(n) && !rounded(info, stack) {
					at(n, "a product that may be fused with a sum: convert it")
				}
			case *ast.AssignStmt:
				if (n.Tok == token.MUL_ASSIGN || n.Tok == token.QUO_ASSIGN && info.Types[n.Rhs[0]].Value != nil) && isFloat(n.Lhs[0]) {
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
