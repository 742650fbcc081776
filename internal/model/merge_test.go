package model

import "testing"

// TestPairTableGrows: a table holds more pairs than it was made for, and of a
// pair the first rank.
func TestPairTableGrows(t *testing.T) {
	table := newPairTable(1)
	const n = 1000
	for i := range int32(n) {
		table.add(i, i+1, uint32(i), i)
		table.add(i, i+1, 7, 7)
	}
	for i := range int32(n) {
		if s := table.slots[table.slot(i, i+1)]; s.out != i || s.rank != uint32(i) {
			t.Fatalf("pair %d has rank %d and becomes %d", i, s.rank, s.out)
		}
	}
	if s := table.slots[table.slot(3, 3)]; s.out >= 0 || table.used != n || 2*table.used > len(table.slots) {
		t.Errorf("a pair that nobody added becomes %d; %d of %d slots are used", s.out, table.used, len(table.slots))
	}
}
