package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// prefill is a prefill worker with its bootstrap registry.
type prefill struct {
	*process
	net    *network
	plan   *Plan
	tp, dp int
	ranks  []*prefillRank // by DP rank
	next   int            // the DP rank of the next room, where it does not follow from its number
	table  *bootstrap.Table
	mood   mood // of its registry, by faults
	other  bool // runs another model
}

// prefillRank is one DP rank of a prefill: a loop of its own.
type prefillRank struct {
	worker
	of       *prefill
	dp       int
	core     *sched.Prefill
	end      *transfer.PrefillEnd
	lastLink uint64
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
	forgets       // takes no room's DP rank
	misranks      // tells of half of the rooms another DP rank, of the others one that no worker has
	moods    = iota
)

func newPrefill(n *network, plan *Plan, i int) *prefill {
	p := &prefill{process: newProcess(n.world, fmt.Sprintf("p%d", i)), net: n, plan: plan, tp: plan.Prefills[i], dp: plan.dp(i)}
	p.boot()
	return p
}

// boot makes the insides of a new life.
func (p *prefill) boot() {
	p.table = bootstrap.NewTable(bootstrap.TableConfig{})
	p.ranks = nil
	for dp := range p.dp {
		r := &prefillRank{of: p, dp: dp, worker: worker{process: p.process, net: p.net, plan: p.plan, tp: p.tp}}
		r.worker.turn = r.turn
		r.boot()
		p.ranks = append(p.ranks, r)
		for tp := range p.tp {
			p.in(p.plan.Boot*time.Duration(dp*p.tp+tp+1)/time.Duration(p.dp*p.tp), func() { p.register(bootstrap.Rank{DP: dp, TP: tp}) })
		}
	}
}

func (p *prefillRank) boot() {
	p.life0(p.rng.Uint64())
	c := p.plan
	p.core = sched.NewPrefill(sched.PrefillConfig{MaxRunning: c.MaxRunning, MaxQueued: c.MaxQueued, Chunk: c.Chunk, Context: simContext,
		BootstrapTimeout: c.BootstrapTimeout, PrefixCache: c.PrefixCache}, p.pool)
	var memory []transfer.Memory
	for r := range p.tp {
		memory = append(memory, p.engine.Memory(r))
	}
	p.end = transfer.NewPrefillEnd(p.engine.Geometry(), memory, maxRooms)
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
func (p *prefill) register(rank bootstrap.Rank) {
	port := 1000*p.life + 10*rank.DP + rank.TP
	refusal := p.table.Register(bootstrap.Registration{
		Info: bootstrap.Info{TP: p.tp, CP: 1, DP: p.dp, PP: 1, PageSize: p.plan.PageSize, KVDType: "f16", FollowRoom: p.plan.FollowRoom,
			Instance: p.ranks[0].instance, Fingerprint: p.fingerprint()},
		Rank: rank, IP: p.name, Port: port,
	})
	if refusal != nil {
		p.broken("registry", "%s: %v", p.name, refusal)
	}
	p.net.names[fmt.Sprintf("%s:%d", p.name, port)] = p.process
}

// listens is who listens on a KV address, if that is one of this life.
func (p *prefill) listens(target string) (rank *prefillRank, tp int) {
	port, _ := strconv.Atoi(target[strings.IndexByte(target, ':')+1:])
	dp, tp := port%1000/10, port%10
	if port/1000 != p.life || dp >= p.dp || tp >= p.tp {
		return nil, 0
	}
	return p.ranks[dp], tp
}

// place gives a job to a DP rank: the one it names, the one that follows from
// its room, or any, and the registry hears a little later which.
func (p *prefill) place(j *job) *worker {
	if !j.seeded {
		j.sampling.Seed = p.rng.Uint64() // as a prefill does
	}
	room, dp := j.leg.room, j.leg.ask.q.Named-1
	switch {
	case dp >= p.dp:
		return nil
	case dp >= 0:
	case p.plan.FollowRoom || p.dp == 1:
		dp = int(room % int64(p.dp))
	default:
		dp = p.next % p.dp
		p.next++
		p.in(p.between(0, placing), func() {
			if p.mood != forgets {
				p.table.SetRank(p.clock(), room, dp)
			}
		})
	}
	return &p.ranks[dp].worker
}

// placing is how long a room's DP rank may take to the registry.
const placing = 50 * time.Millisecond

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
				if p.mood == misranks {
					ranks[room] += 1 + int(room%2)*p.dp
				}
			}
		}
		return sched.PeerDone{Ranks: ranks}
	}
	return sched.PeerDone{Instance: info.Instance}
}

// turn is one pass of the loop.
func (p *prefillRank) turn() {
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

func (p *prefillRank) step(ev sched.Event) {
	p.judge.PrefillEvent(ev)
	p.core.Step(p.clock(), ev)
}

// granting is transfer.Granted on its way to the loop.
type granting struct{ ev *transfer.Granted }

func (p *prefillRank) take(m any) {
	switch m := m.(type) {
	case *job:
		p.open[m.id] = m
		p.judge.Submitted(m.id)
		p.step(&sched.SubmitPrefill{Req: m.id, Prompt: m.prompt, Room: m.leg.room, Digest: sched.Digest(m.prompt), MaxHit: len(m.prompt) - 1, Deadline: m.deadline})
	case abortAll:
		p.drained(p.step)
	case granting:
		p.granted(m.ev)
	case sched.Event:
		p.step(m)
	}
}

func (p *prefillRank) granted(g *transfer.Granted) {
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

func (p *prefillRank) handOut() {
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

func (p *prefillRank) startBatch(b *sched.Batch) {
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
func (p *prefillRank) settle() {
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
func (p *prefillRank) accept(s *socket, rank int) {
	s.take = func(m any) {
		h, ok := m.(*helloMsg)
		if !ok {
			return
		}
		w := &welcomeMsg{welcome: transfer.Welcome{Instance: p.instance, Fingerprint: p.of.fingerprint(), TP: p.tp, DP: p.of.dp, DPRank: p.dp,
			PageSize: p.plan.PageSize, KVDType: "f16"}, rank: rank}
		if h.wanted.TP != rank || h.wanted.DP != p.dp {
			w.refused = fmt.Sprintf("refused: this is dp %d tp %d, wanted is dp %d tp %d", p.dp, rank, h.wanted.DP, h.wanted.TP)
		}
		s.send(w, 300)
		if w.refused != "" || h.instance != "" && h.instance != p.instance || p.of.fingerprint() != h.hello.Fingerprint {
			s.close("the handshake failed")
			return
		}
		p.join(s, h, rank)
	}
}

func (p *prefillRank) join(s *socket, h *helloMsg, rank int) {
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
