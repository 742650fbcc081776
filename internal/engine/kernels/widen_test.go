package kernels

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"slices"
	"testing"
)

// TestRowByHand widens blocks that were taken apart with pencil and paper.
func TestRowByHand(t *testing.T) {
	// d = 0x3400 = 0.25, m = 0xbc00 = -1; all other weights are those of zero bits.
	block := func(n int, set map[int]byte) []byte {
		b := make([]byte, n)
		for at, v := range set {
			b[at] = v
		}
		return b
	}
	for _, c := range []struct {
		typ  Type
		data []byte
		rest float32
		want map[int]float32
	}{
		{F32, block(128, map[int]byte{7: 0x3f, 6: 0x80}), 0, map[int]float32{1: 1}},
		{F16, block(64, map[int]byte{2: 0x01, 63: 0xc0}), 0, map[int]float32{1: 0x1p-24, 31: -2}},
		{BF16, block(64, map[int]byte{2: 0x40, 3: 0x40, 63: 0xc0}), 0, map[int]float32{1: 3, 31: -2}},
		{Q8_0, block(34, map[int]byte{1: 0x34, 2: 0x7f, 33: 0x80}), 0, map[int]float32{0: 31.75, 31: -32}},
		{Q4_0, block(18, map[int]byte{1: 0x34, 2: 0xf9, 17: 0x0f}), -2, map[int]float32{0: 0.25, 16: 1.75, 15: 1.75}},
		{Q4_1, block(20, map[int]byte{1: 0x34, 3: 0xbc, 4: 0xf9, 19: 0x0f}), -1, map[int]float32{0: 1.25, 16: 2.75, 15: 2.75}},
		{Q5_0, block(22, map[int]byte{1: 0x34, 2: 0x01, 5: 0x80, 6: 0xf9, 21: 0x0f}), -4, map[int]float32{0: 2.25, 16: -0.25, 15: -0.25, 31: 0}},
		{Q5_1, block(24, map[int]byte{1: 0x34, 3: 0xbc, 4: 0x01, 7: 0x80, 8: 0xf9, 23: 0x0f}), -1, map[int]float32{0: 5.25, 16: 2.75, 15: 2.75, 31: 3}},
		// s[0] = 1, n[0] = 2, s[1] = 3; s[4] = 1 + 2<<4 = 33, n[4] = 4 + 1<<4 = 20
		{Q4_K, block(144, map[int]byte{1: 0x34, 3: 0xbc, 4: 0x81, 8: 0x42, 5: 3, 12: 0x41, 16: 0x59, 47: 0xa0, 80: 0x02}), 0,
			span(map[int]float32{0: 4.25, 32: 3.75, 63: 7.5, 128: 36.5}, 0, 32, 2, 128, 160, 20)},
		{Q5_K, block(176, map[int]byte{1: 0x34, 3: 0xbc, 4: 0x81, 8: 0x42, 5: 3, 12: 0x41, 16: 0x03, 47: 0x10, 48: 0x59, 79: 0xa0, 112: 0x02}), 0,
			span(map[int]float32{0: 8.25, 32: 15.75, 63: 7.5, 128: 36.5, 159: 152}, 0, 32, 2, 128, 160, 20)},
		// s[0] = 1, s[3] = -2, s[4] = 1, s[15] = 127; the rest are 0
		{Q6_K, block(210, map[int]byte{209: 0x34, 192: 1, 195: 0xfe, 196: 1, 207: 127, 0: 0x53, 63: 0x0f, 128: 0x1c, 159: 0x04, 191: 0xc0, 127: 0xf0}), 0,
			span(map[int]float32{0: -7.25, 64: -2.75, 63: 0.5, 255: 984.25}, 0, 16, -8, 48, 64, 16, 64, 80, -8, 240, 256, -1016)},
	} {
		cols := max(32, formats[c.typ].block)
		m, err := NewMatrix(c.typ, 1, cols, c.data)
		if err != nil {
			t.Fatal(err)
		}
		got, want := make([]float32, cols), slices.Repeat([]float32{c.rest}, cols)
		for i, v := range c.want {
			want[i] = v
		}
		if m.Row(got, 0); !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", c.typ, got, want)
		}
	}
}

// span adds, for each three numbers, a value for all indexes from the first to
// before the second that have none.
func span(set map[int]float32, ranges ...int) map[int]float32 {
	for ; len(ranges) > 0; ranges = ranges[3:] {
		for i := ranges[0]; i < ranges[1]; i++ {
			if _, ok := set[i]; !ok {
				set[i] = float32(ranges[2])
			}
		}
	}
	return set
}

// TestRowAgainstGGML: random blocks are exactly what the gguf package says
// (testdata/formats/reference.py).
func TestRowAgainstGGML(t *testing.T) {
	b, err := os.ReadFile("../../../testdata/formats/blocks.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Type      string
		Data, F32 []byte
	}
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	left := weightTypes()
	for _, c := range cases {
		at := slices.IndexFunc(left, func(t Type) bool { return t.String() == c.Type })
		if at < 0 {
			t.Fatalf("there is no %s", c.Type)
		}
		typ := left[at]
		left = slices.Delete(left, at, at+1)
		want := make([]float32, len(c.F32)/4)
		if _, err := binary.Decode(c.F32, binary.LittleEndian, want); err != nil {
			t.Fatal(err)
		}
		m, err := NewMatrix(typ, 1, len(want), c.Data)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]float32, len(want))
		m.Row(got, 0)
		for i := range got {
			if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
				t.Errorf("%v: weight %d is %v, want %v", typ, i, got[i], want[i])
				break
			}
		}
	}
	if !slices.Equal(left, []Type{F32}) {
		t.Errorf("no reference for %v", left)
	}
}

// TestPutQ8_0: rows of K and V come back within half a scale, and what cannot be
// kept comes back as NaN, never as a number.
func TestPutQ8_0(t *testing.T) {
	rnd := seeded(t, 8)
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	row, got, src := make([]byte, Q8_0.RowBytes(2*Block)), make([]float32, 2*Block), make([]float32, 2*Block)
	for _, size := range []float32{1, 1e-3, 127 * 0x1p-14, 127 * 0x1.8p-24, 127 * 0x1.7fp-24, 1e-7, 1e-30, 0, 1e6, 127 * 65503} {
		fill(rnd, src)
		top := slices.MaxFunc(src[Block:], func(a, b float32) int { return cmp.Compare(max(a, -a), max(b, -b)) })
		for i, v := range src {
			src[i] = v / max(top, -top) * size
		}
		Q8_0.Put(row, src)
		Q8_0.Widen(got, row)
		scale := F16ToF32(binary.LittleEndian.Uint16(row[q8Row:]))
		for i := range Block {
			v, w := src[Block+i], got[Block+i]
			if max(v-w, w-v) > 0.5001*max(scale, 127*0x1p-24) {
				t.Errorf("size %v, scale %v: %v came back as %v", size, scale, v, w)
			}
		}
		Q8_0.Put(row, got) // what was rounded once stays as it is
		again := make([]float32, 2*Block)
		if Q8_0.Widen(again, row); size == 1 && !slices.Equal(got, again) {
			t.Errorf("rounded twice: %v, then %v", got, again)
		}
	}
	for _, bad := range []float32{inf, -inf, nan, 127 * 65521} {
		clear(src)
		src[40] = bad
		Q8_0.Put(row, src)
		Q8_0.Widen(got, row)
		for i, v := range got {
			if (v != v) != (i >= Block) {
				t.Errorf("with %v at 40, value %d is %v", bad, i, v)
			}
		}
	}
	// d = 2 is a half exactly, ties go to even, and 127 is the largest q.
	clear(src)
	src[0], src[1], src[2], src[3], src[31] = 254, 1, 3, -5, -254
	Q8_0.Put(row, src)
	if want := append([]byte{0x00, 0x40, 127, 0, 2, 0xfe}, make([]byte, 27)...); !slices.Equal(row[:33], want) || row[33] != 0x81 {
		t.Errorf("row % x, want % x 81", row[:34], want)
	}
}

const q8Row = 2 + Block
