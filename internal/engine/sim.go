package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/kv"
)

// Sim is an engine without weights: it takes as long as its timing model says
// and yields deterministic pseudo-tokens, so that a rig can run many workers on
// a small machine. What it does with KV is real, and strict:
//
// Each 8-byte word of KV is a code of its token and position, keyed by layer,
// head and place, and a token is a function of the codes that Sim finds behind
// the block table. So a page that is wrong, late, missing, torn or at another
// place yields another token than RefToken, in every later position too.
//
// Reading all KV for each token would take a GB a batch. Sim keeps, for each
// page, the sum of codes it last read there, and reads again
//   - every page that Extent handed out since (transfer writes, and reads,
//     through Extent): so all that was transferred is read when its sequence
//     is first computed;
//   - the tokens that a page has gained;
//   - a few pages of each sequence in turn, so that a write behind its back
//     shows after a while too.
//
// Tokens are bytes: 0-255, all drawn ones printable ASCII, and SimBOS and
// SimEOS, which are never drawn: an answer is as long as asked. Of the sampling
// parameters only Temperature (0 or not), Seed and Choice mean anything.
type Sim struct {
	cfg    SimConfig
	geo    kv.Geometry
	print  string
	arenas []*simArena
	keys   []uint64 // per word of a token: layer, head, K or V, place
	pages  []simPage
	turn   int // which pages are read again

	mu     sync.Mutex // held by Run
	closed atomic.Bool
	stop   chan struct{}
	timer  *time.Timer
	late   time.Duration // how late the last Run woke; the next is that much shorter
}

// SimConfig is the timing model and the KV of a Sim. Zero values stand for the
// defaults, which are those of the sim flags.
type SimConfig struct {
	PrefillRate  float64       // tokens/s of prompts; default 20000
	DecodeBase   time.Duration // a batch with decode tokens; default 8ms, negative: none
	DecodePerSeq time.Duration // and for each of them; default 100µs, negative: none
	KVBytes      int           // a token, over all layers and heads; default 2048, a multiple of 512
	Config                     // KVDType, Precision and Threads mean nothing here
}

// The shape of sim KV, and its vocabulary.
const (
	simLayers  = 4
	simHeads   = 8 // so TP goes up to 8
	simWord    = 8
	simContext = 131072

	SimBOS   = 256
	SimEOS   = 257
	SimVocab = 258

	printable = '~' - ' ' + 1
)

// simPage is what is known of a page.
type simPage struct {
	handed   atomic.Uint32 // times that Extent gave it out
	seen     uint32        // handed when sum was read
	position int           // of its first token, when sum was read
	tokens   int           // tokens from the first that are in sum
	sum      uint64
}

// simArena is an arena that notes which pages it hands out.
type simArena struct {
	arena
	pages []simPage
}

func (a *simArena) Extent(layer int, page kv.Page, head, heads int) []byte {
	b := a.arena.Extent(layer, page, head, heads)
	a.pages[page].handed.Add(1)
	return b
}

// NewSim makes a sim engine.
func NewSim(cfg SimConfig) (*Sim, error) {
	if cfg.PrefillRate == 0 {
		cfg.PrefillRate = 20000
	}
	if cfg.DecodeBase == 0 {
		cfg.DecodeBase = 8 * time.Millisecond
	}
	if cfg.DecodePerSeq == 0 {
		cfg.DecodePerSeq = 100 * time.Microsecond
	}
	if cfg.KVBytes == 0 {
		cfg.KVBytes = 2048
	}
	if cfg.Context == 0 {
		cfg.Context = simContext
	}
	const unit = simLayers * simHeads * 2 * simWord
	switch {
	case !(cfg.PrefillRate >= 0.001 && cfg.PrefillRate <= 1e12):
		return nil, fmt.Errorf("engine: sim prefill rate of %v tokens/s, want 0.001 to 1e12", cfg.PrefillRate)
	case cfg.DecodeBase > time.Hour || cfg.DecodePerSeq > time.Hour:
		return nil, fmt.Errorf("engine: sim decode times of %v and %v, want at most 1h", cfg.DecodeBase, cfg.DecodePerSeq)
	case cfg.KVBytes < unit || cfg.KVBytes%unit != 0 || cfg.KVBytes > 1<<24:
		return nil, fmt.Errorf("engine: sim KV of %d bytes a token, want a multiple of %d up to 16 MiB", cfg.KVBytes, unit)
	}
	if err := cfg.check(simHeads, simContext); err != nil {
		return nil, err
	}
	s := &Sim{cfg: cfg, stop: make(chan struct{}), pages: make([]simPage, cfg.Pages)}
	s.geo = kv.Geometry{Layers: simLayers, Heads: simHeads, TokenBytes: cfg.KVBytes / (simLayers * simHeads), PageSize: cfg.PageSize}
	arenas, err := newArenas(s.geo, cfg.Pages, cfg.TP)
	if err != nil {
		return nil, err
	}
	for _, a := range arenas {
		s.arenas = append(s.arenas, &simArena{*a, s.pages})
	}
	s.keys = make([]uint64, cfg.KVBytes/simWord)
	for i := range s.keys {
		s.keys[i] = mix(uint64(i) + 1)
	}
	s.print = fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "sim kv=%d context=%d revision=%d", cfg.KVBytes, cfg.Context, Revision)))
	s.timer = time.NewTimer(time.Hour)
	s.timer.Stop()
	return s, nil
}

func (s *Sim) Geometry() kv.Geometry  { return s.geo }
func (s *Sim) Fingerprint() string    { return s.print }
func (s *Sim) Memory(rank int) Memory { return s.arenas[rank] }
func (s *Sim) Vocab() int             { return SimVocab }
func (s *Sim) MaxBatchTokens() int    { return s.cfg.MaxBatchTokens }

// Close ends a Run that sleeps.
func (s *Sim) Close() {
	if !s.closed.Swap(true) {
		close(s.stop)
	}
}

// RefToken is the token that Sim draws after prompt and output: a pure
// function, for tests to compare with. The seed is 0 for a greedy request, else
// SimSeed of its Sampling.
func RefToken(prompt, output []int32, seed uint64) int32 {
	sum := uint64(0)
	for i, t := range prompt {
		sum += found(code(t, i), i)
	}
	for i, t := range output {
		sum += found(code(t, len(prompt)+i), len(prompt)+i)
	}
	return simToken(sum, len(prompt)+len(output), seed)
}

// SimSeed is what RefToken takes as the seed of a request.
func SimSeed(w *Sampling) uint64 {
	if w.Temperature == 0 {
		return 0
	}
	return w.Seed + mix(uint64(w.Choice))
}

// simToken draws printable ASCII.
func simToken(sum uint64, position int, seed uint64) int32 {
	return ' ' + int32(mix(sum^mix(seed)^uint64(position))%printable)
}

// code is what KV holds of a token.
func code(token int32, position int) uint64 {
	return mix(uint64(uint32(token))<<32 | uint64(uint32(position)))
}

// found is what a code adds to the sum that decides the next token, by the
// position at which it was found.
func found(code uint64, position int) uint64 { return mix(code ^ mix(uint64(position))) }

// mix is the finaliser of SplitMix64 (Steele, Lea and Flood: Fast Splittable
// Pseudorandom Number Generators. OOPSLA 2014): a bijection, with mix(0) = 0.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Run writes and reads the KV of the batch and takes the time that the model
// says. LayerDone comes at even distances.
func (s *Sim) Run(b *Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	took, err := s.Begin(b)
	if err != nil || len(b.Rows) == 0 {
		return err
	}
	begin := time.Now()
	// A timer is late by up to a millisecond, and a thousand batches of 8 ms
	// must take 8 s: the lateness of one sleep comes off the next.
	begin = begin.Add(-min(s.late, took/2))
	for l := range simLayers {
		s.Layer(b, l)
		if err := s.sleep(begin.Add(took * time.Duration(l+1) / simLayers)); err != nil {
			return err
		}
		if b.LayerDone != nil {
			b.LayerDone(l)
		}
	}
	return nil
}

// Begin checks a batch and says how long it takes: Run in virtual time is
// Begin, then Layer for each layer of the geometry at even distances.
func (s *Sim) Begin(b *Batch) (took time.Duration, err error) {
	if err := checkBatch(b, &s.cfg.Config, SimVocab); err != nil {
		return 0, err
	}
	return s.duration(b), nil
}

// Layer computes one layer of a batch. The last one draws the tokens.
func (s *Sim) Layer(b *Batch, layer int) {
	for i := range b.Rows {
		if b.Rows[i].Err == nil {
			s.write(&b.Rows[i], layer)
		}
	}
	if layer == simLayers-1 {
		s.draw(b)
	}
}

// duration is the timing model. A single token of an answer that has begun is
// decode, all else is prefill.
func (s *Sim) duration(b *Batch) time.Duration {
	tokens, seqs := 0, 0
	for i := range b.Rows {
		switch r := &b.Rows[i]; {
		case r.Err != nil:
		case len(r.Tokens) == 1 && r.Index > 0:
			seqs++
		default:
			tokens += len(r.Tokens)
		}
	}
	d := time.Duration(float64(tokens) / s.cfg.PrefillRate * float64(time.Second))
	if seqs > 0 {
		d += max(0, s.cfg.DecodeBase) + time.Duration(seqs)*max(0, s.cfg.DecodePerSeq)
	}
	return d
}

// sleep waits until the deadline, or the end of the engine.
func (s *Sim) sleep(until time.Time) error {
	left := time.Until(until)
	if left <= 0 {
		s.late = 0
		if s.closed.Load() {
			return ErrClosed
		}
		return nil
	}
	s.timer.Reset(left)
	select {
	case <-s.timer.C:
	case <-s.stop:
		return ErrClosed
	}
	s.late = min(max(0, time.Since(until)), maxLate)
	return nil
}

// maxLate bounds what is made up for: more is a machine without time to spare.
const maxLate = 2 * time.Millisecond

// words calls each for the KV of one token in one layer: for every head and
// half (K, then V) its words and their keys. They lie a page's half apart.
func (s *Sim) words(layer int, page kv.Page, slot int, each func(row []byte, keys []uint64)) {
	n := s.geo.TokenBytes / 2
	keys := s.keys[layer*simHeads*2*(n/simWord):]
	for _, a := range s.arenas {
		ext := a.arena.Extent(layer, page, 0, simHeads/s.cfg.TP)
		for at := slot * n; at < len(ext); at += s.cfg.PageSize * n {
			each(ext[at:at+n], keys[:n/simWord])
			keys = keys[n/simWord:]
		}
	}
}

// write puts the row's tokens into the pages of one layer.
func (s *Sim) write(r *Row, layer int) {
	for i, t := range r.Tokens {
		pos := r.Start + i
		page, slot := r.Pages[pos/s.cfg.PageSize], pos%s.cfg.PageSize
		if p := &s.pages[page]; p.tokens > slot { // another sequence's, from before
			p.sum, p.tokens = 0, 0
		}
		c := code(t, pos)
		s.words(layer, page, slot, func(row []byte, keys []uint64) {
			for j, key := range keys {
				binary.LittleEndian.PutUint64(row[j*simWord:], c+key)
			}
		})
	}
}

// read is the code of one token as KV has it. When all words agree it is their
// code; one that does not changes it.
func (s *Sim) read(page kv.Page, slot int) uint64 {
	var c, sum uint64
	first := true
	for layer := range simLayers {
		s.words(layer, page, slot, func(row []byte, keys []uint64) {
			for j, key := range keys {
				w := binary.LittleEndian.Uint64(row[j*simWord:]) - key
				if first {
					c, sum, first = w, w, false
				}
				sum += (w - c) * (key | 1)
			}
		})
	}
	return sum
}

// sum is that of the n tokens of a page that begins at a position, read again
// where it must be.
func (s *Sim) sum(page kv.Page, position, n int, again bool) uint64 {
	p := &s.pages[page]
	if handed := p.handed.Load(); handed != p.seen || position != p.position || p.tokens > n || again {
		p.seen, p.position, p.tokens, p.sum = handed, position, 0, 0
	}
	for ; p.tokens < n; p.tokens++ {
		p.sum += found(s.read(page, p.tokens), position+p.tokens)
	}
	return p.sum
}

// draw fills Out (and Scores) of the rows that want it.
func (s *Sim) draw(b *Batch) {
	s.turn++
	for i := range b.Rows {
		r := &b.Rows[i]
		if r.Err != nil {
			continue
		}
		for j, t := range r.Targets {
			if t >= 0 {
				r.Scores[j] = simLogprob(code(t, r.Start+j+1))
				if r.Top > 0 {
					r.Tops[j] = simTop(r.Tops[j][:0], ' '+t%printable, r.Scores[j], r.Top)
				}
			}
		}
		if r.Sample == nil {
			continue
		}
		end := r.Start + len(r.Tokens)
		n := s.geo.PagesFor(end)
		sum := uint64(0)
		for j, page := range r.Pages[:n] {
			at := j * s.cfg.PageSize
			sum += s.sum(page, at, min(s.cfg.PageSize, end-at), j == s.turn%n)
		}
		top := r.Out.Top[:0]
		token := simToken(sum, end, SimSeed(r.Sample))
		r.Out = Output{Token: token}
		if r.Sample.Logprobs >= 0 {
			r.Out.Logprob = simLogprob(sum)
			top = simTop(top, token, r.Out.Logprob, r.Sample.Logprobs)
		}
		r.Out.Top = top
	}
}

// simTop appends n tokens, the drawn one first and each less probable than the
// one before.
func simTop(top []TokenLogprob, token int32, logprob float32, n int) []TokenLogprob {
	for j := range min(n, printable) {
		top = append(top, TokenLogprob{' ' + (token-' '+int32(j))%printable, logprob - float32(float32(j)/2)})
	}
	return top
}

// simLogprob is made up: below 0, to -2, with few digits.
func simLogprob(x uint64) float32 { return float32(float32(mix(x)%256+1) / -128) }
