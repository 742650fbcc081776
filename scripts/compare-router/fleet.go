//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// peer is a router that can be started: ours or another's.
type peer struct {
	name    string
	version string
	ready   string // path that says whether it can serve
	argv    func(port int, f *fleet) []string
}

// ours is the router of this repository; flags go beyond its defaults.
func ours(binary string, flags ...string) peer {
	version, _ := exec.Command(binary, "version").Output()
	return peer{"metronome", strings.TrimSpace(strings.TrimPrefix(string(version), "metronome ")), "/readyz", func(port int, f *fleet) []string {
		argv := append([]string{binary, "router", fmt.Sprintf("--listen=127.0.0.1:%d", port)}, flags...)
		for i, url := range f.prefill {
			argv = append(argv, fmt.Sprintf("--prefill=%s,%d", url, f.bootstrap[i]))
		}
		for _, url := range f.decode {
			argv = append(argv, "--decode="+url)
		}
		return argv
	}}
}

// other is sglang-router or its successor smg, from a Python environment.
func other(name, module, venv string) (peer, error) {
	python := filepath.Join(venv, "bin", "python")
	version, err := exec.Command(python, "-c", "import importlib.metadata as m; print(m.version('"+name+"'))").Output()
	if err != nil {
		return peer{}, fmt.Errorf("%s has no %s: make compare-router PEERS=1 installs it (%w)", venv, name, err)
	}
	return peer{name, strings.TrimSpace(string(version)), "/readiness", func(port int, f *fleet) []string {
		argv := []string{python, "-m", module, "--host", stubHost, "--port", fmt.Sprint(port), "--prometheus-host", stubHost, "--prometheus-port", fmt.Sprint(freePort()), "--pd-disaggregation"}
		for i, url := range f.prefill {
			argv = append(argv, "--prefill", url, fmt.Sprint(f.bootstrap[i]))
		}
		for _, url := range f.decode {
			argv = append(argv, "--decode", url)
		}
		return argv
	}}, nil
}

// proc is a process of ours.
type proc struct {
	cmd  *exec.Cmd
	in   io.Closer
	done <-chan struct{}
}

func (p *proc) pid() int                { return p.cmd.Process.Pid }
func (p *proc) signal(s syscall.Signal) { p.cmd.Process.Signal(s) }
func (p *proc) kill()                   { p.signal(syscall.SIGKILL); <-p.done }
func launch(log *os.File, argv ...string) (*proc, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &proc{cmd, in, beside(func() { cmd.Wait() })}, nil
}

// cpu is the processor time that a process has used, to the nanosecond: the
// clock that clock_getcpuclockid(3) gives for it.
func (p *proc) cpu() time.Duration {
	var ts syscall.Timespec
	clock := uintptr(^p.pid()<<3 | 2)
	if _, _, e := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clock, uintptr(unsafe.Pointer(&ts)), 0); e != 0 {
		return 0
	}
	return time.Duration(ts.Nano())
}

// resident is the memory that a process has, in bytes.
func (p *proc) resident() int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid()))
	_, line, _ := strings.Cut(string(text), "VmRSS:")
	var kb int64
	fmt.Sscan(line, &kb)
	return kb << 10
}

// fleet is two prefills and two decodes, and routers in front of them.
type fleet struct {
	log             *os.File
	prefill, decode []string // URLs
	bootstrap       []int
	workers         []*proc // prefills, then decodes
	routers         []*running
	all             []*proc
}

type running struct {
	*proc
	peer
	url string
}

// startStubs starts stub workers.
func startStubs(log *os.File) (*fleet, error) {
	f := &fleet{log: log}
	for i := range 4 {
		port := freePort()
		url := fmt.Sprintf("http://%s:%d", stubHost, port)
		if i < 2 {
			f.prefill, f.bootstrap = append(f.prefill, url), append(f.bootstrap, port)
		} else {
			f.decode = append(f.decode, url)
		}
		f.workers = append(f.workers, nil)
		if err := f.restart(i); err != nil {
			f.close()
			return nil, err
		}
	}
	return f, f.set(mode{}, 0, 1, 2, 3)
}

func (f *fleet) urls() []string { return append(append([]string{}, f.prefill...), f.decode...) }

// restart starts worker i at its address.
func (f *fleet) restart(i int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	url := f.urls()[i]
	p, err := launch(f.log, self, "-stub", strings.TrimPrefix(url, "http://"))
	if err != nil {
		return err
	}
	f.workers[i] = p
	f.all = append(f.all, p)
	return until(10*time.Second, func() bool { return status(url+"/health") == 200 })
}

// set gives workers a mode.
func (f *fleet) set(m mode, workers ...int) error {
	for _, i := range workers {
		m.Prefill = i < 2
		text, _ := json.Marshal(m)
		resp, err := http.Post(f.urls()[i]+"/stub", "application/json", bytes.NewReader(text))
		if err != nil {
			return err
		}
		resp.Body.Close()
	}
	return nil
}

// tally asks worker i what it saw.
func (f *fleet) tally(i int) (t tally) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", f.urls()[i]+"/stub", nil)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		json.NewDecoder(resp.Body).Decode(&t)
		resp.Body.Close()
	}
	return t
}

// start starts a router and waits until a request goes through it.
func (f *fleet) start(p peer) (*running, error) {
	port := freePort()
	pr, err := launch(f.log, p.argv(port, f)...)
	if err != nil {
		return nil, err
	}
	f.all = append(f.all, pr)
	r := &running{pr, p, fmt.Sprintf("http://127.0.0.1:%d", port)}
	f.routers = append(f.routers, r)
	if err := until(60*time.Second, func() bool { return ask(r.url, chatBody(20, false), 2*time.Second).status == 200 }); err != nil {
		return nil, fmt.Errorf("%s is not ready: %w; see %s", p.name, err, f.log.Name())
	}
	return r, nil
}

// close ends every process of the fleet.
func (f *fleet) close() {
	for _, p := range f.all {
		p.signal(syscall.SIGCONT)
		p.in.Close()
		p.kill()
	}
}

func status(url string) int {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", url, nil)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// until polls a condition for at most d.
func until(d time.Duration, holds func() bool) error {
	for end := time.Now().Add(d); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("not within %v", d)
		}
	}
	return nil
}

var lastPort = 20000 + os.Getpid()*31%10000

// freePort is below those that the system gives to outgoing connections, so
// that a worker can be started at it again.
func freePort() int {
	for {
		lastPort++
		if ln, err := net.Listen("tcp", fmt.Sprintf("%s:%d", stubHost, lastPort)); err == nil {
			ln.Close()
			return lastPort
		}
	}
}
