package engine

import (
	"testing"
	"testing/fstest"
)

// Go says two CPUs at least; a quota of one is one thread, however it is written.
func TestCores(t *testing.T) {
	const v1, v2 = "5:memory:/a\n4:cpuacct,cpu:/a/b\n0::/\n", "0::/a/b\n"
	for name, c := range map[string]struct {
		procs  int
		chosen bool
		group  string
		files  map[string]string
		want   int
	}{
		"nothing known":            {2, false, "", nil, 2},
		"one CPU":                  {2, false, v2, map[string]string{"a/b/cpu.max": "100000 100000\n"}, 1},
		"half a CPU":               {2, false, v2, map[string]string{"a/b/cpu.max": "25000 50000\n"}, 1},
		"one CPU and a half":       {2, false, v2, map[string]string{"a/b/cpu.max": "150000 100000\n"}, 2},
		"no quota":                 {2, false, v2, map[string]string{"a/b/cpu.max": "max 100000\n"}, 2},
		"inside of a container":    {2, false, "0::/\n", map[string]string{"cpu.max": "100000 100000\n"}, 1},
		"the host's path":          {2, false, v2, map[string]string{"cpu.max": "100000 100000\n"}, 1},
		"version 1":                {2, false, v1, map[string]string{"cpu/a/b/cpu.cfs_quota_us": "50000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 1},
		"version 1, no quota":      {2, false, v1, map[string]string{"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 2},
		"version 1, host's path":   {2, false, v1, map[string]string{"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1},
		"version 1, not this one":  {2, false, "3:cpuset:/\n", map[string]string{"cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2},
		"empty files":              {2, false, v2, map[string]string{"a/b/cpu.max": ""}, 2},
		"chosen all the same":      {2, true, v2, map[string]string{"a/b/cpu.max": "100000 100000\n"}, 2},
		"more, so it is no quota":  {8, false, v2, map[string]string{"a/b/cpu.max": "100000 100000\n"}, 8},
		"a machine with one alone": {1, false, v2, map[string]string{"a/b/cpu.max": "max 100000\n"}, 1},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.group)}}
		for file, text := range c.files {
			root["sys/fs/cgroup/"+file] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := cores(c.procs, c.chosen, root); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
