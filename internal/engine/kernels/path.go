package kernels

import "fmt"

//go:generate go run -C gen .

// path is one way to compute: which routines do the work. All paths give the
// same bits. A routine that a path has no own version of is the portable one.
type path struct {
	name  string
	int8  *int8Routines  // products of packed weights; nil: none
	float *floatRoutines // nil: portable loops
}

// portable is the path in plain Go; better paths, best first, are those that
// this processor has instructions for.
var (
	portable = &path{name: "portable"}
	better   = detect()
	now      = fastest()
)

func fastest() *path {
	if len(better) > 0 {
		return better[0]
	}
	return portable
}

// Use chooses the path of all that is computed from now on: auto is the fastest
// that this processor has, others are portable, avx2 and avx512 (with VNNI). An
// Input keeps the path that it was made for. It is not for use while something
// computes.
func Use(name string) error {
	for _, p := range append(better[:len(better):len(better)], portable) {
		if p.name == name || name == "auto" && p == fastest() {
			if p != now { // others may be reading it
				now = p
			}
			return nil
		}
	}
	return fmt.Errorf("this processor has no %s kernels; it has %v", name, Paths())
}

// Path is the name of the path in use.
func Path() string { return now.name }

// Paths are the names of those that this processor has, fastest first.
func Paths() []string {
	var names []string
	for _, p := range better {
		names = append(names, p.name)
	}
	return append(names, portable.name)
}
