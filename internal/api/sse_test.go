package api

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// runs reads everything and marks what each Next gives: a run of whole events
// in brackets, a piece of one in parentheses.
func runs(r io.Reader, buf int) string {
	var out strings.Builder
	e := NewEventReader(r, make([]byte, buf))
	for {
		run, whole, err := e.Next()
		if len(run) > 0 && whole {
			out.WriteString("[" + string(run) + "]")
		} else if len(run) > 0 {
			out.WriteString("(" + string(run) + ")")
		}
		if err != nil {
			if err != io.EOF {
				out.WriteString("!" + err.Error())
			}
			return out.String()
		}
	}
}

func TestEventReader(t *testing.T) {
	for _, c := range []struct {
		name string
		in   []string // one read each
		buf  int
		want string
	}{
		{"one at a time", []string{"data: 1\n\n", "data: 2\n\n"}, 64, "[data: 1\n\n][data: 2\n\n]"},
		{"several in one read", []string{"data: 1\n\ndata: 2\n\n"}, 64, "[data: 1\n\ndata: 2\n\n]"},
		{"an unfinished one waits", []string{"data: 1\n\nda", "ta: 2\n", "\n"}, 64, "[data: 1\n\n][data: 2\n\n]"},
		{"carriage returns", []string{"data: 1\r\n\r", "\ndata: 2\r\n\r\n"}, 64, "[data: 1\r\n\r\ndata: 2\r\n\r\n]"},
		{"several lines", []string{": hi\nevent: x\ndata: 1\ndata: 2\n", "\n"}, 64, "[: hi\nevent: x\ndata: 1\ndata: 2\n\n]"},
		{"longer than the buffer", []string{"data: 0123456789\n\ndata: 1\n\n"}, 8, "(data: 01)(23456789)[\n\n](data: 1\n)[\n]"},
		{"broken off", []string{"data: 1\n\ndata"}, 64, "[data: 1\n\n](data)"},
		{"nothing", nil, 64, ""},
		{"a buffer of its own", []string{"data: 1\n\ndata"}, 0, "[data: 1\n\n](data)"},
		{"buffer ends with a carriage return", []string{"data: 1\r\n\r\nx"}, 10, "(data: 1\r\n\r)[\n](x)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var rs []io.Reader
			for _, s := range c.in {
				rs = append(rs, strings.NewReader(s))
			}
			if got := runs(io.MultiReader(rs...), c.buf); got != c.want {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
}

func TestEventReaderErrors(t *testing.T) {
	broken := io.MultiReader(strings.NewReader("data: 1\n\ndata"), iotest.ErrReader(errors.New("reset")))
	if got := runs(broken, 64); got != "[data: 1\n\n](data)!reset" {
		t.Errorf("%q", got)
	}
	if got := runs(stuck{}, 64); got != "!"+io.ErrNoProgress.Error() {
		t.Errorf("%q", got)
	}
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

// However the bytes come, all of them arrive, runs of whole events begin and end
// at events, and as few as possible wait.
func TestEventReaderKeepsBytes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		var text strings.Builder
		eol := []string{"\n", "\r\n"}[rnd.IntN(2)]
		for range rnd.IntN(20) {
			text.WriteString("data: " + strings.Repeat("x", rnd.IntN(100)) + eol + eol)
		}
		in, out := text.String(), ""
		e := NewEventReader(&chopped{s: in, rnd: rnd}, make([]byte, 16+rnd.IntN(200)))
		mid := false
		for {
			run, whole, err := e.Next()
			if !mid && len(run) > 0 && !bytes.HasPrefix(run, []byte("data")) && string(run) != "\n" {
				t.Fatalf("a run of whole events begins with %q", run)
			}
			if mid = !whole; whole && len(run) > 0 && run[len(run)-1] != '\n' {
				t.Fatalf("a run of whole events ends with %q", run)
			}
			out += string(run)
			if err != nil {
				break
			}
		}
		if out != in || mid {
			t.Fatalf("got %q\nwant %q, in the middle %v", out, in, mid)
		}
	}
}

// chopped gives its text in pieces of random size.
type chopped struct {
	s   string
	rnd *rand.Rand
}

func (c *chopped) Read(p []byte) (int, error) {
	if c.s == "" {
		return 0, io.EOF
	}
	n := copy(p, c.s[:1+c.rnd.IntN(min(len(c.s), 64))])
	c.s = c.s[n:]
	return n, nil
}

func TestEndsDone(t *testing.T) {
	for in, want := range map[string]bool{
		Done: true, "data: 1\n\ndata: [DONE]\n\n": true, "data: [DONE]\r\n\r\n": true,
		"data: 1\n\n": false, "data: x data: [DONE]\n\n": false, "": false, "data: [DONE]\n\ndata: 1\n\n": false,
	} {
		if got := EndsDone([]byte(in)); got != want {
			t.Errorf("%q: %v", in, got)
		}
	}
}

func TestEventData(t *testing.T) {
	for in, want := range map[string]string{
		"data: 1\n\n": "1", "data:1\r\n\r\n": "1", ": x\nevent: y\ndata: {\"a\": 1}\n\ndata: 2\n\n": `{"a": 1}`, ": x\n\n": "", "": "",
	} {
		if got := string(EventData([]byte(in))); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestWriteError(t *testing.T) {
	for _, c := range []struct {
		e      *Error
		status int
		body   string
		header map[string]string
	}{
		{&Error{Code: InvalidRequest, Message: "a \"b\"\n\x01\xff", Param: "n"}, 400,
			`{"error":{"message":"a \"b\"\n\u0001` + "\ufffd" + `","type":"invalid_request_error","code":"invalid_request","param":"n"}}`, map[string]string{"Retry-After": "", "X-Should-Retry": ""}},
		{Errorf(Overloaded, "full"), 429, `{"error":{"message":"full","type":"rate_limit_error","code":"overloaded","param":null}}`, map[string]string{"Retry-After": "1"}},
		{&Error{Code: NoPrefill, Message: "x", RetryAfter: 2100 * time.Millisecond}, 503, `{"error":{"message":"x","type":"server_error","code":"no_prefill","param":null}}`, map[string]string{"Retry-After": "3"}},
		{Errorf(DeadlineExceeded, "x"), 504, `{"error":{"message":"x","type":"timeout_error","code":"deadline_exceeded","param":null}}`, map[string]string{"X-Should-Retry": "false"}},
		{&Error{Code: DeadlineExceeded, Status: 408, Message: "x"}, 408, `{"error":{"message":"x","type":"timeout_error","code":"deadline_exceeded","param":null}}`, map[string]string{"X-Should-Retry": "false"}},
		{Errorf(Unauthorized, "x"), 401, `{"error":{"message":"x","type":"authentication_error","code":"unauthorized","param":null}}`, map[string]string{"Www-Authenticate": "Bearer"}},
		{Errorf(PrefillUnreachable, "x"), 502, `{"error":{"message":"x","type":"server_error","code":"prefill_unreachable","param":null}}`, nil},
	} {
		w := httptest.NewRecorder()
		WriteError(w, c.e)
		if w.Code != c.status || w.Body.String() != c.body+"\n" || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%v: %d %s", c.e, w.Code, w.Body)
		}
		for k, v := range c.header {
			if got := w.Header().Get(k); got != v {
				t.Errorf("%v: %s is %q, want %q", c.e, k, got, v)
			}
		}
	}
}
