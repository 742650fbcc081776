//metronome:pure

package model

// pairTable maps an adjacent pair of symbols to what they merge into. It is an
// open-addressed table, at most half full: one lookup is one or two cache
// misses, and encoding does about three per byte of text.
type pairTable struct {
	slots []pairSlot // a power of two of them
	used  int
}

type pairSlot struct {
	left, right int32
	rank        uint32 // lower merges first
	out         int32  // the merged symbol; -1 in an empty slot
}

// newPairTable makes a table with room for n pairs.
func newPairTable(n int) pairTable {
	size := 16
	for size < 2*n {
		size *= 2
	}
	t := pairTable{slots: make([]pairSlot, size)}
	for i := range t.slots {
		t.slots[i].out = -1
	}
	return t
}

// slot is the index of the pair's slot, or of the empty one where it would be.
func (t *pairTable) slot(left, right int32) int {
	h := (uint64(uint32(left))<<32 | uint64(uint32(right))) * 0x9e3779b97f4a7c15
	i := int(h>>32) & (len(t.slots) - 1)
	for t.slots[i].out >= 0 && (t.slots[i].left != left || t.slots[i].right != right) {
		i = (i + 1) & (len(t.slots) - 1)
	}
	return i
}

// add notes a pair. The first rank given to a pair stays.
func (t *pairTable) add(left, right int32, rank uint32, out int32) {
	if 2*t.used >= len(t.slots) {
		old := t.slots
		*t = newPairTable(2 * t.used)
		for _, s := range old {
			if s.out >= 0 {
				t.add(s.left, s.right, s.rank, s.out)
			}
		}
	}
	if i := t.slot(left, right); t.slots[i].out < 0 {
		t.slots[i] = pairSlot{left, right, rank, out}
		t.used++
	}
}

// merger joins the symbols of one stretch of text by rank, lowest first and
// leftmost among equals, until no pair is in the table: the byte-pair encoding
// of Sennrich et al. (2016) with a priority queue, O(n log n), as sentencepiece
// and llama.cpp do it. Its slices are reused from stretch to stretch.
type merger struct {
	pairs *pairTable
	sym   []int32 // by unit of the stretch; merged where a symbol to the left has swallowed it
	next  []int32 // the unit at which the next symbol begins; len(sym) at the end
	prev  []int32 // the unit of the symbol before; -1 at the start
	heap  []candidate
}

// merged marks a unit that is no longer the start of a symbol.
const merged = -2

// candidate is a pair that was adjacent when it was queued. It is stale, and
// dropped, when the symbols at its place are no longer those.
type candidate struct {
	rank uint32
	unit int32 // where the left symbol begins
	slot int32 // of the pair in the table
}

func (m *merger) reset() { m.sym = m.sym[:0] }

// push appends one unit with its symbol; -1 is a symbol that merges with nothing.
func (m *merger) push(sym int32) { m.sym = append(m.sym, sym) }

// run merges. After it, the symbols are at unit 0, next[0], next[next[0]], …
func (m *merger) run() {
	n := int32(len(m.sym))
	m.next, m.prev, m.heap = m.next[:0], m.prev[:0], m.heap[:0]
	for i := range n {
		m.next = append(m.next, i+1)
		m.prev = append(m.prev, i-1)
	}
	for i := range n - 1 {
		if c, ok := m.candidate(i); ok {
			m.heap = append(m.heap, c)
		}
	}
	for i := len(m.heap)/2 - 1; i >= 0; i-- {
		m.down(i)
	}
	for len(m.heap) > 0 {
		c := m.heap[0]
		last := len(m.heap) - 1
		m.heap[0] = m.heap[last]
		m.heap = m.heap[:last]
		m.down(0)

		left, pair := c.unit, &m.pairs.slots[c.slot]
		right := m.next[left]
		if m.sym[left] != pair.left || right == n || m.sym[right] != pair.right {
			continue
		}
		m.sym[left], m.sym[right] = pair.out, merged
		after := m.next[right]
		m.next[left] = after
		if after < n {
			m.prev[after] = left
			m.offer(left)
		}
		if before := m.prev[left]; before >= 0 {
			m.offer(before)
		}
	}
}

// candidate looks up the pair that begins at a unit.
func (m *merger) candidate(left int32) (candidate, bool) {
	slot := m.pairs.slot(m.sym[left], m.sym[m.next[left]])
	s := &m.pairs.slots[slot]
	return candidate{s.rank, left, int32(slot)}, s.out >= 0
}

// offer queues the pair that begins at a unit, if it merges.
func (m *merger) offer(left int32) {
	c, ok := m.candidate(left)
	if !ok {
		return
	}
	m.heap = append(m.heap, c)
	for i := len(m.heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !m.heap[i].before(m.heap[up]) {
			return
		}
		m.heap[i], m.heap[up] = m.heap[up], m.heap[i]
		i = up
	}
}

func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.unit < d.unit
}

// down restores the heap below index i.
func (m *merger) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(m.heap) {
			return
		}
		if child+1 < len(m.heap) && m.heap[child+1].before(m.heap[child]) {
			child++
		}
		if !m.heap[child].before(m.heap[i]) {
			return
		}
		m.heap[i], m.heap[child] = m.heap[child], m.heap[i]
		i = child
	}
}
