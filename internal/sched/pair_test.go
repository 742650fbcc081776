package sched_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/sched/schedtest"
)

// pair is decode and prefill cores with a perfect network between them. Nothing
// in it ever times out, so whatever waits for ever shows.
type pair struct {
	*rand.Rand
	d, p []*schedtest.Env
	home map[sched.GrantKey]int   // prefill of a grant
	room map[sched.GrantKey]int64 // …and its room
	next sched.ReqID
}

// turn lets everybody act, in an order drawn at random, and carries what they
// have to say.
func (w *pair) turn() error {
	for _, i := range w.Perm(len(w.d)) {
		if err := w.decode(i); err != nil {
			return err
		}
	}
	for _, i := range w.Perm(len(w.p)) {
		if err := w.prefill(i); err != nil {
			return err
		}
	}
	return nil
}

func (w *pair) decode(i int) error {
	e := w.d[i]
	if e.DBatch != nil && w.IntN(2) == 0 {
		e.ToD(schedtest.Done(e.DBatch))
	}
	e.Granted = func(g sched.Grant) {
		key := sched.GrantKey{Peer: uint64(i), Grant: g.Grant}
		home := int(g.Room) % len(w.p)
		p := w.p[home]
		w.home[key], w.room[key] = home, g.Room
		if g.Recompute != nil {
			w.next++
			p.ToP(&sched.SubmitPrefill{Req: w.next, Prompt: g.Recompute, Room: g.Room, Index: g.Index,
				MaxHit: len(g.Recompute), Deadline: sched.Never, Grant: key})
		}
		p.ToP(&sched.RoomGranted{Key: key, Room: g.Room, Digest: g.Digest, Prefix: g.Prefix, Tokens: g.Tokens})
	}
	e.Revoked = func(g sched.GrantID) {
		key := sched.GrantKey{Peer: uint64(i), Grant: g}
		w.p[w.home[key]].ToP(&sched.RoomClosed{Key: key, Room: w.room[key]})
		e.ToD(&sched.TransferQuiesced{Grant: g})
	}
	return e.Turn()
}

func (w *pair) prefill(i int) error {
	e := w.p[i]
	if e.PBatch != nil && w.IntN(2) == 0 {
		e.ToP(schedtest.Done(e.PBatch))
	}
	if err := e.Turn(); err != nil {
		return err
	}
	for _, req := range e.Oracle.Sends(true, false) {
		if key, token, ok := e.Oracle.Delivered(req); ok && w.IntN(2) == 0 {
			w.d[key.Peer].ToD(&sched.PagesLanded{Grant: key.Grant, First: token})
			e.ToP(&sched.Received{Req: req})
		}
	}
	for _, req := range append(e.Oracle.Sends(true, true), e.Oracle.Sends(false, true)...) {
		e.ToP(&sched.SendQuiesced{Req: req})
	}
	return e.Turn()
}

// TestPairsNeverWaitForEachOther fills small pools on both sides with more
// requests than they hold, over and over. Every answer must come to its end,
// with every token in its place, although no timeout ever breaks a deadlock.
func TestPairsNeverWaitForEachOther(t *testing.T) {
	for seed := range uint64(*walkCount) {
		w := &pair{Rand: rand.New(rand.NewPCG(seed, 1)), home: map[sched.GrantKey]int{},
			room: map[sched.GrantKey]int64{}}
		if err := w.play(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func (w *pair) play() error {
	const ever = 1000 * time.Hour
	size, cache := 1+w.IntN(3), w.IntN(2) == 0
	pages := 4 + w.IntN(8)
	for range 1 + w.IntN(2) {
		w.d = append(w.d, schedtest.NewDecode(sched.DecodeConfig{MaxRunning: 1 + w.IntN(4), ReservedTokens: 1 + w.IntN(4),
			KVTimeout: ever, PrefixCache: cache, Peers: sched.PeersConfig{ResolveTimeout: ever}}, kv.NewPool(pages, size, 1)))
	}
	for range 1 + w.IntN(2) {
		w.p = append(w.p, schedtest.NewPrefill(sched.PrefillConfig{MaxRunning: 1 + w.IntN(3), Chunk: size + w.IntN(8),
			BootstrapTimeout: ever, PrefixCache: cache}, kv.NewPool(pages, size, 2)))
	}
	w.next = 1 << 20 // ids of recomputes
	n := 10 + w.IntN(20)
	var wanted []int
	for r := range n {
		room := int64(r + 1)
		max := 1 + w.IntN(min(6, pages*size-1))
		prompt := make([]int32, 1+w.IntN(pages*size-max))
		for i := range prompt {
			prompt[i] = int32(i + 1000*w.IntN(2)*(i/size/2))
		}
		wanted = append(wanted, max)
		p := w.p[int(room)%len(w.p)]
		w.d[r%len(w.d)].Submit(sched.Submit{Req: sched.ReqID(room), Prompt: prompt, MaxTokens: max,
			Addr: fmt.Sprintf("p:%d", int(room)%len(w.p)), Room: room, DPRank: -1, Deadline: sched.Never})
		p.ToP(&sched.SubmitPrefill{Req: sched.ReqID(room), Prompt: prompt, Room: room, MaxHit: len(prompt), Deadline: sched.Never})
		if w.IntN(3) == 0 {
			if err := w.turn(); err != nil {
				return err
			}
		}
	}
	for turns := 0; w.open() > 0; turns++ {
		if turns == 4000 {
			return fmt.Errorf("%d requests wait for ever\n%s", w.open(), w.describe())
		}
		if err := w.turn(); err != nil {
			return err
		}
	}
	for r, max := range wanted {
		if got := w.d[r%len(w.d)].Oracle.Tokens(sched.ReqID(r + 1)); got != max && !w.d[r%len(w.d)].Oracle.Squeezed(sched.ReqID(r+1)) {
			return fmt.Errorf("request %d got %d tokens of %d", r+1, got, max)
		}
	}
	return nil
}

func (w *pair) open() (n int) {
	for _, e := range append(w.d, w.p...) {
		n += e.Oracle.Open()
	}
	return n
}

func (w *pair) describe() (s string) {
	for i, e := range w.d {
		s += fmt.Sprintf("decode %d\n%s", i, e.D.Describe())
	}
	for i, e := range w.p {
		s += fmt.Sprintf("prefill %d\n%s", i, e.P.Describe())
	}
	return s
}
