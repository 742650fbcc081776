package router

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

var given atomic.Int64 // pieces of memory that were given back, see TestMain

// The memory of each large body is given back, once, however its request ends.
func TestBodiesAreGivenBack(t *testing.T) {
	for name, serve := range map[string]func(*stub, http.ResponseWriter, *http.Request, []byte){"well": prefilled, "failed": says(500, "x"), "hung": hang} {
		for _, size := range []int{ownLeast, 300 << 10, ownMost, 3 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				before, want := given.Load(), int64(1)
				if size > firstRead {
					want = 2 // what the beginning was read into, too
				}
				inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
					f.p[0].serve = serve
					ctx, leave := context.WithTimeout(t.Context(), time.Second)
					defer leave()
					head := `{"stream":true,"messages":[{"role":"user","content":"`
					f.do(ctx, "/v1/chat/completions", head+strings.Repeat("x", size-len(head)-4)+`"}]}`)
				})
				if n := given.Load() - before; n != want {
					t.Errorf("%d pieces of memory were given back, want %d", n, want)
				}
			})
		}
	}
}
