// Package chaos is the black-box rig: it starts real Metronome processes,
// breaks them or their peers, and judges by what a client can see.
//
// A Rig owns every process that it starts and ends only those, by pid. All
// sockets are on loopback or in network namespaces that the rig made.
package chaos

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// ReadyTimeout bounds the start of one process.
const ReadyTimeout = 60 * time.Second

// Rig starts processes of one binary and ends them all at Close.
type Rig struct {
	Binary string
	// Wrap goes before the binary on the command line, such as
	// ip netns exec NAME; empty: the binary is started as it is.
	Wrap []string
	// Dir is the directory that processes start in; empty: ours.
	Dir string
	// Client is how the processes are reached; nil: Client.
	Client *http.Client

	hosts []*Rig // of other networks, which end with this one
	mu    sync.Mutex
	procs []*Proc
}

func (r *Rig) client() *http.Client { return cmp.Or(r.Client, Client) }

// Proc is one running Metronome process.
type Proc struct {
	Args      []string
	Role      string   `json:"role"`
	HTTP      string   `json:"http"`
	Router    string   `json:"router"` // up
	Bootstrap string   `json:"bootstrap"`
	KV        []string `json:"kv"`
	Instance  string   `json:"instance"`
	Prefill   []Member `json:"prefill"` // up
	Decode    []Member `json:"decode"`  // up
	Ready     bool     `json:"ready"`

	cmd  *exec.Cmd
	log  lockedBuffer
	done chan struct{}
	err  error // of Wait, valid after done
}

// Member is one worker in the ready line of up.
type Member struct {
	HTTP      string `json:"http"`
	Bootstrap string `json:"bootstrap"`
	PID       int    `json:"pid"`
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

const logMax = 4 << 20 // bytes of one process's log that are kept

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() < logMax {
		l.b.Write(p)
	}
	return len(p), nil
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Start runs the binary with these arguments plus --json and waits for its
// ready line.
func (r *Rig) Start(ctx context.Context, args ...string) (*Proc, error) {
	p, err := r.spawn(append(args, "--json"))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, ReadyTimeout)
	defer cancel()
	if err := p.waitReady(ctx); err != nil {
		p.Kill()
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, p.Log())
	}
	return p, nil
}

// Fail runs the binary with arguments that it must refuse, and returns its
// exit status and what it said.
func (r *Rig) Fail(ctx context.Context, args ...string) (code int, stderr string, err error) {
	p, err := r.spawn(args)
	if err != nil {
		return 0, "", err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.Kill()
		return 0, p.Log(), fmt.Errorf("%s: still runs: %w", strings.Join(args, " "), ctx.Err())
	}
	return p.cmd.ProcessState.ExitCode(), p.Log(), nil
}

func (r *Rig) spawn(args []string, env ...string) (*Proc, error) {
	line := append(append(append([]string{}, r.Wrap...), r.Binary), args...)
	p := &Proc{Args: args, cmd: exec.Command(line[0], line[1:]...), done: make(chan struct{})}
	p.cmd.Stderr = &p.log
	p.cmd.Env, p.cmd.Dir = append(environ(), env...), r.Dir
	stdout, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.cmd.Stdout = w
	if err := p.cmd.Start(); err != nil {
		stdout.Close()
		w.Close()
		return nil, err
	}
	w.Close()
	r.mu.Lock()
	r.procs = append(r.procs, p)
	r.mu.Unlock()
	ready := make(chan struct{})
	go p.read(stdout, ready) // ends when the process closes its stdout
	go func() {              // ends with the process
		p.err = p.cmd.Wait()
		<-ready
		close(p.done)
	}()
	return p, nil
}

// environ is our environment without settings of Metronome.
func environ() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "METRONOME_") {
			env = append(env, e)
		}
	}
	return env
}

// read takes the ready line and drains the rest.
func (p *Proc) read(stdout *os.File, closed chan<- struct{}) {
	defer close(closed)
	defer stdout.Close()
	in := bufio.NewScanner(stdout)
	for in.Scan() {
		var line Proc
		if json.Unmarshal(in.Bytes(), &line) == nil && line.Ready {
			p.log.mu.Lock() // publishes the fields below to waitReady
			p.Role, p.HTTP, p.Router, p.Bootstrap, p.KV, p.Instance = line.Role, line.HTTP, line.Router, line.Bootstrap, line.KV, line.Instance
			p.Prefill, p.Decode, p.Ready = line.Prefill, line.Decode, true
			p.log.mu.Unlock()
			break
		}
	}
	io.Copy(io.Discard, stdout)
}

func (p *Proc) isReady() bool {
	p.log.mu.Lock()
	defer p.log.mu.Unlock()
	return p.Ready
}

func (p *Proc) waitReady(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !p.isReady() {
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("ended before it was ready: %v", p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w", ctx.Err())
		}
	}
	return nil
}

// PID is the process id.
func (p *Proc) PID() int { return p.cmd.Process.Pid }

// Log is what the process has written to stderr.
func (p *Proc) Log() string { return p.log.String() }

// Done is closed when the process has ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// ExitCode is the exit status; valid after Done.
func (p *Proc) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Kill ends the process at once and waits for it.
func (p *Proc) Kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// Close ends everything that was started, last first.
func (r *Rig) Close() error {
	r.mu.Lock()
	procs := r.procs
	r.procs = nil
	r.mu.Unlock()
	var errs []error
	for _, h := range r.hosts {
		errs = append(errs, h.Close())
	}
	for i := len(procs) - 1; i >= 0; i-- {
		errs = append(errs, procs[i].end())
	}
	return errors.Join(errs...)
}

// end stops a process kindly, then by force.
func (p *Proc) end() error {
	select {
	case <-p.done:
		return nil
	default:
	}
	p.Continue()
	p.Terminate()
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		p.Kill()
	}
	return nil
}
