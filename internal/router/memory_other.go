//go:build !unix

package router

func mapMemory(n int64) []byte { return make([]byte, 0, n) }
func unmapMemory([]byte)       {}
