package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

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
