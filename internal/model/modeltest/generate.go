package modeltest

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
)

// Model is a small model with random weights: an architecture, its variants,
// and the format of most of its matrices. The same bytes come out everywhere.
type Model struct {
	Name   string // architecture, variant and format, such as "qwen2-yarn-Q4_K"
	Arch   string
	Format string
	shape
}

// shape is one variant of an architecture. Rows of 256 divide into K-quant
// blocks; others take the fallback format, as in real files.
type shape struct {
	variant                      string
	dim, heads, kvHeads, headDim int
	ff                           int
	layers, context              int // 0: 2, and Context
	untied                       bool
	pre                          string // byte-level pre-tokenizer; "": SentencePiece
	factors                      bool   // rope_freqs.weight
	scaling                      string // rope.scaling.type
}

// Context is the context of every generated model but Large; where it was stretched, it
// was of 256 positions before.
const Context = 1024

// shapes are the variants of each architecture: grouped, one and as many KV
// heads; odd numbers of heads; heads wider and narrower than dim ÷ heads.
var shapes = map[string][]shape{
	"llama": {
		{variant: "plain", dim: 256, heads: 8, kvHeads: 8, headDim: 32, ff: 512, untied: true},
		{variant: "factors", dim: 256, heads: 4, kvHeads: 2, headDim: 64, ff: 256, pre: "llama-bpe", factors: true},
		{variant: "linear", dim: 256, heads: 5, kvHeads: 1, headDim: 32, ff: 256, pre: "smollm", scaling: "linear"},
		{variant: "yarn", dim: 288, heads: 9, kvHeads: 3, headDim: 32, ff: 256, untied: true, scaling: "yarn"},
	},
	"qwen2": {
		{variant: "plain", dim: 256, heads: 4, kvHeads: 1, headDim: 64, ff: 256, untied: true, pre: "qwen2"},
		{variant: "odd", dim: 224, heads: 7, kvHeads: 7, headDim: 32, ff: 512, pre: "qwen2"},
		{variant: "yarn", dim: 256, heads: 8, kvHeads: 2, headDim: 32, ff: 256, pre: "qwen2", scaling: "yarn"},
	},
	"qwen3": {
		{variant: "plain", dim: 256, heads: 4, kvHeads: 2, headDim: 128, ff: 256, pre: "qwen2"},
		{variant: "odd", dim: 256, heads: 3, kvHeads: 3, headDim: 64, ff: 256, untied: true, pre: "qwen2"},
		{variant: "yarn", dim: 256, heads: 8, kvHeads: 1, headDim: 64, ff: 256, untied: true, pre: "qwen2", scaling: "yarn"},
	},
}

// Models are all generated models: each architecture in each format, with the
// variants taken in turn, and each variant at least in F32.
func Models() []Model {
	var list []Model
	for _, arch := range []string{"llama", "qwen2", "qwen3"} {
		add := func(s shape, format string) {
			list = append(list, Model{fmt.Sprintf("%s-%s-%s", arch, s.variant, format), arch, format, s})
		}
		for i, f := range formats {
			add(shapes[arch][i%len(shapes[arch])], f.name)
		}
		for _, s := range shapes[arch][1:] {
			add(s, "F32")
		}
	}
	return list
}

// Large is a model to measure with: 147 million weights, nearly all of them in
// matrices that a decode batch reads from end to end.
func Large() *Model {
	return &Model{"llama-150M-Q8_0", "llama", "Q8_0", shape{dim: 1024, heads: 16, kvHeads: 4, headDim: 64, ff: 2816, layers: 13, context: 4096, pre: "smollm"}}
}

const rms = float32(1e-5)

func (m *Model) random(what string) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %s", m.Name, what)
	return rand.New(rand.NewPCG(h.Sum64(), 1))
}

// Texts are two lists of token ids for evaluation, Context ÷ 2 each, every
// token as likely as any other.
func (m *Model) Texts() [][]int32 {
	rnd := m.random("text")
	texts := [][]int32{make([]int32, Context/2), make([]int32, Context/2)}
	for _, ids := range texts {
		for i := range ids {
			ids[i] = rnd.Int32N(int32(m.Vocab()))
		}
	}
	return texts
}

// Vocab is the number of tokens.
func (m *Model) Vocab() int {
	if m.pre == "" {
		return len(piecesVocabulary().texts)
	}
	return len(bytesVocabulary().texts)
}

// GGUF makes the file.
func (m *Model) GGUF() []byte {
	f := &file{}
	f.put("general.architecture", m.Arch)
	f.put("general.name", m.Name)
	key := func(name string, v any) { f.put(m.Arch+"."+name, v) }
	key("block_count", cmp.Or(m.layers, 2))
	key("context_length", cmp.Or(m.context, Context))
	key("embedding_length", m.dim)
	key("feed_forward_length", m.ff)
	key("attention.head_count", m.heads)
	key("attention.head_count_kv", m.kvHeads)
	key("attention.layer_norm_rms_epsilon", rms)
	if m.dim != m.heads*m.headDim {
		key("attention.key_length", m.headDim)
		key("attention.value_length", m.headDim)
	}
	key("rope.freq_base", float32(10000))
	if m.scaling != "" {
		key("rope.scaling.type", m.scaling)
		key("rope.scaling.factor", float32(4))
		key("rope.scaling.original_context_length", Context/4)
	}
	if m.pre == "" {
		piecesVocabulary().put(f, "")
	} else {
		bytesVocabulary().put(f, m.pre)
	}
	m.tensors(f)
	return f.bytes()
}

// tensors fills in weights under which activations stay near 1, attention looks
// at a few tokens, and logits are spread by about 2.5.
func (m *Model) tensors(f *file) {
	matrix := func(name, as string, cols, rows int, gain float64) {
		k := named(as, cols)
		f.tensor(name+".weight", k.kind, k.weights(m.random(name), cols*rows, gain/math.Sqrt(float64(cols))), cols, rows)
	}
	vector := func(name string, n int, value func(*rand.Rand) float32) {
		rnd, b := m.random(name), []byte(nil)
		for range n {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(value(rnd)))
		}
		f.tensor(name, 0, b, n)
	}
	near1 := func(rnd *rand.Rand) float32 { return float32(192+rnd.IntN(128)) / 256 }
	bias := func(rnd *rand.Rand) float32 { return float32(rnd.IntN(256)-128) / 128 }
	q, kv := m.heads*m.headDim, m.kvHeads*m.headDim
	output, vocab := m.mixed(0, "output"), m.Vocab()
	if m.untied {
		matrix("output", output, m.dim, vocab, 2.5)
		matrix("token_embd", m.Format, m.dim, vocab, 16)
	} else {
		matrix("token_embd", output, m.dim, vocab, 2.5)
	}
	vector("output_norm.weight", m.dim, near1)
	if m.factors {
		i := 0
		vector("rope_freqs.weight", m.headDim/2, func(*rand.Rand) float32 {
			i++
			return min(8, max(1, float32(i)/4-2))
		})
	}
	for l := range cmp.Or(m.layers, 2) {
		blk := fmt.Sprintf("blk.%d.", l)
		vector(blk+"attn_norm.weight", m.dim, near1)
		vector(blk+"ffn_norm.weight", m.dim, near1)
		matrix(blk+"attn_q", m.Format, m.dim, q, 1.5)
		matrix(blk+"attn_k", m.Format, m.dim, kv, 1.5)
		matrix(blk+"attn_v", m.mixed(l, "v"), m.dim, kv, 1)
		matrix(blk+"attn_output", m.Format, q, m.dim, 1)
		matrix(blk+"ffn_gate", m.Format, m.dim, m.ff, 1.5)
		matrix(blk+"ffn_up", m.Format, m.dim, m.ff, 1)
		matrix(blk+"ffn_down", m.mixed(l, "down"), m.ff, m.dim, 1)
		switch m.Arch {
		case "qwen2":
			vector(blk+"attn_q.bias", q, bias)
			vector(blk+"attn_k.bias", kv, bias)
			vector(blk+"attn_v.bias", kv, bias)
		case "qwen3":
			vector(blk+"attn_q_norm.weight", m.headDim, near1)
			vector(blk+"attn_k_norm.weight", m.headDim, near1)
		}
	}
}

// mixed is the format of the tensors that llama.cpp's quantiser gives more bits
// than the rest: the output, and v and down of some blocks.
func (m *Model) mixed(layer int, what string) string {
	switch {
	case what == "output" && slices.Contains([]string{"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"}, m.Format):
		return "Q6_K"
	case layer == 0 && what != "output" && (m.Format == "Q4_K" || m.Format == "Q5_K"):
		return "Q6_K"
	}
	return m.Format
}
