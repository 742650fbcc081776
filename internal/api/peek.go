//metronome:pure

package api

import "iter"

// Peek finds the value of a field of the JSON object at b[at] without decoding
// anything: b[off:end]. end is 0 when there is no object, or no such field, or
// the text breaks off before it. Only names without escapes are found.
func Peek(b []byte, at int, name string) (off, end int) {
	i := skipSpace(b, at)
	if i >= len(b) || b[i] != '{' {
		return 0, 0
	}
	for i = skipSpace(b, i+1); i < len(b) && b[i] == '"'; i = skipSpace(b, i+1) {
		key := i + 1
		val, err := skipName(b, i)
		if err != nil {
			return 0, 0
		}
		found := len(b)-key > len(name) && string(b[key:key+len(name)]) == name && b[key+len(name)] == '"'
		stop, _, err := skipValue(b, val, 0)
		if err != nil {
			return 0, 0
		}
		if found {
			return val, stop
		}
		if i = skipSpace(b, stop); i >= len(b) || b[i] != ',' {
			break
		}
	}
	return 0, 0
}

// PeekList gives the elements of the JSON array at b[at], each as b[off:end]:
// none where there is no array, and those before it where the text breaks off.
func PeekList(b []byte, at int) iter.Seq2[int, int] {
	return func(yield func(off, end int) bool) {
		i := skipSpace(b, at)
		if i >= len(b) || b[i] != '[' {
			return
		}
		for i = skipSpace(b, i+1); i < len(b) && b[i] != ']'; i = skipSpace(b, i+1) {
			end, _, err := skipValue(b, i, 0)
			if err != nil || !yield(i, end) {
				return
			}
			if i = skipSpace(b, end); i >= len(b) || b[i] != ',' {
				return
			}
		}
	}
}
