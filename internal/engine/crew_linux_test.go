package engine

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that leaves a CPU is bound to none afterwards.
func TestLeavingACPUBindsToNone(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	moved := false
	for range 20 {
		cpu := currentCPU()
		if !before.IsSet(int(cpu)) {
			t.Fatalf("on CPU %d, which the thread may not use", cpu)
		}
		leaveCPU(cpu)
		moved = moved || currentCPU() != cpu
		if err := unix.SchedGetaffinity(0, &after); err != nil {
			t.Fatal(err)
		}
		if after != before {
			t.Fatalf("it may use %d CPUs after, %d before", after.Count(), before.Count())
		}
	}
	if !moved && before.Count() > 1 {
		t.Error("20 times it was still there")
	}
}
