package worker

import (
	"context"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/metric"
	"github.com/metronome-serve/metronome/internal/sched"
)

// Job is one choice of one request inside a worker. The HTTP side makes it and
// must not write to it after Submit; the loop keeps everything that changes in
// its own memory.
type Job struct {
	Request   string // X-Request-Id of the request that it belongs to
	RID       string
	Prompt    []int32
	MaxTokens int     // further output tokens; 0: the prompt is computed, and no token comes
	StopIDs   []int32 // ids that end the answer; the one that does is its last token
	Sampling  engine.Sampling
	SeedSet   bool // Sampling.Seed is the caller's; else the worker that draws first chooses one
	// Said is how many of the last tokens of Prompt are not prompt but output: an
	// answer that began on another worker goes on here as if it had begun here.
	// Output tokens are counted with them.
	Said int

	// Addr is the bootstrap address host:port of the prefill (decode workers), else "".
	Addr string
	// Room pairs the two legs, 0 … 2^63-1. -1: none (serve).
	Room int64
	// DPRank is the prefill's DP rank when the request names it, else -1.
	DPRank int
	// ScorePrompt asks for the log-probabilities of the prompt tokens after
	// ScoreFrom, and for the ScoreTop most probable in the place of each: the
	// first item carries them. The prefix cache is used up to ScoreFrom.
	ScorePrompt         bool
	ScoreFrom, ScoreTop int
	// Deadline is when the whole request must have ended. Zero: none.
	Deadline time.Time

	// Box receives the answer. Made by NewBox with at least MaxTokens.
	Box *Box

	id   sched.ReqID // given by Submit
	loop *loop
	seen time.Duration // when the process first saw the request; 0: at Submit
}

// Item is one output token, or the end of the answer.
type Item struct {
	Out    engine.Output
	Index  int    // among the request's output tokens
	Cached int    // with Index 0 and the end: prompt tokens that came from a prefix cache
	Seed   uint64 // with Index 0: what the answer is drawn with
	// Prompt comes with the first item (which may be the end) of a job with
	// ScorePrompt, on the worker that computed the prompt.
	Prompt *PromptScores
	End    *End // set on the last item, which carries no token
}

// PromptScores are log-probabilities of prompt tokens: entry i is that of
// token ScoreFrom+1+i. Top, if asked for, are the most probable in its place,
// best first.
type PromptScores struct {
	Logprobs []float32
	Top      [][]engine.TokenLogprob
}

// The reasons of End.
const (
	EndStop      = "stop"      // a stop id, or StopAt
	EndLength    = "length"    // MaxTokens or the context is full
	EndPrefilled = "prefilled" // prefill worker: the decode worker has everything
	EndFailed    = "failed"    // Err says why
)

// End tells how a job ended. Exactly one is put in each taken job's Box.
type End struct {
	Reason     string
	Err        *api.Error // with EndFailed
	Completion int        // output tokens that count, those of Job.Said among them
}

// Box is the output mailbox of one job: the loop puts, one reader takes. A put
// never waits, because the box holds everything that one job can produce:
// MaxTokens tokens and the end. Its memory starts small and doubles only while
// the reader lags behind, so the steady state allocates nothing.
type Box struct {
	wake chan struct{}

	mu    sync.Mutex // held for a copy of one item, never across anything that waits
	ring  []Item
	head  int // index of the oldest item
	n     int // items in the ring
	bound int
	ended bool // the End has been put
	done  bool // the End has been taken
	line  metric.Timeline
}

const boxStart = 16 // items: what a reader that keeps up never exceeds

// NewBox makes the mailbox of a job of at most maxTokens output tokens. The
// choices of one request may share a wake channel of capacity 1: their reader
// then waits on it and empties all boxes with TryNext. nil: the box has its own.
func NewBox(maxTokens int, wake chan struct{}) *Box {
	if wake == nil {
		wake = make(chan struct{}, 1)
	}
	bound := maxTokens + 1
	return &Box{wake: wake, ring: make([]Item, min(boxStart, bound)), bound: bound}
}

// Wake receives a value when something may have been put since the last one
// was received.
func (b *Box) Wake() <-chan struct{} { return b.wake }

// TryNext takes the oldest item, if there is one.
func (b *Box) TryNext() (Item, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.n == 0 {
		return Item{}, false
	}
	it := b.ring[b.head]
	b.ring[b.head] = Item{} // lets go of what the item points to
	b.head = (b.head + 1) % len(b.ring)
	b.n--
	if it.End != nil {
		b.done = true
	}
	return it, true
}

// Next waits for the next item. It is false after the End has been taken, or
// when ctx ends first. Only one goroutine may read a box.
func (b *Box) Next(ctx context.Context) (Item, bool) {
	for {
		if it, ok := b.TryNext(); ok {
			return it, true
		}
		if b.taken() {
			return Item{}, false
		}
		select {
		case <-b.wake:
		case <-ctx.Done():
			return Item{}, false
		}
	}
}

func (b *Box) taken() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.done
}

// Timeline is the job's as of the newest item.
func (b *Box) Timeline() metric.Timeline {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.line
}

// put adds an item, and how far the job is by now. The core emits at most MaxTokens tokens and then one end;
// more is a broken invariant of ours, never the peer's or the client's doing.
func (b *Box) put(it Item, line *metric.Timeline) {
	b.mu.Lock()
	if b.ended {
		b.mu.Unlock()
		panic("worker: item after the end of a job")
	}
	if b.n == len(b.ring) {
		b.grow()
	}
	b.ring[(b.head+b.n)%len(b.ring)] = it
	b.n++
	b.ended = it.End != nil
	b.line = *line
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default: // the reader has been woken already
	}
}

func (b *Box) grow() {
	if b.n >= b.bound {
		panic("worker: a job produced more than MaxTokens tokens and its end")
	}
	ring := make([]Item, min(2*len(b.ring), b.bound))
	k := copy(ring, b.ring[b.head:])
	copy(ring[k:], b.ring[:b.head])
	b.ring, b.head = ring, 0
}
