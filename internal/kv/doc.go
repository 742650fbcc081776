// Package kv accounts for KV pages: the pool, block tables and the prefix
// index. It knows page ids, never their bytes, and is pure: no goroutine,
// lock, clock or I/O.
//
// A [Pool] numbers the pages of one arena and knows for each how many block
// tables of living requests name it (references) and how many of ended ones
// whose pages something outside may still touch (holds). Its state follows
// from these two counts and from the prefix index:
//
//	owned        at least one reference
//	quarantined  no reference, at least one hold: never given out
//	cached       neither, but in the prefix index: kept until the room is needed
//	free         neither, and not in the index
//
// free + owned + cached + quarantined = all pages, always ([Pool.Check]).
//
// The life of a [BlockTable], in the order of the calls:
//
//	Match       (optional, first) share the whole pages of a prompt that the index holds
//	Extend      own fresh pages until the table covers so many tokens
//	Insert      put the leading whole pages, final by now, into the index
//	Share       the same, and give up those that the index has already
//	Release     the request is done with its pages, and so is everybody outside
//	Quarantine  the request is done, but an open grant, a queued send or a
//	            running batch names the pages; then
//	Lift        nothing outside names them any more
//
// Shared pages are never written: a table writes only pages that it took by
// Extend and that are not in the index yet ([Pool.Writable]).
//
// The prefix index is a tree with one page of tokens a node. A lookup compares
// the tokens themselves; hashes only find candidates. When Extend finds no free
// page it evicts the least recently used cached leaf, so no cached page ever
// loses its parent.
package kv
