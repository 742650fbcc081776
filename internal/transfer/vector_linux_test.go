//go:build linux && !race

package transfer

import (
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A connection that pages come over has room for them from the start, as far as
// the system lets it, and a read returns with the first byte as ever.
func TestReceiverHasRoom(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	sender, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	receiver, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer receiver.Close()
	v := newVector(receiver)
	if mark := option(t, receiver, syscall.SO_RCVLOWAT); mark != 1 {
		t.Errorf("a read waits for %d bytes", mark)
	}
	most := heldBytes
	if text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_rmem"); err == nil {
		if largest, err := strconv.Atoi(strings.Fields(string(text))[2]); err == nil {
			most = min(most, largest/2)
		}
	}
	if got := option(t, receiver, syscall.SO_RCVBUF); got < most {
		t.Errorf("the system holds %d bytes and may hold %d", got, most)
	}
	sender.Write([]byte{7})
	b := make([]byte, 8)
	if n, err := v.read(&spans{bufs: [][]byte{b}}, len(b)); n != 1 || b[0] != 7 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func option(t *testing.T, conn net.Conn, name int) (value int) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { value, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, name) })
	if err != nil {
		t.Fatal(err)
	}
	return value
}
