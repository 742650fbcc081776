package worker

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// oneConn is a listener that has one connection to give.
type oneConn chan net.Conn

func (l oneConn) Accept() (net.Conn, error) {
	if c, ok := <-l; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (l oneConn) Close() error   { return nil }
func (l oneConn) Addr() net.Addr { return &net.TCPAddr{} }

// A body that never comes ends any request, of any path, with an answer.
func TestBodiesThatNeverCome(t *testing.T) {
	for head, want := range map[string]int{
		"POST /generate": 408,
		"PUT /generate":  408,
		"POST /v1/completions\nX-Request-Timeout: 5s": 408,
		"POST /generate\nX-Request-Timeout: soon":     400,
		"POST /tokenize": 408,
		"POST /abort_request\nTransfer-Encoding: chunked": 408,
		"GET /generate": 405,
		"GET /livez":    200,
		"POST /nowhere": 404,
		"POST /generate\nAuthorization: Bearer no": 403,
	} {
		t.Run(strings.ReplaceAll(head, "\n", " "), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := Config{Role: Serve}
				if want == 403 {
					cfg.Tokens = api.NewTokens("yes")
				}
				w := newSimWorker(t, cfg)
				w.wireServe()
				front, err := newFront(w)
				if err != nil {
					t.Fatal(err)
				}
				defer runLoops(t, w)()
				ours, theirs := net.Pipe()
				ln := make(oneConn, 1)
				ln <- theirs
				srv := &http.Server{Handler: front}
				done := make(chan struct{})
				go func() { srv.Serve(ln); close(done) }()
				line, header, _ := strings.Cut(head, "\n")
				if !strings.Contains(header, "chunked") {
					header += "\r\nContent-Length: 50"
				}
				go fmt.Fprintf(ours, "%s HTTP/1.1\r\nHost: w\r\n%s\r\n\r\n", line, strings.TrimPrefix(header, "\r\n"))
				began := time.Now()
				ours.SetReadDeadline(began.Add(2 * bodyWait))
				resp, err := http.ReadResponse(bufio.NewReader(ours), nil)
				if err != nil || resp.StatusCode != want || time.Since(began) > bodyWait+time.Second {
					t.Errorf("after %v: %+v %v, want %d", time.Since(began), resp, err, want)
				} else if wait := 5 * time.Second; strings.Contains(header, "5s") && time.Since(began) != wait {
					t.Errorf("the answer came after %v, not at the end of the request's time, %v", time.Since(began), wait)
				} else {
					io.Copy(io.Discard, resp.Body)
				}
				ours.Close()
				close(ln)
				<-done
				srv.Close()
			})
		})
	}
}

// Every request for tokens is counted at its end, also one that came to no job.
func TestRefusedRequestsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newSimWorker(t, Config{Role: Serve})
		w.wireServe()
		front, err := newFront(w)
		if err != nil {
			t.Fatal(err)
		}
		defer runLoops(t, w)()
		for _, body := range []string{
			`{`, `{"text":5}`, `{"text":"a","regex":"b"}`, `{"input_ids":[999999]}`,
			`{"text":"a","sampling_params":{"max_new_tokens":5000}}`, `{"text":"` + strings.Repeat("a", 5000) + `"}`,
			`{"text":"a","sampling_params":{"max_new_tokens":2}}`,
		} {
			front.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "POST", "/generate", strings.NewReader(body)))
		}
		synctest.Wait()
		metrics := httptest.NewRecorder()
		front.ServeHTTP(metrics, httptest.NewRequest("GET", "/metrics", nil))
		for code, want := range map[string]int{"invalid_request": 3, "unsupported": 1, "context_length_exceeded": 2, "ok": 1} {
			if line := fmt.Sprintf("metronome_requests_total{code=%q} %d\n", code, want); !strings.Contains(metrics.Body.String(), line) {
				t.Errorf("no %s", line)
			}
		}
	})
}

// A request of more answers than the worker has places for is the caller's
// mistake: told to come again, it would do so for ever.
func TestBatchBeyondAllPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newSimWorker(t, Config{Role: Serve, MaxRunning: 1, MaxQueued: 3})
		w.wireServe()
		front, err := newFront(w)
		if err != nil {
			t.Fatal(err)
		}
		defer runLoops(t, w)()
		for n, want := range map[int]int{3: 200, 5: 400, 100: 400} {
			got := httptest.NewRecorder()
			body := fmt.Sprintf(`{"text":"a","sampling_params":{"n":%d,"max_new_tokens":1}}`, n)
			front.ServeHTTP(got, httptest.NewRequestWithContext(t.Context(), "POST", "/generate", strings.NewReader(body)))
			if got.Code != want {
				t.Errorf("%d answers: %d %s", n, got.Code, got.Body)
			}
		}
	})
}
