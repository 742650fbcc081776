package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// Transfer says what of KV transfer is measured.
type Transfer struct {
	Extent int64 // bytes of one page in one layer
	Size   int64 // bytes of one prompt's KV
	Rounds int
	// Receiver is the process that runs a TransferReceiver like this one.
	Receiver func(context.Context, *TransferReceiver) *exec.Cmd
	Progress io.Writer
}

// TransferReport is what Transfer.Run found; rates are GB/s. Ratio is that of
// the link to the bare socket, of each round.
type TransferReport struct {
	Extent, Size int64
	Rounds       int
	Pinned       bool // each side has a core of its own; else the system chooses
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

// newArena is for so many bytes of KV, in extents of that size.
func newArena(extent, size int64) (*arena, kv.Geometry) {
	pages := int(size / extent / layers)
	return &arena{make([]byte, int64(pages)*layers*extent), pages, int(extent)},
		kv.Geometry{Layers: layers, Heads: 1, TokenBytes: int(extent) / pageSize, PageSize: pageSize}
}

func (a *arena) Extent(layer int, page kv.Page, _, _ int) []byte {
	at := (layer*a.pages + int(page)) * a.size
	return a.data[at : at+a.size : at+a.size]
}

// Run measures link, bare socket and memory in turn. The sending side is this
// process; the receiving side is another one: each has a core of its own.
func (b *Transfer) Run(ctx context.Context) (*TransferReport, error) {
	if b.Rounds < 1 || b.Extent < pageSize || b.Extent%pageSize != 0 || b.Extent > transfer.MaxFrame/2 || b.Size < b.Extent*layers || b.Size > 1<<32 {
		return nil, &UnfitError{fmt.Errorf("extents of %d bytes, %d in all, %d rounds: extents in multiples of %d up to %d, at least %d and at most %d in all, and one round would be right",
			b.Extent, b.Size, b.Rounds, pageSize, transfer.MaxFrame/2, b.Extent*layers, int64(1)<<32)}
	}
	mine, core, pinned := twoCores()
	if pinned {
		pin(mine)
	} else {
		core = -1
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	p, err := b.open(ctx, &wg, core)
	if err != nil {
		return nil, err
	}
	defer p.close()
	r := &TransferReport{Extent: b.Extent, Size: int64(len(p.arena.data)), Rounds: b.Rounds, Pinned: pinned}
	if err := b.sockets(p, r); err != nil {
		return nil, err
	}
	b.memory(p, r)
	return r, nil
}

// sockets measures link and bare socket.
func (b *Transfer) sockets(p *prefillEnd, r *TransferReport) error {
	do := []func() error{p.transfer, func() error { return p.plain(wordBare) }, func() error { return p.plain(wordPages) }}
	rates, ratio := make([][]float64, len(do)), []float64{}
	for round := range b.Rounds + 1 {
		x := make([]float64, len(do))
		for k := range do {
			i := (k + round) % len(do) // each goes first in turn: what runs before it may do it harm
			var err error
			if x[i], err = p.measure(do[i]); err != nil {
				return err
			}
		}
		if round == 0 {
			continue // every page is touched now
		}
		for i := range x {
			rates[i] = append(rates[i], x[i])
		}
		ratio = append(ratio, x[0]/x[1])
		fmt.Fprintf(b.Progress, "round %d of %d: link %.2f, bare socket %.2f GB/s\n", round, b.Rounds, x[0], x[1])
	}
	r.Link, r.Bare, r.Pages, r.Ratio = rate(rates[0]), rate(rates[1]), rate(rates[2]), rate(ratio)
	return nil
}

// memory measures copies, when the sockets are done: on a busy machine a
// process that has just computed for long gets less of its core.
func (b *Transfer) memory(p *prefillEnd, r *TransferReport) {
	from, to, buf := p.arena.data, make([]byte, len(p.arena.data)), make([]byte, transfer.MaxFrame)
	copy(to, from)
	var all, one []float64
	for range b.Rounds {
		z, _ := p.measure(func() error { copy(to, from); return nil })
		w, _ := p.measure(func() error {
			for at := 0; at < len(from); at += len(buf) {
				copy(buf, from[at:])
			}
			return nil
		})
		all, one = append(all, z), append(one, w)
	}
	r.Copy, r.ToOne = rate(all), rate(one)
}

// prefillEnd is a prefill's sender, and beside it a plain connection. What the
// other process shall take is told to its stdin in a line; one on its stdout
// says that it has.
type prefillEnd struct {
	arena  *arena
	sender *transfer.Sender
	tokens int
	room   int64
	bare   net.Conn
	child  *exec.Cmd
	say    io.WriteCloser
	heard  *bufio.Reader
}

// open starts the other process and meets it. Goroutines end with ctx.
func (b *Transfer) open(ctx context.Context, wg *sync.WaitGroup, core int) (*prefillEnd, error) {
	a, geo := newArena(b.Extent, b.Size)
	for i := range a.data {
		a.data[i] = byte(i * 7)
	}
	p := &prefillEnd{arena: a, tokens: a.pages * pageSize}
	var kvs, plain net.Listener
	err := p.serve(geo)
	for _, ln := range []*net.Listener{&kvs, &plain} {
		if err == nil {
			*ln, err = net.Listen("tcp", "127.0.0.1:0")
		}
	}
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	wg.Go(func() { p.sender.Serve(ctx, kvs, 0) })
	p.child = b.Receiver(ctx, &TransferReceiver{Extent: b.Extent, Size: b.Size, KV: kvs.Addr().String(), Plain: plain.Addr().String(), Core: core})
	p.child.Stderr = os.Stderr
	if p.say, err = p.child.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.heard = bufio.NewReader(out)
	if err := p.child.Start(); err != nil {
		return nil, err
	}
	plain.(*net.TCPListener).SetDeadline(time.Now().Add(mostWait))
	if p.bare, err = plain.Accept(); err == nil {
		err = p.answer()
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("the receiving process: %w", err)
	}
	return p, nil
}

func (p *prefillEnd) serve(geo kv.Geometry) (err error) {
	began := time.Now()
	p.sender, err = transfer.NewSender(transfer.SenderConfig{Geometry: geo, Memory: []transfer.Memory{p.arena},
		Now:     func() time.Duration { return time.Since(began) },
		Welcome: transfer.Welcome{Instance: "bench prefill", DP: 1},
		Events: func(e transfer.SenderEvent) {
			if e, ok := e.(*transfer.Granted); ok {
				p.sender.Bind(uint64(e.Room), e.Key)
			}
		}})
	return err
}

// close ends the other process: it has nothing to put in order.
func (p *prefillEnd) close() {
	if p.bare != nil {
		p.bare.Close()
	}
	p.child.Process.Kill()
	p.child.Wait()
}

// answer waits for the other process.
func (p *prefillEnd) answer() error {
	timer := time.AfterFunc(mostWait, func() { p.child.Process.Kill() })
	defer timer.Stop()
	line, err := p.heard.ReadString('\n')
	switch line = strings.TrimSpace(line); {
	case err != nil:
		return fmt.Errorf("it ended, or nothing arrived for %v", mostWait)
	case line != wordDone:
		return errors.New(line)
	}
	return nil
}

// transfer moves one prompt.
func (p *prefillEnd) transfer() error {
	p.room++
	p.sender.Open(uint64(p.room), transfer.SendSpec{Room: p.room, Tokens: p.tokens, Pages: pages(0, p.arena.pages)})
	for i := range layers {
		p.sender.LayerDone(uint64(p.room), i, p.tokens)
	}
	p.sender.First(uint64(p.room), transfer.First{PromptTokens: p.tokens})
	if _, err := fmt.Fprintln(p.say, wordLink); err != nil {
		return err
	}
	return p.answer()
}

// plain writes the same bytes, as many at a time as a frame may have.
func (p *prefillEnd) plain(word string) error {
	if _, err := fmt.Fprintln(p.say, word); err != nil {
		return err
	}
	p.bare.SetDeadline(time.Now().Add(mostWait))
	for rest := p.arena.data; len(rest) > 0; {
		n, err := p.bare.Write(rest[:min(len(rest), transfer.MaxFrame)])
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	return p.answer()
}

func (p *prefillEnd) measure(do func() error) (float64, error) {
	began := time.Now()
	err := do()
	return float64(len(p.arena.data)) / 1e9 / time.Since(began).Seconds(), err
}

// JSON is one object; rates are medians in GB/s.
func (r *TransferReport) JSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Extent int64   `json:"extent_bytes"`
		Size   int64   `json:"bytes"`
		Rounds int     `json:"rounds"`
		Pinned bool    `json:"one_core_each_side"`
		Link   float64 `json:"link_gb_per_s"`
		Bare   float64 `json:"bare_socket_gb_per_s"`
		Pages  float64 `json:"bare_socket_into_pages_gb_per_s"`
		Copy   float64 `json:"copy_gb_per_s"`
		ToOne  float64 `json:"copy_to_one_buffer_gb_per_s"`
		Ratio  float64 `json:"ratio"`
	}{r.Extent, r.Size, r.Rounds, r.Pinned, tidy(r.Link.Median), tidy(r.Bare.Median), tidy(r.Pages.Median), tidy(r.Copy.Median), tidy(r.ToOne.Median), tidy(r.Ratio.Median)})
}

// Text is a table for people.
func (r *TransferReport) Text(w io.Writer) error {
	cores := "a process each side"
	if r.Pinned {
		cores = "one core each side"
	}
	fmt.Fprintf(w, "%.1f MB of KV in extents of %d bytes over loopback, %s; medians of %d rounds\n\n", float64(r.Size)/1e6, r.Extent, cores, r.Rounds)
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
