package chaos

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// proportional is the memory of processes in MB, each page divided by those that share it.
func proportional(t *testing.T, pids ...int) (mb float64) {
	t.Helper()
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			t.Skipf("this system does not tell what processes share: %v", err)
		}
		_, rest, _ := strings.Cut(string(text), "\nPss:")
		kb, err := strconv.Atoi(strings.Fields(rest)[0])
		if err != nil {
			t.Fatal(err)
		}
		mb += float64(kb) / 1024
	}
	return mb
}

// children are the processes that a process has started.
func children(t *testing.T, pid int) (pids []int) {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for _, word := range strings.Fields(string(text)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, n)
		}
	}
	return pids
}

// The weights are there once: the four processes of up take less than 1.6
// times the memory of one that does both halves. Their KV of the same prompt,
// which is there twice, is counted too.
func TestUpSharesWeights(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells what processes share")
	}
	path := modeltest.SmolLM2(t)
	r := newRig(t)
	ask := func(base string) {
		t.Helper()
		a, err := Generate(within(t, time.Minute), base, map[string]any{"input_ids": promptIDs(512, 40000, 1), "sampling_params": map[string]any{"max_new_tokens": 8}})
		if err != nil || a.Status != 200 {
			t.Fatalf("%v %+v", err, a)
		}
	}
	serve := r.start(t, "serve", path, "--listen=127.0.0.1:0")
	ask(serve.HTTP)
	one := proportional(t, serve.PID())
	serve.Terminate()
	<-serve.Done()
	began := time.Now()
	up := r.up(t, path)
	ready := time.Since(began)
	ask(up.Router)
	pids := append(children(t, up.PID()), up.PID())
	if len(pids) != 4 {
		t.Fatalf("processes %v, want 4", pids)
	}
	four := proportional(t, pids...)
	t.Logf("one process %.0f MB, four %.0f MB: %.2f times; up was ready after %.2f s", one, four, four/one, ready.Seconds())
	if four >= 1.6*one {
		t.Errorf("the four processes of up take %.0f MB, one that does both halves %.0f MB", four, one)
	}
	if ready > 10*time.Second { // a bound for any machine; a quiet one takes a twentieth of it
		t.Errorf("up was ready after %v", ready)
	}
}
