package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Client is how tests talk to a process: no keep-alive, so that one request's
// connection says nothing about the next.
var Client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

// Answer is what a client saw of one /generate request.
type Answer struct {
	Status     int
	Header     http.Header
	Text       string
	IDs        []int32
	Logprobs   []json.RawMessage // [logprob, id, text] triples, byte for byte
	Top        []json.RawMessage
	Finish     string
	Prompt     int
	Cached     int
	Completion int
	Error      *APIError       // the body's or the stream's error
	Done       bool            // stream: [DONE] was seen
	At         []time.Duration // stream: arrival of each event since the request was sent
	Total      time.Duration
}

// APIError is the OpenAI error body.
type APIError struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    string `json:"code"`
	Param   string `json:"param"`
}

func (e *APIError) Error() string { return e.Code + ": " + e.Message }

type generateBody struct {
	Text string  `json:"text"`
	IDs  []int32 `json:"output_ids"`
	Meta struct {
		Prompt     int                    `json:"prompt_tokens"`
		Cached     int                    `json:"cached_tokens"`
		Completion int                    `json:"completion_tokens"`
		Finish     *struct{ Type string } `json:"finish_reason"`
		Logprobs   []json.RawMessage      `json:"output_token_logprobs"`
		Top        []json.RawMessage      `json:"output_top_logprobs"`
	} `json:"meta_info"`
	Error *APIError `json:"error"`
}

func (a *Answer) take(b *generateBody) {
	if b.Error != nil {
		a.Error = b.Error
		return
	}
	a.Text, a.IDs, a.Logprobs, a.Top = b.Text, b.IDs, b.Meta.Logprobs, b.Meta.Top
	a.Prompt, a.Cached, a.Completion = b.Meta.Prompt, b.Meta.Cached, b.Meta.Completion
	if b.Meta.Finish != nil {
		a.Finish = b.Meta.Finish.Type
	}
}

// Post sends a JSON body and returns status, header and body.
func Post(ctx context.Context, url string, body any) (int, http.Header, []byte, error) {
	return post(ctx, Client, url, body)
}

func post(ctx context.Context, client *http.Client, url string, body any) (int, http.Header, []byte, error) {
	data, ok := body.([]byte)
	if !ok {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return 0, nil, nil, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(data))
	if err != nil {
		return 0, nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, out, err
}

// Generate sends one /generate request to base and waits for the whole answer.
// An error is one of the connection; what the server said is in the Answer.
func Generate(ctx context.Context, base string, body map[string]any) (*Answer, error) {
	return GenerateWith(ctx, Client, base, body)
}

// Ask is one Generate or Stream: whom, what, and since when.
type Ask struct {
	Client *http.Client
	Base   string
	Body   map[string]any
	Began  time.Time
}

// Heard, if not nil, is called with what came of each Generate and Stream.
var Heard func(ctx context.Context, q Ask, a *Answer, err error)

func (q Ask) heard(ctx context.Context, a *Answer, err error) (*Answer, error) {
	if Heard != nil {
		Heard(ctx, q, a, err)
	}
	return a, err
}

// GenerateWith is Generate through a client of another host.
func GenerateWith(ctx context.Context, client *http.Client, base string, body map[string]any) (*Answer, error) {
	q := Ask{client, base, body, time.Now()}
	a, err := readAnswer(ctx, client, base, body)
	return q.heard(ctx, a, err)
}

func readAnswer(ctx context.Context, client *http.Client, base string, body map[string]any) (*Answer, error) {
	start := time.Now()
	status, header, data, err := post(ctx, client, base+"/generate", body)
	if err != nil {
		return nil, err
	}
	a := &Answer{Status: status, Header: header, Total: time.Since(start)}
	var b generateBody
	if err := json.Unmarshal(data, &b); err != nil {
		return nil, fmt.Errorf("status %d: %w: %.200s", status, err, data)
	}
	a.take(&b)
	return a, nil
}

// Stream sends one streamed /generate request. each, if not nil, is called for
// every event as it arrives, with the number of events so far.
func Stream(ctx context.Context, base string, body map[string]any, each func(n int)) (*Answer, error) {
	q := Ask{Client, base, body, time.Now()}
	a, err := readStream(ctx, base, body, each)
	return q.heard(ctx, a, err)
}

func readStream(ctx context.Context, base string, body map[string]any, each func(n int)) (*Answer, error) {
	with := map[string]any{"stream": true}
	for k, v := range body {
		with[k] = v
	}
	data, err := json.Marshal(with)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", base+"/generate", bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	start := time.Now()
	resp, err := Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	a := &Answer{Status: resp.StatusCode, Header: resp.Header}
	defer func() { a.Total = time.Since(start) }()
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		var b generateBody
		if err := json.NewDecoder(resp.Body).Decode(&b); err != nil {
			return nil, fmt.Errorf("status %d: %w", resp.StatusCode, err)
		}
		a.take(&b)
		return a, nil
	}
	in := bufio.NewReader(resp.Body)
	for {
		line, err := in.ReadString('\n')
		if data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data: "); ok {
			if data == "[DONE]" {
				a.Done = true
			} else {
				var b generateBody
				if err := json.Unmarshal([]byte(data), &b); err != nil {
					return a, fmt.Errorf("event %q: %w", data, err)
				}
				a.take(&b)
				a.At = append(a.At, time.Since(start))
				if each != nil {
					each(len(a.At))
				}
			}
		}
		if err == io.EOF || a.Done {
			return a, nil
		}
		if err != nil {
			return a, err
		}
	}
}

// Metrics reads /metrics of a process: name with labels → value.
func Metrics(ctx context.Context, base string) (map[string]float64, error) {
	return MetricsWith(ctx, Client, base)
}

// MetricsWith is Metrics through a client of another host.
func MetricsWith(ctx context.Context, client *http.Client, base string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", base+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s/metrics: status %d", base, resp.StatusCode)
	}
	out := map[string]float64{}
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		line := in.Text()
		i := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || i < 0 {
			continue
		}
		var v float64
		if _, err := fmt.Sscan(line[i+1:], &v); err == nil {
			out[line[:i]] = v
		}
	}
	return out, in.Err()
}

// get reads a JSON answer.
func get(ctx context.Context, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := Client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: status %d", url, resp.StatusCode)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}
