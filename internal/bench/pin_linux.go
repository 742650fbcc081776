package bench

import (
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// twoCores are two of those that this process may use; false: there is one, or
// the system does not tell.
func twoCores() (a, b int, ok bool) {
	var may unix.CPUSet
	if unix.SchedGetaffinity(0, &may) != nil || may.Count() < 2 {
		return 0, 0, false
	}
	for !may.IsSet(a) {
		a++
	}
	for b = a + 1; !may.IsSet(b); b++ {
	}
	return a, b, true
}

// pin has this process, and what it starts from now on, compute on one core.
func pin(core int) {
	var one unix.CPUSet
	one.Set(core)
	tasks, _ := os.ReadDir("/proc/self/task") // threads that come later do as those that start them
	for _, t := range tasks {
		if id, err := strconv.Atoi(t.Name()); err == nil {
			unix.SchedSetaffinity(id, &one)
		}
	}
	runtime.GOMAXPROCS(1)
}
