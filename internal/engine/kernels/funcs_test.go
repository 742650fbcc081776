package kernels

import (
	"math"
	"math/big"
	"testing"
)

func TestExp(t *testing.T) {
	worst, at := 0.0, float32(0)
	for i := -8733; i <= 8872; i++ {
		for j := range 97 {
			x := float32(i)/100 + float32(j)*1.03e-4
			if x > 88.72 || x < -87.33 {
				continue
			}
			want := math.Exp(float64(x))
			if e := math.Abs(float64(Exp(x))-want) / want; e > worst {
				worst, at = e, x
			}
		}
	}
	t.Logf("largest relative error %.3g at %v", worst, at)
	if worst > 1.2e-7 {
		t.Errorf("relative error %.3g at %v", worst, at)
	}
	inf := float32(math.Inf(1))
	for _, c := range []struct{ x, want float32 }{
		{0, 1}, {-87.34, 0}, {-1e30, 0}, {-inf, 0}, {88.73, inf}, {inf, inf}, {float32(math.Copysign(0, -1)), 1},
	} {
		if got := Exp(c.x); got != c.want {
			t.Errorf("Exp(%v) = %v, want %v", c.x, got, c.want)
		}
	}
	if got := Exp(float32(math.NaN())); got == got {
		t.Errorf("Exp(NaN) = %v", got)
	}
}

func TestFloat64Functions(t *testing.T) {
	for x := -700.0; x <= 700; x += 0.37 {
		if e := math.Abs(Exp64(x)/math.Exp(x) - 1); e > 2e-15 {
			t.Fatalf("Exp64(%v): relative error %g", x, e)
		}
	}
	for x := 1e-300; x < 1e300; x *= 1.37 {
		want := math.Log(x)
		if e := math.Abs(Log64(x) - want); e > 1e-15*max(1, math.Abs(want)) {
			t.Fatalf("Log64(%v) = %v, want %v", x, Log64(x), want)
		}
	}
	for x := 0.5; x < 2; x += 0.0007 { // around the zero of the logarithm
		want := math.Log(x)
		if e := math.Abs(Log64(x) - want); e > 1e-15*math.Abs(want)+1e-17 {
			t.Fatalf("Log64(%v) = %v, want %v", x, Log64(x), want)
		}
	}
	for x := 0.0; x < 1<<21; x = x*1.0003 + 0.013 {
		s, c := SinCos(x)
		if e := max(math.Abs(s-math.Sin(x)), math.Abs(c-math.Cos(x))); e > 1e-15 {
			t.Fatalf("SinCos(%v): error %g", x, e)
		}
	}
}

// exact is the rational value of a half, by the definition of the format.
func exact(h uint16) *big.Rat {
	e, f := int(h>>10&31), int64(h&0x3ff)
	if e == 0 {
		e = 1
	} else {
		f |= 0x400
	}
	r := new(big.Rat).SetInt64(f)
	scale := new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(25)))
	r.Quo(r, scale)
	r.Mul(r, new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(e))))
	if h&0x8000 != 0 {
		r.Neg(r)
	}
	return r
}

func TestFloat16(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		f := F16ToF32(h)
		if h&0x7c00 == 0x7c00 {
			if h&0x3ff != 0 {
				if f == f || F32ToF16(f)&0x7fff <= 0x7c00 {
					t.Fatalf("%04x: NaN became %v, then %04x", h, f, F32ToF16(f))
				}
				continue
			}
			if !math.IsInf(float64(f), 1-2*int(h>>15)) {
				t.Fatalf("%04x: infinity became %v", h, f)
			}
		} else if new(big.Rat).SetFloat64(float64(f)).Cmp(exact(h)) != 0 {
			t.Fatalf("%04x: %v is not its value", h, f)
		}
		var wide [5]float32 // one of four, and the fifth alone
		WidenF16(wide[:], []byte{0, 60, byte(h), byte(h >> 8), 0, 60, 0, 60, byte(h), byte(h >> 8)})
		if wide[0] != 1 || wide[1] != f || wide[4] != f {
			t.Fatalf("%04x: widened to %v, want %v", h, wide, f)
		}
		if F32ToF16(f) != h {
			t.Fatalf("%04x: there and back is %04x", h, F32ToF16(f))
		}
	}
}

// TestFloat16Rounding checks each half and its successor: what lies between
// goes to the nearer one, the middle to the even one.
func TestFloat16Rounding(t *testing.T) {
	for h := uint16(0); h < 0x7c00; h++ {
		lo, hi := float64(F16ToF32(h)), float64(F16ToF32(h+1))
		if h+1 == 0x7c00 {
			hi = 65536 // the next half if the exponent went on
		}
		mid := float32((lo + hi) / 2) // exact: one bit more than a half
		even := h + h&1
		for _, c := range []struct {
			f    float32
			want uint16
		}{
			{mid, even}, {math.Nextafter32(mid, 0), h}, {math.Nextafter32(mid, 1e9), h + 1},
			{-mid, even | 0x8000}, {math.Nextafter32(float32(lo), 1e9), h},
		} {
			if got := F32ToF16(c.f); got != c.want {
				t.Fatalf("F32ToF16(%v) = %04x, want %04x", c.f, got, c.want)
			}
		}
	}
	for _, f := range []float32{65520, 1e9, float32(math.Inf(1))} {
		if got := F32ToF16(f); got != 0x7c00 {
			t.Errorf("F32ToF16(%v) = %04x, want infinity", f, got)
		}
	}
}
