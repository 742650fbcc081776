//go:build !linux

package engine

// Elsewhere the system alone says who is on which CPU.

func currentCPU() int32    { return -1 }
func currentThread() int32 { return -1 }
func stopped(int32) bool   { return false }
func fetch(*share) bool    { return false }
func leaveCPUs([]share)    {}
func yieldCPU()            {}
