package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

const (
	published = "published"
	seven     = `{"attn_tp_size":2,"attn_cp_size":1,"dp_size":4,"pp_size":1,"page_size":64,"kv_cache_dtype":"bf16","follow_bootstrap_room":true}`
	peer      = "10.0.0.9:8998"
)

var sevenInfo = Info{TP: 2, CP: 1, DP: 4, PP: 1, PageSize: 64, KVDType: "bf16", FollowRoom: true}

// with is seven with one value changed ("" removes the key).
func with(key, value string) string {
	o, err := parseObject([]byte(seven))
	if err != nil {
		panic(err)
	}
	var parts []string
	for k, v := range o {
		if k != key {
			parts = append(parts, fmt.Sprintf("%q:%s", k, v))
		}
	}
	if value != "" {
		parts = append(parts, fmt.Sprintf("%q:%s", key, value))
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// drips writes one byte every so often until the other end closes.
func drips(first, rest string, every time.Duration) func(net.Conn) {
	return func(c net.Conn) {
		defer c.Close()
		if _, err := readRequest(c); err != nil {
			return
		}
		io.WriteString(c, first)
		for i := range len(rest) {
			time.Sleep(every) // virtual
			if _, err := io.WriteString(c, rest[i:i+1]); err != nil {
				return
			}
		}
	}
}

// redirects sends every request on to the next of these URLs by its path: /0, /1, …
func redirects(location string) func(net.Conn) {
	return says("HTTP/1.1 302 Found\r\nLocation: " + location + "\r\nContent-Length: 0\r\n\r\n")
}

// What one fetch does with each kind of answer: published, or a failed attempt
// with its cause within the one deadline. None may crash.
func TestFetchInfoRowByRow(t *testing.T) {
	const timeout = 5 * time.Second
	full := answer(200, seven)
	for _, c := range []struct {
		name  string
		serve func(net.Conn)
		want  string // published, as sevenInfo; else part of the error
		after time.Duration
	}{
		{"good", says(full), published, 0},
		{"more keys, some unknown", says(answer(200, with("instance_id", `{"a":[1]}`))), published, 0},
		{"numbers as strings", says(answer(200, `{"attn_tp_size":"2","attn_cp_size":" 1","dp_size":"04","pp_size":1,"page_size":"64","kv_cache_dtype":"bf16","follow_bootstrap_room":true}`)), published, 0},
		{"chunked", says("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(seven), seven)), published, 0},
		{"until the connection closes", says("HTTP/1.1 200 OK\r\n\r\n" + seven), published, 0},
		{"good, slowly, in time", drips(full[:len(full)-40], full[len(full)-40:], 100*time.Millisecond), published, 4 * time.Second},
		{"500", says(answer(500, "500 Internal Server Error\n\nServer got itself in trouble")), "status 500: 500 Internal Server Error", 0},
		{"404", says(answer(404, "404: Not Found")), "status 404", 0},
		{"503", says(answer(503, "Prefill server not fully registered yet (1 workers registered).")), "status 503: Prefill server not fully registered yet (1 workers registered).", 0},
		{"204", says("HTTP/1.1 204 No Content\r\n\r\n"), "status 204", 0},
		{"201", says(answer(201, seven)), "status 201", 0},
		{"empty", says(answer(200, "")), "malformed", 0},
		{"half of JSON", says(answer(200, "{")), "malformed", 0},
		{"HTML", says(answer(200, "<html>")), "malformed", 0},
		{"list", says(answer(200, "["+seven+"]")), "malformed", 0},
		{"null", says(answer(200, "null")), "malformed", 0},
		{"word", says(answer(200, `"ready"`)), "malformed", 0},
		{"number", says(answer(200, "7")), "malformed", 0},
		{"garbage after it", says(answer(200, seven+"x")), "malformed", 0},
		{"no UTF-8", says(answer(200, "\xff\xfe{}")), "malformed", 0},
		{"keys in other case", says(answer(200, strings.ToUpper(seven))), "malformed", 0},
		{"no HTTP", says("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"), "malformed", 0},
		{"body shorter than announced", says(strings.Replace(full, "Content-Length: 1", "Content-Length: 9", 1)), "EOF", 0},
		{"body over 64 KiB", says(answer(200, seven+strings.Repeat(" ", answerMax))), "more than 65536 bytes", 0},
		{"body without end", endless("HTTP/1.1 200 OK\r\n\r\n"), "more than 65536 bytes", 0},
		{"header without end", endless("HTTP/1.1 200 OK\r\nA: "), "exceeded", 0},
		{"refused", nil, "refused", 0},
		{"closed at once", func(c net.Conn) { c.Close() }, "", 0},
		{"closed after the request", says(""), "EOF", 0},
		{"closed in the head", says("HTTP/1.1 200 OK\r\nConte"), "malformed", 0},
		{"hangs", hangs, "deadline", timeout},
		{"head, then nothing", drips("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", " ", time.Hour), "deadline", timeout},
		{"trickles the body", drips("HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n", seven+strings.Repeat(" ", 100), 50*time.Millisecond), "deadline", timeout},
		{"trickles the head", drips("HTTP/1.1 200 OK\r\n", strings.Repeat("A: b\r\n", 100), 50*time.Millisecond), "deadline", timeout},
		{"1 byte per 4 s", drips("", full, 4*time.Second), "deadline", timeout},
		{"redirect to another scheme", redirects("ftp://10.0.0.9/route"), "ftp", 0},
		{"redirect to nowhere", redirects("http://10.9.9.9:1/route"), "refused", 0},
		{"redirect without location", says("HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"), "302", 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := newMemNet()
			m.set(peer, c.serve)
			fetchRow(t, m, c.name, c.want, timeout, c.after)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		m.hole(peer)
		fetchRow(t, m, "SYN unanswered", "deadline", timeout, timeout)
	})
}

// endless writes the head and then more and more of the same line.
func endless(head string) func(net.Conn) {
	return func(c net.Conn) {
		defer c.Close()
		if _, err := readRequest(c); err != nil {
			return
		}
		for _, err := io.WriteString(c, head); err == nil; _, err = io.WriteString(c, strings.Repeat("a", 4096)) {
		}
	}
}

func fetchRow(t *testing.T, m *memNet, name, want string, timeout, after time.Duration) {
	t.Helper()
	client := NewClient(ClientConfig{Dial: m.Dial})
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	start := time.Now()
	info, err := client.FetchInfo(ctx, peer)
	if d := time.Since(start); d != after {
		t.Errorf("%s: came back after %v, want %v", name, d, after)
	}
	switch {
	case want == published && (err != nil || info != sevenInfo):
		t.Errorf("%s: %+v, %v; want %+v", name, info, err, sevenInfo)
	case want != published && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("%s: error %v, want one with %q", name, err, want)
	case err != nil && IsLocal(err):
		t.Errorf("%s: counted as our own failure: %v", name, err)
	case err != nil && strings.ContainsAny(err.Error(), "\r\n"):
		t.Errorf("%s: the cause is not one line: %q", name, err)
	}
	client.Close()
	m.serves.Wait()
}

// What a size, a flag or a word of the parallel info may be.
func TestParallelInfoValues(t *testing.T) {
	bad := map[string][]string{
		"attn_tp_size":                 {"", "null", "0", "-1", "[]", "{}", `"two"`, "1.5", "true", "65537", "1e99", "99999999999999999999"},
		"attn_cp_size":                 {"", "null", "0", "-1", "[1]", `"x"`},
		"dp_size":                      {"", "null", "0", "-4", "[]", `"x"`, "40000"}, // 40000 · tp 2 is too many ranks
		"pp_size":                      {"", "null", "0", "-1", "{}", `""`},
		"page_size":                    {"", "0", "-1", "[]", `"x"`, "16.5", "3000000000"},
		"kv_cache_dtype":               {"", "7", "[]", "{}", `"` + strings.Repeat("f", 200) + `"`},
		"follow_bootstrap_room":        {"", "[]", `"yes"`, "2"},
		"kv_layout":                    {"7", "[]"},
		"decode_allocation_policy":     {"7"},
		"enable_kv_cache_sharding":     {`"x"`, "[]"},
		"enable_dsa_cache_layer_split": {"7"},
		"prefill_http_port":            {"0", "70000", `"x"`},
		"dsv41_spec_layout":            {"7", "[]"},
	}
	for key, values := range bad {
		for _, v := range values {
			if info, err := parseInfo([]byte(with(key, v))); err == nil {
				t.Errorf("%s %q was taken: %+v", key, v, info)
			} else if !strings.Contains(err.Error(), key) && !strings.Contains(err.Error(), "ranks") {
				t.Errorf("%s %q: the error does not name the key: %v", key, v, err)
			}
		}
	}
	good := []struct {
		key, value string
		change     func(*Info)
	}{
		{"page_size", "null", func(i *Info) { i.PageSize = 0 }},
		{"kv_cache_dtype", "null", func(i *Info) { i.KVDType = "" }},
		{"kv_cache_dtype", `"auto"`, func(i *Info) { i.KVDType = "" }},
		{"follow_bootstrap_room", "false", func(i *Info) { i.FollowRoom = false }},
		{"kv_layout", `"head_major"`, func(i *Info) { i.KVLayout = "head_major" }},
		{"kv_layout", "null", func(*Info) {}},
		{"decode_allocation_policy", `"early"`, func(*Info) {}},
		{"decode_allocation_policy", `"prefill_complete"`, func(i *Info) { i.AllocationPolicy = "prefill_complete" }},
		{"enable_kv_cache_sharding", "true", func(i *Info) { i.KVSharding = true }},
		{"enable_dsa_cache_layer_split", "true", func(i *Info) { i.LayerSplit = true }},
		{"prefill_http_port", "30000", func(i *Info) { i.PrefillHTTPPort = 30000 }},
		{"prefill_http_port", "null", func(*Info) {}},
		{"target_tp_rank", "null", func(*Info) {}}, // the client-side fields of 0.5.10
		{"dsv41_spec_layout", `{"b":1, "a":null}`, func(i *Info) { i.SpecLayout = `{"a":null,"b":1}` }},
	}
	for _, c := range good {
		want := sevenInfo
		c.change(&want)
		if info, err := parseInfo([]byte(with(c.key, c.value))); err != nil || info != want {
			t.Errorf("%s %s: %+v, %v; want %+v", c.key, c.value, info, err, want)
		}
	}
}

func TestRanksAndRankAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		client := NewClient(ClientConfig{Dial: m.Dial})
		for _, c := range []struct{ body, want string }{
			{`{"rank_ip":"10.0.0.1","rank_port":41234}`, "10.0.0.1:41234"},
			{`{"rank_ip":"fd00::7","rank_port":"41234","more":1}`, "[fd00::7]:41234"},
			{`{"rank_ip":"[fd00::7]","rank_port":1}`, "[fd00::7]:1"},
			{`{"rank_ip":"prefill-0.pods.example","rank_port":65535}`, "prefill-0.pods.example:65535"},
			{`{}`, ""}, {`[]`, ""}, {`null`, ""}, {``, ""}, {`<html>`, ""},
			{`{"rank_ip":"10.0.0.1"}`, ""}, {`{"rank_port":1}`, ""}, {`{"rank_ip":null,"rank_port":1}`, ""}, {`{"rank_ip":7,"rank_port":1}`, ""},
			{`{"rank_ip":"","rank_port":1}`, ""}, {`{"rank_ip":"0.0.0.0","rank_port":1}`, ""}, {`{"rank_ip":"a/b","rank_port":1}`, ""},
			{`{"rank_ip":"10.0.0.1","rank_port":0}`, ""}, {`{"rank_ip":"10.0.0.1","rank_port":99999}`, ""}, {`{"rank_ip":"10.0.0.1","rank_port":"x"}`, ""},
			{`{"rank_ip":"10.0.0.1","rank_port":[]}`, ""}, {`{"rank_ip":"10.0.0.1","rank_port":8998.5}`, ""},
		} {
			m.set(peer, says(answer(200, c.body)))
			target, err := client.LookupRank(t.Context(), peer, 0, 0, 1, 0)
			if target != c.want || (err == nil) != (c.want != "") {
				t.Errorf("rank answer %s: %q, %v; want %q", c.body, target, err, c.want)
			}
		}
		big := fmt.Sprint(int64(math.MaxInt64))
		for _, c := range []struct {
			body string
			want map[int64]int // nil: an error
		}{
			{`{}`, map[int64]int{}},
			{`{"1":0,"2":"3","` + big + `":7}`, map[int64]int{1: 0, 2: 3, math.MaxInt64: 7}},
			{`{"1":null,"2":1}`, map[int64]int{2: 1}},
			{`{"1":1,"99":5}`, map[int64]int{1: 1}}, // 99 was not asked for
			{`[1]`, nil}, {`null`, nil}, {``, nil}, {`<html>`, nil}, {`{"1":"x"}`, nil}, {`{"1":[]}`, nil}, {`{"1":1.5}`, nil},
			{`{"1":-1}`, nil}, {`{"x":1}`, nil}, {`{"1":99999999}`, nil}, {`{"99999999999999999999":1}`, nil},
		} {
			m.set(peer, says(answer(200, c.body)))
			ranks, err := client.QueryRanks(t.Context(), peer, []int64{1, 2, math.MaxInt64})
			if (err == nil) != (c.want != nil) || err == nil && !reflect.DeepEqual(ranks, c.want) {
				t.Errorf("DP ranks %s: %v, %v; want %v", c.body, ranks, err, c.want)
			}
		}
		for _, status := range []int{400, 404, 500, 503} {
			m.set(peer, says(answer(status, "no")))
			_, lookup := client.LookupRank(t.Context(), peer, 0, 0, 0, 0)
			_, query := client.QueryRanks(t.Context(), peer, []int64{1})
			_, health := client.Health(t.Context(), peer)
			for _, err := range []error{lookup, query, health, client.RegisterRank(t.Context(), peer, 1, 1), client.Register(t.Context(), peer, rank(1, 0, 1, 0))} {
				var no *StatusError
				if !errors.As(err, &no) || no.Status != status || no.Text != "no" {
					t.Errorf("status %d: error %v", status, err)
				}
			}
		}
		// Without a deadline of the caller's there still is one.
		m.set(peer, hangs)
		start := time.Now()
		if _, err := client.QueryRanks(t.Context(), peer, []int64{1}); err == nil || time.Since(start) != defaultTimeout {
			t.Errorf("a hung query without deadline: %v after %v, want an error after %v", err, time.Since(start), defaultTimeout)
		}
		client.Close()
		m.serves.Wait()
	})
}

// Client and Server speak to each other: everything that the one tells comes
// out of the other.
func TestClientMeetsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		stop := m.serve(t, NewServer(ServerConfig{Bind: "127.0.0.1:8998", Tokens: api.NewTokens("s3").Valid}), "127.0.0.1:8998")
		const addr = "127.0.0.1:8998"
		client := NewClient(ClientConfig{Dial: m.Dial, Token: func() string { return "s3" }})
		whole := Info{
			TP: 2, CP: 1, DP: 2, PP: 1, PageSize: 16, KVDType: "f16", KVLayout: "head_major", AllocationPolicy: "prefill_complete",
			SpecLayout: `{"a":1}`, KVSharding: true, LayerSplit: true, PrefillHTTPPort: 30000, Instance: "p-1", Fingerprint: "cafe",
		}
		for dp := range 2 {
			for tp := range 2 {
				if _, err := client.FetchInfo(t.Context(), addr); err == nil || !strings.Contains(err.Error(), "503") {
					t.Errorf("before all ranks are registered: %v, want status 503", err)
				}
				r := Registration{Info: whole, Rank: Rank{DP: dp, TP: tp}, IP: "fd00::1", Port: 7000 + 10*dp + tp}
				if err := client.Register(t.Context(), addr, r); err != nil {
					t.Fatal(err)
				}
			}
		}
		if info, err := client.FetchInfo(t.Context(), addr); err != nil || info != whole {
			t.Errorf("FetchInfo: %v\n got %+v\nwant %+v", err, info, whole)
		}
		if target, err := client.LookupRank(t.Context(), addr, 1, 0, 1, 0); err != nil || target != "[fd00::1]:7011" {
			t.Errorf("LookupRank: %q, %v", target, err)
		}
		if _, err := client.LookupRank(t.Context(), addr, 2, 0, 0, 0); err == nil || !strings.Contains(err.Error(), "404") {
			t.Errorf("LookupRank of no rank: %v, want status 404", err)
		}
		if instance, err := client.Health(t.Context(), addr); err != nil || instance != "p-1" {
			t.Errorf("Health: %q, %v", instance, err)
		}
		rooms := make([]int64, 2500) // three queries
		want := map[int64]int{}
		for i := range rooms {
			rooms[i] = math.MaxInt64 - int64(i)
			if i%2 == 0 {
				want[rooms[i]] = i % 8
				if err := client.RegisterRank(t.Context(), addr, rooms[i], i%8); err != nil {
					t.Fatal(err)
				}
			}
		}
		if ranks, err := client.QueryRanks(t.Context(), addr, rooms); err != nil || !reflect.DeepEqual(ranks, want) {
			t.Errorf("QueryRanks: %d rooms, %v; want %d", len(ranks), err, len(want))
		}
		client.Close()
		stop()
		m.serves.Wait()
	})
}

// Hung addresses cost a healthy one nothing. Shows F-01.
func TestHungAddressesShareNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		m.set(peer, says(answer(200, seven)))
		client := NewClient(ClientConfig{Dial: m.Dial})
		const hung = 2000
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var all sync.WaitGroup
		var failed atomic.Int32
		for i := range hung {
			addr := fmt.Sprintf("10.1.%d.%d:8998", i/250, i%250)
			if i%2 == 0 {
				m.hole(addr)
			} else {
				m.set(addr, hangs)
			}
			all.Go(func() {
				if _, err := client.FetchInfo(ctx, addr); err != nil {
					failed.Add(1)
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		if _, err := client.FetchInfo(ctx, peer); err != nil || time.Since(start) != 0 {
			t.Errorf("beside %d hung addresses a healthy one took %v, %v; want no time at all", hung, time.Since(start), err)
		}
		all.Wait()
		if failed.Load() != hung || time.Since(start) != 5*time.Second {
			t.Errorf("%d of %d hung fetches failed, after %v; want all after 5s", failed.Load(), hung, time.Since(start))
		}
		client.Close()
		m.serves.Wait()
	})
}

func TestCancellationEndsAFetchAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		m.set(peer, hangs)
		client := NewClient(ClientConfig{Dial: m.Dial})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		ended := make(chan error)
		go func() {
			_, err := client.FetchInfo(ctx, peer)
			ended <- err
		}()
		synctest.Wait()
		start := time.Now()
		cancel()
		if err := <-ended; !IsLocal(err) || time.Since(start) != 0 {
			t.Errorf("after the cancellation: %v after %v; want a local error at once", err, time.Since(start))
		}
		client.Close()
		m.serves.Wait()
	})
}

// Parallel info comes over a fresh connection each time; the rest keeps one.
func TestConnectionsPerPurpose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet()
		s := NewServer(ServerConfig{Bind: "127.0.0.1"})
		stop := m.serve(t, s, peer2)
		client := NewClient(ClientConfig{Dial: m.Dial})
		if err := client.Register(t.Context(), peer2, rank(1, 0, 1, 0)); err != nil {
			t.Fatal(err)
		}
		count := func(name string, want int, call func() error) {
			before := m.dialed(peer2)
			for range 10 {
				if err := call(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if n := m.dialed(peer2) - before; n != want {
				t.Errorf("10 × %s made %d connections, want %d", name, n, want)
			}
		}
		count("FetchInfo", 10, func() error { _, err := client.FetchInfo(t.Context(), peer2); return err })
		count("Health", 1, func() error { _, err := client.Health(t.Context(), peer2); return err })
		count("LookupRank", 1, func() error { _, err := client.LookupRank(t.Context(), peer2, 0, 0, 0, 0); return err })
		count("QueryRanks on the same", 0, func() error { _, err := client.QueryRanks(t.Context(), peer2, []int64{1}); return err })

		// The registry restarts: a kept connection is dead, and no call fails by it.
		stop()
		stop = m.serve(t, NewServer(ServerConfig{Bind: "127.0.0.1"}), peer2)
		if err := client.RegisterRank(t.Context(), peer2, 1, 1); err != nil {
			t.Errorf("the first call after a restart: %v", err)
		}
		if _, err := client.Health(t.Context(), peer2); err != nil {
			t.Errorf("the first probe after a restart: %v", err)
		}
		client.Close()
		stop()
		m.serves.Wait()
	})
}

const peer2 = "127.0.0.1:8998"

// The token goes with writes, to loopback and listed hosts, and no further.
func TestTokenStaysHome(t *testing.T) {
	var mu sync.Mutex
	var got []string
	records := func(answer string) func(net.Conn) {
		return func(c net.Conn) {
			defer c.Close()
			r, err := readRequest(c)
			if err != nil {
				return
			}
			mu.Lock()
			got = append(got, r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization"))
			mu.Unlock()
			io.WriteString(c, answer)
		}
	}
	listed := func(host string) bool { return host == "10.0.0.9" || host == "10.0.0.8" }
	for _, c := range []struct {
		name, addr string
		allow      func(string) bool
		want       []string // of RegisterRank
		wantErr    string
	}{
		{"loopback", "127.0.0.1:8998", nil, []string{"POST /register_dp_rank Bearer s3"}, ""},
		{"loopback by name", "localhost:8998", nil, []string{"POST /register_dp_rank Bearer s3"}, ""},
		{"any host", "10.0.0.9:8998", nil, []string{"POST /register_dp_rank "}, ""},
		{"listed", "10.0.0.9:8998", listed, []string{"POST /register_dp_rank Bearer s3"}, ""},
		{"not listed", "10.0.0.7:8998", listed, nil, "10.0.0.7 is not in the list of allowed"},
		{"loopback not listed", "127.0.0.1:8998", listed, nil, "not in the list of allowed"},
		{"listed, redirects to listed", "10.0.0.8:1", listed, []string{"POST /register_dp_rank Bearer s3", "POST /register_dp_rank "}, ""},
		{"listed, redirects to its other port", "10.0.0.8:2", listed, []string{"POST /register_dp_rank Bearer s3", "POST /register_dp_rank "}, ""},
		{"listed, redirects to itself", "10.0.0.8:3", listed, []string{
			"POST /register_dp_rank Bearer s3", "POST /register_dp_rank Bearer s3", "POST /register_dp_rank Bearer s3", "POST /register_dp_rank Bearer s3"}, "more than 3 redirects"},
		{"listed, redirects elsewhere", "10.0.0.8:4", listed, []string{"POST /register_dp_rank Bearer s3"}, "10.0.0.7, which is not in the list"},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := newMemNet()
			for _, addr := range []string{"127.0.0.1:8998", "localhost:8998", "10.0.0.9:8998", "10.0.0.7:8998", "10.0.0.8:80"} {
				m.set(addr, records(answer(200, "OK")))
			}
			to := func(u string) func(net.Conn) {
				return records("HTTP/1.1 307 Temporary Redirect\r\nLocation: " + u + "/register_dp_rank\r\nContent-Length: 0\r\n\r\n")
			}
			m.set("10.0.0.8:1", to("http://10.0.0.9:8998"))
			m.set("10.0.0.8:2", to("http://10.0.0.8:80"))
			m.set("10.0.0.8:3", to(""))
			m.set("10.0.0.8:4", to("http://10.0.0.7:8998"))
			got = nil
			client := NewClient(ClientConfig{Dial: m.Dial, Token: func() string { return "s3" }, Allow: c.allow})
			err := client.RegisterRank(t.Context(), c.addr, 1, 1)
			if (err == nil) != (c.wantErr == "") || err != nil && !strings.Contains(err.Error(), c.wantErr) {
				t.Errorf("%s: %v, want %q", c.name, err, c.wantErr)
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s: the peers saw %q, want %q", c.name, got, c.want)
			}
			got = nil
			client.FetchInfo(t.Context(), c.addr)
			client.Health(t.Context(), c.addr)
			client.QueryRanks(t.Context(), c.addr, []int64{1})
			for _, line := range got {
				if strings.Contains(line, "s3") {
					t.Errorf("%s: a read carried the token: %s", c.name, line)
				}
			}
			client.Close()
			m.serves.Wait()
		})
	}
}

func TestParseAllow(t *testing.T) {
	if allow, err := ParseAllow(nil); allow != nil || err != nil {
		t.Errorf("an empty list: %v", err)
	}
	for _, bad := range []string{"", "10.0.0.0/33", "a b", "http://x", "10.0.0.1:80"} {
		if _, err := ParseAllow([]string{bad}); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
	allow, err := ParseAllow([]string{"10.1.0.0/16", "fd00::/8", "192.168.0.7", "[fe80::1]", "P-0.example"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"10.1.255.1": true, "10.2.0.1": false, "::ffff:10.1.0.1": true, "fd12::1": true, "fe80::1": true, "fe80::2": false,
		"192.168.0.7": true, "192.168.0.8": false, "p-0.example": true, "P-0.EXAMPLE": true, "p-1.example": false, "x.p-0.example": false, "localhost": false, "": false,
	} {
		if allow(host) != want {
			t.Errorf("%q is allowed: %v, want %v", host, !want, want)
		}
	}
}

// What a peer sends instead of HTTP does not fill errors and logs.
func TestLongCause(t *testing.T) {
	err := errors.New(`malformed HTTP response "` + strings.Repeat(`\x00`, 5000))
	got := cause(t.Context(), &url.Error{Op: "Get", URL: "http://p:1", Err: err})
	if len(got.Error()) > 500 || !strings.HasPrefix(got.Error(), "malformed HTTP response") || !errors.Is(got, err) {
		t.Errorf("%d bytes: %.600v", len(got.Error()), got)
	}
}

func TestBadAddressesAreRefusedBeforeAnyDial(t *testing.T) {
	client := NewClient(ClientConfig{Dial: func(context.Context, string, string) (net.Conn, error) {
		t.Error("dialled")
		return nil, os.ErrInvalid
	}})
	for _, addr := range []string{"", "10.0.0.1", ":8998", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http", "a@b:1", "a/b:1", "http://x:1", "0.0.0.0:8998", "[::]:1", "a b:1", "a\nb:1", "[fd00::1:8998", strings.Repeat("a", 300) + ":1"} {
		if _, err := client.FetchInfo(t.Context(), addr); err == nil {
			t.Errorf("the address %q was taken", addr)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("the error for %q is not one line: %q", addr, err)
		}
	}
}

func TestIsLocal(t *testing.T) {
	op := func(err error) error {
		return &url.Error{Op: "Get", URL: "http://x", Err: &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", err)}}
	}
	for _, c := range []struct {
		err   error
		local bool
	}{
		{nil, false},
		{context.Canceled, true},
		{fmt.Errorf("x: %w", context.Canceled), true},
		{context.DeadlineExceeded, false},
		{op(localErrnos[0]), true},
		{op(localErrnos[1]), true},
		{op(localErrnos[2]), true},
		{op(syscall.ECONNREFUSED), false},
		{op(syscall.ECONNRESET), false},
		{op(syscall.EHOSTUNREACH), false},
		{&net.DNSError{Err: "dial udp: socket: " + syscall.EMFILE.Error(), Name: "x"}, true},
		{&net.DNSError{Err: "no such host", Name: "x", IsNotFound: true}, false},
		{io.ErrUnexpectedEOF, false},
		{&StatusError{Status: 503}, false},
	} {
		if IsLocal(c.err) != c.local {
			t.Errorf("IsLocal(%v) is %v", c.err, !c.local)
		}
	}
}

// A process that really has no descriptor left says so.
func TestNoDescriptorLeftIsLocal(t *testing.T) {
	client := NewClient(ClientConfig{Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := net.Dialer{Control: func(string, string, syscall.RawConn) error { return syscall.EMFILE }}
		return d.DialContext(ctx, network, addr)
	}})
	if _, err := client.FetchInfo(t.Context(), "127.0.0.1:1"); !IsLocal(err) {
		t.Errorf("%v is not counted as our own", err)
	}
}

var _ http.Handler = (*Server)(nil)
