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
		release(0, &all)
	}
}

// release lets a thread use the CPUs that it might use before, 0 is the calling
// one. It asks for every one and gets what its control group has, and what that is
// given later: those of before, once asked for, would be all for ever. Only if
// this is more than before, as under taskset, it asks for those.
func release(thread int, before *unix.CPUSet) {
	var every, got unix.CPUSet
	every.Fill()
	if unix.SchedSetaffinity(thread, &every) != nil || unix.SchedGetaffinity(thread, &got) != nil || got != *before {
		unix.SchedSetaffinity(thread, before)
	}
}

// fetch moves a stopped thread of this process to the CPU of the calling one,
// and binds it to none.
func fetch(s *share) bool {
	thread, cpu := int(s.thread.Load()), currentCPU()
	if cpu < 0 {
		return false
	}
	var all, here unix.CPUSet
	here.Set(int(cpu))
	if unix.SchedGetaffinity(thread, &all) != nil || unix.SchedSetaffinity(thread, &here) != nil {
		return false
	}
	release(thread, &all)
	s.cpu.Store(cpu)
	return true
}

// stopped says whether a thread of this process has no CPU: its clock stands still.
func stopped(thread int32) bool {
	before := cpuTime(thread)
	return before >= 0 && cpuTime(thread) == before
}

// cpuTime is how long a thread of this process has had a CPU, in nanoseconds; of
// any other thread it is -1.
func cpuTime(thread int32) int64 {
	if thread <= 0 {
		return -1
	}
	var t unix.Timespec
	clock := ^int(thread)<<3 | 6 // CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED, include/linux/posix-timers.h
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(&t)), 0); errno != 0 {
		return -1
	}
	return t.Nano()
}

func currentThread() int32 { return int32(unix.Gettid()) }

// yieldCPU lets a thread run that waits for this CPU.
func yieldCPU() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
