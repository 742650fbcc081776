//go:build !unix

package model

import (
	"io"
	"os"
)

// mapFile reads the file into memory where there is no mmap.
func mapFile(f *os.File, size int) (data []byte, unmap func() error, err error) {
	data = make([]byte, size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, nil, &os.PathError{Op: "read", Path: f.Name(), Err: err}
	}
	return data, func() error { return nil }, nil
}
