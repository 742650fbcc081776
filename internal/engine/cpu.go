package engine

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
)

// CPU computes models of the Llama family on the processor's cores. All its memory is taken
// by New: a batch allocates nothing.
type CPU struct {
	w      *Weights
	cfg    Config
	geo    kv.Geometry
	dtype  kernels.Type // of K and V rows
	print  string
	arenas []*arena
	rope   *kernels.RopeTable
	crew   *crew
	locals []*local
	phases phases

	mu     sync.Mutex // held by Run
	closed atomic.Bool

	// The batch of the current Run. Token t is one vector of every buffer.
	batch  *Batch
	tokens []place
	x      []float32 // residual stream, dim values a token
	delta  []float32 // what the last product adds to it
	q      []float32
	k, v   []float32
	gate   []float32
	up     []float32
	norm   *kernels.Input // normed x, for q, k, v, gate and up
	att    *kernels.Input // attention's result
	ff     *kernels.Input // SwiGLU's result
	layer  int
	block  *block
	spans  []span
	folds  []fold
	states []kernels.State // of the blocks of split attention, a token's heads each
	parts  []float32       // and their results

	head   *kernels.Input // final norm of the tokens whose logits are wanted
	wanted []wanted
	logits []float32
	part   []wanted // what of wanted is in head now
	failed []error  // per entry of part

	job job
}

// place says which token of the batch it is.
type place struct {
	row *Row
	at  int // index into row.Tokens
}

// wanted is a token whose logits are needed: to draw, or to score a target.
type wanted struct {
	token, row int
	target     int // -1: none
	draw       bool
}

const (
	headTile = 32 // tokens that share one pass over the output matrix
)

// local is the memory of one thread.
type local struct {
	mul       *kernels.Scratch
	attention *kernels.Attention
	runs      []kernels.Run // K and V of the block
	q, out    []float32     // a span's queries, and what attention makes of them
	states    []kernels.State
	seen      []int // positions of the block that each query sees
	sampler   *sampler
}

// phases are the engine's tile functions, bound once: a closure for each call
// would be an allocation.
type phases struct{ enter, mul, place, attend, fold, leave, middle, swiglu, use func(tile, worker int) }

// New makes an engine over shared weights: KV memory for cfg.Pages pages, all
// scratch, and its threads. A TP that does not divide the KV heads, a dtype
// without arithmetic, sizes out of range, or a model whose file is cut short
// while it is hashed are errors.
func New(w *Weights, cfg Config) (e *CPU, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if memoryGone(recover(), w.mapped) {
			e, err = nil, ErrModelGone
		}
	}()
	h := &w.hyper
	if err := cfg.check(h.KVHeads, h.Context); err != nil {
		return nil, err
	}
	tokenBytes, err := KVTokenBytes(cfg.KVDType, h.HeadDim)
	if err != nil {
		return nil, err
	}
	if cfg.Threads == 0 {
		cfg.Threads = Cores
	}
	e = &CPU{w: w, cfg: cfg, dtype: dtypes[cfg.KVDType]}
	e.geo = kv.Geometry{Layers: h.Layers, Heads: h.KVHeads, TokenBytes: tokenBytes, PageSize: cfg.PageSize}
	if e.arenas, err = newArenas(e.geo, cfg.Pages, cfg.TP); err != nil {
		return nil, err
	}
	e.print = fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "cpu %s precision=%s kv=%dx%dx%d,%s context=%d revision=%d",
		w.print(), cfg.Precision, e.geo.Layers, e.geo.Heads, e.geo.TokenBytes, cfg.KVDType, cfg.Context, Revision)))
	freqs, magnitude := rotation(&h.Rope, w.ropeFactors)
	e.rope = kernels.NewRopeTable(cfg.Context, freqs, magnitude, h.Rope.Halves)
	e.allocate()
	e.phases = phases{e.enterTile, e.mulTile, e.placeTile, e.attendTile, e.foldTile, e.leaveTile, e.middleTile, e.swigluTile, e.useTile}
	e.crew = newCrew(cfg.Threads)
	e.crew.mapped = w.mapped
	return e, nil
}

func (e *CPU) allocate() {
	h, n := &e.w.hyper, e.cfg.MaxBatchTokens
	heads := h.Heads * h.HeadDim
	var in, o, ff []kernels.Type
	for i := range e.w.blocks {
		b := &e.w.blocks[i]
		in = append(in, b.q.Type, b.k.Type, b.v.Type, b.gate.Type, b.up.Type)
		o, ff = append(o, b.attnOut.Type), append(ff, b.down.Type)
	}
	float := e.cfg.Precision == "f32"
	e.norm, e.att = kernels.NewInput(n, h.Dim, float, in...), kernels.NewInput(n, heads, float, o...)
	e.ff = kernels.NewInput(n, h.FF, float, ff...)
	e.head = kernels.NewInput(headTile, h.Dim, float, e.w.output.Type)
	e.tokens, e.spans = make([]place, 0, n), make([]span, 0, n*h.KVHeads+2*tilesEach*e.cfg.Threads)
	blocks := (e.cfg.Context + kernels.Span - 1) / kernels.Span * h.KVHeads // one sequence's, at most
	e.folds, e.states = make([]fold, 0, tilesEach*e.cfg.Threads), make([]kernels.State, blocks*h.Heads/h.KVHeads)
	e.parts = make([]float32, len(e.states)*h.HeadDim)
	e.x, e.delta = make([]float32, n*h.Dim), make([]float32, n*h.Dim)
	e.q, e.k, e.v = make([]float32, n*heads), make([]float32, n*h.KVHeads*h.HeadDim), make([]float32, n*h.KVHeads*h.HeadDim)
	e.gate, e.up = make([]float32, n*h.FF), make([]float32, n*h.FF)
	e.wanted = make([]wanted, 0, n)
	e.logits, e.failed = make([]float32, headTile*h.Vocab), make([]error, headTile)
	for range e.cfg.Threads {
		e.locals = append(e.locals, &local{
			mul:       kernels.NewScratch(max(h.Dim, heads, h.FF)),
			attention: kernels.NewAttention(h.HeadDim), runs: make([]kernels.Run, 0, kernels.Span),
			q:       make([]float32, queryTile*h.Heads/h.KVHeads*h.HeadDim),
			out:     make([]float32, queryTile*h.Heads/h.KVHeads*h.HeadDim),
			states:  make([]kernels.State, queryTile*h.Heads/h.KVHeads),
			seen:    make([]int, 0, queryTile*h.Heads/h.KVHeads),
			sampler: newSampler(h.Vocab),
		})
	}
}

func (e *CPU) Geometry() kv.Geometry  { return e.geo }
func (e *CPU) Fingerprint() string    { return e.print }
func (e *CPU) Memory(rank int) Memory { return e.arenas[rank] }
func (e *CPU) Vocab() int             { return e.w.hyper.Vocab }
func (e *CPU) MaxBatchTokens() int    { return e.cfg.MaxBatchTokens }

// Close ends the threads. A Run in progress ends before its next layer.
func (e *CPU) Close() {
	if e.closed.Swap(true) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.crew.close()
}

// ErrModelGone is what a file that is cut short does: the weights are mapped,
// and what is no longer there cannot be read. No later batch can be computed.
var ErrModelGone = errors.New("the model cannot be read any more: its file was cut short while in use; start the worker anew, and replace a model by renaming a new file over it")

// memoryGone says whether a panic is a page of a mapped file that is gone. All
// other panics go on.
func memoryGone(p any, mapped func(addr uintptr) bool) bool {
	if p == nil || p == ErrModelGone {
		return p != nil
	}
	if fault, ok := p.(interface{ Addr() uintptr }); !ok || mapped == nil || !mapped(fault.Addr()) {
		panic(p)
	}
	return true
}

// Run computes a batch; an empty one is no work. Errors are a batch that is too
// large, ErrClosed, or a model whose file is gone from under it.
func (e *CPU) Run(b *Batch) (err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if memoryGone(recover(), e.w.mapped) {
			err = ErrModelGone
		}
	}()
	if err := checkBatch(b, &e.cfg, e.w.hyper.Vocab); err != nil {
		return err
	}
	e.batch = b
	e.begin()
	n := len(e.tokens)
	if n == 0 {
		return nil
	}
	e.crew.begin()
	defer e.crew.end()
	for l := range e.w.blocks {
		if e.closed.Load() {
			return ErrClosed
		}
		w := &e.w.blocks[l]
		e.layer, e.block = l, w
		e.each(n, e.phases.enter)
		e.mul(e.norm, product{&w.q, e.q}, product{&w.k, e.k}, product{&w.v, e.v})
		e.each(n, e.phases.place)
		if b.LayerDone != nil {
			b.LayerDone(l)
		}
		e.crew.run(len(e.spans), e.phases.attend)
		e.crew.run(len(e.folds), e.phases.fold)
		e.each(n, e.phases.leave)
		e.mul(e.att, product{&w.attnOut, e.delta})
		e.each(n, e.phases.middle)
		e.mul(e.norm, product{&w.gate, e.gate}, product{&w.up, e.up})
		e.each(n, e.phases.swiglu)
		e.mul(e.ff, product{&w.down, e.delta})
	}
	return e.finish()
}

// begin lists the tokens of the batch, the tiles of its attention, and the
// tokens whose logits are wanted.
func (e *CPU) begin() {
	e.tokens, e.spans, e.wanted = e.tokens[:0], e.spans[:0], e.wanted[:0]
	for i := range e.batch.Rows {
		r := &e.batch.Rows[i]
		if r.Err != nil {
			continue
		}
		first := len(e.tokens)
		for j := range r.Tokens {
			e.tokens = append(e.tokens, place{r, j})
			w := wanted{token: first + j, row: i, target: -1, draw: r.Sample != nil && j == len(r.Tokens)-1}
			if r.Targets != nil && r.Targets[j] >= 0 {
				w.target = int(r.Targets[j])
			}
			if w.draw || w.target >= 0 {
				e.wanted = append(e.wanted, w)
			}
		}
		// The last tokens attend to most positions: they go first, so that
		// what is left at the end of the phase is small.
		for end := len(r.Tokens); end > 0; end -= queryTile {
			j := max(0, end-queryTile)
			for head := range e.geo.Heads {
				e.spans = append(e.spans, span{first + j, end - j, head, 0, r.Start + end, -1})
			}
		}
	}
	e.split()
	n := len(e.tokens)
	e.norm.N, e.att.N, e.ff.N = n, n, n
}

// each calls a phase for groups of kernels.Group tokens, as Input.Prepare wants them.
func (e *CPU) each(n int, phase func(tile, worker int)) {
	e.crew.run((n+kernels.Group-1)/kernels.Group, phase)
}

func (e *CPU) some(tile int) (t0, t1 int) {
	return tile * kernels.Group, min((tile+1)*kernels.Group, len(e.tokens))
}

// of is token t's part of a buffer.
func (e *CPU) of(buf []float32, t int) []float32 {
	n := len(buf) / e.cfg.MaxBatchTokens
	return buf[t*n : (t+1)*n : (t+1)*n]
}

// enterTile takes in the block before (or the embedding), and norms for this one.
func (e *CPU) enterTile(tile, _ int) {
	t0, t1 := e.some(tile)
	for t := t0; t < t1; t++ {
		x := e.of(e.x, t)
		if k := e.tokens[t]; e.layer == 0 {
			e.w.embed.Row(x, int(k.row.Tokens[k.at]))
		} else {
			kernels.Add(x, e.of(e.delta, t))
		}
		kernels.RMSNorm(e.norm.Row(t), x, e.block.attnNorm, e.w.hyper.Eps)
	}
	e.norm.Prepare(t0, t1)
}

// placeTile takes q, k and v from the products: it adds their biases, norms and
// rotates q and k, and writes K and V to their pages, rounded to the KV dtype.
// Attention reads them from there, those of this batch too.
func (e *CPU) placeTile(tile, _ int) {
	t0, t1 := e.some(tile)
	dim := e.w.hyper.HeadDim
	row := e.dtype.RowBytes(dim)
	for t := t0; t < t1; t++ {
		k := e.tokens[t]
		pos := k.row.Start + k.at
		page, slot := k.row.Pages[pos/e.cfg.PageSize], pos%e.cfg.PageSize
		queries, keys, values := e.of(e.q, t), e.of(e.k, t), e.of(e.v, t)
		if e.w.hyper.Bias {
			kernels.Add(queries, e.block.qBias)
			kernels.Add(keys, e.block.kBias)
			kernels.Add(values, e.block.vBias)
		}
		e.turn(queries, e.block.qNorm, pos)
		e.turn(keys, e.block.kNorm, pos)
		for h := range e.geo.Heads {
			to := e.extent(page, h)
			e.dtype.Put(to[slot*row:], keys[h*dim:][:dim])
			e.dtype.Put(to[(e.cfg.PageSize+slot)*row:], values[h*dim:][:dim])
		}
	}
}

// turn norms each head where the model has a norm for it, and rotates it.
func (e *CPU) turn(heads, norm []float32, pos int) {
	for dim := e.w.hyper.HeadDim; len(heads) > 0; heads = heads[dim:] {
		if head := heads[:dim]; norm != nil {
			kernels.RMSNorm(head, head, norm, e.w.hyper.Eps)
		}
		e.rope.Apply(heads[:dim], pos)
	}
}

// extent is the bytes of one KV head, numbered over the whole model, of a page
// in the current layer.
func (e *CPU) extent(page kv.Page, head int) []byte {
	n := e.geo.Heads / e.cfg.TP
	return e.arenas[head/n].Extent(e.layer, page, head%n, 1)
}

func (e *CPU) leaveTile(tile, _ int) { e.att.Prepare(e.some(tile)) }

// middleTile takes in attention, and norms for the feed-forward part.
func (e *CPU) middleTile(tile, _ int) {
	t0, t1 := e.some(tile)
	for t := t0; t < t1; t++ {
		x := e.of(e.x, t)
		kernels.Add(x, e.of(e.delta, t))
		kernels.RMSNorm(e.norm.Row(t), x, e.block.ffnNorm, e.w.hyper.Eps)
	}
	e.norm.Prepare(t0, t1)
}

func (e *CPU) swigluTile(tile, _ int) {
	t0, t1 := e.some(tile)
	for t := t0; t < t1; t++ {
		kernels.SwiGLU(e.ff.Row(t), e.of(e.gate, t), e.of(e.up, t))
	}
	e.ff.Prepare(t0, t1)
}

// finish computes the wanted logits, some tokens at a time, and uses them.
func (e *CPU) finish() error {
	for rest := e.wanted; len(rest) > 0; rest = rest[len(e.part):] {
		if e.closed.Load() {
			return ErrClosed
		}
		e.part = rest[:min(headTile, len(rest))]
		e.head.N = len(e.part)
		for i, w := range e.part {
			x := e.head.Row(i)
			copy(x, e.of(e.x, w.token))
			kernels.Add(x, e.of(e.delta, w.token))
			kernels.RMSNorm(x, x, e.w.norm, e.w.hyper.Eps)
		}
		e.head.Prepare(0, len(e.part))
		e.mul(e.head, product{&e.w.output, e.logits})
		e.crew.run(len(e.part), e.phases.use)
		for i, err := range e.failed[:len(e.part)] {
			if err != nil {
				e.batch.Rows[e.part[i].row].Err = err
			}
		}
	}
	return nil
}

// useTile scores a target or draws a token, or both.
func (e *CPU) useTile(i, worker int) {
	w := e.part[i]
	logits := e.logits[i*e.Vocab():][:e.Vocab()]
	r := &e.batch.Rows[w.row]
	e.failed[i] = finite(logits)
	if e.failed[i] == nil && w.target >= 0 {
		at, norm := e.tokens[w.token].at, e.locals[worker].sampler.logNorm(logits)
		r.Scores[at] = logprob(logits, int32(w.target), norm)
		if r.Top > 0 {
			r.Tops[at] = appendTop(r.Tops[at][:0], logits, r.Top, norm)
		}
	}
	if e.failed[i] == nil && w.draw {
		e.locals[worker].sampler.draw(logits, r)
	}
}
