package chaos

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// hangs are n bad peers, kinds mixed, each on an address of its own.
func hangs(t *testing.T, n int) []*Hang {
	t.Helper()
	var list []*Hang
	for i := range n {
		h, err := NewHang(BadPeers[i%len(BadPeers)], fmt.Sprintf("127.77.%d.%d", i/250, 1+i%250))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		list = append(list, h)
	}
	return list
}

// leg is the body of a request to a decode worker for a prefill at addr.
func leg(addr string, room int64, tokens int) map[string]any {
	host, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	return map[string]any{"input_ids": promptIDs(24, 256, 7), "sampling_params": map[string]any{"max_new_tokens": tokens, "temperature": 0, "ignore_eos": true},
		"bootstrap_host": host, "bootstrap_port": n, "bootstrap_room": room}
}

// stream is one answer that runs in the background, with the arrival times of its tokens.
type stream struct {
	mu     sync.Mutex
	at     []time.Time
	first  chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
	answer *Answer
	err    error
}

func (s *stream) token(int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at = append(s.at, time.Now()); len(s.at) == 1 {
		close(s.first)
	}
}

// gaps are the times between tokens that arrived in a window, ascending.
func (s *stream) gaps(from, to time.Time) []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	var gaps []time.Duration
	for i := 1; i < len(s.at); i++ {
		if s.at[i-1].After(from) && s.at[i].Before(to) {
			gaps = append(gaps, s.at[i].Sub(s.at[i-1]))
		}
	}
	slices.Sort(gaps)
	return gaps
}

func (s *stream) stop() { s.cancel(); <-s.done }

func startStream(t *testing.T, base string, body map[string]any) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{first: make(chan struct{}), done: make(chan struct{}), cancel: cancel}
	go func() { // ends with the answer, or by cancel
		defer close(s.done)
		s.answer, s.err = Stream(ctx, base, body, s.token)
	}()
	t.Cleanup(s.stop)
	select {
	case <-s.first:
	case <-s.done:
		t.Fatalf("the stream ended before its first token: %v %+v", s.err, s.answer)
	case <-time.After(20 * time.Second):
		t.Fatal("no first token in 20 s")
	}
	return s
}

// quantile of ascending gaps.
func quantile(gaps []time.Duration, q float64) time.Duration {
	return gaps[min(len(gaps)-1, int(math.Ceil(q*float64(len(gaps))))-1)]
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}

// beatWindow is the length of one quiet or faulty window.
const beatWindow = 10 * time.Second

// The beat: one running stream, then 1, 16 and 1,000 hung addresses of mixed
// kinds. Quiet and faulty windows alternate; a hung peer may cost memory and
// nothing else. Shows F-01.
func TestBeat(t *testing.T) {
	for _, n := range []int{1, 16, 1000} {
		t.Run(fmt.Sprintf("%d hung", n), func(t *testing.T) {
			if msg := measureBeat(t, binary, n, 3, 6); msg != "" {
				t.Error(msg)
			}
		})
	}
}

// measureBeat runs the windows on a binary and says what broke the beat, or
// "". A neighbour on the machine breaks it now and then, a peer that reaches
// the loop breaks it every time: so many tries are given.
func measureBeat(t *testing.T, binary string, hung, rounds, tries int) (broken string) {
	t.Helper()
	r := newRig(t)
	r.Binary = binary
	sim := []string{"--engine=sim", "--context=131072", "--kv-pages=16384"}
	p := r.startPrefill(t, "sim", sim...)
	// Deltas: cumulative chunks of a stream this long would measure their own size.
	d := r.startDecode(t, "sim", append(sim, "--on-mismatch=reject", "--stream-output")...)
	router := r.startRouter(t, []*Proc{p}, []*Proc{d})
	run := startStream(t, router.HTTP, map[string]any{"text": "beat", "sampling_params": map[string]any{"max_new_tokens": 100000, "temperature": 0, "ignore_eos": true}})
	bad := hangs(t, hung)
	for try := range tries {
		if broken = beatWindows(t, d, bad, run, rounds); broken == "" {
			return ""
		}
		t.Logf("try %d: %s", try+1, broken)
	}
	return broken
}

// beatWindows alternates quiet and faulty windows and compares them.
func beatWindows(t *testing.T, d *Proc, bad []*Hang, run *stream, rounds int) string {
	var broken []string
	var quiet99, quiet999, fault99, fault999 []time.Duration
	for range rounds {
		from := time.Now()
		<-time.After(beatWindow)
		g := run.gaps(from, time.Now())
		f, msg := faultyWindow(t, d, bad, run)
		if msg != "" {
			broken = append(broken, msg)
		}
		if len(g) < 100 || len(f) < 100 {
			return strings.Join(append(broken, fmt.Sprintf("%d tokens in a quiet window of %v, %d in a faulty one", len(g), beatWindow, len(f))), "; ")
		}
		quiet99, quiet999 = append(quiet99, quantile(g, 0.99)), append(quiet999, quantile(g, 0.999))
		fault99, fault999 = append(fault99, quantile(f, 0.99)), append(fault999, quantile(f, 0.999))
		if worst := f[len(f)-1]; worst > 100*time.Millisecond {
			broken = append(broken, fmt.Sprintf("a gap of %v", worst))
		}
	}
	q99, f99, q999, f999 := median(quiet99), median(fault99), median(quiet999), median(fault999)
	t.Logf("%4d hung: p99 gap quiet %v faulty %v, p99.9 quiet %v faulty %v", len(bad), q99, f99, q999, f999)
	if limit := time.Duration(1.05*float64(q99)) + time.Millisecond; f99 > limit {
		broken = append(broken, fmt.Sprintf("p99 gap %v, quiet %v, limit %v", f99, q99, limit))
	}
	if limit := q999 + 5*time.Millisecond; f999 > limit {
		broken = append(broken, fmt.Sprintf("p99.9 gap %v, quiet %v, limit %v", f999, q999, limit))
	}
	return strings.Join(broken, "; ")
}

// faultyWindow sends one request to each bad address and measures the stream
// meanwhile. It asks for health and has a healthy newcomer served, too.
func faultyWindow(t *testing.T, d *Proc, bad []*Hang, run *stream) (gaps []time.Duration, broken string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	from := time.Now()
	for i, h := range bad {
		wg.Go(func() { // ends by cancel
			// Spread over some seconds: a thousand clients at one instant are the
			// rig's own load on two cores, not a peer's.
			select {
			case <-time.After(time.Duration(i) * 4 * time.Millisecond):
			case <-ctx.Done():
				return
			}
			if a, err := Generate(ctx, d.HTTP, leg(h.Addr, int64(1000+i), 8)); err == nil && a.Status != 502 && a.Status != 504 {
				t.Errorf("request to %s %s: status %d %v", h.Kind, h.Addr, a.Status, a.Error)
			}
		})
	}
	<-time.After(beatWindow / 2)
	if status, took := health(d); status != 200 {
		broken = fmt.Sprintf("/health_generate %d after %v", status, took)
	}
	if took, err := newcomer(t, d); err != nil {
		broken += " newcomer: " + err.Error()
	} else if took > 50*time.Millisecond {
		broken += fmt.Sprintf(" newcomer admitted %v after its answer", took)
	}
	<-time.After(time.Until(from.Add(beatWindow)))
	gaps = run.gaps(from, time.Now())
	cancel()
	wg.Wait()
	return gaps, broken
}

func health(p *Proc) (status int, took time.Duration) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", p.HTTP+"/health_generate", nil)
	if err != nil {
		return 0, 0
	}
	resp, err := Client.Do(req)
	if err != nil {
		return 0, time.Since(start)
	}
	resp.Body.Close()
	return resp.StatusCode, time.Since(start)
}

// newcomer starts a healthy prefill that the decode worker has never met, and
// has one request served by it. took runs from the registry's answer to the
// topology query to the first token, so it bounds the time of admission.
func newcomer(t *testing.T, d *Proc) (took time.Duration, err error) {
	r := &Rig{Binary: d.cmd.Path}
	defer r.Close()
	p, err := r.Start(context.Background(), "prefill", "sim", "--engine=sim", "--listen=127.0.0.1:0", "--bootstrap-listen=127.0.0.1:0", "--context=131072", "--kv-pages=64")
	if err != nil {
		return 0, err
	}
	answered := make(chan time.Time, 1)
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: p.Bootstrap})
	proxy.ModifyResponse = func(resp *http.Response) error {
		if resp.Request.URL.Query().Get("target_tp_rank") == "-1" && resp.StatusCode == 200 {
			select {
			case answered <- time.Now():
			default:
			}
		}
		return nil
	}
	srv := &http.Server{Handler: proxy}
	go srv.Serve(front) // ends at Close
	defer srv.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second)
	defer cancel()
	body := leg(front.Addr().String(), time.Now().UnixNano(), 8)
	var legs sync.WaitGroup
	legs.Go(func() { Generate(ctx, p.HTTP, body) }) // ends with ctx at the latest
	var first time.Time
	a, err := Stream(ctx, d.HTTP, body, func(n int) {
		if n == 1 {
			first = time.Now()
		}
	})
	legs.Wait()
	if err != nil {
		return 0, err
	}
	if a.Error != nil || !a.Done {
		return 0, fmt.Errorf("status %d: %v", a.Status, a.Error)
	}
	select {
	case at := <-answered:
		return first.Sub(at), nil
	default:
		return 0, errors.New("the registry was never asked")
	}
}

// The same test must fail on a build that fetches on the loop: a rig that
// cannot see the fault proves nothing.
func TestBeatSeesFetchOnLoop(t *testing.T) {
	mutant := os.Getenv("METRONOME_MUTANT_FETCH_ON_LOOP")
	if mutant == "" {
		var err error
		if mutant, err = buildMutant(t, "fetch_on_loop"); err != nil {
			t.Fatal(err)
		}
	}
	msg := measureBeat(t, mutant, 16, 1, 1)
	if msg == "" {
		t.Fatal("the mutant that fetches on the loop passes: the rig is blind")
	}
	t.Logf("the mutant breaks the beat, as it must:\n%s", msg)
}

// Exhaustion: exactly the budget of dials, however many requests wait, and
// every one of them ends with address, attempts and last cause.
func TestExhaustion(t *testing.T) {
	r := newRig(t)
	d := r.startDecode(t, "sim", "--engine=sim", "--parallel-info-timeout=300ms", "--parallel-info-attempts=4", "--parallel-info-interval=400ms")
	for _, kind := range []BadPeer{Silent, Half, Trickle} {
		h, err := NewHang(kind, "127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		var wg sync.WaitGroup
		for i := range 9 {
			wg.Go(func() {
				a, err := Generate(within(t, 20*time.Second), d.HTTP, leg(h.Addr, int64(i), 4))
				checkExhausted(t, a, err, h.Addr, 4)
			})
		}
		wg.Wait()
		if n := h.Dials(); n != 4 {
			t.Errorf("%s: %d dials for 4 attempts", kind, n)
		}
	}
}

func checkExhausted(t *testing.T, a *Answer, err error, addr string, attempts int) {
	t.Helper()
	if err != nil {
		t.Error(err)
		return
	}
	want := fmt.Sprintf("Could not fetch prefill parallel info from %s after %d attempts", addr, attempts)
	if a.Status != 502 || a.Error == nil || a.Error.Code != "prefill_unreachable" || !strings.Contains(a.Error.Message, want) {
		t.Errorf("status %d, %v; want 502 prefill_unreachable: %s", a.Status, a.Error, want)
		return
	}
	if rest := a.Error.Message[strings.Index(a.Error.Message, want)+len(want):]; len(strings.Trim(rest, " :")) < 5 {
		t.Errorf("no last cause in %q", a.Error.Message)
	}
}

// A fetch that succeeds on the last attempt admits its requests.
func TestLastAttemptAdmits(t *testing.T) {
	r := newRig(t)
	p := r.startPrefill(t, "sim", "--engine=sim")
	d := r.startDecode(t, "sim", "--engine=sim", "--parallel-info-timeout=300ms", "--parallel-info-attempts=4", "--parallel-info-interval=400ms")
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	fetches := 0
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: p.Bootstrap})
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Query().Get("target_tp_rank") == "-1" {
			mu.Lock()
			fetches++
			last := fetches == 4
			mu.Unlock()
			if !last {
				http.Error(w, "not yet", http.StatusServiceUnavailable)
				return
			}
		}
		proxy.ServeHTTP(w, req)
	})}
	go srv.Serve(front) // ends at Close
	defer srv.Close()
	body := leg(front.Addr().String(), 77, 8)
	var wg sync.WaitGroup
	wg.Go(func() { Generate(within(t, 20*time.Second), p.HTTP, body) })
	a, err := Generate(within(t, 20*time.Second), d.HTTP, body)
	wg.Wait()
	if err != nil || a.Status != 200 || len(a.IDs) != 8 {
		t.Fatalf("%v %+v", err, a)
	}
	if fetches != 4 {
		t.Errorf("%d fetches, want 4", fetches)
	}
}

// The defaults: 15 attempts of 5 s, 16 hung addresses side by side, all over
// after 75 s and not 16 times that.
func TestExhaustionDefaults(t *testing.T) {
	t.Parallel() // it mostly waits
	r := newRig(t)
	d := r.startDecode(t, "sim", "--engine=sim")
	bad := hangs(t, 16)
	start := time.Now()
	var wg sync.WaitGroup
	for i, h := range bad {
		wg.Go(func() {
			a, err := Generate(within(t, 100*time.Second), d.HTTP, leg(h.Addr, int64(i), 4))
			checkExhausted(t, a, err, h.Addr, 15)
		})
	}
	wg.Wait()
	if took := time.Since(start); took < 74*time.Second || took > 82*time.Second {
		t.Errorf("all ended after %v, want about 75 s", took)
	}
}
