//metronome:pure

package sched

// RankMap says which ranks of a prefill one of our TP ranks receives from, and
// how many answers complete a room. It is SGLang's mapping for pools whose KV
// is split over TP ranks by heads (no MLA).
type RankMap struct {
	TP []int // P's tp ranks, ascending
	CP []int // P's cp ranks
	PP []int // P's pp ranks
	// DstRanks is how many of our ranks one P rank sends a room to.
	DstRanks int
	// Responses is how many distinct P ranks must report success for a room.
	Responses int
}

// MapRank maps our TP rank (0 … local.TP-1) and PP rank to the ranks of the
// prefill p. Sizes must have passed mismatch: one TP size divides the other,
// our CP is 1, our PP is 1 or p's.
func MapRank(local *ParallelInfo, tp, pp int, p *ParallelInfo) RankMap {
	m := RankMap{DstRanks: 1}
	switch d := local.TP; {
	case d >= p.TP: // several of our ranks share one of P's, each takes some of its heads
		m.TP = []int{tp / (d / p.TP)}
		m.DstRanks = d / p.TP
	default: // each of our ranks gathers its heads from several of P's
		n := p.TP / d
		m.TP = countFrom(tp*n, n)
	}
	m.Responses = len(m.TP)

	// A prefill with context parallelism holds the whole KV on its first cp rank,
	// unless it keeps its layers or its cache split over all of them.
	m.CP = []int{0}
	if p.CP > 1 && (p.LayerSplit || p.KVSharding) {
		m.CP = countFrom(0, p.CP)
		m.Responses *= p.CP
	}

	m.PP = []int{pp}
	if local.PP == 1 {
		m.PP = countFrom(0, p.PP)
		m.Responses *= p.PP
	}
	return m
}

func countFrom(first, n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = first + i
	}
	return s
}
