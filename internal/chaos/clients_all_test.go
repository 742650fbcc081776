//go:build clients

// Clients that are too large for every test run: make clients installs them.

package chaos

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A page's fetch sees the same, and sees it as it comes.
func TestBrowser(t *testing.T) {
	r := newRig(t)
	p := r.up(t)
	s := decodeSeen(t, runClient(t, "", "python3", "testdata/clients/browser.py", p.Router, clientBody))
	s.check(t, p.Router)
	if s.Reads < 3 {
		t.Errorf("%d events came in %d reads", s.Events, s.Reads)
	}
	t.Logf("Chromium %s: %d events in %d reads", s.Browser, s.Events, s.Reads)
}

// What aiperf reports and what our metrics say is the same within 2 %.
func TestLoadGenerator(t *testing.T) {
	venv := os.Getenv("METRONOME_AIPERF")
	r := newRig(t)
	p := r.up(t, "sim", "--engine=sim", "--sim-prefill-rate=1000", "--sim-decode-base=50ms", "--prefill=2", "--decode=2")
	dir := t.TempDir()
	runClient(t, "", filepath.Join(venv, "bin", "python"), "testdata/clients/tokenizer.py", dir)
	before := fleetMetrics(t, p)
	report := aiperf(t, venv, dir, p.Router)
	got := fleetMetrics(t, p)
	for name := range got {
		got[name] -= before[name]
	}
	mean := func(name string) float64 { return 1000 * got[name+"_sum"] / got[name+"_count"] }
	for _, c := range []struct {
		what         string
		theirs, ours float64
	}{
		{"requests", report["request_count"].Avg, got[`router requests_total{code="ok"}`]},
		{"tokens in", report["total_usage_prompt_tokens"].Avg, got["decode prompt_tokens_total"]},
		{"tokens out", report["total_usage_completion_tokens"].Avg, got["decode generation_tokens_total"]},
		{"mean time to first token, ms", report["time_to_first_token"].Avg, mean("router time_to_first_token_seconds")},
		{"mean inter-token latency, ms", report["inter_token_latency"].Avg, mean("decode inter_token_latency_seconds")},
		{"mean latency, ms", report["request_latency"].Avg, mean("router e2e_request_latency_seconds")},
	} {
		t.Logf("%s: aiperf %.1f, metrics %.1f", c.what, c.theirs, c.ours)
		if !(math.Abs(c.theirs-c.ours) <= 0.02*c.theirs) || c.theirs == 0 {
			t.Errorf("%s: aiperf reports %.2f, our metrics say %.2f", c.what, c.theirs, c.ours)
		}
	}
}

type aggregate struct{ Avg, P50 float64 }

// aiperf runs 60 requests, 6 at a time, and gives its report.
func aiperf(t *testing.T, venv, dir, url string) map[string]aggregate {
	t.Helper()
	t.Setenv("HF_HOME", dir)
	t.Setenv("HF_HUB_OFFLINE", "1")
	runClient(t, dir, filepath.Join(venv, "bin", "aiperf"), "profile", "--model=sim", "--url="+url, "--endpoint-type=chat", "--streaming",
		"--request-count=60", "--concurrency=6", "--tokenizer=own/bytes", "--use-server-token-count", "--extra-inputs=ignore_eos:true",
		"--prompt-input-tokens-mean=800", "--prompt-output-tokens-mean=32", "--ui=none", "--output-artifact-dir="+dir+"/out")
	text, err := os.ReadFile(dir + "/out/profile_export_aiperf.json")
	if err != nil {
		t.Fatal(err)
	}
	var parts map[string]json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		t.Fatal(err)
	}
	report := map[string]aggregate{}
	for name, part := range parts {
		var a aggregate
		if json.Unmarshal(part, &a) == nil {
			report[name] = a
		}
	}
	return report
}

// fleetMetrics adds up the metrics of the router, the prefills and the decodes,
// each under the name of its role.
func fleetMetrics(t *testing.T, p *Proc) map[string]float64 {
	t.Helper()
	sum := map[string]float64{}
	add := func(role, base string) {
		m, err := Metrics(within(t, 5*time.Second), base)
		if err != nil {
			t.Fatal(err)
		}
		for name, v := range m {
			sum[role+" "+strings.TrimPrefix(name, "metronome_")] += v
		}
	}
	add("router", p.Router)
	for _, w := range p.Prefill {
		add("prefill", w.HTTP)
	}
	for _, w := range p.Decode {
		add("decode", w.HTTP)
	}
	return sum
}
