// Command noblock says what a marked loop can wait for, with the chain of calls
// (package noblock tells the rules):
//
//	go run ./internal/lint/cmd/noblock ./...
//
// It exits with status 1 when there is something. Exceptions are listed, too.
package main

import (
	"fmt"
	"os"

	"github.com/metronome-serve/metronome/internal/lint/noblock"
)

func main() {
	patterns := os.Args[1:]
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	p, err := noblock.Load(".", nil, patterns...)
	if err != nil {
		fmt.Fprintln(os.Stderr, "noblock:", err)
		os.Exit(2)
	}
	found := p.Check()
	for _, f := range found {
		fmt.Println(f)
	}
	for _, e := range p.Allowed() {
		fmt.Printf("exception in %s: %s\n", e.At, e.Reason)
	}
	fmt.Printf("%d findings, %d exceptions\n", len(found), len(p.Allowed()))
	if len(found) > 0 {
		os.Exit(1)
	}
}
