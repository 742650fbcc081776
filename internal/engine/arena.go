package engine

import (
	"fmt"
	"math"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/kv"
)

// arena is the KV bytes of one TP rank: [layer][page][head], each head K rows
// then V rows, as kv.Geometry says.
type arena struct {
	geo    kv.Geometry // of this rank: Heads is the rank's
	pages  int
	extent int // bytes of one head of one page in one layer
	data   []byte
}

// newArenas splits the heads of geo over tp ranks. The system hands memory out
// as it is written, so unused pages cost nothing.
func newArenas(geo kv.Geometry, pages, tp int) ([]*arena, error) {
	if page := geo.PageBytes(); pages > math.MaxInt/2/page || int64(pages)*int64(page) > 1<<46 {
		return nil, fmt.Errorf("engine: %d KV pages of %d bytes are more than can be addressed", pages, page)
	}
	geo.Heads /= tp
	ranks := make([]*arena, tp)
	for i := range ranks {
		ranks[i] = &arena{geo, pages, geo.ExtentBytes(1), make([]byte, pages*geo.PageBytes())}
	}
	return ranks, nil
}

func (a *arena) Extent(layer int, page kv.Page, head, heads int) []byte {
	if layer < 0 || layer >= a.geo.Layers || page < 0 || int(page) >= a.pages || head < 0 || heads < 1 || head+heads > a.geo.Heads {
		panic(fmt.Sprintf("engine: no extent for layer %d, page %d, heads %d to %d: there are %d layers, %d pages, %d heads",
			layer, page, head, head+heads, a.geo.Layers, a.pages, a.geo.Heads))
	}
	at := ((layer*a.pages+int(page))*a.geo.Heads + head) * a.extent
	return a.data[at : at+heads*a.extent : at+heads*a.extent]
}

// dtypes are the forms that K and V rows are kept in, by the words of
// Config.KVDType. They are forms of weights, too.
var dtypes = map[string]kernels.Type{"f16": kernels.F16, "f32": kernels.F32, "q8_0": kernels.Q8_0}

// KVTokenBytes is the bytes of K plus V of one token in one head of one layer,
// heads having headDim values. An unknown dtype is an error, and one whose
// blocks do not divide a head.
func KVTokenBytes(dtype string, headDim int) (int, error) {
	t, ok := dtypes[dtype]
	if !ok {
		return 0, fmt.Errorf("engine: KV dtype %q; f16, f32 and q8_0 can be computed", dtype)
	}
	if t == kernels.Q8_0 && headDim%kernels.Block != 0 {
		return 0, fmt.Errorf("engine: KV dtype %s has blocks of %d values, the model's heads have %d; f16 and f32 take any", dtype, kernels.Block, headDim)
	}
	return 2 * t.RowBytes(headDim), nil
}
