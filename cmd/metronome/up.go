package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/metronome-serve/metronome/internal/worker"
)

// readyTimeout bounds the start of one child: a big model has to be mapped and
// hashed before its worker is ready.
const readyTimeout = 5 * time.Minute

// readyLine is what every part prints with --json when it can serve.
type readyLine struct {
	Ready     bool     `json:"ready"`
	Role      string   `json:"role"`
	HTTP      string   `json:"http"`
	Bootstrap string   `json:"bootstrap,omitempty"`
	KV        []string `json:"kv,omitempty"`
	PID       int      `json:"pid"`
	Instance  string   `json:"instance,omitempty"`
	Model     string   `json:"model,omitempty"`
}

// upLine is the ready line of up.
type upLine struct {
	Ready   bool       `json:"ready"`
	Router  string     `json:"router"`
	Prefill []upWorker `json:"prefill"`
	Decode  []upWorker `json:"decode"`
}

type upWorker struct {
	HTTP      string `json:"http"`
	Bootstrap string `json:"bootstrap,omitempty"`
	PID       int    `json:"pid"`
}

// child is one process of the fleet. It has a process group of its own, so a
// Ctrl-C in the terminal reaches up alone, and it ends when its stdin closes,
// so nothing is left behind even when up is killed.
type child struct {
	name  string // prefill 1
	cmd   *exec.Cmd
	stdin io.Closer
	ready chan readyLine // one value, or closed without one when the child ended first
	done  chan struct{}  // closed when the child has been waited for
	err   error          // of Wait, valid after done
}

// fleet is the processes that up has started, in the order of starting.
type fleet struct {
	self     string
	children []*child
	wg       sync.WaitGroup // one goroutine a child
	stopping chan struct{}  // closed when children are expected to end
}

// Run starts the fleet, says that it is ready, and takes it down again.
func (c *upCmd) Run(ctx context.Context, s *settings) error {
	if err := errors.Join(s.unknown(), c.engineFlags.check(s), c.prefillOnly.check(), c.decodeOnly.check(s), c.joinFlags.check(c.Registry), c.check()); err != nil {
		return err
	}
	if _, err := modelPath(c.Model, c.Engine); err != nil {
		return err
	}
	if err := c.portFree(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	f := &fleet{self: self, stopping: make(chan struct{})}
	defer f.stop(c.Drain)
	line, err := c.start(ctx, f, s)
	if ctx.Err() != nil {
		return nil // stopped before all was ready: a clean stop, too
	}
	if err != nil {
		return err
	}
	if c.JSON {
		err = json.NewEncoder(stdout).Encode(line)
	} else {
		err = c.table(f, line)
	}
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (c *upCmd) check() error {
	switch {
	case c.Prefill < 1 || c.Decode < 1 || c.Prefill > 64 || c.Decode > 64:
		return usagef("--prefill %d --decode %d: up starts 1 to 64 of each", c.Prefill, c.Decode)
	case c.Port < 0 || c.Port > 65535:
		return usagef("--port %d: a port is 0 to 65535; 0 picks a free one", c.Port)
	case c.Prefill > 1 && !strings.HasSuffix(c.BootstrapListen, ":0"):
		return usagef("--bootstrap-listen %s: several prefill workers cannot share one address; leave it out", c.BootstrapListen)
	}
	return nil
}

// portFree looks whether the router will get its port, before any worker is
// started: what else it would say comes late, and of a flag that up has not.
func (c *upCmd) portFree() error {
	ln, err := worker.Listen("--port", c.address())
	if err != nil {
		return usageError{err}
	}
	return ln.Close()
}

func (c *upCmd) address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(c.Port)) }

// start brings the workers up side by side, then the router in front of them.
func (c *upCmd) start(ctx context.Context, f *fleet, s *settings) (*upLine, error) {
	var workers []*child
	for i := range c.Prefill {
		ch, err := f.spawn(fmt.Sprintf("prefill %d", i+1), append([]string{"prefill", c.Model, "--listen=127.0.0.1:0"}, s.childArgs("prefill")...))
		if err != nil {
			return nil, err
		}
		workers = append(workers, ch)
	}
	for i := range c.Decode {
		ch, err := f.spawn(fmt.Sprintf("decode %d", i+1), append([]string{"decode", c.Model, "--listen=127.0.0.1:0"}, s.childArgs("decode")...))
		if err != nil {
			return nil, err
		}
		workers = append(workers, ch)
	}
	line := &upLine{Ready: true}
	args := append([]string{"router", "--listen=" + c.address()}, s.childArgs("router")...)
	for _, ch := range workers {
		r, err := ch.waitReady(ctx)
		if err != nil {
			return nil, err
		}
		if r.Role == "prefill" {
			_, port, _ := net.SplitHostPort(r.Bootstrap)
			args = append(args, "--prefill="+r.HTTP+","+port)
			line.Prefill = append(line.Prefill, upWorker{r.HTTP, r.Bootstrap, r.PID})
		} else {
			args = append(args, "--decode="+r.HTTP)
			line.Decode = append(line.Decode, upWorker{HTTP: r.HTTP, PID: r.PID})
		}
	}
	router, err := f.spawn("router", args)
	if err != nil {
		return nil, err
	}
	r, err := router.waitReady(ctx)
	if err != nil {
		return nil, err
	}
	line.Router = r.HTTP
	for _, ch := range f.children {
		f.watch(ch)
	}
	return line, nil
}

// spawn starts one child with pipes for stdin (its life line) and stdout (its
// ready line); its log goes to our stderr line by line.
func (f *fleet) spawn(name string, args []string) (*child, error) {
	cmd := exec.Command(f.self, append(args, "--json", "--exit-with-stdin")...)
	cmd.Env = withoutSettings(os.Environ())
	cmd.SysProcAttr = ownGroup()
	cmd.Stderr = &childLog{to: os.Stderr, name: name}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	ch := &child{name: name, cmd: cmd, stdin: stdin, ready: make(chan readyLine, 1), done: make(chan struct{})}
	f.children = append(f.children, ch)
	f.wg.Add(1)
	go func() { // ends with the child: its stdout closes
		defer f.wg.Done()
		defer close(ch.done)
		ch.read(stdout)
		ch.err = cmd.Wait()
	}()
	return ch, nil
}

// read takes the ready line and drains the rest, so that a child never blocks
// on a full pipe.
func (ch *child) read(stdout io.Reader) {
	defer close(ch.ready)
	in := bufio.NewScanner(stdout)
	for in.Scan() {
		var r readyLine
		if json.Unmarshal(in.Bytes(), &r) == nil && r.Ready {
			r.PID = ch.cmd.Process.Pid
			ch.ready <- r
			break
		}
	}
	io.Copy(io.Discard, stdout)
}

func (ch *child) waitReady(ctx context.Context) (readyLine, error) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	select {
	case r, ok := <-ch.ready:
		if ok {
			return r, nil
		}
		<-ch.done
		return readyLine{}, ch.failed()
	case <-ctx.Done():
		return readyLine{}, fmt.Errorf("%s was not ready in time: %w", ch.name, ctx.Err())
	}
}

// failed says how a child ended before it was ready. The child has said why
// on stderr, and its exit status becomes ours.
func (ch *child) failed() error {
	code := ch.cmd.ProcessState.ExitCode()
	if code <= 0 {
		code = exitFailure
	}
	return exitCode{code: code, err: fmt.Errorf("%s ended before it was ready (%s)", ch.name, ch.cmd.ProcessState)}
}

// watch reports a child that ends, in one line; the rest goes on.
func (f *fleet) watch(ch *child) {
	f.wg.Add(1)
	go func() { // ends with the child
		defer f.wg.Done()
		<-ch.done
		select {
		case <-f.stopping:
		default:
			fmt.Fprintf(os.Stderr, "up: %s (pid %d) ended: %s; it stays down, the rest goes on\n", ch.name, ch.cmd.Process.Pid, ch.cmd.ProcessState)
		}
	}()
}

// stop takes everything down: the router first, so that no new request comes,
// then the workers; a child that outlives its drain is killed.
func (f *fleet) stop(drain time.Duration) {
	close(f.stopping)
	for i := len(f.children) - 1; i >= 0; i-- {
		interrupt(f.children[i].cmd.Process)
		f.children[i].stdin.Close()
	}
	limit := time.NewTimer(drain + 5*time.Second)
	defer limit.Stop()
	for i := len(f.children) - 1; i >= 0; i-- {
		ch := f.children[i]
		select {
		case <-ch.done:
		case <-limit.C:
			ch.cmd.Process.Kill()
			limit.Reset(time.Second)
			<-ch.done
		}
	}
	f.wg.Wait()
}

// withoutSettings removes METRONOME_* from a child's environment: what holds
// for up is passed on as flags.
func withoutSettings(env []string) []string {
	var out []string
	for _, e := range env {
		if !strings.HasPrefix(e, "METRONOME_") {
			out = append(out, e)
		}
	}
	return out
}

// table shows the fleet and a request to copy.
func (c *upCmd) table(f *fleet, line *upLine) error {
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WHO\tWHERE\tPID\tMODEL\tMEMORY")
	where := map[int]string{}
	for _, p := range line.Prefill {
		where[p.PID] = p.HTTP + " bootstrap " + p.Bootstrap
	}
	for _, d := range line.Decode {
		where[d.PID] = d.HTTP
	}
	for _, ch := range f.children {
		pid := ch.cmd.Process.Pid
		at, model := where[pid], c.Model
		if at == "" {
			at, model = line.Router, "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", ch.name, at, pid, model, resident(pid))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(stdout, "\nready up %s\n\n  curl -N %s/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"What is a bridge?\"}],\"stream\":true}'\n\n", line.Router, line.Router)
	return err
}

// childLog passes the lines of a child on, each with the child's name: before
// it, or as the field process of a JSON object, which it stays.
type childLog struct {
	to   io.Writer
	name string
	part []byte
}

func (p *childLog) named(line []byte) []byte {
	if rest, ok := bytes.CutPrefix(line, []byte(`{"`)); ok {
		return fmt.Appendf(nil, `{"process":%q,"%s`, p.name, rest)
	}
	return fmt.Appendf(nil, "%s: %s", p.name, line)
}

func (p *childLog) Write(b []byte) (int, error) {
	p.part = append(p.part, b...)
	for {
		i := bytes.IndexByte(p.part, '\n')
		if i < 0 && len(p.part) < 64<<10 {
			return len(b), nil
		}
		if i < 0 {
			i = len(p.part) - 1
		}
		if _, err := p.to.Write(p.named(p.part[:i+1])); err != nil {
			return 0, err
		}
		p.part = p.part[i+1:]
	}
}
