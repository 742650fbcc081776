package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
)

const tokenMax = 4096 // bytes of one token: what a KV link's greeting holds

// parseTokens reads a token file: one token a line, empty lines and # comments
// left out. Its errors never show a token.
func parseTokens(data []byte) (tokens []string, err error) {
	n := 0
	for line := range bytes.Lines(data) {
		n++
		t := strings.TrimSpace(string(line))
		if t == "" || strings.HasPrefix(t, "#") {
			continue
		}
		if len(t) > tokenMax || strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("line %d: a token is one line of visible ASCII, at most %d bytes", n, tokenMax)
		}
		tokens = append(tokens, t)
	}
	if len(tokens) == 0 {
		return nil, errors.New("holds no token")
	}
	return tokens, nil
}

// auth is what a part accepts and presents. Both follow their files: the first
// token of a file is the one that is presented.
type auth struct {
	accept api.Tokens  // of callers; none: nobody has to present one
	peers  api.Tokens  // all that a peer may present to show that it is one: the peer token file's, else those of callers
	peer   *api.Secret // what we present
	files  []*followed
}

func (c *commonFlags) auth() (*auth, error) {
	a := &auth{peer: api.NewSecret("")}
	if c.TokenFile != "" {
		a.accept = api.NewTokens()
		err := a.read("token-file", c.TokenFile, func(tokens []string) {
			a.accept.Replace(tokens...)
			if c.PeerTokenFile == "" {
				a.peer.Replace(tokens[0])
			}
		})
		if err != nil {
			return nil, err
		}
	}
	a.peers = a.accept
	if c.PeerTokenFile != "" {
		a.peers = api.NewTokens()
		err := a.read("peer-token-file", c.PeerTokenFile, func(tokens []string) {
			a.peer.Replace(tokens[0])
			a.peers.Replace(tokens...)
		})
		if err != nil {
			return nil, err
		}
	}
	return a, nil
}

func (a *auth) read(flag, file string, use func(tokens []string)) error {
	f, err := follow(flag, file, func(data []byte) error {
		tokens, err := parseTokens(data)
		if err == nil {
			use(tokens)
		}
		return err
	})
	a.files = append(a.files, f)
	return err
}

// follow takes over changes of the files until ctx ends.
func (a *auth) follow(ctx context.Context, log *slog.Logger) {
	for _, f := range a.files {
		go f.run(ctx, log) // ends with ctx; nothing waits for it
	}
}

// checkAdvertise refuses what is no host: peers would be told of it, and fail.
func (c *commonFlags) checkAdvertise() error {
	if c.Advertise == "" {
		return nil
	}
	host, err := bootstrap.CheckHost(c.Advertise)
	if err != nil {
		return usagef("--advertise %s: a host name or address without scheme and port, like 10.0.0.1, would be right", c.Advertise)
	}
	c.Advertise = host
	return nil
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
