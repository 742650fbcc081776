package main

import (
	"os"
	"syscall"
)

// ownGroup gives a child a process group of its own.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
}

// interrupt ends a process: Windows has no SIGTERM, closing stdin drains it.
func interrupt(*os.Process) {}
