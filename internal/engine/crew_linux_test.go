package engine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
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

// A thread that may use some CPUs only, as under taskset, may use those afterwards.
func TestLeavingACPUKeepsTheOthersOut(t *testing.T) {
	all := allowed(t)
	if all.Count() < 2 {
		t.Skip("one CPU")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		few := all
		few.Clear(int(currentCPU()))
		if err := unix.SchedSetaffinity(0, &few); err != nil {
			t.Error(err)
			return
		}
		release(0, &few)
		if got := allowed(t); got != few {
			t.Errorf("it may use %d CPUs after, %d before", got.Count(), few.Count())
		}
	}()
	<-done
}

// A thread that has left a CPU may use those that its control group is given
// later. The test runs itself in such a group.
func TestLeftCPUInAGrowingGroup(t *testing.T) {
	const name = "METRONOME_TEST_CPUSET"
	if group := os.Getenv(name); group != "" {
		growGroup(t, group)
		return
	}
	group := newCPUGroup(t)
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), name+"="+group)
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// newCPUGroup makes a control group whose CPUs can be chosen.
func newCPUGroup(t *testing.T) string {
	root := "/sys/fs/cgroup/cpuset"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	group := filepath.Join(root, fmt.Sprint("metronome-test-", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skip("no control group can be made here: ", err)
	}
	t.Cleanup(func() { os.Remove(group) })
	if _, err := os.Stat(group + "/cpuset.cpus"); err != nil {
		t.Skip("control groups have no CPUs here: ", err)
	}
	return group
}

// growGroup joins a group of one CPU, leaves and releases it, and gives the group another.
func growGroup(t *testing.T, group string) {
	runtime.LockOSThread()
	set := func(file, text string) {
		if err := os.WriteFile(filepath.Join(group, file), []byte(text), 0); err != nil {
			t.Fatal(err)
		}
	}
	all, cpus := allowed(t), []string{}
	for cpu := range int(unsafe.Sizeof(unix.CPUSet{}) * 8) {
		if all.IsSet(cpu) {
			cpus = append(cpus, strconv.Itoa(cpu))
		}
	}
	set("cpuset.mems", "0")
	set("cpuset.cpus", cpus[0])
	set("cgroup.procs", strconv.Itoa(os.Getpid()))
	one := allowed(t)
	release(0, &one)
	set("cpuset.cpus", strings.Join(cpus, ","))
	if got := allowed(t); one.Count() != 1 || got != all {
		t.Errorf("it may use %d CPUs of %d", got.Count(), all.Count())
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

// A thread is stopped that has no CPU, whatever the reason; other processes' never are.
func TestStopped(t *testing.T) {
	awake, asleep := aThread(t, spinning), aThread(t, sleeping)
	for thread, want := range map[int32]bool{awake: false, asleep: true, int32(os.Getppid()): false, -1: false} {
		// One that spins may be stopped for once, one that sleeps awake.
		sleepUntil(t, fmt.Sprintf("thread %d is stopped: %v", thread, want), func() bool { return stopped(thread) == want })
	}
}

// A thread that was fetched goes on here, and is bound to no CPU.
func TestFetchedIsBoundToNone(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var s share
	s.thread.Store(aThread(t, spinning))
	before := allowed(t)
	for range 20 {
		s.cpu.Store(-1)
		if !fetch(&s) {
			t.Fatal("not fetched")
		}
		if cpu := s.cpu.Load(); cpu < 0 || !before.IsSet(int(cpu)) {
			t.Fatalf("fetched to CPU %d", cpu)
		}
		var after unix.CPUSet
		if err := unix.SchedGetaffinity(int(s.thread.Load()), &after); err != nil || after != before {
			t.Fatalf("it may use %d CPUs after, %d before; %v", after.Count(), before.Count(), err)
		}
	}
}

// A thread that several fetch at once, while it leaves a CPU itself, is bound to none.
func TestFetchedByManyIsBoundToNone(t *testing.T) {
	var s share
	s.thread.Store(aThread(t, func() { leaveCPUs(on(currentCPU())) }))
	before := allowed(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				fetch(&s)
			}
		})
	}
	wg.Wait()
	sleepUntil(t, "it may use all CPUs again", func() bool {
		var after unix.CPUSet
		return unix.SchedGetaffinity(int(s.thread.Load()), &after) == nil && after == before
	})
}

// A caller that waits for a helper that was stopped in a tile fetches it, and the
// helper leaves the caller's CPU with its next step.
func TestCallerFetchesAStoppedHelper(t *testing.T) {
	c := newCrew(2)
	defer c.close()
	helper := &c.shares[1]
	inTile := make(chan struct{})
	c.run(2, func(_, worker int) {
		if worker == 0 {
			<-inTile
			return
		}
		close(inTile)
		sleepUntil(t, "the helper is fetched", helper.fetched.Load)
	})
	sleepUntil(t, "the helper gives way", func() bool { return !helper.fetched.Load() })
}

// A helper that waits for a caller that was stopped in a batch fetches it; it
// leaves one alone that has begun none.
func TestHelperFetchesAStoppedCaller(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := newCrew(2)
	defer c.close()
	fetched := func() bool {
		caller, both := &c.shares[0], make(chan struct{})
		c.run(2, func(_, worker int) {
			if worker == 1 {
				both <- struct{}{}
				return
			}
			<-both
			caller.cpu.Store(-2)
			unix.Nanosleep(&unix.Timespec{Nsec: 5e6}, nil)
		})
		return caller.cpu.Load() != -2
	}
	c.begin()
	sleepUntil(t, "the caller is fetched", fetched)
	c.end()
	if fetched() {
		t.Error("a caller was fetched that has begun no batch")
	}
}

// Where the system does not say which CPU a thread is on, or moves none, as in
// some sandboxes, helpers stay where they are.
func TestRefusedToMove(t *testing.T) {
	for _, call := range []uint32{unix.SYS_GETCPU, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_SETAFFINITY, unix.SYS_CLOCK_GETTIME} {
		refused := make(chan error)
		go func() {
			runtime.LockOSThread() // for ever: the thread ends with the goroutine
			err := refuse(call)
			if err == nil {
				spreadRefused(t, call)
			}
			refused <- err
		}()
		if err := <-refused; err != nil {
			t.Skip("calls cannot be refused here: ", err)
		}
	}
}

func spreadRefused(t *testing.T, call uint32) {
	cpu := currentCPU()
	if (cpu == -1) != (call == unix.SYS_GETCPU) {
		t.Errorf("call %d refused: on CPU %d", call, cpu)
	}
	c := &crew{shares: on(cpu, -1)}
	c.spread(1)
	if got := c.shares[1].cpu.Load(); (got == -1) != (call == unix.SYS_GETCPU) {
		t.Errorf("call %d refused: on CPU %d afterwards", call, got)
	}
	clock := call == unix.SYS_CLOCK_GETTIME
	if me := &c.shares[1]; fetch(me) != clock || clock && stopped(me.thread.Load()) {
		t.Errorf("call %d refused: a thread was fetched, or stopped", call)
	}
}

// aThread is a thread that does something again and again until the test ends.
func aThread(t *testing.T, do func()) int32 {
	number, stop := make(chan int32), make(chan struct{})
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		number <- currentThread()
		for {
			select {
			case <-stop:
				close(number)
				return
			default:
				do()
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-number })
	return <-number
}

func spinning() {}
func sleeping() { unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil) }

// sleepUntil has the calling thread asleep until it is so, for 10 s at most.
func sleepUntil(t *testing.T, what string, so func() bool) {
	for range 10_000 {
		if so() {
			return
		}
		sleeping()
	}
	t.Errorf("not in 10 s: %s", what)
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
