//metronome:pure

package transfer

import (
	"slices"
	"time"
)

// hurryTime is how long a frame that is being written into pages of a revoked
// grant may still take before its link is closed.
const hurryTime = 2 * time.Second

// maxNotices is how many notices may wait on one link; more are dropped, and P
// ends those rooms by its own time limit.
const maxNotices = 4096

// lump is how many bytes of control frames are written in one go.
const lump = 64 << 10

// mailbox is what D has still to send on one link.
type mailbox struct {
	queue   []order
	notices int    // of them, without a part
	credit  uint64 // to give back
}

// post puts a frame into the mailbox. A GRANT that has not gone out yet is
// taken back together with its ABORT, so there is at most one frame for each
// open grant and one for each grant that was open when the writer last made
// progress: twice as many as grants can be open, and the notices. Only a peer
// that ends grants it was never told of can bring about more; false: it does,
// and must lose its link.
func (m *mailbox) post(o order, grants int) bool {
	switch {
	case o.p == nil:
		m.notices++
	case o.kind == kindAbort && o.p.sent == grantQueued:
		m.queue = slices.DeleteFunc(m.queue, func(q order) bool { return q.p == o.p })
		return true
	case len(m.queue)-m.notices >= 2*grants:
		return false
	}
	m.queue = append(m.queue, o)
	return true
}

// noticeKind is the frame of a notice about a room that was never granted.
func noticeKind(waits bool) kind {
	if waits {
		return kindQueued
	}
	return kindAbort
}

// take empties the mailbox, or of a long one so much as makes a lump.
func (m *mailbox) take(batch []order) ([]order, uint64) {
	size := 0
	for _, o := range m.queue {
		if size >= lump {
			break
		}
		size += headSize + grantSize
		switch {
		case o.p == nil:
			m.notices--
		case o.kind == kindRecompute:
			size += 4 * len(o.p.g.spec.Recompute)
			fallthrough
		case o.kind == kindGrant:
			o.p.sent = grantSent
		}
		batch = append(batch, o)
	}
	m.queue = slices.Delete(m.queue, 0, len(batch))
	credit := m.credit
	m.credit = 0
	return batch, credit
}

// encode appends the frames of what take gave. dRanks is D's TP size.
func encode(b []byte, batch []order, credit uint64, dRanks int) []byte {
	if credit > 0 {
		b = appendFrame(b, kindCredit, 0, func(b []byte) []byte { return appendU64(b, credit) })
	}
	for _, o := range batch {
		if o.p == nil {
			b = appendFrame(b, o.kind, 0, func(b []byte) []byte { return appendU64(b, uint64(o.room)) })
			continue
		}
		s := &o.p.g.spec
		var build func([]byte) []byte
		switch o.kind {
		case kindGrant, kindRecompute:
			m := grantMsg{room: s.Room, digest: s.Digest, dRanks: dRanks, prefix: s.Prefix, tokens: s.Tokens, pages: len(s.Pages)}
			if o.kind == kindRecompute {
				m.recompute, m.index, m.sampling = s.Recompute, s.Index, s.Sampling
			}
			build = m.append
		case kindAbort:
			build = func(b []byte) []byte { return appendU64(b, uint64(s.Room)) }
		}
		b = appendFrame(b, o.kind, s.Grant, build)
	}
	return b
}
