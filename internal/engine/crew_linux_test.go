package engine

import (
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A thread that leaves a CPU is bound to none afterwards.
func TestLeavingACPUBindsToNone(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, after := allowed(t), unix.CPUSet{}
	moved := false
	for range 20 {
		here := on(currentCPU())
		if cpu := here[0].cpu.Load(); !before.IsSet(int(cpu)) {
			t.Fatalf("on CPU %d, which the thread may not use", cpu)
		}
		leaveCPUs(here)
		moved = moved || currentCPU() != here[0].cpu.Load()
		if after = allowed(t); after != before {
			t.Fatalf("it may use %d CPUs after, %d before", after.Count(), before.Count())
		}
	}
	if !moved && before.Count() > 1 {
		t.Error("20 times it was still there")
	}
}

// A helper stays where it is when other threads are on every CPU: to move it
// costs two sleeps of its thread, and it would share a CPU as before.
func TestNoMoveWithoutASpareCPU(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all := allowed(t)
	var taken []int32
	for cpu := range int32(unsafe.Sizeof(all) * 8) {
		if all.IsSet(int(cpu)) {
			taken = append(taken, cpu)
		}
	}
	c := &crew{shares: on(slices.Concat(taken, taken, []int32{-1})...)}
	before, n := sleeps(t), int64(100)
	for range n {
		c.spread(len(c.shares) - 1)
	}
	if got := sleeps(t) - before; got >= n {
		t.Errorf("the thread slept %d times in %d looks", got, n)
	}
}

// Where the system does not say which CPU a thread is on, or moves none, as in
// some sandboxes, helpers stay where they are.
func TestRefusedToMove(t *testing.T) {
	for _, call := range []uint32{unix.SYS_GETCPU, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_SETAFFINITY} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // for ever: the thread ends with the goroutine
			if err := refuse(call); err != nil {
				t.Errorf("cannot refuse call %d: %v", call, err)
				return
			}
			cpu := currentCPU()
			if (cpu == -1) != (call == unix.SYS_GETCPU) {
				t.Errorf("call %d refused: on CPU %d", call, cpu)
			}
			c := &crew{shares: on(cpu, -1)}
			c.spread(1)
			if got := c.shares[1].cpu.Load(); got < -1 || call == unix.SYS_GETCPU && got != -1 {
				t.Errorf("call %d refused: on CPU %d afterwards", call, got)
			}
		}()
		<-done
	}
}

func allowed(t *testing.T) (set unix.CPUSet) {
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	return set
}

// on is threads on CPUs.
func on(cpus ...int32) []share {
	threads := make([]share, len(cpus))
	for i, cpu := range cpus {
		threads[i].cpu.Store(cpu)
	}
	return threads
}

// sleeps is how often the calling thread gave its CPU away to wait.
func sleeps(t *testing.T) int64 {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		t.Fatal(err)
	}
	return usage.Nvcsw
}

// refuse makes a system call fail in the calling thread from now on.
func refuse(call uint32) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the call's number is the first word
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}
