package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/metronome-serve/metronome/internal/engine"
	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/model"
)

// Engine says what of an engine is measured.
type Engine struct {
	Name      string // of the model
	File      *model.File
	Prefill   []int // lengths of prompts in tokens
	Decode    []int // numbers of sequences that decode together
	Context   int   // tokens that each of them holds already
	Chunk     int   // tokens of one prefill chunk
	Threads   int   // 0: all cores
	Rounds    int
	KVDType   string
	Precision string
	Progress  io.Writer
}

// EngineReport is what Engine.Run found; rates are tokens a second.
type EngineReport struct {
	Machine Machine
	Model   string
	Context int
	Rounds  int
	Prefill map[int]Rate
	Decode  map[int]Rate

	work Work
}

// Work is what the model asks of a machine. A prompt's token meets each weight
// of each block once; a decode batch reads each weight once, and the KV of each
// sequence.
type Work struct {
	PrefillMacs float64 `json:"prefill_macs"` // products with weights for one token of a prompt
	DecodeMacs  float64 `json:"decode_macs"`  // for one token of a batch: the output too
	Weights     float64 `json:"weight_bytes"` // that each decode batch reads
	KV          float64 `json:"kv_bytes"`     // of one sequence
}

// batch is the bytes that a batch of n sequences reads.
func (w *Work) batch(n int) float64 { return w.Weights + float64(n)*w.KV }

const pageSize = 16

// long enough that what is around a measure does not show.
const enough = 400 * time.Millisecond

// rig is an engine with the KV that its decode batches continue from.
type rig struct {
	*Engine
	eng     *engine.CPU
	prompt  []kv.Page
	batch   engine.Batch // the largest decode batch
	weights [][]byte     // what each batch reads
	machine *machine
}

// Run measures. Sizes that the model or the memory cannot hold are errors.
func (b *Engine) Run(ctx context.Context) (*EngineReport, error) {
	if len(b.Prefill)+len(b.Decode) == 0 || b.Rounds < 1 {
		return nil, &UnfitError{errors.New("nothing to measure: a prompt length or a number of sequences, and a round, would be right")}
	}
	r, err := b.rig()
	if err != nil {
		return nil, &UnfitError{err}
	}
	defer r.eng.Close()
	defer context.AfterFunc(ctx, r.eng.Close)()
	if err := r.fill(); err != nil {
		return nil, err
	}
	var stream, weights, ops []float64
	prefill, decode := map[int][]float64{}, map[int][]float64{}
	whole := 0
	defer func() {
		if whole < b.Rounds {
			fmt.Fprintln(b.Progress) // the line that was begun
		}
	}()
	for round := range b.Rounds {
		stream, ops = append(stream, r.machine.stream()), append(ops, r.machine.int8())
		weights = append(weights, r.machine.reading(r.weights))
		fmt.Fprintf(b.Progress, "round %d of %d:", round+1, b.Rounds)
		for _, n := range b.Prefill {
			x, err := r.measure(n, func() error { return r.prefill(n) })
			if err != nil {
				return nil, err
			}
			prefill[n] = append(prefill[n], x)
			fmt.Fprintf(b.Progress, " prefill %d %.0f,", n, x)
		}
		for _, n := range b.Decode {
			batch := engine.Batch{Rows: r.batch.Rows[:n]}
			x, err := r.measure(n, func() error { return r.eng.Run(&batch) })
			if err != nil {
				return nil, err
			}
			decode[n] = append(decode[n], x)
			fmt.Fprintf(b.Progress, " decode %d %.0f,", n, x)
		}
		fmt.Fprintln(b.Progress, " tokens/s")
		whole++
	}
	rep := &EngineReport{Model: b.Name, Context: b.Context, Rounds: b.Rounds, Prefill: rates(prefill), Decode: rates(decode),
		Machine: Machine{processor(), r.machine.threads, engine.Kernels(), rate(stream).Median, rate(weights).Median, rate(ops).Median},
		work:    b.work(r.eng.Geometry())}
	return rep, nil
}

// rig makes the engine: pages for the longest prompt, and behind them those of
// the sequences.
func (b *Engine) rig() (*rig, error) {
	weights, err := engine.LoadWeights(b.File)
	if err != nil {
		return nil, err
	}
	longest, most := b.Context+1, 0
	for _, n := range b.Prefill {
		longest = max(longest, n)
	}
	for _, n := range b.Decode {
		most = max(most, n)
	}
	if b.Threads == 0 {
		b.Threads = engine.Cores
	}
	each, first := kv.PagesFor(b.Context+1, pageSize), kv.PagesFor(longest, pageSize)
	eng, err := engine.New(weights, engine.Config{Pages: first + most*each, PageSize: pageSize, KVDType: b.KVDType, Threads: b.Threads,
		Context: longest, MaxBatchTokens: max(b.Chunk, most), Precision: b.Precision})
	if err != nil {
		return nil, err
	}
	r := &rig{Engine: b, eng: eng, prompt: pages(0, first), machine: newMachine(b.Threads)}
	for _, t := range b.tensors() {
		r.weights = append(r.weights, t.Data)
	}
	for i := range most {
		r.batch.Rows = append(r.batch.Rows, engine.Row{Tokens: []int32{1}, Start: b.Context, Index: 1,
			Pages: pages(first+i*each, each), Sample: &engine.Sampling{Logprobs: -1}})
	}
	return r, nil
}

func pages(first, n int) []kv.Page {
	p := make([]kv.Page, n)
	for i := range p {
		p[i] = kv.Page(first + i)
	}
	return p
}

// fill computes the KV that the sequences hold, once, and gives each a copy.
func (r *rig) fill() error {
	fmt.Fprintln(r.Progress, "computing the KV that decode continues from")
	if err := r.prefill(r.Context + 1); err != nil {
		return err
	}
	geo, mem := r.eng.Geometry(), r.eng.Memory(0)
	for i := range r.batch.Rows {
		for j, page := range r.batch.Rows[i].Pages {
			for layer := range geo.Layers {
				copy(mem.Extent(layer, page, 0, geo.Heads), mem.Extent(layer, r.prompt[j], 0, geo.Heads))
			}
		}
	}
	return nil
}

// prefill computes a prompt of n tokens, in chunks, and draws the token after it.
func (r *rig) prefill(n int) error {
	rnd := rand.New(rand.NewPCG(1, uint64(n)))
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = rnd.Int32N(int32(r.eng.Vocab()))
	}
	batch := engine.Batch{Rows: make([]engine.Row, 1)}
	for from := 0; from < n; from += r.Chunk {
		to := min(from+r.Chunk, n)
		batch.Rows[0] = engine.Row{Tokens: tokens[from:to], Start: from, Pages: r.prompt}
		if to == n {
			batch.Rows[0].Sample = &engine.Sampling{Logprobs: -1}
		}
		if err := r.eng.Run(&batch); err != nil {
			return err
		}
	}
	return nil
}

// measure repeats what yields n tokens until it took long enough, and gives
// tokens a second.
func (r *rig) measure(n int, do func() error) (float64, error) {
	began, times := time.Now(), 0
	for times == 0 || time.Since(began) < enough {
		if err := do(); err != nil {
			return 0, err
		}
		times++
	}
	return float64(n*times) / time.Since(began).Seconds(), nil
}

// tensors are what each batch reads. The embedding is not, unless it is the
// output matrix too: a batch reads a row of it for a token.
func (b *Engine) tensors() (list []model.Tensor) {
	_, untied := b.File.Tensor("output.weight")
	for _, name := range b.File.Tensors() {
		if name != "token_embd.weight" || !untied {
			t, _ := b.File.Tensor(name)
			list = append(list, t)
		}
	}
	return list
}

// work says how much there is to do.
func (b *Engine) work(geo kv.Geometry) (w Work) {
	for _, t := range b.tensors() {
		w.Weights += float64(len(t.Data))
		if len(t.Shape) == 2 {
			w.DecodeMacs += float64(t.Values())
			if strings.HasPrefix(t.Name, "blk.") {
				w.PrefillMacs += float64(t.Values())
			}
		}
	}
	w.KV = float64((b.Context + 1) * geo.Layers * geo.Heads * geo.TokenBytes)
	return w
}

// JSON is one object: tokens a second by size, and more beside.
func (r *EngineReport) JSON(w io.Writer) error {
	spread := func(rates map[int]Rate) map[string][2]float64 {
		m := map[string][2]float64{}
		for n, x := range rates {
			m[strconv.Itoa(n)] = [2]float64{tidy(x.Low), tidy(x.High)}
		}
		return m
	}
	m := r.Machine
	m.Stream, m.Weights, m.Int8 = tidy(m.Stream), tidy(m.Weights), tidy(m.Int8)
	return json.NewEncoder(w).Encode(struct {
		Prefill map[string]float64               `json:"prefill"`
		Decode  map[string]float64               `json:"decode"`
		Spread  map[string]map[string][2]float64 `json:"spread"`
		Model   string                           `json:"model"`
		Context int                              `json:"context"`
		Rounds  int                              `json:"rounds"`
		Machine Machine                          `json:"machine"`
		Work    Work                             `json:"work"`
	}{medians(r.Prefill), medians(r.Decode), map[string]map[string][2]float64{"prefill": spread(r.Prefill), "decode": spread(r.Decode)},
		r.Model, r.Context, r.Rounds, m, r.work})
}

// Text is a table for people.
func (r *EngineReport) Text(w io.Writer) error {
	m := &r.Machine
	fmt.Fprintf(w, "%s on %s, %d threads, %s kernels; medians of %d rounds\n", r.Model, m.CPU, m.Threads, m.Kernels, r.Rounds)
	fmt.Fprintf(w, "the machine, in the same rounds: reads memory at %.1f GB/s, these weights at %.1f", m.Stream, m.Weights)
	if m.Int8 > 0 {
		fmt.Fprintf(w, ", int8 products and sums at %.0f GOPS", m.Int8)
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\ttokens/s\tleast\tmost\tof the machine\t")
	for _, n := range sizes(r.Prefill) {
		x, share := r.Prefill[n], "-"
		if m.Int8 > 0 {
			share = fmt.Sprintf("%.1f %% of int8", 100*2*r.work.PrefillMacs*x.Median/1e9/m.Int8)
		}
		fmt.Fprintf(t, "prefill %d\t%.1f\t%.1f\t%.1f\t%s\t\n", n, x.Median, x.Low, x.High, share)
	}
	for _, n := range sizes(r.Decode) {
		x := r.Decode[n]
		fmt.Fprintf(t, "decode %d × %d\t%.1f\t%.1f\t%.1f\t%.1f %% of reading\t\n", n, r.Context, x.Median, x.Low, x.High,
			100*r.work.batch(n)*x.Median/float64(n)/1e9/m.Reading())
	}
	return t.Flush()
}
