package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
)

// splice is the whole body that one attempt would send.
func splice(s *Scanned, p Injection) []byte {
	segs, _, n := s.Splice(nil, nil, p)
	out := bytes.Join(segs, nil)
	if len(out) != n {
		panic(fmt.Sprintf("Splice says %d bytes and gives %d", n, len(out)))
	}
	return out
}

var onePair = Injection{Host: "10.0.0.1", Port: 8998, Rooms: []int64{math.MaxInt64}}

const onePairText = `"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":9223372036854775807`

func TestSpliceKeepsEveryOtherByte(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"nothing of the client's", `{}`, `{P}`},
		{"space in an empty object", " { \n} ", " {P \n} "},
		{"numbers as written", `{"a":0.1,"b":1.10,"c":1e400,"d":9007199254740993, "seed":18446744073709551615}`,
			`{P,"a":0.1,"b":1.10,"c":1e400,"d":9007199254740993, "seed":18446744073709551615}`},
		{"first field is ours", `{"bootstrap_room":7, "a":1}`, `{P,"a":1}`},
		{"middle field is ours", `{"a":1, "bootstrap_host":"evil" , "b":2}`, `{P,"a":1, "b":2}`},
		{"last field is ours", `{"a":1 , "bootstrap_port":1 }`, `{P,"a":1 }`},
		{"a run of ours in the middle", `{"a":1,"routed_dp_rank":1,"kv_transfer_params":{"x":[1,{}]},"b":2}`, `{P,"a":1,"b":2}`},
		{"two runs", `{"bootstrap_pair_key":"k","a":1,"decode_tp_size":2,"b":2,"data_parallel_rank":0,"disagg_prefill_dp_rank":1}`, `{P,"a":1,"b":2}`},
		{"only ours", `{ "bootstrap_room":1,"bootstrap_host":null }`, `{P  }`},
		{"name in escapes", `{"bootstrap\u005froom":7,"a":1}`, `{P,"a":1}`},
		{"name in capitals, which encoding/json would obey", `{"Bootstrap_Room":7,"a":1,"\u017Ftream":1}`, `{P,"a":1,"\u017Ftream":1}`},
		{"ours, but deeper down", `{"a":{"bootstrap_room":1}}`, `{P,"a":{"bootstrap_room":1}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Scan([]byte(c.in))
			if err != nil {
				t.Fatal(err)
			}
			want := strings.Replace(c.want, "P", onePairText, 1)
			if got := string(splice(&s, onePair)); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

func TestSpliceLists(t *testing.T) {
	s, err := Scan([]byte(`{"text":["a","b"],"bootstrap_room":[1,2]}`))
	if err != nil {
		t.Fatal(err)
	}
	got := string(splice(&s, Injection{Host: "[::1]", Rooms: []int64{0, math.MaxInt64}, Batch: true}))
	want := `{"bootstrap_host":["[::1]","[::1]"],"bootstrap_port":[null,null],"bootstrap_room":[0,9223372036854775807],"text":["a","b"]}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestScanFinds(t *testing.T) {
	body := `{"model":"m\u00e9","stream":true,"rid":"r1","user":"u\u00e9","text":"1","prompt":"12345","n":3,"sampling_params":{"x":{"n":9},"temperature":0,"n":3}}`
	s, err := Scan([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Stream || s.Model() != "mé" || s.RID() != "r1" || s.PromptBytes != 10 || s.User() != "ué" || string(s.Prompt()) != `"12345"` {
		t.Errorf("stream %v model %q rid %q prompt bytes %d user %q prompt %s", s.Stream, s.Model(), s.RID(), s.PromptBytes, s.User(), s.Prompt())
	}
}

func TestItems(t *testing.T) {
	for _, c := range []struct {
		kind  Kind
		body  string
		items int
		batch bool
	}{
		{Chat, `{"messages":[{},{}]}`, 1, false},
		{Chat, `{"messages":[],"n":3}`, 3, true},
		{Chat, `{"messages":[],"n":null}`, 1, false},
		{Chat, `{"messages":[],"prompt":["a","b"]}`, 1, false},
		{Completion, `{"prompt":"a"}`, 1, false},
		{Completion, `{"prompt":[1,2,3]}`, 1, false},
		{Completion, `{"prompt":["a"]}`, 1, true},
		{Completion, `{"prompt":["a","b",["c"]],"n":2}`, 6, true},
		{Completion, `{"prompt": [ [1,2], [3] , [ ] ]}`, 3, true},
		{Completion, `{"prompt":[]}`, 1, false},
		{Generate, `{"text":"a","sampling_params":{"n":2}}`, 2, true},
		{Generate, `{"text":["a","b"],"sampling_params":[{"n":2},{"n":2}]}`, 4, true},
		{Generate, `{"text":["a","b"],"sampling_params":[]}`, 2, true},
		{Generate, `{"text":["a","b"],"sampling_params":[ 1 ]}`, 2, true},
		{Generate, `{"input_ids":[1,2,3]}`, 1, false},
		{Generate, `{"input_ids":[[1,2,3],[4]]}`, 2, true},
		{Generate, `{"input_ids":[[1,2,3]],"n":0}`, 1, true},
		{Generate, `{"input_ids":[],"n":-4}`, 1, false},
		{Completion, `{"prompt":[ "a",1,2,3, 4,[5,6,7]]}`, 6, true},
	} {
		s, err := Scan([]byte(c.body))
		if err != nil {
			t.Fatalf("%s: %v", c.body, err)
		}
		items, batch, err := s.Items(c.kind)
		if err != nil || items != c.items || batch != c.batch {
			t.Errorf("%s: %d items, batch %v, %v; want %d, %v", c.body, items, batch, err, c.items, c.batch)
		}
	}
}

func TestScanRefuses(t *testing.T) {
	many := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `,"f%d":0`, i)
		}
		return "{" + b.String()[1:] + "}"
	}
	for _, c := range []struct{ body, want, param string }{
		{``, "empty", ""},
		{`  `, "empty", ""},
		{`[]`, "must be a JSON object", ""},
		{`{"a":1} {`, "after the top-level object", ""},
		{`{"a":1,"a":2}`, `"a" comes twice`, "a"},
		{`{"stream":true,"str\u0065am":false}`, `"stream" comes twice`, "stream"},
		{`{"\ud83d\ude00":1,"😀":2}`, "comes twice", "😀"},
		{`{"bootstrap_room":1,"bootstrap_room":2}`, "comes twice", "bootstrap_room"},
		{`{"\b\f\n\r\t\"\/\\":1,"\u0008\u000c\u000a\u000d\u0009\u0022/\u005c":2}`, "comes twice", "\b\f\n\r\t\"/\\"},
		{`{"\ud83dx":1,"\ud83dx":2}`, "comes twice", "\ufffdx"},
		{`{"a" 1}`, "after a field's name", ""},
		{`{1:1}`, "looking for a field's name", ""},
		{`{"a":[1}`, "after a value", ""},
		{`{"a":{"b":1]`, "after a value", ""},
		{`{"stream":1}`, "`stream` must be a boolean", "stream"},
		{`{"model":1}`, "`model` must be a string", "model"},
		{`{"n":1.0}`, "`n` must be an integer", "n"},
		{`{"n":1e3}`, "`n` must be an integer", "n"},
		{`{"n":"3"}`, "`n` must be an integer", "n"},
		{`{"n":99999999999999999999999999}`, "`n` must be an integer", "n"},
		{`{"n":1025}`, "at most 1024", "n"},
		{`{"sampling_params":{"n":1025}}`, "at most 1024", "sampling_params.n"},
		{many(maxFields + 1), "more than 1024 top-level fields", ""},
		{`{"a":1`, "ends too early", ""},
		{`{"a":"` + "\x01" + `"}`, `unexpected '\x01' at byte 6`, ""},
	} {
		_, err := Scan([]byte(c.body))
		if err == nil || err.Code != InvalidRequest || !strings.Contains(err.Message, c.want) || err.Param != c.param {
			t.Errorf("%.60s: %+v; want %q", c.body, err, c.want)
		}
	}
	if _, err := Scan([]byte(many(maxFields))); err != nil {
		t.Errorf("%d fields: %v", maxFields, err)
	}
	s, _ := Scan([]byte(`{"prompt":["a","b"],"n":1024}`))
	if _, _, err := s.Items(Completion); err == nil {
		t.Error("8192 items are let through")
	}
}

// corpus holds what each rule of the grammar turns on.
func corpus() []string {
	c := []string{
		`{}`, `{`, `}`, `[]`, `null`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{,}`, `{"a":1 "b":2}`, `{"a":1}x`, "\ufeff{}", "{\x00}", "{}\x00",
		`{"a":01}`, `{"a":-}`, `{"a":-0}`, `{"a":1.}`, `{"a":.5}`, `{"a":1e}`, `{"a":1e+}`, `{"a":1E-07}`, `{"a":1e999}`, `{"a":+1}`, `{"a":--1}`, `{"a":0x1}`, `{"a":1_0}`,
		`{"a":tru}`, `{"a":truex}`, `{"a":nul`, `{"a":Null}`, `{"a":NaN}`,
		`{"a":"\u12"}`, `{"a":"\u12G4"}`, `{"a":"\x41"}`, `{"a":"\`, `{"a":"`, `{"a":"\ud800"}`, `{"a":"\ud800\u0041"}`, `{"\ud800\udc00":1,"𐀀":1}`, "{\"\xff\":1,\"\xfe\":2}", "{\"\xff\":1,\"\\ufffd\":2}",
		"{\"a\":\"\n\"}", "{\"a\":\"\x7f\x80\xff\"}", `{"a":"01234567\"89"}`, `{"a":"0123456\\"}`, "{\"a\":\"0123456789abc\x1f\"}",
		`{"a":[1,2,[3,[]],{"b":[{}]}]}`, `{"a":[1,]}`, `{"a":[,1]}`, `{"a":[1 2]}`, `{"a":[}`, `{"a":{]}`, `{"a":{"b":1]}`, `{"a":[1}}`, `{"a":{"b":[1,{"c":2}]},"d":3}`,
		`{"bootstrap_room":1,"a":1}`, `{"a":1,"bootstrap_host":"x"}`, `{"bootstrap_host":1,"bootstrap_port":2}`, `{"Kv_transfer_params":1}`, `{"` + "\u212a" + `v_tranſfer_params":1,"z":2}`,
		`{"a":[1,2,3, 4,0,01]}`, `{"a":[0,0, 0,10,-1,2.5]}`, `{"a":[1, 2, ]}`, `{"a":[1,,2]}`, `{"a":[1 ,2, "3"]}`, `{"a":[[1,2],[3, 4]],"b":1,2}`, `{"input_ids":[1,2,3`,
		`{"stream":true,"n":2,"prompt":["a",[1]],"sampling_params":{"n":2}}`, `{"sampling_params":[{"q":"}","n":"x"}]}`, `{"n":-1}`, `{"n":-}`,
		` { "a" : [ ] , "b" : { } } `,
	}
	for _, depth := range []int{9998, 9999, 10000, 10001} {
		c = append(c, `{"a":`+strings.Repeat("[", depth)+strings.Repeat("]", depth)+"}")
		c = append(c, strings.Repeat(`{"a":`, depth)+"0"+strings.Repeat("}", depth))
	}
	return c
}

// Each byte, at each place among ordinary ones, ends a run exactly if it is a
// quote, a backslash or a control character.
func TestSkipPlain(t *testing.T) {
	for c := range 256 {
		stop := c < 0x20 || c == '"' || c == '\\'
		for _, other := range []byte{' ', '!', '#', '[', ']', 0x7f, 0x80, 0xa2, 0xff} {
			for at := range 80 {
				b := bytes.Repeat([]byte{other}, 96)
				b[at] = byte(c)
				if got := skipPlain(b, 0); stop && got != at || !stop && got < 88 {
					t.Fatalf("%#x at %d among %#x: stopped at %d", c, at, other, got)
				}
			}
		}
	}
}

func FuzzScan(f *testing.F) {
	for _, s := range corpus() {
		f.Add([]byte(s))
	}
	f.Fuzz(checkScan)
}

// checkScan compares Scan with encoding/json: what it accepts, and what is
// left of the values after a splice.
func checkScan(t *testing.T, body []byte) {
	s, err := Scan(bytes.Clone(body))
	names, dup := topLevel(body)
	if err != nil {
		for _, ours := range []string{"comes twice", "must be", "at most", "more than", "too many pairing"} {
			if strings.Contains(err.Message, ours) {
				if strings.Contains(err.Message, "comes twice") && names != nil && !dup {
					t.Fatalf("%q: no field comes twice, but: %v", body, err)
				}
				return
			}
		}
		if names != nil {
			t.Fatalf("%q: encoding/json accepts it, Scan says %v", body, err)
		}
		return
	}
	if names == nil || dup {
		t.Fatalf("%q: Scan accepts it; valid object %v, a field twice %v", body, names != nil, dup)
	}
	out := splice(&s, onePair)
	var got, want map[string]json.RawMessage
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%q: the splice %q: %v", body, out, err)
	}
	if err := json.Unmarshal(body, &want); err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(want, func(k string, _ json.RawMessage) bool {
		return slices.ContainsFunc(pairingFields, func(f []byte) bool { return strings.EqualFold(k, string(f)) })
	})
	var ours map[string]json.RawMessage
	json.Unmarshal([]byte("{"+onePairText+"}"), &ours)
	maps.Copy(want, ours)
	if !maps.EqualFunc(got, want, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
		t.Fatalf("%q: the splice %q has other values", body, out)
	}
}

// topLevel lists the top-level names as encoding/json reads them; nil when body
// is no valid JSON object.
func topLevel(body []byte) (names []string, dup bool) {
	var v map[string]json.RawMessage
	if !json.Valid(body) || json.Unmarshal(body, &v) != nil || v == nil {
		return nil, false
	}
	names = []string{}
	d := json.NewDecoder(bytes.NewReader(body))
	d.Token()
	for d.More() {
		name, _ := d.Token()
		var skip json.RawMessage
		if err := d.Decode(&skip); err != nil {
			break
		}
		dup = dup || slices.Contains(names, name.(string))
		names = append(names, name.(string))
	}
	return names, dup
}

// BenchmarkScan reads a body of 10 MB. Physical limit: one pass over memory,
// about 10 GB/s on one core; json.Valid is the usual way.
func BenchmarkScan(b *testing.B) {
	const size = 10 << 20
	bodies := map[string][]byte{
		"plain":   []byte(`{"stream":true,"prompt":"` + strings.Repeat("The quick brown fox. ", size/21) + `"}`),
		"escaped": []byte(`{"stream":true,"prompt":"` + strings.Repeat(`The \"quick\" brown fox jumps over it,\n`, size/40) + `"}`),
		"ids":     []byte(`{"stream":true,"input_ids":[` + strings.Repeat("12345,", size/6) + `1]}`),
	}
	for name, body := range bodies {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Scan(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("small", func(b *testing.B) {
		body := []byte(`{"model":"m","messages":[{"role":"user","content":"Say hello to the world, please, in three words."}],"stream":true,"max_tokens":64,"temperature":0.7}`)
		var segs [][]byte
		var buf []byte
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			s, err := Scan(body)
			if err != nil {
				b.Fatal(err)
			}
			segs, buf, _ = s.Splice(segs[:0], buf[:0], onePair)
		}
		_ = segs
	})
	b.Run("json.Valid", func(b *testing.B) {
		b.SetBytes(int64(len(bodies["plain"])))
		for b.Loop() {
			json.Valid(bodies["plain"])
		}
	})
}

// How long an answer may become is read where it is a sensible number, and
// never refused here.
func TestScanMaxTokens(t *testing.T) {
	for body, want := range map[string]int{
		`{"max_tokens":7}`: 7, `{"max_completion_tokens":9,"x":1}`: 9,
		`{"sampling_params":{"max_new_tokens":5}}`:           5,
		`{"sampling_params":{"n":2,"max_new_tokens":5}}`:     5,
		`{"sampling_params":[{"max_new_tokens":6},{"n":1}]}`: 6,
		`{"max_tokens":null}`:                                0, `{"max_tokens":-1}`: 0, `{"max_tokens":1e3}`: 0, `{"max_tokens":"7"}`: 0,
		`{"max_tokens":99999999999999999999999}`: 0, `{}`: 0,
	} {
		if s, err := Scan([]byte(body)); err != nil || s.MaxTokens != want {
			t.Errorf("%s: %d (%v), want %d", body, s.MaxTokens, err, want)
		}
	}
}
