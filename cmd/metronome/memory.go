package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// machineMemory is how many bytes of memory the machine has, where the system
// tells it cheaply (/proc), else 0.
func machineMemory() int64 {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			kib, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kib << 10
		}
	}
	return 0
}

// resident is the resident memory of a process where the system tells it
// cheaply (/proc), else "-".
func resident(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return "-"
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				return "-"
			}
			return fmt.Sprintf("%.1f MiB", float64(kib)/1024)
		}
	}
	return "-"
}
