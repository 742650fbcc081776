package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// peernet is the driver of the peer network: it runs the tries that the
// decode cores ask for (fetches, queries, lookups, dials, probes), each on a
// goroutine of its own and under one total deadline, so a thousand hung
// addresses cost a healthy one nothing but memory.
//
// One goroutine owns all that is here (run). The loops push actions to its
// inbox and get each completion as a PeerDone in theirs.
//
// The cores of all DP ranks share one flight per fetch, lookup or probe: a
// core whose action meets a flight for the same thing joins it. A flight that
// a core has left (CancelTry) takes no newcomers any more, because a core that
// evicts an address must not learn the old answer through a flight of another.
type peernet struct {
	clock    clock
	registry registry
	log      *slog.Logger
	in       *inbox
	ctx      context.Context // parent of all tries
	cancel   context.CancelFunc
	idle     chan struct{} // closed when run and every try have returned

	// owned by run
	joinable map[flightKey]*flight
	tries    map[tryKey]*flight
	first    []*flight // wait for the pacer, first dials
	retry    []*flight // the others
	pace     pacer
	running  int // goroutines of tries
	logged   logLimit
}

// registry is what the tries ask of bootstrap registries: *bootstrap.Client.
type registry interface {
	FetchInfo(ctx context.Context, addr string) (bootstrap.Info, error)
	LookupRank(ctx context.Context, addr string, dp, cp, tp, pp int) (string, error)
	QueryRanks(ctx context.Context, addr string, rooms []int64) (map[int64]int, error)
	Health(ctx context.Context, addr string) (string, error)
}

// asker is a loop as peernet sees it: whom to tell, and how to dial for it.
type asker interface {
	tell(m any) // never blocks
	dial(ctx context.Context, s transfer.LinkSpec) (transfer.Welcome, error)
}

// flightKey says which tries are the same question.
type flightKey struct {
	kind sched.PeerKind
	addr string
	rank sched.RankKey
}

type tryKey struct {
	who asker
	id  uint64
}

// flight is one try on the network and those who wait for its result.
type flight struct {
	act     sched.PeerAction // of the first member
	who     asker            // of the first member; DialLink dials through it
	key     flightKey
	ctx     context.Context
	cancel  context.CancelFunc
	started bool
	members []member
}

type member struct {
	who asker
	act sched.PeerAction
}

// ask is a PeerAction of one loop.
type ask struct {
	who asker
	act sched.PeerAction
}

// landing is the end of a flight's goroutine.
type landing struct {
	f    *flight
	done sched.PeerDone // without ID and Gen
}

func newPeernet(c clock, r registry, log *slog.Logger) *peernet {
	ctx, cancel := context.WithCancel(context.Background())
	return &peernet{
		clock: c, registry: r, log: log, in: newInbox(), ctx: ctx, cancel: cancel,
		idle:     make(chan struct{}),
		joinable: map[flightKey]*flight{}, tries: map[tryKey]*flight{},
	}
}

// do hands an action over. It never blocks.
func (n *peernet) do(who asker, a sched.PeerAction) { n.in.push(&ask{who, a}) }

// close ends all tries and waits until their goroutines have returned.
func (n *peernet) close() {
	n.cancel()
	<-n.idle
}

// run owns the flights until close. Its goroutine is the worker's; close waits for it.
func (n *peernet) run() {
	defer close(n.idle)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	stop := n.ctx.Done()
	for {
		select {
		case <-n.in.wake:
		case <-timer.C:
		case <-stop:
			stop = nil
			n.dropQueued()
		}
		for _, m := range n.in.take() {
			switch m := m.(type) {
			case *ask:
				n.ask(m)
			case *landing:
				n.land(m)
			}
		}
		if wait := n.launch(); wait > 0 {
			timer.Reset(wait)
		}
		if stop == nil && n.running == 0 {
			return
		}
	}
}

func (n *peernet) ask(a *ask) {
	if a.act.Kind == sched.CancelTry {
		n.leave(tryKey{a.who, a.act.ID})
		return
	}
	m := member{a.who, a.act}
	key := flightKey{a.act.Kind, a.act.Addr, a.act.Rank}
	shared := a.act.Kind == sched.FetchInfo || a.act.Kind == sched.LookupRank || a.act.Kind == sched.ProbeHealth
	if f := n.joinable[key]; shared && f != nil {
		f.members = append(f.members, m)
		n.tries[tryKey{a.who, a.act.ID}] = f
		return
	}
	f := &flight{act: a.act, who: a.who, key: key, members: []member{m}}
	// The deadline is total: the wait for the pacer counts too.
	f.ctx, f.cancel = context.WithTimeout(n.ctx, a.act.Timeout)
	n.tries[tryKey{a.who, a.act.ID}] = f
	if shared {
		n.joinable[key] = f
	}
	if a.act.First {
		n.first = append(n.first, f)
	} else {
		n.retry = append(n.retry, f)
	}
}

// leave ends one member's part in a flight. The last member's completion comes
// when the goroutine has returned; another's comes at once.
func (n *peernet) leave(k tryKey) {
	f := n.tries[k]
	if f == nil {
		return // it has landed already
	}
	n.closeFlight(f)
	if len(f.members) == 1 {
		f.cancel()
		if !f.started {
			n.finish(f, sched.PeerDone{Fault: sched.LocalFault, Cause: "cancelled"})
		}
		return
	}
	for i, m := range f.members {
		if m.who == k.who && m.act.ID == k.id {
			f.members = append(f.members[:i], f.members[i+1:]...)
			n.tell(m, sched.PeerDone{Fault: sched.LocalFault, Cause: "cancelled"})
			return
		}
	}
}

// closeFlight lets nobody join the flight any more.
func (n *peernet) closeFlight(f *flight) {
	if n.joinable[f.key] == f {
		delete(n.joinable, f.key)
	}
}

// launch starts the goroutines that the pacer allows, first dials before
// retries, and says how long to wait for the next one; 0: none waits.
func (n *peernet) launch() time.Duration {
	now := n.clock.now()
	for n.pace.may(now) {
		f := pop(&n.first)
		if f == nil {
			f = pop(&n.retry)
		}
		if f == nil {
			return 0
		}
		if len(f.members) == 0 {
			continue // cancelled while it waited
		}
		if f.ctx.Err() != nil {
			n.finish(f, sched.PeerDone{Fault: sched.LocalFault, Cause: "no dial was free before the deadline"})
			continue
		}
		n.pace.started(now)
		f.started = true
		n.running++
		go func() {
			n.in.push(&landing{f, n.try(f)})
		}()
	}
	if len(n.first)+len(n.retry) == 0 {
		return 0
	}
	return max(n.pace.next(now)-now, time.Microsecond)
}

// pop takes the oldest flight of a queue, nil when it is empty.
func pop(q *[]*flight) *flight {
	if len(*q) == 0 {
		return nil
	}
	f := (*q)[0]
	(*q)[0] = nil
	*q = (*q)[1:]
	return f
}

func (n *peernet) dropQueued() {
	for _, q := range []*[]*flight{&n.first, &n.retry} {
		for f := pop(q); f != nil; f = pop(q) {
			n.finish(f, sched.PeerDone{Fault: sched.LocalFault, Cause: "stopping"})
		}
	}
}

// land takes a flight's result from its goroutine.
func (n *peernet) land(l *landing) {
	n.running--
	n.finish(l.f, l.done)
}

// finish tells every member and forgets the flight.
func (n *peernet) finish(f *flight, done sched.PeerDone) {
	f.cancel()
	n.closeFlight(f)
	if done.Fault == sched.PeerFault {
		n.logFault(f, done.Cause)
	}
	for _, m := range f.members {
		n.tell(m, done)
	}
	f.members = nil
}

func (n *peernet) tell(m member, done sched.PeerDone) {
	delete(n.tries, tryKey{m.who, m.act.ID})
	done.Kind, done.ID, done.Gen = m.act.Kind, m.act.ID, m.act.Gen
	done.Addr, done.Link = m.act.Addr, m.act.Link
	m.who.tell(&done)
}

// try runs on the flight's goroutine. Everything in it obeys f.ctx.
func (n *peernet) try(f *flight) sched.PeerDone {
	a := &f.act
	var done sched.PeerDone
	var err error
	switch a.Kind {
	case sched.FetchInfo:
		var info bootstrap.Info
		if info, err = n.registry.FetchInfo(f.ctx, a.Addr); err == nil {
			done.Info = parallelInfo(info)
		}
	case sched.QueryRanks:
		done.Ranks, err = n.registry.QueryRanks(f.ctx, a.Addr, a.Rooms)
	case sched.LookupRank:
		done.Target, err = n.registry.LookupRank(f.ctx, a.Addr, a.Rank.DP, a.Rank.CP, a.Rank.TP, a.Rank.PP)
	case sched.ProbeHealth:
		done.Instance, err = n.registry.Health(f.ctx, a.Addr)
	case sched.DialLink:
		var w transfer.Welcome
		if w, err = f.who.dial(f.ctx, linkSpec(a)); err == nil {
			done.Welcome = welcome(w)
		}
	default:
		err = fmt.Errorf("unknown kind of peer work %d", a.Kind)
	}
	if err != nil {
		done = failure(err, a.Timeout)
	}
	return done
}

// failure says whose fault a failed try was.
func failure(err error, timeout time.Duration) sched.PeerDone {
	var refused *transfer.RefusedError
	var replaced *transfer.ReplacedError
	d := sched.PeerDone{Fault: sched.PeerFault, Cause: err.Error()}
	switch {
	case bootstrap.IsLocal(err), transfer.IsLocal(err):
		d.Fault = sched.LocalFault
	case errors.As(err, &replaced):
		d.Fault, d.Welcome = sched.MismatchFault, welcome(replaced.Welcome)
	case errors.As(err, &refused) && refused.Mismatch():
		d.Fault = sched.MismatchFault
	case errors.Is(err, context.DeadlineExceeded):
		d.Cause = fmt.Sprintf("no complete answer within %v", timeout)
	}
	return d
}

// logFault tells of a failed attempt: at most logEvents within logSpan, and
// how many more there were.
func (n *peernet) logFault(f *flight, cause string) {
	ok, hidden := n.logged.allow(n.clock.now())
	if !ok {
		return
	}
	n.log.Warn("attempt at a prefill failed", "what", kindName(f.act.Kind), "addr", f.act.Addr, "target", f.act.Target,
		"attempt", f.act.Attempt, "cause", cause, "not_logged", hidden)
}

// logLimit rations log lines.
type logLimit struct {
	since  time.Duration
	n      int
	hidden int
}

const (
	logSpan   = time.Second
	logEvents = 20
)

func (l *logLimit) allow(now time.Duration) (ok bool, hidden int) {
	if now-l.since >= logSpan {
		l.since, l.n = now, 0
	}
	if l.n >= logEvents {
		l.hidden++
		return false, 0
	}
	l.n++
	hidden, l.hidden = l.hidden, 0
	return true, hidden
}

func kindName(k sched.PeerKind) string {
	switch k {
	case sched.FetchInfo:
		return "fetch of parallel info"
	case sched.QueryRanks:
		return "query of DP ranks"
	case sched.LookupRank:
		return "lookup of a rank"
	case sched.DialLink:
		return "link"
	case sched.ProbeHealth:
		return "heartbeat"
	}
	return "unknown"
}

func parallelInfo(i bootstrap.Info) *sched.ParallelInfo {
	return &sched.ParallelInfo{
		TP: i.TP, CP: i.CP, DP: i.DP, PP: i.PP, PageSize: i.PageSize, KVDType: i.KVDType, KVLayout: i.KVLayout,
		AllocationPolicy: i.AllocationPolicy, FollowRoom: i.FollowRoom, KVSharding: i.KVSharding, LayerSplit: i.LayerSplit,
		Instance: i.Instance, Fingerprint: i.Fingerprint,
	}
}

func welcome(w transfer.Welcome) sched.Welcome {
	return sched.Welcome{
		Instance: w.Instance, Fingerprint: w.Fingerprint, TP: w.TP, DP: w.DP, PageSize: w.PageSize, KVDType: w.KVDType,
	}
}

func linkSpec(a *sched.PeerAction) transfer.LinkSpec {
	return transfer.LinkSpec{
		Link: uint64(a.Link), Addr: a.Target, LocalRank: a.LocalTP,
		DP: a.Rank.DP, CP: a.Rank.CP, TP: a.Rank.TP, PP: a.Rank.PP, Instance: a.Instance,
	}
}
