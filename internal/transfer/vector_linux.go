//go:build linux && !race

package transfer

import (
	"io"
	"net"
	"syscall"
	"unsafe"
)

// vector reads from a TCP connection into several buffers with one system
// call. Under the race detector, which would not see what the system writes,
// there is none.
type vector struct {
	conn syscall.RawConn
	iov  []syscall.Iovec
	n    int
	err  syscall.Errno
	once func(fd uintptr) bool // bound once: a closure for each call would be an allocation
}

// newVector is nil for connections of other kinds.
func newVector(conn net.Conn) *vector {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	raw.Control(roomy)
	v := &vector{conn: raw}
	v.once = v.readv
	return v
}

// heldBytes is how much of a stream the system should hold for us.
const heldBytes = 4 << 20

// roomy has the system hold heldBytes of a stream from the start, if it may, and
// more when it finds that more come. By itself it begins with 64 KiB and judges by
// what is read in a round trip, which on a short link may stay too little for
// ever: the sender then stops and waits, over and over. A low-water mark makes
// it take the room; a buffer that is set by SO_RCVBUF would never grow, and
// most systems allow that 208 KiB.
func roomy(fd uintptr) {
	for _, mark := range []int{heldBytes, 1} {
		syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, mark)
	}
}

// maxBuffers is how many buffers the system takes at a time.
const maxBuffers = 1024

// read reads what is there into s, at most the buffers that begin before so
// many bytes. It waits for the first byte.
func (v *vector) read(s *spans, most int) (int, error) {
	v.iov = v.iov[:0]
	for ahead := *s; most > 0 && len(v.iov) < maxBuffers; {
		b := ahead.take(most)
		if b == nil {
			break
		}
		iov := syscall.Iovec{Base: unsafe.SliceData(b)}
		iov.SetLen(len(b))
		v.iov = append(v.iov, iov)
		most -= len(b)
	}
	err := v.conn.Read(v.once)
	clear(v.iov)
	switch {
	case err != nil:
		return 0, err
	case v.err != 0:
		return 0, v.err
	case v.n == 0:
		return 0, io.EOF
	}
	return v.n, nil
}

// readv is one try; false: nothing is there yet.
func (v *vector) readv(fd uintptr) bool {
	for {
		n, _, err := syscall.Syscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v.iov))), uintptr(len(v.iov)))
		if err != syscall.EINTR {
			v.n, v.err = int(n), err
			return err != syscall.EAGAIN
		}
	}
}
