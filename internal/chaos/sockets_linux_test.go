package chaos

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// listening is a line of /proc/net/tcp or tcp6 whose socket listens.
var listening = regexp.MustCompile(`(?m)^ *\d+: ([0-9A-F]+):([0-9A-F]{4}) \S+ 0A `)

// Loopback as the kernel prints it on a little-endian machine.
var loopbacks = []string{"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

// Every role with its default flags, each in a network of its own: all that
// listens is on loopback, nothing takes datagrams, and from another machine
// every port refuses.
func TestF79Sockets(t *testing.T) {
	n := newTestNet(t, 7)
	base := newRig(t)
	for host, roles := range [][][]string{
		{{"prefill", "tiny"}}, {{"decode", "tiny"}}, {{"serve", "tiny"}}, {{"registry"}}, {{"up", "tiny"}},
		{{"prefill", "tiny"}, {"decode", "tiny"}, {"router", "--prefill=http://127.0.0.1:30000,8998", "--decode=http://127.0.0.1:30100"}},
	} {
		host++
		r := n.on(base, host)
		for _, args := range roles {
			r.start(t, args...)
		}
		name := roles[len(roles)-1][0]
		out, err := exec.Command("ip", "netns", "exec", n.name(host), "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6; echo UDP; cat /proc/net/udp /proc/net/udp6 | grep -v sl").CombinedOutput()
		if tcp, udp, ok := strings.Cut(string(out), "UDP\n"); !ok || udp != "" {
			t.Errorf("%s: datagrams are taken (%v):\n%s%s", name, err, tcp, udp)
		}
		found := listening.FindAllStringSubmatch(string(out), -1)
		if len(found) == 0 {
			t.Errorf("%s: nothing listens:\n%s", name, out)
		}
		for _, s := range found {
			port, _ := strconv.ParseUint(s[2], 16, 16)
			if !strings.Contains(strings.Join(loopbacks, " "), s[1]) {
				t.Errorf("%s listens on %s, port %d", name, s[1], port)
			}
			n.refused(name, 7, fmt.Sprintf("10.0.0.%d:%d", host, port))
		}
	}
}

// refused checks that a host is refused at an address.
func (n *testNet) refused(what string, host int, addr string) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
	defer cancel()
	c, err := n.dialer(host)(ctx, "tcp", addr)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		n.t.Errorf("%s: another machine that dials %s gets: %v", what, addr, err)
	}
}
