package worker

import (
	"fmt"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// prefillSide hands out what a prefill core wants done. It belongs to its loop.
type prefillSide struct {
	loop   *loop
	core   *sched.Prefill
	pass   pass
	sender *transfer.Sender // nil on serve: pages are handed over in the process
}

// granted is transfer.Granted on its way to the loop.
type granted transfer.Granted

// handOut does everything the core asks for and returns its next deadline.
// Nothing here waits: none of the sender's methods does.
func (p *prefillSide) handOut(now time.Duration) time.Duration {
	r := p.core.Ready()
	for i := range r.Firsts {
		p.first(now, &r.Firsts[i])
	}
	for i := range r.Opens {
		o := &r.Opens[i]
		p.opened(o)
		p.sender.Open(uint64(o.Req), transfer.SendSpec{Room: o.Room, Tokens: o.Tokens, Cached: o.Cached, Pages: o.Pages})
	}
	for _, b := range r.Binds {
		p.sender.Bind(uint64(b.Req), transferKey(b.Key))
	}
	for _, c := range r.Closes {
		p.sender.CloseSend(uint64(c.Req), toCause(c.Cause))
	}
	for _, f := range r.Refuses {
		p.sender.Refuse(transferKey(f.Key), toCause(f.Cause))
	}
	for i := range r.HandOvers {
		p.handOver(now, &r.HandOvers[i])
	}
	for i := range r.Finishes {
		p.loop.finish(now, &r.Finishes[i])
	}
	if r.Batch != nil {
		p.pass.load(r.Batch, p.loop.open)
		p.loop.engine.start(&p.pass)
	}
	return r.Deadline
}

func (p *prefillSide) opened(o *sched.OpenSend) {
	if q := p.loop.open[o.Req]; q != nil {
		q.cached = o.Cached
	}
}

// first sends the drawn token on its way to D and shows it to P's own leg.
func (p *prefillSide) first(now time.Duration, e *sched.Emit) {
	q := p.loop.open[e.Req]
	out := p.pass.output(e.Row)
	f := transfer.First{
		Token: e.Token, Seed: q.sampling.Seed, Logprob: out.Logprob,
		Cached: q.cached, PromptTokens: len(q.prompt),
	}
	for _, t := range out.Top {
		f.Top = append(f.Top, transfer.TokenLogprob(t))
	}
	p.loop.put(now, q, out, e.Index)
	p.sender.First(uint64(e.Req), f)
}

// handOver (serve) passes a computed prompt to the decode core.
func (p *prefillSide) handOver(now time.Duration, h *sched.HandOver) {
	q, d := p.loop.open[h.Req], p.loop.decode
	q.first = p.pass.output(h.Row)
	if h.Index == 0 {
		q.cached = h.Cached
	}
	a := &sched.Adopt{Submit: *q.decodeSubmit(), Pages: h.Pages, First: h.First, Index: h.Index}
	a.Prompt = h.Prompt
	d.core.Step(now, a)
}

// granted takes a D's grant. One that asks for a recompute becomes a request
// of its own first; what a peer sent is checked as strictly as a client's.
func (p *prefillSide) granted(now time.Duration, g *granted) {
	key := sched.GrantKey{Peer: g.Key.Peer, Grant: sched.GrantID(g.Key.Grant)}
	if g.Recompute != nil {
		s, err := p.checkRecompute(g)
		if err != nil {
			p.sender.Refuse(g.Key, &transfer.Cause{Code: transfer.CodeInvalid, Message: err.Error()})
			return
		}
		p.recompute(now, g, key, s)
	}
	p.core.Step(now, &sched.RoomGranted{Key: key, Room: g.Room, Digest: g.Digest, Prefix: g.Prefix, Tokens: g.Tokens})
}

func (p *prefillSide) checkRecompute(g *granted) (engine.Sampling, error) {
	n, eng := len(g.Recompute), p.loop.engine.eng
	if n == 0 || n != g.Tokens || n > p.loop.worker.cfg.Context || g.Index < 0 || g.Index >= n {
		return engine.Sampling{}, fmt.Errorf("recompute of %d tokens for a grant of %d, next index %d, context %d",
			n, g.Tokens, g.Index, p.loop.worker.cfg.Context)
	}
	if i := badToken(g.Recompute, eng.Vocab()); i >= 0 {
		return engine.Sampling{}, fmt.Errorf("recompute token %d is %d, the vocabulary has %d", i, g.Recompute[i], eng.Vocab())
	}
	return decodeSampling(g.Sampling, eng.Vocab())
}

func (p *prefillSide) recompute(now time.Duration, g *granted, key sched.GrantKey, s engine.Sampling) {
	q := &request{
		id: p.loop.worker.nextID(), prompt: g.Recompute, room: g.Room, sampling: s,
		began: now, deadline: sched.Never, stopAt: -1, seen: now,
	}
	if s.NeedsHistory() {
		q.history = slices.Clip(q.prompt)
	}
	p.loop.open[q.id] = q
	p.loop.jobs.Add(1) // a drain waits for it: its answer has begun
	p.core.Step(now, &sched.SubmitPrefill{
		Req: q.id, Prompt: q.prompt, Room: q.room, Index: g.Index, MaxHit: q.maxHit(), Deadline: q.deadline, Grant: key,
	})
}

// layerDone runs on the engine's goroutine, which has the pass for now: the
// rows of one layer may go out while the next is computed.
func (p *prefillSide) layerDone(layer int) {
	p.loop.engine.lives()
	if layer == 0 {
		p.pass.layered = p.loop.clock.now()
	}
	if p.sender == nil {
		return // serve: the pages change hands in the process
	}
	for i := range p.pass.rows {
		r := &p.pass.rows[i]
		if p.pass.batch.Rows[i].Err != nil {
			continue // not computed: nothing of it may go out
		}
		p.sender.LayerDone(uint64(r.Req), layer, r.Start+len(r.Tokens))
	}
}

// layered notes when the first layer of a pass that came back was computed.
func (p *prefillSide) layered() {
	for i := range p.pass.rows {
		if q := p.loop.open[p.pass.rows[i].Req]; q != nil && p.pass.layered > 0 {
			q.mark(metric.FirstLayer, p.pass.layered)
		}
	}
	p.pass.layered = 0
}

// pagesSent: the last page of a request has gone out.
type pagesSent struct{ req sched.ReqID }

func (p *prefillSide) pagesSent(now time.Duration, m *pagesSent) {
	if q := p.loop.open[m.req]; q != nil {
		q.mark(metric.LastPage, now)
	}
}

// events turns what the sender tells into messages of the loop. It runs on the
// sender's goroutines.
func (p *prefillSide) events(ev transfer.SenderEvent) {
	in := p.loop.in
	switch ev := ev.(type) {
	case *transfer.Granted:
		in.push((*granted)(ev))
	case *transfer.Closed:
		key := sched.GrantKey{Peer: ev.Key.Peer, Grant: sched.GrantID(ev.Key.Grant)}
		in.push(&sched.RoomClosed{Key: key, Room: ev.Room, Cause: fromCause(ev.Cause)})
	case *transfer.Sent:
		in.push(&pagesSent{sched.ReqID(ev.Req)})
	case *transfer.Queued:
		in.push(&sched.RoomQueued{Room: ev.Room})
	case *transfer.Received:
		in.push(&sched.Received{Req: sched.ReqID(ev.Req)})
	case *transfer.SendFailed:
		in.push(&sched.SendFailed{Req: sched.ReqID(ev.Req), Cause: fromCause(ev.Cause)})
	case *transfer.SendQuiesced:
		in.push(&sched.SendQuiesced{Req: sched.ReqID(ev.Req)})
	}
}

func transferKey(k sched.GrantKey) transfer.GrantKey {
	return transfer.GrantKey{Peer: k.Peer, Grant: uint64(k.Grant)}
}

// badToken is the place of the first token outside the vocabulary, or -1.
func badToken(tokens []int32, vocab int) int {
	return slices.IndexFunc(tokens, func(t int32) bool { return t < 0 || int(t) >= vocab })
}
