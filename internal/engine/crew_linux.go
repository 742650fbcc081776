package engine

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// currentCPU is the number of the CPU that the calling thread is on, or -1.
func currentCPU() int32 {
	var cpu uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); errno != 0 {
		return -1
	}
	return int32(cpu)
}

// leaveCPUs moves the calling thread to a CPU that it may use and none of those
// threads is on. Where there are more threads than CPUs it stays, since a move to
// another taken one costs both and helps nobody. It is bound to none.
func leaveCPUs(of []share) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil {
		return
	}
	spare := all
	for i := range of {
		if cpu := of[i].cpu.Load(); cpu >= 0 {
			spare.Clear(int(cpu))
		}
	}
	if spare == (unix.CPUSet{}) {
		return
	}
	if unix.SchedSetaffinity(0, &spare) == nil {
		release(&all)
	}
}

// release lets the calling thread use the CPUs that it might use before. It asks
// for every one and gets what its control group has, and what that is given later:
// those of before, once asked for, would be all for ever. Only if this is more
// than before, as under taskset, it asks for those.
func release(before *unix.CPUSet) {
	var every, got unix.CPUSet
	every.Fill()
	if unix.SchedSetaffinity(0, &every) != nil || unix.SchedGetaffinity(0, &got) != nil || got != *before {
		unix.SchedSetaffinity(0, before)
	}
}

// yieldCPU lets a thread run that waits for this CPU.
func yieldCPU() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
