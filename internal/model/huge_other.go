//go:build !linux

package model

// HugePages does nothing where the system cannot be asked.
func HugePages([]byte) {}
