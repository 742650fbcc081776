//metronome:pure

package transfer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Limits of the wire. Every length is checked against one of these before
// memory is taken for it.
const (
	MaxFrame   = 1 << 20             // bytes of one frame, head and payload
	maxPayload = MaxFrame - headSize // bytes
	MaxTop     = 1024                // likeliest tokens in FIRST
	MaxSample  = 64 << 10            // bytes of sampling in RECOMPUTE
	// MaxRecompute is how many tokens a RECOMPUTE can carry.
	MaxRecompute = (maxPayload - grantSize - 12 - MaxSample) / 4

	maxToken  = 4096 // bytes of a bearer token
	maxName   = 256  // bytes of an instance, fingerprint, dtype or code
	maxText   = 4096 // bytes of a text for people
	maxBusy   = 16384
	maxLayers = 1 << 16
	maxHeads  = math.MaxUint16
	maxTokens = 1 << 30
	minCredit = 2 << 20
	maxCredit = 1 << 30
)

// version of the protocol; both sides must have the same.
const version = 1

// headSize is the size of every frame's head in bytes.
const headSize = 40

var noHead [headSize]byte // room for a head

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// kind is the type of a frame; its number is on the wire.
type kind uint8

// D to P. The payload layout stands beside each; numbers are little-endian,
// str is a u16 length and so many bytes.
const (
	kindHello     kind = 1 + iota // str token, str instance, u32 dp, u16 tp, u16 rank, u32 dp cp tp pp wanted, str P instance expected, str fingerprint, str dtype, u32 layers heads token-bytes page-size, u64 credit
	kindGrant                     // u64 room, u64 digest of the prompt, u16 D ranks, u32 prefix, u32 tokens, u32 pages
	kindRecompute                 // as GRANT, u32 index, u32 n, n × i32 token, u32 n, n bytes of sampling
	kindAbort                     // u64 room; grant 0: a room that was never granted
	kindReceived                  // nothing
	kindCredit                    // u64 bytes
	kindPing                      // nothing
	kindQueued                    // u64 room: D will grant it when it has pages
)

// P to D.
const (
	kindWelcome kind = 65 + iota // str instance, str fingerprint, str dtype, u16 tp, u16 rank, u32 dp, u32 dp rank, u32 layers heads token-bytes page-size
	kindRefuse                   // str code, str text
	kindData                     // count × one extent of the heads, in order of the index
	kindFirst                    // i32 token, u64 seed, f32 logprob, u32 cached, u32 prompt tokens, u16 n, n × (i32 id, f32 logprob)
	kindBusy                     // n × u64 grant
	kindEnd                      // u8 status (0 ok, 1 failed), str code, str text
	kindPong                     // nothing
)

const grantSize = 30 // bytes of a GRANT's payload

// kinds says what may be on the wire at all.
var kinds = [256]struct {
	name  string
	max   int  // bytes of payload
	grant bool // the head names a grant
}{
	kindHello:     {"HELLO", 4 * maxText, false},
	kindGrant:     {"GRANT", grantSize, true},
	kindRecompute: {"RECOMPUTE", maxPayload, true},
	kindAbort:     {"ABORT", 8, false}, // may, need not
	kindReceived:  {"RECEIVED", 0, true},
	kindCredit:    {"CREDIT", 8, false},
	kindPing:      {"PING", 0, false},
	kindQueued:    {"QUEUED", 8, false},
	kindWelcome:   {"WELCOME", 4 * maxText, false},
	kindRefuse:    {"REFUSE", 2 * maxText, false},
	kindData:      {"DATA", maxPayload, true},
	kindFirst:     {"FIRST", 26 + 8*MaxTop, true},
	kindBusy:      {"BUSY", 8 * maxBusy, false},
	kindEnd:       {"END", 2 * maxText, true},
	kindPong:      {"PONG", 0, false},
}

func (k kind) String() string {
	if n := kinds[k].name; n != "" {
		return n
	}
	return fmt.Sprintf("type %d", uint8(k))
}

// toP tells the direction of a frame.
func (k kind) toP() bool { return k < 64 }

// head opens every frame:
//
//	 0  2  "KV"
//	 2  1  version of the protocol
//	 3  1  type
//	 4  4  length of the payload in bytes
//	 8  8  grant; 0 where the frame names none
//	16  4  layer     (16 to 31 are 0 in every frame but DATA)
//	20  4  index     first entry of the grant's page list
//	24  4  count     entries
//	28  2  head      first KV head, counted over the whole model
//	30  2  heads
//	32  4  CRC-32C of the payload
//	36  4  CRC-32C of the bytes 0 to 35
type head struct {
	kind                kind
	size                uint32
	grant               uint64
	layer, index, count uint32
	head, heads         uint16
	sum                 uint32
}

// breach is a frame that breaks the protocol. It closes the link. Why is one
// of a few words, for the metric.
type breach struct{ why, text string }

func (b *breach) Error() string { return b.text }

func breachf(why, format string, args ...any) error {
	return &breach{why, fmt.Sprintf(format, args...)}
}

// Words for rejected frames.
const (
	whyHead      = "bad_head"
	whyPayload   = "bad_payload"
	whyRange     = "bad_range"
	whyDuplicate = "duplicate"
	whyOrder     = "bad_order"
	whyCredit    = "over_credit"
	whyUnknown   = "unknown_grant"
	whySum       = "bad_crc"
	whyFull      = "overloaded"
	whyRoom      = "foreign_room"
)

func (h *head) put(b *[headSize]byte) {
	b[0], b[1], b[2], b[3] = 'K', 'V', version, byte(h.kind)
	le := binary.LittleEndian
	le.PutUint32(b[4:], h.size)
	le.PutUint64(b[8:], h.grant)
	le.PutUint32(b[16:], h.layer)
	le.PutUint32(b[20:], h.index)
	le.PutUint32(b[24:], h.count)
	le.PutUint16(b[28:], h.head)
	le.PutUint16(b[30:], h.heads)
	le.PutUint32(b[32:], h.sum)
	le.PutUint32(b[36:], crc32.Checksum(b[:36], castagnoli))
}

// parseHead checks everything that can be told from the head alone. toP is
// the direction the frame came in.
func parseHead(b *[headSize]byte, toP bool) (head, error) {
	le := binary.LittleEndian
	h := head{
		kind: kind(b[3]), size: le.Uint32(b[4:]), grant: le.Uint64(b[8:]),
		layer: le.Uint32(b[16:]), index: le.Uint32(b[20:]), count: le.Uint32(b[24:]),
		head: le.Uint16(b[28:]), heads: le.Uint16(b[30:]), sum: le.Uint32(b[32:]),
	}
	k := &kinds[h.kind]
	switch {
	case b[0] != 'K' || b[1] != 'V':
		return h, breachf(whyHead, "the head begins with % x instead of KV", b[:2])
	case le.Uint32(b[36:]) != crc32.Checksum(b[:36], castagnoli):
		return h, breachf(whyHead, "the head's checksum is wrong")
	case b[2] != version:
		return h, breachf(whyHead, "protocol version %d, ours is %d", b[2], version)
	case k.name == "" || h.kind.toP() != toP:
		return h, breachf(whyHead, "%v is not sent in this direction", h.kind)
	case int64(h.size) > int64(k.max):
		return h, breachf(whyHead, "%v has %d bytes of payload, at most %d are allowed", h.kind, h.size, k.max)
	case k.grant && h.grant == 0:
		return h, breachf(whyHead, "%v names no grant", h.kind)
	case !k.grant && h.kind != kindAbort && h.grant != 0:
		return h, breachf(whyHead, "%v names a grant", h.kind)
	case h.kind != kindData && (h.layer|h.index|h.count|uint32(h.head)|uint32(h.heads)) != 0:
		return h, breachf(whyHead, "%v names pages", h.kind)
	}
	return h, nil
}

// foreignVersion tells the version of a sound head that is not ours: in the
// first frame of a connection that is worth an answer of its own.
func foreignVersion(b *[headSize]byte) (int, bool) {
	sound := b[0] == 'K' && b[1] == 'V' &&
		binary.LittleEndian.Uint32(b[36:]) == crc32.Checksum(b[:36], castagnoli)
	return int(b[2]), sound && b[2] != version
}

// appendFrame appends a whole control frame whose payload build appends.
func appendFrame(b []byte, k kind, grant uint64, build func([]byte) []byte) []byte {
	at := len(b)
	b = append(b, noHead[:]...)
	if build != nil {
		b = build(b)
	}
	payload := b[at+headSize:]
	h := head{kind: k, size: uint32(len(payload)), grant: grant, sum: crc32.Checksum(payload, castagnoli)}
	h.put((*[headSize]byte)(b[at:]))
	return b
}

// foreign describes the first bytes of something that is not this protocol.
func foreign(b []byte) string {
	switch {
	case b[0] == 0xff:
		return "a ZMTP greeting (the control socket of an SGLang worker?)"
	case b[0] == 0x16 && b[1] == 3:
		return "a TLS handshake"
	case isUpper(b[0]) && isUpper(b[1]):
		return "HTTP"
	}
	return fmt.Sprintf("the bytes % x", b)
}

func isUpper(c byte) bool { return 'A' <= c && c <= 'Z' }

// cursor reads a payload. It remembers the first fault, so that fields can be
// read in a row and the fault be asked for once, by end.
type cursor struct {
	b   []byte
	bad string
}

func (c *cursor) take(n int, what string) []byte {
	if c.bad == "" && len(c.b) < n {
		c.bad = what + " is cut off"
	}
	if c.bad != "" {
		return nil
	}
	v := c.b[:n]
	c.b = c.b[n:]
	return v
}

func (c *cursor) u8(what string) uint8 {
	if v := c.take(1, what); v != nil {
		return v[0]
	}
	return 0
}

func (c *cursor) u16(what string) uint16 {
	if v := c.take(2, what); v != nil {
		return binary.LittleEndian.Uint16(v)
	}
	return 0
}

func (c *cursor) u32(what string) uint32 {
	if v := c.take(4, what); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

func (c *cursor) u64(what string) uint64 {
	if v := c.take(8, what); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (c *cursor) f32(what string) float32 { return math.Float32frombits(c.u32(what)) }

// number is a u32 in [low, high].
func (c *cursor) number(what string, low, high int) int {
	v := c.u32(what)
	if c.bad == "" && (int64(v) < int64(low) || int64(v) > int64(high)) {
		c.bad = fmt.Sprintf("%s is %d, it must be %d to %d", what, v, low, high)
	}
	return int(v)
}

func (c *cursor) str(what string, most int) string {
	n := int(c.u16(what))
	if c.bad == "" && n > most {
		c.bad = fmt.Sprintf("%s has %d bytes, at most %d are allowed", what, n, most)
	}
	return string(c.take(n, what))
}

func (c *cursor) end(k kind) error {
	if c.bad == "" && len(c.b) != 0 {
		c.bad = fmt.Sprintf("%d bytes too many", len(c.b))
	}
	if c.bad != "" {
		return breachf(whyPayload, "%v: %s", k, c.bad)
	}
	return nil
}

func appendStr(b []byte, s string, most int) []byte {
	s = s[:min(len(s), most)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

func appendU32(b []byte, v ...int) []byte {
	for _, n := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return b
}

func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func appendGeometry(b []byte, g kv.Geometry) []byte {
	return appendU32(b, g.Layers, g.Heads, g.TokenBytes, g.PageSize)
}

func (c *cursor) geometry() kv.Geometry {
	return kv.Geometry{
		Layers:     c.number("layers", 1, maxLayers),
		Heads:      c.number("heads", 1, maxHeads),
		TokenBytes: c.number("token bytes", 1, maxPayload),
		PageSize:   c.number("page size", 1, maxPayload),
	}
}

// hello is D's first frame.
type hello struct {
	Hello
	token           string
	tp, rank        int
	dp, cp, tpr, pp int // the P rank that is wanted
	expect          string
	geometry        kv.Geometry
	credit          uint64
}

func (m *hello) append(b []byte) []byte {
	b = appendStr(b, m.token, maxToken)
	b = appendStr(b, m.Instance, maxName)
	b = appendU32(b, m.DP)
	b = binary.LittleEndian.AppendUint16(b, uint16(m.tp))
	b = binary.LittleEndian.AppendUint16(b, uint16(m.rank))
	b = appendU32(b, m.dp, m.cp, m.tpr, m.pp)
	b = appendStr(b, m.expect, maxName)
	b = appendStr(b, m.Fingerprint, maxName)
	b = appendStr(b, m.KVDType, maxName)
	b = appendGeometry(b, m.geometry)
	return binary.LittleEndian.AppendUint64(b, m.credit)
}

func (m *hello) parse(b []byte) error {
	c := cursor{b: b}
	m.token = c.str("token", maxToken)
	m.Instance = c.str("instance", maxName)
	m.DP = c.number("dp", 0, math.MaxInt32)
	m.tp, m.rank = int(c.u16("tp")), int(c.u16("rank"))
	m.dp, m.cp = c.number("wanted dp", 0, math.MaxInt32), c.number("wanted cp", 0, math.MaxInt32)
	m.tpr, m.pp = c.number("wanted tp", 0, math.MaxInt32), c.number("wanted pp", 0, math.MaxInt32)
	m.expect = c.str("expected instance", maxName)
	m.Fingerprint = c.str("fingerprint", maxName)
	m.KVDType = c.str("kv dtype", maxName)
	m.geometry = c.geometry()
	m.credit = c.u64("credit")
	switch {
	case c.bad != "":
	case m.Instance == "":
		c.bad = "the instance is empty"
	case m.rank >= m.tp:
		c.bad = fmt.Sprintf("rank %d of %d ranks", m.rank, m.tp)
	case m.credit < minCredit || m.credit > maxCredit:
		c.bad = fmt.Sprintf("credit is %d bytes, it must be %d to %d", m.credit, minCredit, maxCredit)
	}
	return c.end(kindHello)
}

// welcome is P's answer.
type welcome struct {
	Welcome
	rank     int
	geometry kv.Geometry
}

func (m *welcome) append(b []byte) []byte {
	b = appendStr(b, m.Instance, maxName)
	b = appendStr(b, m.Fingerprint, maxName)
	b = appendStr(b, m.KVDType, maxName)
	b = binary.LittleEndian.AppendUint16(b, uint16(m.TP))
	b = binary.LittleEndian.AppendUint16(b, uint16(m.rank))
	b = appendU32(b, m.DP, m.DPRank)
	return appendGeometry(b, m.geometry)
}

func (m *welcome) parse(b []byte) error {
	c := cursor{b: b}
	m.Instance = c.str("instance", maxName)
	m.Fingerprint = c.str("fingerprint", maxName)
	m.KVDType = c.str("kv dtype", maxName)
	m.TP, m.rank = int(c.u16("tp")), int(c.u16("rank"))
	m.DP = c.number("dp", 1, math.MaxInt32)
	m.DPRank = c.number("dp rank", 0, math.MaxInt32)
	m.geometry = c.geometry()
	m.PageSize = m.geometry.PageSize
	if c.bad == "" && (m.rank >= m.TP || m.DPRank >= m.DP) {
		c.bad = fmt.Sprintf("tp rank %d of %d, dp rank %d of %d", m.rank, m.TP, m.DPRank, m.DP)
	}
	return c.end(kindWelcome)
}

// refuse is P's other answer.
type refuse struct{ code, text string }

func (m *refuse) append(b []byte) []byte {
	return appendStr(appendStr(b, m.code, maxName), m.text, maxText)
}

func (m *refuse) parse(b []byte) error {
	c := cursor{b: b}
	m.code, m.text = c.str("code", maxName), c.str("text", maxText)
	return c.end(kindRefuse)
}

// grantMsg is GRANT, and RECOMPUTE when tokens is not nil.
type grantMsg struct {
	room           int64
	digest         uint64 // of the prompt; of RECOMPUTE 0
	dRanks         int
	prefix, tokens int // positions
	pages          int
	recompute      []int32
	index          int
	sampling       []byte
}

func (m *grantMsg) append(b []byte) []byte {
	b = appendU64(appendU64(b, uint64(m.room)), m.digest)
	b = binary.LittleEndian.AppendUint16(b, uint16(m.dRanks))
	b = appendU32(b, m.prefix, m.tokens, m.pages)
	if m.recompute == nil {
		return b
	}
	b = appendU32(b, m.index, len(m.recompute))
	for _, t := range m.recompute {
		b = appendU32(b, int(t))
	}
	b = appendU32(b, len(m.sampling))
	return append(b, m.sampling...)
}

// parse keeps no part of b.
func (m *grantMsg) parse(k kind, b []byte) error {
	c := cursor{b: b}
	m.room, m.digest = c.room(), c.u64("digest")
	m.dRanks = int(c.u16("D ranks"))
	m.prefix = c.number("prefix", 0, maxTokens)
	m.tokens = c.number("tokens", 1, maxTokens)
	m.pages = c.number("pages", 0, maxTokens)
	if c.bad == "" && m.prefix > m.tokens {
		c.bad = fmt.Sprintf("prefix %d is longer than the prompt of %d tokens", m.prefix, m.tokens)
	}
	m.recompute, m.index, m.sampling = nil, 0, nil
	if k == kindRecompute {
		m.index = c.number("index", 0, maxTokens)
		n := c.number("tokens", 1, MaxRecompute)
		if raw := c.take(4*n, "tokens"); raw != nil {
			m.recompute = make([]int32, n)
			for i := range m.recompute {
				m.recompute[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
			}
		}
		m.sampling = append([]byte(nil), c.take(c.number("sampling", 0, MaxSample), "sampling")...)
		if c.bad == "" && len(m.recompute) != m.tokens {
			c.bad = fmt.Sprintf("%d tokens to recompute, %d granted", len(m.recompute), m.tokens)
		}
	}
	return c.end(k)
}

func (c *cursor) room() int64 {
	v := c.u64("room")
	if c.bad == "" && v > math.MaxInt64 {
		c.bad = fmt.Sprintf("room %d has more than 63 bits", v)
	}
	return int64(v)
}

// parseRoom reads ABORT and QUEUED.
func parseRoom(k kind, b []byte) (room int64, err error) {
	c := cursor{b: b}
	room = c.room()
	return room, c.end(k)
}

func parseCredit(b []byte) (uint64, error) {
	c := cursor{b: b}
	n := c.u64("bytes")
	return n, c.end(kindCredit)
}

func (f *First) append(b []byte) []byte {
	top := f.Top[:min(len(f.Top), MaxTop)]
	b = appendU32(b, int(f.Token))
	b = binary.LittleEndian.AppendUint64(b, f.Seed)
	b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f.Logprob))
	b = appendU32(b, f.Cached, f.PromptTokens)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(top)))
	for _, t := range top {
		b = appendU32(b, int(t.ID))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(t.Logprob))
	}
	return b
}

func (f *First) parse(b []byte) error {
	c := cursor{b: b}
	f.Token = int32(c.u32("token"))
	f.Seed = c.u64("seed")
	f.Logprob = c.f32("logprob")
	f.Cached = c.number("cached", 0, maxTokens)
	f.PromptTokens = c.number("prompt tokens", 1, maxTokens)
	n := int(c.u16("top"))
	switch {
	case c.bad != "":
	case f.Token < 0:
		c.bad = fmt.Sprintf("token %d", f.Token)
	case f.Cached > f.PromptTokens:
		c.bad = fmt.Sprintf("%d tokens cached of %d", f.Cached, f.PromptTokens)
	case n > MaxTop || len(c.b) != 8*n:
		c.bad = fmt.Sprintf("%d top tokens in %d bytes", n, len(c.b))
	case n > 0:
		f.Top = make([]TokenLogprob, n)
		for i := range f.Top {
			f.Top[i] = TokenLogprob{int32(c.u32("id")), c.f32("logprob")}
		}
	}
	return c.end(kindFirst)
}

// appendEnd: cause nil is status ok.
func appendEnd(b []byte, cause *Cause) []byte {
	if cause == nil {
		return append(b, 0, 0, 0, 0, 0)
	}
	return appendStr(appendStr(append(b, 1), cause.Code, maxName), cause.Message, maxText)
}

func parseEnd(b []byte) (*Cause, error) {
	c := cursor{b: b}
	status := c.u8("status")
	cause := &Cause{c.str("code", maxName), c.str("text", maxText)}
	if c.bad == "" && status > 1 {
		c.bad = fmt.Sprintf("status %d", status)
	}
	if status == 0 {
		if c.bad == "" && *cause != (Cause{}) {
			c.bad = "status ok with a cause"
		}
		cause = nil
	}
	return cause, c.end(kindEnd)
}

func appendGrants(b []byte, grants []uint64) []byte {
	for _, g := range grants {
		b = appendU64(b, g)
	}
	return b
}

// parseBusy calls each for every grant.
func parseBusy(b []byte, each func(grant uint64)) error {
	c := cursor{b: b}
	for len(c.b) > 0 && c.bad == "" {
		if grant := c.u64("grant"); c.bad == "" {
			each(grant)
		}
	}
	return c.end(kindBusy)
}
