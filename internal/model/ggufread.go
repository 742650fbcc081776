//metronome:pure

package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// The GGUF container, little endian, versions 2 and 3 (which differ in nothing
// that concerns a little-endian file):
//
//	head:    "GGUF", u32 version, u64 tensors, u64 keys
//	key:     string name, u32 kind, value
//	tensor:  string name, u32 dimensions, u64 each, u32 type, u64 offset
//	padding to the alignment, then the tensor data; offsets count from here
//	string:  u64 length, bytes
//	array:   u32 kind of elements, u64 count, elements
//
// Source: the GGUF specification of the ggml project.
const (
	headSize  = 4 + 4 + 8 + 8
	maxKey    = 65535   // the specification's bound of a key name
	maxTensor = 128     // bytes of a tensor name; ggml itself holds 63
	maxCount  = 1 << 16 // keys, and tensors; real files have thousands at most
	maxDims   = 4
	maxBytes  = 1 << 44 // of one tensor, so that sizes cannot wrap
	maxLine   = 400     // bytes of an error, which may quote what is as long as the file
)

// kind is the type of a metadata value, with GGUF's numbers.
type kind uint32

const (
	kindUint8 kind = iota
	kindInt8
	kindUint16
	kindInt16
	kindUint32
	kindInt32
	kindFloat32
	kindBool
	kindString
	kindArray
	kindUint64
	kindInt64
	kindFloat64
)

// kinds has the name of each kind and its size in bytes; 0: not fixed.
var kinds = [...]struct {
	name string
	size int
}{{"uint8", 1}, {"int8", 1}, {"uint16", 2}, {"int16", 2}, {"uint32", 4}, {"int32", 4}, {"float32", 4}, {"bool", 1},
	{"string", 0}, {"array", 0}, {"uint64", 8}, {"int64", 8}, {"float64", 8}}

func (k kind) String() string {
	if int(k) < len(kinds) {
		return kinds[k].name
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// value is one checked metadata value, still in the bytes of the file.
type value struct {
	kind  kind
	elem  kind // of an array
	count int  // elements of an array
	raw   []byte
}

// tensorInfo is one tensor record, not yet checked against the data.
type tensorInfo struct {
	name   string
	kind   Type
	shape  []int
	offset uint64
}

// reader walks over a file. The first error sticks and every later read gives
// zero, so loops check err and nothing else has to.
type reader struct {
	b   []byte
	at  int
	err error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = line(format, args...)
	}
}

// line is an error whose middle is left out where it would be long.
func line(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	s := err.Error()
	if len(s) <= maxLine {
		return err
	}
	from, to := maxLine/2, len(s)-maxLine/2
	for ; !utf8.RuneStart(s[from]); from-- {
	}
	for ; !utf8.RuneStart(s[to]); to++ {
	}
	return errors.New(s[:from] + " … " + s[to:])
}

// take returns the next n bytes as a view.
func (r *reader) take(n uint64, what string) []byte {
	if r.err != nil {
		return nil
	}
	if left := len(r.b) - r.at; n > uint64(left) {
		r.fail("truncated: %s needs %d bytes at offset %d, %d are left", what, n, r.at, left)
		return nil
	}
	b := r.b[r.at : r.at+int(n) : r.at+int(n)]
	r.at += int(n)
	return b
}

func (r *reader) u32(what string) uint32 {
	if b := r.take(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64(what string) uint64 {
	if b := r.take(8, what); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// name reads a string that names something: short, not empty, UTF-8.
func (r *reader) name(limit uint64, what string) string {
	at := r.at
	n := r.u64(what)
	if r.err == nil && (n == 0 || n > limit) {
		r.fail("%s at offset %d: a name of %d bytes, 1 to %d would be right", what, at, n, limit)
	}
	b := r.take(n, what)
	if !utf8.Valid(b) {
		r.fail("%s at offset %d: %q is not UTF-8", what, at, b)
	}
	return string(b)
}

// head checks magic and version and returns the claimed numbers of tensors and keys.
func (r *reader) head() (tensors, keys uint64) {
	if magic := r.take(4, "the head"); r.err == nil && string(magic) != "GGUF" {
		r.fail("not a GGUF file: it begins with %q", magic)
	}
	switch v := r.u32("the head"); {
	case r.err != nil || v == 2 || v == 3:
	case v != 0 && v&0xffff == 0:
		r.fail("a big-endian GGUF file; only little endian is read")
	case v < 2:
		r.fail("GGUF version %d is too old; versions 2 and 3 are read", v)
	default:
		r.fail("GGUF version %d is too new; versions 2 and 3 are read", v)
	}
	tensors, keys = r.u64("the head"), r.u64("the head")
	if r.err == nil && max(tensors, keys) > maxCount {
		r.fail("the head at offset 8 claims %d tensors and %d keys, up to %d each are read", tensors, keys, maxCount)
	}
	return tensors, keys
}

// keys reads n metadata values.
func (r *reader) keys(into map[string]value, n uint64) {
	for ; n > 0 && r.err == nil; n-- {
		name := r.name(maxKey, "a key")
		if _, ok := into[name]; ok {
			r.fail("key %q: appears twice", name)
		}
		v := r.value(name)
		if r.err == nil {
			into[name] = v
		}
	}
}

func (r *reader) value(key string) value {
	what := fmt.Sprintf("key %q", key)
	v := value{kind: kind(r.u32(what))}
	if v.kind == kindArray {
		v.elem = kind(r.u32(what))
		n := r.u64(what)
		if n > uint64(len(r.b)-r.at) {
			r.fail("%s: truncated: an array of %d elements at offset %d, %d bytes are left", what, n, r.at, len(r.b)-r.at)
			return value{}
		}
		v.count = int(n)
		v.raw = r.elements(what, v.elem, n)
		return v
	}
	v.raw = r.elements(what, v.kind, 1)
	return v
}

// elements takes n values of one kind. n is at most the bytes that are left.
func (r *reader) elements(what string, k kind, n uint64) []byte {
	from := r.at
	switch {
	case r.err != nil:
	case int(k) >= len(kinds):
		r.fail("%s: unknown kind %d at offset %d", what, uint32(k), r.at)
	case k == kindArray:
		r.fail("%s: an array of arrays at offset %d", what, r.at)
	case k == kindString:
		for ; n > 0 && r.err == nil; n-- {
			r.take(r.u64(what), what)
		}
	default:
		b := r.take(n*uint64(kinds[k].size), what)
		for i := 0; k == kindBool && i < len(b); i++ {
			if b[i] > 1 {
				r.fail("%s: %d is no bool at offset %d", what, b[i], from+i)
			}
		}
	}
	if r.err != nil {
		return nil
	}
	return r.b[from:r.at:r.at]
}

// tensors reads n tensor records.
func (r *reader) tensors(n uint64) []tensorInfo {
	var infos []tensorInfo
	for ; n > 0 && r.err == nil; n-- {
		t := tensorInfo{name: r.name(maxTensor, "a tensor")}
		what := fmt.Sprintf("tensor %q", t.name)
		dims := r.u32(what)
		if dims == 0 || dims > maxDims {
			r.fail("%s: %d dimensions, 1 to %d would be right", what, dims, maxDims)
			return nil
		}
		for range dims {
			d := r.u64(what)
			if r.err == nil && (d == 0 || d > math.MaxInt32) {
				r.fail("%s: a dimension of %d", what, d)
			}
			t.shape = append(t.shape, int(d))
		}
		t.kind = Type(r.u32(what))
		t.offset = r.u64(what)
		infos = append(infos, t)
	}
	return infos
}

// size is how many bytes the tensor's data take.
func (t tensorInfo) size() (uint64, error) {
	f, known := formats[t.kind]
	switch {
	case !known:
		return 0, fmt.Errorf("tensor %q: unknown type %d; supported are %s", t.name, uint32(t.kind), supported)
	case f.block == 0:
		return 0, fmt.Errorf("tensor %q: type %s is not supported; supported are %s", t.name, f.name, supported)
	case t.shape[0]%f.block != 0:
		return 0, fmt.Errorf("tensor %q: rows of %d values do not divide into %s blocks of %d", t.name, t.shape[0], f.name, f.block)
	}
	n := uint64(t.shape[0]/f.block) * uint64(f.bytes)
	for _, d := range t.shape[1:] {
		if uint64(d) > maxBytes/n {
			return 0, fmt.Errorf("tensor %q: shape %s is larger than any file", t.name, shapeText(t.shape))
		}
		n *= uint64(d)
	}
	return n, nil
}
