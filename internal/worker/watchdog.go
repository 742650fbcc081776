package worker

import (
	"bytes"
	"context"
	"log/slog"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"time"
)

// A turn of the loop has no reason to last longer: it does arithmetic on a few
// hundred requests. Tokens of everyone wait for it.
const overrunAfter = 10 * time.Millisecond

// clock is the time since the process (or the test's bubble) started.
type clock struct{ start time.Time }

func newClock() clock { return clock{time.Now()} }

func (c clock) now() time.Duration { return time.Since(c.start) }

// turnStamp is written by one loop and read by its watcher and by health
// checks. Cost of a turn: one clock reading and two atomic stores.
type turnStamp struct {
	began atomic.Int64 // start of the turn under way in ns, 0 between turns
	last  atomic.Int64 // start of the last turn
}

func (t *turnStamp) begin(now time.Duration) {
	t.last.Store(int64(now))
	t.began.Store(int64(now))
}

func (t *turnStamp) end() { t.began.Store(0) }

// watcher logs the stack of a loop that is stuck in a turn, once a minute at
// most. It sees turns of more than overrunAfter plus its own period; shorter
// overruns are only counted, by the loop itself at the end of the turn.
type watcher struct {
	clock clock
	log   *slog.Logger
	name  string // value of the loop's pprof label
	turn  *turnStamp
}

const (
	watchEvery = overrunAfter
	watchLog   = time.Minute
	loopLabel  = "metronome_loop"
)

// run watches until ctx ends. It reads one atomic in each period.
func (w *watcher) run(ctx context.Context) {
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	logged := -watchLog
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		began := time.Duration(w.turn.began.Load())
		now := w.clock.now()
		if began == 0 || now-began < overrunAfter || now-logged < watchLog {
			continue
		}
		logged = now
		w.log.Error("the loop is stuck in a turn", "loop", w.name, "for", now-began, "stack", labelledStack(w.name))
	}
}

// labelledStack is the stack of the goroutine with the given loop label. A
// goroutine profile stops the world only to begin; runtime.Stack of all
// goroutines would stop it throughout.
func labelledStack(name string) string {
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 1); err != nil {
		return err.Error()
	}
	mark := `"` + loopLabel + `":"` + name + `"`
	for s := range strings.SplitSeq(b.String(), "\n\n") {
		if strings.Contains(s, mark) {
			return s
		}
	}
	return "not found"
}
