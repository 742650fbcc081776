package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// What the sending process tells the receiving one to take, and its answer.
const (
	wordLink  = "link"
	wordBare  = "bare"
	wordPages = "pages"
	wordDone  = "done"
)

// mostWait bounds the wait of one process for the other.
const mostWait = time.Minute

// TransferReceiver is the receiving side of Transfer, in a process of its own:
// a decode's receiver with one link, and a plain connection into a reader that
// looks at nothing.
type TransferReceiver struct {
	Extent, Size int64
	KV, Plain    string // addresses
	Core         int    // to compute on; -1: the system chooses

	arena    *arena
	receiver *transfer.Receiver
	landed   chan error
	room     int64
	bare     net.Conn
	buf      []byte
}

// Run does what it is told to by in, line by line, until in ends.
func (r *TransferReceiver) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	if r.Core >= 0 {
		pin(r.Core)
	}
	var geo kv.Geometry
	r.arena, geo = newArena(r.Extent, r.Size)
	r.buf = make([]byte, transfer.MaxFrame)
	if err := r.link(ctx, geo); err != nil {
		return err
	}
	defer r.receiver.Close()
	var err error
	if r.bare, err = net.Dial("tcp", r.Plain); err != nil {
		return err
	}
	defer r.bare.Close()
	fmt.Fprintln(out, wordDone)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		if err := r.take(lines.Text()); err != nil {
			fmt.Fprintln(out, err)
			continue
		}
		fmt.Fprintln(out, wordDone)
	}
	return nil
}

func (r *TransferReceiver) link(ctx context.Context, geo kv.Geometry) (err error) {
	began := time.Now()
	r.landed = make(chan error, 1)
	r.receiver, err = transfer.NewReceiver(transfer.ReceiverConfig{Geometry: geo, Memory: []transfer.Memory{r.arena},
		Now:   func() time.Duration { return time.Since(began) },
		Hello: transfer.Hello{Instance: "bench decode"}, Events: r.heard})
	if err != nil {
		return err
	}
	if _, err = r.receiver.Dial(ctx, transfer.LinkSpec{Link: 1, Addr: r.KV}); err != nil {
		r.receiver.Close()
	}
	return err
}

// heard takes the end of the one transfer that is under way. Like each taker of
// events it does not wait: there is room for the end of one.
func (r *TransferReceiver) heard(e transfer.Event) {
	var end error
	switch e := e.(type) {
	case *transfer.Landed:
	case *transfer.Failed:
		end = &e.Cause
	default:
		return
	}
	select {
	case r.landed <- end:
	default:
	}
}

func (r *TransferReceiver) take(word string) error {
	switch word {
	case wordLink:
		r.room++
		r.receiver.Open(transfer.GrantSpec{Grant: uint64(r.room), Room: r.room, Links: []uint64{1}, Tokens: r.arena.pages * pageSize, Pages: pages(0, r.arena.pages)})
		select {
		case err := <-r.landed:
			return err
		case <-time.After(mostWait):
			return errors.New("nothing arrived for a minute")
		}
	case wordBare, wordPages:
		return r.plain(word == wordPages)
	}
	return fmt.Errorf("nobody knows the word %q", word)
}

// plain reads the bytes of one prompt to one buffer, or to where they belong.
func (r *TransferReceiver) plain(keep bool) error {
	r.bare.SetDeadline(time.Now().Add(mostWait))
	for rest := r.arena.data; len(rest) > 0; {
		into := r.buf
		if keep {
			into = rest
		}
		n, err := r.bare.Read(into[:min(len(rest), len(r.buf))])
		if err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}
