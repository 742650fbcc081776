package engine

import (
	"errors"
	"fmt"
	"math"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
)

// Revision names the arithmetic of this package and its kernels: the order of
// every float sum, the roundings, exp, log, sin and cos, the random generator
// (docs/numerics.md). It is part of the fingerprint, so that two workers whose
// bits could differ never serve one request together. Any change of a bit of
// any logit or draw must change it.
const Revision = 1

// UseKernels chooses the instructions that all CPU engines of this process
// compute with: auto, portable, avx2 or avx512. It is called before they are
// made. That the processor lacks them is an error.
func UseKernels(name string) error { return kernels.Use(name) }

// Kernels is the name of those in use.
func Kernels() string { return kernels.Path() }

// Engine computes forward passes over paged KV. CPU and Sim are the two
// engines; a driver uses one through this seam.
type Engine interface {
	// Geometry is the shape of the whole model's KV, before any TP split.
	Geometry() kv.Geometry
	// Fingerprint says in hex what the bits of an answer depend on: weights,
	// precision, KV layers, heads, token bytes and dtype, context, Revision.
	// The page size and TP are not in it: no bit depends on them, and a page
	// size that differs is a mismatch with a name of its own.
	Fingerprint() string
	// Memory is the KV bytes of one TP rank.
	Memory(rank int) Memory
	// Run computes one forward pass on the caller's goroutine and the engine's
	// own threads. Calls never overlap. What is wrong with one row alone is in
	// its Err, and the others are computed as if it were not there. An error says
	// that nothing was drawn; KV rows of the batch may or may not be written.
	Run(b *Batch) error
	// Vocab is the number of token ids; every id is below it.
	Vocab() int
	// MaxBatchTokens is how many tokens the rows of one batch may have in all.
	MaxBatchTokens() int
	// Close stops the engine's threads. A Run in progress ends with ErrClosed.
	Close()
}

// Memory is the KV bytes of one TP rank.
type Memory interface {
	// Extent is the bytes of heads [head, head+heads) (local to the rank) of
	// one page in one layer, contiguous, laid out as kv.Geometry says. Values
	// are little-endian. A range outside of the rank's memory panics: whoever
	// takes ranges from a peer checks them first. Ask for an extent each time
	// that it is written, and before the first byte: Sim takes it as a sign
	// that the page must be read again.
	Extent(layer int, page kv.Page, head, heads int) []byte
}

// Batch is one forward pass over rows of any length: prefill chunks and single
// decode tokens alike. A row's result does not depend on the other rows.
type Batch struct {
	Rows []Row
	// LayerDone, when set, hears of each layer in order, when all K and V rows
	// of this batch in that layer are final. It is called on the engine's
	// goroutine and must not block.
	LayerDone func(layer int)
}

// Row is one sequence in a batch: Tokens stand at positions Start, Start+1, …
// and attend to everything before them through Pages, whose KV before Start
// must be there already.
type Row struct {
	Tokens []int32
	Start  int
	Pages  []kv.Page // block table; covers at least Start+len(Tokens) positions
	Sample *Sampling // how to draw the token that follows the last one; nil: none wanted
	Index  int       // index of that token among the request's output tokens
	// History is the prompt and the output so far, Tokens included, where
	// Sample has penalties; else it may be nil. Its last Index tokens are output.
	History []int32
	// Targets asks for log-probabilities of given tokens (of a prompt, say):
	// when it is as long as Tokens, Run sets Scores[i] to the log-probability
	// of Targets[i] at position Start+i+1, and skips negative ones. Scores
	// belongs to the caller and is as long.
	Targets []int32
	Scores  []float32
	// Top, when above 0, asks for that many of the most probable tokens beside
	// each score: Run sets Tops[i], which belongs to the caller as Scores does,
	// in the order of Output.Top.
	Top  int
	Tops [][]TokenLogprob

	Out Output // filled by Run when Sample is set
	// Err, set by Run, says why this row was not computed, or not to its end:
	// nothing was drawn for it, and its KV is not to be used. It is final for rows
	// that are refused before anything is computed when LayerDone is first called.
	Err error
}

// Sampling says how a token is drawn.
//
// The order is: repetition, presence and frequency penalty, bias, temperature,
// top-k, top-p (over what top-k left), min-p, draw. The zero value is greedy,
// without penalties.
type Sampling struct {
	Temperature float32 // 0: the most probable token, ties to the lower id
	TopP        float32 // 0 or ≥ 1: off
	MinP        float32 // share of the most probable token's probability; 0: off
	TopK        int     // 0 or less: off
	Seed        uint64  // with Choice and the position it keys the generator
	Choice      int     // which of a request's n answers
	Presence    float32 // taken off the logit of each token that is in the output
	Frequency   float32 // times its count in the output, likewise
	Repetition  float32 // divides positive logits of tokens seen in prompt or output, multiplies negative ones; 0 or 1: off
	LogitBias   []Bias
	Logprobs    int // -1: no log-probability; else the token's own and that many of the most probable
}

// NeedsHistory says whether Row.History must be set.
func (s *Sampling) NeedsHistory() bool {
	return s.Presence != 0 || s.Frequency != 0 || (s.Repetition != 0 && s.Repetition != 1)
}

// Bias is added to the logit of one token.
type Bias struct {
	ID  int32
	Add float32
}

// Output is the drawn token. Log-probabilities are those of the model: log
// softmax of the logits before penalties, bias, temperature and filters.
type Output struct {
	Token   int32
	Logprob float32        // of Token; 0 when Sampling.Logprobs is -1
	Top     []TokenLogprob // the most probable ones, best first, ties by lower id; reused by the next Run of the same Row
}

// TokenLogprob is one token with its log-probability (natural logarithm).
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// Config is what both engines need to know of the KV memory.
type Config struct {
	Pages          int    // KV pages
	PageSize       int    // tokens a page
	KVDType        string // "f16", "f32" or "q8_0"; "" is f16
	TP             int    // ranks the KV heads are split over; 0 is 1
	Threads        int    // goroutines that compute, the caller of Run included; 0: all cores
	Context        int    // longest sequence in tokens; 0: the model's, at most 8192 (Sim: 131072)
	MaxBatchTokens int    // tokens of all rows of one batch; 0: 576
	Precision      string // "native": quantised products; "f32": weights dequantised, f32 activations; "" is native
}

// Defaults and bounds of Config.
const (
	DefaultMaxBatchTokens = 512 + 64
	maxPages              = math.MaxInt32
	maxPageSize           = 4096
	maxThreads            = 1024
	maxBatchTokens        = 1 << 16
	defaultContext        = 8192
	maxContext            = 1 << 20
)

// ErrClosed is what Run returns once Close was called.
var ErrClosed = errors.New("engine: closed")

// check fills in defaults and refuses what cannot be.
func (c *Config) check(heads, context int) error {
	if c.KVDType == "" {
		c.KVDType = "f16"
	}
	if c.TP == 0 {
		c.TP = 1
	}
	if c.Context == 0 {
		c.Context = min(context, defaultContext)
	}
	if c.MaxBatchTokens == 0 {
		c.MaxBatchTokens = DefaultMaxBatchTokens
	}
	if c.Precision == "" {
		c.Precision = "native"
	}
	switch {
	case c.Pages < 1 || c.Pages > maxPages:
		return fmt.Errorf("engine: %d KV pages, want 1 to %d", c.Pages, maxPages)
	case c.PageSize < 1 || c.PageSize > maxPageSize:
		return fmt.Errorf("engine: page size of %d tokens, want 1 to %d", c.PageSize, maxPageSize)
	case c.TP < 1 || heads%c.TP != 0:
		return fmt.Errorf("engine: tensor parallelism %d does not divide the model's %d KV heads", c.TP, heads)
	case c.Threads < 0 || c.Threads > maxThreads:
		return fmt.Errorf("engine: %d threads, want 1 to %d, or 0 for all cores", c.Threads, maxThreads)
	case c.Context < 1 || c.Context > min(context, maxContext):
		return fmt.Errorf("engine: context of %d tokens, want 1 to the model's %d", c.Context, min(context, maxContext))
	case c.MaxBatchTokens < 1 || c.MaxBatchTokens > maxBatchTokens:
		return fmt.Errorf("engine: %d tokens a batch, want 1 to %d", c.MaxBatchTokens, maxBatchTokens)
	case c.Precision != "native" && c.Precision != "f32":
		return fmt.Errorf("engine: precision %q, want native or f32", c.Precision)
	}
	return nil
}

// checkBatch refuses rows that would reach outside of the KV memory or the
// vocabulary, and a batch whose other rows would not fit the scratch. Both
// engines do so before they touch anything.
func checkBatch(b *Batch, c *Config, vocab int) error {
	total := 0
	for i := range b.Rows {
		r := &b.Rows[i]
		if r.Err = r.check(c, vocab); r.Err == nil {
			total += len(r.Tokens)
		}
	}
	if total > c.MaxBatchTokens {
		return fmt.Errorf("engine: batch of %d tokens, at most %d", total, c.MaxBatchTokens)
	}
	return nil
}

func (r *Row) check(c *Config, vocab int) error {
	end := r.Start + len(r.Tokens)
	switch {
	case len(r.Tokens) == 0:
		return errors.New("no tokens")
	case r.Start < 0 || end > c.Context || end < r.Start:
		return fmt.Errorf("positions %d to %d, the context has %d", r.Start, end, c.Context)
	case len(r.Pages) < kv.PagesFor(end, c.PageSize):
		return fmt.Errorf("%d pages of %d tokens, too few for %d positions", len(r.Pages), c.PageSize, end)
	case r.Targets != nil && (len(r.Targets) != len(r.Tokens) || len(r.Scores) != len(r.Tokens)):
		return fmt.Errorf("%d targets and %d scores for %d tokens", len(r.Targets), len(r.Scores), len(r.Tokens))
	case r.Top < 0 || r.Top > maxTop:
		return fmt.Errorf("%d most probable tokens, want 0 to %d", r.Top, maxTop)
	case r.Top > 0 && (len(r.Tops) != len(r.Tokens) || len(r.Targets) != len(r.Tokens)):
		return fmt.Errorf("%d targets and %d lists of the most probable for %d tokens", len(r.Targets), len(r.Tops), len(r.Tokens))
	}
	for _, p := range r.Pages {
		if p < 0 || int(p) >= c.Pages {
			return fmt.Errorf("page %d, there are %d", p, c.Pages)
		}
	}
	for _, t := range r.Tokens {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("token %d, the vocabulary has %d", t, vocab)
		}
	}
	for _, t := range r.Targets {
		if int(t) >= vocab {
			return fmt.Errorf("target token %d, the vocabulary has %d", t, vocab)
		}
	}
	if r.Sample == nil {
		return nil
	}
	return r.Sample.check(r, vocab)
}

// maxTop bounds Sampling.Logprobs and Row.Top: OpenAI's interface allows 20.
const maxTop = 128

// Check says what no engine would draw with. Such a row ends its request in the
// middle of its work, so whoever takes requests asks first.
func (s *Sampling) Check(vocab int) error {
	for _, f := range []float32{s.Temperature, s.TopP, s.MinP, s.Presence, s.Frequency, s.Repetition} {
		if f != f || f > math.MaxFloat32 || f < -math.MaxFloat32 {
			return errors.New("a sampling parameter is not a finite number")
		}
	}
	switch {
	case s.Temperature < 0:
		return fmt.Errorf("temperature %v, want 0 or more", s.Temperature)
	case s.TopP < 0:
		return fmt.Errorf("top_p %v, want 0 to 1", s.TopP)
	case s.MinP < 0 || s.MinP > 1:
		return fmt.Errorf("min_p %v, want 0 to 1", s.MinP)
	case s.Repetition != 0 && (s.Repetition < 0.01 || s.Repetition > 100):
		return fmt.Errorf("repetition penalty %v, want 0.01 to 100", s.Repetition)
	case max(s.Presence, -s.Presence, s.Frequency, -s.Frequency) > 1000:
		return fmt.Errorf("presence penalty %v, frequency penalty %v: want -1000 to 1000", s.Presence, s.Frequency)
	case s.Logprobs < -1 || s.Logprobs > maxTop:
		return fmt.Errorf("%d log-probabilities, want -1 to %d", s.Logprobs, maxTop)
	case s.Choice < 0 || s.Choice > math.MaxInt32:
		return fmt.Errorf("choice %d, want 0 or more", s.Choice)
	}
	for _, b := range s.LogitBias {
		if b.ID < 0 || int(b.ID) >= vocab || !(max(b.Add, -b.Add) <= 1e6) {
			return fmt.Errorf("bias %v for token %d: want -1e6 to 1e6, the vocabulary has %d", b.Add, b.ID, vocab)
		}
	}
	return nil
}

func (s *Sampling) check(r *Row, vocab int) error {
	if err := s.Check(vocab); err != nil || !s.NeedsHistory() {
		return err
	}
	if r.Index < 0 || r.Index > len(r.History) {
		return fmt.Errorf("history of %d tokens, %d of them output", len(r.History), r.Index)
	}
	for _, t := range r.History {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("history token %d, the vocabulary has %d", t, vocab)
		}
	}
	return nil
}

var (
	_ Engine = (*CPU)(nil)
	_ Engine = (*Sim)(nil)
)
