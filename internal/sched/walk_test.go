package sched_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/sched/schedtest"
)

var (
	walkSeed  = flag.Uint64("walk.seed", 0, "seed of the one random walk to repeat; 0: many")
	walkSteps = flag.Int("walk.steps", 400, "events of a random walk")
	walkCount = flag.Int("walk.count", 40, "random walks of each kind")
)

// walk is a world of random events around the cores. In the first phase
// anything may happen; in the second everybody behaves, and then every request
// must end and every page come back.
type walk struct {
	*schedtest.Env
	*rand.Rand
	reqs    sched.ReqID
	trouble bool
	slow    bool               // transfers take long
	tries   []sched.PeerAction // not answered yet
	links   []sched.LinkID
	grants  sched.GrantID // prefill: given out by the other side
	keys    []sched.GrantKey
	prompts map[sched.ReqID]int // prefill: tokens of each
}

// walks plays many walks, or the one whose seed is given.
func walks(t *testing.T, play func(w *walk) error) {
	seeds := []uint64{*walkSeed}
	if *walkSeed == 0 {
		seeds = seeds[:0]
		for i := range *walkCount {
			seeds = append(seeds, uint64(i+1))
		}
	}
	for _, seed := range seeds {
		w := &walk{Rand: rand.New(rand.NewPCG(seed, 0)), trouble: true}
		w.slow = w.IntN(3) == 0
		if err := play(w); err != nil {
			log := w.Log()
			t.Fatalf("%v\nagain with -walk.seed=%d -walk.steps=%d\n%s", err, seed, *walkSteps, log[max(0, len(log)-3000):])
		}
	}
}

func (w *walk) pool() *kv.Pool { return kv.NewPool(4+w.IntN(24), 1+w.IntN(4), w.Uint64()) }

func (w *walk) decodeConfig() sched.DecodeConfig {
	return sched.DecodeConfig{
		MaxRunning: 1 + w.IntN(4), MaxQueued: 1 + w.IntN(8), ReservedTokens: 1 + w.IntN(6),
		KVTimeout: 5 * time.Second, PrefixCache: w.IntN(3) > 0,
		Peers: sched.PeersConfig{Reject: true, ResolveTimeout: 20 * time.Second, Seed: w.Uint64()},
	}
}

func (w *walk) prefillConfig() sched.PrefillConfig {
	return sched.PrefillConfig{
		MaxRunning: 1 + w.IntN(4), MaxQueued: 1 + w.IntN(8), Chunk: 1 + w.IntN(12),
		BootstrapTimeout: 10 * time.Second, PrefixCache: w.IntN(3) > 0,
	}
}

// prompt is often the beginning of one of two texts, so that prefixes meet.
func (w *walk) prompt() []int32 {
	p := make([]int32, 1+w.IntN(w.Pool.Total()*w.Pool.PageSize()))
	text, differ := int32(w.IntN(2)*1000), w.IntN(len(p)+1)
	for i := range p {
		p[i] = text + int32(i)
		if i >= differ {
			p[i] += int32(w.IntN(2) * 5000)
		}
	}
	return p
}

func (w *walk) deadline() time.Duration {
	if w.IntN(3) > 0 {
		return sched.Never
	}
	return w.Now + time.Duration(w.IntN(20_000))*time.Millisecond
}

func (w *walk) submit() {
	w.reqs++
	s := sched.Submit{Req: w.reqs, Prompt: w.prompt(), MaxTokens: 1 + w.IntN(12), Addr: fmt.Sprintf("p:%d", w.IntN(3)),
		Room: int64(w.reqs), DPRank: -1, Deadline: w.deadline()}
	if w.IntN(3) == 0 {
		s.StopIDs = []int32{schedtest.Token(w.reqs, w.IntN(4))}
	}
	w.Env.Submit(s)
}

// some request, often one that has ended.
func (w *walk) some() sched.ReqID { return w.reqs - sched.ReqID(w.IntN(int(min(w.reqs, 12)))) }

func pick[T any](w *walk, s []T) (v T, ok bool) {
	if len(s) == 0 {
		return v, false
	}
	return s[w.IntN(len(s))], true
}

var gone = &sched.Error{Code: sched.ClientGone, Message: "the walk wants it"}

// always are events that both kinds of core know.
func (w *walk) always(n int) {
	switch n {
	case 0:
		if w.reqs > 0 {
			w.Both(&sched.Abort{Req: w.some(), Cause: gone})
		}
	case 1:
		w.Now += time.Duration(w.IntN(900)) * time.Millisecond
	case 2:
		if w.IntN(4) == 0 {
			w.Now += time.Duration(w.IntN(20)) * time.Second // a late turn
		}
	}
}

// engine ends an outstanding batch, now and then badly.
func (w *walk) engine() {
	b, to := w.DBatch, w.ToD
	if b == nil || w.PBatch != nil && w.IntN(2) == 0 {
		b, to = w.PBatch, w.ToP
	}
	if b == nil {
		return
	}
	done := schedtest.Done(b)
	if w.trouble && w.IntN(30) == 0 {
		done.Err = &sched.Error{Code: sched.Internal, Message: "the engine failed"}
	}
	to(done)
	if w.trouble && w.IntN(20) == 0 {
		to(done) // and again: stale
	}
}

// network answers one try of the peer network.
func (w *walk) network() {
	if len(w.tries) == 0 {
		return
	}
	i := w.IntN(len(w.tries))
	a := w.tries[i]
	w.tries = append(w.tries[:i], w.tries[i+1:]...)
	done := schedtest.Obey(a)
	if done == nil {
		return
	}
	if w.trouble && w.IntN(6) == 0 {
		done = &sched.PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link,
			Fault: []sched.Fault{sched.PeerFault, sched.LocalFault}[w.IntN(2)], Cause: "the walk wants it"}
	} else if a.Kind == sched.DialLink {
		w.links = append(w.links, a.Link)
	}
	w.ToD(done)
}

// transfer moves one grant on.
func (w *walk) transfer() {
	open, okOpen := pick(w, w.Oracle.Grants(false))
	closed, okClosed := pick(w, w.Oracle.Grants(true))
	n := w.IntN(10)
	if w.trouble && w.slow {
		n = []int{3, 9, 9, 9, 9, 9, 9, 9, 9, 7}[n]
	}
	switch {
	case okClosed && n < 4:
		w.ToD(&sched.TransferQuiesced{Grant: closed})
	case okClosed && n < 6 && w.trouble: // races with the Revoke
		w.ToD(&sched.PagesLanded{Grant: closed, First: 1})
	case okOpen && n < 8:
		w.ToD(&sched.PagesLanded{Grant: open, First: int32(w.IntN(5))})
	case okOpen && n < 9 && w.trouble:
		w.ToD(&sched.TransferFailed{Grant: open, Cause: gone})
	case okOpen:
		w.ToD(&sched.GrantHeard{Grant: open})
	}
}

// settle lets everybody behave until nothing is open.
func (w *walk) settle(moves ...func()) error {
	w.trouble = false
	for range 5000 {
		if w.Oracle.Open() == 0 && len(w.Oracle.Grants(true)) == 0 && len(w.Oracle.Sends(true, true))+len(w.Oracle.Sends(false, true)) == 0 {
			c := w.Pool.Count()
			if c[kv.Owned]+c[kv.Quarantined] > 0 && w.DBatch == nil && w.PBatch == nil {
				return fmt.Errorf("all have ended, but the pages are %v", c)
			}
			if w.DBatch == nil && w.PBatch == nil {
				return nil
			}
		}
		for _, m := range moves {
			m()
		}
		if err := w.Turn(); err != nil {
			return err
		}
		w.Now += 100 * time.Millisecond
	}
	return fmt.Errorf("%d requests do not end:\n%s", w.Oracle.Open(), w.describe())
}

func (w *walk) describe() (s string) {
	if w.P != nil {
		s += w.P.Describe()
	}
	if w.D != nil {
		s += w.D.Describe()
	}
	return s
}

func TestWalkDecode(t *testing.T) {
	walks(t, func(w *walk) error {
		pool := w.pool()
		w.Env = schedtest.NewDecode(w.decodeConfig(), pool)
		w.Answer = func(a sched.PeerAction) *sched.PeerDone { w.tries = append(w.tries, a); return nil }
		for range *walkSteps {
			switch n := w.IntN(20); n {
			case 0, 1, 2:
				w.always(n)
			case 3, 4, 5:
				w.submit()
			case 6, 7, 8, 9:
				w.network()
			case 10, 11, 12, 13:
				w.transfer()
			case 14:
				if w.reqs > 0 {
					r := w.some()
					if !w.Oracle.Over(r) && w.Oracle.Tokens(r) > 0 {
						w.ToD(&sched.StopAt{Req: r, Index: w.IntN(w.Oracle.Tokens(r))})
					}
				}
			case 15:
				if l, ok := pick(w, w.links); ok && w.IntN(4) == 0 {
					w.ToD(&sched.LinkEnded{Link: l, Cause: "reset"})
				}
			default:
				w.engine()
			}
			if w.IntN(3) > 0 {
				if err := w.Turn(); err != nil {
					return err
				}
			}
		}
		return w.settle(w.network, w.network, w.transfer, w.transfer, w.engine)
	})
}

// decoder is the other side of a prefill core: it opens rooms and takes pages.
func (w *walk) decoder() {
	key := sched.GrantKey{Peer: 1, Grant: w.grants + 1}
	r := w.some()
	switch n := w.IntN(12); {
	case n < 5 || !w.trouble:
		w.grants++
		tokens := w.prompts[r]
		if w.trouble && w.IntN(10) == 0 {
			tokens++
		}
		w.keys = append(w.keys, key)
		w.ToP(&sched.RoomGranted{Key: key, Room: int64(r), Tokens: tokens})
	case n < 6:
		w.ToP(&sched.RoomGranted{Key: sched.GrantKey{Peer: 2, Grant: 1}, Room: int64(r), Tokens: w.prompts[r]})
	case n < 7:
		if k, ok := pick(w, w.keys); ok {
			w.ToP(&sched.RoomClosed{Key: k, Room: int64(r), Cause: gone})
		}
	case n < 8:
		w.ToP(&sched.RoomClosed{Room: int64(r), Cause: gone})
	case n < 9: // a preempted answer comes back
		w.reqs++
		w.grants++
		key.Grant = w.grants
		p := w.prompt()
		w.prompts[w.reqs] = len(p)
		w.keys = append(w.keys, key)
		w.ToP(&sched.SubmitPrefill{Req: w.reqs, Prompt: p, Room: int64(r), Index: 1 + w.IntN(3), MaxHit: len(p), Deadline: w.deadline(), Grant: key})
		if w.IntN(5) > 0 {
			w.ToP(&sched.RoomGranted{Key: key, Room: int64(r), Tokens: len(p)})
		}
	}
}

// sender moves one send on.
func (w *walk) sender() {
	if r, ok := pick(w, append(w.Oracle.Sends(true, true), w.Oracle.Sends(false, true)...)); ok && w.IntN(2) == 0 {
		w.ToP(&sched.SendQuiesced{Req: r})
	} else if r, ok := pick(w, w.Oracle.Sends(true, false)); ok {
		if w.trouble && w.IntN(8) == 0 {
			w.ToP(&sched.SendFailed{Req: r, Cause: gone})
		} else if w.Oracle.First(r) {
			w.ToP(&sched.Received{Req: r})
		}
	}
}

func TestWalkPrefill(t *testing.T) {
	walks(t, func(w *walk) error {
		w.Env = schedtest.NewPrefill(w.prefillConfig(), w.pool())
		w.prompts = map[sched.ReqID]int{}
		for range *walkSteps {
			switch n := w.IntN(16); n {
			case 0, 1, 2:
				w.always(n)
			case 3, 4, 5:
				w.reqs++
				p := w.prompt()
				w.prompts[w.reqs] = len(p)
				w.ToP(&sched.SubmitPrefill{Req: w.reqs, Prompt: p, Room: int64(w.reqs), MaxHit: w.IntN(len(p) + 1), Deadline: w.deadline()})
			case 6, 7, 8, 9:
				if w.reqs > 0 {
					w.decoder()
				}
			case 10, 11, 12:
				w.sender()
			default:
				w.engine()
			}
			if w.IntN(3) > 0 {
				if err := w.Turn(); err != nil {
					return err
				}
			}
		}
		return w.settle(w.decoder, w.sender, w.sender, w.engine)
	})
}

func TestWalkServe(t *testing.T) {
	walks(t, func(w *walk) error {
		d, p := w.decodeConfig(), w.prefillConfig()
		d.PrefixCache = p.PrefixCache
		w.Env = schedtest.NewServe(d, p, w.pool())
		for range *walkSteps {
			switch n := w.IntN(12); n {
			case 0, 1, 2:
				w.always(n)
			case 3, 4, 5:
				w.submit()
			case 6:
				if w.reqs > 0 {
					r := w.some()
					if !w.Oracle.Over(r) && w.Oracle.Tokens(r) > 0 {
						w.Both(&sched.StopAt{Req: r, Index: w.IntN(w.Oracle.Tokens(r))})
					}
				}
			default:
				w.engine()
			}
			if w.IntN(3) > 0 {
				if err := w.Turn(); err != nil {
					return err
				}
			}
		}
		return w.settle(w.engine)
	})
}
