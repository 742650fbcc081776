package model

import (
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Hyper holds the sizes of a Llama-family transformer.
type Hyper struct {
	Layers    int     // transformer blocks
	Dim       int     // width of the residual stream
	Heads     int     // query heads
	KVHeads   int     // key and value heads; divides Heads
	HeadDim   int     // values of one head, of K as of V; even
	FF        int     // width of the feed-forward part
	Vocab     int     // rows of the embedding
	Context   int     // positions the model was trained for
	RopeDim   int     // the first RopeDim values of each head are rotated, in neighbouring pairs (ggml's NORM layout); even
	RopeTheta float32 // base of the rotation's frequencies
	Eps       float32 // added to the mean square in RMSNorm
	Tied      bool    // no output.weight: token_embd.weight serves both ends
}

// llamaKeys are the hyper parameters that are understood, without "llama.".
// Any other key could ask for arithmetic that is not done here (scaled rope,
// experts, a sliding window), so it is refused by name: no answer is better
// than a wrong one.
var llamaKeys = []string{
	"attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
	"attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
	"rope.dimension_count", "rope.freq_base", "vocab_size",
	"tensor_data_layout", // says how a converter found the file; llama.cpp ignores it too
}

// Hyper reads the hyper parameters, checks their ranges, and checks that every
// tensor of the architecture is there with the right shape and none besides.
// Architectures and keys that it does not know are refused by name.
func (f *File) Hyper() (Hyper, error) {
	if f.Arch != "llama" {
		return Hyper{}, f.errorf("architecture %q is not supported; llama is", f.Arch)
	}
	if err := f.checkKeys(); err != nil {
		return Hyper{}, err
	}
	var h Hyper
	var err error
	// need and may read one integer; the first error sticks.
	may := func(into *int, key string, low, high, def int) {
		if err != nil {
			return
		}
		n, ok, e := f.integer("llama."+key, low, high)
		if err = e; !ok {
			n = def
		}
		*into = n
	}
	need := func(into *int, key string, low, high int) {
		if _, ok := f.keys["llama."+key]; err == nil && !ok {
			err = f.errorf("key \"llama.%s\" is missing", key)
		}
		may(into, key, low, high, 0)
	}
	need(&h.Layers, "block_count", 1, 1024)
	need(&h.Dim, "embedding_length", 1, 1<<17)
	need(&h.Heads, "attention.head_count", 1, 1<<12)
	may(&h.KVHeads, "attention.head_count_kv", 1, 1<<12, h.Heads)
	need(&h.FF, "feed_forward_length", 1, 1<<20)
	need(&h.Context, "context_length", 1, 1<<24)
	if err != nil {
		return Hyper{}, err
	}
	may(&h.HeadDim, "attention.key_length", 2, 1<<12, h.Dim/h.Heads)
	var valueDim int
	may(&valueDim, "attention.value_length", 2, 1<<12, h.HeadDim)
	may(&h.RopeDim, "rope.dimension_count", 2, 1<<12, h.HeadDim)
	may(&h.Vocab, "vocab_size", 1, maxVocab, 0)
	if err != nil {
		return Hyper{}, err
	}
	if h.RopeTheta, _, err = f.float("llama.rope.freq_base"); err != nil {
		return Hyper{}, err
	}
	if h.RopeTheta == 0 {
		h.RopeTheta = 10000 // what the architecture means when the key is absent
	}
	if h.Eps, _, err = f.float("llama.attention.layer_norm_rms_epsilon"); err != nil {
		return Hyper{}, err
	}
	if err := h.check(valueDim); err != nil {
		return Hyper{}, f.errorf("%w", err)
	}
	return h, f.checkTensors(&h)
}

// check judges what single ranges cannot.
func (h Hyper) check(valueDim int) error {
	switch {
	case h.Heads%h.KVHeads != 0:
		return fmt.Errorf("%d heads do not share %d KV heads evenly", h.Heads, h.KVHeads)
	case h.HeadDim < 2 || h.HeadDim%2 != 0:
		return fmt.Errorf("a head of %d values; an even number would be right", h.HeadDim)
	case valueDim != h.HeadDim:
		return fmt.Errorf("keys of %d values and values of %d; equal ones are supported", h.HeadDim, valueDim)
	case h.RopeDim > h.HeadDim || h.RopeDim%2 != 0:
		return fmt.Errorf("rope over %d of %d values of a head; an even number within the head would be right", h.RopeDim, h.HeadDim)
	case h.Eps == 0:
		return fmt.Errorf("key \"llama.attention.layer_norm_rms_epsilon\" is missing")
	case h.Eps >= 1:
		return fmt.Errorf("key \"llama.attention.layer_norm_rms_epsilon\": is %v, less than 1 would be right", h.Eps)
	}
	return nil
}

// checkKeys refuses hyper parameters that are not understood.
func (f *File) checkKeys() error {
	var unknown []string
	for key := range f.keys {
		if name, ok := strings.CutPrefix(key, "llama."); ok && !slices.Contains(llamaKeys, name) {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	sort.Strings(unknown)
	return f.errorf("key %q: asks for arithmetic that is not supported", unknown[0])
}

// checkTensors compares the tensors with what the architecture has. It sets
// Tied, and Vocab when the file does not say it.
func (f *File) checkTensors(h *Hyper) error {
	embd, ok := f.tensors["token_embd.weight"]
	if !ok {
		return f.errorf("tensor \"token_embd.weight\" is missing")
	}
	if h.Vocab == 0 {
		h.Vocab = embd.Shape[len(embd.Shape)-1]
	}
	q, kv := h.Heads*h.HeadDim, h.KVHeads*h.HeadDim
	whole := map[string][]int{"token_embd.weight": {h.Dim, h.Vocab}, "output_norm.weight": {h.Dim}}
	block := map[string][]int{
		"attn_norm.weight": {h.Dim}, "attn_q.weight": {h.Dim, q}, "attn_k.weight": {h.Dim, kv}, "attn_v.weight": {h.Dim, kv},
		"attn_output.weight": {q, h.Dim}, "ffn_norm.weight": {h.Dim}, "ffn_gate.weight": {h.Dim, h.FF},
		"ffn_up.weight": {h.Dim, h.FF}, "ffn_down.weight": {h.FF, h.Dim},
	}
	if _, ok := f.tensors["output.weight"]; ok {
		whole["output.weight"] = []int{h.Dim, h.Vocab}
	} else {
		h.Tied = true
	}
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
