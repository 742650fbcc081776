// Package schedtest drives the scheduler cores in virtual time, for transcripts
// (Run) and for random walks (Turn). It does what a worker's loop does: the
// inbox first, then Tick, then Ready, whose actions it prints, hands to an
// [oracle.Oracle] that knows nothing of the cores' insides, and, where that is asked
// for, answers as a healthy world would.
package schedtest

import (
	"fmt"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/sched/oracle"
)

// Env is a decode core, a prefill core, or (serve) both over one pool, with
// everything around them.
type Env struct {
	Now  time.Duration
	Pool *kv.Pool
	D    *sched.Decode
	P    *sched.Prefill

	// Answer takes the actions on the peer network, which then are not printed.
	// What it returns goes into the inbox; nil: no answer yet. At first it is
	// Obey. Without Answer they are printed and wait for peer-done.
	Answer func(sched.PeerAction) *sched.PeerDone
	Oracle *oracle.Oracle

	// Granted and Revoked, where set, are the network's ends of these actions.
	Granted func(sched.Grant)
	Revoked func(sched.GrantID)

	// DBatch and PBatch are the outstanding batches, or nil.
	DBatch, PBatch *sched.Batch

	toD, toP []sched.Event
	jobs     map[sched.ReqID]sched.Submit // serve: what an Adopt will need
	asked    map[uint64]sched.PeerAction  // what was printed
	out      strings.Builder
}

// NewDecode is an Env around one decode core.
func NewDecode(cfg sched.DecodeConfig, pool *kv.Pool) *Env {
	return &Env{Pool: pool, D: sched.NewDecode(cfg, pool), Answer: Obey, Oracle: oracle.New(pool),
		asked: map[uint64]sched.PeerAction{}}
}

// NewPrefill is an Env around one prefill core.
func NewPrefill(cfg sched.PrefillConfig, pool *kv.Pool) *Env {
	return &Env{Pool: pool, P: sched.NewPrefill(cfg, pool), Oracle: oracle.New(pool)}
}

// NewServe is an Env around both cores over one pool.
func NewServe(d sched.DecodeConfig, p sched.PrefillConfig, pool *kv.Pool) *Env {
	d.Serve = true
	return &Env{Pool: pool, D: sched.NewDecode(d, pool), P: sched.NewPrefill(p, pool),
		Oracle: oracle.New(pool), jobs: map[sched.ReqID]sched.Submit{}}
}

// Log is everything printed so far.
func (e *Env) Log() string { return e.out.String() }

func (e *Env) printf(format string, args ...any) { fmt.Fprintf(&e.out, format, args...) }

// ToD and ToP put events into the inbox of the next turn.
func (e *Env) ToD(evs ...sched.Event) { e.toD = append(e.toD, evs...) }

// ToP puts events into the prefill core's inbox.
func (e *Env) ToP(evs ...sched.Event) { e.toP = append(e.toP, evs...) }

// Submit gives a request to the core that takes new ones: in serve the prefill core.
func (e *Env) Submit(s sched.Submit) {
	e.Oracle.Submitted(s.Req)
	if e.jobs == nil {
		e.ToD(&s)
		return
	}
	e.jobs[s.Req] = s
	e.ToP(&sched.SubmitPrefill{Req: s.Req, Prompt: s.Prompt, Room: -1, MaxTokens: s.MaxTokens,
		MaxHit: len(s.Prompt), Deadline: s.Deadline})
}

// Both sends an event that concerns a request to whichever core has it.
func (e *Env) Both(ev sched.Event) {
	if e.D != nil {
		e.ToD(ev)
	}
	if e.P != nil {
		e.ToP(ev)
	}
}

// Turn empties the inboxes, lets the cores judge their deadlines and acts on
// what they want, until nobody has anything more to say and no deadline is due.
func (e *Env) Turn() error {
	for range 1000 {
		if e.P != nil {
			e.turnP()
		}
		if e.D != nil {
			e.turnD()
		}
		if err := e.check(); err != nil {
			return err
		}
		if len(e.toD)+len(e.toP) == 0 && e.Deadline() > e.Now {
			return e.asleep()
		}
	}
	return fmt.Errorf("schedtest: the cores do not come to rest at %v", e.Now)
}

// asleep checks that no wake-up is lost: when nothing has happened since the
// last turn, nobody wants anything more.
func (e *Env) asleep() error {
	if e.P != nil {
		e.P.Step(e.Now, &sched.Tick{})
		if s := e.P.Ready().String(); s != "" {
			return fmt.Errorf("schedtest: without any news the prefill core wants\n%s", s)
		}
	}
	if e.D != nil {
		e.D.Step(e.Now, &sched.Tick{})
		r := *e.D.Ready()
		r.Fatal = nil // sticky
		if s := r.String(); s != "" {
			return fmt.Errorf("schedtest: without any news the decode core wants\n%s", s)
		}
	}
	return nil
}

func (e *Env) check() error {
	if e.Oracle.Err != nil {
		return e.Oracle.Err
	}
	if e.P != nil {
		return sched.CheckShared(e.D, e.P)
	}
	return e.D.Check()
}

func (e *Env) turnD() {
	evs := e.toD
	e.toD = nil
	for _, ev := range evs {
		e.Oracle.DecodeEvent(ev)
		if b, ok := ev.(*sched.BatchDone); ok && e.DBatch != nil && b.Batch == e.DBatch.ID {
			e.DBatch = nil
		}
		e.D.Step(e.Now, ev)
	}
	e.D.Step(e.Now, &sched.Tick{})
	r := e.D.Ready()
	e.Oracle.DecodeActions(r)
	told := *r
	if e.Answer != nil {
		told.Peer = nil
		for _, a := range r.Peer {
			if done := e.Answer(a); done != nil {
				e.ToD(done)
			}
		}
	}
	e.printf("%s", told.String())
	for _, a := range told.Peer {
		e.asked[a.ID] = a
	}
	if r.Batch != nil {
		e.DBatch = r.Batch
	}
	if e.Granted != nil {
		for _, g := range r.Grants {
			e.Granted(g)
		}
		for _, g := range r.Revokes {
			e.Revoked(g)
		}
	}
	for _, p := range r.Preempts {
		s := e.jobs[p.Req]
		e.ToP(&sched.SubmitPrefill{Req: p.Req, Prompt: p.Tokens, Room: -1, MaxTokens: s.MaxTokens - p.Index,
			Index: p.Index, MaxHit: len(p.Tokens), Deadline: s.Deadline})
	}
}

func (e *Env) turnP() {
	evs := e.toP
	e.toP = nil
	for _, ev := range evs {
		e.Oracle.PrefillEvent(ev)
		if b, ok := ev.(*sched.BatchDone); ok && e.PBatch != nil && b.Batch == e.PBatch.ID {
			e.PBatch = nil
		}
		e.P.Step(e.Now, ev)
	}
	e.P.Step(e.Now, &sched.Tick{})
	r := e.P.Ready()
	e.Oracle.PrefillActions(r)
	e.printf("%s", r.String())
	if r.Batch != nil {
		e.PBatch = r.Batch
	}
	for _, h := range r.HandOvers {
		a := &sched.Adopt{Submit: e.jobs[h.Req], Pages: h.Pages, First: h.First, Index: h.Index}
		a.Prompt = h.Prompt
		e.ToD(a)
	}
}

// Deadline is the earliest moment at which a core has something to judge.
func (e *Env) Deadline() time.Duration {
	due := sched.Never
	if e.D != nil {
		due = min(due, e.D.Ready().Deadline)
	}
	if e.P != nil {
		due = min(due, e.P.Ready().Deadline)
	}
	return due
}

// Advance lets time pass, with a turn at every deadline and at the end.
func (e *Env) Advance(by time.Duration) error {
	end := e.Now + by
	for {
		due := max(e.Now, e.Deadline())
		if due > end {
			break
		}
		e.Now = due
		if err := e.Turn(); err != nil {
			return err
		}
	}
	e.Now = end
	return e.Turn()
}

// Token is the token that the engine of these tests draws.
func Token(req sched.ReqID, index int) int32 { return int32(req)*100 + int32(index) }

// Done is the completion of a batch with the tokens that Token draws.
func Done(b *sched.Batch) *sched.BatchDone {
	done := &sched.BatchDone{Batch: b.ID}
	for _, r := range b.Rows {
		t := int32(-1)
		if r.Sample {
			t = Token(r.Req, r.Index)
		}
		done.Tokens = append(done.Tokens, t)
	}
	return done
}

// Obey is how a healthy prefill with one rank answers.
func Obey(a sched.PeerAction) *sched.PeerDone {
	done := &sched.PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link}
	switch a.Kind {
	case sched.CloseLink, sched.CancelTry:
		return nil
	case sched.FetchInfo:
		done.Info = &sched.ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1, FollowRoom: true}
	case sched.LookupRank:
		done.Target = "10.0.0.1:1"
	case sched.DialLink:
		done.Welcome = sched.Welcome{TP: 1, DP: 1}
	}
	return done
}
