package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// prefill is a prefill worker with its bootstrap registry.
type prefill struct {
	worker
	core     *sched.Prefill
	end      *transfer.PrefillEnd
	table    *bootstrap.Table
	lastLink uint64
	boots    time.Duration // how long a new life takes to register
	mood     mood          // of its registry, by faults
	other    bool          // runs another model
}

// mood is how a registry answers.
type mood uint8

const (
	honest   mood = iota
	hangs         // takes the question and never answers
	fails         // 500
	trickles      // the answer takes 4 s
	unready       // 503: not all ranks are registered
	lies          // sizes that no worker has
	misplace      // rank addresses where nobody is
)

func newPrefill(n *network, plan *Plan, i int) *prefill {
	p := &prefill{worker: worker{process: newProcess(n.world, fmt.Sprintf("p%d", i)), net: n, plan: plan, tp: plan.Prefills[i]}}
	p.worker.turn = p.turn
	p.boot()
	return p
}

// boot makes the insides of a new life.
func (p *prefill) boot() {
	p.life0(p.rng.Uint64())
	c := p.plan
	p.core = sched.NewPrefill(sched.PrefillConfig{MaxRunning: c.MaxRunning, MaxQueued: c.MaxQueued, Chunk: c.Chunk, Context: simContext,
		BootstrapTimeout: c.BootstrapTimeout, PrefixCache: c.PrefixCache}, p.pool)
	var memory []transfer.Memory
	for r := range p.tp {
		memory = append(memory, p.engine.Memory(r))
	}
	p.end = transfer.NewPrefillEnd(p.engine.Geometry(), memory, maxRooms)
	p.table = bootstrap.NewTable(bootstrap.TableConfig{})
	for r := range p.tp {
		p.in(time.Duration(r+1)*p.boots/time.Duration(p.tp), func() { p.register(r) })
	}
}

// maxRooms is how many unknown rooms a prefill parks for each link.
const maxRooms = 4096

func (p *prefill) fingerprint() string {
	if p.other {
		return "other"
	}
	return "same"
}

// register is one rank's registration. Its KV port is another one in each life.
func (p *prefill) register(rank int) {
	refusal := p.table.Register(bootstrap.Registration{
		Info: bootstrap.Info{TP: p.tp, CP: 1, DP: 1, PP: 1, PageSize: p.plan.PageSize, KVDType: "f16", FollowRoom: true,
			Instance: p.instance, Fingerprint: p.fingerprint()},
		Rank: bootstrap.Rank{TP: rank}, IP: p.name, Port: 1000*p.life + rank,
	})
	if refusal != nil {
		p.broken("registry", "%s: %v", p.name, refusal)
	}
	p.net.names[fmt.Sprintf("%s:%d", p.name, 1000*p.life+rank)] = p.process
}

// listens says whether a KV address is one of this life.
func (p *prefill) listens(target string) bool {
	return port(target)/1000 == p.life && rankOf(target) < p.tp
}

// rankOf is the rank that listens on a KV address.
func rankOf(target string) int { return port(target) % 1000 }

func port(target string) int {
	n, _ := strconv.Atoi(target[strings.IndexByte(target, ':')+1:])
	return n
}

// registry answers a decode's question.
func (p *prefill) registry(a *sched.PeerAction, reply func(any)) {
	answer := p.answer(a)
	switch p.mood {
	case hangs:
		return
	case trickles:
		p.in(4*time.Second, func() { reply(answer) })
		return
	case fails:
		answer = sched.PeerDone{Fault: sched.PeerFault, Cause: "status 500"}
	}
	reply(answer)
}

func (p *prefill) answer(a *sched.PeerAction) sched.PeerDone {
	info, _, ready := p.table.Info()
	none := sched.PeerDone{Fault: sched.PeerFault, Cause: "status 503: not every rank is registered"}
	switch a.Kind {
	case sched.FetchInfo:
		if !ready || p.mood == unready {
			return none
		}
		if p.mood == lies {
			info.TP = -1
		}
		return sched.PeerDone{Info: parallelInfo(info)}
	case sched.LookupRank:
		r := bootstrap.Rank{DP: a.Rank.DP, CP: a.Rank.CP, TP: a.Rank.TP, PP: a.Rank.PP}
		ip, port, ok := p.table.Address(r)
		if !ok {
			return none
		}
		if p.mood == misplace {
			port += 500
		}
		return sched.PeerDone{Target: fmt.Sprintf("%s:%d", ip, port)}
	case sched.QueryRanks:
		ranks := map[int64]int{}
		for _, room := range a.Rooms {
			if dp, ok := p.table.RankOf(p.clock(), room); ok {
				ranks[room] = dp
			}
		}
		return sched.PeerDone{Ranks: ranks}
	}
	return sched.PeerDone{Instance: info.Instance}
}

// turn is one pass of the loop.
func (p *prefill) turn() {
	for len(p.inbox) > 0 {
		in := p.inbox
		p.inbox = nil
		for _, m := range in {
			p.take(m)
		}
	}
	p.step(&sched.Tick{})
	p.handOut()
	p.settle()
	p.check()
}

func (p *prefill) step(ev sched.Event) {
	p.judge.PrefillEvent(ev)
	p.core.Step(p.clock(), ev)
}

// granting is transfer.Granted on its way to the loop.
type granting struct{ ev *transfer.Granted }

func (p *prefill) take(m any) {
	switch m := m.(type) {
	case *job:
		p.open[m.id] = m
		p.judge.Submitted(m.id)
		p.step(&sched.SubmitPrefill{Req: m.id, Prompt: m.prompt, Room: m.leg.room, Digest: sched.Digest(m.prompt), MaxHit: len(m.prompt) - 1, Deadline: m.deadline})
	case granting:
		p.granted(m.ev)
	case sched.Event:
		p.step(m)
	}
}

func (p *prefill) granted(g *transfer.Granted) {
	key := sched.GrantKey{Peer: g.Key.Peer, Grant: sched.GrantID(g.Key.Grant)}
	if g.Recompute != nil {
		p.lastID++
		j := &job{id: p.lastID, prompt: g.Recompute, sampling: decodeSampling(g.Sampling), seeded: true, deadline: sched.Never}
		p.open[j.id] = j
		p.judge.Submitted(j.id)
		p.step(&sched.SubmitPrefill{Req: j.id, Prompt: j.prompt, Room: g.Room, Index: g.Index, MaxHit: len(j.prompt) - 1,
			Deadline: sched.Never, Grant: key})
	}
	p.step(&sched.RoomGranted{Key: key, Room: g.Room, Digest: g.Digest, Prefix: g.Prefix, Tokens: g.Tokens})
}

func (p *prefill) handOut() {
	r := p.core.Ready()
	p.judge.PrefillActions(r)
	for _, e := range r.Firsts {
		j := p.open[e.Req]
		p.end.First(uint64(e.Req), transfer.First{Token: e.Token, Seed: j.sampling.Seed, Cached: j.cached, PromptTokens: len(j.prompt)})
	}
	for _, o := range r.Opens {
		if j := p.open[o.Req]; j != nil {
			j.cached = o.Cached
		}
		p.end.Open(uint64(o.Req), transfer.SendSpec{Room: o.Room, Tokens: o.Tokens, Cached: o.Cached, Pages: slices.Clone(o.Pages)})
	}
	for _, b := range r.Binds {
		p.say("%s binds request %d to grant %d", p.name, b.Req, b.Key.Grant)
		p.end.Bind(p.clock(), uint64(b.Req), transfer.GrantKey{Peer: b.Key.Peer, Grant: uint64(b.Key.Grant)})
	}
	for _, c := range r.Closes {
		p.end.CloseSend(uint64(c.Req), toCause(c.Cause))
	}
	for _, f := range r.Refuses {
		p.end.Refuse(transfer.GrantKey{Peer: f.Key.Peer, Grant: uint64(f.Key.Grant)}, toCause(f.Cause))
	}
	for _, f := range r.Finishes {
		j := p.open[f.Req]
		delete(p.open, f.Req)
		if j.leg != nil {
			if f.Err == nil && !p.net.delivered[j.leg.room] {
				p.broken("received", "%s: the leg of room %d ends well, and no decode worker has all of it", p.name, j.leg.room)
			}
			j.leg.finish(f)
		}
	}
	if b := r.Batch; b != nil {
		p.startBatch(b)
	}
	p.arm(r.Deadline)
}

func (p *prefill) startBatch(b *sched.Batch) {
	type row struct {
		req    uint64
		tokens int
	}
	rows := make([]row, len(b.Rows)) // the core may end them while the batch runs
	for i := range b.Rows {
		rows[i] = row{uint64(b.Rows[i].Req), b.Rows[i].Start + len(b.Rows[i].Tokens)}
	}
	p.compute(b, func(l int) {
		for _, r := range rows {
			p.end.LayerDone(r.req, l, r.tokens)
		}
		p.settle()
	}, func(tokens []int32) { p.push(&sched.BatchDone{Batch: b.ID, Tokens: tokens}) })
}

// settle passes on what the transfer end has to tell, and lets the writers write.
func (p *prefill) settle() {
	for _, ev := range p.end.Events() {
		switch ev := ev.(type) {
		case *transfer.Granted:
			p.push(granting{ev})
		case *transfer.Closed:
			key := sched.GrantKey{Peer: ev.Key.Peer, Grant: sched.GrantID(ev.Key.Grant)}
			p.push(&sched.RoomClosed{Key: key, Room: ev.Room, Cause: fromCause(ev.Cause)})
		case *transfer.Queued:
			p.push(&sched.RoomQueued{Room: ev.Room})
		case *transfer.Received:
			p.push(&sched.Received{Req: sched.ReqID(ev.Req)})
		case *transfer.SendFailed:
			p.push(&sched.SendFailed{Req: sched.ReqID(ev.Req), Cause: fromCause(ev.Cause)})
		case *transfer.SendQuiesced:
			p.push(&sched.SendQuiesced{Req: sched.ReqID(ev.Req)})
		}
	}
	p.pumpAll()
}

// accept takes a link at one rank's port: the handshake, then its frames.
func (p *prefill) accept(s *socket, rank int) {
	s.take = func(m any) {
		h, ok := m.(*helloMsg)
		if !ok {
			return
		}
		w := &welcomeMsg{welcome: transfer.Welcome{Instance: p.instance, Fingerprint: p.fingerprint(), TP: p.tp, DP: 1,
			PageSize: p.plan.PageSize, KVDType: "f16"}, rank: rank}
		if h.wanted.TP != rank {
			w.refused = fmt.Sprintf("refused: this is tp %d, wanted is tp %d", rank, h.wanted.TP)
		}
		s.send(w, 300)
		if w.refused != "" || h.instance != "" && h.instance != p.instance || p.fingerprint() != h.hello.Fingerprint {
			s.close("the handshake failed")
			return
		}
		p.join(s, h, rank)
	}
}

func (p *prefill) join(s *socket, h *helloMsg, rank int) {
	p.lastLink++
	id := p.lastLink
	if err := p.end.Join(id, rank, h.hello, h.tp, h.rank); err != nil {
		s.close(err.Error())
		return
	}
	l := &link{id: id, s: s, w: &p.worker, next: func() []byte { return p.end.Next(id) }, done: func() {
		if !p.end.Done(id) {
			p.broken("pinned", "%s: pages changed while link %d wrote them", p.name, id)
		}
		p.settle()
	}}
	l.lost = func(cause string) {
		p.say("%s link %d ended: %s", p.name, id, cause)
		p.end.Leave(id, cause)
		p.settle()
	}
	l.run(func() []byte { return p.end.Busy(id) }, func(frame []byte) {
		if err := p.end.Take(id, frame); err != nil {
			l.end(err.Error())
		}
		p.settle()
	})
}

// draws gives a job without a seed one, as a prefill does.
func (p *prefill) draws(j *job) {
	if !j.seeded {
		j.sampling = engine.Sampling{Temperature: j.sampling.Temperature, Seed: p.rng.Uint64()}
	}
}
