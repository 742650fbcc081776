//go:build !unix

package router

import "syscall"

// looker: here a connection that the worker has closed is found out by use.
func looker(syscall.Conn) func() bool { return nil }
