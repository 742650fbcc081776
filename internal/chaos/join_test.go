package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A fleet that nobody names: the router is told of no worker, all join by
// lease. One that is killed is out and, started again, back; a rolling restart of
// all, the router's turn aside, loses no request.
func TestFleetByJoin(t *testing.T) {
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("fleet-secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	token := "--peer-token-file=" + file
	router := r.start(t, "router", "--listen=127.0.0.1:0", "--lease=3s", "--policy=round_robin", "--migrations=4", token)
	if status, _, body, err := Post(within(t, requestBound), router.HTTP+"/generate", map[string]any{"text": "x"}); err != nil || status != 503 {
		t.Fatalf("without workers: %d %s %v", status, body, err)
	}
	join := []string{"--join=" + router.HTTP, "--engine=sim", "--drain=1s"}
	stranger := r.startDecode(t, "sim", join...) // without the secret
	var members []*Proc
	for _, role := range []string{"prefill", "prefill", "decode", "decode"} {
		args := []string{role, "sim", "--listen=127.0.0.1:" + fixedPort(t), token}
		if role == "prefill" {
			args = append(args, "--bootstrap-listen=127.0.0.1:"+fixedPort(t))
		} else {
			args = append(args, "--on-mismatch=reject", "--heartbeat-interval=500ms")
		}
		members = append(members, r.start(t, append(args, join...)...))
	}
	waitWorkers(t, router, "prefill", 2)
	waitWorkers(t, router, "decode", 2)
	heals(t, "at first", router.HTTP, 4)

	ctx, stop := context.WithCancel(context.Background())
	var load sync.WaitGroup
	body := func(i int) map[string]any {
		return map[string]any{"text": fmt.Sprint("short ", i%7), "sampling_params": map[string]any{"max_new_tokens": 30, "temperature": 0}}
	}
	var want []*Answer
	for i := range 7 {
		a, err := Generate(within(t, requestBound), router.HTTP, body(i))
		if err != nil || a.Error != nil {
			t.Fatal(err, a)
		}
		want = append(want, a)
	}
	for k := range 4 {
		load.Go(func() {
			for i := k; ctx.Err() == nil; i++ {
				bound, cancel := context.WithTimeout(context.Background(), requestBound)
				a, err := Generate(bound, router.HTTP, body(i))
				cancel()
				if err != nil || a.Error != nil || !slices.Equal(a.IDs, want[i%7].IDs) {
					t.Errorf("a request: %v %+v", err, a)
					return
				}
			}
		})
	}
	for i, p := range members {
		if i == 2 { // without a word
			p.Kill()
			waitWorkers(t, router, p.Role, 1)
		} else {
			p.Terminate()
		}
		select {
		case <-p.Done():
		case <-time.After(10 * time.Second):
			t.Fatalf("%v has not ended 10 s after its signal", p.Args)
		}
		members[i] = r.start(t, p.Args[:len(p.Args)-1]...)
		waitWorkers(t, router, p.Role, 2)
	}
	stop()
	load.Wait()
	if log := stranger.Log(); !strings.Contains(log, "answered 401") {
		t.Errorf("the worker without the secret was not told so: %s", tail(log, 500))
	}
	checkMembers(t, router, members)
	members[3].Kill()
	killed := time.Now()
	for len(membersOf(t, router)) > 3 && time.Since(killed) < 5*time.Second {
		time.Sleep(50 * time.Millisecond)
	}
	checkMembers(t, router, members[:3])
	if took := time.Since(killed); took > 4*time.Second {
		t.Errorf("a member for %v after it was killed, with a lease of 3 s", took)
	}
}

type memberRow struct{ Role, URL, State, Instance string }

func membersOf(t *testing.T, router *Proc) (rows []memberRow) {
	t.Helper()
	if err := get(within(t, requestBound), router.HTTP+"/debug/workers", &rows); err != nil {
		t.Fatal(err)
	}
	return rows
}

// checkMembers wants these to be the members, in their present lives, as soon as
// a past life's last leg has ended.
func checkMembers(t *testing.T, router *Proc, want []*Proc) {
	t.Helper()
	var rows []memberRow
	for end := time.Now().Add(idleWait); time.Now().Before(end); <-time.After(50 * time.Millisecond) {
		rows = membersOf(t, router)
		ok := len(rows) == len(want)
		for _, p := range want {
			ok = ok && slices.ContainsFunc(rows, func(row memberRow) bool {
				return row.Role == p.Role && row.URL == p.HTTP && row.Instance == p.Instance
			})
		}
		if ok {
			return
		}
	}
	t.Errorf("%d members: %+v", len(rows), rows)
}
