package worker

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/sched"
)

// batcher runs batches on the engine, one at a time, on its own goroutine: the
// only one that the engine's Run is called from. A core has at most one batch
// outstanding and a loop at most two cores, so the queue cannot be full.
type batcher struct {
	eng   engine.Engine
	queue chan *pass
	out   *inbox
	idle  chan struct{} // closed when run has returned
	clock clock
	gone  func(error)  // told once the engine can compute nothing any more; does not wait
	alive atomic.Int64 // when the batch under way began or last finished a layer, in ns; 0: none is
}

// pass is a core's batch on its way through the engine and back. Each core has
// one, and its memory is reused: the loop fills it and sends it off, and owns
// it again when it comes back as a message.
type pass struct {
	core interface {
		Step(time.Duration, sched.Event)
	}
	batch engine.Batch
	rows  []sched.BatchRow // the core's, for LayerDone
	done  sched.BatchDone
	out   bool // it is with the engine; kept by the loop

	layered time.Duration // prefill: when its first layer was computed
}

func newBatcher(eng engine.Engine, out *inbox, c clock, gone func(error)) *batcher {
	return &batcher{eng: eng, queue: make(chan *pass, 2), out: out, idle: make(chan struct{}), clock: c, gone: gone}
}

// lives notes that the engine gets on. It runs on the engine's goroutine.
func (b *batcher) lives() { b.alive.Store(int64(max(1, b.clock.now()))) }

// stuck says that the engine has finished nothing for so long, though it has
// a batch. A long prompt is not that: its layers come one by one.
func (b *batcher) stuck(now, window time.Duration) bool {
	at := time.Duration(b.alive.Load())
	return at != 0 && now-at > window
}

// start sends a pass off. It never blocks.
func (b *batcher) start(p *pass) {
	p.out = true
	select {
	case b.queue <- p:
	default:
		panic("worker: a core started a batch while its last one is outstanding")
	}
}

// run serves until close.
func (b *batcher) run() {
	defer close(b.idle)
	for p := range b.queue {
		b.lives()
		if err := p.run(b.eng); errors.Is(err, engine.ErrModelGone) {
			b.gone(err)
		}
		b.alive.Store(0)
		b.out.push(p)
	}
}

// close ends run and the engine. Only the loop starts batches, so it must have
// returned. A batch under way is cut short.
func (b *batcher) close() {
	close(b.queue)
	b.eng.Close()
	<-b.idle
}

func (p *pass) run(eng engine.Engine) error {
	err := eng.Run(&p.batch)
	p.done.Err = engineFailed(err)
	p.done.Tokens, p.done.Errs = p.done.Tokens[:0], p.done.Errs[:0]
	for i := range p.batch.Rows {
		row, token := &p.batch.Rows[i], int32(-1)
		if row.Sample != nil && err == nil && row.Err == nil {
			token = row.Out.Token
		}
		p.done.Tokens = append(p.done.Tokens, token)
		p.done.Errs = append(p.done.Errs, engineFailed(row.Err))
	}
	return err
}

func engineFailed(err error) *sched.Error {
	if err == nil {
		return nil
	}
	return &sched.Error{Code: sched.Internal, Message: "the engine failed: " + err.Error()}
}

// load fills the pass with a core's batch.
func (p *pass) load(b *sched.Batch, open map[sched.ReqID]*request) {
	p.done.Batch = b.ID
	p.rows = b.Rows
	if n := len(b.Rows); n > cap(p.batch.Rows) {
		p.batch.Rows = append(p.batch.Rows[:cap(p.batch.Rows)], make([]engine.Row, n-cap(p.batch.Rows))...)
	} else {
		p.batch.Rows = p.batch.Rows[:n]
	}
	for i := range b.Rows {
		r, row := &b.Rows[i], &p.batch.Rows[i]
		top := row.Out.Top // the engine's to reuse
		*row = engine.Row{Tokens: r.Tokens, Start: r.Start, Pages: r.Pages}
		row.Out.Top = top
		q := open[r.Req]
		if r.Sample {
			row.Sample, row.Index, row.History = &q.sampling, q.said()+r.Index, q.history
		}
		if q.targets != nil && b.Prefill && q.emitted == 0 {
			end := r.Start + len(r.Tokens)
			row.Targets, row.Scores = q.targets[r.Start:end], q.scores[r.Start:end]
			if q.tops != nil {
				row.Top, row.Tops = q.job.ScoreTop, q.tops[r.Start:end]
			}
		}
	}
}
