package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"
)

// cut makes buffers of all lengths, empty ones among them, out of b.
func cut(rnd *rand.Rand, b []byte) (parts [][]byte) {
	for len(b) > 0 {
		n := min(len(b), []int{0, 1, 63, 504, 1008, 4096, 70_000}[rnd.IntN(7)])
		parts = append(parts, b[:n:n])
		b = b[n:]
	}
	return parts
}

// TestFold: whatever the length, the place in memory and the sum before, update
// gives what hash/crc32 gives.
func TestFold(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 1))
	b := make([]byte, 70_000)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	check := func(from, n int, sum uint32) {
		t.Helper()
		if got, want := update(sum, b[from:from+n]), crc32.Update(sum, castagnoli, b[from:from+n]); got != want {
			t.Fatalf("%d bytes from %d after %08x: %08x, want %08x", n, from, sum, got, want)
		}
	}
	for n := range 2100 {
		check(n%67, n, 0)
	}
	for range 2000 {
		from := rnd.IntN(len(b))
		check(from, rnd.IntN(len(b)-from), rnd.Uint32())
	}
	if !folds {
		t.Skip("this processor has no such way")
	}
	for bit := range 8 * 1024 { // each bit counts, where it stands
		var one [1024]byte
		one[bit/8] = 1 << (bit % 8)
		if got, want := ^fold(^uint32(0), &one[0], len(one)), crc32.Checksum(one[:], castagnoli); got != want {
			t.Fatalf("bit %d: %08x, want %08x", bit, got, want)
		}
	}
}

func BenchmarkSum(b *testing.B) {
	for _, n := range []int{1 << 10, 4 << 10, 64 << 10} {
		data := make([]byte, n)
		b.Run(fmt.Sprintf("%d/ours", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				update(0, data)
			}
		})
		b.Run(fmt.Sprintf("%d/hash_crc32", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				crc32.Update(0, castagnoli, data)
			}
		})
	}
}

// TestSpans: however bytes are cut, their checksum is that of the whole, and
// what is looked at ahead is exactly as long as what is summed, or ends with
// the buffers.
func TestSpans(t *testing.T) {
	const seed = 7
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 200 {
		b := make([]byte, 1+rnd.IntN(200_000))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		s := spans{bufs: cut(rnd, b)}
		n, lead, seen := rnd.IntN(len(b)+1), rnd.IntN(5000), 0
		ahead := s
		ahead.pass(lead, skipped)
		got := s.sum(0, n, &ahead, func(_ *byte, n int) { seen += n })
		if want := crc32.Checksum(b[:n], castagnoli); got != want {
			t.Fatalf("sum of %d of %d bytes: %08x, want %08x", n, len(b), got, want)
		}
		if want := min(n, max(0, len(b)-lead)); seen != want {
			t.Fatalf("%d bytes were looked at, want %d", seen, want)
		}
		if got = s.sum(got, len(b), &ahead, fetch); got != crc32.Checksum(b, castagnoli) || s.take(1) != nil {
			t.Fatal("the rest is not the rest")
		}
	}
}

// TestVector: bytes that come over a real socket in pieces of any size land in
// their buffers in order, and nowhere else; deadlines and ends are errors as
// with an ordinary read.
func TestVector(t *testing.T) {
	t.Run("many at once", func(t *testing.T) { overSocket(t, true) })
	t.Run("one by one", func(t *testing.T) { overSocket(t, false) })
}

func overSocket(t *testing.T, many bool) {
	const seed = 8
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	from, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	w := newWire(to, false, 10*time.Second, time.Second)
	if !many {
		w.many = nil
	}
	want := make([]byte, 3<<20)
	for i := range want {
		want[i] = byte(rnd.Uint32())
	}
	pieces := cut(rnd, want)
	go func() {
		for _, p := range pieces {
			from.Write(p)
		}
	}()
	got := make([]byte, len(want))
	for at, n := 0, 0; at < len(got); at += n {
		n = min(1+rnd.IntN(MaxFrame), len(got)-at)
		w.into = cut(rnd, got[at:at+n])
		if err := w.armRead(w.silence); err != nil {
			t.Fatal(err)
		}
		sum, err := w.spread()
		if err != nil || sum != crc32.Checksum(want[at:at+n], castagnoli) {
			t.Fatalf("bytes %d to %d: sum %08x, %v", at, at+n, sum, err)
		}
	}
	if !bytes.Equal(got, want) {
		t.Fatal("other bytes arrived than were sent")
	}
	if w.many == nil {
		return // nothing more to see, here or on this system
	}
	some := spans{bufs: [][]byte{make([]byte, 8)}}
	to.SetReadDeadline(time.Unix(1, 0))
	if n, err := w.many.read(&some, warm); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("past the deadline: %d, %v", n, err)
	}
	to.SetReadDeadline(time.Time{})
	from.Close()
	if n, err := w.many.read(&some, warm); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
	to.Close()
	if n, err := w.many.read(&some, warm); n != 0 || !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %d, %v", n, err)
	}
}
