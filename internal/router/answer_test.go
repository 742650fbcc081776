package router

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/metronome-serve/metronome/internal/api"
)

// The error bodies in use in the field, and what is read out of them.
func TestStatusFault(t *testing.T) {
	for _, c := range []struct {
		body, retry string
		want        string
		after       time.Duration
	}{
		{body: `{"error":{"message":"m","type":"t","code":"kv_transfer_failed","param":"p"}}`, want: "502 kv_transfer_failed: m"},
		{body: `{"error":{"message":"m","code":"of_another_house"}}`, want: "502: m"},
		{body: `{"object":"error","message":"m","type":"500","param":null,"code":500}`, want: "502: m"},
		{body: `{"error":{"message":"m","code":null}}`, want: "502: m"},
		{body: `{"error":"m"}`, want: "502: m"},
		{body: `{"detail":"m"}`, want: "502: m"},
		{body: ` plain text `, want: "502: plain text"},
		{body: ``, want: "502: no reason given", retry: "7", after: 7 * time.Second},
		{body: `[1]`, want: "502: [1]", retry: "soon"},
		{body: `{"error":{"message":["m"]}}`, want: `502: {"message":["m"]}`},
	} {
		h := http.Header{}
		if c.retry != "" {
			h.Set("Retry-After", c.retry)
		}
		f := statusFault(&answer{status: 502, header: h, body: []byte(c.body)})
		if f.String() != c.want || f.retryAfter != c.after {
			t.Errorf("%s: %s after %v; want %s", c.body, f, f.retryAfter, c.want)
		}
	}
}

func TestBodyFault(t *testing.T) {
	for _, c := range []struct {
		body  string
		items int
		want  string
	}{
		{`{"error":{"message":"m","code":"overloaded"}}`, 1, "429 overloaded: m"},
		{`{"error":{"message":"m","code":400}}`, 1, "400: m"},
		{`{"error":{"message":"m"}}`, 2, "500: m"},
		{`{"error":null,"text":"a"}`, 1, ""},
		{`{"error":`, 1, ""},
		{`{"meta_info":{"finish_reason":{"type":"abort","message":"m","status_code":503}}}`, 1, "503: m"},
		{`{"meta_info":{"finish_reason":{"type":"abort","message":"m","status_code":null}}}`, 1, "500: m"},
		{`{"meta_info":{"finish_reason":{"type":"abort","message":"m","status_code":503}}}`, 2, ""},
		{`{"choices":[{"finish_reason":"abort"}]}`, 1, "500: no reason given"},
		{`{"text":"say \"abort\"","x":"abort","meta_info":{"finish_reason":{"type":"stop"}}}`, 1, ""},
		{`{"choices":[{"finish_reason":null,"delta":{"content":"a"}}]}`, 1, ""},
		{`[DONE]`, 1, ""},
	} {
		got := ""
		if f := bodyFault([]byte(c.body), c.items); f != nil {
			got = f.String()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
	}
}

func TestSplitError(t *testing.T) {
	good, f := splitError([]byte("data: 1\n\ndata: {\"error\":{\"message\":\"m\"}}\n\n"), 1)
	if string(good) != "data: 1\n\n" || f == nil || f.text != "m" {
		t.Errorf("%q %v", good, f)
	}
	for _, run := range []string{"data: {\"t\":\"data: {\\\"error\\\"\"}\n\n", "data: {\"error\":null}\n\n", ": data: {\"error\":{}}\n\n"} {
		if good, f := splitError([]byte(run), 1); string(good) != run || f != nil {
			t.Errorf("%q: %q %v", run, good, f)
		}
	}
}

func TestCopyHeader(t *testing.T) {
	src := http.Header{"Connection": {"close, X-Mine"}, "X-Mine": {"1"}, "Keep-Alive": {"1"}, "Transfer-Encoding": {"chunked"}, "Te": {"x"}, "Content-Length": {"3"},
		"X-Other": {"1", "2"}, "X-Request-Id": {"theirs"}, "Upgrade": {"h2c"}}
	dst := http.Header{"X-Request-Id": {"ours"}}
	copyHeader(dst, src)
	if diff := cmp.Diff(http.Header{"X-Other": {"1", "2"}, "X-Request-Id": {"ours"}}, dst); diff != "" {
		t.Error(diff)
	}
}

// TestStatusCodes: a worker that has no word of ours is told by its status.
func TestStatusCodes(t *testing.T) {
	for status, want := range map[int]api.Code{401: api.Unauthorized, 403: api.Forbidden, 404: api.NotFound, 413: api.BodyTooLarge,
		429: api.Overloaded, 500: api.Internal, 503: api.NoDecode} {
		if v := judge(Decode, "w", fault{kind: faultStatus, status: status, text: "m"}); v.err.Code != want || v.err.Status != status {
			t.Errorf("%d: %s with status %d, want %s", status, v.err.Code, v.err.Status, want)
		}
	}
	if v := judge(Decode, "w", fault{kind: faultStatus, status: 502, text: "m"}); v.err.Code != api.DecodeUnreachable || v.err.Status != 0 {
		t.Errorf("502: %s with status %d, want that of the code", v.err.Code, v.err.Status)
	}
}

// TestBusyIsNotIll: a worker that has too much to do is passed by and loses no
// health, whether it says so by our word or by its status alone.
func TestBusyIsNotIll(t *testing.T) {
	for _, f := range []fault{
		{kind: faultStatus, status: 429}, {kind: faultStatus, status: 503, code: api.Overloaded}, {kind: faultStatus, status: 429, code: api.Overloaded},
	} {
		if v := judge(Decode, "w", f); !v.blamed || v.blame != Decode || v.health || !v.retry {
			t.Errorf("%d %s: %+v", f.status, f.code, v)
		}
	}
}
