package worker

import (
	"context"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// decodeSide hands out what a decode core wants done. It belongs to its loop.
type decodeSide struct {
	loop *loop
	core *sched.Decode
	pass pass
	last time.Duration // start of the last decode batch while sequences run, else 0

	// On a decode worker; serve has no peers.
	peers    *peernet
	receiver *transfer.Receiver
	grants   map[sched.GrantID]*request // open ones, to match FIRST to its request
	// dialling holds the links whose dial has not come back to this loop. A
	// link can end before the loop knows that it is up: its end waits here.
	dialling map[sched.LinkID]*sched.LinkEnded
}

// landed is transfer.Landed on its way to the loop.
type landed struct {
	grant sched.GrantID
	first transfer.First
}

// handOut does everything the core asks for and returns its next deadline.
// Nothing here waits: tokens go to boxes, grants to mailboxes in which transfer
// has room for all of them, peer work to the peer network's inbox, the batch
// to the engine's queue.
func (d *decodeSide) handOut(now time.Duration) (deadline time.Duration, preempted bool) {
	r := d.core.Ready()
	for i := range r.Emits {
		d.emit(now, &r.Emits[i])
	}
	for i := range r.Finishes {
		d.loop.finish(now, &r.Finishes[i])
	}
	for i := range r.Grants {
		d.grant(&r.Grants[i])
	}
	for _, g := range r.Revokes {
		delete(d.grants, g)
		d.receiver.Revoke(uint64(g))
	}
	for _, n := range r.Notices {
		d.receiver.Notice(uint64(n.Link), n.Room, n.Waits)
	}
	for i := range r.Preempts {
		d.preempt(now, &r.Preempts[i])
	}
	for i := range r.Peer {
		d.peer(&r.Peer[i])
	}
	if r.Fatal != nil {
		d.loop.worker.broken(r.Fatal)
	}
	d.start(now, r.Batch)
	return r.Deadline, len(r.Preempts) > 0
}

func (d *decodeSide) emit(now time.Duration, e *sched.Emit) {
	q := d.loop.open[e.Req]
	out := q.first
	if e.Row >= 0 {
		out = d.pass.output(e.Row)
	}
	out.Token = e.Token
	d.loop.put(now, q, out, e.Index)
}

// start sends the next batch off and measures the beat: from batch to batch
// while any sequence runs. A core whose sequences run has always one under way.
func (d *decodeSide) start(now time.Duration, b *sched.Batch) {
	switch {
	case b != nil:
		if d.last > 0 {
			d.loop.metrics.Beat.Observe((now - d.last).Seconds())
		}
		d.last = now
		d.pass.load(b, d.loop.open)
		d.loop.engine.start(&d.pass)
	case !d.pass.out:
		d.last = 0
	}
}

func (d *decodeSide) grant(g *sched.Grant) {
	q := d.loop.open[g.Req]
	d.grants[g.Grant] = q
	spec := transfer.GrantSpec{
		Grant: uint64(g.Grant), Room: g.Room, Digest: g.Digest, Prefix: g.Prefix, Tokens: g.Tokens,
		Pages: slices.Clone(g.Pages), Links: make([]uint64, len(g.Links)),
	}
	for i, l := range g.Links {
		spec.Links[i] = uint64(l)
	}
	if g.Recompute != nil {
		d.loop.metrics.Preemptions.Inc()
		q.preempted++
		spec.Recompute, spec.Index = slices.Clone(g.Recompute), q.said()+g.Index
		spec.Sampling = encodeSampling(&q.sampling)
	}
	d.receiver.Open(spec)
}

// landed takes what FIRST carried before the core learns that the pages are
// there. A grant that was revoked meanwhile is unknown here and stale there.
func (d *decodeSide) landed(now time.Duration, m *landed) {
	if q := d.grants[m.grant]; q != nil {
		delete(d.grants, m.grant)
		q.mark(metric.LastPage, now)
		q.first = firstOutput(&m.first)
		if q.emitted == 0 {
			q.cached = m.first.Cached
		}
		if !q.job.SeedSet {
			q.sampling.Seed = m.first.Seed
		}
	}
	d.core.Step(now, &sched.PagesLanded{Grant: m.grant, First: m.first.Token, Cached: m.first.Cached})
}

// pageBegun: the first page of a grant is coming in.
type pageBegun struct{ grant sched.GrantID }

func (d *decodeSide) pageBegun(now time.Duration, m *pageBegun) {
	if q := d.grants[m.grant]; q != nil {
		q.mark(metric.FirstPage, now)
	}
}

// preempt (serve) sends a running request back to the prefill core.
func (d *decodeSide) preempt(now time.Duration, p *sched.Preempt) {
	q := d.loop.open[p.Req]
	d.loop.metrics.Preemptions.Inc()
	q.preempted++
	d.loop.prefill.core.Step(now, &sched.SubmitPrefill{
		Req: p.Req, Prompt: p.Tokens, Room: -1, MaxTokens: q.job.MaxTokens - p.Index, Index: p.Index, MaxHit: len(p.Tokens) - 1, Deadline: q.deadline,
	})
}

func (d *decodeSide) peer(a *sched.PeerAction) {
	if a.Kind == sched.CloseLink {
		d.receiver.CloseLink(uint64(a.Link), a.Text)
		return
	}
	if a.Kind == sched.DialLink {
		d.dialling[a.Link] = nil
	}
	d.peers.do(d.loop, *a)
}

// peerDone brings the completion of a try, and the end of a link that came first.
func (d *decodeSide) peerDone(now time.Duration, m *sched.PeerDone) {
	d.core.Step(now, m)
	if m.Kind != sched.DialLink {
		return
	}
	end := d.dialling[m.Link]
	delete(d.dialling, m.Link)
	if end != nil && m.Fault == sched.OK {
		d.core.Step(now, end)
	}
}

func (d *decodeSide) linkEnded(now time.Duration, m *sched.LinkEnded) {
	if _, ok := d.dialling[m.Link]; ok {
		d.dialling[m.Link] = m
		return
	}
	d.core.Step(now, m)
}

// dial makes one try at a link. It runs on the try's goroutine.
func (l *loop) dial(ctx context.Context, s transfer.LinkSpec) (transfer.Welcome, error) {
	host, _, err := net.SplitHostPort(s.Addr)
	switch allow := l.worker.allow; {
	case err != nil:
		return transfer.Welcome{}, fmt.Errorf("rank address %q is not host:port", s.Addr)
	case allow != nil && !allow(host):
		return transfer.Welcome{}, fmt.Errorf("rank address %s is not in --bootstrap-allow", s.Addr)
	case allow == nil && l.worker.cfg.PeerToken.Value() != "" && !loopback(host):
		return transfer.Welcome{}, fmt.Errorf("our token goes to loopback hosts and those of --bootstrap-allow only: %s is neither", s.Addr)
	}
	return l.decode.receiver.Dial(ctx, s)
}

// events turns what the receiver tells into messages of the loop. It runs on
// the receiver's goroutines.
func (d *decodeSide) events(ev transfer.Event) {
	in := d.loop.in
	switch ev := ev.(type) {
	case *transfer.Landed:
		in.push(&landed{sched.GrantID(ev.Grant), ev.First})
	case *transfer.Failed:
		in.push(&sched.TransferFailed{Grant: sched.GrantID(ev.Grant), Cause: fromCause(&ev.Cause)})
	case *transfer.Quiesced:
		in.push(&sched.TransferQuiesced{Grant: sched.GrantID(ev.Grant)})
	case *transfer.GrantHeard:
		in.push(&sched.GrantHeard{Grant: sched.GrantID(ev.Grant)})
	case *transfer.Begun:
		in.push(&pageBegun{sched.GrantID(ev.Grant)})
	case *transfer.LinkHeard:
		in.push(&sched.LinkHeard{Link: sched.LinkID(ev.Link)})
	case *transfer.LinkEnded:
		in.push(&sched.LinkEnded{Link: sched.LinkID(ev.Link), Cause: ev.Cause})
	}
}
