//go:build !amd64

package kernels

func detect() []*path { return nil }
