//go:build unix

package router

import "syscall"

// mapMemory takes memory from the system, to which unmapMemory gives it back.
func mapMemory(n int64) []byte {
	b, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return make([]byte, 0, n)
	}
	return b[:0]
}

// unmapMemory leaves alone what the system did not give.
func unmapMemory(b []byte) { syscall.Munmap(b[:cap(b)]) }
