package worker

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
)

// bind listens on an address of the configuration. Whoever listens beyond this
// machine must be able to tell friend from stranger.
func (c *Config) bind(flag, addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("%s %q is no address: want host:port, like 127.0.0.1:8000", flag, addr)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return nil, fmt.Errorf("%s %q: the port must be a number from 0 to 65535", flag, addr)
	}
	if !loopback(host) && c.Tokens.Empty() && !c.Insecure {
		return nil, fmt.Errorf("%s %s can be reached from other machines: give --token-file, or --insecure if the network is trusted", flag, addr)
	}
	return Listen(flag, addr)
}

// Listen takes the address of a flag, or says what keeps it from that.
func Listen(flag, addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s %s: another process listens there; end it, or take another port (0 picks a free one)", flag, addr)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", flag, addr, err)
	}
	return ln, nil
}

// bindKV makes one KV listener for each DP and TP rank. With a fixed port the
// others follow it in order.
func (c *Config) bindKV() ([]net.Listener, error) {
	host, port, err := net.SplitHostPort(c.KVListen)
	first, err2 := strconv.ParseUint(port, 10, 16)
	n := c.DP * c.TP
	if err != nil || err2 != nil || (first > 0 && int(first)+n-1 > 65535) {
		return nil, fmt.Errorf("--kv-listen %q is no address for %d ranks: want host:port, like 127.0.0.1:0", c.KVListen, n)
	}
	var lns []net.Listener
	for i := range n {
		p := 0
		if first > 0 {
			p = int(first) + i
		}
		ln, err := c.bind("--kv-listen", net.JoinHostPort(host, strconv.Itoa(p)))
		if err != nil {
			closeAll(lns)
			return nil, err
		}
		lns = append(lns, ln)
	}
	return lns, nil
}

func closeAll(lns []net.Listener) {
	for _, ln := range lns {
		ln.Close()
	}
}

// loopback says whether a host names this machine only.
func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// reach is where others find a listener: its port at the advertised host.
func (c *Config) reach(ln net.Listener) (host string, port int, err error) {
	a := ln.Addr().(*net.TCPAddr)
	switch {
	case c.Advertise != "":
		return c.Advertise, a.Port, nil
	case !a.IP.IsUnspecified():
		return a.IP.String(), a.Port, nil
	}
	host, err = outward()
	return host, a.Port, err
}

// outward is the first address of this machine that others may reach.
func outward() (string, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("the addresses of this machine are not known, give --advertise HOST: %w", err)
	}
	best := ""
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok || !n.IP.IsGlobalUnicast() {
			continue
		}
		if n.IP.To4() != nil {
			return n.IP.String(), nil
		}
		if best == "" {
			best = n.IP.String()
		}
	}
	if best == "" {
		return "", fmt.Errorf("this machine has no address that others can reach: give --advertise HOST")
	}
	return best, nil
}

// url and hostPort name a listener for others.
func (c *Config) hostPort(ln net.Listener) (string, error) {
	host, port, err := c.reach(ln)
	return net.JoinHostPort(host, strconv.Itoa(port)), err
}
