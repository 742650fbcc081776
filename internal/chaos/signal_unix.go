//go:build unix

package chaos

import "syscall"

// Stop freezes the process (SIGSTOP): its sockets stay open and silent.
func (p *Proc) Stop() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue lets a stopped process run on (SIGCONT).
func (p *Proc) Continue() error { return p.cmd.Process.Signal(syscall.SIGCONT) }

// Terminate asks the process to drain and end (SIGTERM).
func (p *Proc) Terminate() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
