package kernels

import "unsafe"

// A float sum over an index runs in 16 lanes: lane i takes the terms whose
// index is i modulo 16, in index order, starting from +0. Then lanes are added
// in halves: i and i+8, i and i+4, i and i+2, i and i+1.
const lanes = 16

// cast looks at a slice as one of larger elements, whose alignment is no
// stricter. What does not fill an element is left out.
func cast[To, From any](s []From) []To {
	var to To
	var from From
	n := len(s) * int(unsafe.Sizeof(from)) / int(unsafe.Sizeof(to))
	return unsafe.Slice((*To)(unsafe.Pointer(unsafe.SliceData(s))), n)
}

// Dot is the sum of a[i] b[i]. The length of both is a multiple of 16.
//
// Lanes i, i+4, i+8 and i+12 are one node of the tree: four at a time stay in
// registers. One term costs a multiplication and an addition, so with the two
// float ports of today's cores a scalar loop does at best one term a cycle.
//
//go:norace
func Dot(a, b []float32) float32 {
	if f := now.float; f != nil && len(a) >= lanes {
		b = b[:len(a)]
		return f.dot(&a[0], &b[0], len(a)/lanes)
	}
	if len(a) == 64 {
		return dot64((*[64]float32)(a), (*[64]float32)(b))
	}
	x, y := cast[[16]float32](a), cast[[16]float32](b)
	y = y[:len(x)]
	var s0, s4, s8, s12 float32
	for i := range x {
		p, q := &x[i], &y[i]
		s0 += float32(p[0] * q[0])
		s4 += float32(p[4] * q[4])
		s8 += float32(p[8] * q[8])
		s12 += float32(p[12] * q[12])
	}
	u0 := (s0 + s8) + (s4 + s12)
	s0, s4, s8, s12 = 0, 0, 0, 0
	for i := range x {
		p, q := &x[i], &y[i]
		s0 += float32(p[1] * q[1])
		s4 += float32(p[5] * q[5])
		s8 += float32(p[9] * q[9])
		s12 += float32(p[13] * q[13])
	}
	u1 := (s0 + s8) + (s4 + s12)
	s0, s4, s8, s12 = 0, 0, 0, 0
	for i := range x {
		p, q := &x[i], &y[i]
		s0 += float32(p[2] * q[2])
		s4 += float32(p[6] * q[6])
		s8 += float32(p[10] * q[10])
		s12 += float32(p[14] * q[14])
	}
	u2 := (s0 + s8) + (s4 + s12)
	s0, s4, s8, s12 = 0, 0, 0, 0
	for i := range x {
		p, q := &x[i], &y[i]
		s0 += float32(p[3] * q[3])
		s4 += float32(p[7] * q[7])
		s8 += float32(p[11] * q[11])
		s12 += float32(p[15] * q[15])
	}
	u3 := (s0 + s8) + (s4 + s12)
	return (u0 + u2) + (u1 + u3)
}

// dot64 is Dot for the most common head, without loops.
//
//go:norace
func dot64(a, b *[64]float32) float32 {
	u0 := (lane64(a, b, 0) + lane64(a, b, 8)) + (lane64(a, b, 4) + lane64(a, b, 12))
	u2 := (lane64(a, b, 2) + lane64(a, b, 10)) + (lane64(a, b, 6) + lane64(a, b, 14))
	v0 := u0 + u2
	u1 := (lane64(a, b, 1) + lane64(a, b, 9)) + (lane64(a, b, 5) + lane64(a, b, 13))
	u3 := (lane64(a, b, 3) + lane64(a, b, 11)) + (lane64(a, b, 7) + lane64(a, b, 15))
	return (v0 + (u1 + u3)) + 0 // from +0: a sum of nothing but -0 is +0
}

//go:norace
func lane64(a, b *[64]float32, i int) float32 {
	return ((float32(a[i]*b[i]) + float32(a[i+16]*b[i+16])) + float32(a[i+32]*b[i+32])) + float32(a[i+48]*b[i+48])
}

// sum is the sum of x in the same order; its length is any.
func sum(x []float32) float32 {
	var s [16]float32
	for i, v := range x {
		s[i&15] += v
	}
	for n := 8; n >= 1; n /= 2 {
		for i := range n {
			s[i] += s[i+n]
		}
	}
	return s[0]
}
