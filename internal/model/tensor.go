//metronome:pure

package model

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Type is the number format of a tensor, with ggml's numbers.
type Type uint32

// The formats that are computed with. internal/engine/kernels says what their
// blocks hold.
const (
	F32  Type = 0
	F16  Type = 1
	Q4_0 Type = 2
	Q4_1 Type = 3
	Q5_0 Type = 6
	Q5_1 Type = 7
	Q8_0 Type = 8
	Q4_K Type = 12
	Q5_K Type = 13
	Q6_K Type = 14
	BF16 Type = 30
)

// format is one row of the table of known number formats.
type format struct {
	name  string
	block int // values in a block; 0: known by name only, refused
	bytes int // bytes of a block
}

// formats holds every format that ggml has given a number, so that one that is
// not computed with can still be refused by its name.
var formats = map[Type]format{
	F32: {"F32", 1, 4}, F16: {"F16", 1, 2}, BF16: {"BF16", 1, 2}, Q8_0: {"Q8_0", 32, 34},
	Q4_0: {"Q4_0", 32, 18}, Q4_1: {"Q4_1", 32, 20}, Q5_0: {"Q5_0", 32, 22}, Q5_1: {"Q5_1", 32, 24},
	Q4_K: {"Q4_K", 256, 144}, Q5_K: {"Q5_K", 256, 176}, Q6_K: {"Q6_K", 256, 210},

	4: {name: "Q4_2"}, 5: {name: "Q4_3"}, 9: {name: "Q8_1"}, 10: {name: "Q2_K"}, 11: {name: "Q3_K"}, 15: {name: "Q8_K"},
	16: {name: "IQ2_XXS"}, 17: {name: "IQ2_XS"}, 18: {name: "IQ3_XXS"}, 19: {name: "IQ1_S"}, 20: {name: "IQ4_NL"},
	21: {name: "IQ3_S"}, 22: {name: "IQ2_S"}, 23: {name: "IQ4_XS"}, 24: {name: "I8"}, 25: {name: "I16"}, 26: {name: "I32"},
	27: {name: "I64"}, 28: {name: "F64"}, 29: {name: "IQ1_M"}, 31: {name: "Q4_0_4_4"}, 32: {name: "Q4_0_4_8"},
	33: {name: "Q4_0_8_8"}, 34: {name: "TQ1_0"}, 35: {name: "TQ2_0"}, 36: {name: "IQ4_NL_4_4"}, 37: {name: "IQ4_NL_4_8"},
	38: {name: "IQ4_NL_8_8"}, 39: {name: "MXFP4"}, 40: {name: "NVFP4"}, 41: {name: "Q1_0"}, 42: {name: "Q2_0"},
}

// supported names the formats that are computed with, for error messages.
var supported = func() string {
	var names []string
	for _, t := range slices.Sorted(maps.Keys(formats)) {
		if formats[t].block > 0 {
			names = append(names, formats[t].name)
		}
	}
	return strings.Join(names, ", ")
}()

// String is ggml's name of the format.
func (t Type) String() string {
	if f, ok := formats[t]; ok {
		return f.name
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Block is how many values one block of the format holds, and how many bytes
// it takes; 0, 0 for a format that is not computed with.
func (t Type) Block() (values, bytes int) {
	f := formats[t]
	return f.block, f.bytes
}

// Tensor is a view of one tensor in the mapped file.
type Tensor struct {
	Name  string
	Type  Type
	Shape []int  // ggml order: Shape[0] is contiguous (the columns of a matrix), at most 4 dimensions, none 0
	Data  []byte // exactly the tensor's bytes, read-only, valid until Close. Begins at a multiple of 8 bytes in memory (32 in ordinary files)
}

// Values is how many numbers the tensor holds.
func (t Tensor) Values() int {
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// shapeText prints a shape as 576x49152.
func shapeText(shape []int) string {
	var b strings.Builder
	for i, d := range shape {
		if i > 0 {
			b.WriteByte('x')
		}
		fmt.Fprint(&b, d)
	}
	return b.String()
}
