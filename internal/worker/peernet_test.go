package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// town is a registry for every address: those that begin with "hung" accept
// and never answer, "dead" ones refuse, the others answer after 1 ms.
type town struct {
	mu     sync.Mutex
	asked  map[string]int
	flying int
	starts []time.Time
}

func (r *town) ask(ctx context.Context, addr string) error {
	r.mu.Lock()
	r.asked[addr]++
	r.flying++
	r.starts = append(r.starts, time.Now())
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.flying--
		r.mu.Unlock()
	}()
	switch {
	case strings.HasPrefix(addr, "hung"):
		<-ctx.Done()
		return fmt.Errorf("get %s: %w", addr, context.Cause(ctx))
	case strings.HasPrefix(addr, "dead"):
		return fmt.Errorf("dial %s: %w", addr, syscall.ECONNREFUSED)
	}
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *town) times(addr string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked[addr]
}

func (r *town) FetchInfo(ctx context.Context, addr string) (bootstrap.Info, error) {
	return bootstrap.Info{TP: 2, CP: 1, DP: 1, PP: 1, PageSize: 16, Instance: "i-" + addr}, r.ask(ctx, addr)
}

func (r *town) LookupRank(ctx context.Context, addr string, dp, cp, tp, pp int) (string, error) {
	return fmt.Sprintf("10.0.0.%d:1", tp), r.ask(ctx, addr)
}

func (r *town) QueryRanks(ctx context.Context, addr string, rooms []int64) (map[int64]int, error) {
	m := map[int64]int{}
	for _, room := range rooms {
		m[room] = int(room % 2)
	}
	return m, r.ask(ctx, addr)
}

func (r *town) Health(ctx context.Context, addr string) (string, error) {
	return "i-" + addr, r.ask(ctx, addr)
}

// listener is a loop as peernet sees it: it notes what it is told, and when.
type listener struct {
	mu    sync.Mutex
	done  []*sched.PeerDone
	at    []time.Time
	links func(ctx context.Context, s transfer.LinkSpec) (transfer.Welcome, error)
}

func (l *listener) tell(m any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, m.(*sched.PeerDone))
	l.at = append(l.at, time.Now())
}

func (l *listener) dial(ctx context.Context, s transfer.LinkSpec) (transfer.Welcome, error) {
	return l.links(ctx, s)
}

func (l *listener) got() []*sched.PeerDone {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*sched.PeerDone(nil), l.done...)
}

func fetch(id uint64, addr string, first bool) sched.PeerAction {
	return sched.PeerAction{Kind: sched.FetchInfo, ID: id, Gen: 10 + id, Addr: addr, Timeout: 5 * time.Second, First: first}
}

// inTown runs f in a bubble with a peer network over a town.
func inTown(t *testing.T, f func(t *testing.T, n *peernet, r *town)) {
	synctest.Test(t, func(t *testing.T) {
		r := &town{asked: map[string]int{}}
		n := newPeernet(newClock(), r, slog.New(slog.NewTextHandler(io.Discard, nil)))
		go n.run()
		f(t, n, r)
		n.close()
		if r.flying != 0 {
			t.Errorf("%d tries outlive the peer network", r.flying)
		}
	})
}

// A thousand hung addresses cost a healthy one nothing: its fetch starts at
// once although all of theirs are in flight, and theirs end at their deadline.
func TestThousandHungAddresses(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, r *town) {
		var l listener
		asked := time.Now()
		for i := range uint64(1000) {
			n.do(&l, fetch(i+1, fmt.Sprintf("hung-%d:1", i), true))
		}
		time.Sleep(time.Second) // all of them are in flight
		synctest.Wait()
		if r.flying != 1000 {
			t.Fatalf("%d fetches in flight, want 1000", r.flying)
		}
		begin := time.Now()
		n.do(&l, fetch(2000, "good:1", true))
		time.Sleep(2 * time.Millisecond)
		if got := l.got(); len(got) != 1 || got[0].ID != 2000 || got[0].Fault != sched.OK || got[0].Info.Instance != "i-good:1" {
			t.Fatalf("the healthy address is not answered after %v: %+v", time.Since(begin), got)
		}
		time.Sleep(10 * time.Second)
		got := l.got()
		if len(got) != 1001 {
			t.Fatalf("%d completions, want 1001", len(got))
		}
		for i, d := range got[1:] {
			if took := l.at[i+1].Sub(asked); took != 5*time.Second {
				t.Fatalf("a hung address was given %v, want 5s from the question on", took)
			}
			if d.Fault != sched.PeerFault || d.Gen != 10+d.ID || !strings.Contains(d.Cause, "within 5s") {
				t.Fatalf("a hung address gave %+v", d)
			}
		}
	})
}

// Dials start at most 64 in 10 ms, and a first dial overtakes retries that
// wait for the pacer.
func TestFirstDialsGoBeforeRetries(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, r *town) {
		var l listener
		for i := range uint64(1000) {
			n.do(&l, fetch(i+1, fmt.Sprintf("hung-%d:1", i), false))
		}
		n.do(&l, fetch(2000, "good:1", true))
		time.Sleep(paceSpan + 2*time.Millisecond)
		if got := l.got(); len(got) != 1 || got[0].ID != 2000 {
			t.Fatalf("the first dial waits behind retries: %+v", got)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for i := paceDials; i < len(r.starts); i++ {
			if span := r.starts[i].Sub(r.starts[i-paceDials]); span < paceSpan {
				t.Fatalf("%d dials within %v", paceDials+1, span)
			}
		}
		if len(r.starts) != 1001 {
			t.Errorf("%d dials, want 1001", len(r.starts))
		}
	})
}

// The cores of all DP ranks share one fetch, each with its own id and generation.
func TestCoresShareAFetch(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, r *town) {
		ls := make([]listener, 4)
		for i := range ls {
			n.do(&ls[i], fetch(uint64(i+1), "good:1", true))
		}
		time.Sleep(2 * time.Millisecond)
		for i := range ls {
			got := ls[i].got()
			if len(got) != 1 || got[0].ID != uint64(i+1) || got[0].Gen != uint64(i+11) || got[0].Info == nil {
				t.Errorf("core %d got %+v", i, got)
			}
		}
		if r.times("good:1") != 1 {
			t.Errorf("%d fetches, want 1", r.times("good:1"))
		}
		n.do(&ls[0], fetch(9, "good:1", false)) // what has landed is not joined
		time.Sleep(2 * time.Millisecond)
		if got := ls[0].got(); len(got) != 2 || r.times("good:1") != 2 {
			t.Errorf("a second fetch gave %+v after %d fetches", got, r.times("good:1"))
		}
	})
}

// A core that leaves a shared fetch hears so at once; the others keep it, and
// what it asks next is a new question.
func TestLeavingASharedFetch(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, r *town) {
		var a, b listener
		n.do(&a, fetch(1, "hung:1", true))
		n.do(&b, fetch(1, "hung:1", true))
		time.Sleep(time.Second)
		n.do(&a, sched.PeerAction{Kind: sched.CancelTry, ID: 1, Addr: "hung:1"})
		if got := a.got(); len(got) != 1 || got[0].Fault != sched.LocalFault {
			t.Fatalf("a got %+v", got)
		}
		n.do(&a, fetch(2, "hung:1", false))
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if r.times("hung:1") != 2 {
			t.Errorf("%d fetches, want 2: what a core asks after it left must not be answered by the old try", r.times("hung:1"))
		}
		time.Sleep(4 * time.Second)
		if got := b.got(); len(got) != 1 || got[0].Fault != sched.PeerFault {
			t.Errorf("b got %+v, want its own deadline", got)
		}
		time.Sleep(2 * time.Second)
		if got := a.got(); len(got) != 2 || got[1].ID != 2 || got[1].Fault != sched.PeerFault {
			t.Errorf("a got %+v", got)
		}
	})
}

// The last one to leave ends the try; its completion comes when the try has
// ended, in flight or not yet started.
func TestCancel(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, r *town) {
		var l listener
		for i := range uint64(paceDials + 1) {
			n.do(&l, fetch(i+1, fmt.Sprintf("hung-%d:1", i), true))
		}
		synctest.Wait()
		if r.flying != paceDials {
			t.Fatalf("%d in flight, want %d", r.flying, paceDials)
		}
		n.do(&l, sched.PeerAction{Kind: sched.CancelTry, ID: 1})
		n.do(&l, sched.PeerAction{Kind: sched.CancelTry, ID: paceDials + 1})
		n.do(&l, sched.PeerAction{Kind: sched.CancelTry, ID: 1})    // again: nothing
		n.do(&l, sched.PeerAction{Kind: sched.CancelTry, ID: 4711}) // unknown: nothing
		got := l.got()
		if len(got) != 2 {
			t.Fatalf("got %+v", got)
		}
		for _, d := range got {
			if d.Fault != sched.LocalFault || (d.ID != 1 && d.ID != paceDials+1) {
				t.Errorf("got %+v", d)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if addr := fmt.Sprintf("hung-%d:1", paceDials); r.times(addr) != 0 {
			t.Error("a try that was cancelled before its start has started")
		}
	})
}

func TestTriesOfEachKind(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, _ *town) {
		var spec transfer.LinkSpec
		l := listener{links: func(_ context.Context, s transfer.LinkSpec) (transfer.Welcome, error) {
			spec = s
			return transfer.Welcome{Instance: "p1", TP: 2, DP: 1, PageSize: 16}, nil
		}}
		all := sched.PeerAction{Addr: "good:1", Timeout: time.Second, Rank: sched.RankKey{DP: 1, TP: 3}, Rooms: []int64{4, 5}, Link: 9, LocalTP: 1, Target: "h:2", Instance: "p1"}
		for id, kind := range []sched.PeerKind{sched.QueryRanks, sched.LookupRank, sched.DialLink, sched.ProbeHealth} {
			a := all
			a.Kind, a.ID = kind, uint64(id+1)
			n.do(&l, a)
			time.Sleep(2 * time.Millisecond)
		}
		got := l.got()
		if len(got) != 4 {
			t.Fatalf("%d completions, want 4", len(got))
		}
		if got[0].Ranks[5] != 1 || got[1].Target != "10.0.0.3:1" || got[2].Welcome.Instance != "p1" || got[2].Link != 9 || got[3].Instance != "i-good:1" {
			t.Errorf("got %+v", got)
		}
		if want := (transfer.LinkSpec{Link: 9, Addr: "h:2", LocalRank: 1, DP: 1, TP: 3, Instance: "p1"}); spec != want {
			t.Errorf("dialled %+v, want %+v", spec, want)
		}
	})
}

// Stopping ends hung tries at once, and those that wait for the pacer.
func TestStopIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &town{asked: map[string]int{}}
		n := newPeernet(newClock(), r, slog.New(slog.DiscardHandler))
		go n.run()
		var l listener
		for i := range uint64(200) {
			n.do(&l, fetch(i+1, fmt.Sprintf("hung-%d:1", i), true))
		}
		synctest.Wait()
		begin := time.Now()
		n.close()
		if d := time.Since(begin); d != 0 {
			t.Errorf("close took %v", d)
		}
		for _, d := range l.got() {
			if d.Fault != sched.LocalFault {
				t.Fatalf("got %+v", d)
			}
		}
		if len(l.got()) != 200 {
			t.Errorf("%d completions, want 200", len(l.got()))
		}
	})
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want sched.Fault
		has  string
	}{
		{"refused connection", fmt.Errorf("dial: %w", syscall.ECONNREFUSED), sched.PeerFault, "refused"},
		{"deadline", fmt.Errorf("get: %w", context.DeadlineExceeded), sched.PeerFault, "no complete answer within 5s"},
		{"our cancel", fmt.Errorf("get: %w", context.Canceled), sched.LocalFault, ""},
		{"no descriptor", fmt.Errorf("dial: %w", syscall.EMFILE), sched.LocalFault, ""},
		{"wrong token", &transfer.RefusedError{Code: transfer.RefuseUnauthorized, Text: "the token is wrong"}, sched.PeerFault, "token"},
		{"mismatch", &transfer.RefusedError{Code: transfer.RefuseMismatch, Text: "page size 16 and 32"}, sched.MismatchFault, "16 and 32"},
		{"replaced", &transfer.ReplacedError{Expected: "a", Welcome: transfer.Welcome{Instance: "b"}}, sched.MismatchFault, `"b"`},
		{"plain", errors.New("status 503"), sched.PeerFault, "status 503"},
	} {
		d := failure(c.err, 5*time.Second)
		if d.Fault != c.want || !strings.Contains(d.Cause, c.has) {
			t.Errorf("%s: fault %d, cause %q; want %d, %q", c.name, d.Fault, d.Cause, c.want, c.has)
		}
		if c.name == "replaced" && d.Welcome.Instance != "b" {
			t.Errorf("a replacement does not name the new instance: %+v", d)
		}
	}
}

func TestLogLimit(t *testing.T) {
	var l logLimit
	shown := 0
	for i := range 1000 {
		if ok, _ := l.allow(time.Duration(i) * time.Millisecond); ok {
			shown++
		}
	}
	if shown != logEvents {
		t.Errorf("%d of 1000 lines in a second, want %d", shown, logEvents)
	}
	if ok, hidden := l.allow(time.Second); !ok || hidden != 1000-logEvents {
		t.Errorf("the next second says %v, %d hidden", ok, hidden)
	}
}

// A try of any kind that hangs ends at its own deadline, which its action names.
func TestHungTriesOfEachKind(t *testing.T) {
	inTown(t, func(t *testing.T, n *peernet, _ *town) {
		hang := func(ctx context.Context, _ transfer.LinkSpec) (transfer.Welcome, error) {
			<-ctx.Done()
			return transfer.Welcome{}, ctx.Err()
		}
		l := listener{links: hang}
		kinds := []sched.PeerKind{sched.FetchInfo, sched.QueryRanks, sched.LookupRank, sched.DialLink, sched.ProbeHealth}
		for i, kind := range kinds {
			n.do(&l, sched.PeerAction{Kind: kind, ID: uint64(i + 1), Addr: "hung-1:1", Timeout: 3 * time.Second, Rooms: []int64{1}})
		}
		time.Sleep(4 * time.Second)
		got := l.got()
		for i, d := range got {
			if d.Fault != sched.PeerFault || !strings.Contains(d.Cause, "within 3s") {
				t.Errorf("try %d of kind %d: %+v", i, d.Kind, d)
			}
		}
		if len(got) != len(kinds) {
			t.Errorf("%d of %d hung tries have ended", len(got), len(kinds))
		}
	})
}
