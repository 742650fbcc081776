package main

import (
	"os/exec"
	"strings"
	"testing"
)

// promised are the flags that scripts rely on, with their defaults; "" where
// there is none. What is here is never renamed, and no default changes by accident.
var promised = map[string]string{
	"all": `advertise token-file peer-token-file insecure=false log-level=info log-format=text drain=20s json=false config`,
	"worker": `engine=cpu threads=0 kernels=auto precision=native tp=1 dp=1 page-size=16 kv-dtype=f16 kv-memory=512MiB kv-pages=0 context=0 max-running=64 max-queued=512
		chunk=512 prefix-cache=true request-timeout=600s served-name stream-output=false health-window=20s
		sim-prefill-rate=20000 sim-decode-base=8ms sim-decode-per-seq=100us sim-kv-bytes=2048`,
	"prefill": `announce-http=false kv-listen=127.0.0.1:0 registry bootstrap-timeout=300s kv-timeout=30s`,
	"decode": `parallel-info-timeout=5s parallel-info-attempts=15 parallel-info-interval=1s heartbeat-interval=5s heartbeat-failures=2 kv-timeout=30s
		resolve-timeout=120s bootstrap-allow`,
	"router": `prefill decode workers policy=least_load prefill-policy decode-policy health-interval=500ms health-timeout=1s health-failures=2 retries=2 migrations=1
		max-body=32MiB max-ejected=50%`,
}

// flagsOf are those of a role, some with a default of their own.
var flagsOf = map[string]string{
	"up":       promised["worker"] + " " + promised["prefill"] + " " + promised["decode"] + " prefill=1 decode=1 port=8000 on-mismatch=reject token-file drain=20s log-level=info json=false config",
	"serve":    promised["all"] + " " + promised["worker"] + " listen=127.0.0.1:8000",
	"prefill":  promised["all"] + " " + promised["worker"] + " " + promised["prefill"] + " join listen=127.0.0.1:30000 bootstrap-listen=127.0.0.1:8998",
	"decode":   promised["all"] + " " + promised["worker"] + " " + promised["decode"] + " join listen=127.0.0.1:30100 on-mismatch=fatal",
	"router":   promised["all"] + " " + promised["router"] + " listen=127.0.0.1:8000",
	"registry": promised["all"] + " listen=127.0.0.1:8998",
}

// Every role's --help lists every flag that scripts rely on with the default
// that they expect, and ends with two examples.
func TestFlagsAsPromised(t *testing.T) {
	for role, flags := range flagsOf {
		out, err := exec.Command("metronome", role, "--help").Output()
		if err != nil {
			t.Fatal(role, err)
		}
		help := map[string]string{}
		for line := range strings.Lines(string(out)) {
			if _, flag, ok := strings.Cut(line, "--"); ok && strings.HasPrefix(strings.TrimLeft(line, " "), "-") {
				flag, _, _ = strings.Cut(strings.TrimSpace(flag), " ")
				name, value, _ := strings.Cut(flag, "=")
				help[strings.TrimPrefix(name, "[no-]")] = strings.Trim(value, `"`)
				if strings.HasPrefix(name, "[no-]") {
					help[strings.TrimPrefix(name, "[no-]")] = "true"
				}
			}
		}
		for _, flag := range strings.Fields(flags) {
			name, want, has := strings.Cut(flag, "=")
			got, ok := help[name]
			switch {
			case !ok:
				t.Errorf("metronome %s --help lists no --%s", role, name)
			case want == "false" && got != "", has && want != "false" && got != want:
				t.Errorf("metronome %s --help: --%s=%q, want %q", role, name, got, want)
			case !has && strings.ToUpper(got) != got:
				t.Errorf("metronome %s --help: --%s has the default %q, want none", role, name, got)
			}
		}
		_, examples, _ := strings.Cut(string(out), "\nExamples:\n")
		if n := strings.Count(examples, "  metronome "+role); n != 2 {
			t.Errorf("metronome %s --help ends with %d examples, want 2", role, n)
		}
	}
}
