//go:build unix

package main

import (
	"os"
	"syscall"
)

// ownGroup gives a child a process group of its own.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// interrupt asks a process to drain and stop.
func interrupt(p *os.Process) { p.Signal(syscall.SIGTERM) }
