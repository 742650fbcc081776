package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// put is the body of one rank's registration as SGLang 0.5.23 sends it: all 21
// keys, changed by pairs of key and JSON value ("" removes the key).
func put(change ...string) string {
	defaults := []string{
		"attn_tp_size", "1", "attn_tp_rank", "0", "attn_cp_size", "1", "attn_cp_rank", "0",
		"attn_dp_size", "1", "attn_dp_rank", "0", "pp_size", "1", "pp_rank", "0",
		"system_dp_size", "1", "system_dp_rank", "0", "rank_ip", `"10.1.2.3"`, "rank_port", "41234",
		"page_size", "64", "kv_cache_dtype", `"torch.bfloat16"`, "kv_layout", "null",
		"dsv41_spec_layout", "null", "load_balance_method", `"follow_bootstrap_room"`,
		"enable_dsa_cache_layer_split", "false", "enable_kv_cache_sharding", "false",
		"prefill_http_port", "30000", "decode_allocation_policy", `"early"`,
	}
	body := map[string]json.RawMessage{}
	for pair := range slices.Chunk(append(defaults, change...), 2) {
		body[pair[0]] = json.RawMessage(pair[1])
		if pair[1] == "" {
			delete(body, pair[0])
		}
	}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return string(b)
}

const (
	topology    = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	rankOf      = "/route?prefill_dp_rank=%v&prefill_cp_rank=%v&target_tp_rank=%v&target_pp_rank=%v"
	ours        = "error:" // a want that begins so is our error body with the message containing the rest
	textPlain   = "text/plain; charset=utf-8"
	jsonContent = "application/json"
)

type exchange struct {
	name, method, target, body string
	header                     string // "Name: value"
	status                     int
	want                       string // body: exact, JSON, or ours
	wantHeader                 string // "Name: value"
}

func (e exchange) run(t *testing.T, h http.Handler) {
	t.Helper()
	r := httptest.NewRequest(e.method, e.target, strings.NewReader(e.body))
	if name, value, ok := strings.Cut(e.header, ": "); ok {
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	got := w.Body.String()
	if w.Code != e.status {
		t.Errorf("%s: %s %s: status %d, want %d; body %s", e.name, e.method, e.target, w.Code, e.status, got)
		return
	}
	content := w.Header().Get("Content-Type")
	switch part, isOurs := strings.CutPrefix(e.want, ours); {
	case isOurs:
		var body struct {
			Error struct{ Message, Type, Code string }
		}
		if err := json.Unmarshal([]byte(got), &body); err != nil || body.Error.Code == "" || !strings.Contains(body.Error.Message, part) {
			t.Errorf("%s: answer %s, want our error body with %q", e.name, got, part)
		}
	case strings.HasPrefix(e.want, "{"):
		var g, w any
		if json.Unmarshal([]byte(got), &g) != nil || json.Unmarshal([]byte(e.want), &w) != nil || fmt.Sprint(g) != fmt.Sprint(w) || !strings.HasPrefix(content, jsonContent) {
			t.Errorf("%s: answer %s (%s), want %s", e.name, got, content, e.want)
		}
	default:
		if got != e.want {
			t.Errorf("%s: answer %q, want %q", e.name, got, e.want)
		}
		if want := textPlain; content != want && e.status != http.StatusMethodNotAllowed {
			t.Errorf("%s: content type %q, want %q", e.name, content, want)
		}
	}
	if name, value, ok := strings.Cut(e.wantHeader, ": "); ok && w.Header().Get(name) != value {
		t.Errorf("%s: header %s is %q, want %q", e.name, name, w.Header().Get(name), value)
	}
}

// The whole life of a registry, as SGLang's clients see it: every endpoint with
// every status and body, in order.
func TestConformance(t *testing.T) {
	s := NewServer(ServerConfig{Bind: "10.1.2.3:8998", AllowOpenWrites: true})
	notReady := func(n int) string {
		return fmt.Sprintf("Prefill server not fully registered yet (%d workers registered).", n)
	}
	two := []string{"attn_tp_size", "2"}
	second := append(two, "attn_tp_rank", "1", "rank_ip", `"fd00::7"`, "rank_port", `"41235"`)
	seven := `{"attn_tp_size":2,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":"torch.bfloat16","follow_bootstrap_room":true}`
	for _, e := range []exchange{
		{name: "health before anything", method: "GET", target: "/health", status: 200, want: "OK"},
		{name: "health by HEAD", method: "HEAD", target: "/health", status: 200, want: "OK"},
		{name: "topology of nothing", method: "GET", target: topology, status: 503, want: notReady(0)},
		{name: "rank of nothing", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 0, 0), status: 503, want: notReady(0)},
		{name: "rank 0 of 2", method: "PUT", target: "/route", body: put(two...), status: 200, want: "OK"},
		{name: "rank 0 again", method: "PUT", target: "/route", body: put(two...), status: 200, want: "OK"},
		{name: "topology of half", method: "GET", target: topology, status: 503, want: notReady(1)},
		{name: "rank of half", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 0, 0), status: 503, want: notReady(1)},
		{name: "health of half", method: "GET", target: "/health", status: 200, want: "OK"},
		{name: "rank 1 of 2, port as a string", method: "PUT", target: "/route", body: put(second...), status: 200, want: "OK"},
		{name: "topology", method: "GET", target: topology, status: 200, want: seven},
		{name: "topology, odd numbers", method: "GET", target: "/route?prefill_dp_rank=%20-1&x=y&prefill_cp_rank=-01&target_tp_rank=-1&target_pp_rank=-1&target_pp_rank=0", status: 200, want: seven},
		{name: "rank 0", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 0, 0), status: 200, want: `{"rank_ip":"10.1.2.3","rank_port":41234}`},
		{name: "rank 1, odd numbers", method: "GET", target: fmt.Sprintf(rankOf, "%200", "0_0", "01", "%2B0"), status: 200, want: `{"rank_ip":"fd00::7","rank_port":41235}`},
		{name: "no such rank", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 2, 0), status: 404, want: "Bootstrap info not found for dp_rank=0 cp_rank=0 tp_rank=2 pp_rank=0"},
		{name: "no such rank by far", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, "99999999999999999999", 0), status: 404, want: "Bootstrap info not found for dp_rank=0 cp_rank=0 tp_rank=99999999999999999999 pp_rank=0"},
		{name: "a partial -1 is a rank like any", method: "GET", target: fmt.Sprintf(rankOf, -1, 0, -1, 0), status: 404, want: "Bootstrap info not found for dp_rank=-1 cp_rank=0 tp_rank=-1 pp_rank=0"},
		{name: "parameter missing", method: "GET", target: "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1", status: 400, want: "Missing inputs for bootstrap server."},
		{name: "parameter empty", method: "GET", target: fmt.Sprintf(rankOf, -1, "", -1, -1), status: 400, want: "Missing inputs for bootstrap server."},
		{name: "no parameter", method: "GET", target: "/route", status: 400, want: "Missing inputs for bootstrap server."},
		{name: "a word for a rank", method: "GET", target: fmt.Sprintf(rankOf, "x", 0, 0, 0), status: 400, want: ours + "prefill_dp_rank"},
		{name: "a fraction for a rank", method: "GET", target: fmt.Sprintf(rankOf, 0, "0.0", 0, 0), status: 400, want: ours + "prefill_cp_rank"},
		{name: "POST /route", method: "POST", target: "/route", body: put(), status: 405, want: "Method not allowed", wantHeader: "Content-Type: application/json; charset=utf-8"},
		{name: "DELETE /route", method: "DELETE", target: "/route", status: 405, want: "Method not allowed"},
		{name: "HEAD /route", method: "HEAD", target: topology, status: 405, want: "Method not allowed"},
		{name: "PATCH /route", method: "PATCH", target: "/route", body: put(), status: 405, want: "Method not allowed"},
		{name: "trailing slash", method: "GET", target: "/route/", status: 404, want: "404: Not Found"},
		{name: "unknown path", method: "GET", target: "/", status: 404, want: "404: Not Found"},
		{name: "POST /health", method: "POST", target: "/health", status: 405, want: "405: Method Not Allowed", wantHeader: "Allow: GET,HEAD"},
		{name: "GET /register_dp_rank", method: "GET", target: "/register_dp_rank", status: 405, want: "405: Method Not Allowed", wantHeader: "Allow: POST"},
		{name: "GET /query_dp_ranks", method: "GET", target: "/query_dp_ranks", status: 405, want: "405: Method Not Allowed", wantHeader: "Allow: POST"},
		{name: "room", method: "POST", target: "/register_dp_rank", body: `{"bootstrap_room": 9223372036854775807, "dp_rank": 3}`, status: 200, want: "OK"},
		{name: "room as string", method: "POST", target: "/register_dp_rank", body: `{"bootstrap_room": "12", "dp_rank": "1", "more": []}`, status: 200, want: "OK"},
		{name: "room again", method: "POST", target: "/register_dp_rank", body: `{"bootstrap_room": 12, "dp_rank": 2}`, status: 200, want: "OK"},
		{name: "rooms", method: "POST", target: "/query_dp_ranks", body: `{"bootstrap_rooms": [12, "12", 5, 9223372036854775807]}`, status: 200, want: `{"12": 2, "9223372036854775807": 3}`},
		{name: "no rooms", method: "POST", target: "/query_dp_ranks", body: `{"bootstrap_rooms": []}`, status: 200, want: `{}`},
		{name: "other sizes change the address only", method: "PUT", target: "/route", body: put("attn_tp_size", "4", "rank_port", "5", "page_size", `"128"`), status: 200, want: "OK"},
		{name: "topology as before", method: "GET", target: topology, status: 200, want: seven},
		{name: "rank 0 moved", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 0, 0), status: 200, want: `{"rank_ip":"10.1.2.3","rank_port":5}`},
		{name: "other policy", method: "PUT", target: "/route", body: put("decode_allocation_policy", `"prefill_complete"`), status: 400, want: ours + "Inconsistent prefill allocation policies"},
		{name: "other spec layout", method: "PUT", target: "/route", body: put("dsv41_spec_layout", `{"block":4}`), status: 400, want: ours + "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks"},
		{name: "loopback at a registry elsewhere", method: "PUT", target: "/route", body: put("rank_ip", `"127.0.0.1"`), status: 400, want: ours + "10.1.2.3"},
		{name: "topology still", method: "GET", target: topology, status: 200, want: seven},
		{name: "rank 0 still", method: "GET", target: fmt.Sprintf(rankOf, 0, 0, 0, 0), status: 200, want: `{"rank_ip":"10.1.2.3","rank_port":5}`},
		{name: "livez", method: "GET", target: "/livez", status: 200, want: "OK"},
		{name: "readyz", method: "GET", target: "/readyz", status: 200, want: "OK"},
	} {
		e.run(t, s)
	}
}

func TestKeysBeyondTheSevenOnlyWhenTheyDiffer(t *testing.T) {
	s := NewServer(ServerConfig{Bind: "127.0.0.1", AnnounceHTTP: true})
	for _, e := range []exchange{
		{name: "all differ", method: "PUT", target: "/route", body: put(
			"kv_cache_dtype", "null", "kv_layout", `"head_major"`, "dsv41_spec_layout", `{"b": {"y":1,"x":2.50}, "a": 1}`,
			"load_balance_method", `"round_robin"`, "enable_dsa_cache_layer_split", "true", "enable_kv_cache_sharding", "1",
			"decode_allocation_policy", `"prefill_complete"`, "prefill_http_port", `"30001"`, "attn_dp_size", "2", "system_dp_rank", "9"),
			status: 200, want: "OK"},
		{name: "same layout in another order", method: "PUT", target: "/route", body: put(
			"dsv41_spec_layout", `{"a":1,"b":{"x":2.50,"y":1}}`, "decode_allocation_policy", `"prefill_complete"`, "attn_dp_size", "2", "attn_dp_rank", "1", "prefill_http_port", ""),
			status: 200, want: "OK"},
		{name: "answer", method: "GET", target: topology, status: 200, want: `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":2,"pp_size":1,"page_size":64,"kv_cache_dtype":"torch.bfloat16",
			"follow_bootstrap_room":false,"kv_layout":"head_major","dsv41_spec_layout":{"a":1,"b":{"x":2.5,"y":1}},"enable_dsa_cache_layer_split":true,
			"enable_kv_cache_sharding":true,"decode_allocation_policy":"prefill_complete","prefill_http_port":30001}`},
	} {
		e.run(t, s)
	}

	s = NewServer(ServerConfig{Bind: "127.0.0.1"})
	exchange{name: "only what is required", method: "PUT", target: "/route", body: put("load_balance_method", "", "kv_layout", "", "dsv41_spec_layout", "",
		"enable_dsa_cache_layer_split", "", "enable_kv_cache_sharding", "", "prefill_http_port", "", "decode_allocation_policy", "", "kv_cache_dtype", "null",
		"system_dp_size", "3", "attn_dp_size", "8", "system_dp_rank", "2", "attn_dp_rank", "7"), status: 200, want: "OK"}.run(t, s)
	for i := range 2 {
		exchange{method: "PUT", target: "/route", body: put("kv_cache_dtype", "null", "system_dp_size", "3", "system_dp_rank", fmt.Sprint(i)), status: 200, want: "OK"}.run(t, s)
	}
	exchange{name: "null dtype, follow by default", method: "GET", target: topology, status: 200,
		want: `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":3,"pp_size":1,"page_size":64,"kv_cache_dtype":null,"follow_bootstrap_room":true}`}.run(t, s)
}

// A body that cannot be used is 400 by name, and whatever it said is not kept.
func TestBadBodiesLeaveTheStateUnharmed(t *testing.T) {
	for _, before := range []string{"empty", "registered"} {
		s := NewServer(ServerConfig{Bind: "127.0.0.1"})
		if before == "registered" {
			exchange{method: "PUT", target: "/route", body: put(), status: 200, want: "OK"}.run(t, s)
			exchange{method: "POST", target: "/register_dp_rank", body: `{"bootstrap_room":1,"dp_rank":0}`, status: 200, want: "OK"}.run(t, s)
		}
		was := fmt.Sprintf("%+v", *s.table)
		bad := func(method, target, body, part string) {
			exchange{name: before + " " + short(body), method: method, target: target, body: body, status: 400, want: ours + part}.run(t, s)
		}
		for _, body := range []string{"", "{", "null", "[]", "7", `"x"`, "<html>", "{}{}", put()[:50], "\xff\xfe", strings.Repeat("[", 100_000)} {
			bad("PUT", "/route", body, "")
			bad("POST", "/register_dp_rank", body, "")
			bad("POST", "/query_dp_ranks", body, "")
		}
		for _, key := range []string{"attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"} {
			for _, value := range []string{"", "null", "0", "-1", "1.5", "1e3", `"x"`, "[1]", "{}", "true", "65537", "99999999999999999999", `"1__0"`, `"_1"`, `"--1"`, `""`} {
				bad("PUT", "/route", put(key, value), key)
			}
		}
		for _, key := range []string{"attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"} {
			for _, value := range []string{"", "null", "-1", "0.0", `"x"`, "[0]"} {
				bad("PUT", "/route", put(key, value), key)
			}
		}
		bad("PUT", "/route", put("attn_tp_rank", "1"), "outside the sizes")
		bad("PUT", "/route", put("attn_tp_size", "65536", "pp_size", "65536"), "ranks")
		for key, values := range map[string][]string{
			"rank_ip":                      {"", "null", "7", `""`, `"a b"`, `"0.0.0.0"`, `"::"`, `"10.0.0.1:80"`, `"http://x"`, `"` + strings.Repeat("a", 300) + `"`},
			"rank_port":                    {"", "null", "0", "-1", "65536", `"x"`, "[]", "80.0"},
			"page_size":                    {"", "null", "0", "-16", `"x"`, "16.0", "99999999999"},
			"kv_cache_dtype":               {"", "7", "[]", `"` + strings.Repeat("a", 200) + `"`},
			"kv_layout":                    {"7", "{}"},
			"load_balance_method":          {"7", "[]"},
			"enable_dsa_cache_layer_split": {"7", `"yes"`},
			"enable_kv_cache_sharding":     {"{}", `"false"`},
			"prefill_http_port":            {"0", "65536", `"x"`, "false"},
			"dsv41_spec_layout":            {"7", "[]", `"x"`, `{"a":"` + strings.Repeat("b", maxSpec) + `"}`},
			"decode_allocation_policy":     {"7", "[]"},
		} {
			for _, value := range values {
				bad("PUT", "/route", put(key, value), key)
			}
		}
		for _, body := range []string{`{}`, `{"bootstrap_room":1}`, `{"dp_rank":1}`, `{"bootstrap_room":null,"dp_rank":1}`, `{"bootstrap_room":1,"dp_rank":[]}`,
			`{"bootstrap_room":1.5,"dp_rank":1}`, `{"bootstrap_room":9223372036854775808,"dp_rank":1}`, `{"bootstrap_room":"x","dp_rank":1}`, `{"Bootstrap_Room":1,"DP_Rank":1}`} {
			bad("POST", "/register_dp_rank", body, "")
		}
		for _, body := range []string{`{}`, `{"bootstrap_rooms":null}`, `{"bootstrap_rooms":7}`, `{"bootstrap_rooms":{}}`, `{"bootstrap_rooms":[null]}`, `{"bootstrap_rooms":["x"]}`, `{"bootstrap_rooms":[[1]]}`} {
			bad("POST", "/query_dp_ranks", body, "bootstrap_rooms")
		}
		exchange{name: "instance no word", method: "PUT", target: "/route", body: put(), header: "X-Metronome-Instance: a b", status: 400, want: ours + InstanceHeader}.run(t, s)
		exchange{name: "fingerprint too long", method: "PUT", target: "/route", body: put(), header: "X-Metronome-Fingerprint: " + strings.Repeat("f", 200), status: 400, want: ours + FingerprintHeader}.run(t, s)
		if now := fmt.Sprintf("%+v", *s.table); now != was {
			t.Errorf("a refused request changed the table:\n was %s\n now %s", was, now)
		}
	}
}

func TestInstanceAndFingerprintTravelInHeaders(t *testing.T) {
	s := NewServer(ServerConfig{Bind: "127.0.0.1"})
	do := func(method, target, body string, header http.Header) (int, http.Header) {
		r := httptest.NewRequest(method, target, strings.NewReader(body))
		r.Header = header
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		return w.Code, w.Header()
	}
	who := func(instance, fingerprint string) http.Header {
		h := http.Header{}
		h.Set(InstanceHeader, instance)
		h.Set(FingerprintHeader, fingerprint)
		return h
	}
	wantAll := func(instance, fingerprint string, status int) {
		t.Helper()
		for target, want := range map[string]int{topology: status, fmt.Sprintf(rankOf, 0, 0, 0, 0): status, "/health": 200} {
			code, h := do("GET", target, "", nil)
			if code != want || h.Get(InstanceHeader) != instance || h.Get(FingerprintHeader) != fingerprint {
				t.Errorf("GET %s: %d, instance %q, fingerprint %q; want %d, %q, %q", target, code, h.Get(InstanceHeader), h.Get(FingerprintHeader), want, instance, fingerprint)
			}
		}
	}
	wantAll("", "", 503)
	do("PUT", "/route", put(), nil)
	wantAll("", "", 200)
	do("PUT", "/route", put(), who("p1", "f1"))
	wantAll("p1", "f1", 200)
	do("PUT", "/route", put("attn_tp_size", "2"), who("p2", "f2"))
	wantAll("p2", "f2", 503)
	if code, _ := do("PUT", "/route", put(), who("p1", "f1")); code != http.StatusConflict {
		t.Errorf("a replaced instance registers again: status %d, want 409", code)
	}
	do("PUT", "/route", put("attn_tp_size", "2", "attn_tp_rank", "1"), who("p2", "f2"))
	wantAll("p2", "f2", 200)
}

// Nobody without the token changes anything, and where strangers reach the registry there must be one.
// Shows F-78.
func TestWritesNeedTheToken(t *testing.T) {
	room := `{"bootstrap_room":1,"dp_rank":0}`
	for _, c := range []struct {
		name          string
		cfg           ServerConfig
		authorization string
		status        int
	}{
		{"no token configured, loopback", ServerConfig{Bind: "127.0.0.1:8998"}, "", 200},
		{"no token configured, loopback, some token", ServerConfig{Bind: "[::1]:8998"}, "Bearer x", 200},
		{"no token configured, everywhere", ServerConfig{Bind: "0.0.0.0:8998"}, "", 401},
		{"no token configured, everywhere, some token", ServerConfig{Bind: ":8998"}, "Bearer x", 401},
		{"no token configured, trusted network", ServerConfig{Bind: "0.0.0.0:8998", AllowOpenWrites: true}, "", 200},
		{"token missing, loopback", ServerConfig{Bind: "127.0.0.1", Tokens: api.NewTokens("s3").Valid}, "", 401},
		{"token missing, trusted network", ServerConfig{Bind: "127.0.0.1", Tokens: api.NewTokens("s3").Valid, AllowOpenWrites: true}, "", 401},
		{"token wrong", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "Bearer s4", 401},
		{"token shorter", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "Bearer s", 401},
		{"other scheme", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "Basic s3", 401},
		{"no scheme", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "s3", 401},
		{"token right", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "Bearer s3", 200},
		{"scheme in any case", ServerConfig{Bind: "0.0.0.0", Tokens: api.NewTokens("s3").Valid}, "bEARER s3", 200},
	} {
		s := NewServer(c.cfg)
		want := "OK"
		if c.status == 401 {
			want = ours + "Unauthorized"
		}
		header := "Authorization: " + c.authorization
		exchange{name: c.name, method: "PUT", target: "/route", body: put(), header: header, status: c.status, want: want}.run(t, s)
		exchange{name: c.name, method: "POST", target: "/register_dp_rank", body: room, header: header, status: c.status, want: want}.run(t, s)
		known := `{"1": 0}`
		if c.status == 401 {
			known = `{}` // and reads are open
			exchange{name: c.name, method: "GET", target: topology, status: 503, want: "Prefill server not fully registered yet (0 workers registered)."}.run(t, s)
		}
		exchange{name: c.name, method: "POST", target: "/query_dp_ranks", body: `{"bootstrap_rooms":[1]}`, status: 200, want: known}.run(t, s)
	}
}

func TestServeRefusesAnOpenNetworkWithoutToken(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:8998", "10.1.2.3:8998", "[::]:8998"} {
		ln := listen(addr)
		err := NewServer(ServerConfig{Bind: addr}).Serve(t.Context(), ln)
		if err == nil || !strings.Contains(err.Error(), "--insecure") || !strings.Contains(err.Error(), "token") {
			t.Errorf("Serve on %s without a token: %v", addr, err)
		}
		// A wrong Bind does not help: the listener counts.
		if NewServer(ServerConfig{Bind: "127.0.0.1"}).Serve(t.Context(), listen(addr)) == nil {
			t.Errorf("Serve on %s without a token started", addr)
		}
	}
}

// raw sends bytes over a connection of m and reads what comes until it closes
// or answers once.
func raw(t *testing.T, m *memNet, addr string, send func(io.Writer)) (status int, after time.Duration) {
	t.Helper()
	start := time.Now()
	c, err := m.Dial(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var sent sync.WaitGroup
	sent.Go(func() { send(c) })
	defer sent.Wait()
	var got bytes.Buffer
	one := make([]byte, 4096)
	for {
		n, err := c.Read(one)
		got.Write(one[:n])
		if err != nil || bytes.Contains(got.Bytes(), []byte("\r\n\r\n")) {
			break
		}
	}
	after = time.Since(start)
	c.Close()
	fmt.Sscanf(got.String(), "HTTP/1.1 %d", &status)
	return status, after
}

// What is too long, too slow or no HTTP is answered by name and cut. Shows F-78.
func TestLimitsOnTheWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		const addr = "127.0.0.1:8998"
		stop := m.serve(t, NewServer(ServerConfig{Bind: addr}), addr)
		defer stop()
		sends := func(parts ...string) func(io.Writer) {
			return func(w io.Writer) {
				for _, p := range parts {
					if _, err := io.WriteString(w, p); err != nil {
						return
					}
				}
			}
		}
		put := put()
		padded := func(size int) string { return put + strings.Repeat(" ", size-len(put)) }
		head := func(n int) string {
			return fmt.Sprintf("PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", n)
		}
		line := func(n int) string { // a request line of n bytes
			const rest = "GET /health? HTTP/1.1"
			return "GET /health?" + strings.Repeat("x", n-len(rest)) + " HTTP/1.1\r\nHost: x\r\n\r\n"
		}
		slow := func(head string, every time.Duration) func(io.Writer) {
			return func(w io.Writer) {
				io.WriteString(w, head)
				for {
					time.Sleep(every) // virtual
					if _, err := io.WriteString(w, " "); err != nil {
						return
					}
				}
			}
		}
		chunk := func(body string) string { return fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body) }
		const chunked = "PUT /route HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
		for _, c := range []struct {
			name   string
			send   func(io.Writer)
			status int // 0: closed without an answer
			after  time.Duration
		}{
			{"body of 1 MiB", sends(head(bodyMax), padded(bodyMax)), 200, 0},
			{"body over 1 MiB announced", sends(head(bodyMax + 1)), 413, 0},
			{"body chunked", sends(chunked, chunk(put)), 200, 0},
			{"body chunked over 1 MiB", sends(chunked, chunk(padded(bodyMax+1))), 413, 0},
			{"request line of 8190", sends(line(requestLineMax)), 200, 0},
			{"request line of 8191", sends(line(requestLineMax + 1)), 400, 0},
			{"request line of 60,000", sends(line(60_000)), 400, 0},
			{"header beyond 64 KiB", sends("GET /health HTTP/1.1\r\nHost: x\r\nA: ", strings.Repeat("a", 80<<10)), 431, 0},
			{"no HTTP", sends("\x00\x01\x02\x03\r\n\r\n"), 400, 0},
			{"a ZMTP greeting", sends("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL\r\n\r\n"), 400, 0},
			{"silent connection", sends(), 0, headerTimeout},
			{"half a request line", sends("GET /hea"), 400, headerTimeout},
			{"header, 1 byte per second", slow("GET /health HTTP/1.1\r\nA: ", time.Second), 0, headerTimeout},
			{"body missing", sends(head(10)), 408, readTimeout},
			{"body, 1 byte per second", slow(head(1000), time.Second), 408, readTimeout},
			{"body, 1 byte per second, chunked", slow(chunked+"400\r\n", time.Second), 408, readTimeout},
		} {
			status, after := raw(t, m, addr, c.send)
			if status != c.status || after != c.after {
				t.Errorf("%s: status %d after %v, want %d after %v", c.name, status, after, c.status, c.after)
			}
		}
		// A connection that had its answer and says no more is closed too.
		c, err := m.Dial(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		start := time.Now()
		if _, err := io.Copy(io.Discard, c); err != nil || time.Since(start) != idleTimeout {
			t.Errorf("an idle connection is closed after %v (%v), want %v", time.Since(start), err, idleTimeout)
		}
	})
}

func TestStoppingIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		const addr = "127.0.0.1:8998"
		stop := m.serve(t, NewServer(ServerConfig{Bind: addr}), addr)
		for _, said := range []string{"", "GET /hea", "PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"} {
			c, err := m.Dial(t.Context(), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			io.WriteString(c, said)
			m.serves.Go(func() { io.Copy(io.Discard, c) })
		}
		synctest.Wait()
		start := time.Now()
		stop()
		if d := time.Since(start); d > time.Second {
			t.Errorf("stopping with four connections in every state took %v", d)
		}
		m.serves.Wait()
	})
}

// Silent connections cannot lock a caller out: the longest silent one makes room.
func TestConnectionsAreBounded(t *testing.T) {
	ln := listen("127.0.0.1:8998")
	g := newGate(ln, 3)
	accept := func() (server, client net.Conn) {
		client, far := net.Pipe()
		go ln.deliver(far)
		server, err := g.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return server, client
	}
	closed := func(c net.Conn) bool {
		c.SetReadDeadline(time.Now().Add(-time.Second))
		_, err := c.Read(make([]byte, 1))
		return err == io.EOF || err == io.ErrClosedPipe
	}
	a, ac := accept()
	b, bc := accept()
	c, cc := accept()
	g.state(a, http.StateNew)
	g.state(a, http.StateActive) // a is being served: b has been silent longest
	_, dc := accept()
	if closed(ac) || !closed(bc) || closed(cc) || closed(dc) {
		t.Errorf("open after the fourth: a %v, b %v, c %v, d %v; want b closed only", !closed(ac), !closed(bc), !closed(cc), !closed(dc))
	}
	g.state(b, http.StateClosed) // its own end comes later and changes nothing
	g.state(c, http.StateActive)
	g.state(c, http.StateIdle) // now d has been silent longest
	_, ec := accept()
	if !closed(dc) || closed(cc) || closed(ec) {
		t.Error("after the fifth, d should be closed only")
	}
	// All served: the newcomer is turned away and the next Accept still works.
	g.state(c, http.StateActive)
	for conn := range g.conns {
		g.state(conn, http.StateActive)
	}
	turnedAway, far := net.Pipe()
	go func() {
		ln.deliver(far)
		turnedAway.Read(make([]byte, 1)) // closed by the gate
		g.state(a, http.StateClosed)
		_, last := net.Pipe()
		ln.deliver(last)
	}()
	if _, err := g.Accept(); err != nil {
		t.Fatal(err)
	}
	if !closed(turnedAway) {
		t.Error("a connection beyond the bound was let in while all others are served")
	}
	if len(g.conns) != 3 {
		t.Errorf("%d connections, want 3", len(g.conns))
	}
}

// Ten thousand rooms, registered by many callers at once, all come back right.
func TestManyRoomsAtOnce(t *testing.T) {
	s := NewServer(ServerConfig{Bind: "127.0.0.1"})
	const callers, each = 8, 1250
	room := func(i int) int64 { return int64(i) * 922337203685477 }
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			for i := c * each; i < (c+1)*each; i++ {
				r := httptest.NewRequest("POST", "/register_dp_rank", strings.NewReader(fmt.Sprintf(`{"bootstrap_room":%d,"dp_rank":%d}`, room(i), i%16)))
				w := httptest.NewRecorder()
				if s.ServeHTTP(w, r); w.Code != 200 {
					t.Errorf("room %d: status %d", i, w.Code)
				}
			}
		})
	}
	all.Wait()
	rooms := make([]int64, callers*each)
	for i := range rooms {
		rooms[i] = room(i)
	}
	body, _ := json.Marshal(map[string]any{"bootstrap_rooms": rooms})
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("POST", "/query_dp_ranks", bytes.NewReader(body)))
	var got map[string]int
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || len(got) != len(rooms) {
		t.Fatalf("%d rooms came back (%v), want %d", len(got), err, len(rooms))
	}
	for i, r := range rooms {
		if got[fmt.Sprint(r)] != i%16 {
			t.Fatalf("room %d is on rank %d, want %d", r, got[fmt.Sprint(r)], i%16)
		}
	}
}

// The mission's rate is 10,000 rooms a second: 100 µs each for caller and
// registry together. What bounds it is two system calls and a wake-up a side
// on loopback; the table takes below 1 µs of it.
func BenchmarkRegisterRank(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	served := make(chan error, 1)
	s := NewServer(ServerConfig{Bind: "127.0.0.1"})
	go func() { served <- s.Serve(ctx, ln) }()
	c := NewClient(ClientConfig{})
	b.ReportAllocs()
	var room atomic.Int64
	b.SetParallelism(4)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := c.RegisterRank(ctx, ln.Addr().String(), room.Add(1), 1); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "rooms/s")
	c.Close()
	cancel()
	if err := <-served; err != nil {
		b.Fatal(err)
	}
}

func BenchmarkTableSetRank(b *testing.B) {
	table := NewTable(TableConfig{})
	b.ReportAllocs()
	for i := int64(0); b.Loop(); i++ {
		table.SetRank(time.Duration(i)*100*time.Microsecond, i, 1)
	}
}
