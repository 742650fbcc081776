//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
)

// mode is what a stub worker does with requests. A driver sets it with POST
// /stub.
type mode struct {
	Prefill bool          // it is one; else a decode
	Coupled bool          // decode answers when the prefill of its room has done its part, as with real KV
	Events  int           // of a stream
	Gap     time.Duration // before each of them
	Head    time.Duration // the head of a stream is out so long before its first event
	Flood   int64         // bytes of one stream, sent as fast as they are taken; 0: no flood
	Fault   string        // 500: answers so; stuck: never answers; silent, cut: after three events of a stream
}

// tally is what a stub worker saw. GET /stub tells it.
type tally struct {
	Requests int       // since its start
	Open     int       // legs now
	Ended    time.Time // of the last leg
	Written  int64
	Body     string // of the last request, if below 64 KiB
	Header   http.Header
}

// stub is one worker: the least that a router takes for SGLang's.
type stub struct {
	mu    sync.Mutex
	mode  mode
	tally tally
	rooms map[string]chan struct{} // closed when the prefill has done its part
}

const stubHost = "127.0.0.1"

// serveStub is the process of one stub worker; it ends with its input.
func serveStub(addr string, input io.Reader) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	beside(func() {
		io.Copy(io.Discard, input)
		ln.Close()
	})
	s := &stub{rooms: map[string]chan struct{}{}}
	http.Serve(ln, s)
	return nil
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/stub":
		s.command(w, r)
	case "/stub/kv":
		select {
		case <-s.room(r.URL.Query().Get("room")):
		case <-r.Context().Done():
		}
	case "/v1/chat/completions", "/v1/completions", "/generate":
		s.work(w, r)
	case "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"sglang"}]}`)
	case "/version": // vLLM has it, SGLang has not: smg tells them apart by it
		http.NotFound(w, r)
	default: // health, facts
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"model_path":"m","served_model_name":"m","tokenizer_path":"m","is_generation":true,"tp_size":1,"dp_size":1,"version":"0","internal_states":[{}]}`)
	}
}

func (s *stub) command(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Method == http.MethodPost {
		var m mode
		if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
			http.Error(w, err.Error(), 400)
			return
		}
		s.mode = m
	}
	json.NewEncoder(w).Encode(s.tally)
}

func (s *stub) room(id string) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.rooms[id]
	if c == nil {
		c = make(chan struct{})
		s.rooms[id] = c
	}
	return c
}

var pairing = regexp.MustCompile(`"bootstrap_host":\s*\[?\s*"([^"]*)"|"bootstrap_(port|room)":\s*\[?\s*(\d+)`)

// work is one leg.
func (s *stub) work(w http.ResponseWriter, r *http.Request) {
	var body []byte
	if r.ContentLength < 1<<16 {
		body, _ = io.ReadAll(r.Body)
	} else {
		io.Copy(io.Discard, r.Body)
	}
	s.mu.Lock()
	m := s.mode
	s.tally.Requests++
	s.tally.Open++
	s.tally.Body, s.tally.Header = string(body), r.Header
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.tally.Open--
		s.tally.Ended = time.Now()
		s.mu.Unlock()
	}()
	at := map[string]string{}
	if m.Coupled {
		for _, f := range pairing.FindAllSubmatch(body, -1) {
			at["host"] += string(f[1])
			at[string(f[2])] = string(f[3])
		}
	}
	switch {
	case m.Fault == "500":
		http.Error(w, `{"error":{"message":"engine failed","type":"server_error","code":500}}`, 500)
		return
	case m.Fault == "stuck":
		<-r.Context().Done()
		return
	case m.Prefill && m.Coupled && at["room"] != "":
		close(s.room(at["room"]))
	case !m.Prefill && m.Coupled:
		if !awaitKV(r, at) {
			return
		}
	}
	if !m.Prefill && bytes.Contains(body, []byte(`"stream":true`)) {
		s.stream(w, r, m)
		return
	}
	whole(w, r, body)
}

// awaitKV waits for the prefill of a room; false: the leg is over before.
func awaitKV(r *http.Request, at map[string]string) bool {
	req, err := http.NewRequestWithContext(r.Context(), "GET", "http://"+net.JoinHostPort(at["host"], at["port"])+"/stub/kv?room="+at["room"], nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		<-r.Context().Done() // an engine waits on
		return false
	}
	resp.Body.Close()
	return r.Context().Err() == nil
}

const event = `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}` + "\n\n"

func (s *stub) stream(w http.ResponseWriter, r *http.Request, m mode) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := w.(http.Flusher)
	if m.Head > 0 {
		w.WriteHeader(200)
		out.Flush()
		time.Sleep(m.Head)
	}
	if m.Flood > 0 {
		s.flood(w, r, m.Flood)
		return
	}
	for i := range m.Events {
		if m.Gap > 0 {
			time.Sleep(m.Gap)
		}
		if i == 3 && m.Fault == "silent" {
			<-r.Context().Done()
			return
		}
		if i == 3 && m.Fault == "cut" {
			panic(http.ErrAbortHandler)
		}
		if _, err := io.WriteString(w, event); err != nil {
			return
		}
		out.Flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

func (s *stub) flood(w http.ResponseWriter, r *http.Request, size int64) {
	block := []byte(strings.Repeat(event, 16<<10/len(event)))
	for sent := int64(0); sent < size && r.Context().Err() == nil; {
		n, err := w.Write(block)
		sent += int64(n)
		s.mu.Lock()
		s.tally.Written += int64(n)
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// whole answers what is no stream, a list with a list.
func whole(w http.ResponseWriter, r *http.Request, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Path != "/generate" {
		fmt.Fprint(w, `{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":" word"},"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`)
		return
	}
	one := `{"text":" word","output_ids":[1],"meta_info":{"id":"x","prompt_tokens":9,"completion_tokens":1,"finish_reason":{"type":"length","length":1}}}`
	if rooms := regexp.MustCompile(`"bootstrap_room":\s*\[([^\]]*)\]`).FindSubmatch(body); rooms != nil {
		one = "[" + strings.Repeat(one+",", bytes.Count(rooms[1], []byte(","))) + one + "]"
	}
	fmt.Fprint(w, one)
}
