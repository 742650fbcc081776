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

type mixRoutine func(out *float32, outStride int, p *float32, pStride int, v *float32, vStride, n int)

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
