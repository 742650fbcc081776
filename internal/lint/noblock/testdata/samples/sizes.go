package main

import (
	"encoding/binary"
	"encoding/json"
	"strconv"
)

const limit = 1 << 16

type header struct{ length, count uint32 }

type body struct {
	Rows  int `json:"rows"`
	Limit int `json:"limit"`
}

func parse(b []byte) header {
	h := header{length: binary.LittleEndian.Uint32(b), count: binary.LittleEndian.Uint32(b[4:])}
	return h
}

func length(b []byte) int { return int(binary.BigEndian.Uint16(b)) + 4 }

// sizes makes memory as much as its input says.
func sizes(b []byte) {
	n := int(binary.LittleEndian.Uint32(b))
	_ = make([]byte, n)                  // want: makes as much as .*Uint32 says
	_ = make([]byte, 0, 2*(length(b)+1)) // want: makes as much as .*Uint16 says
	_ = make([]byte, min(n, limit))
	_ = make([]byte, n%limit)
	if k := binary.LittleEndian.Uint64(b); k < limit {
		_ = make([]int, k)
	}
	h := parse(b)
	_ = make([]byte, h.length) // want: makes as much as .*Uint32 says
	if h.count > limit {
		return
	}
	_ = make(chan int, h.count)
	k, _ := strconv.Atoi(string(b))
	fill(k)
	var in body
	json.Unmarshal(b, &in)
	_ = make(map[int]int, in.Rows) // want: makes as much as the field .*body\.Rows says
	if in.Limit < limit {
		_ = make([]int, in.Limit)
	}
	m, _ := binary.Uvarint(b)
	if fits(m) {
		_ = make([]int, m)
	}
	_ = make([]int, len(b)+cap(b))
}

func fill(n int) []int { return make([]int, n) } // want: makes as much as strconv\.Atoi says

func fits(n uint64) bool { return n < limit }
