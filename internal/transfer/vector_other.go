//go:build !linux || race

package transfer

import "net"

// vector reads into several buffers with one system call, where there is one.
type vector struct{}

func newVector(net.Conn) *vector { return nil }

func (*vector) read(*spans, int) (int, error) { panic("transfer: vectors are for Linux") }
