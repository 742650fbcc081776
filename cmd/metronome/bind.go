package main

import (
	"bufio"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// tokens reads a token file: one token a line, empty lines and # comments left out.
func tokens(flag, file string) ([]string, error) {
	if file == "" {
		return nil, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, usagef("--%s: %v", flag, err)
	}
	defer f.Close()
	var out []string
	in := bufio.NewScanner(f)
	for in.Scan() {
		line := strings.TrimSpace(in.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, usagef("--%s %s: a token is one line of visible ASCII", flag, file)
		}
		out = append(out, line)
	}
	if err := in.Err(); err != nil {
		return nil, usagef("--%s %s: %v", flag, file, err)
	}
	if len(out) == 0 {
		return nil, usagef("--%s %s: holds no token", flag, file)
	}
	return out, nil
}

// auth is what a part accepts and presents.
type auth struct {
	accept []string // tokens of callers; none: nobody has to present one
	peer   string   // the token that we present
}

func (c *commonFlags) auth() (auth, error) {
	accept, err := tokens("token-file", c.TokenFile)
	if err != nil {
		return auth{}, err
	}
	peer, err := tokens("peer-token-file", c.PeerTokenFile)
	if err != nil {
		return auth{}, err
	}
	a := auth{accept: accept}
	if len(peer) > 0 {
		a.peer = peer[0]
	} else if len(accept) > 0 {
		a.peer = accept[0]
	}
	return a, nil
}

// checkBind refuses an address that is no host:port, and one that is not
// loopback when no token protects it.
func (c *commonFlags) checkBind(flag, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return usagef("--%s %s: an address is HOST:PORT, like 127.0.0.1:8000", flag, addr)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return usagef("--%s %s: a port is 0 to 65535; 0 picks a free one", flag, addr)
	}
	if c.TokenFile != "" || c.Insecure || host == "localhost" {
		return nil
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsLoopback() {
		return nil
	}
	return usagef("--%s %s: not a loopback address and no --token-file: anyone could use it; give --token-file, or --insecure if the network is trusted", flag, addr)
}
