package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// Transfer says what of KV transfer is measured.
type Transfer struct {
	Extent   int64 // bytes of one page in one layer
	Size     int64 // bytes of one prompt's KV
	Rounds   int
	Progress io.Writer
}

// TransferReport is what Transfer.Run found; rates are GB/s. Ratio is that of
// the link to the bare socket, of each round.
type TransferReport struct {
	Extent, Size int64
	Rounds       int
	Link, Bare   Rate
	Pages        Rate // the bare socket, read into the pages that the link writes
	Copy, ToOne  Rate // in memory: arena to arena, arena to the buffer of the bare reader
	Ratio        Rate
}

// layers of the made-up model; its pages have one head of 16 tokens.
const layers = 16

// arena is KV memory as an engine keeps it: layer after layer, page after page.
type arena struct {
	data  []byte
	pages int
	size  int // of an extent
}

func (a *arena) Extent(layer int, page kv.Page, _, _ int) []byte {
	at := (layer*a.pages + int(page)) * a.size
	return a.data[at : at+a.size : at+a.size]
}

// loopback is a prefill's sender and a decode's receiver with one link, and
// beside it a plain connection into a reader that looks at nothing.
type loopback struct {
	from, to *arena
	geo      kv.Geometry
	sender   *transfer.Sender
	receiver *transfer.Receiver
	landed   chan error
	tokens   int
	room     int64
	bare     net.Conn
	start    chan bool  // the bare reader reads all once: into the pages, or into buf
	taken    chan error // it has
	buf      []byte
}

// Run measures link, bare socket and memory in turn.
func (b *Transfer) Run(ctx context.Context) (*TransferReport, error) {
	if b.Rounds < 1 || b.Extent < pageSize || b.Extent%pageSize != 0 || b.Extent > transfer.MaxFrame/2 || b.Size < b.Extent*layers || b.Size > 1<<32 {
		return nil, &UnfitError{fmt.Errorf("extents of %d bytes, %d in all, %d rounds: extents in multiples of %d up to %d, at least %d and at most %d in all, and one round would be right",
			b.Extent, b.Size, b.Rounds, pageSize, transfer.MaxFrame/2, b.Extent*layers, int64(1)<<32)}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	l, err := b.open(ctx, &wg)
	if err != nil {
		return nil, err
	}
	defer l.receiver.Close()
	defer l.bare.Close()
	var link, bare, kept, all, one, ratio []float64
	for round := range b.Rounds + 1 {
		x, err := l.measure(l.transfer)
		if err != nil {
			return nil, err
		}
		y, err := l.measure(func() error { return l.plain(false) })
		if err != nil {
			return nil, err
		}
		v, err := l.measure(func() error { return l.plain(true) })
		if err != nil {
			return nil, err
		}
		if round == 0 {
			continue // every page is touched now
		}
		z, _ := l.measure(func() error { copy(l.to.data, l.from.data); return nil })
		w, _ := l.measure(func() error {
			for at := 0; at < len(l.from.data); at += len(l.buf) {
				copy(l.buf, l.from.data[at:])
			}
			return nil
		})
		link, bare, kept, all, one, ratio = append(link, x), append(bare, y), append(kept, v), append(all, z), append(one, w), append(ratio, x/y)
		fmt.Fprintf(b.Progress, "round %d of %d: link %.2f, bare socket %.2f GB/s\n", round, b.Rounds, x, y)
	}
	return &TransferReport{b.Extent, int64(len(l.from.data)), b.Rounds, rate(link), rate(bare), rate(kept), rate(all), rate(one), rate(ratio)}, nil
}

// open makes both ends, whose goroutines end with ctx.
func (b *Transfer) open(ctx context.Context, wg *sync.WaitGroup) (*loopback, error) {
	pages := int(b.Size / b.Extent / layers)
	arenas := [2]*arena{}
	for i := range arenas {
		arenas[i] = &arena{make([]byte, int64(pages)*layers*b.Extent), pages, int(b.Extent)}
	}
	l := &loopback{from: arenas[0], to: arenas[1], tokens: pages * pageSize, landed: make(chan error, 1), start: make(chan bool, 1), taken: make(chan error, 1), buf: make([]byte, transfer.MaxFrame),
		geo: kv.Geometry{Layers: layers, Heads: 1, TokenBytes: int(b.Extent) / pageSize, PageSize: pageSize}}
	for i := range l.from.data {
		l.from.data[i] = byte(i * 7)
	}
	return l, errors.Join(l.link(ctx, wg), l.plainly(ctx, wg))
}

// link joins a sender and a receiver.
func (l *loopback) link(ctx context.Context, wg *sync.WaitGroup) (err error) {
	began := time.Now()
	now := func() time.Duration { return time.Since(began) }
	l.sender, err = transfer.NewSender(transfer.SenderConfig{Geometry: l.geo, Memory: []transfer.Memory{l.from}, Now: now,
		Welcome: transfer.Welcome{Instance: "bench prefill", DP: 1},
		Events: func(e transfer.SenderEvent) {
			if e, ok := e.(*transfer.Granted); ok {
				l.sender.Bind(uint64(e.Room), e.Key)
			}
		}})
	if err != nil {
		return err
	}
	l.receiver, err = transfer.NewReceiver(transfer.ReceiverConfig{Geometry: l.geo, Memory: []transfer.Memory{l.to}, Now: now,
		Hello: transfer.Hello{Instance: "bench decode"}, Events: l.heard})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	wg.Go(func() { l.sender.Serve(ctx, ln, 0) })
	_, err = l.receiver.Dial(ctx, transfer.LinkSpec{Link: 1, Addr: ln.Addr().String()})
	return err
}

// heard takes the end of the one transfer that is under way. Like each taker of
// events it does not wait: there is room for the end of one.
func (l *loopback) heard(e transfer.Event) {
	var end error
	switch e := e.(type) {
	case *transfer.Landed:
	case *transfer.Failed:
		end = &e.Cause
	default:
		return
	}
	select {
	case l.landed <- end:
	default:
	}
}

// transfer moves one prompt.
func (l *loopback) transfer() error {
	l.room++
	pages := pages(0, l.from.pages)
	l.sender.Open(uint64(l.room), transfer.SendSpec{Room: l.room, Tokens: l.tokens, Pages: pages})
	for i := range layers {
		l.sender.LayerDone(uint64(l.room), i, l.tokens)
	}
	l.sender.First(uint64(l.room), transfer.First{PromptTokens: l.tokens})
	l.receiver.Open(transfer.GrantSpec{Grant: uint64(l.room), Room: l.room, Links: []uint64{1}, Tokens: l.tokens, Pages: pages})
	return within(l.landed)
}

// within bounds the wait for one passage.
func within(done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		return errors.New("nothing arrived for a minute")
	}
}

// plainly makes the bare connection. Its reader ends when the connection is closed.
func (l *loopback) plainly(ctx context.Context, wg *sync.WaitGroup) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer ln.Close()
	if l.bare, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		return err
	}
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { c.Close() })
	wg.Go(func() {
		for {
			select {
			case keep := <-l.start:
				l.taken <- l.drain(c, keep)
			case <-ctx.Done():
				return
			}
		}
	})
	return nil
}

// drain reads as many bytes as there are in the pages.
func (l *loopback) drain(c net.Conn, keep bool) error {
	for total := 0; total < len(l.to.data); {
		rest := l.to.data[total:]
		into := l.buf[:min(len(rest), len(l.buf))]
		if keep {
			into = rest[:len(into)]
		}
		n, err := c.Read(into)
		if err != nil {
			return err
		}
		total += n
	}
	return nil
}

// plain writes the same bytes, as many at a time as a frame may have.
func (l *loopback) plain(keep bool) error {
	l.start <- keep
	l.bare.SetDeadline(time.Now().Add(time.Minute))
	for rest := l.from.data; len(rest) > 0; {
		n, err := l.bare.Write(rest[:min(len(rest), transfer.MaxFrame)])
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	return within(l.taken)
}

func (l *loopback) measure(do func() error) (float64, error) {
	began := time.Now()
	err := do()
	return float64(len(l.from.data)) / 1e9 / time.Since(began).Seconds(), err
}

// JSON is one object; rates are medians in GB/s.
func (r *TransferReport) JSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Extent int64   `json:"extent_bytes"`
		Size   int64   `json:"bytes"`
		Rounds int     `json:"rounds"`
		Link   float64 `json:"link_gb_per_s"`
		Bare   float64 `json:"bare_socket_gb_per_s"`
		Pages  float64 `json:"bare_socket_into_pages_gb_per_s"`
		Copy   float64 `json:"copy_gb_per_s"`
		ToOne  float64 `json:"copy_to_one_buffer_gb_per_s"`
		Ratio  float64 `json:"ratio"`
	}{r.Extent, r.Size, r.Rounds, tidy(r.Link.Median), tidy(r.Bare.Median), tidy(r.Pages.Median), tidy(r.Copy.Median), tidy(r.ToOne.Median), tidy(r.Ratio.Median)})
}

// Text is a table for people.
func (r *TransferReport) Text(w io.Writer) error {
	fmt.Fprintf(w, "%.1f MB of KV in extents of %d bytes over loopback, one core each side; medians of %d rounds\n\n", float64(r.Size)/1e6, r.Extent, r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tGB/s\tleast\tmost")
	for _, line := range []struct {
		what string
		rate Rate
	}{
		{"KV transfer: arena to arena, CRC-32C on both sides", r.Link},
		{"the same bytes over a bare socket, into a reader that looks at nothing", r.Bare},
		{"the same, read into the pages", r.Pages},
		{"copied in memory, arena to arena", r.Copy},
		{"copied in memory, arena to one buffer", r.ToOne},
	} {
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\n", line.what, line.rate.Median, line.rate.Low, line.rate.High)
	}
	fmt.Fprintf(t, "transfer ÷ bare socket\t%.2f\t%.2f\t%.2f\n", r.Ratio.Median, r.Ratio.Low, r.Ratio.High)
	return t.Flush()
}
