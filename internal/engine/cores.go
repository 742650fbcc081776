package engine

import (
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// Cores is how many CPUs the process may use as it starts, quotas of its control
// group counted in: with more threads than that, one would stand still.
var Cores = cores(runtime.GOMAXPROCS(0), os.Getenv("GOMAXPROCS") != "", os.DirFS("/"))

// cores corrects what Go makes of a quota: never less than 2. Two threads on a
// quota of one CPU have used it up after half of each period, and then all stops.
func cores(procs int, chosen bool, root fs.FS) int {
	if procs == 2 && !chosen && oneCPU(root) {
		return 1
	}
	return procs
}

// oneCPU says whether the control group of the process has a quota of one CPU or less.
func oneCPU(root fs.FS) bool {
	groups, _ := fs.ReadFile(root, "proc/self/cgroup")
	for line := range strings.Lines(string(groups)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) < 3 {
			continue
		}
		// A container may see the path that the host has, and only its own group.
		for _, group := range []string{part[2], "/"} {
			var quota, period string
			if part[1] == "" {
				quota, period, _ = strings.Cut(first(root, "sys/fs/cgroup", group, "cpu.max"), " ")
			} else if slices.Contains(strings.Split(part[1], ","), "cpu") {
				quota = first(root, "sys/fs/cgroup/cpu", group, "cpu.cfs_quota_us")
				period = first(root, "sys/fs/cgroup/cpu", group, "cpu.cfs_period_us")
			}
			q, _ := strconv.Atoi(quota) // "max" and -1 are none
			if p, _ := strconv.Atoi(period); q > 0 && q <= p {
				return true
			}
		}
	}
	return false
}

// first is the first line of a file, if it is there.
func first(root fs.FS, name ...string) string {
	text, _ := fs.ReadFile(root, path.Join(name...))
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}
