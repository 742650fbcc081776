package chaos

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// binary is the metronome that all tests start: METRONOME_BINARY, or one built here.
var binary string

func TestMain(m *testing.M) {
	Heard = note
	os.Exit(func() int {
		binary = os.Getenv("METRONOME_BINARY")
		if binary == "" {
			dir, err := os.MkdirTemp("", "metronome-chaos")
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			defer os.RemoveAll(dir)
			binary = filepath.Join(dir, "metronome")
			out, err := exec.Command("go", "build", "-o", binary, "github.com/metronome-serve/metronome/cmd/metronome").CombinedOutput()
			if err != nil {
				fmt.Fprintf(os.Stderr, "building metronome: %v\n%s", err, out)
				return 1
			}
		}
		return m.Run()
	}())
}

// newRig is a rig whose processes end with the test, and before that must be
// idle and work.
func newRig(t *testing.T) *Rig {
	t.Helper()
	r := &Rig{Binary: binary}
	t.Cleanup(func() {
		r.endsWell(t)
		if t.Failed() {
			for _, h := range append(r.hosts, r) {
				h.logs(t)
			}
		}
		r.Close()
	})
	return r
}

func (r *Rig) logs(t *testing.T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.procs {
		t.Logf("log of %v (pid %d):\n%s", p.Args, p.PID(), tail(p.Log(), 4000))
	}
}

// present makes all that the rig asks carry a token.
func (r *Rig) present(token string) {
	r.Client = &http.Client{Transport: bearer{token, r.client().Transport}}
}

type bearer struct {
	token string
	http.RoundTripper
}

func (b bearer) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+b.token)
	return b.RoundTripper.RoundTrip(req)
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// start is Rig.Start that ends the test on failure.
func (r *Rig) start(t *testing.T, args ...string) *Proc {
	t.Helper()
	p, err := r.Start(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	strike(part{cmp.Or(p.HTTP, p.Router), r.client()}) // of who was at this address before
	return p
}

// pair is one prefill and one decode worker behind a router.
type pair struct{ prefill, decode, router *Proc }

// startPair starts a fleet of three; the flags are added to the defaults.
func (r *Rig) startPair(t *testing.T, model string, prefill, decode, both []string) pair {
	t.Helper()
	var f pair
	f.prefill = r.startPrefill(t, model, append(append([]string{}, both...), prefill...)...)
	f.decode = r.startDecode(t, model, append(append([]string{}, both...), decode...)...)
	f.router = r.startRouter(t, []*Proc{f.prefill}, []*Proc{f.decode})
	return f
}

func (r *Rig) startPrefill(t *testing.T, model string, flags ...string) *Proc {
	t.Helper()
	return r.start(t, append([]string{"prefill", model, "--listen=127.0.0.1:0", "--bootstrap-listen=127.0.0.1:0"}, flags...)...)
}

func (r *Rig) startDecode(t *testing.T, model string, flags ...string) *Proc {
	t.Helper()
	return r.start(t, append([]string{"decode", model, "--listen=127.0.0.1:0"}, flags...)...)
}

func (r *Rig) startRouter(t *testing.T, prefill, decode []*Proc, flags ...string) *Proc {
	t.Helper()
	args := append([]string{"router", "--listen=127.0.0.1:0"}, flags...)
	for _, p := range prefill {
		args = append(args, "--prefill="+p.HTTP+","+port(p.Bootstrap))
	}
	for _, d := range decode {
		args = append(args, "--decode="+d.HTTP)
	}
	return r.start(t, args...)
}

// fixedPort is a free port below those that the system gives to outgoing
// connections, so that a process can be started at it again.
func fixedPort(t *testing.T) string {
	t.Helper()
	for range 1000 {
		fixed.Lock()
		fixed.next++
		n := 20000 + (os.Getpid()*97+fixed.next)%12000
		fixed.Unlock()
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", n))
		if err == nil {
			ln.Close()
			return fmt.Sprint(n)
		}
	}
	t.Fatal("no free port")
	return ""
}

var fixed struct {
	sync.Mutex
	next int
}

func port(addr string) string {
	for i := len(addr) - 1; i >= 0; i-- {
		if addr[i] == ':' {
			return addr[i+1:]
		}
	}
	return addr
}

// within gives a context that bounds one part of a test.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
