package lint

import (
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

// A file that begins with this line is pure: its result depends on its
// arguments only.
const pureMark = "//metronome:pure"

// unorderedMark on a range over a map says why its order cannot show.
const unorderedMark = "//metronome:unordered "

// impure are standard packages of which a pure file may use constants only,
// with all below them; the exceptions are values without I/O.
var (
	impure     = []string{"net", "os", "sync", "log", "context", "runtime", "syscall", "unsafe", "testing", "io/ioutil", "plugin"}
	pureForAll = []string{"net/netip", "net/url"}
)

// impureCalls are functions that read the clock, wait, or draw from a source
// that nobody seeded.
var impureCalls = regexp.MustCompile(`^(time\.(Now|Since|Until|Sleep|After|AfterFunc|Tick|NewTimer|NewTicker)|math/rand(/v2)?\.[A-Z]\w*|crypto/rand\.\w+|fmt\.(Print|Scan)\w*)$`)

var seeded = regexp.MustCompile(`^math/rand(/v2)?\.New\w*$`)

func isPure(f *ast.File) bool {
	return slices.ContainsFunc(f.Comments, func(g *ast.CommentGroup) bool {
		return g.Pos() < f.Package && slices.ContainsFunc(g.List, func(c *ast.Comment) bool { return c.Text == pureMark })
	})
}

func TestPureFiles(t *testing.T) {
	pkgs := load(t)
	pure := map[string]bool{} // by file name
	for _, p := range pkgs {
		for _, f := range p.Syntax {
			if isPure(f) {
				pure[p.Fset.Position(f.Package).Filename] = true
			}
		}
	}
	if len(pure) < 5 {
		t.Fatalf("only %d pure files were found", len(pure))
	}
	for _, p := range pkgs {
		from := short(p.PkgPath)
		for _, f := range p.Syntax {
			name := p.Fset.Position(f.Package).Filename
			switch core := from == "internal/sched" || from == "internal/kv"; {
			case pure[name]:
				checkPure(t, p, f, pure)
			case core && !(filepath.Base(name) == "doc.go" && len(f.Decls) == 0):
				t.Errorf("%s: every file of %s begins with %s", at(p, f.Package), from, pureMark)
			}
		}
	}
}

func isImpure(path string) bool {
	return !slices.Contains(pureForAll, path) &&
		slices.ContainsFunc(impure, func(bad string) bool { return path == bad || strings.HasPrefix(path, bad+"/") })
}

func checkPure(t *testing.T, p *packages.Package, f *ast.File, pure map[string]bool) {
	for _, spec := range f.Imports {
		if spec.Name != nil && (spec.Name.Name == "_" || spec.Name.Name == ".") {
			t.Errorf("%s: a pure file imports %s for its effects", at(p, spec.Pos()), spec.Path.Value)
		}
	}
	told := map[string]bool{} // one message for each thing, not for each use
	for _, d := range f.Decls {
		fn, _ := d.(*ast.FuncDecl)
		ast.Inspect(d, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: a pure file starts a goroutine", at(p, n.Pos()))
			case *ast.ChanType, *ast.SendStmt, *ast.SelectStmt:
				t.Errorf("%s: a pure file uses a channel", at(p, n.Pos()))
			case *ast.UnaryExpr:
				if n.Op == token.ARROW {
					t.Errorf("%s: a pure file receives from a channel", at(p, n.Pos()))
				}
			case *ast.Ident:
				if wrong := impureUse(p, n, pure); wrong != "" && !told[wrong] {
					told[wrong] = true
					t.Errorf("%s: a pure file uses %s", at(p, n.Pos()), wrong)
				}
			case *ast.RangeStmt:
				checkRange(t, p, f, fn, n)
			}
			return true
		})
	}
}

// impureUse names what an identifier of a pure file stands for, if a pure file
// may not use it.
func impureUse(p *packages.Package, id *ast.Ident, pure map[string]bool) string {
	obj := p.TypesInfo.Uses[id]
	if obj == nil || obj.Pkg() == nil {
		return ""
	}
	path := obj.Pkg().Path()
	switch obj := obj.(type) {
	case *types.PkgName:
		return ""
	case *types.Const:
		if !inModule(path) {
			return ""
		}
	case *types.Func:
		if name := obj.FullName(); !inModule(path) && impureCalls.MatchString(name) && !seeded.MatchString(name) {
			return name
		}
	}
	if isImpure(path) {
		return path + "." + obj.Name()
	}
	if inModule(path) && obj.Pos().IsValid() {
		if file := p.Fset.Position(obj.Pos()).Filename; !pure[file] {
			return filepath.Base(file) + " of " + short(path) + ", which is not marked pure"
		}
	}
	return ""
}

// checkRange wants the order of a map not to show: the function sorts what it
// collected, the body does the same in any order, or a mark says why.
func checkRange(t *testing.T, p *packages.Package, f *ast.File, fn *ast.FuncDecl, r *ast.RangeStmt) {
	over := p.TypesInfo.TypeOf(r.X)
	if over == nil {
		return
	}
	if _, ok := over.Underlying().(*types.Map); !ok {
		return
	}
	line := p.Fset.Position(r.Pos()).Line
	for _, g := range f.Comments {
		for _, c := range g.List {
			if at := p.Fset.Position(c.Pos()).Line; (at == line || at == line-1) && strings.HasPrefix(c.Text, unorderedMark) {
				return
			}
		}
	}
	sorted := false
	if fn != nil {
		ast.Inspect(fn, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || call.Pos() < r.End() {
				return true
			}
			if callee, ok := call.Fun.(*ast.SelectorExpr); ok {
				if obj, ok := p.TypesInfo.Uses[callee.Sel].(*types.Func); ok && obj.Pkg() != nil {
					path := obj.Pkg().Path()
					sorted = sorted || path == "sort" || path == "slices" && strings.HasPrefix(obj.Name(), "Sort")
				}
			}
			return true
		})
	}
	key, _ := r.Key.(*ast.Ident)
	if !sorted && (key == nil || !orderFree(r.Body.List, key.Name)) {
		t.Errorf("%s: a pure file ranges over a map and does not sort: sort the keys, or say why the order cannot show (%s…)", at(p, r.Pos()), unorderedMark)
	}
}

// orderFree says that statements of a map's loop do the same in any order: they
// delete, or set elements of that key, under conditions or not.
func orderFree(list []ast.Stmt, key string) bool {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.IfStmt:
			if s.Init != nil || s.Else != nil || !orderFree(s.Body.List, key) {
				return false
			}
		case *ast.AssignStmt:
			if s.Tok != token.ASSIGN {
				return false
			}
			for _, to := range s.Lhs {
				element, ok := to.(*ast.IndexExpr)
				if !ok {
					return false
				}
				if id, ok := element.Index.(*ast.Ident); !ok || id.Name != key {
					return false
				}
			}
		case *ast.ExprStmt:
			call, ok := s.X.(*ast.CallExpr)
			if !ok {
				return false
			}
			if id, ok := call.Fun.(*ast.Ident); !ok || id.Name != "delete" {
				return false
			}
		default:
			return false
		}
	}
	return true
}
