package sched_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/sched/schedtest"
)

// steady is a decode core with n sequences running and a batch outstanding.
func steady(tb testing.TB, n, room int) (*schedtest.Env, *sched.BatchDone) {
	const size = 16
	e := schedtest.NewDecode(sched.DecodeConfig{MaxRunning: n, Context: 1 << 30, PrefixCache: true, KVTimeout: time.Hour},
		kv.NewPool(n*(room/size+1), size, 1))
	for i := range n {
		req := sched.ReqID(i + 1)
		e.Submit(sched.Submit{Req: req, Prompt: []int32{int32(req)}, MaxTokens: room - 1, StopIDs: []int32{-7, -8},
			Addr: "p:1", Room: int64(req), DPRank: -1, Deadline: time.Hour})
	}
	must(tb, e.Turn())
	for _, g := range e.Oracle.Grants(false) {
		e.ToD(&sched.PagesLanded{Grant: g, First: 1})
	}
	must(tb, e.Turn())
	if e.DBatch == nil {
		tb.Fatal("no batch runs")
	}
	must(tb, func() error { e.ToD(schedtest.Done(e.DBatch)); return e.Turn() }())
	if len(e.DBatch.Rows) != n {
		tb.Fatalf("%d run, want %d", len(e.DBatch.Rows), n)
	}
	return e, schedtest.Done(e.DBatch)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// beat is what the loop does for one batch: take its tokens, start the next.
func beat(e *schedtest.Env, done *sched.BatchDone, tick *sched.Tick) *sched.DecodeReady {
	e.Now += time.Microsecond
	e.D.Step(e.Now, done)
	e.D.Step(e.Now, tick)
	r := e.D.Ready()
	done.Batch = r.Batch.ID
	return r
}

// BenchmarkBeat is the core's part of one batch with 64 sequences: some 50 ns a
// token, which is the few cache lines of its record, row and emit. A page is
// taken with every 16th.
func BenchmarkBeat(b *testing.B) {
	const room = 1 << 16
	e, done := steady(b, 64, room)
	tick := &sched.Tick{}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%(room-100) == room-101 {
			b.StopTimer()
			e, done = steady(b, 64, room)
			b.StartTimer()
		}
		beat(e, done, tick)
	}
}

// BenchmarkTurn is a turn of the loop while a batch runs and nobody is unknown.
func BenchmarkTurn(b *testing.B) {
	e, _ := steady(b, 64, 4096)
	tick := &sched.Tick{}
	b.ReportAllocs()
	for b.Loop() {
		e.Now += time.Microsecond
		e.D.Step(e.Now, tick)
		e.D.Ready()
	}
}

// hung is a decode core whose requests wait for peers that never answer.
func hung(tb testing.TB, requests, addrs int) *schedtest.Env {
	e := schedtest.NewDecode(sched.DecodeConfig{}, kv.NewPool(64, 16, 1))
	e.Answer = func(sched.PeerAction) *sched.PeerDone { return nil }
	for i := range requests {
		e.Submit(sched.Submit{Req: sched.ReqID(i + 1), Prompt: []int32{1}, MaxTokens: 1, DPRank: -1,
			Addr: fmt.Sprintf("p%d:1", i%addrs), Room: int64(i), Deadline: time.Duration(i+1) * time.Hour})
	}
	must(tb, e.Turn())
	if n := e.D.Len(sched.Pending); n != requests {
		tb.Fatalf("%d wait, want %d", n, requests)
	}
	return e
}

// BenchmarkTurnHung is the same turn while 4,096 requests wait for 1,000
// addresses that hang: it does not look at them.
func BenchmarkTurnHung(b *testing.B) {
	e := hung(b, 4096, 1000)
	tick := &sched.Tick{}
	b.ReportAllocs()
	for b.Loop() {
		e.Now += time.Microsecond
		e.D.Step(e.Now, tick)
		e.D.Ready()
	}
}

// BenchmarkAdmit is a request with an 8,192-token prompt that D holds already:
// Submit, grant, landing, end.
func BenchmarkAdmit(b *testing.B) {
	e := schedtest.NewDecode(sched.DecodeConfig{Context: 1 << 14, PrefixCache: true}, kv.NewPool(1024, 16, 1))
	prompt := make([]int32, 8192)
	for i := range prompt {
		prompt[i] = int32(i * 7)
	}
	s := sched.Submit{Prompt: prompt, MaxTokens: 1, Addr: "p:1", DPRank: -1, Deadline: sched.Never}
	s.Req = 1
	e.Submit(s)
	must(b, e.Turn())
	e.ToD(&sched.PagesLanded{Grant: 1, First: 1})
	must(b, e.Turn())
	b.ReportAllocs()
	for b.Loop() {
		s.Req++
		e.D.Step(e.Now, &s)
		r := e.D.Ready()
		e.D.Step(e.Now, &sched.PagesLanded{Grant: r.Grants[0].Grant, First: 1})
		e.D.Ready()
	}
}
