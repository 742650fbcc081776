package chaos

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// venv is the Python of the tests, or the reason to skip.
func venv(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("METRONOME_VENV")
	if dir == "" {
		t.Skip("METRONOME_VENV is not set: make test sets it to a Python environment with the openai client")
	}
	return filepath.Join(dir, "bin", "python")
}

// up starts a whole fleet; its router is p.Router.
func (r *Rig) up(t *testing.T, args ...string) *Proc {
	t.Helper()
	return r.start(t, append([]string{"up", "--port=0"}, args...)...)
}

// alive says whether a process exists.
func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// gone waits for processes to end.
func gone(pids []int, wait time.Duration) bool {
	for end := time.Now().Add(wait); ; {
		left := false
		for _, pid := range pids {
			left = left || alive(pid)
		}
		if !left {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		<-time.After(20 * time.Millisecond)
	}
}

// A child that ends is reported in one line and stays down; the rest goes on.
func TestUpGoesOnWithoutAChild(t *testing.T) {
	r := newRig(t)
	p := r.up(t, "--prefill=2", "--decode=2", "--engine=sim", "sim")
	syscall.Kill(p.Prefill[0].PID, syscall.SIGKILL)
	syscall.Kill(p.Decode[1].PID, syscall.SIGKILL)
	for i := range 8 {
		a, err := Generate(within(t, 10*time.Second), p.Router, map[string]any{"text": "go on", "sampling_params": map[string]any{"max_new_tokens": 4}})
		if err != nil || a.Status != 200 {
			t.Fatalf("request %d: %v %+v", i, err, a)
		}
	}
	for _, name := range []string{"prefill 1", "decode 2"} {
		if n := strings.Count(p.Log(), "up: "+name+" (pid "); n != 1 {
			t.Errorf("%s is reported %d times:\n%s", name, n, p.Log())
		}
	}
}

// up takes everything down with itself: after SIGTERM, and also when it is
// killed and can do nothing any more.
func TestUpTakesEverythingDown(t *testing.T) {
	for _, kill := range []bool{false, true} {
		r := newRig(t)
		p := r.up(t, "--prefill=2")
		pids := []int{p.Prefill[0].PID, p.Prefill[1].PID, p.Decode[0].PID}
		if kill {
			p.Kill()
		} else {
			p.Terminate()
			<-p.Done()
			if code := p.ExitCode(); code != 0 {
				t.Errorf("exit status %d after SIGTERM", code)
			}
		}
		if !gone(pids, 10*time.Second) {
			t.Errorf("kill %v: children are left", kill)
		}
		if resp, err := http.Get(p.Router + "/livez"); err == nil {
			resp.Body.Close()
			t.Errorf("kill %v: the router still answers", kill)
		}
	}
}

// Wrong usage is one line on stderr and exit status 2.
func TestWrongUsage(t *testing.T) {
	r := newRig(t)
	bad := filepath.Join(t.TempDir(), "bad.gguf")
	os.WriteFile(bad, []byte("GGUF but not really"), 0o644)
	settings := filepath.Join(t.TempDir(), "settings.yaml")
	os.WriteFile(settings, []byte("kv-timeout: 3s\nno-such-setting: 1\n"), 0o644)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	taken := "--listen=" + busy.Addr().String()
	for _, tc := range []struct {
		args []string
		says string
	}{
		{[]string{"serve", "tiny", taken}, "--listen"},
		{[]string{"router", "--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2", taken}, "--listen"},
		{[]string{"registry", taken}, "--listen"},
		{[]string{"decode"}, "model"},
		{[]string{"decode", "tiny", "--no-such-flag"}, "--no-such-flag"},
		{[]string{"decode", "tiny", "--kv-timeout=soon"}, "--kv-timeout"},
		{[]string{"decode", "tiny", "--listen=nowhere"}, "HOST:PORT"},
		{[]string{"decode", "tiny", "--listen=127.0.0.1:70000"}, "port"},
		{[]string{"decode", "tiny", "--listen=0.0.0.0:0"}, "--token-file"},
		{[]string{"decode", "tiny", "--token-file=/no/such/file"}, "/no/such/file"},
		{[]string{"decode", "tiny", "--kv-memory=lots"}, "512MiB"},
		{[]string{"decode", "tiny", "--kv-dtype=q4_0"}, "f16"},
		{[]string{"decode", "tiny", "--kernels=neon"}, "avx512"},
		{[]string{"decode", "tiny", "--bootstrap-allow=10.0.0.0/99"}, "--bootstrap-allow"},
		{[]string{"decode", "tiny", "--config=" + settings, "--listen=127.0.0.1:0"}, "no-such-setting"},
		{[]string{"decode", "/no/such/model.gguf"}, "/no/such/model.gguf"},
		{[]string{"decode", bad}, "bad.gguf"},
		{[]string{"router", "--prefill=ftp://x", "--decode=http://127.0.0.1:1"}, "ftp"},
		{[]string{"router", "--decode=http://127.0.0.1:1"}, "prefill"},
		{[]string{"router", "--workers=/no/such/file"}, "/no/such/file"},
		{[]string{"router", "--workers=" + settings}, "kv-timeout"},
		{[]string{"router", "--policy=best", "--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2"}, "best"},
		{[]string{"replay"}, "not built"},
		{[]string{"nonsense"}, "nonsense"},
		{[]string{"config", "nobody"}, "nobody"},
		{[]string{"up", "--prefill=0"}, "--prefill"},
		{[]string{"up", "/no/such/model.gguf", "--port=0"}, "/no/such/model.gguf"},
	} {
		code, said, err := r.Fail(within(t, 20*time.Second), tc.args...)
		if err != nil || code != 2 || !strings.Contains(said, tc.says) {
			t.Errorf("%v: exit %d, %v, said %q; want exit 2 and %q", tc.args, code, err, said, tc.says)
		}
		if n := strings.Count(said, "\n"); n != 1 {
			t.Errorf("%v: %d lines: %q", tc.args, n, said)
		}
	}
}

// Settings come from the flag, else the environment, else the file, else the
// default, and config says which.
func TestSettingsOrigin(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	os.WriteFile(file, []byte("kv-timeout: 3s\nheartbeat-failures: 4\nbootstrap-allow: [127.0.0.1, 10.0.0.0/8]\ndrain: 1s\n"), 0o644)
	cmd := exec.Command(binary, "config", "decode", "--config", file, "--drain=7s")
	cmd.Env = append(environ(), "METRONOME_HEARTBEAT_FAILURES=5", "METRONOME_DRAIN=2s")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 3 {
			got[f[0]] = f[1:4]
		}
	}
	for name, want := range map[string][]string{
		"drain":              {"7s", "time", "--drain"},
		"heartbeat-failures": {"5", "probes", "METRONOME_HEARTBEAT_FAILURES"},
		"kv-timeout":         {"3s", "time", file},
		"bootstrap-allow":    {"127.0.0.1,10.0.0.0/8", "text", file},
		"max-running":        {"64", "sequences", "default"},
	} {
		if strings.Join(got[name], " ") != strings.Join(want, " ") {
			t.Errorf("%s: %v, want %v", name, got[name], want)
		}
	}
}
