package chaos

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/metric"
)

// explainMoved holds what metronome explain tells of a stream whose decode was
// killed against what the test did: the dead one cannot tell, and another one
// went on.
func explainMoved(t *testing.T, router, dead *Proc, id string) {
	t.Helper()
	run := func(more ...string) string {
		out, err := exec.CommandContext(t.Context(), binary, append([]string{"explain", id, "--router", router.HTTP}, more...)...).Output()
		if err != nil {
			t.Fatalf("explain: %v", err)
		}
		return string(out)
	}
	var list []metric.Report
	if err := json.Unmarshal([]byte(run("--json")), &list); err != nil || len(list) == 0 {
		t.Fatalf("%d requests, %v", len(list), err)
	}
	r := list[0] // the newest of that id
	if r.Code != "ok" || len(r.Attempts) != 2 {
		t.Fatalf("%+v", r)
	}
	first, second := r.Attempts[0], r.Attempts[1]
	if first.Decode.Worker != dead.HTTP || first.Cause == "" || first.Decode.Fault == "" || first.Decode.Lost == "" || first.Moved {
		t.Errorf("the first attempt: %+v", first)
	}
	if !second.Moved || second.Prefill.Report == nil || second.Decode.Report == nil || second.Cause != "" {
		t.Fatalf("the second attempt: %+v", second)
	}
	line := &second.Decode.Report.Timeline
	for _, m := range []metric.Mark{metric.Queued, metric.Resolved, metric.Granted, metric.FirstPage, metric.LastPage, metric.FirstToken, metric.LastToken} {
		if _, ok := line.At(m); !ok {
			t.Errorf("the second decode has no %s: %v", m, line.Moments())
		}
	}
	for _, want := range []string{"2 attempts", "goes on with the stream", "decode_unreachable", "does not tell", dead.HTTP} {
		if text := run(); !strings.Contains(text, want) {
			t.Errorf("explain lacks %q:\n%s", want, text)
		}
	}
}
