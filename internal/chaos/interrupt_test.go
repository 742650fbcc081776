package chaos

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Commands that measure or ask end at once when they are interrupted, also while
// their peer hangs, with status 1 and one line that says so.
func TestInterrupted(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no process can be interrupted there from outside")
	}
	r := newRig(t)
	for _, c := range []struct {
		args []string
		peer bool // it waits for the address that hangs
	}{
		{[]string{"bench", "http"}, true},
		{[]string{"explain", "x", "--router"}, true},
		{[]string{"pull", "smollm2", "--index"}, true},
		{[]string{"bench", "engine", "tiny", "--prefill=512", "--decode=none", "--rounds=100000"}, false},
		{[]string{"bench", "transfer", "--rounds=100000"}, false},
		{[]string{"bench", "loop", "--rounds=1000", "--waiting=none"}, false},
	} {
		hang, err := NewHang(Silent, "127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		if c.peer {
			c.args = append(c.args, "http://"+hang.Addr)
		}
		p, err := r.spawn(c.args, "XDG_CACHE_HOME="+t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(20 * time.Second); hang.Dials() == 0 && !strings.Contains(p.Log(), "round 2 "); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%v has not begun: %s", c.args, p.Log())
			}
		}
		p.cmd.Process.Signal(os.Interrupt)
		select {
		case <-p.done:
		case <-time.After(2 * time.Second):
			t.Errorf("%v still runs 2 s after the interrupt", c.args)
			p.Kill()
		}
		want := fmt.Sprintf("\nmetronome %s: interrupted\n", c.args[0])
		if log := "\n" + p.Log(); p.ExitCode() != 1 || !strings.HasSuffix(log, want) || strings.Contains(log, "cancel") {
			t.Errorf("%v: status %d, %q", c.args, p.ExitCode(), tail(log, 300))
		}
		hang.Close()
	}
}
