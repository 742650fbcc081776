//go:build !windows

package bootstrap

import "syscall"

// localErrnos are the errors of a process without descriptors, ports or buffers.
var localErrnos = []error{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS, syscall.ENOMEM}
