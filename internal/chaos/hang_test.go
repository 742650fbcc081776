package chaos

import (
	"net"
	"testing"
	"time"
)

// The bad peers are bad in the way that their names say; a rig that cannot
// break anything proves nothing.
func TestBadPeers(t *testing.T) {
	for _, kind := range BadPeers {
		t.Run(string(kind), func(t *testing.T) {
			h, err := NewHang(kind, "127.0.0.1")
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			c, err := net.DialTimeout("tcp", h.Addr, 300*time.Millisecond)
			if (err != nil) != (kind == NoSYN) {
				t.Fatalf("dial: %v", err)
			}
			if err != nil {
				return
			}
			defer c.Close()
			c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
			c.SetReadDeadline(time.Now().Add(1300 * time.Millisecond))
			buf, n := make([]byte, 4096), 0
			for {
				m, err := c.Read(buf[n:])
				if n += m; err != nil {
					break
				}
			}
			switch {
			case kind == Silent && n != 0, kind == Trickle && n != 1, kind == Half && (n < 50 || n > 250):
				t.Errorf("%d bytes: %q", n, buf[:n])
			}
		})
	}
}
