package chaos

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// slow bounds what a host sends, in Mbit/s.
func (n *testNet) slow(host, rate int) {
	n.t.Helper()
	n.run("tc", "-n", n.name(host), "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", fmt.Sprintf("%dmbit", rate), "burst", "32kb", "latency", "50ms")
}

// marks are a leg's timeline in the router's access log, in milliseconds.
type marks map[string]float64

// lastLegs are the timelines of both legs of the request that ended last.
func lastLegs(t *testing.T, router *Proc, ended int) (prefill, decode marks) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; {
		var found []string
		for line := range strings.Lines(router.Log()) {
			if strings.Contains(line, `"msg":"request"`) {
				found = append(found, line)
			}
		}
		if len(found) == ended {
			var line struct {
				Timeline struct{ Prefill, Decode marks } `json:"timeline_ms"`
			}
			if err := json.Unmarshal([]byte(found[ended-1]), &line); err != nil {
				t.Fatal(err)
			}
			return line.Timeline.Prefill, line.Timeline.Decode
		}
		if time.Now().After(end) {
			t.Fatalf("the router's log has %d requests, want %d", len(found), ended)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// Over a slow link pages travel while the prompt is computed: wherever that
// takes longer than the link does, what is left when the last layer is computed
// takes a fifth of the whole transfer at most.
func TestTransferHidesBehindCompute(t *testing.T) {
	path := modeltest.SmolLM2(t)
	n := newTestNet(t, 2)
	base := newRig(t)
	flags := []string{"--insecure", "--threads=1", "--kv-memory=128MiB"}
	p := n.on(base, 1).start(t, append([]string{"prefill", path, "--listen=10.0.0.1:30000", "--bootstrap-listen=10.0.0.1:8998", "--kv-listen=10.0.0.1:0"}, flags...)...)
	d := n.on(base, 2).start(t, append([]string{"decode", path, "--listen=10.0.0.2:30100"}, flags...)...)
	router := n.on(base, 2).start(t, "router", "--listen=10.0.0.2:8000", "--insecure", "--log-format=json", "--prefill="+p.HTTP+","+port(p.Bootstrap), "--decode="+d.HTTP)
	const tokens, perToken = 2000, 30 * 3 * 2 * 64 * 2 // layers, heads, K and V, values, f16
	for rate, try := 150, 1; ; try++ {
		n.slow(1, rate)
		a, err := GenerateWith(within(t, time.Minute), n.client(2), router.HTTP, map[string]any{
			"input_ids": promptIDs(tokens, 40000, try), "sampling_params": map[string]any{"max_new_tokens": 2, "temperature": 0, "ignore_eos": true}})
		if err != nil || a.Status != 200 || a.Cached != 0 {
			t.Fatalf("%v %+v", err, a)
		}
		prefill, decode := lastLegs(t, router, try)
		link := float64(tokens*perToken*8) / float64(rate) / 1e3
		compute, whole, rest := prefill["first_token"]-prefill["queued"], decode["last_page"]-decode["first_page"], prefill["received"]-prefill["first_token"]
		t.Logf("%d Mbit/s, %.1f MB: the link alone %.0f ms, compute %.0f ms; first to last page %.0f ms, of that after compute %.0f ms (%.1f %%)",
			rate, tokens*perToken/1e6, link, compute, whole, rest, 100*rest/whole)
		switch {
		case compute < link: // a machine faster than this link
			rate *= 2
		case rest <= 0.2*whole:
			return
		case try == 3: // a neighbour on the machine spoils one, not all
			t.Fatal("pages wait for the end of compute")
		}
	}
}
