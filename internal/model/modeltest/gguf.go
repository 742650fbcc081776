package modeltest

import (
	"encoding/binary"
	"math"
)

// file collects the parts of a GGUF file, version 3.
type file struct {
	keys    []byte
	nkeys   int
	records []byte
	tensors int
	data    []byte
}

const align = 32

func text(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// put adds a key. The kinds are those that models use.
func (f *file) put(key string, v any) {
	f.nkeys++
	b, le := text(f.keys, key), binary.LittleEndian
	list := func(kind, n int) {
		b = le.AppendUint64(le.AppendUint32(le.AppendUint32(b, 9), uint32(kind)), uint64(n))
	}
	switch v := v.(type) {
	case int:
		b = le.AppendUint32(le.AppendUint32(b, 4), uint32(v))
	case float32:
		b = le.AppendUint32(le.AppendUint32(b, 6), math.Float32bits(v))
	case bool:
		b = append(le.AppendUint32(b, 7), map[bool]byte{true: 1}[v])
	case string:
		b = text(le.AppendUint32(b, 8), v)
	case []int32:
		list(5, len(v))
		for _, x := range v {
			b = le.AppendUint32(b, uint32(x))
		}
	case []float32:
		list(6, len(v))
		for _, x := range v {
			b = le.AppendUint32(b, math.Float32bits(x))
		}
	case []string:
		list(8, len(v))
		for _, x := range v {
			b = text(b, x)
		}
	default:
		panic("modeltest: no such kind of value")
	}
	f.keys = b
}

// tensor adds a tensor of ggml's type number; dims begin with the contiguous one.
func (f *file) tensor(name string, kind uint32, data []byte, dims ...int) {
	le := binary.LittleEndian
	f.tensors++
	f.records = le.AppendUint32(text(f.records, name), uint32(len(dims)))
	for _, d := range dims {
		f.records = le.AppendUint64(f.records, uint64(d))
	}
	f.records = le.AppendUint64(le.AppendUint32(f.records, kind), uint64(len(f.data)))
	f.data = append(f.data, data...)
	f.data = append(f.data, make([]byte, -len(f.data)&(align-1))...)
}

func (f *file) bytes() []byte {
	le := binary.LittleEndian
	b := le.AppendUint64(le.AppendUint32([]byte("GGUF"), 3), uint64(f.tensors))
	b = append(append(le.AppendUint64(b, uint64(f.nkeys)), f.keys...), f.records...)
	return append(append(b, make([]byte, -len(b)&(align-1))...), f.data...)
}
