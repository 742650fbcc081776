package worker

import (
	"testing"

	"github.com/metronome-serve/metronome/internal/api"
)

// A registry's host that no attempt could reach is the caller's mistake, told at
// once and not after all attempts.
func TestNeedRoom(t *testing.T) {
	h := &httpSide{cfg: Config{Role: Decode}}
	for host, param := range map[string]string{
		"": "bootstrap_host", "bad host": "bootstrap_host", "0.0.0.0": "bootstrap_host", "http://p": "bootstrap_host", "[::]": "bootstrap_host",
		"10.0.0.1": "", "[fd00::1]": "", "prefill-1.pool.svc": "", "localhost": "",
	} {
		err := h.needRoom(&api.Request{Pairs: []api.Pairing{{Host: host, Port: 8998, Room: 1}}})
		if got := ""; err != nil {
			got = err.Param
			if got != param || err.Code != api.InvalidRequest {
				t.Errorf("%q: %+v", host, err)
			}
		} else if param != got {
			t.Errorf("%q was taken", host)
		}
	}
}
