package engine

import (
	"math"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
)

const (
	queryTile = 32               // tokens that share what is read of K and V
	spanLeast = 2 * kernels.Span // positions of a token's attention that a tile has at least
)

// span is one tile of attention: up to queryTile neighbouring tokens of a row
// and one KV head with all its query heads. It is over all positions that they
// see, or over some blocks of one token's, see split.
type span struct {
	first, n, head int
	from, to       int // positions
	part           int // where the first block's part is; -1: all positions are here
}

// fold is a token and head whose blocks are in the spans of several tiles.
type fold struct{ token, head, part, blocks int }

// split divides attention of few tokens over long contexts: tiles of some blocks
// each, which leave every block's part, and a fold of those in index order, as
// one tile would do it: the bits are the same.
func (e *CPU) split() {
	e.folds = e.folds[:0]
	whole, want := len(e.spans), tilesEach*e.cfg.Threads
	if whole >= want || e.cfg.Threads == 1 {
		return
	}
	pieces, used := (want+whole-1)/max(whole, 1), 0
	for i := range whole {
		s := &e.spans[i]
		blocks := (s.to + kernels.Span - 1) / kernels.Span
		step := max(spanLeast, (blocks+pieces-1)/pieces*kernels.Span)
		if s.n > 1 || s.to <= step || (used+blocks)*e.group() > len(e.states) {
			continue
		}
		end := s.to
		e.folds = append(e.folds, fold{s.first, s.head, used, blocks})
		s.part, s.to = used, step
		for from := step; from < end; from += step {
			e.spans = append(e.spans, span{s.first, 1, s.head, from, min(from+step, end), used + from/kernels.Span})
		}
		used += blocks
	}
}

// group is the number of query heads that share a KV head.
func (e *CPU) group() int { return e.w.hyper.Heads / e.w.hyper.KVHeads }

// attendTile is attention of one span: each block of positions is read once for
// all the span's queries, which are gathered for that, a token's heads first.
func (e *CPU) attendTile(tile, worker int) {
	s, l := e.spans[tile], e.locals[worker]
	dim, group := e.w.hyper.HeadDim, e.group()
	row, at := e.tokens[s.first].row, e.tokens[s.first].row.Start+e.tokens[s.first].at
	scale := 1 / float32(math.Sqrt(float64(dim)))
	n := group * dim // a token's heads in its vector
	for i := range s.n {
		copy(l.q[i*n:(i+1)*n], e.of(e.q, s.first+i)[s.head*n:])
	}
	states, out := l.states[:s.n*group], l.out[:s.n*n]
	for from := s.from; from < s.to; from += kernels.Span {
		e.gather(l, row.Pages, s.head, from, min(kernels.Span, s.to-from))
		i := max(0, from-at)
		seen := l.seen[:0]
		for t := i; t < s.n; t++ { // up to their own position
			for range group {
				seen = append(seen, min(at+t+1-from, kernels.Span))
			}
		}
		if s.part >= 0 {
			states, out = e.blockPart(s.part + (from-s.from)/kernels.Span)
		}
		l.attention.Block(e.dtype, states[i*group:], out[i*n:], l.q[i*n:s.n*n], l.runs, seen, scale, from == 0 || s.part >= 0)
	}
	if s.part >= 0 {
		return
	}
	for i := range s.n {
		e.attended(s.first+i, s.head, l.states[i*group:(i+1)*group], l.out[i*n:(i+1)*n])
	}
}

// blockPart is a block's state and result in split attention.
func (e *CPU) blockPart(i int) ([]kernels.State, []float32) {
	group := e.group()
	n := group * e.w.hyper.HeadDim
	return e.states[i*group : (i+1)*group], e.parts[i*n : (i+1)*n]
}

// foldTile merges the blocks of split attention into the first one.
func (e *CPU) foldTile(tile, _ int) {
	f, dim := e.folds[tile], e.w.hyper.HeadDim
	states, out := e.blockPart(f.part)
	for i := 1; i < f.blocks; i++ {
		more, part := e.blockPart(f.part + i)
		for g := range states {
			states[g].Merge(out[g*dim:(g+1)*dim], more[g], part[g*dim:(g+1)*dim])
		}
	}
	e.attended(f.token, f.head, states, out)
}

// attended puts the result of a token's heads where the output product finds it.
func (e *CPU) attended(token, head int, states []kernels.State, from []float32) {
	dim := e.w.hyper.HeadDim
	out := e.att.Row(token)[head*len(from) : (head+1)*len(from)]
	copy(out, from)
	for g := range states {
		states[g].Finish(out[g*dim : (g+1)*dim])
	}
}

// gather lists where K and V of n positions of one head lie, page by page.
func (e *CPU) gather(l *local, pages []kv.Page, head, from, n int) {
	size, row := e.cfg.PageSize, e.dtype.RowBytes(e.w.hyper.HeadDim)
	l.runs = l.runs[:0]
	for i := 0; i < n; {
		slot := (from + i) % size
		run := min(n-i, size-slot)
		src := e.extent(pages[(from+i)/size], head)
		l.runs = append(l.runs, kernels.Run{N: run, K: src[slot*row : size*row], V: src[(size+slot)*row:]})
		i += run
	}
}
