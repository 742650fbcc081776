//metronome:pure

package kv

// Page is the id of one KV page: a fixed number of tokens of KV over all
// layers and heads. It indexes an arena; the bytes live in the engine.
type Page int32

// Geometry is the shape of the KV of one model as it lies in memory.
//
// Within one layer a page is a row of heads, head-major: head h of a page
// holds first the K rows of all its tokens, then their V rows. So any range of
// heads of one (layer, page) is one contiguous extent, which is what transfer
// sends and receives, also between unequal TP sizes.
type Geometry struct {
	Layers     int // transformer blocks
	Heads      int // KV heads of the whole model, before any TP split
	TokenBytes int // bytes of K plus V of one token in one head of one layer
	PageSize   int // tokens in a page
}

// ExtentBytes is the size in bytes of the given number of heads of one page in one layer.
func (g Geometry) ExtentBytes(heads int) int { return heads * g.PageSize * g.TokenBytes }

// PageBytes is the size in bytes of one page over all layers and heads.
func (g Geometry) PageBytes() int { return g.Layers * g.ExtentBytes(g.Heads) }

// PagesFor is how many pages hold the given number of tokens.
func (g Geometry) PagesFor(tokens int) int { return PagesFor(tokens, g.PageSize) }

// PagesFor is how many pages of pageSize tokens hold the given number of tokens.
func PagesFor(tokens, pageSize int) int { return (tokens + pageSize - 1) / pageSize }
