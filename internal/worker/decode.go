package worker

import (
	"context"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// decodeSide hands out what a decode core wants done. It belongs to its loop.
type decodeSide struct {
	loop   *loop
	core   *sched.Decode
	engine *batcher
	pass   pass
	out    bool // pass is with the engine

	// On a decode worker, nil on serve:
	peers    *peernet
	receiver *transfer.Receiver
	grants   map[sched.GrantID]*request // open grants, to match FIRST to its request

	lastBatch time.Duration // start of the last decode batch while sequences run, else 0
}

// landed is transfer.Landed on its way to the loop.
type landed struct {
	ev    sched.PagesLanded
	first transfer.First
}

// handOut does everything the core asks for and returns its next deadline.
// Nothing here waits: tokens go to boxes, grants to mailboxes that transfer has
// room in, peer work to the peer network's inbox, the batch to the engine.
func (d *decodeSide) handOut(now time.Duration) time.Duration {
	r := d.core.Ready()
	for i := range r.Emits {
		d.emit(&r.Emits[i])
	}
	for i := range r.Finishes {
		d.loop.finish(&r.Finishes[i])
	}
	for i := range r.Grants {
		d.grant(&r.Grants[i])
	}
	for _, g := range r.Revokes {
		d.receiver.Revoke(uint64(g))
		delete(d.grants, g)
	}
	for _, n := range r.Notices {
		d.receiver.Notice(uint64(n.Link), n.Room)
	}
	for i := range r.Preempts {
		d.preempt(now, &r.Preempts[i])
	}
	for i := range r.Peer {
		d.peer(&r.Peer[i])
	}
	if r.Fatal != nil {
		d.loop.fatal(r.Fatal)
	}
	d.beat(now, r.Batch)
	return r.Deadline
}
