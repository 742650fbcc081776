package engine

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// currentCPU is the number of the CPU that the calling thread is on.
func currentCPU() int32 {
	var cpu uint32
	unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	return int32(cpu)
}

// leaveCPU moves the calling thread to another CPU of those that it may use, if
// there is one. It may return to this one afterwards: nothing stays bound.
func leaveCPU(cpu int32) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil {
		return
	}
	others := all
	if others.Clear(int(cpu)); others.Count() == 0 {
		return
	}
	if unix.SchedSetaffinity(0, &others) == nil {
		unix.SchedSetaffinity(0, &all)
	}
}

// yieldCPU lets a thread run that waits for this CPU.
func yieldCPU() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
