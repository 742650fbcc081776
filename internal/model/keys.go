package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"sort"
	"strings"
	"unicode/utf8"
)

// text reads a string key; ok is whether it is there.
func (f *File) text(key string) (s string, ok bool, err error) {
	v, ok := f.keys[key]
	if !ok {
		return "", false, nil
	}
	if v.kind != kindString {
		return "", false, f.errorf("key %q: is %s, a string would be right", key, v.kind)
	}
	if b := v.raw[8:]; utf8.Valid(b) {
		return string(b), true, nil
	}
	return "", false, f.errorf("key %q: is not UTF-8", key)
}

// integer reads an integer key of any width and checks its range.
func (f *File) integer(key string, low, high int) (n int, ok bool, err error) {
	v, ok := f.keys[key]
	if !ok {
		return 0, false, nil
	}
	x, isInt := v.integerAt(0)
	if !isInt {
		return 0, false, f.errorf("key %q: is %s, an integer would be right", key, v.kind)
	}
	if x < int64(low) || x > int64(high) {
		return 0, false, f.errorf("key %q: is %d, %d to %d would be right", key, x, low, high)
	}
	return int(x), true, nil
}

// integerAt is element i of a value of integers. A uint64 beyond int64 is
// given as the largest int64: it is beyond every range that is checked.
func (v value) integerAt(i int) (n int64, isInt bool) {
	k := v.kind
	if k == kindArray {
		k = v.elem
	}
	switch k {
	case kindUint8:
		return int64(v.raw[i]), true
	case kindInt8:
		return int64(int8(v.raw[i])), true
	case kindUint16:
		return int64(binary.LittleEndian.Uint16(v.raw[2*i:])), true
	case kindInt16:
		return int64(int16(binary.LittleEndian.Uint16(v.raw[2*i:]))), true
	case kindUint32:
		return int64(binary.LittleEndian.Uint32(v.raw[4*i:])), true
	case kindInt32:
		return int64(int32(binary.LittleEndian.Uint32(v.raw[4*i:]))), true
	case kindUint64:
		return int64(min(binary.LittleEndian.Uint64(v.raw[8*i:]), math.MaxInt64)), true
	case kindInt64:
		return int64(binary.LittleEndian.Uint64(v.raw[8*i:])), true
	}
	return 0, false
}

// float reads a float32 key, finite and above zero.
func (f *File) float(key string) (x float32, ok bool, err error) {
	v, ok := f.keys[key]
	if !ok {
		return 0, false, nil
	}
	if v.kind != kindFloat32 {
		return 0, false, f.errorf("key %q: is %s, float32 would be right", key, v.kind)
	}
	x = math.Float32frombits(binary.LittleEndian.Uint32(v.raw))
	if !(x > 0) || math.IsInf(float64(x), 0) {
		return 0, false, f.errorf("key %q: is %v, a finite number above 0 would be right", key, x)
	}
	return x, true, nil
}

// flag reads a bool key; it is def when the key is not there.
func (f *File) flag(key string, def bool) (bool, error) {
	v, ok := f.keys[key]
	if !ok {
		return def, nil
	}
	if v.kind != kindBool {
		return false, f.errorf("key %q: is %s, a bool would be right", key, v.kind)
	}
	return v.raw[0] == 1, nil
}

// array finds an array key with elements of one of the kinds.
func (f *File) array(key string, elems ...kind) (v value, ok bool, err error) {
	v, ok = f.keys[key]
	if !ok {
		return value{}, false, nil
	}
	for _, k := range elems {
		if v.kind == kindArray && v.elem == k {
			return v, true, nil
		}
	}
	if v.kind == kindArray {
		return value{}, false, f.errorf("key %q: is an array of %s, an array of %s would be right", key, v.elem, elems[0])
	}
	return value{}, false, f.errorf("key %q: is %s, an array of %s would be right", key, v.kind, elems[0])
}

// texts reads an array of strings. They share one copy of the array's bytes.
func (f *File) texts(key string) (list []string, ok bool, err error) {
	v, ok, err := f.array(key, kindString)
	if !ok || err != nil {
		return nil, ok, err
	}
	all := string(v.raw)
	list = make([]string, v.count)
	at := 0
	for i := range list {
		n := int(binary.LittleEndian.Uint64(v.raw[at:])) // checked by the reader
		list[i] = all[at+8 : at+8+n]
		at += 8 + n
		if !utf8.ValidString(list[i]) {
			return nil, false, f.errorf("key %q: element %d, %q, is not UTF-8", key, i, list[i])
		}
	}
	return list, true, nil
}

// Fingerprint is the hex sha256 over everything in the file that changes an
// answer: architecture, hyper parameters, tokenizer and chat template, and
// name, type, shape and bytes of every tensor. Names, licences, padding and
// the order of things in the file do not count. It is computed once, at about
// the speed of sha256 (1 to 2 GB/s with the processor's instructions for it,
// 0.1 s for 98 MB), and must be called before Close.
func (f *File) Fingerprint() string { return f.print() }

func (f *File) fingerprint() string {
	h := sha256.New()
	var buf []byte
	num := func(n int) { buf = binary.LittleEndian.AppendUint64(buf, uint64(n)) }
	str := func(s string) { num(len(s)); buf = append(buf, s...) }
	flush := func() { h.Write(buf); buf = buf[:0] }

	var keys []string
	for key := range f.keys {
		if key == "general.architecture" || strings.HasPrefix(key, f.Arch+".") || strings.HasPrefix(key, "tokenizer.") {
			keys = append(keys, key)
		}
	}
	sort.Strings(keys)
	str("metronome model 1")
	num(len(keys))
	for _, key := range keys {
		v := f.keys[key]
		str(key)
		num(int(v.kind))
		num(int(v.elem))
		num(v.count)
		num(len(v.raw))
		flush()
		h.Write(v.raw)
	}
	num(len(f.names))
	for _, name := range f.names {
		t := f.tensors[name]
		str(name)
		num(int(t.Type))
		num(len(t.Shape))
		for _, d := range t.Shape {
			num(d)
		}
		num(len(t.Data))
		flush()
		h.Write(t.Data)
	}
	flush()
	return hex.EncodeToString(h.Sum(nil))
}
