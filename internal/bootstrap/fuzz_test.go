package bootstrap

import (
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
)

// Whatever body meets a registry, it answers 200 or 400, never crashes, and
// stays a registry that our client can read: sizes are sane, ready is what the
// distinct ranks say.
func FuzzRegistryBody(f *testing.F) {
	for _, body := range []string{
		put(), put("attn_tp_size", "2"), put("attn_tp_size", "2", "attn_tp_rank", "1"), put("kv_cache_dtype", "null", "rank_port", `"7"`),
		put("attn_dp_size", "4", "attn_dp_rank", "3"), put("system_dp_size", "4", "system_dp_rank", "3"), put("dsv41_spec_layout", `{"a":[1,{"b":null}]}`),
		put("attn_tp_size", "0"), put("pp_size", "-1"), put("rank_ip", `"::1"`), put("page_size", `"0_0"`), put("attn_cp_size", "65536"),
		`{"bootstrap_room":9223372036854775807,"dp_rank":"3"}`, `{"bootstrap_room":-1,"dp_rank":-2147483648}`, `{"bootstrap_rooms":[1,"2",-3]}`,
		`{"bootstrap_rooms":[null]}`, `{"bootstrap_rooms":{}}`, `{}`, `[]`, `null`, ``, `{"a":`, "\xff", `{"dp_rank":1e400}`,
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		s := NewServer(ServerConfig{Bind: "127.0.0.1", AnnounceHTTP: true})
		ask := func(method, target, body string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			s.ServeHTTP(w, httptest.NewRequest(method, target, strings.NewReader(body)))
			return w
		}
		empty := *s.table
		for _, target := range []string{"/register_dp_rank", "/query_dp_ranks", "/route"} {
			method := "POST"
			if target == "/route" {
				method = "PUT"
			}
			w := ask(method, target, body)
			switch {
			case w.Code == 200:
			case w.Code != 400:
				t.Fatalf("%s: status %d", target, w.Code)
			case target == "/route" && (s.table.registered != 0 || s.table.info != empty.info || len(s.table.addrs) != 0):
				t.Fatalf("a refused registration left %+v", s.table)
			}
			if target == "/query_dp_ranks" && w.Code == 200 {
				if ranks, err := parseRanks(w.Body.Bytes()); err == nil && len(ranks) > 1 {
					t.Fatalf("one room was told, %d came back", len(ranks))
				}
			}
		}
		info, registered, ready := s.table.Info()
		if (registered > 0 || ready) && !info.sized() || registered > len(s.table.addrs) {
			t.Fatalf("%d ranks registered of %+v", registered, info)
		}
		answer := ask("GET", topology, "")
		if ready != (answer.Code == 200) {
			t.Fatalf("ready is %v, status %d", ready, answer.Code)
		}
		if ready {
			want := info
			if want.KVDType == "auto" {
				want.KVDType = ""
			}
			if got, err := parseInfo(answer.Body.Bytes()); err != nil || got != want {
				t.Fatalf("our client reads %+v, %v from our registry's answer %s; it holds %+v", got, err, answer.Body, want)
			}
		}
	})
}

// Whatever a registry answers, the client takes it only if it can be used
// without another check: positive sizes, few ranks, a port, no negative rank.
func FuzzRegistryAnswer(f *testing.F) {
	for _, body := range []string{
		seven, with("page_size", "null"), with("attn_tp_size", `"4"`), with("dp_size", "0"), with("pp_size", "-1"), with("attn_tp_size", "[2]"),
		with("dsv41_spec_layout", `{"x":1}`), with("follow_bootstrap_room", "0"), with("unknown", "{}"), with("prefill_http_port", "1"),
		`{"rank_ip":"10.0.0.1","rank_port":41234}`, `{"rank_ip":"fd00::1","rank_port":"1"}`, `{"rank_ip":"[::1]","rank_port":0}`,
		`{"1":0,"9223372036854775807":3}`, `{"1":null}`, `{"1":-1}`, `{"x":1}`, `{}`, `[]`, `null`, ``, `{"a":`, "\xff",
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		if info, err := parseInfo([]byte(body)); err == nil {
			if !info.sized() || info.PageSize < 0 || info.PrefillHTTPPort < 0 || info.PrefillHTTPPort > 65535 {
				t.Fatalf("taken: %+v", info)
			}
			again, err := info.body()
			if err != nil {
				t.Fatalf("%+v cannot be told: %v", info, err)
			}
			if got, err := parseInfo(again); err != nil || got != info {
				t.Fatalf("told as %s, %+v comes back as %+v, %v", again, info, got, err)
			}
		}
		if ip, port, err := parseRank([]byte(body)); err == nil {
			if host, err := CheckHost(ip); err != nil || host != ip || port < 1 || port > 65535 {
				t.Fatalf("taken: %q port %d", ip, port)
			}
		}
		if ranks, err := parseRanks([]byte(body)); err == nil {
			rooms := make([]int64, 0, len(ranks))
			for room, dp := range ranks {
				if dp < 0 || dp > maxRanks {
					t.Fatalf("taken: rank %d", dp)
				}
				rooms = append(rooms, room)
			}
			again := appendRanks(nil, rooms, func(room int64) (int, bool) { dp, ok := ranks[room]; return dp, ok })
			if got, err := parseRanks(again); err != nil || !reflect.DeepEqual(got, ranks) {
				t.Fatalf("told as %s, %v comes back as %v, %v", again, ranks, got, err)
			}
		}
	})
}
