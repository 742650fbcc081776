package chaos

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testNet is a switch and hosts, each a network namespace of its own; nothing
// of it touches the machine's own network.
type testNet struct {
	t       *testing.T
	prefix  string
	clients map[int]*http.Client // by host
}

// newTestNet makes hosts 10.0.0.1, 10.0.0.2, … on one switch.
func newTestNet(t *testing.T, hosts int) *testNet {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	for _, tool := range []string{"ip", "tc", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed: scripts/deps.sh installs it", tool)
		}
	}
	n := &testNet{t: t, prefix: fmt.Sprintf("mtr%d", os.Getpid()), clients: map[int]*http.Client{}}
	n.run("ip", "netns", "add", n.name(0))
	t.Cleanup(func() { exec.Command("ip", "netns", "del", n.name(0)).Run() })
	n.run("ip", "-n", n.name(0), "link", "add", "sw", "type", "bridge")
	n.run("ip", "-n", n.name(0), "link", "set", "sw", "up")
	for i := 1; i <= hosts; i++ {
		ns, port := n.name(i), fmt.Sprintf("p%d", i)
		n.run("ip", "netns", "add", ns)
		t.Cleanup(func() { exec.Command("ip", "netns", "del", ns).Run() })
		n.run("ip", "-n", n.name(0), "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", ns)
		n.run("ip", "-n", n.name(0), "link", "set", port, "master", "sw", "up")
		n.run("ip", "-n", ns, "addr", "add", fmt.Sprintf("10.0.0.%d/24", i), "dev", "eth0")
		n.run("ip", "-n", ns, "link", "set", "eth0", "up")
		n.run("ip", "-n", ns, "link", "set", "lo", "up")
	}
	return n
}

func (n *testNet) name(host int) string { return fmt.Sprintf("%s-%d", n.prefix, host) }

func (n *testNet) run(args ...string) {
	n.t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// vanish drops every packet to and from a host, from now on.
func (n *testNet) vanish(host int) {
	n.t.Helper()
	n.run("ip", "netns", "exec", n.name(host), "nft", "add table inet gone; add chain inet gone in { type filter hook input priority 0; policy drop; }; add chain inet gone out { type filter hook output priority 0; policy drop; }")
}

// on is a rig whose processes run on a host. They end with those of r, which is
// to be newer than the network.
func (n *testNet) on(r *Rig, host int) *Rig {
	h := &Rig{Binary: r.Binary, Wrap: []string{"ip", "netns", "exec", n.name(host)}, Client: n.client(host)}
	r.hosts = append(r.hosts, h)
	return h
}

// client talks from a host.
func (n *testNet) client(host int) *http.Client {
	if n.clients[host] == nil {
		n.clients[host] = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: n.dialer(host)}}
	}
	return n.clients[host]
}

// dialer dials from a host.
func (n *testNet) dialer(host int) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		done := make(chan struct{})
		go func() { // a thread of its own, which ends with the namespace it entered
			defer close(done)
			runtime.LockOSThread()
			var fd *os.File
			if fd, err = os.Open("/var/run/netns/" + n.name(host)); err != nil {
				return
			}
			defer fd.Close()
			if err = unix.Setns(int(fd.Fd()), unix.CLONE_NEWNET); err != nil {
				return
			}
			c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
		}()
		<-done
		return c, err
	}
}

// recipe reads the commands of README's section on two machines, by host.
func recipe(t *testing.T) (onHost map[int][]string, curl string) {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## On two machines\n")
	if !ok {
		t.Fatal("README has no section on two machines")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	onHost, host := map[int][]string{}, 0
	for line := range strings.Lines(section) {
		cmd, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		switch {
		case !ok:
		case strings.HasPrefix(cmd, "# 10.0.0."):
			fmt.Sscanf(cmd, "# 10.0.0.%d", &host)
		case strings.HasPrefix(cmd, "metronome "):
			onHost[host] = append(onHost[host], strings.TrimPrefix(cmd, "metronome "))
		case strings.HasPrefix(cmd, "curl "):
			curl = cmd
		}
	}
	if len(onHost[1]) != 1 || len(onHost[2]) != 2 || curl == "" {
		t.Fatalf("README's recipe is not what this test knows to run: %v %q", onHost, curl)
	}
	return onHost, curl
}

// README's recipe for two machines, word for word, between two hosts.
func TestTwoMachines(t *testing.T) {
	commands, curl := recipe(t)
	n := newTestNet(t, 2)
	dir := t.TempDir()
	model, err := filepath.Abs("../../testdata/tiny-model/tiny-f16.gguf")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(model, filepath.Join(dir, "model.gguf")); err != nil {
		t.Fatal(err)
	}
	const token = "a-secret-of-two-machines"
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := newRig(t)
	for host := 1; host <= 2; host++ {
		for _, cmd := range commands[host] {
			r := n.on(base, host)
			r.Dir = dir
			r.present(token)
			r.start(t, strings.Fields(cmd)...)
		}
	}
	ask := exec.CommandContext(within(t, 20*time.Second), "ip", "netns", "exec", n.name(2), "sh", "-c", curl+" --silent --show-error --max-time 15")
	ask.Dir = dir
	out, err := ask.CombinedOutput()
	if err != nil || !strings.Contains(string(out), `"finish_reason":"`) {
		t.Fatalf("%v\n%s", err, out)
	}
	// Without the token nothing is served.
	ask = exec.CommandContext(within(t, 20*time.Second), "ip", "netns", "exec", n.name(2), "curl", "--silent", "--max-time", "5", "http://10.0.0.2:8000/v1/completions", "-d", `{"prompt":"The moon is"}`)
	if out, err := ask.CombinedOutput(); err != nil || !strings.Contains(string(out), `"unauthorized"`) {
		t.Errorf("without a token: %v\n%s", err, out)
	}
}

// Of two prefill hosts one vanishes under load, and is killed later: its
// packets are dropped, nobody refuses anything. Decode stays healthy and serves
// the other.
func TestPrefillHostVanishes(t *testing.T) {
	n := newTestNet(t, 3)
	base := newRig(t)
	flags := []string{"--engine=sim", "--insecure", "--kv-timeout=2s", "--request-timeout=30s"}
	var prefill []*Proc
	for host := 1; host <= 2; host++ {
		ip := fmt.Sprintf("10.0.0.%d", host)
		prefill = append(prefill, n.on(base, host).start(t, append([]string{"prefill", "sim", "--listen=" + ip + ":30000", "--bootstrap-listen=" + ip + ":8998", "--kv-listen=" + ip + ":0"}, flags...)...))
	}
	d := n.on(base, 3).start(t, append([]string{"decode", "sim", "--listen=10.0.0.3:30100", "--on-mismatch=reject", "--parallel-info-timeout=1s", "--parallel-info-attempts=2", "--heartbeat-interval=500ms", "--resolve-timeout=4s"}, flags...)...)
	router := n.on(base, 3).start(t, "router", "--listen=10.0.0.3:8000", "--insecure", "--idle-timeout=3s", "--prefill=http://10.0.0.1:30000,8998", "--prefill=http://10.0.0.2:30000,8998", "--decode="+d.HTTP)
	from := n.client(3)
	body := map[string]any{"text": "vanish", "sampling_params": map[string]any{"max_new_tokens": 20, "temperature": 0}}
	want, err := GenerateWith(within(t, 10*time.Second), from, router.HTTP, body)
	if err != nil || want.Status != 200 {
		t.Fatalf("%v %+v", err, want)
	}
	stop := make(chan struct{})
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() { // ends when stop is closed, within one request's bound
			for {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithTimeout(context.Background(), requestBound)
				a, err := GenerateWith(ctx, from, router.HTTP, body)
				switch {
				case err != nil:
					t.Errorf("a request under load: %v", err)
				case a.Error == nil && differ(a, want) != "":
					t.Errorf("wrong answer under load: %s", differ(a, want))
				case a.Error != nil && (a.Error.Code == "" || a.Error.Code == "internal"):
					t.Errorf("no named cause: %+v", a.Error)
				}
				cancel()
			}
		})
	}
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for i := range 14 {
		<-second.C
		switch i {
		case 2:
			n.vanish(1)
		case 8:
			prefill[0].Kill()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		req, _ := http.NewRequestWithContext(ctx, "GET", d.HTTP+"/health_generate", nil)
		resp, err := from.Do(req)
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("second %d: decode is not healthy: %v %v", i, resp, err)
		}
		if err == nil {
			resp.Body.Close()
		}
		cancel()
	}
	close(stop)
	load.Wait()
	for range 4 { // out of rotation by now: everybody is served at once
		ctx := within(t, 3*time.Second)
		if a, err := GenerateWith(ctx, from, router.HTTP, body); err != nil || a.Status != 200 || differ(a, want) != "" {
			t.Errorf("afterwards: %v %+v", err, a)
		}
	}
}
