package noblock

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/tools/go/callgraph"
	"golang.org/x/tools/go/callgraph/rta"
	"golang.org/x/tools/go/callgraph/vta"
	"golang.org/x/tools/go/packages"
	"golang.org/x/tools/go/ssa"
	"golang.org/x/tools/go/ssa/ssautil"
)

// The directives of this package.
const (
	loopMark     = "//metronome:loop"
	baselineMark = "//metronome:baseline"
	allowMark    = "//metronome:allow noblock"
)

// Program is a whole program with its call graph.
type Program struct {
	dir       string // absolute; positions are told relative to it
	module    string
	fset      *token.FileSet
	prog      *ssa.Program
	graph     *callgraph.Graph
	loops     []*ssa.Function
	baselines []*ssa.Function // baselines: loops that are there to wait
	allows    map[place]*allow
	locks     *locks
	pools     *pools
	called    map[ssa.CallInstruction][]*ssa.Function // by callees
	bySite    map[*ssa.Function]map[ssa.CallInstruction][]*ssa.Function
}

// place is one line of one file.
type place struct {
	file string
	line int
}

// allow is one exception.
type allow struct {
	at     place
	reason string
	used   bool
}

// Load builds the program of the packages that the patterns name, seen from
// dir; at least one must be a command. Overlay replaces files, by absolute path.
func Load(dir string, overlay map[string][]byte, patterns ...string) (*Program, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	pkgs, err := packages.Load(&packages.Config{Mode: packages.LoadAllSyntax | packages.NeedModule, Dir: abs, Overlay: overlay, Env: append(os.Environ(), "CGO_ENABLED=0")}, patterns...)
	if err != nil {
		return nil, err
	}
	var broken error
	packages.Visit(pkgs, nil, func(p *packages.Package) {
		for _, e := range p.Errors {
			broken = errors.Join(broken, e)
		}
	})
	if broken != nil {
		return nil, broken
	}
	prog, _ := ssautil.AllPackages(pkgs, ssa.InstantiateGenerics)
	prog.Build()
	var roots []*ssa.Function
	for _, p := range ssautil.MainPackages(prog.AllPackages()) {
		roots = append(roots, p.Func("main"), p.Func("init"))
	}
	if len(roots) == 0 {
		return nil, fmt.Errorf("%s: no command among them", strings.Join(patterns, " "))
	}
	p := &Program{dir: abs, fset: prog.Fset, prog: prog, allows: map[place]*allow{}, called: map[ssa.CallInstruction][]*ssa.Function{}, bySite: map[*ssa.Function]map[ssa.CallInstruction][]*ssa.Function{}}
	reached := rta.Analyze(roots, true)
	funcs := map[*ssa.Function]bool{}
	for f := range reached.Reachable {
		funcs[f] = true
	}
	p.graph = vta.CallGraph(funcs, reached.CallGraph)
	marked := map[token.Pos]string{} // mark of a loop, by its name's place
	packages.Visit(pkgs, nil, func(pkg *packages.Package) {
		if pkg.Module != nil && pkg.Module.Main {
			p.module = pkg.Module.Path
			p.directives(pkg, marked)
		}
	})
	for f := range p.graph.Nodes {
		if f == nil || f.Parent() != nil || f.Synthetic != "" {
			continue
		}
		switch marked[f.Pos()] {
		case loopMark:
			p.loops = append(p.loops, f)
		case baselineMark:
			p.baselines = append(p.baselines, f)
		}
	}
	if n := len(p.loops) + len(p.baselines); n != len(marked) || len(p.loops) == 0 {
		return nil, fmt.Errorf("%d functions are marked %s or %s, %d of them are reached from a command", len(marked), loopMark, baselineMark, n)
	}
	p.locks = &locks{p: p}
	p.pools = newPools(p)
	p.locks.index()
	return p, nil
}

// directives collects the marks of one package.
func (p *Program) directives(pkg *packages.Package, marked map[token.Pos]string) {
	for _, f := range pkg.Syntax {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Doc == nil {
				continue
			}
			for _, c := range fn.Doc.List {
				if c.Text == loopMark || c.Text == baselineMark {
					marked[fn.Name.Pos()] = c.Text
				}
			}
		}
		for _, g := range f.Comments {
			for _, c := range g.List {
				if reason, ok := strings.CutPrefix(c.Text, allowMark); ok {
					at := p.place(c.Pos())
					p.allows[at] = &allow{at: at, reason: strings.TrimSpace(reason)}
				}
			}
		}
	}
}

// place is a position with its file relative to the program's folder.
func (p *Program) place(pos token.Pos) place {
	at := p.fset.Position(pos)
	if rel, err := filepath.Rel(p.dir, at.Filename); err == nil && !strings.HasPrefix(rel, "..") {
		at.Filename = filepath.ToSlash(rel)
	} else { // of a library: package and file say enough
		at.Filename = filepath.Base(filepath.Dir(at.Filename)) + "/" + filepath.Base(at.Filename)
	}
	return place{at.Filename, at.Line}
}

func (a place) String() string {
	if a.line == 0 {
		return "-"
	}
	return fmt.Sprintf("%s:%d", a.file, a.line)
}

// allowed is the exception that holds for a place: on its line or above it.
func (p *Program) allowed(at place) *allow {
	if a := p.allows[at]; a != nil {
		return a
	}
	return p.allows[place{at.file, at.line - 1}]
}

// ours says whether a function stands in this module.
func (p *Program) ours(f *ssa.Function) bool {
	path := pathOf(f)
	return path == p.module || strings.HasPrefix(path, p.module+"/")
}

// pathOf is the path of the package that a function's source stands in.
func pathOf(f *ssa.Function) string {
	if o := f.Origin(); o != nil {
		f = o
	}
	for f.Parent() != nil {
		f = f.Parent()
	}
	if f.Pkg != nil {
		return f.Pkg.Pkg.Path()
	}
	if o := f.Object(); o != nil && o.Pkg() != nil { // a wrapper
		return o.Pkg().Path()
	}
	return ""
}

// name is how a function is told: its package's path within the module, its
// type and its name.
func (p *Program) name(f *ssa.Function) string {
	return strings.ReplaceAll(f.RelString(nil), p.module+"/", "")
}
