package chaos

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// registryFront answers topology queries in front of a real registry: the
// first fail times with 503, then with the real answer changed by edit.
func registryFront(t *testing.T, registry string, fail int, edit func(map[string]any)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		topology := r.URL.Query().Get("target_tp_rank") == "-1"
		mu.Lock()
		refuse := topology && fail > 0
		if refuse {
			fail--
		}
		mu.Unlock()
		if refuse {
			http.Error(w, "not yet", http.StatusServiceUnavailable)
			return
		}
		resp, err := Client.Get("http://" + registry + r.URL.RequestURI())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		for _, h := range []string{"X-Metronome-Instance", "X-Metronome-Fingerprint"} {
			if v := resp.Header.Get(h); v != "" {
				w.Header().Set(h, v)
			}
		}
		w.WriteHeader(resp.StatusCode)
		var body map[string]any
		if json.NewDecoder(resp.Body).Decode(&body) == nil {
			if topology {
				edit(body)
			}
			json.NewEncoder(w).Encode(body)
		}
	})}
	go srv.Serve(ln) // ends at Close
	t.Cleanup(func() { srv.Close() })
	return ln.Addr().String()
}

func asIs(map[string]any) {}

// mismatches are pairs that must never serve a request together; says are both
// values that the error must name, or nil: both fingerprints.
var mismatches = []struct {
	name            string
	model           string // of the prefill worker
	prefill, decode []string
	edit            func(map[string]any)
	says            []string
	fail            []int // failures of the registry before its answer
}{
	{"page size", "tiny", []string{"--page-size=32"}, nil, asIs, []string{"Page size mismatch", "32", "16"}, []int{0, 3}},
	{"KV dtype", "tiny", []string{"--kv-dtype=f32"}, nil, asIs, []string{"KV cache dtype mismatch", "f32", "f16"}, []int{0, 3}},
	{"TP", "tiny", nil, []string{"--tp=2"}, func(b map[string]any) { b["attn_tp_size"] = 3 }, []string{"3", "2"}, []int{0, 3}},
	{"context", "tiny", []string{"--context=512"}, nil, asIs, nil, []int{0, 3}},
	{"weights", "../../testdata/tiny-model/tiny-f16.gguf", nil, nil, asIs, nil, []int{0}},
	{"precision", "tiny", []string{"--precision=f32", "--kv-dtype=f16"}, nil, asIs, nil, []int{0}},
}

// Mismatches end as rules 9, 16 and 17 of docs/peers.md say, in both modes,
// also when they are found on the last attempt: never as spent attempts. Shows F-69.
func TestMismatch(t *testing.T) {
	for _, mode := range []string{"fatal", "reject"} {
		for _, m := range mismatches {
			for _, fail := range m.fail {
				t.Run(fmt.Sprintf("%s %s after %d failures", mode, m.name, fail), func(t *testing.T) {
					r := newRig(t)
					p := r.startPrefill(t, m.model, m.prefill...)
					d := r.startDecode(t, "tiny", append([]string{"--on-mismatch=" + mode, "--parallel-info-attempts=4", "--parallel-info-interval=150ms"}, m.decode...)...)
					says := m.says
					if says == nil {
						says = []string{"Model fingerprint mismatch", fingerprint(t, p), fingerprint(t, d)}
					}
					addr := registryFront(t, p.Bootstrap, fail, m.edit)
					a, err := Generate(within(t, 10*time.Second), d.HTTP, leg(addr, 5, 4))
					if err != nil {
						t.Fatal(err)
					}
					checkMismatch(t, a, says)
					if mode == "fatal" {
						checkFatal(t, d, says)
					} else {
						checkRejects(t, r, d)
					}
				})
			}
		}
	}
}

func checkMismatch(t *testing.T, a *Answer, says []string) {
	t.Helper()
	if a.Status != 502 || a.Error == nil || a.Error.Code != "peer_mismatch" {
		t.Fatalf("status %d, %v; want 502 peer_mismatch", a.Status, a.Error)
	}
	for _, s := range says {
		if !strings.Contains(a.Error.Message, s) {
			t.Errorf("%q does not name %q", a.Error.Message, s)
		}
	}
}

func fingerprint(t *testing.T, p *Proc) string {
	t.Helper()
	var info struct {
		Fingerprint string `json:"fingerprint"`
	}
	if err := get(within(t, 2*time.Second), p.HTTP+"/model_info", &info); err != nil || len(info.Fingerprint) < 16 {
		t.Fatalf("fingerprint %q: %v", info.Fingerprint, err)
	}
	return info.Fingerprint
}

// checkFatal: the worker exits 1 within a second and names both values.
func checkFatal(t *testing.T, d *Proc, says []string) {
	t.Helper()
	select {
	case <-d.Done():
	case <-time.After(1500 * time.Millisecond):
		t.Fatal("the worker still runs 1.5 s after a fatal mismatch")
	}
	if d.ExitCode() != 1 {
		t.Errorf("exit status %d, want 1", d.ExitCode())
	}
	for _, s := range says {
		if !strings.Contains(d.Log(), s) {
			t.Errorf("the last words do not name %q: %s", s, tail(d.Log(), 1000))
		}
	}
}

// checkRejects: only that address is refused, the worker goes on with others.
func checkRejects(t *testing.T, r *Rig, d *Proc) {
	t.Helper()
	flags := []string{}
	for _, a := range d.Args {
		if strings.HasPrefix(a, "--tp=") {
			flags = append(flags, a)
		}
	}
	good := r.startPrefill(t, "tiny", flags...)
	body := leg(good.Bootstrap, 6, 4)
	var legs sync.WaitGroup
	legs.Go(func() { Generate(within(t, 10*time.Second), good.HTTP, body) })
	a, err := Generate(within(t, 10*time.Second), d.HTTP, body)
	legs.Wait()
	if err != nil || a.Status != 200 || len(a.IDs) != 4 {
		t.Errorf("a matching prefill is not served after a reject: %v %+v", err, a)
	}
}

// Two builds that differ in nothing but the numerics revision never serve a
// request together, and one that does not differ is served beside.
func TestNumericsRevision(t *testing.T) {
	next, err := buildNextRevision(t)
	if err != nil {
		t.Fatal(err)
	}
	r, other := newRig(t), newRig(t)
	other.Binary = next
	p := other.startPrefill(t, "tiny")
	d := r.startDecode(t, "tiny", "--on-mismatch=reject")
	a, err := Generate(within(t, 10*time.Second), d.HTTP, leg(p.Bootstrap, 5, 4))
	if err != nil {
		t.Fatal(err)
	}
	checkMismatch(t, a, []string{"Model fingerprint mismatch", fingerprint(t, p), fingerprint(t, d)})
	checkRejects(t, r, d)
}

// A prefill that was known bad and comes back with another instance and the
// right layout is examined again.
func TestRejectForgetsOnNewInstance(t *testing.T) {
	r := newRig(t)
	bad := r.startPrefill(t, "tiny", "--page-size=32")
	d := r.startDecode(t, "tiny", "--on-mismatch=reject", "--heartbeat-interval=300ms")
	a, err := Generate(within(t, 10*time.Second), d.HTTP, leg(bad.Bootstrap, 5, 4))
	if err != nil || a.Error == nil || a.Error.Code != "peer_mismatch" {
		t.Fatalf("%v %+v", err, a)
	}
	bad.Kill()
	good := r.start(t, "prefill", "tiny", "--listen=127.0.0.1:0", "--bootstrap-listen="+bad.Bootstrap)
	for end := time.Now().Add(5 * time.Second); ; {
		body := leg(good.Bootstrap, room(), 4)
		ctx := within(t, 5*time.Second)
		var legs sync.WaitGroup
		legs.Go(func() { Generate(ctx, good.HTTP, body) })
		a, err := Generate(ctx, d.HTTP, body)
		if err == nil && a.Status == 200 {
			legs.Wait()
			return
		}
		if time.Now().After(end) {
			t.Fatalf("still refused 5 s after the restart: %v %+v", err, a)
		}
		Post(ctx, good.HTTP+"/abort_request", map[string]any{"abort_all": true})
		legs.Wait()
		<-time.After(100 * time.Millisecond)
	}
}
