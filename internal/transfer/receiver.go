package transfer

import (
	"context"
	"net"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// ReceiverConfig is what a Receiver needs to know. Zero takes the default in
// brackets.
type ReceiverConfig struct {
	Geometry     kv.Geometry
	Memory       []Memory // one for each local TP rank
	Hello        Hello
	Token        string        // presented to P
	MaxGrants    int           // grants open at once [4096]
	MaxCredit    int           // bytes of payload in flight on one link [8 MiB]; at least 2 MiB
	PingInterval time.Duration // [1s]
	Silence      time.Duration // a link that says nothing for so long is closed [10s]
	WriteTimeout time.Duration // of one frame [10s]
	Events       func(Event)   // must not block; called in order, by no lock's holder
	Metrics      Metrics
	// Now is the time since process start.
	Now func() time.Duration
	// Dial connects; nil: TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// Metrics are hooks; each may be nil. They are called from link goroutines
// and must not block.
type Metrics struct {
	Bytes    func(n int)           // payload bytes verified (D), or written (P)
	Latency  func(d time.Duration) // D: from Open to Landed. P: from Bind to Received
	Rejected func(cause string)    // a frame was rejected; one of a few fixed words
}

// Receiver is D's end of all its links. One for each decode core.
type Receiver struct{}

// NewReceiver checks the configuration.
func NewReceiver(cfg ReceiverConfig) (*Receiver, error) { panic("being built") }

// Dial makes one try at a link: connect, HELLO, WELCOME, bounded by ctx. On
// success the link lives until CloseLink, Close or a fault.
func (r *Receiver) Dial(ctx context.Context, s LinkSpec) (Welcome, error) { panic("being built") }

// Open opens pages to P: entries on every link first, then the frames. It never blocks.
func (r *Receiver) Open(g GrantSpec) { panic("being built") }

// Revoke takes a grant back. It never blocks; Quiesced follows.
func (r *Receiver) Revoke(grant uint64) { panic("being built") }

// Notice tells P that a room which was never granted has ended. Best effort; never blocks.
func (r *Receiver) Notice(link uint64, room int64) { panic("being built") }

// CloseLink ends a link. It never blocks. Grants still open on it fail.
func (r *Receiver) CloseLink(link uint64, cause string) { panic("being built") }

// Close ends all links and waits for their goroutines.
func (r *Receiver) Close() { panic("being built") }

// IsLocal tells whether a Dial failed by our own fault (no descriptor, no
// port, our own cancellation) and says nothing about the peer.
func IsLocal(err error) bool { panic("being built") }
