//go:build unix

package router

import "syscall"

// looker gives a function that tells whether there is something to read from a
// connection, or its end, without waiting and without reading it.
func looker(s syscall.Conn) func() bool {
	raw, err := s.SyscallConn()
	if err != nil {
		return nil
	}
	var found bool
	var b [1]byte
	peek := func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		found = err != syscall.EAGAIN
		return true
	}
	return func() bool { return raw.Read(peek) != nil || found }
}
