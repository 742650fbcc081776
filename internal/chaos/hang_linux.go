package chaos

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
)

// fillBacklog listens with the smallest backlog and fills it with connections
// that nobody accepts, until a further SYN stays unanswered.
func (h *Hang) fillBacklog(host string) error {
	ip, err := netip.ParseAddr(host)
	if err != nil || !ip.Is4() {
		return fmt.Errorf("%s is not an IPv4 address", host)
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "backlog")
	defer f.Close() // FileListener has a descriptor of its own
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: ip.As4()}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		return os.NewSyscallError("listen", err)
	}
	// Go's FileListener would listen anew with a large backlog: keep the raw one.
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	dup, err := syscall.Dup(fd)
	if err != nil {
		return os.NewSyscallError("dup", err)
	}
	h.ln = rawListener{os.NewFile(uintptr(dup), "backlog")}
	h.Addr = net.JoinHostPort(host, fmt.Sprint(sa.(*syscall.SockaddrInet4).Port))
	for range 16 {
		c, err := net.DialTimeout("tcp", h.Addr, 100*time.Millisecond)
		if err != nil {
			return nil // this one was not answered: the backlog is full
		}
		h.conns = append(h.conns, c)
	}
	return fmt.Errorf("%s: the backlog does not fill", h.Addr)
}

// rawListener keeps a listening socket open without accepting.
type rawListener struct{ *os.File }

func (rawListener) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (rawListener) Addr() net.Addr            { return nil }
