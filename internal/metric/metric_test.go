package metric

import (
	"fmt"
	"io"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func scrape(t *testing.T, s *Set) string {
	t.Helper()
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("GET /metrics: status %d, want 200", w.Code)
	}
	body, err := io.ReadAll(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// Go's and the process's own metrics are there. Ours are held against
// docs/metrics.md by a test of cmd/metronome.
func TestProcessMetrics(t *testing.T) {
	text := scrape(t, New("decode"))
	process := []string{"go_goroutines"}
	if runtime.GOOS == "linux" {
		process = append(process, "process_open_fds", "process_resident_memory_bytes")
	}
	for _, name := range process {
		if !strings.Contains(text, "\n"+name+" ") {
			t.Errorf("the scrape lacks %s", name)
		}
	}
}

func TestFieldsReachTheirNames(t *testing.T) {
	s := New("decode")
	s.Beat.Observe(0.004)
	s.Pages.Quarantined.Set(3)
	s.Requests.With("kv_transfer_failed").Inc()
	s.Workers("decode", "draining").Set(2)
	s.KVBytes.Add(1 << 20)
	text := scrape(t, s)
	for _, want := range []string{
		`metronome_beat_seconds_bucket{le="0.003"} 0`,
		`metronome_beat_seconds_bucket{le="0.005"} 1`,
		`metronome_kv_pages{state="quarantined"} 3`,
		`metronome_requests_total{code="kv_transfer_failed"} 1`,
		`metronome_workers{role="decode",state="draining"} 2`,
		`metronome_workers{role="prefill",state="draining"} 0`,
		`metronome_kv_transfer_bytes_total 1.048576e+06`,
	} {
		if !strings.Contains(text, "\n"+want+"\n") {
			t.Errorf("scrape lacks %q", want)
		}
	}
}

func TestLabelsAreBounded(t *testing.T) {
	s := New("router")
	for _, free := range []string{"", "Get http://10.0.0.1: refused", "7d1f-aa", strings.Repeat("a", 41), "é", `x"} 1`} {
		s.KVRejected.With(free).Inc()
	}
	for i := range 10_000 {
		s.Requests.With(fmt.Sprintf("code_%d", i)).Inc()
	}
	text := scrape(t, s)
	if want := `metronome_kv_frames_rejected_total{cause="other"} 6`; !strings.Contains(text, want) {
		t.Errorf("free text is not counted as other: lacks %q", want)
	}
	if n := strings.Count(text, "metronome_requests_total{"); n > maxValues+1 {
		t.Errorf("10,000 values made %d series, want at most %d", n, maxValues+1)
	}
	if want := fmt.Sprintf(`metronome_requests_total{code="other"} %d`, 10_000-(maxValues-1)); !strings.Contains(text, want) {
		t.Errorf("what is over the bound is lost: lacks %q", want)
	}
}

// What a loop may call. Each must stay far below 200 ns: the loop has a batch
// to hand out every few milliseconds and calls some ten of these a turn.
func BenchmarkLoopHooks(b *testing.B) {
	s := New("decode")
	for _, hook := range []struct {
		name string
		run  func()
	}{
		{"counter.Inc", func() { s.Generation.Inc() }},
		{"counter.Add", func() { s.KVBytes.Add(4096) }},
		{"gauge.Set", func() { s.Running.Set(7) }},
		{"histogram.Observe", func() { s.Beat.Observe(0.012) }},
		{"histogram.Observe/last", func() { s.LoopBusy.Observe(0.5) }},
	} {
		b.Run(hook.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				hook.run()
			}
		})
	}
	b.Run("labelled.With (off the loop)", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.Requests.With("ok").Inc()
		}
	})
}
