package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

func smolFile(t testing.TB) *File {
	t.Helper()
	return openFile(t, modeltest.SmolLM2(t))
}

func tinyFile(t testing.TB) *File {
	t.Helper()
	f, err := OpenBytes("tiny", Builtin())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func openFile(t testing.TB, path string) *File {
	t.Helper()
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		file            *File
		name, quant     string
		params, tensors int
		want            Hyper
	}{
		{tinyFile(t), "tiny", "Q8_0", 2885888, 38,
			Hyper{4, 256, 8, 4, 32, 512, 2048, 1024, 1e-5, true, false, false, Rope{Dim: 32, Theta: 10000, Scale: 1}}},
		{openFile(t, modeltest.Path(t, "tiny-model/tiny-f16.gguf")), "tiny-f16", "F16", 2885888, 38,
			Hyper{4, 256, 8, 4, 32, 512, 2048, 1024, 1e-5, true, false, false, Rope{Dim: 32, Theta: 10000, Scale: 1}}},
	} {
		f := c.file
		h, err := f.Hyper()
		if err != nil || h != c.want {
			t.Errorf("%s: hyper parameters %+v, %v, want %+v", f.Name, h, err, c.want)
		}
		if f.Name != c.name || f.Title != "metronome-tiny" || f.Arch != "llama" || f.Quantisation() != c.quant || f.Parameters() != c.params || len(f.Tensors()) != c.tensors {
			t.Errorf("%s, %s, %s, %s, %d parameters, %d tensors", f.Name, f.Title, f.Arch, f.Quantisation(), f.Parameters(), len(f.Tensors()))
		}
		embd, ok := f.Tensor("token_embd.weight")
		if !ok || !slices.Equal(embd.Shape, []int{256, 2048}) {
			t.Errorf("%s: embedding %v", f.Name, embd.Shape)
		}
		if values, bytes := embd.Type.Block(); len(embd.Data) != embd.Values()/values*bytes {
			t.Errorf("%s: the embedding has %d bytes", f.Name, len(embd.Data))
		}
	}
}

func TestOpenSmol(t *testing.T) {
	f := smolFile(t)
	h, err := f.Hyper()
	want := Hyper{30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, true, false, false, Rope{Dim: 64, Theta: 100000, Scale: 1}}
	if err != nil || h != want {
		t.Errorf("hyper parameters %+v, %v, want %+v", h, err, want)
	}
	if f.Name != "SmolLM2-135M-Instruct.Q4_1" || f.Quantisation() != "Q4_1" || f.Parameters() != 134515008 {
		t.Errorf("%s, %s, %d parameters", f.Name, f.Quantisation(), f.Parameters())
	}
}

// builder writes GGUF files for tests, good and bad.
type builder struct {
	version uint32
	keys    []bkey
	tensors []btensor
	align   int
	cut     int               // bytes that are missing at the end
	patch   func(file []byte) // a last change; nil: none
}

// claim writes n over the count at an offset of the head.
func (f *builder) claim(at int, n uint64) {
	f.patch = func(file []byte) { binary.LittleEndian.PutUint64(file[at:], n) }
}

type bkey struct {
	name string
	val  any
}

type btensor struct {
	name   string
	kind   Type
	shape  []uint64
	offset uint64 // math.MaxUint64: where it fits
	size   int
}

const here = math.MaxUint64

func appendValue(b []byte, v any, withKind bool) []byte {
	kind := func(k kind) {
		if withKind {
			b = binary.LittleEndian.AppendUint32(b, uint32(k))
		}
	}
	switch v := v.(type) {
	case uint32:
		kind(kindUint32)
		return binary.LittleEndian.AppendUint32(b, v)
	case int32:
		kind(kindInt32)
		return binary.LittleEndian.AppendUint32(b, uint32(v))
	case uint64:
		kind(kindUint64)
		return binary.LittleEndian.AppendUint64(b, v)
	case float32:
		kind(kindFloat32)
		return binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	case bool:
		kind(kindBool)
		return append(b, map[bool]byte{true: 1}[v])
	case string:
		kind(kindString)
		return append(binary.LittleEndian.AppendUint64(b, uint64(len(v))), v...)
	case []string:
		kind(kindArray)
		b = binary.LittleEndian.AppendUint32(b, uint32(kindString))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(v)))
		for _, s := range v {
			b = appendValue(b, s, false)
		}
		return b
	case []int32:
		kind(kindArray)
		b = binary.LittleEndian.AppendUint32(b, uint32(kindInt32))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(v)))
		for _, n := range v {
			b = appendValue(b, n, false)
		}
		return b
	case []float32:
		kind(kindArray)
		b = binary.LittleEndian.AppendUint32(b, uint32(kindFloat32))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(v)))
		for _, x := range v {
			b = appendValue(b, x, false)
		}
		return b
	case []byte: // as it is: for what is wrong on purpose
		return append(b, v...)
	}
	panic("no such value")
}

func (f *builder) bytes() []byte {
	b := []byte("GGUF")
	b = binary.LittleEndian.AppendUint32(b, f.version)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(f.tensors)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(f.keys)))
	for _, k := range f.keys {
		b = appendValue(b, k.name, false)
		b = appendValue(b, k.val, true)
	}
	at := uint64(0)
	for _, t := range f.tensors {
		b = appendValue(b, t.name, false)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(t.shape)))
		for _, d := range t.shape {
			b = binary.LittleEndian.AppendUint64(b, d)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(t.kind))
		offset := t.offset
		if offset == here {
			offset = at
		}
		b = binary.LittleEndian.AppendUint64(b, offset)
		at += uint64((t.size + f.align - 1) / f.align * f.align)
	}
	b = append(b, make([]byte, (f.align-len(b)%f.align)%f.align)...)
	data := make([]byte, at)
	for i := range data {
		data[i] = byte(i*7 + i>>8)
	}
	b = append(b, data...)
	if f.patch != nil {
		f.patch(b)
	}
	return b[:len(b)-f.cut]
}

// small is a whole Llama of two layers that everything accepts.
func small() *builder {
	f := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"llama.block_count", uint32(2)}, {"llama.context_length", uint32(64)},
		{"llama.embedding_length", uint32(32)}, {"llama.feed_forward_length", uint32(64)}, {"llama.attention.head_count", uint32(4)},
		{"llama.attention.head_count_kv", uint32(2)}, {"llama.attention.layer_norm_rms_epsilon", float32(1e-5)},
	}}
	matrix := func(name string, cols, rows int) {
		f.tensors = append(f.tensors, btensor{name, F32, []uint64{uint64(cols), uint64(rows)}, here, 4 * cols * rows})
	}
	vector := f.vector
	for _, blk := range []string{"blk.0.", "blk.1."} {
		vector(blk+"attn_norm.weight", 32)
		matrix(blk+"attn_q.weight", 32, 32)
		matrix(blk+"attn_k.weight", 32, 16)
		matrix(blk+"attn_v.weight", 32, 16)
		matrix(blk+"attn_output.weight", 32, 32)
		vector(blk+"ffn_norm.weight", 32)
		matrix(blk+"ffn_gate.weight", 32, 64)
		matrix(blk+"ffn_up.weight", 32, 64)
		matrix(blk+"ffn_down.weight", 64, 32)
	}
	matrix("token_embd.weight", 32, 8)
	vector("output_norm.weight", 32)
	return f
}

func (f *builder) vector(name string, n int) {
	f.tensors = append(f.tensors, btensor{name, F32, []uint64{uint64(n)}, here, 4 * n})
}

// qwen makes a qwen2 or qwen3 of the small Llama.
func (f *builder) qwen(arch string) {
	f.put("general.architecture", arch)
	for i, k := range f.keys {
		if name, ok := strings.CutPrefix(k.name, "llama."); ok {
			f.keys[i].name = arch + "." + name
		}
	}
	for _, blk := range []string{"blk.0.", "blk.1."} {
		if arch == "qwen2" {
			f.vector(blk+"attn_q.bias", 32)
			f.vector(blk+"attn_k.bias", 16)
			f.vector(blk+"attn_v.bias", 16)
		} else {
			f.vector(blk+"attn_q_norm.weight", 8)
			f.vector(blk+"attn_k_norm.weight", 8)
		}
	}
}

// put replaces a key, or adds it.
func (f *builder) put(name string, val any) {
	for i := range f.keys {
		if f.keys[i].name == name {
			f.keys[i].val = val
			return
		}
	}
	f.keys = append(f.keys, bkey{name, val})
}

func (f *builder) drop(name string) {
	f.keys = slices.DeleteFunc(f.keys, func(k bkey) bool { return k.name == name })
	f.tensors = slices.DeleteFunc(f.tensors, func(t btensor) bool { return t.name == name })
}

func (f *builder) tensor(name string) *btensor {
	for i := range f.tensors {
		if f.tensors[i].name == name {
			return &f.tensors[i]
		}
	}
	panic(name)
}

func TestRefused(t *testing.T) {
	array := func(elem kind, n uint64) []byte {
		b := binary.LittleEndian.AppendUint32(nil, uint32(kindArray))
		b = binary.LittleEndian.AppendUint32(b, uint32(elem))
		return binary.LittleEndian.AppendUint64(b, n)
	}
	for _, c := range []struct {
		want   string
		change func(*builder)
	}{
		{"version 1 is too old", func(f *builder) { f.version = 1 }},
		{"version 4 is too new", func(f *builder) { f.version = 4 }},
		{"big-endian", func(f *builder) { f.version = 3 << 24 }},
		{`key "llama.block_count": appears twice`, func(f *builder) { f.keys = append(f.keys, f.keys[1]) }},
		{`key "general.architecture" is missing`, func(f *builder) { f.drop("general.architecture") }},
		{`architecture "mamba" is not supported; llama, qwen2, qwen3 are`, func(f *builder) { f.put("general.architecture", "mamba") }},
		{`key "general.architecture": is uint32, a string`, func(f *builder) { f.put("general.architecture", uint32(1)) }},
		{`key "a": unknown kind 13`, func(f *builder) { f.put("a", []byte{13, 0, 0, 0}) }},
		{`key "a": an array of arrays`, func(f *builder) { f.put("a", array(kindArray, 1)) }},
		{`key "a": truncated: an array of 18446744073709551615 elements`, func(f *builder) { f.put("a", array(kindString, math.MaxUint64)) }},
		{`key "a" needs`, func(f *builder) { f.put("a", array(kindUint64, 15000)) }},
		{`key "a": 2 is no bool`, func(f *builder) { f.put("a", []byte{byte(kindBool), 0, 0, 0, 2}) }},
		{"the head at offset 8 claims 20 tensors and 65537 keys", func(f *builder) { f.claim(16, 65537) }},
		{"the head at offset 8 claims 18446744073709551615 tensors and 8 keys", func(f *builder) { f.claim(8, math.MaxUint64) }},
		{`key "a": truncated: an array of 18446744073709551615 elements`, func(f *builder) { f.put("a", array(kindFloat64, math.MaxUint64)) }},
		{`key "a" needs 9223372036854775808 bytes at offset`, func(f *builder) { f.put("a", append([]byte{byte(kindString), 0, 0, 0}, 0, 0, 0, 0, 0, 0, 0, 0x80)) }},
		{`key "general.type": "adapter" is no model`, func(f *builder) { f.put("general.type", "adapter") }},
		{`key "split.count": this is one of 3 parts`, func(f *builder) { f.put("split.count", uint32(3)) }},
		{`key "general.quantization_version": is 3, only`, func(f *builder) { f.put("general.quantization_version", uint32(3)) }},
		{`key "general.quantization_version": is 1, only`, func(f *builder) { f.put("general.quantization_version", uint32(1)) }},
		{`key "general.alignment": is 0, 8 to`, func(f *builder) { f.put("general.alignment", uint32(0)) }},
		{`key "general.alignment": is 2147483648, 8 to`, func(f *builder) { f.put("general.alignment", uint32(1<<31)) }},
		{`key "general.alignment": is 9223372036854775807, 8 to`, func(f *builder) { f.put("general.alignment", uint64(math.MaxUint64)) }},
		{`key "general.alignment": is string`, func(f *builder) { f.put("general.alignment", "32") }},
		{"truncated: tensor data should begin at offset 1048576, the file has", func(f *builder) { f.put("general.alignment", uint32(1<<20)) }},
		{strings.Repeat("x", 150), func(f *builder) { f.put("general.architecture", strings.Repeat("x", 1<<20)) }},
		{strings.Repeat("é", 50), func(f *builder) { f.put(strings.Repeat("é", 30000), []byte{99, 0, 0, 0}) }},
		{"a name of 0 bytes", func(f *builder) { f.put("", "x") }},
		{"is not UTF-8", func(f *builder) { f.put("\xff", "x") }},
		{`"general.alignment": 48 is not a power`, func(f *builder) { f.put("general.alignment", uint32(48)) }},
		{`"general.alignment": is 4,`, func(f *builder) { f.put("general.alignment", uint32(4)) }},
		{`key "llama.rope.scaling.type": "longrope" is not supported; none, linear and yarn are`, func(f *builder) { f.put("llama.rope.scaling.type", "longrope") }},
		{`key "llama.rope.scaling.type": is uint32, a string`, func(f *builder) { f.put("llama.rope.scaling.type", uint32(2)) }},
		{`key "llama.rope.scaling.factor": is 0.5, 1 or more`, func(f *builder) { f.put("llama.rope.scaling.factor", float32(0.5)) }},
		{`key "llama.rope.scaling.attn_factor": asks for`, func(f *builder) { f.put("llama.rope.scaling.attn_factor", float32(2)) }},
		{`key "llama.rope.scaling.yarn_beta_fast": is 0.5, less than`, func(f *builder) {
			f.put("llama.rope.scaling.type", "yarn")
			f.put("llama.rope.scaling.yarn_beta_fast", float32(0.5))
		}},
		{`key "llama.rope.freq_base": is 1, more than 1`, func(f *builder) { f.put("llama.rope.freq_base", float32(1)) }},
		{`key "llama.attention.sliding_window": a window of 63 positions in a context of 64`, func(f *builder) { f.put("llama.attention.sliding_window", uint32(63)) }},
		{`key "llama.logit_scale": asks for`, func(f *builder) { f.put("llama.logit_scale", float32(2)) }},
		{`key "llama.expert_count": asks for`, func(f *builder) { f.put("llama.expert_count", uint32(8)) }},
		{`key "llama.block_count" is missing`, func(f *builder) { f.drop("llama.block_count") }},
		{`key "llama.block_count": is 0,`, func(f *builder) { f.put("llama.block_count", uint32(0)) }},
		{`key "llama.block_count": is 9223372036854775807,`, func(f *builder) { f.put("llama.block_count", uint64(math.MaxUint64)) }},
		{`key "llama.block_count": is -1,`, func(f *builder) { f.put("llama.block_count", int32(-1)) }},
		{`key "llama.block_count": is string, an integer`, func(f *builder) { f.put("llama.block_count", "2") }},
		{`key "llama.block_count": is array`, func(f *builder) { f.put("llama.block_count", []int32{2, 2}) }},
		{"4 heads do not share 3 KV heads", func(f *builder) { f.put("llama.attention.head_count_kv", uint32(3)) }},
		{"keys of 8 values and values of 4", func(f *builder) { f.put("llama.attention.value_length", uint32(4)) }},
		{"rope over 16 of 8 values", func(f *builder) { f.put("llama.rope.dimension_count", uint32(16)) }},
		{`rms_epsilon": is 0,`, func(f *builder) { f.put("llama.attention.layer_norm_rms_epsilon", float32(0)) }},
		{`rms_epsilon" is missing`, func(f *builder) { f.drop("llama.attention.layer_norm_rms_epsilon") }},
		{`freq_base": is +Inf`, func(f *builder) { f.put("llama.rope.freq_base", float32(math.Inf(1))) }},
		{`freq_base": is NaN`, func(f *builder) { f.put("llama.rope.freq_base", float32(math.NaN())) }},
		{`freq_base": is uint32, float32`, func(f *builder) { f.put("llama.rope.freq_base", uint32(1)) }},
		{`tensor "output_norm.weight" is missing`, func(f *builder) { f.drop("output_norm.weight") }},
		{`tensor "token_embd.weight" is missing`, func(f *builder) { f.drop("token_embd.weight") }},
		{`tensor "blk.1.ffn_up.weight" is missing`, func(f *builder) { f.drop("blk.1.ffn_up.weight") }},
		{`tensor "blk.2.ffn_up.weight": asks for`, func(f *builder) { f.tensor("blk.1.ffn_up.weight").name = "blk.2.ffn_up.weight" }},
		{`tensor "blk.01.ffn_up.weight": asks for`, func(f *builder) { f.tensor("blk.1.ffn_up.weight").name = "blk.01.ffn_up.weight" }},
		{`tensor "rope_freqs.weight": shape 3, 4 would be right`, func(f *builder) { f.vector("rope_freqs.weight", 3) }},
		{`tensor "rope_freqs.weight": asks for`, func(f *builder) {
			f.qwen("qwen3")
			f.vector("rope_freqs.weight", 4)
		}},
		{`tensor "blk.0.attn_k.bias" is missing`, func(f *builder) {
			f.qwen("qwen2")
			f.drop("blk.0.attn_k.bias")
		}},
		{`tensor "blk.1.attn_q_norm.weight" is missing`, func(f *builder) {
			f.qwen("qwen3")
			f.drop("blk.1.attn_q_norm.weight")
		}},
		{`tensor "blk.1.attn_q_norm.weight": shape 4, 8 would be right`, func(f *builder) {
			f.qwen("qwen3")
			f.tensor("blk.1.attn_q_norm.weight").shape = []uint64{4}
		}},
		{`key "qwen2.block_count" is missing`, func(f *builder) {
			f.qwen("qwen2")
			f.drop("qwen2.block_count")
		}},
		{`tensor "blk.0.attn_q.bias": asks for`, func(f *builder) {
			f.tensors = append(f.tensors, btensor{"blk.0.attn_q.bias", F32, []uint64{32}, here, 128})
		}},
		{`tensor "blk.0.attn_k.weight": shape 16x32, 32x16 would be right`, func(f *builder) { f.tensor("blk.0.attn_k.weight").shape = []uint64{16, 32} }},
		{`tensor "output_norm.weight": appears twice`, func(f *builder) {
			f.tensors = append(f.tensors, btensor{"output_norm.weight", F32, []uint64{32}, here, 128})
		}},
		{`tensor "output_norm.weight": overlaps tensor "token_embd.weight"`, func(f *builder) {
			f.tensor("output_norm.weight").offset = f.end() - 32
		}},
		{`tensor "output_norm.weight": offset 100 is not a multiple`, func(f *builder) { f.tensor("output_norm.weight").offset = 100 }},
		{`tensor "output_norm.weight": truncated: 128 bytes at data offset 18446744073709551584`, func(f *builder) { f.tensor("output_norm.weight").offset = math.MaxUint64 - 31 }},
		{`tensor "output_norm.weight": unknown type 99`, func(f *builder) { f.tensor("output_norm.weight").kind = 99 }},
		{`tensor "output_norm.weight": type Q2_K is not supported; supported are F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16`, func(f *builder) { f.tensor("output_norm.weight").kind = 10 }},
		{`rows of 16 values do not divide into Q8_0 blocks of 32`, func(f *builder) {
			f.tensor("output_norm.weight").kind = Q8_0
			f.tensor("output_norm.weight").shape = []uint64{16}
		}},
		{"0 dimensions", func(f *builder) { f.tensor("output_norm.weight").shape = nil }},
		{"5 dimensions", func(f *builder) { f.tensor("output_norm.weight").shape = []uint64{1, 1, 1, 1, 1} }},
		{"a dimension of 0", func(f *builder) { f.tensor("output_norm.weight").shape = []uint64{0} }},
		{"a dimension of 9223372036854775808", func(f *builder) { f.tensor("output_norm.weight").shape = []uint64{1 << 63} }},
		{"shape 2147483647x2147483647x2147483647 is larger than any file", func(f *builder) {
			f.tensor("output_norm.weight").shape = []uint64{math.MaxInt32, math.MaxInt32, math.MaxInt32}
		}},
		{"truncated: 34359738368 bytes", func(f *builder) { f.tensor("output_norm.weight").shape = []uint64{1 << 30, 8} }},
		{"is not UTF-8", func(f *builder) { f.tensor("output_norm.weight").name = "\xc3" }},
		{"a name of 200 bytes, 1 to 128", func(f *builder) { f.tensor("output_norm.weight").name = strings.Repeat("x", 200) }},
	} {
		b := small()
		c.change(b)
		f, err := OpenBytes("m", b.bytes())
		if err == nil {
			_, err = f.Hyper()
		}
		if err == nil || len(err.Error()) > 500 || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "m: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %v, want one line with %s", err, c.want)
		}
	}
}

// TestSmallAccepted proves that the refusals above come from what each case
// changes, and that version 2 reads like 3.
func TestSmallAccepted(t *testing.T) {
	for _, version := range []uint32{2, 3} {
		b := small()
		b.version = version
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		h, err := f.Hyper()
		if want := (Hyper{2, 32, 4, 2, 8, 64, 8, 64, 1e-5, true, false, false, Rope{Dim: 8, Theta: 10000, Scale: 1}}); err != nil || h != want {
			t.Errorf("%+v, %v", h, err)
		}
	}
}

// TestArchitectures reads what each of the family has beside Llama's arithmetic.
func TestArchitectures(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*builder)
		want   func(*Hyper)
	}{
		"qwen2": {func(f *builder) { f.qwen("qwen2") }, func(h *Hyper) { h.Bias, h.Rope.Halves = true, true }},
		"qwen3": {func(f *builder) { f.qwen("qwen3") }, func(h *Hyper) { h.QKNorm, h.Rope.Halves = true, true }},
		"untied": {func(f *builder) {
			f.tensors = append(f.tensors, btensor{"output.weight", F32, []uint64{32, 8}, here, 1024})
		}, func(h *Hyper) { h.Tied = false }},
		"rope factors":      {func(f *builder) { f.vector("rope_freqs.weight", 4) }, func(h *Hyper) { h.Rope.Factors = true }},
		"linear by default": {func(f *builder) { f.put("llama.rope.scaling.factor", float32(4)) }, func(h *Hyper) { h.Rope.Scale = 4 }},
		"the old key":       {func(f *builder) { f.put("llama.rope.scale_linear", float32(2)) }, func(h *Hyper) { h.Rope.Scale = 2 }},
		"none": {func(f *builder) {
			f.put("llama.rope.scaling.type", "none")
			f.put("llama.rope.scaling.factor", float32(4))
		}, func(*Hyper) {}},
		"yarn": {func(f *builder) {
			f.qwen("qwen2")
			f.put("qwen2.rope.scaling.type", "yarn")
			f.put("qwen2.rope.scaling.factor", float32(4))
			f.put("qwen2.rope.scaling.original_context_length", uint32(16))
		}, func(h *Hyper) { h.Bias, h.Rope.Halves, h.Rope.Scale, h.Rope.YaRN = true, true, 4, YaRN{16, 32, 1} }},
		"yarn by default": {func(f *builder) {
			f.put("llama.rope.scaling.type", "yarn")
			f.put("llama.rope.scaling.yarn_beta_slow", float32(2))
		}, func(h *Hyper) { h.Rope.YaRN = YaRN{64, 32, 2} }},
		"a window that is no limit": {func(f *builder) { f.put("llama.attention.sliding_window", uint32(64)) }, func(*Hyper) {}},
	} {
		b := small()
		c.change(b)
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		want := Hyper{2, 32, 4, 2, 8, 64, 8, 64, 1e-5, true, false, false, Rope{Dim: 8, Theta: 10000, Scale: 1}}
		c.want(&want)
		if h, err := f.Hyper(); err != nil || h != want {
			t.Errorf("%s: %+v, %v, want %+v", name, h, err, want)
		}
	}
}

// TestTruncated cuts a file at every length of its head and at some of its
// data: none may be accepted.
func TestTruncated(t *testing.T) {
	whole := small().bytes()
	for n := range whole {
		if n > 3000 && n%97 != 0 {
			continue
		}
		if _, err := OpenBytes("m", whole[:n]); err == nil {
			t.Fatalf("%d of %d bytes are accepted", n, len(whole))
		}
	}
}

// TestFingerprint: what changes an answer changes it, and nothing else does.
func TestFingerprint(t *testing.T) {
	print := func(change func(*builder)) string {
		b := small()
		change(b)
		f, err := OpenBytes("m", b.bytes())
		if err != nil {
			t.Fatal(err)
		}
		first := f.Fingerprint()
		if again := f.Fingerprint(); again != first || len(first) != 64 {
			t.Errorf("two answers, %s and %s", first, again)
		}
		return first
	}
	base := print(func(*builder) {})
	for name, change := range map[string]func(*builder){
		"title":   func(f *builder) { f.put("general.name", "another") },
		"licence": func(f *builder) { f.put("general.license", "mit") },
		"keys":    func(f *builder) { slices.Reverse(f.keys) },
		"version": func(f *builder) { f.version = 2 },
		"gap":     func(f *builder) { f.tensor("output_norm.weight").size += 64 },
	} {
		if print(change) != base {
			t.Errorf("%s changes the fingerprint", name)
		}
	}
	seen := map[string]string{base: "nothing"}
	for name, change := range map[string]func(*builder){
		"theta":     func(f *builder) { f.put("llama.rope.freq_base", float32(1e6)) },
		"context":   func(f *builder) { f.put("llama.context_length", uint32(65)) },
		"tokenizer": func(f *builder) { f.put("tokenizer.ggml.pre", "smollm") },
		"template":  func(f *builder) { f.put("tokenizer.chat_template", "x") },
		"weights": func(f *builder) {
			f.tensor("output_norm.weight").offset = 0
			f.tensor("blk.0.attn_norm.weight").offset = f.end()
		},
		"shape": func(f *builder) { f.tensor("output_norm.weight").shape = []uint64{16, 2} },
		"type": func(f *builder) {
			f.tensor("output_norm.weight").kind = F16
			f.tensor("output_norm.weight").shape = []uint64{64}
		},
		"name": func(f *builder) { f.tensor("output_norm.weight").name = "output_norm.bias" },
	} {
		got := print(change)
		if other, ok := seen[got]; ok {
			t.Errorf("%s has the fingerprint of %s", name, other)
		}
		seen[got] = name
	}
}

// end is the data offset of the last tensor.
func (f *builder) end() uint64 {
	at := uint64(0)
	for _, t := range f.tensors[:len(f.tensors)-1] {
		at += uint64((t.size + f.align - 1) / f.align * f.align)
	}
	return at
}

func TestOpenPaths(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none.gguf")); !os.IsNotExist(err) {
		t.Errorf("no file: %v", err)
	}
	for name, content := range map[string][]byte{"empty": nil, "short": []byte("GGUF"), "text": bytes.Repeat([]byte("text"), 100)} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	path := filepath.Join(dir, "my model.gguf")
	if err := os.WriteFile(path, small().bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if f := openFile(t, path); f.Name != "my model" {
		t.Errorf("name %q", f.Name)
	}
}

// manyColumns is a Llama of one layer whose matrices have the given format, but
// for two that keep it small.
func manyColumns(kind Type) *builder {
	f := &builder{version: 3, align: 32, keys: []bkey{
		{"general.architecture", "llama"}, {"llama.block_count", uint32(1)}, {"llama.context_length", uint32(64)},
		{"llama.embedding_length", uint32(256)}, {"llama.feed_forward_length", uint32(2)}, {"llama.attention.head_count", uint32(1)},
		{"llama.attention.key_length", uint32(2)}, {"llama.attention.value_length", uint32(2)},
		{"llama.attention.layer_norm_rms_epsilon", float32(1e-5)}, {"general.quantization_version", uint32(2)},
	}}
	matrix := func(name string, rows int) {
		values, bytes := kind.Block()
		f.tensors = append(f.tensors, btensor{name, kind, []uint64{256, uint64(rows)}, here, 256 / values * bytes * rows})
	}
	for _, name := range []string{"attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"} {
		matrix("blk.0."+name+".weight", 2)
	}
	for _, name := range []string{"attn_output", "ffn_down"} {
		f.tensors = append(f.tensors, btensor{"blk.0." + name + ".weight", F16, []uint64{2, 256}, here, 2 * 256 * 2})
	}
	matrix("token_embd.weight", 4)
	for _, name := range []string{"blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"} {
		f.vector(name+".weight", 256)
	}
	return f
}

// TestEveryFormat: a tensor of each format takes exactly the bytes that it
// should; one byte less, or a row that is no whole number of blocks, is refused.
func TestEveryFormat(t *testing.T) {
	for kind, format := range formats {
		if format.block == 0 {
			b := small()
			b.tensor("token_embd.weight").kind = kind
			if _, err := OpenBytes("m", b.bytes()); err == nil || !strings.Contains(err.Error(), `m: tensor "token_embd.weight": type `+format.name+" is not supported; supported are "+supported) {
				t.Errorf("%v: %v", kind, err)
			}
			continue
		}
		f, err := OpenBytes("m", manyColumns(kind).bytes())
		if err != nil {
			t.Fatalf("%v: %v", kind, err)
		}
		if _, err := f.Hyper(); err != nil {
			t.Errorf("%v: %v", kind, err)
		}
		if v, _ := f.Tensor("token_embd.weight"); v.Type != kind || len(v.Data) != 4*256/format.block*format.bytes || f.Quantisation() != kind.String() && kind != F16 {
			t.Errorf("%v: %d bytes of %v, mostly %s", kind, len(v.Data), v.Type, f.Quantisation())
		}
		last := &builder{version: 3, align: 32, keys: []bkey{{"general.architecture", "llama"}}}
		size := 3 * 256 / format.block * format.bytes
		last.tensors = []btensor{{"w", kind, []uint64{256, 3}, here, size}}
		last.cut = (size+31)/32*32 - size // what only aligns
		if _, err := OpenBytes("m", last.bytes()); err != nil {
			t.Errorf("%v: %v", kind, err)
		}
		last.cut++
		if _, err := OpenBytes("m", last.bytes()); err == nil || !strings.Contains(err.Error(), fmt.Sprintf(`m: tensor "w": truncated: %d bytes at data offset 0, but the data have %d bytes`, size, size-1)) {
			t.Errorf("%v, a byte too short: %v", kind, err)
		}
		last.tensors[0].shape[0] -= 16
		if _, err := OpenBytes("m", last.bytes()); format.block > 1 && (err == nil || !strings.Contains(err.Error(), fmt.Sprintf(`m: tensor "w": rows of 240 values do not divide into %v blocks of %d`, kind, format.block))) {
			t.Errorf("%v, rows of 240: %v", kind, err)
		}
	}
}

// TestFormats: every format has a name of its own.
func TestFormats(t *testing.T) {
	seen := map[string]Type{}
	for _, typ := range slices.Sorted(maps.Keys(formats)) {
		if other, ok := seen[typ.String()]; ok {
			t.Errorf("types %d and %d are both %s", other, typ, typ)
		}
		seen[typ.String()] = typ
		if values, _ := typ.Block(); (values > 0) != slices.Contains(strings.Split(supported, ", "), typ.String()) {
			t.Errorf("%s: supported or not?", typ)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	path := modeltest.SmolLM2(b)
	for b.Loop() {
		f, err := Open(path)
		if err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}

func BenchmarkFingerprint(b *testing.B) {
	f := smolFile(b)
	b.SetBytes(int64(f.Size()))
	for b.Loop() {
		f.fingerprint()
	}
}
