//metronome:pure

package sched

import (
	"fmt"
	"slices"
	"strings"
)

// PeersStats counts what Peers has done since it was made; Known and
// FetchesInFlight are as of now.
type PeersStats struct {
	Known           int // addresses whose parallel info is known
	FetchesInFlight int
	FetchOK         uint64 // parallel info fetches that brought an answer, a mismatch among them
	FetchFailed     uint64 // the peer's fault
	FetchVoid       uint64 // counted for nothing: stale, cancelled, our own fault
	Mismatches      uint64
	// Records that were known and are not any more, by cause.
	EvictedHeartbeat, EvictedReplaced, EvictedIdle uint64
}

// Stats is a snapshot for the metrics.
func (p *Peers) Stats() PeersStats { return p.stats }

// PeerRow is one record as people look at it.
type PeerRow struct {
	Addr     string
	State    string // "unknown", "known" or "mismatch"
	Gen      uint64
	Instance string
	Attempts int // of the open episode of its parallel info
	InFlight []string
	Links    int // up
	Waiting  int // requests that are not linked yet
	Linked   int // linked, no grant yet
	Granted  int
	Failures int    // of heartbeats, in a row
	Error    string // the last cause, or the mismatch
}

// Table is every record, by address.
func (p *Peers) Table() []PeerRow {
	rows := make([]PeerRow, 0, len(p.all))
	for _, pr := range p.all {
		rows = append(rows, pr.row())
	}
	slices.SortFunc(rows, func(a, b PeerRow) int { return strings.Compare(a.Addr, b.Addr) })
	return rows
}

func (pr *peer) row() PeerRow {
	r := PeerRow{
		Addr: pr.addr, State: "unknown", Gen: pr.gen, Instance: pr.instance,
		Waiting: pr.unresolved, Linked: pr.at[isLinked], Granted: pr.at[isGranted],
		Failures: pr.beat.failures, Error: pr.info.cause,
	}
	note := func(t *try, what string) {
		if t.inFlight() {
			r.InFlight = append(r.InFlight, what)
		}
	}
	note(&pr.info.try, "info")
	note(&pr.query.try, "ranks")
	note(&pr.beat.try, "health")
	if pr.info.isOpen {
		r.Attempts = pr.info.spent
	}
	if pr.query.cause != "" {
		r.Error = pr.query.cause
	}
	for _, s := range pr.sets {
		r.Links += s.up
		for _, k := range s.ranks {
			note(&k.try, "lookup "+k.key.String())
			if k.cause != "" {
				r.Error = k.cause
			}
		}
		for _, pa := range s.pairs {
			note(&pa.try, "dial "+pa.rank.key.String())
			if pa.link == 0 && pa.cause != "" {
				r.Error = pa.cause
			}
		}
	}
	if pr.beat.cause != "" {
		r.Error = pr.beat.cause
	}
	switch {
	case pr.known:
		r.State = "known"
	case pr.bad != nil:
		r.State, r.Error = "mismatch", pr.bad.Message
	}
	return r
}

// Describe prints the table, for transcripts and for /debug/peers.
func (p *Peers) Describe() string {
	var b strings.Builder
	for _, r := range p.Table() {
		fmt.Fprintf(&b, "%s %s gen=%d", r.Addr, r.State, r.Gen)
		if r.Instance != "" {
			fmt.Fprintf(&b, " instance=%s", r.Instance)
		}
		for _, n := range []struct {
			name string
			n    int
		}{{"attempts", r.Attempts}, {"links", r.Links}, {"waiting", r.Waiting}, {"linked", r.Linked}, {"granted", r.Granted}, {"failures", r.Failures}} {
			if n.n != 0 {
				fmt.Fprintf(&b, " %s=%d", n.name, n.n)
			}
		}
		if len(r.InFlight) > 0 {
			fmt.Fprintf(&b, " in-flight=[%s]", strings.Join(r.InFlight, ", "))
		}
		if r.Error != "" {
			fmt.Fprintf(&b, " error=%q", r.Error)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
