package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// walk is a random life of a Peers: requests come and go, tries end in every
// way and order, links live and die, time passes and stops. It checks from
// outside what the rules promise. Rapid prints the seed of a failure.
type walk struct {
	*rapid.T
	e        *peersEnv
	interval time.Duration
	phase    map[ReqID]VerdictKind // of live requests: 0 waiting, Linked; granted ones are in granted
	granted  map[ReqID]bool
	nextReq  ReqID
	began    map[string]time.Duration // last start of each key
	hurry    map[string]bool          // a link to this rank failed since its last lookup
	targets  map[string]string        // rank address → the generation and rank it was told for
}

func TestPeersRandomWalk(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &walk{
			T: t, interval: time.Second,
			phase: map[ReqID]VerdictKind{}, granted: map[ReqID]bool{},
			began: map[string]time.Duration{}, hurry: map[string]bool{}, targets: map[string]string{},
		}
		w.e = newPeersEnv(PeersConfig{
			Reject: true, Attempts: rapid.IntRange(1, 4).Draw(t, "attempts"), Interval: w.interval,
			ResolveTimeout: 20 * time.Second, MaxPerAddr: 4, MaxUnresolved: 10, MaxRecords: 4, IdleTTL: 30 * time.Second,
			Seed: rapid.Uint64().Draw(t, "seed"), Local: ParallelInfo{TP: rapid.SampledFrom([]int{1, 2}).Draw(t, "tp"), PageSize: 16},
		})
		w.e.watch, w.e.comes, w.e.judge = w.watch, w.comes, w.judge
		defer func() {
			if t.Failed() {
				t.Log(w.e.out.String())
			}
		}()
		for range rapid.IntRange(1, 150).Draw(t, "turns") {
			w.turn()
			w.e.check(t)
			w.budgets()
		}
		w.settle()
	})
}

func (w *walk) turn() {
	e := w.e
	switch rapid.IntRange(0, 11).Draw(w.T, "what") {
	case 0, 1, 2:
		w.nextReq++
		want := Want{Req: w.nextReq, Addr: fmt.Sprintf("p%d", rapid.IntRange(1, 5).Draw(w.T, "addr")), Room: int64(w.nextReq), DPRank: rapid.IntRange(-1, 1).Draw(w.T, "dp")}
		w.phase[want.Req] = 0
		if err := e.p.Want(e.now, want); err != nil {
			delete(w.phase, want.Req)
		}
	case 3:
		if req, ok := pick(w.T, w.live()); ok {
			e.p.Forget(e.now, req)
			delete(w.phase, req)
			delete(w.granted, req)
		}
	case 4:
		for _, req := range w.live() {
			if w.phase[req] == Linked && !w.granted[req] {
				e.p.Granted(e.now, req)
				w.granted[req] = true
				break
			}
		}
	case 5:
		for _, req := range w.live() {
			if w.granted[req] {
				e.p.Landed(e.now, req)
				delete(w.phase, req)
				delete(w.granted, req)
				break
			}
		}
	case 6:
		if l, ok := pick(w.T, sortedKeys(e.links)); ok {
			if rapid.Bool().Draw(w.T, "ends") {
				w.linkEnds(l)
			} else {
				e.p.Step(e.now, &LinkHeard{Link: l})
			}
		}
	case 7, 8, 9:
		for range rapid.IntRange(1, 4).Draw(w.T, "answers") {
			w.answer()
		}
	case 10:
		e.now += time.Duration(rapid.IntRange(1, 3000).Draw(w.T, "ms")) * time.Millisecond
	case 11:
		by := time.Duration(rapid.IntRange(1, 30).Draw(w.T, "late")) * time.Second
		e.now += by
		e.p.Late(e.now, by)
	}
	e.drain()
	e.endTurn()
}

func (w *walk) linkEnds(l LinkID) {
	for _, pr := range w.e.p.all {
		for _, s := range pr.sets {
			for _, pa := range s.pairs {
				if pa.link == l {
					w.hurry[rankName(pr.addr, pr.gen, pa.rank.key)] = true
				}
			}
		}
	}
	delete(w.e.links, l)
	w.e.p.Step(w.e.now, &LinkEnded{Link: l, Cause: "reset"})
}

// answer ends one open try in some way.
func (w *walk) answer() {
	e := w.e
	id, ok := pick(w.T, sortedKeys(e.open))
	if !ok {
		return
	}
	a := e.open[id].a
	words := []string{rapid.SampledFrom([]string{"ok", "ok", "ok", "refuse", "local"}).Draw(w.T, "how")}
	if words[0] == "ok" {
		if i := rapid.IntRange(0, 4).Draw(w.T, "instance"); i > 0 {
			words = append(words, fmt.Sprintf("instance=i%d", i))
		}
		switch a.Kind {
		case FetchInfo:
			words = append(words, rapid.SampledFrom([]string{"dp=1", "dp=2", "dp=2", "tp=2", "tp=0", "page=64"}).Draw(w.T, "info"),
				rapid.SampledFrom([]string{"follow=true", "follow=false"}).Draw(w.T, "follow"))
		case QueryRanks:
			for _, r := range a.Rooms {
				if rapid.Bool().Draw(w.T, "known") {
					words = append(words, fmt.Sprintf("room=%d:%d", r, rapid.IntRange(0, 2).Draw(w.T, "rank")))
				}
			}
		case LookupRank:
			words = append(words, fmt.Sprintf("target=%s:%d", a.Addr, rapid.IntRange(1, 3).Draw(w.T, "port")))
		case DialLink:
			words = append(words, rapid.SampledFrom([]string{"tp=1", "tp=2", "page=16", "page=16", "page=64"}).Draw(w.T, "welcome"))
		}
	}
	_, d := parseDone(a, words)
	d.Kind, d.ID, d.Gen, d.Addr, d.Link = a.Kind, a.ID, a.Gen, a.Addr, a.Link
	pr := e.p.peers[a.Addr]
	stale := pr == nil || pr.gen != a.Gen
	var before string
	if stale && pr != nil {
		before = knowledge(pr)
	}
	if a.Kind == LookupRank && d.Fault == OK {
		w.targets[d.Target] = rankName(a.Addr, a.Gen, a.Rank)
	}
	e.deliver(d)
	if stale && pr != nil && e.p.peers[a.Addr] == pr {
		if after := knowledge(pr); after != before {
			w.Fatalf("a completion of generation %d changed\n%s to\n%s", a.Gen, before, after)
		}
	}
}

// knowledge is all that a completion could publish into a record.
func knowledge(pr *peer) string {
	s := fmt.Sprintf("%d %v %+v %v %s %v %d", pr.gen, pr.known, pr.facts, pr.bad, pr.instance, pr.dead, pr.beat.failures)
	for _, set := range pr.sets {
		for _, r := range set.ranks {
			s += " " + r.target
		}
		s += fmt.Sprint(set.ids)
	}
	return s
}

func rankName(addr string, gen uint64, k RankKey) string {
	return fmt.Sprintf("%s %d %v", addr, gen, k)
}

// comes sees every completion. That of a dial may be followed by a lookup at once.
func (w *walk) comes(a PeerAction) {
	if a.Kind == DialLink {
		w.hurry[rankName(a.Addr, a.Gen, a.Rank)] = true
	}
}

// watch sees every action: one in flight per key, paced, of the right generation.
func (w *walk) watch(a PeerAction) {
	e := w.e
	key, pace := "", time.Duration(0)
	switch a.Kind {
	case CancelTry, CloseLink:
		return
	case FetchInfo:
		key, pace = "info "+a.Addr, w.interval
	case QueryRanks:
		key, pace = "ranks "+a.Addr, firstAsk
	case ProbeHealth:
		key = "health " + a.Addr
	case LookupRank:
		r := rankName(a.Addr, a.Gen, a.Rank)
		key, pace = "lookup "+r, w.interval
		if w.hurry[r] {
			pace = 0
		}
		w.hurry[r] = false
	case DialLink:
		r := rankName(a.Addr, a.Gen, a.Rank)
		key, pace = fmt.Sprintf("dial %s from %d at %s", r, a.LocalTP, a.Target), w.interval
		if w.targets[a.Target] == "" {
			w.Fatalf("%s: nobody has told this address", describeAction(a))
		}
	}
	for _, id := range sortedKeys(e.open) {
		o := e.open[id].a
		if o.Kind == a.Kind && o.Addr == a.Addr && (a.Kind == FetchInfo || a.Kind == QueryRanks || a.Kind == ProbeHealth ||
			o.Gen == a.Gen && o.Rank == a.Rank && o.LocalTP == a.LocalTP) && e.p.tries[id] != nil {
			w.Fatalf("%s while #%d is in flight", describeAction(a), id)
		}
	}
	if last, ok := w.began[key]; ok && e.now-last < pace {
		w.Fatalf("%s: %v after the last one", describeAction(a), e.now-last)
	}
	w.began[key] = e.now
}

// judge sees every verdict: only about live requests, and in an order that makes sense.
func (w *walk) judge(v Verdict) {
	was, live := w.phase[v.Req]
	switch {
	case !live:
		w.Fatalf("verdict %d about request %d, which is over", v.Kind, v.Req)
	case v.Kind == Linked && (was == Linked || len(v.Links) == 0 || !slices.IsSorted(v.Links)):
		w.Fatalf("request %d linked with %v, it was %d", v.Req, v.Links, was)
	case v.Kind == Unlinked && (was != Linked || w.granted[v.Req]):
		w.Fatalf("request %d unlinked, it was %d, granted %v", v.Req, was, w.granted[v.Req])
	case v.Kind == Lost && (v.Err == nil || v.Err.Message == "" || v.Err.Code == ""):
		w.Fatalf("request %d lost without a cause", v.Req)
	}
	switch v.Kind {
	case Linked:
		w.phase[v.Req] = Linked
	case Unlinked:
		w.phase[v.Req] = 0
	case Lost:
		delete(w.phase, v.Req)
		delete(w.granted, v.Req)
	}
}

func (w *walk) budgets() {
	n := w.e.p.cfg.Attempts
	for _, pr := range w.e.p.all {
		if pr.info.spent > n || pr.query.spent > n || pr.info.spent < 0 || pr.query.spent < 0 {
			w.Fatalf("%s: %d and %d attempts spent of %d", pr.addr, pr.info.spent, pr.query.spent, n)
		}
		for _, s := range pr.sets {
			for _, r := range s.ranks {
				if r.spent > n || r.spent < 0 {
					w.Fatalf("%s %v: %d attempts spent of %d", pr.addr, r.key, r.spent, n)
				}
			}
			for _, pa := range s.pairs {
				if pa.spent > n || pa.spent < 0 {
					w.Fatalf("%s %v: %d attempts spent of %d", pr.addr, pa.rank.key, pa.spent, n)
				}
			}
		}
	}
}

// settle lets everything fail from here on: whoever is not granted must end in
// bounded time, and then nothing may be left in flight or waited for.
func (w *walk) settle() {
	e := w.e
	for _, kind := range []string{"info", "ranks", "lookup", "dial", "health"} {
		e.wire["* "+kind] = "hang"
	}
	for _, id := range sortedKeys(e.open) {
		if o := e.open[id]; e.p.tries[id] != nil {
			o.manual = false
			_, d := parseDone(o.a, []string{"hang"})
			e.reply(o.a, time.Duration(id)*time.Millisecond, d)
		}
	}
	cfg := &e.p.cfg
	limit := 2*cfg.HeartbeatInterval + 2*cfg.HeartbeatTimeout + 2*cfg.ResolveTimeout + time.Duration(w.nextReq)*time.Second
	e.runUntil(e.now + limit)
	for _, req := range w.live() {
		if !w.granted[req] {
			w.Fatalf("request %d has not ended within %v", req, limit)
		}
		e.p.Forget(e.now, req)
		delete(w.phase, req)
	}
	e.drain()
	e.runUntil(e.now + 2*cfg.IdleTTL + limit)
	if e.p.Deadline() != Never || len(e.p.all) != 0 || len(e.p.tries) != 0 || len(e.links) != 0 {
		w.Fatalf("something is left when everybody has gone:\n%s%d tries, %d links, next %v", e.p.Describe(), len(e.p.tries), len(e.links), e.p.Deadline())
	}
}

func (w *walk) live() []ReqID { return sortedKeys(w.phase) }

func pick[T any](t *rapid.T, from []T) (T, bool) {
	if len(from) == 0 {
		var zero T
		return zero, false
	}
	return rapid.SampledFrom(from).Draw(t, "pick"), true
}

func sortedKeys[K interface{ ~uint64 }, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
