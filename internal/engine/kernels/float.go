package kernels

// floatRoutines are the float loops of a path. Counts are in sixteens of values
// unless they say otherwise, strides in bytes. The Go functions that use them
// are beside the portable loops; they check lengths, and take what is left of
// the sixteens by the portable loop.
type floatRoutines struct {
	dots4x4  func(y *float32, yStride int, x *float32, xStride int, w *float32, wStride, fours, steps int)
	dots16x1 func(y, x, w *float32, wStride, sixteens, steps int)
	dot      func(x, y *float32, steps int) float32
	softmax  func(p *float32, n *int, top, sum *float32, queries int, scale float32)
	mix4x64  mixRoutine
	mix4x16  mixRoutine
	mix1x64  mixRoutine
	mix1x16  mixRoutine

	// The same with rows of halves, where the path has them; mixes add to out.
	dots4x4h  func(y *float32, yStride int, x *float32, xStride int, w *byte, wStride, fours, steps int)
	dots16x1h func(y, x *float32, w *byte, wStride, sixteens, steps int)
	mix4x64h  mixHalfRoutine
	mix4x16h  mixHalfRoutine
	mix1x64h  mixHalfRoutine
	mix1x16h  mixHalfRoutine

	merge    func(out, part *float32, n int, f, h float32)
	exp      func(dst, src *float32, n int, top, divisor float32)
	swiglu   func(dst, gate, up *float32, n int)
	scale    func(dst, x, w *float32, n int, f float32)
	add      func(dst, x *float32, n int)
	widenF16 func(dst *float32, src *byte, n int)
	roundF16 func(dst *byte, src *float32, n int)

	widenBF16 func(dst *float32, src *byte, n int)
	widenQ8_0 func(dst *float32, src *byte, blocks int)
	roundQ8_0 func(dst *byte, src *float32, blocks int)

	rope   func(v, cos, sin *float32, n int)
	halves func(x, y, cos, sin *float32, n int)
}

type (
	mixRoutine     func(out *float32, outStride int, p *float32, pStride int, v *float32, vStride, n int)
	mixHalfRoutine func(out *float32, outStride int, p *float32, pStride int, v *byte, vStride, n int)
)

// dots is y[t*stride+r] = x[t] w[r] for rows w and some vectors x, all of cols
// values. Rows are a multiple of 16.
func (f *floatRoutines) dots(y []float32, stride int, x, w []float32, cols int) {
	rows, steps := len(w)/cols, cols/lanes
	for len(x) >= 4*cols {
		out := y[:3*stride+rows]
		f.dots4x4(&out[0], 4*stride, &x[0], 4*cols, &w[0], 4*cols, rows/4, steps)
		x, y = x[4*cols:], y[min(4*stride, len(y)):]
	}
	for len(x) >= cols {
		out := y[:rows]
		f.dots16x1(&out[0], &x[0], &w[0], 4*cols, rows/16, steps)
		x, y = x[cols:], y[min(stride, len(y)):]
	}
}

// dotsHalves is dots of rows of halves, for one vector or four.
func (f *floatRoutines) dotsHalves(y []float32, stride int, x []float32, w []byte, cols int) {
	rows, steps := len(w)/(2*cols), cols/lanes
	if len(x) == cols {
		f.dots16x1h(&y[:rows][0], &x[0], &w[0], 2*cols, rows/16, steps)
		return
	}
	f.dots4x4h(&y[:3*stride+rows][0], 4*stride, &x[0], 4*cols, &w[0], 2*cols, rows/4, steps)
}

// mixHalves is out[i][d] += Σ p[i*Span+j] v[j][d] over j < n, in index order, for
// one p or four.
func (f *floatRoutines) mixHalves(out, p []float32, v []byte, dim, n int) {
	four, one, d := f.mix4x64h, f.mix4x16h, 0
	if len(out) == dim {
		four, one = f.mix1x64h, f.mix1x16h
	}
	for ; d+64 <= dim; d += 64 {
		four(&out[d], 4*dim, &p[0], 4*Span, &v[2*d], 2*dim, n)
	}
	for ; d < dim; d += 16 {
		one(&out[d], 4*dim, &p[0], 4*Span, &v[2*d], 2*dim, n)
	}
}
