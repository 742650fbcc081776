//metronome:pure

package model

import (
	"fmt"
	"strings"
)

// Type is the number format of a tensor, with ggml's numbers.
type Type uint32

// The formats that are computed with.
const (
	F32  Type = 0 // IEEE 754 single precision
	F16  Type = 1 // IEEE 754 half precision
	Q4_1 Type = 3 // 32 values: f16 scale d, f16 minimum m, 16 bytes; low nibbles are values 0-15, high nibbles 16-31; w = d*q + m
	Q8_0 Type = 8 // 32 values: f16 scale d, 32 int8; w = d*q
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
	F32:  {"F32", 1, 4},
	F16:  {"F16", 1, 2},
	Q4_1: {"Q4_1", 32, 20},
	Q8_0: {"Q8_0", 32, 34},

	2: {name: "Q4_0"}, 4: {name: "Q4_2"}, 5: {name: "Q4_3"}, 6: {name: "Q5_0"}, 7: {name: "Q5_1"}, 9: {name: "Q8_1"},
	10: {name: "Q2_K"}, 11: {name: "Q3_K"}, 12: {name: "Q4_K"}, 13: {name: "Q5_K"}, 14: {name: "Q6_K"}, 15: {name: "Q8_K"},
	16: {name: "IQ2_XXS"}, 17: {name: "IQ2_XS"}, 18: {name: "IQ3_XXS"}, 19: {name: "IQ1_S"}, 20: {name: "IQ4_NL"},
	21: {name: "IQ3_S"}, 22: {name: "IQ2_S"}, 23: {name: "IQ4_XS"}, 24: {name: "I8"}, 25: {name: "I16"}, 26: {name: "I32"},
	27: {name: "I64"}, 28: {name: "F64"}, 29: {name: "IQ1_M"}, 30: {name: "BF16"}, 31: {name: "Q4_0_4_4"}, 32: {name: "Q4_0_4_8"},
	33: {name: "Q4_0_8_8"}, 34: {name: "TQ1_0"}, 35: {name: "TQ2_0"}, 39: {name: "MXFP4"},
}

// supported names the formats that are computed with, for error messages.
const supported = "F32, F16, Q8_0, Q4_1"

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
