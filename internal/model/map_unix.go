//go:build unix

package model

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps the file read-only; unmap ends the mapping. The pages come from
// the page cache, so that several workers on one machine share one copy of the
// weights. A file that somebody cuts short while it is mapped kills the reader
// (SIGBUS): replace a model by renaming a new file over it.
func mapFile(f *os.File, size int) (data []byte, unmap func() error, err error) {
	data, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, &os.PathError{Op: "mmap", Path: f.Name(), Err: err}
	}
	HugePages(data)
	return data, func() error { return unix.Munmap(data) }, nil
}
