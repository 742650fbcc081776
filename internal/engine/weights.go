package engine

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/model"
)

// Weights is a model's weights as the forward pass uses them: matrices are
// views into the model file, norms are copies. Any number of engines may share
// one Weights; the file must stay open until the last has been closed.
type Weights struct {
	hyper       model.Hyper
	print       func() string           // the file's fingerprint: hashed when first asked for
	mapped      func(addr uintptr) bool // the file is mapped there; nil where there is none
	embed       kernels.Matrix
	output      kernels.Matrix // the embedding again when the model ties them
	norm        []float32
	ropeFactors []float32 // empty when the model has none
	blocks      []block
}

type block struct {
	attnNorm, ffnNorm                []float32
	q, k, v, attnOut, gate, up, down kernels.Matrix
	qBias, kBias, vBias              []float32 // nil when Hyper.Bias is not set
	qNorm, kNorm                     []float32 // nil when Hyper.QKNorm is not set
}

// LoadWeights finds a model's tensors and checks that the kernels can multiply
// with them. Nothing is copied but norms, biases and rope factors.
func LoadWeights(f *model.File) (*Weights, error) {
	h, err := f.Hyper()
	if err != nil {
		return nil, err
	}
	if h.HeadDim%16 != 0 {
		return nil, fmt.Errorf("engine: heads of %d values; a multiple of 16 can be computed", h.HeadDim)
	}
	l := loader{f: f}
	w := &Weights{
		hyper: h, print: f.Fingerprint, mapped: f.Holds, blocks: make([]block, h.Layers),
		embed: l.matrix("token_embd.weight", h.Vocab, h.Dim), norm: l.vector("output_norm.weight", h.Dim),
	}
	w.output = w.embed
	if !h.Tied {
		w.output = l.matrix("output.weight", h.Vocab, h.Dim)
	}
	if h.Rope.Factors {
		w.ropeFactors = l.ropeFactors(h.Rope.Dim / 2)
	}
	for i := range w.blocks {
		name := func(s string) string { return fmt.Sprintf("blk.%d.%s.weight", i, s) }
		w.blocks[i] = block{
			attnNorm: l.vector(name("attn_norm"), h.Dim), ffnNorm: l.vector(name("ffn_norm"), h.Dim),
			q:       l.matrix(name("attn_q"), h.Heads*h.HeadDim, h.Dim),
			k:       l.matrix(name("attn_k"), h.KVHeads*h.HeadDim, h.Dim),
			v:       l.matrix(name("attn_v"), h.KVHeads*h.HeadDim, h.Dim),
			attnOut: l.matrix(name("attn_output"), h.Dim, h.Heads*h.HeadDim),
			gate:    l.matrix(name("ffn_gate"), h.FF, h.Dim),
			up:      l.matrix(name("ffn_up"), h.FF, h.Dim),
			down:    l.matrix(name("ffn_down"), h.Dim, h.FF),
		}
		b := &w.blocks[i]
		if h.Bias {
			bias := func(s string, n int) []float32 { return l.vector(fmt.Sprintf("blk.%d.%s.bias", i, s), n) }
			b.qBias, b.kBias, b.vBias = bias("attn_q", b.q.Rows), bias("attn_k", b.k.Rows), bias("attn_v", b.v.Rows)
		}
		if h.QKNorm {
			b.qNorm, b.kNorm = l.vector(name("attn_q_norm"), h.HeadDim), l.vector(name("attn_k_norm"), h.HeadDim)
		}
	}
	return w, l.err
}

// loader reads tensors; the first error sticks.
type loader struct {
	f   *model.File
	err error
}

func (l *loader) matrix(name string, rows, cols int) kernels.Matrix {
	t, ok := l.f.Tensor(name)
	if !ok {
		return l.fail(name, "is missing")
	}
	m, err := kernels.NewMatrix(kernels.Type(t.Type), rows, cols, t.Data)
	if err != nil {
		return l.fail(name, "%w", err)
	}
	return m
}

// vector reads norms, biases and the like, which all converters write as F32.
func (l *loader) vector(name string, n int) []float32 {
	t, ok := l.f.Tensor(name)
	switch {
	case !ok:
		l.fail(name, "is missing")
	case t.Type != model.F32:
		l.fail(name, "has type %v; a vector of F32 can be computed", t.Type)
	case len(t.Data) != 4*n:
		l.fail(name, "has %d bytes, %d would be right", len(t.Data), 4*n)
	default:
		v := make([]float32, n)
		for i := range v {
			v[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		}
		return v
	}
	return nil
}

// ropeFactors are divisors of frequencies. One below a half could take angles
// beyond what kernels.SinCos is for.
func (l *loader) ropeFactors(n int) []float32 {
	const name = "rope_freqs.weight"
	factors := l.vector(name, n)
	for i, x := range factors {
		if !(x >= 0.5 && x <= 1e6) {
			l.fail(name, "has factor %v at index %d; 0.5 to 1e6 would be right", x, i)
		}
	}
	return factors
}

func (l *loader) fail(name, format string, args ...any) kernels.Matrix {
	if l.err == nil {
		l.err = fmt.Errorf("engine: tensor %q "+format, append([]any{name}, args...)...)
	}
	return kernels.Matrix{}
}
