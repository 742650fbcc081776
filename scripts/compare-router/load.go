//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// client keeps as many connections as a load opens.
var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4096, DisableCompression: true, IdleConnTimeout: 4 * time.Second}}

func chatBody(size int, stream bool) string {
	head := fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":64,"messages":[{"role":"user","content":"`, stream)
	return head + strings.Repeat("a", max(1, size-len(head)-4)) + `"}]}`
}

// prompt is a chatBody that ask makes different each time: routers that look for
// a prefix send equal ones to the same worker.
func prompt(size int, stream bool) string {
	return strings.Replace(chatBody(size, stream), "aaaaaaaa", mark, 1)
}

const mark = "########"

var asked atomic.Int64

// answer is what a client saw.
type answer struct {
	status int // 0: none
	body   string
	err    error
	first  time.Duration // until the first event's first byte
	took   time.Duration
}

// ok says that a whole answer came, a stream with its end.
func (a answer) ok() bool {
	return a.status == 200 && a.err == nil && (!strings.HasPrefix(a.body, "data:") || strings.Contains(a.body, "data: [DONE]"))
}

func ask(url, body string, limit time.Duration) answer {
	if strings.Contains(body[:min(len(body), 256)], mark) {
		body = strings.Replace(body, mark, fmt.Sprintf("%08d", asked.Add(1)), 1)
	}
	return askPath(url+"/v1/chat/completions", body, limit)
}

func askPath(url, body string, limit time.Duration) answer {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return askCtx(ctx, url, body)
}

func askCtx(ctx context.Context, url, body string) (a answer) {
	began := time.Now()
	defer func() { a.took = time.Since(began) }()
	req, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	a.status = resp.StatusCode
	in := bufio.NewReaderSize(resp.Body, 64<<10)
	if _, a.err = in.Peek(1); a.err == nil {
		a.first = time.Since(began)
	}
	var all bytes.Buffer
	if _, err := io.Copy(&all, in); err != nil {
		a.err = err
	}
	a.body = all.String()
	return a
}

// beside runs f beside its caller; done is closed at its end.
func beside(f func()) (done <-chan struct{}) {
	end := make(chan struct{})
	go func() {
		defer close(end)
		f()
	}()
	return end
}

// closed sends n requests, at of them at a time, and gives how many failed.
func closed(url, body string, at, n int) (failed int64) {
	var left, bad atomic.Int64
	left.Store(int64(n))
	all := make([]<-chan struct{}, at)
	for i := range all {
		all[i] = beside(func() {
			for left.Add(-1) >= 0 {
				if !ask(url, body, time.Minute).ok() {
					bad.Add(1)
				}
			}
		})
	}
	for _, done := range all {
		<-done
	}
	return bad.Load()
}

// paced sends n requests at a steady rate, whatever becomes of them, and gives
// their answers in the order they were sent.
func paced(url, body string, rate float64, n int, limit time.Duration) []answer {
	out, all := make([]answer, n), make([]<-chan struct{}, n)
	began := time.Now()
	for i := range out {
		time.Sleep(time.Until(began.Add(time.Duration(float64(i) / rate * float64(time.Second)))))
		all[i] = beside(func() { out[i] = ask(url, body, limit) })
	}
	for _, done := range all {
		<-done
	}
	return out
}

func median[T int64 | float64 | time.Duration](v []T) T {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// figure is one measured row: what one round on one router gives.
type figure struct {
	name, unit string
	must       float64 // ours at most
	ratio      bool    // to sglang-router in the same round, else as it is
	measure    func(m *meter, r *running, direct string) (float64, error)
}

// meter is a fleet of stubs with the routers that are measured.
type meter struct {
	*fleet
	values map[string]map[string][]float64 // figure, router: one for each round
}

// cpuFigure is the processor time that a router takes for one request, in µs.
func cpuFigure(name string, must float64, size int, stream bool, m mode, at, n int) figure {
	return figure{name, "µs", must, true, func(me *meter, r *running, _ string) (float64, error) {
		if err := me.set(m, 0, 1, 2, 3); err != nil {
			return 0, err
		}
		body := chatBody(size, stream)
		closed(r.url, body, at, at) // connections stand
		before := r.cpu()
		if bad := closed(r.url, body, at, n); bad > 0 {
			return 0, fmt.Errorf("%d of %d requests failed", bad, n)
		}
		return float64((r.cpu() - before).Nanoseconds()) / 1e3 / float64(n), nil
	}}
}

// addedFigure is how much longer the median request takes through a router
// than straight to a decode, in ms.
func addedFigure(name string, must float64, m mode, send func(url string) []answer, of func(answer) time.Duration) figure {
	return figure{name, "ms", must, false, func(me *meter, r *running, direct string) (float64, error) {
		if err := me.set(m, 0, 1, 2, 3); err != nil {
			return 0, err
		}
		mid := func(url string) (time.Duration, error) {
			var v []time.Duration
			for _, a := range send(url) {
				if !a.ok() {
					return 0, fmt.Errorf("%s: status %d, %v", url, a.status, a.err)
				}
				v = append(v, of(a))
			}
			return median(v), nil
		}
		if _, err := mid(r.url); err != nil { // connections stand
			return 0, err
		}
		through, err := mid(r.url)
		if err != nil {
			return 0, err
		}
		straight, err := mid(direct)
		return float64((through - straight).Nanoseconds()) / 1e6, err
	}}
}

func took(a answer) time.Duration { return a.took }

func inTurn(body string, n int) func(string) []answer {
	return func(url string) []answer {
		var v []answer
		for range n {
			v = append(v, ask(url, body, time.Minute))
		}
		return v
	}
}

// figures are the rows that are measured; quiet machines give the best of them.
func figures() []figure {
	return []figure{
		cpuFigure("CPU per request, 200 B", 0.55, 200, false, mode{}, 8, 2500),
		cpuFigure("CPU per request, 8 KB", 0.55, 8<<10, false, mode{}, 8, 2500),
		cpuFigure("CPU per request, 220 KB", 0.30, 220<<10, false, mode{}, 8, 500),
		cpuFigure("CPU per 64-token stream, 10 ms ITL, 64 at once", 0.80, 200, true, mode{Events: 64, Gap: 10 * time.Millisecond}, 64, 320),
		cpuFigure("CPU per 64-token stream without ITL", 0.55, 200, true, mode{Events: 64}, 8, 500),
		addedFigure("added p50 at 300 requests/s", 0.5, mode{}, func(url string) []answer {
			return paced(url, chatBody(200, false), 300, 600, time.Minute)
		}, took),
		addedFigure("added TTFT, p50", 1, mode{Head: 5 * time.Millisecond, Events: 4, Gap: 2 * time.Millisecond}, inTurn(chatBody(200, true), 60),
			func(a answer) time.Duration { return a.first }),
		addedFigure("added by a prompt of 10 MB, p50", 25, mode{}, inTurn(chatBody(10<<20, false), 10), took),
	}
}

// measure runs the figures: all routers in turn in each round, so that what
// else the machine does meets all of them.
func (m *meter) measure(f figure, rounds int) error {
	for round := range rounds {
		for i := range m.routers {
			r := m.routers[(i+round)%len(m.routers)]
			v, err := f.measure(m, r, m.decode[0])
			if err != nil {
				return fmt.Errorf("%s, %s: %w", f.name, r.name, err)
			}
			if m.values[f.name] == nil {
				m.values[f.name] = map[string][]float64{}
			}
			m.values[f.name][r.name] = append(m.values[f.name][r.name], v)
		}
	}
	return nil
}
