package transfer

import (
	"bufio"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// wire is one connection: framing, deadlines, and one way to end it. One
// goroutine reads and one writes; kill, hurry and poke are for all.
type wire struct {
	conn    net.Conn
	br      *bufio.Reader
	toP     bool          // direction of what is read here
	silence time.Duration // longest wait for a head, and again for its payload
	slow    time.Duration // longest time to write a frame

	in   [headSize]byte // the reader's
	body []byte
	into [][]byte // extents of the payload being read
	many *vector  // nil: they are read one by one

	vec [][]byte    // the writer's
	iov net.Buffers // what is left of vec

	wake chan struct{} // holds one: a wake-up never waits

	mu struct {
		sync.Mutex
		dead        error // why it ended, or nil
		read, write due
	}
}

// due is a deadline that is armed.
type due struct {
	at     time.Time
	length time.Duration // of the whole wait
	last   bool          // not to be armed again
}

// secondLook is the end of a wait that is armed apart. A deadline that fires
// says that nothing was read, not that nothing came: after this process stood
// still both are there at once, and the deadline goes first. So the wait ends
// early, and what is left of it finds what lies in the socket.
const secondLook = time.Second

// stalled is how late a deadline must be noticed for us, not the peer, to be
// the one who slept: the whole wait is armed once more.
const stalled = time.Second

// newDue is a wait of d from now, without its second look.
func newDue(d time.Duration) due {
	return due{time.Now().Add(d - min(secondLook, d/2)), d, false}
}

// again is what follows when the deadline has fired.
func (d due) again(now time.Time) due {
	rest := min(secondLook, d.length/2)
	if now.Sub(d.at) > stalled {
		rest = d.length
	}
	return due{now.Add(rest), d.length, true}
}

// readAhead is the size of the reader's buffer: small frames come several at a
// time, and the extents of DATA, being longer as a rule, go past it straight into the pages.
const readAhead = 4 << 10

// warm is how many bytes are read at a time and then summed: a small part of a
// core's own cache, which also takes what is claimed meanwhile.
const warm = 64 << 10

// bodyKept is how much of a body buffer stays with a quiet link.
const bodyKept = 64 << 10

func newWire(conn net.Conn, toP bool, silence, slow time.Duration) *wire {
	return &wire{conn: conn, br: bufio.NewReaderSize(conn, readAhead), toP: toP,
		many: newVector(conn), silence: silence, slow: slow, wake: make(chan struct{}, 1)}
}

// poke wakes the writer.
func (w *wire) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// kill ends the connection: reads and writes fail at once, and the writer
// closes it. Only the first cause counts. It never waits.
func (w *wire) kill(cause error) {
	w.mu.Lock()
	if w.mu.dead == nil {
		w.mu.dead = cause
		w.conn.SetDeadline(time.Unix(1, 0))
	}
	w.mu.Unlock()
	w.poke()
}

func (w *wire) cause() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.dead
}

// hurry gives the frame being read no more than d from now.
func (w *wire) hurry(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if next := newDue(d); w.mu.dead == nil && next.at.Before(w.mu.read.at) {
		w.mu.read = next
		w.conn.SetReadDeadline(next.at)
	}
}

func (w *wire) armRead(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.dead != nil {
		return w.mu.dead
	}
	w.mu.read = newDue(d)
	return w.conn.SetReadDeadline(w.mu.read.at)
}

func (w *wire) armWrite(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.dead != nil {
		return w.mu.dead
	}
	w.mu.write = newDue(d)
	return w.conn.SetWriteDeadline(w.mu.write.at)
}

// fault turns an error of the connection into the link's cause, or into nil
// when it was a deadline and has been armed again.
func (w *wire) fault(err error, d *due, set func(time.Time) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.mu.dead != nil:
		return w.mu.dead
	case errors.Is(err, os.ErrDeadlineExceeded):
		if !d.last {
			*d = d.again(time.Now())
			return set(d.at)
		}
		if d == &w.mu.write {
			return fmt.Errorf("the peer took nothing for %v", d.length)
		}
		return fmt.Errorf("silent for %v", d.length)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the peer closed the connection")
	}
	return err
}

// fill reads exactly len(b) bytes.
func (w *wire) fill(b []byte) error {
	for len(b) > 0 {
		n, err := w.br.Read(b)
		b = b[n:]
		if err != nil && len(b) > 0 {
			if err = w.fault(err, &w.mu.read, w.conn.SetReadDeadline); err != nil {
				return err
			}
		}
	}
	return nil
}

// spread reads exactly so much as fills the buffers in w.into, and gives their
// checksum. What has come is summed while the cache still has it.
func (w *wire) spread() (sum uint32, err error) {
	for rest := (spans{bufs: w.into}); rest.left(); {
		var n int
		if w.many == nil || w.br.Buffered() > 0 {
			n, err = w.br.Read(rest.bufs[0][rest.at:])
		} else {
			n, err = w.many.read(&rest, warm)
		}
		ahead := rest
		ahead.pass(n, skipped)
		sum = rest.sum(sum, n, &ahead, claim)
		if err != nil && rest.left() {
			if err = w.fault(err, &w.mu.read, w.conn.SetReadDeadline); err != nil {
				return sum, err
			}
		}
	}
	return sum, nil
}

// skip reads n bytes to nowhere.
func (w *wire) skip(n int) error {
	for n > 0 {
		m, err := w.br.Discard(n)
		n -= m
		if err != nil && n > 0 {
			if err = w.fault(err, &w.mu.read, w.conn.SetReadDeadline); err != nil {
				return err
			}
		}
	}
	return nil
}

// next reads a frame's head. Its payload must be read next.
func (w *wire) next() (head, error) {
	if err := w.armRead(w.silence); err != nil {
		return head{}, err
	}
	if err := w.fill(w.in[:]); err != nil {
		return head{}, err
	}
	h, err := parseHead(&w.in, w.toP)
	if err != nil {
		return h, err
	}
	return h, w.armRead(w.silence)
}

// control reads the payload of any frame but DATA; it is good until the next
// call. sound tells whether its checksum is right.
func (w *wire) control(h *head) (body []byte, sound bool, err error) {
	if n := int(h.size); cap(w.body) < n || cap(w.body) > bodyKept {
		w.body = make([]byte, n)
	}
	w.body = w.body[:h.size]
	if err := w.fill(w.body); err != nil {
		return nil, false, err
	}
	return w.body, crc32.Checksum(w.body, castagnoli) == h.sum, nil
}

// writeVec writes the buffers in w.vec, in one go where the system can: pages
// leave the arena without a copy.
func (w *wire) writeVec() error {
	if err := w.armWrite(w.slow); err != nil {
		return err
	}
	w.iov = w.vec
	for len(w.iov) > 0 {
		if _, err := w.iov.WriteTo(w.conn); err != nil {
			if err = w.fault(err, &w.mu.write, w.conn.SetWriteDeadline); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *wire) write(b []byte) error {
	w.vec = append(w.vec[:0], b)
	return w.writeVec()
}

// outbox hands events out in the order in which they were put in, by whoever
// comes along, and outside the lock that guards it.
type outbox[E any] struct {
	queue, spare []E
	busy         bool
}

// deliver is called with mu held and releases it.
func (o *outbox[E]) deliver(mu *sync.Mutex, to func(E)) {
	for !o.busy && len(o.queue) > 0 {
		batch := o.queue
		o.queue, o.busy = o.spare[:0], true
		mu.Unlock()
		for _, e := range batch {
			to(e)
		}
		clear(batch)
		mu.Lock()
		o.spare, o.busy = batch, false
	}
	mu.Unlock()
}
