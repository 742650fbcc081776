// Package kv accounts for KV pages: the pool, block tables and the prefix
// index. It knows page ids, never their bytes, and is pure: no goroutine,
// lock, clock or I/O.
package kv
