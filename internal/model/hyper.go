package model

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Hyper holds the sizes of a transformer of the Llama family.
type Hyper struct {
	Layers  int     // transformer blocks
	Dim     int     // width of the residual stream
	Heads   int     // query heads
	KVHeads int     // key and value heads; divides Heads
	HeadDim int     // values of one head, of K as of V; even
	FF      int     // width of the feed-forward part
	Vocab   int     // rows of the embedding
	Context int     // positions the model was trained for
	Eps     float32 // added to the mean square in RMSNorm
	Tied    bool    // no output.weight: token_embd.weight serves both ends
	Bias    bool    // q, k and v have biases, added before the rotation
	QKNorm  bool    // each head of q and k is normed (RMSNorm) before the rotation
	Rope    Rope
}

// Rope is the rotation of q and k by their position: pair i by position × f_i,
// f_i = Theta^(-2i/Dim), less where a rule below stretches the context.
type Rope struct {
	Dim     int     // the first Dim values of each head are rotated; even
	Theta   float32 // base of the frequencies, more than 1
	Halves  bool    // pairs are values i and i + Dim/2 (ggml's NEOX layout), not neighbours 2i and 2i+1 (NORM)
	Factors bool    // tensor rope_freqs.weight has a divisor for each f_i (Llama 3.1 and later)
	Scale   float32 // f_i is divided by it: linear scaling; 1: none
	YaRN    YaRN
}

// YaRN (Peng et al., arXiv 2309.00071) divides by Rope.Scale only frequencies
// that turn slowly: fully those of less than Slow turns within Context
// positions, not those of more than Fast. q and k grow by 1 + ln(Scale) ÷ 10.
type YaRN struct {
	Context    int // positions before the context was stretched; 0: no YaRN
	Fast, Slow float32
}

// architecture is what one of the family does beside Llama's arithmetic.
type architecture struct {
	halves bool // see Rope.Halves
	bias   bool
	qkNorm bool
	freqs  bool // rope_freqs.weight may be there
}

var architectures = map[string]architecture{
	"llama": {freqs: true},
	"qwen2": {halves: true, bias: true},
	"qwen3": {halves: true, qkNorm: true},
}

// hyperKeys are the hyper parameters that are understood, without the
// architecture's name in front. Any other key could ask for arithmetic that is
// not done here (experts, a logit scale), so it is refused by name: no answer
// is better than a wrong one.
var hyperKeys = []string{
	"attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
	"attention.sliding_window", "attention.value_length", "block_count", "context_length", "embedding_length",
	"feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor",
	"rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
	"rope.scaling.yarn_beta_slow", "vocab_size",
	"rope.scaling.finetuned", // says how the model was made, and
	"tensor_data_layout",     // how a converter found the file: llama.cpp ignores both, too
}

// Hyper reads the hyper parameters, checks their ranges, and checks that every
// tensor of the architecture is there with the right shape and none besides.
// Architectures and keys that it does not know are refused by name.
func (f *File) Hyper() (Hyper, error) {
	a, ok := architectures[f.Arch]
	if !ok {
		return Hyper{}, f.errorf("architecture %q is not supported; %s are", f.Arch, strings.Join(slices.Sorted(maps.Keys(architectures)), ", "))
	}
	if err := f.checkKeys(); err != nil {
		return Hyper{}, err
	}
	h := Hyper{Bias: a.bias, QKNorm: a.qkNorm, Rope: Rope{Halves: a.halves}}
	r := hyperReader{f: f}
	h.Layers = r.need("block_count", 1024)
	h.Dim = r.need("embedding_length", 1<<17)
	h.Heads = r.need("attention.head_count", 1<<12)
	h.KVHeads = r.may("attention.head_count_kv", 1, 1<<12, h.Heads)
	h.FF = r.need("feed_forward_length", 1<<20)
	h.Context = r.need("context_length", 1<<24)
	h.HeadDim = r.may("attention.key_length", 2, 1<<12, h.Dim/max(h.Heads, 1))
	valueDim := r.may("attention.value_length", 2, 1<<12, h.HeadDim)
	h.Vocab = r.may("vocab_size", 1, maxVocab, 0)
	h.Eps = r.float("attention.layer_norm_rms_epsilon", 0)
	window := r.may("attention.sliding_window", 0, math.MaxInt32, 0)
	r.rope(&h)
	if r.err != nil {
		return Hyper{}, r.err
	}
	if err := f.checkHyper(&h, valueDim, window); err != nil {
		return Hyper{}, err
	}
	return h, f.checkTensors(&h, a)
}

// hyperReader reads keys of the architecture; the first error sticks.
type hyperReader struct {
	f   *File
	err error
}

// may reads an integer from low to high; it is def when the key is not there.
func (r *hyperReader) may(key string, low, high, def int) int {
	if r.err != nil {
		return 0
	}
	n, ok, err := r.f.integer(r.f.Arch+"."+key, low, high)
	if r.err = err; !ok {
		return def
	}
	return n
}

// need reads an integer from 1 to high that must be there.
func (r *hyperReader) need(key string, high int) int {
	if _, ok := r.f.keys[r.f.Arch+"."+key]; r.err == nil && !ok {
		r.err = r.f.errorf("key %q is missing", r.f.Arch+"."+key)
	}
	return r.may(key, 1, high, 0)
}

// float reads a number above 0; it is def when the key is not there.
func (r *hyperReader) float(key string, def float32) float32 {
	if r.err != nil {
		return 0
	}
	x, ok, err := r.f.float(r.f.Arch + "." + key)
	if r.err = err; !ok {
		return def
	}
	return x
}

// rope reads what the rotation is. What is not said is as llama.cpp has it:
// scaling is linear, and was no part of the training context.
func (r *hyperReader) rope(h *Hyper) {
	p := &h.Rope
	p.Dim = r.may("rope.dimension_count", 2, 1<<12, h.HeadDim)
	p.Theta = r.float("rope.freq_base", 10000)
	p.Scale = r.float("rope.scaling.factor", r.float("rope.scale_linear", 1))
	context := r.may("rope.scaling.original_context_length", 1, 1<<24, h.Context)
	fast, slow := r.float("rope.scaling.yarn_beta_fast", 32), r.float("rope.scaling.yarn_beta_slow", 1)
	if r.err != nil {
		return
	}
	key := r.f.Arch + ".rope.scaling.type"
	kind, ok, err := r.f.text(key)
	switch {
	case err != nil:
		r.err = err
	case !ok || kind == "linear":
	case kind == "none":
		p.Scale = 1
	case kind == "yarn":
		p.YaRN = YaRN{context, fast, slow}
	default:
		r.err = r.f.errorf("key %q: %q is not supported; none, linear and yarn are", key, kind)
	}
}

// checkHyper judges what single ranges cannot.
func (f *File) checkHyper(h *Hyper, valueDim, window int) error {
	key := func(name string) string { return fmt.Sprintf("key \"%s.%s\"", f.Arch, name) }
	switch {
	case h.Heads%h.KVHeads != 0:
		return f.errorf("%d heads do not share %d KV heads evenly", h.Heads, h.KVHeads)
	case h.HeadDim < 2 || h.HeadDim%2 != 0:
		return f.errorf("a head of %d values; an even number would be right", h.HeadDim)
	case valueDim != h.HeadDim:
		return f.errorf("keys of %d values and values of %d; equal ones are supported", h.HeadDim, valueDim)
	case window > 0 && window < h.Context:
		return f.errorf("%s: a window of %d positions in a context of %d is not supported", key("attention.sliding_window"), window, h.Context)
	case h.Eps == 0:
		return f.errorf("%s is missing", key("attention.layer_norm_rms_epsilon"))
	case h.Eps >= 1:
		return f.errorf("%s: is %v, less than 1 would be right", key("attention.layer_norm_rms_epsilon"), h.Eps)
	case h.Rope.Dim > h.HeadDim || h.Rope.Dim%2 != 0:
		return f.errorf("rope over %d of %d values of a head; an even number within the head would be right", h.Rope.Dim, h.HeadDim)
	case h.Rope.Theta <= 1:
		return f.errorf("%s: is %v, more than 1 would be right", key("rope.freq_base"), h.Rope.Theta)
	case h.Rope.Scale < 1:
		return f.errorf("%s: is %v, 1 or more would be right", key("rope.scaling.factor"), h.Rope.Scale)
	case h.Rope.YaRN.Fast < h.Rope.YaRN.Slow:
		return f.errorf("%s: is %v, less than yarn_beta_slow, %v", key("rope.scaling.yarn_beta_fast"), h.Rope.YaRN.Fast, h.Rope.YaRN.Slow)
	}
	return nil
}

// checkKeys refuses hyper parameters that are not understood.
func (f *File) checkKeys() error {
	var unknown []string
	for key := range f.keys {
		if name, ok := strings.CutPrefix(key, f.Arch+"."); ok && !slices.Contains(hyperKeys, name) {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	return f.errorf("key %q: asks for arithmetic that is not supported", slices.Min(unknown))
}

// checkTensors compares the tensors with what the architecture has. It sets
// Tied and Rope.Factors, and Vocab when the file does not say it.
func (f *File) checkTensors(h *Hyper, a architecture) error {
	embd, ok := f.tensors["token_embd.weight"]
	if !ok {
		return f.errorf("tensor \"token_embd.weight\" is missing")
	}
	if h.Vocab == 0 {
		h.Vocab = embd.Shape[len(embd.Shape)-1]
	}
	_, untied := f.tensors["output.weight"]
	_, freqs := f.tensors["rope_freqs.weight"]
	h.Tied, h.Rope.Factors = !untied, freqs && a.freqs
	whole, block := h.shapes()
	for _, name := range f.names {
		want, known := whole[name]
		if rest, ok := strings.CutPrefix(name, "blk."); ok {
			number, part, _ := strings.Cut(rest, ".")
			// Atoi alone would let "blk.01" count as block 1.
			if n, err := strconv.Atoi(number); err == nil && n >= 0 && n < h.Layers && strconv.Itoa(n) == number {
				want, known = block[part]
			}
		}
		if !known {
			return f.errorf("tensor %q: asks for arithmetic that is not supported", name)
		}
		if got := f.tensors[name].Shape; !slices.Equal(got, want) {
			return f.errorf("tensor %q: shape %s, %s would be right", name, shapeText(got), shapeText(want))
		}
	}
	// Names are distinct and all known, so a lower count means that some are missing.
	if len(f.names) == len(whole)+h.Layers*len(block) {
		return nil
	}
	return f.missing(whole, block, h.Layers)
}

// shapes are those of the whole model's tensors and of each block's.
func (h *Hyper) shapes() (whole, block map[string][]int) {
	q, kv := h.Heads*h.HeadDim, h.KVHeads*h.HeadDim
	whole = map[string][]int{"token_embd.weight": {h.Dim, h.Vocab}, "output_norm.weight": {h.Dim}}
	if !h.Tied {
		whole["output.weight"] = []int{h.Dim, h.Vocab}
	}
	if h.Rope.Factors {
		whole["rope_freqs.weight"] = []int{h.Rope.Dim / 2}
	}
	block = map[string][]int{
		"attn_norm.weight": {h.Dim}, "attn_q.weight": {h.Dim, q}, "attn_k.weight": {h.Dim, kv}, "attn_v.weight": {h.Dim, kv},
		"attn_output.weight": {q, h.Dim}, "ffn_norm.weight": {h.Dim}, "ffn_gate.weight": {h.Dim, h.FF},
		"ffn_up.weight": {h.Dim, h.FF}, "ffn_down.weight": {h.FF, h.Dim},
	}
	if h.Bias {
		block["attn_q.bias"], block["attn_k.bias"], block["attn_v.bias"] = []int{q}, []int{kv}, []int{kv}
	}
	if h.QKNorm {
		block["attn_q_norm.weight"], block["attn_k_norm.weight"] = []int{h.HeadDim}, []int{h.HeadDim}
	}
	return whole, block
}

// missing names the first tensor, in the order of names, that is not there.
func (f *File) missing(whole, block map[string][]int, layers int) error {
	var gone []string
	note := func(name string) {
		if _, ok := f.tensors[name]; !ok {
			gone = append(gone, name)
		}
	}
	for name := range whole {
		note(name)
	}
	for i := range layers {
		for part := range block {
			note(fmt.Sprintf("blk.%d.%s", i, part))
		}
	}
	return f.errorf("tensor %q is missing", slices.Min(gone))
}
