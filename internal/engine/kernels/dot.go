package kernels

import "unsafe"

// A float sum over an index runs in 16 lanes: lane i takes the products whose
// index is i modulo 16, in index order, starting from +0. Then lanes are added
// in halves: i and i+8, i and i+4, i and i+2, i and i+1. The loops below take
// four lanes at a time (i, i+4, i+8, i+12), whose sum is one node of that tree:
// four chains of additions are as many as it takes to hide their latency.

type lanes [4][4]float32 // lane 4a+b is [a][b]

func asLanes(f []float32) []lanes {
	return unsafe.Slice((*lanes)(unsafe.Pointer(unsafe.SliceData(f))), len(f)/16)
}

// Dot is the sum of a[i] b[i]. The length of both is a multiple of 16.
//
// One product costs a multiplication and an addition: with the two float ports
// of today's cores a scalar loop does at best one product a cycle.
func Dot(a, b []float32) float32 {
	la, lb := asLanes(a), asLanes(b)
	u0, u2 := dotLanes(la, lb, 0), dotLanes(la, lb, 2)
	u1, u3 := dotLanes(la, lb, 1), dotLanes(la, lb, 3)
	return (u0 + u2) + (u1 + u3)
}

func dotLanes(a, b []lanes, l uint) float32 {
	l &= 3
	b = b[:len(a)]
	var s0, s4, s8, s12 float32
	for i := range a {
		p, q := &a[i], &b[i]
		s0 += float32(p[0][l] * q[0][l])
		s4 += float32(p[1][l] * q[1][l])
		s8 += float32(p[2][l] * q[2][l])
		s12 += float32(p[3][l] * q[3][l])
	}
	return (s0 + s8) + (s4 + s12)
}

// Dot2 is Dot(a, b) and Dot(a, c): the values of a are read once for both.
func Dot2(a, b, c []float32) (float32, float32) {
	la, lb, lc := asLanes(a), asLanes(b), asLanes(c)
	u0, v0 := dot2Lanes(la, lb, lc, 0)
	u2, v2 := dot2Lanes(la, lb, lc, 2)
	u1, v1 := dot2Lanes(la, lb, lc, 1)
	u3, v3 := dot2Lanes(la, lb, lc, 3)
	return (u0 + u2) + (u1 + u3), (v0 + v2) + (v1 + v3)
}

func dot2Lanes(a, b, c []lanes, l uint) (float32, float32) {
	l &= 3
	b, c = b[:len(a)], c[:len(a)]
	var s0, s4, s8, s12, t0, t4, t8, t12 float32
	for i := range a {
		p, q, r := &a[i], &b[i], &c[i]
		v0, v4, v8, v12 := p[0][l], p[1][l], p[2][l], p[3][l]
		s0 += float32(v0 * q[0][l])
		s4 += float32(v4 * q[1][l])
		s8 += float32(v8 * q[2][l])
		s12 += float32(v12 * q[3][l])
		t0 += float32(v0 * r[0][l])
		t4 += float32(v4 * r[1][l])
		t8 += float32(v8 * r[2][l])
		t12 += float32(v12 * r[3][l])
	}
	return (s0 + s8) + (s4 + s12), (t0 + t8) + (t4 + t12)
}

// sum is the sum of x in the same order; its length is any.
func sum(x []float32) float32 {
	var s [16]float32
	for i, v := range x {
		s[i&15] += v
	}
	return tree(&s)
}

func tree(s *[16]float32) float32 {
	for n := 8; n >= 1; n /= 2 {
		for i := range n {
			s[i] += s[i+n]
		}
	}
	return s[0]
}
