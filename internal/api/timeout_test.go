package api

import (
	"testing"
	"time"
)

// Router and workers understand the header alike, so that a request gets one
// answer wherever it is sent.
func TestTimeLimit(t *testing.T) {
	for value, want := range map[string]time.Duration{
		"": time.Minute, "30s": 30 * time.Second, "500ms": 500 * time.Millisecond, "30": 30 * time.Second, "0.5": 500 * time.Millisecond, "2h": time.Minute, "1ns": 1,
	} {
		if got, err := TimeLimit(value, time.Minute); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", value, got, err, want)
		}
	}
	for value, status := range map[string]int{"0": 408, "0s": 408, "-1s": 408, "-5": 408, "soon": 400, "5s, 6s": 400, "NaN": 400, "inf": 400, "1e10": 400, "-1e300": 400} {
		if got, err := TimeLimit(value, time.Minute); err == nil || err.HTTPStatus() != status {
			t.Errorf("%q: %v, %v; want status %d", value, got, err, status)
		}
	}
}
