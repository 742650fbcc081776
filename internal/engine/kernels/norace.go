//go:build !race

package kernels

const raced = false
