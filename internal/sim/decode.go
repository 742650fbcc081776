package sim

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/sched/oracle"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// worker is what both kinds of workers have: a loop that takes its inbox,
// then the time, then does what its core wants, as the real one does.
type worker struct {
	*process
	net      *network
	plan     *Plan
	instance string
	tp       int
	pool     *kv.Pool
	engine   *engine.Sim
	judge    *oracle.Oracle
	open     map[sched.ReqID]*job
	lastID   sched.ReqID
	inbox    []any
	woken    bool          // a turn is on its way
	armed    time.Duration // the earliest timer on its way, in world time
	links    map[uint64]*link
	turn     func() // one turn of this kind of worker
}

// abortAll, in an inbox, ends every open request.
type abortAll struct{}

// drained ends what a drain had no time for.
func (w *worker) drained(step func(sched.Event)) {
	for _, id := range slices.Sorted(maps.Keys(w.open)) {
		step(&sched.Abort{Req: id, Cause: &sched.Error{Code: sched.Draining, Message: "the worker stops"}})
	}
}

// jobs is how many requests are open here.
func (w *worker) jobs() int {
	n := len(w.open)
	for _, m := range w.inbox {
		if _, is := m.(*job); is {
			n++
		}
	}
	return n
}

// job is one leg of a request inside a worker.
type job struct {
	id         sched.ReqID
	leg        *legEnd // nil: a prefill for RECOMPUTE
	prompt     []int32
	sampling   engine.Sampling
	seeded     bool
	cached     int
	deadline   time.Duration
	pending    time.Duration // D: when it was last seen to wait for no peer
	unresolved bool          // D: nothing was known of its peer when it came
	granted    bool          // D: it has been granted once
}

// link is one KV connection, as one of its ends keeps it.
type link struct {
	id      uint64
	s       *socket
	w       *worker
	heard   time.Duration
	next    func() []byte // the end's Next
	done    func()        // what was written has left; or nil
	writing bool
	stuck   time.Duration // since when the writer waits
	lost    func(cause string)
	over    bool
}

func (w *worker) life0(seed uint64) {
	w.open, w.links = map[sched.ReqID]*job{}, map[uint64]*link{}
	w.inbox, w.woken, w.armed, w.lastID = nil, false, sched.Never, 0
	w.instance = fmt.Sprintf("%s.%d", w.name, w.life)
	w.pool = kv.NewPool(w.pages(), w.plan.PageSize, seed)
	w.judge = oracle.New(w.pool)
	var err error
	w.engine, err = engine.NewSim(engine.SimConfig{
		PrefillRate: w.plan.PrefillRate, DecodeBase: w.plan.DecodeBase, DecodePerSeq: 100 * time.Microsecond, KVBytes: 512,
		Config: engine.Config{Pages: w.pages(), PageSize: w.plan.PageSize, KVDType: "f16", TP: w.tp, Context: simContext,
			MaxBatchTokens: max(w.plan.Chunk, w.plan.MaxRunning, w.plan.PageSize)},
	})
	if err != nil {
		panic(err) // the plan is ours
	}
}

const simContext = 4096

func (w *worker) pages() int {
	if w.name[0] == 'p' {
		return w.plan.PrefillPages
	}
	return w.plan.DecodePages
}

// push puts something into the inbox and wakes the loop, which may take a
// moment: what arrives meanwhile is in the same turn.
func (w *worker) push(m any) {
	w.inbox = append(w.inbox, m)
	w.wake(w.between(0, 200*time.Microsecond))
}

func (w *worker) wake(d time.Duration) {
	if !w.woken {
		w.woken = true
		w.in(d, func() {
			w.woken = false
			w.turn()
		})
	}
}

// arm lets a turn come at a deadline of the core.
func (w *worker) arm(deadline time.Duration) {
	if deadline == sched.Never {
		return
	}
	if at := w.now + deadline - w.clock(); at < w.armed || w.armed <= w.now {
		w.armed = max(at, w.now)
		w.in(at-w.now, func() {
			if !w.woken {
				w.turn()
			}
		})
	}
}

// compute runs a batch in virtual time. layer hears of each layer's end.
func (w *worker) compute(b *sched.Batch, layer func(l int), done func(tokens []int32)) {
	rows := make([]engine.Row, len(b.Rows))
	for i := range b.Rows {
		r := &b.Rows[i]
		rows[i] = engine.Row{Tokens: r.Tokens, Start: r.Start, Pages: r.Pages, Index: r.Index}
		if r.Sample {
			s := w.open[r.Req].sampling // its request has not ended: it was just put into the batch
			s.Logprobs = -1
			rows[i].Sample = &s
		}
	}
	run := &engine.Batch{Rows: rows}
	took, err := w.engine.Begin(run)
	if err != nil {
		w.broken("batch", "%s: %v", w.name, err)
		return
	}
	for i := range rows {
		if err := rows[i].Err; err != nil {
			w.broken("batch", "%s: row %d: %v", w.name, i, err)
		}
	}
	layers := w.engine.Geometry().Layers
	for l := range layers {
		w.in(took*time.Duration(l+1)/time.Duration(layers), func() {
			w.engine.Layer(run, l)
			if layer != nil {
				layer(l)
			}
			if l == layers-1 {
				tokens := make([]int32, len(rows))
				for i := range rows {
					tokens[i] = -1
					if rows[i].Sample != nil {
						tokens[i] = rows[i].Out.Token
					}
				}
				done(tokens)
			}
		})
	}
}

// The times of a link, as transfer has them.
const (
	linkSilence = 10 * time.Second
	linkTick    = time.Second
	linkStuck   = 10 * time.Second
)

// run keeps a link: its writer, its silence.
func (l *link) run(tick func() []byte, take func(frame []byte)) {
	w := l.w
	w.links[l.id] = l
	l.heard = w.now
	l.s.take = func(m any) {
		l.heard = w.now
		take(m.([]byte))
	}
	l.s.ended = func(cause string) { l.end(cause) }
	l.s.drains = l.pump
	var beat func()
	beat = func() {
		switch {
		case l.over:
			return
		case w.now-l.heard > linkSilence && w.now-l.heard < linkSilence+2*linkTick:
			l.end("silent for 10s")
			return
		case w.now-l.heard > linkSilence: // we slept
			l.heard = w.now
		case l.writing && l.stuck > 0 && w.now-l.stuck > linkStuck:
			l.end("the peer took nothing for 10s")
			return
		}
		if b := tick(); len(b) > 0 && !l.writing {
			l.write(b, nil)
		}
		w.in(linkTick, beat)
	}
	w.in(linkTick, beat)
	l.pump()
}

// pump writes what there is to write, one lump after the other.
func (l *link) pump() {
	l.stuck = 0
	for !l.over && !l.writing {
		b := l.next()
		if len(b) == 0 {
			return
		}
		l.write(b, l.done)
	}
}

// write sends frames; the writer is busy until they have left.
func (l *link) write(b []byte, done func()) {
	l.writing = true
	full := false
	for _, f := range transfer.Frames(b) {
		frames := [][]byte{f}
		if t := l.w.net.tamper; t != nil {
			frames = t(l.s.owner, l.s.peer.owner, f)
		}
		for _, f := range frames {
			full = l.s.send(f, len(f)) || full
		}
	}
	free := func() {
		if l.over {
			return
		}
		l.writing = false
		if done != nil {
			done()
		}
		l.pump()
	}
	if !full {
		l.w.in(time.Duration(int64(len(b))*int64(time.Second)/l.w.net.cfg.Bandwidth), free)
		return
	}
	l.stuck = l.w.now
	l.s.drains = func() {
		if l.s.load <= maxLoad {
			l.s.drains = l.pump
			free()
		}
	}
}

// end: the link is over for this side.
func (l *link) end(cause string) {
	if l.over {
		return
	}
	l.over = true
	delete(l.w.links, l.id)
	l.s.close(cause)
	l.lost(cause)
}

// decode is a decode worker.
type decode struct {
	worker
	core    *sched.Decode
	end     *transfer.DecodeEnd
	grants  map[sched.GrantID]*job
	tries   map[uint64]*try
	rules   peerRules
	heard   map[sched.GrantID]time.Duration // open grants that have not landed: when something came last
	before  time.Duration                   // when the last turn was
	frozen  bool                            // Blocking: the loop waits
	waiting []*try                          // for these, one after the other
	beat    time.Duration                   // start of the last batch, 0: none runs
	took    time.Duration                   // how long it should take
	slept   time.Duration                   // idle at that time
}

// try is one piece of peer work on its way.
type try struct {
	act    sched.PeerAction
	over   bool
	cancel func()
	then   func() // Blocking: the loop goes on
}

func newDecode(n *network, plan *Plan, i int) *decode {
	d := &decode{worker: worker{process: newProcess(n.world, fmt.Sprintf("d%d", i)), net: n, plan: plan, tp: plan.Decodes[i]}}
	d.worker.turn = d.turn
	d.boot()
	return d
}

// boot makes the insides of a new life.
func (d *decode) boot() {
	d.life0(d.rng.Uint64())
	d.grants, d.tries, d.beat = map[sched.GrantID]*job{}, map[uint64]*try{}, 0
	d.heard, d.before = map[sched.GrantID]time.Duration{}, 0
	d.frozen, d.waiting = false, nil
	p := d.plan
	late := sched.LateTurn
	if p.Blocking {
		late = sched.Never // a loop that waits is late all the time, and the original counted it
	}
	d.core = sched.NewDecode(sched.DecodeConfig{
		LateTurn:   late,
		MaxRunning: p.MaxRunning, MaxQueued: p.MaxQueued, Context: simContext, ReservedTokens: p.Reserved, Vocab: engine.SimVocab,
		KVTimeout: p.KVTimeout, PrefixCache: p.PrefixCache,
		Peers: p.peers(sched.ParallelInfo{TP: d.tp, CP: 1, DP: 1, PP: 1, PageSize: p.PageSize, KVDType: "f16",
			Instance: d.instance, Fingerprint: "same"}, d.rng.Uint64()),
	}, d.pool)
	var memory []transfer.Memory
	for r := range d.tp {
		memory = append(memory, d.engine.Memory(r))
	}
	d.end = transfer.NewDecodeEnd(d.engine.Geometry(), memory, 2*p.MaxRunning)
	d.end.Wrote = d.wrote
	d.rules = newPeerRules(d)
}

// turn is one pass of the loop.
func (d *decode) turn() {
	if d.frozen {
		return
	}
	for len(d.inbox) > 0 {
		in := d.inbox
		d.inbox = nil
		for _, m := range in {
			d.take(m)
		}
	}
	d.step(&sched.Tick{})
	d.handOut()
	d.rules.turned()
	d.settle()
	d.check()
	d.before = d.clock()
}

func (d *decode) step(ev sched.Event) {
	d.judge.DecodeEvent(ev)
	d.rules.event(ev)
	d.core.Step(d.clock(), ev)
}

// landing is transfer.Landed on its way to the loop.
type landing struct{ ev *transfer.Landed }

func (d *decode) take(m any) {
	switch m := m.(type) {
	case *job:
		d.submit(m)
	case abortAll:
		d.drained(d.step)
	case landing:
		d.landed(m.ev)
	case sched.Event:
		d.step(m)
	}
}

func (d *decode) submit(j *job) {
	d.open[j.id] = j
	j.pending, j.unresolved = d.clock(), !d.rules.resolved(j.leg.addr)
	d.judge.Submitted(j.id)
	a := j.leg.ask
	d.step(&sched.Submit{Req: j.id, Prompt: j.prompt, MaxTokens: a.q.MaxTokens - len(a.done), Addr: j.leg.addr, Room: j.leg.room, Digest: sched.Digest(j.prompt), DPRank: a.q.Named - 1,
		Deadline: j.deadline})
}

func (d *decode) landed(ev *transfer.Landed) {
	delete(d.heard, sched.GrantID(ev.Grant))
	if j := d.grants[sched.GrantID(ev.Grant)]; j != nil {
		delete(d.grants, sched.GrantID(ev.Grant))
		if !j.seeded {
			j.sampling.Seed, j.seeded = ev.First.Seed, true
		}
	}
	d.step(&sched.PagesLanded{Grant: sched.GrantID(ev.Grant), First: ev.First.Token, Cached: ev.First.Cached})
}

func (d *decode) handOut() {
	r := d.core.Ready()
	d.judge.DecodeActions(r)
	for _, e := range r.Emits {
		d.open[e.Req].leg.token(e.Index, e.Token)
	}
	for _, f := range r.Finishes {
		d.finish(f)
	}
	for i := range r.Grants {
		d.grant(&r.Grants[i])
	}
	for _, g := range r.Revokes {
		d.say("%s revokes grant %d", d.name, g)
		delete(d.grants, g)
		delete(d.heard, g)
		d.end.Revoke(uint64(g))
	}
	for _, n := range r.Notices {
		d.end.Notice(uint64(n.Link), n.Room, n.Waits)
	}
	d.rules.ready(r.Peer)
	for _, a := range r.Peer {
		d.peer(a)
	}
	if b := r.Batch; b != nil {
		d.startBatch(b)
	}
	if r.Fatal != nil {
		d.broken("fatal", "%s: %v although mismatches are to be rejected", d.name, r.Fatal)
	}
	d.arm(r.Deadline)
	if len(d.waiting) > 0 {
		d.waitNext()
	}
}

func (d *decode) startBatch(b *sched.Batch) {
	if gap := d.now - d.beat - (d.idle - d.slept); d.beat > 0 && gap > d.took+5*time.Millisecond && !d.plan.Blocking {
		d.broken("beat", "%s: %v between two batches, the first should take %v", d.name, gap, d.took)
	}
	d.beat, d.slept = d.now, d.idle
	d.took = d.plan.DecodeBase + time.Duration(len(b.Rows))*100*time.Microsecond
	d.compute(b, nil, func(tokens []int32) { d.push(&sched.BatchDone{Batch: b.ID, Tokens: tokens}) })
}

func (d *decode) finish(f sched.Finish) {
	j := d.open[f.Req]
	delete(d.open, f.Req)
	d.rules.finish(j, f)
	j.leg.finish(f)
}

func (d *decode) grant(g *sched.Grant) {
	j := d.open[g.Req]
	d.grants[g.Grant], j.granted = j, true
	d.rules.granted(j, g)
	spec := transfer.GrantSpec{Grant: uint64(g.Grant), Room: g.Room, Digest: g.Digest, Prefix: g.Prefix, Tokens: g.Tokens, Pages: slices.Clone(g.Pages)}
	for _, l := range g.Links {
		spec.Links = append(spec.Links, uint64(l))
	}
	if g.Recompute != nil {
		spec.Recompute, spec.Index, spec.Sampling = slices.Clone(g.Recompute), g.Index, encodeSampling(&j.sampling)
	}
	d.say("%s grants %d: request %d room %d, tokens %d to %d, recompute %v", d.name, g.Grant, g.Req, g.Room, g.Prefix, g.Tokens, g.Recompute != nil)
	d.heard[g.Grant] = d.clock()
	d.end.Open(d.clock(), spec)
}

// settle passes on what the transfer end has to tell, and lets the writers write.
func (d *decode) settle() {
	for _, ev := range d.end.Events() {
		switch ev := ev.(type) {
		case *transfer.Landed:
			d.say("%s landed grant %d", d.name, ev.Grant)
			if j := d.grants[sched.GrantID(ev.Grant)]; j != nil {
				d.net.delivered[j.leg.room] = true
			}
			d.push(landing{ev})
		case *transfer.Failed:
			d.say("%s failed grant %d: %s", d.name, ev.Grant, ev.Cause.Message)
			delete(d.heard, sched.GrantID(ev.Grant))
			d.push(&sched.TransferFailed{Grant: sched.GrantID(ev.Grant), Cause: fromCause(&ev.Cause)})
		case *transfer.Quiesced:
			d.push(&sched.TransferQuiesced{Grant: sched.GrantID(ev.Grant)})
		case *transfer.GrantHeard:
			if _, open := d.heard[sched.GrantID(ev.Grant)]; open {
				d.heard[sched.GrantID(ev.Grant)] = d.clock()
			}
			d.push(&sched.GrantHeard{Grant: sched.GrantID(ev.Grant)})
		case *transfer.LinkHeard:
			d.push(&sched.LinkHeard{Link: sched.LinkID(ev.Link)})
		}
	}
	for _, id := range d.end.Hurry() {
		d.hurry(id)
	}
	d.pumpAll()
}

func (w *worker) pumpAll() {
	for _, id := range slices.Sorted(maps.Keys(w.links)) {
		if l := w.links[id]; l != nil {
			l.pump()
		}
	}
}

// hurry: the frame that the link reads must end soon.
func (d *decode) hurry(id uint64) {
	l := d.links[id]
	if l == nil {
		return
	}
	heard := l.heard
	d.in(transfer.HurryTime, func() {
		if l.heard == heard {
			l.end("a frame took too long to end")
			d.settle()
		}
	})
}

// wrote judges a write into granted pages.
func (d *decode) wrote(grant uint64, pages []kv.Page) {
	if p, ok := d.judge.Foreign(sched.GrantID(grant), pages); !ok {
		d.broken("page", "%s: page %d is written for grant %d, which may not write it", d.name, p, grant)
	}
}

func encodeSampling(s *engine.Sampling) []byte {
	b := binary.LittleEndian.AppendUint64(nil, s.Seed)
	return append(b, byte(s.Temperature))
}

func decodeSampling(b []byte) engine.Sampling {
	if len(b) != 9 {
		return engine.Sampling{}
	}
	return engine.Sampling{Seed: binary.LittleEndian.Uint64(b), Temperature: float32(b[8])}
}

func fromCause(c *transfer.Cause) *sched.Error {
	if c == nil {
		return nil
	}
	return &sched.Error{Code: sched.Code(c.Code), Message: c.Message}
}

func toCause(e *sched.Error) *transfer.Cause {
	if e == nil {
		return nil
	}
	return &transfer.Cause{Code: string(e.Code), Message: e.Message}
}

// peer does one piece of peer work.
func (d *decode) peer(a sched.PeerAction) {
	d.rules.action(&a)
	d.say("%s %s %s attempt %d", d.name, peerKinds[a.Kind], a.Addr+a.Target, a.Attempt)
	switch a.Kind {
	case sched.CancelTry:
		if t := d.tries[a.ID]; t != nil {
			d.finishTry(t, sched.PeerDone{Fault: sched.LocalFault, Cause: "cancelled"})
		}
		return
	case sched.CloseLink:
		if l := d.links[uint64(a.Link)]; l != nil {
			l.lost = func(cause string) { d.end.Leave(l.id, cause) } // meant: no LinkEnded
			l.end(a.Text)
		}
		return
	}
	t := &try{act: a}
	d.tries[a.ID] = t
	if d.waits(a.Kind) {
		d.waiting = append(d.waiting, t)
		return
	}
	d.ask(t)
}

// ask starts a piece of peer work.
func (d *decode) ask(t *try) {
	a := &t.act
	d.in(a.Timeout, func() {
		d.finishTry(t, sched.PeerDone{Fault: sched.PeerFault, Cause: fmt.Sprintf("no complete answer within %v", a.Timeout)})
	})
	if a.Kind == sched.DialLink {
		d.dialLink(t)
		return
	}
	t.cancel = d.net.ask(d.process, a.Addr, func(to *process, reply func(any)) {
		d.net.registry(to, &t.act, reply)
	}, func(m any, fault string) {
		done, ok := m.(sched.PeerDone)
		if !ok {
			done = sched.PeerDone{Fault: sched.PeerFault, Cause: fault}
		}
		d.finishTry(t, done)
	})
}

var peerKinds = [...]string{sched.FetchInfo: "fetches", sched.QueryRanks: "asks ranks", sched.LookupRank: "looks up", sched.DialLink: "dials",
	sched.CloseLink: "closes link", sched.ProbeHealth: "probes", sched.CancelTry: "cancels"}

func (d *decode) finishTry(t *try, done sched.PeerDone) {
	if t.over {
		return
	}
	t.over = true
	if t.cancel != nil {
		t.cancel()
	}
	a := &t.act
	delete(d.tries, a.ID)
	done.Kind, done.ID, done.Gen, done.Addr, done.Link = a.Kind, a.ID, a.Gen, a.Addr, a.Link
	d.push(&done)
	if t.then != nil {
		t.then()
	}
}

// helloMsg and welcomeMsg are the handshake of a link.
type helloMsg struct {
	hello    transfer.Hello
	tp, rank int
	wanted   sched.RankKey
	instance string
}

type welcomeMsg struct {
	welcome transfer.Welcome
	rank    int
	refused string
}

// dialLink connects to a prefill rank and shakes hands.
func (d *decode) dialLink(t *try) {
	a := &t.act
	d.net.dial(d.process, a.Target, func(to *process, s *socket) bool {
		p, ok := d.net.workers[to].(*prefill)
		if !ok {
			return false
		}
		rank, tp := p.listens(a.Target)
		if rank != nil {
			rank.accept(s, tp)
		}
		return rank != nil
	}, func(s *socket, _ *process) {
		switch {
		case s == nil:
			d.finishTry(t, sched.PeerDone{Fault: sched.PeerFault, Cause: "connection refused"})
			return
		case t.over:
			s.close("cancelled")
			return
		}
		t.cancel = func() { s.close("cancelled") }
		s.ended = func(cause string) { d.finishTry(t, sched.PeerDone{Fault: sched.PeerFault, Cause: cause}) }
		s.take = func(m any) { d.welcomed(t, s, m.(*welcomeMsg)) }
		s.send(&helloMsg{transfer.Hello{Instance: d.instance, Fingerprint: "same", KVDType: "f16"}, d.tp, a.LocalTP, a.Rank, a.Instance}, 300)
	})
}

func (d *decode) welcomed(t *try, s *socket, m *welcomeMsg) {
	if t.over {
		return
	}
	a, w := &t.act, &m.welcome
	done := sched.PeerDone{Welcome: sched.Welcome{Instance: w.Instance, Fingerprint: w.Fingerprint, TP: w.TP, DP: w.DP,
		PageSize: w.PageSize, KVDType: w.KVDType}}
	switch {
	case m.refused != "":
		done = sched.PeerDone{Fault: sched.PeerFault, Cause: m.refused}
	case a.Instance != "" && w.Instance != a.Instance:
		done.Fault, done.Cause = sched.MismatchFault, fmt.Sprintf("prefill instance %q answers where %q was expected", w.Instance, a.Instance)
	case w.Fingerprint != "same":
		done = sched.PeerDone{Fault: sched.MismatchFault, Cause: fmt.Sprintf("model fingerprint differs: prefill has %s, decode has same", w.Fingerprint)}
	}
	if done.Fault == sched.OK {
		if err := d.end.Join(uint64(a.Link), a.LocalTP, *w, a.Rank.TP, a.Target); err != nil {
			done = sched.PeerDone{Fault: sched.PeerFault, Cause: err.Error()}
		}
	}
	if done.Fault == sched.OK {
		t.cancel = nil
		d.joined(uint64(a.Link), s)
	}
	d.finishTry(t, done)
}

// joined runs a link that is up.
func (d *decode) joined(id uint64, s *socket) {
	l := &link{id: id, s: s, w: &d.worker, next: func() []byte { return d.end.Next(id) }}
	l.lost = func(cause string) {
		d.say("%s link %d ended: %s", d.name, id, cause)
		d.push(&sched.LinkEnded{Link: sched.LinkID(id), Cause: cause})
		d.end.Leave(id, cause)
		d.settle()
	}
	l.run(func() []byte { return transfer.Ping() }, func(frame []byte) { d.frame(l, frame) })
}

// frame takes one frame; the second half of a long one comes a little later,
// and what comes behind it waits.
func (d *decode) frame(l *link, frame []byte) {
	more, err := d.end.Take(d.clock(), l.id, frame)
	if err != nil {
		l.end(err.Error())
		return
	}
	if more {
		take, waiting := l.s.take, []any(nil)
		l.s.take = func(m any) { waiting = append(waiting, m) }
		d.in(d.between(0, d.plan.Net.Jitter), func() {
			if l.over {
				return
			}
			l.heard = d.now
			d.end.Finish(l.id)
			l.s.take = take
			d.settle()
			for _, m := range waiting {
				if !l.over {
					l.s.take(m)
				}
			}
		})
	}
	d.settle()
}

// registry answers a decode's question at a prefill's registry.
func (n *network) registry(to *process, a *sched.PeerAction, reply func(any)) {
	p, ok := n.workers[to].(*prefill)
	if !ok {
		return
	}
	p.registry(a, reply)
}

// parallelInfo is a registry's answer as D takes it.
func parallelInfo(i bootstrap.Info) *sched.ParallelInfo {
	return &sched.ParallelInfo{TP: i.TP, CP: i.CP, DP: i.DP, PP: i.PP, PageSize: i.PageSize, KVDType: i.KVDType,
		FollowRoom: i.FollowRoom, Instance: i.Instance, Fingerprint: i.Fingerprint}
}
