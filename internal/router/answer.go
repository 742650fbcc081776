//metronome:pure

package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// isStream tells whether an answer is a stream of events.
func isStream(header map[string][]string) bool {
	v := header["Content-Type"]
	return len(v) > 0 && strings.HasPrefix(strings.ToLower(v[0]), "text/event-stream")
}

// hopByHop are the headers that belong to one connection (RFC 9110, 7.6.1),
// and those that are set anew on each.
var hopByHop = map[string]bool{
	"Connection": true, "Proxy-Connection": true, "Keep-Alive": true, "Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
	"Proxy-Authenticate": true, "Proxy-Authorization": true, "Content-Length": true, "Expect": true, "Host": true,
	api.JournalHeader: true, api.TimelineHeader: true,
}

// copyHeader adds the end-to-end headers of src to dst; dst's own win.
func copyHeader(dst, src map[string][]string) {
	for k, v := range src {
		if !hopByHop[k] && dst[k] == nil && !named(src["Connection"], k) {
			dst[k] = v
		}
	}
}

// named tells whether a Connection header names k as its connection's own.
func named(connection []string, k string) bool {
	for _, line := range connection {
		for name := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(name), k) {
				return true
			}
		}
	}
	return false
}

// noAnswer says what is wrong with a status that is neither 200 nor an error: a
// worker has nothing to say by it, least of all where a client should go.
func noAnswer(status int) string {
	if status == 200 || status >= 400 {
		return ""
	}
	return fmt.Sprintf("it answered with status %d, which is neither an answer nor an error", status)
}

// errorBody is the union of the error bodies in use: OpenAI's, SGLang's two,
// and that of its web framework.
type errorBody struct {
	Error   json.RawMessage `json:"error"`
	Object  string          `json:"object"`
	Message string          `json:"message"`
	Detail  json.RawMessage `json:"detail"`
}

// errorObject is what stands under error.
type errorObject struct {
	Message string `json:"message"`
	Code    any    `json:"code"`
	Param   any    `json:"param"`
}

const textMax = 512 // bytes of a worker's error text that are passed on

// statusFault reads an answer with an error status.
func statusFault(a *answer) *fault {
	f := &fault{kind: faultStatus, status: a.status, answer: a}
	if v := a.header["Retry-After"]; len(v) > 0 {
		if s, err := strconv.Atoi(v[0]); err == nil && s > 0 {
			f.retryAfter = time.Duration(min(s, 3600)) * time.Second
		}
	}
	var b errorBody
	switch json.Unmarshal(a.body, &b); {
	case len(b.Error) > 0:
		f.object(b.Error)
	case b.Message != "":
		f.text = b.Message
	case len(b.Detail) > 0:
		f.text = string(bytes.Trim(b.Detail, `"`))
	default:
		f.text = string(bytes.TrimSpace(a.body))
	}
	f.text = short(f.text)
	return f
}

// object takes in the value of error: an object, or just a text.
func (f *fault) object(raw json.RawMessage) {
	var o errorObject
	if json.Unmarshal(raw, &o) != nil {
		f.text = string(bytes.Trim(raw, `"`))
		return
	}
	f.text = o.Message
	f.param, _ = o.Param.(string)
	if s, ok := o.Code.(string); ok && api.Code(s).Known() {
		f.code = api.Code(s)
	}
	if n, ok := o.Code.(float64); ok && f.status == 0 {
		f.status = int(n)
	}
}

func short(s string) string {
	if len(s) > textMax {
		return s[:textMax] + "…"
	}
	if s == "" {
		return "no reason given"
	}
	return s
}

// streamed is what tells an error in an answer that has status 200: an error
// object, or SGLang's finish reason abort.
type streamed struct {
	Error    json.RawMessage `json:"error"`
	MetaInfo struct {
		FinishReason json.RawMessage `json:"finish_reason"`
	} `json:"meta_info"`
	Choices []struct {
		FinishReason json.RawMessage `json:"finish_reason"`
	} `json:"choices"`
}

// bodyFault finds an error inside a body or event of an answer with status 200,
// nil when there is none. In a batch one item's abort is no failure of the
// whole.
func bodyFault(data []byte, items int) *fault {
	isError := bytes.HasPrefix(data, errorPrefix)
	if !isError && (items > 1 || !bytes.Contains(data, []byte(`"abort"`))) {
		return nil
	}
	var s streamed
	if json.Unmarshal(data, &s) != nil {
		return nil // whole answers only: a piece tells nothing
	}
	f := &fault{kind: faultStatus}
	if isError && string(s.Error) != "null" {
		f.object(s.Error)
		if f.status == 0 {
			f.status = 500
			if f.code != "" {
				f.status = (&api.Error{Code: f.code}).HTTPStatus()
			}
		}
		f.text = short(f.text)
		return f
	}
	reasons := []json.RawMessage{s.MetaInfo.FinishReason}
	for _, c := range s.Choices {
		reasons = append(reasons, c.FinishReason)
	}
	for _, raw := range reasons {
		if f.aborted(raw) {
			return f
		}
	}
	return nil
}

// aborted reads a finish reason: the word abort, or SGLang's object.
func (f *fault) aborted(raw json.RawMessage) bool {
	var o struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Status  any    `json:"status_code"`
	}
	if string(raw) == `"abort"` {
		o.Type = "abort"
	} else if len(raw) == 0 || json.Unmarshal(raw, &o) != nil {
		return false
	}
	if o.Type != "abort" {
		return false
	}
	f.status, f.text = 500, short(o.Message)
	if n, ok := o.Status.(float64); ok && n >= 400 && n < 600 {
		f.status = int(n)
	}
	return true
}

var (
	errorPrefix = []byte(`{"error"`)
	errorLine   = []byte(`data: {"error"`)
)

// splitError cuts a run of events at an error event: what comes before it may
// go to the client, the error becomes the leg's fault.
func splitError(run []byte, items int) (good []byte, f *fault) {
	i := bytes.Index(run, errorLine)
	if i < 0 || i > 0 && run[i-1] != '\n' {
		return run, nil
	}
	if f = bodyFault(api.EventData(run[i:]), items); f == nil {
		return run, nil
	}
	return run[:i], f
}

// String is for transcripts and logs.
func (f fault) String() string {
	kind := [...]string{"none", "connect", "cut", "status", "silent", "out", "unfit"}[f.kind]
	if f.kind == faultStatus {
		kind = strings.TrimSpace(fmt.Sprintf("%d %s", f.status, f.code))
	}
	return kind + ": " + f.text
}
