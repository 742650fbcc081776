package engine

import (
	"encoding/binary"
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

// dtype is the number format of K and V rows.
type dtype uint8

const (
	f16 dtype = 2 // the value is the size in bytes
	f32 dtype = 4
)

func parseDType(s string) (dtype, error) {
	switch s {
	case "f16":
		return f16, nil
	case "f32":
		return f32, nil
	}
	return 0, fmt.Errorf("engine: KV dtype %q; f16 and f32 can be computed", s)
}

// put rounds one K or V row to the dtype.
func (d dtype) put(dst []byte, src []float32) {
	if d == f16 {
		for i, v := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], kernels.F32ToF16(v))
		}
		return
	}
	for i, v := range src {
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
	}
}

// widen reads K or V rows.
func (d dtype) widen(dst []float32, src []byte) {
	if d == f16 {
		kernels.WidenF16(dst, src)
		return
	}
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
	}
}
