package engine

import "github.com/metronome-serve/metronome/internal/engine/kernels"

// product is y = m x for all tokens, one row of m.Rows values a token.
type product struct {
	m *kernels.Matrix
	y []float32
}

// job is the products that are being computed, cut into tiles: all row tiles
// of one stretch of tokens, then of the next, whose inputs stay in the cache.
type job struct {
	x       *kernels.Input
	p       [3]product
	rows    int    // of a tile
	ends    [3]int // row tiles of the products, cumulated
	perTurn int    // row tiles of all products
}

// mul computes products of one input.
func (e *CPU) mul(x *kernels.Input, products ...product) {
	j := &e.job
	*j = job{x: x}
	n, rows := min(x.N, tokenTile), 0
	for _, p := range products {
		rows += p.m.Rows
	}
	j.rows = max(min(tileWork/(n*x.Cols), rows/(tilesEach*e.cfg.Threads))/16*16, 16)
	for i, p := range products {
		j.p[i] = p
		j.perTurn += (p.m.Rows + j.rows - 1) / j.rows
		j.ends[i] = j.perTurn
	}
	e.crew.run((x.N+tokenTile-1)/tokenTile*j.perTurn, e.phases.mul)
}

// tileWork is how many products a tile should have: with one input about 4 µs of
// reading memory, long next to the handing out of a tile, short next to a phase. Of a small
// phase, a thread has tilesEach at least, so that none waits long for the last. Rows come in
// sixteens: 16 outputs are one cache line, which threads should not share.
const (
	tokenTile = 16 * kernels.Group // tokens of a tile, at most
	tileWork  = 1 << 17
	tilesEach = 5
)

func (e *CPU) mulTile(tile, worker int) {
	j := &e.job
	t0 := tile / j.perTurn * tokenTile
	tile %= j.perTurn
	i, first := 0, 0
	for tile >= j.ends[i] {
		first = j.ends[i]
		i++
	}
	m, r0 := j.p[i].m, (tile-first)*j.rows
	m.Mul(j.p[i].y, m.Rows, j.x, t0, min(t0+tokenTile, j.x.N), r0, min(r0+j.rows, m.Rows), e.locals[worker].mul)
}
