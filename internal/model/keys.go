package model

import (
	"encoding/binary"
	"math"
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
	x, isInt := int64(0), false
	if v.kind != kindArray {
		x, isInt = v.integerAt(0)
	}
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

// texts reads an array of at most maxVocab strings. They share one copy of the
// array's bytes.
func (f *File) texts(key string) (list []string, ok bool, err error) {
	v, ok, err := f.array(key, kindString)
	if !ok || err != nil {
		return nil, ok, err
	}
	if v.count > maxVocab {
		return nil, false, f.errorf("key %q: %d strings, up to %d are read", key, v.count, maxVocab)
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
