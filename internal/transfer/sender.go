package transfer

import (
	"context"
	"net"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// SenderConfig is what a Sender needs to know. Zero takes the default in
// brackets.
type SenderConfig struct {
	Geometry     kv.Geometry
	Memory       []Memory // one for each local TP rank; Welcome.TP is their number
	Welcome      Welcome
	Tokens       func(token string) bool // constant-time check; nil: every token is good
	MaxParked    int                     // rooms a link may park [4096]
	MaxStrangers int                     // connections that have not said HELLO yet [256]
	BusyInterval time.Duration           // [1s]
	Silence      time.Duration           // a link that says nothing for so long is closed [10s]
	WriteTimeout time.Duration           // of one frame [10s]
	HelloTimeout time.Duration           // from accept to HELLO [5s]
	Events       func(SenderEvent)       // must not block; called in order, by no lock's holder
	Metrics      Metrics
	// Now is the time since process start.
	Now func() time.Duration
}

// Sender is P's end of all its links. One for each prefill core (DP rank).
type Sender struct{}

// NewSender checks the configuration.
func NewSender(cfg SenderConfig) (*Sender, error) { panic("being built") }

// Serve accepts links for one TP rank until ctx ends, then closes the
// listener and its links and waits for their goroutines.
func (s *Sender) Serve(ctx context.Context, ln net.Listener, rank int) error { panic("being built") }

// Open tells where a request's pages are. Again with the same req, before
// Bind: the request restarted with other pages. Like all the following, it never blocks.
func (s *Sender) Open(req uint64, o SendSpec) { panic("being built") }

// LayerDone says that the rows [0, tokens) of one layer are final.
func (s *Sender) LayerDone(req uint64, layer, tokens int) { panic("being built") }

// Bind joins an open send to a grant: final pages go out from now on.
func (s *Sender) Bind(req uint64, key GrantKey) { panic("being built") }

// First gives the first token; with it the request is computed.
func (s *Sender) First(req uint64, f First) { panic("being built") }

// CloseSend ends a send. cause nil: D asked for it. SendQuiesced follows.
func (s *Sender) CloseSend(req uint64, cause *Cause) { panic("being built") }

// Refuse answers a parked room that no request will serve.
func (s *Sender) Refuse(key GrantKey, cause *Cause) { panic("being built") }
