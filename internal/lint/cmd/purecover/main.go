// Command purecover reads a coverage profile and says which pure files (those
// that begin with //metronome:pure) have too few of their statements run:
//
//	go test -coverprofile=p -coverpkg=./internal/... ./...
//	go run ./internal/lint/cmd/purecover p
//
// It exits with status 1 when a pure file is below 95 % or not in the profile.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	mark  = "//metronome:pure\n"
	least = 95 // percent
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "purecover: give one coverage profile")
		os.Exit(2)
	}
	files, err := pure("internal")
	if err == nil {
		err = read(os.Args[1], files)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "purecover:", err)
		os.Exit(2)
	}
	if bad := judge(os.Stdout, files); bad > 0 {
		fmt.Printf("%d pure files have less than %d %% of their statements run: write the tests\n", bad, least)
		os.Exit(1)
	}
}

// blocks are the statements of a file: how many each block has, and whether it ran.
type blocks map[string]*block

type block struct {
	statements int
	ran        bool
}

// pure finds the pure files below a folder, by path.
func pure(dir string) (map[string]blocks, error) {
	files := map[string]blocks{}
	return files, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		src, err := os.ReadFile(path)
		if err == nil && bytes.HasPrefix(src, []byte(mark)) {
			files[filepath.ToSlash(path)] = blocks{}
		}
		return err
	})
}

// read adds a profile, in which a block may stand once for each test binary.
func read(profile string, files map[string]blocks) error {
	f, err := os.Open(profile)
	if err != nil {
		return err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		at, rest, ok := strings.Cut(s.Text(), " ")
		name, place, _ := strings.Cut(at, ":")
		if _, path, found := strings.Cut(name, "/internal/"); found && ok {
			bs := files["internal/"+path]
			if bs == nil {
				continue
			}
			var n, count int
			if _, err := fmt.Sscan(rest, &n, &count); err != nil {
				return fmt.Errorf("%s: %q: %w", profile, s.Text(), err)
			}
			if bs[place] == nil {
				bs[place] = &block{statements: n}
			}
			bs[place].ran = bs[place].ran || count > 0
		}
	}
	return nil
}

// declares says that a file only declares things: it has no statement to run.
func declares(name string) bool {
	f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
	return err == nil && !slices.ContainsFunc(f.Decls, func(d ast.Decl) bool { fn, ok := d.(*ast.FuncDecl); return ok && len(fn.Body.List) > 0 })
}

// judge tells of the files that are below least.
func judge(w io.Writer, files map[string]blocks) (bad int) {
	all, ran := 0, 0
	for _, name := range slices.Sorted(maps.Keys(files)) {
		n, hit := 0, 0
		var missed []string
		for place, b := range files[name] {
			n += b.statements
			if b.ran {
				hit += b.statements
			} else {
				missed = append(missed, place)
			}
		}
		all, ran = all+n, ran+hit
		switch {
		case n == 0 && !declares(name):
			bad++
			fmt.Fprintf(w, "%s: not in the profile\n", name)
		case 100*hit < least*n:
			bad++
			fmt.Fprintf(w, "%s: %d of %d statements, not %s\n", name, hit, n, strings.Join(missed, " "))
		}
	}
	fmt.Fprintf(w, "%d pure files: %d of %d statements run (%.1f %%)\n", len(files), ran, all, 100*float64(ran)/float64(max(all, 1)))
	return bad
}
