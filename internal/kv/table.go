//metronome:pure

package kv

import "slices"

// BlockTable is a sequence's ordered page ids: entry i holds the KV of
// positions i*PageSize … (i+1)*PageSize-1. The zero value is empty. Its pages
// are counted in one Pool, and only that pool's methods change it.
type BlockTable struct {
	pages   []Page
	shared  int  // leading pages that came from the index by Match
	indexed int  // leading pages that are themselves nodes of the index
	held    bool // quarantined: the pages are held, not referenced
}

// Adopted is the table of pages whose references have come from another table
// (Disown). It takes the slice over.
func Adopted(pages []Page) BlockTable { return BlockTable{pages: pages} }

// Disown empties the table without giving its references back: they go along
// with the returned pages, to a table made by Adopted.
func (t *BlockTable) Disown() []Page {
	pages := t.pages
	*t = BlockTable{}
	return pages
}

// Pages is the table itself, to be read only. What comes later is appended or
// made anew: the entries of a returned slice never change.
func (t *BlockTable) Pages() []Page { return t.pages }

// Len is the number of pages.
func (t *BlockTable) Len() int { return len(t.pages) }

// Grow makes room for that many pages in all, so that Extends up to there do
// not allocate.
func (t *BlockTable) Grow(pages int) { t.pages = slices.Grow(t.pages, max(0, pages-len(t.pages))) }

// Shared is the number of leading pages that Match found.
func (t *BlockTable) Shared() int { return t.shared }
