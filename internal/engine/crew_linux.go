package engine

import (
	"runtime"
	"sync"
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
// another taken one costs both and helps nobody.
func leaveCPUs(of []share) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	move(0, func(all unix.CPUSet) unix.CPUSet {
		for i := range of {
			if cpu := of[i].cpu.Load(); cpu >= 0 {
				all.Clear(int(cpu))
			}
		}
		return all
	})
}

// fetch moves a stopped thread of this process to the CPU of the calling one.
func fetch(s *share) bool {
	cpu := currentCPU()
	moved := cpu >= 0 && move(int(s.thread.Load()), func(all unix.CPUSet) (here unix.CPUSet) {
		if all.IsSet(int(cpu)) {
			here.Set(int(cpu))
		}
		return here
	})
	if moved {
		s.cpu.Store(cpu)
	}
	return moved
}

// moving is held by who has narrowed the CPUs of a thread: another one would take
// those for all that the thread may use, and give it no more back.
var moving sync.Mutex

// move has a thread, 0 is the calling one, go on with one of some CPUs of those
// that it may use. It is bound to none afterwards.
func move(thread int, some func(all unix.CPUSet) unix.CPUSet) bool {
	if !moving.TryLock() { // nobody waits for one that may be stopped
		return false
	}
	defer moving.Unlock()
	var all unix.CPUSet
	if unix.SchedGetaffinity(thread, &all) != nil {
		return false
	}
	to := some(all)
	if to == (unix.CPUSet{}) || unix.SchedSetaffinity(thread, &to) != nil {
		return false
	}
	release(thread, &all)
	return true
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
