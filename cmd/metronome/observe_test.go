package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/metronome-serve/metronome/internal/metric"
)

// safeBuffer is a log that is read while it is written.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *safeBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

// times is a timeline as a line of the log has it.
type times map[string]float64

// inOrder checks that a process has passed these marks, one after the other.
func (l times) inOrder(t *testing.T, who string, marks ...string) {
	t.Helper()
	last := 0.0
	for _, m := range marks {
		at, ok := l[m]
		if !ok || at < last || at > 30e3 {
			t.Errorf("%s: %s at %v ms (%v), after %v ms: %v", who, m, at, ok, last, l)
		}
		last = at
	}
}

// One request through router, prefill and decode: its line in the router's log
// holds all marks of both legs in order, and the stretches of a leg lie within
// those of the router; explain prints them.
func TestTimelineEndToEnd(t *testing.T) {
	f := startRoles(t, nil)
	for i, c := range []struct{ path, body string }{
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"What is a bridge?"}],"stream":true,"max_tokens":12}`},
		{"/v1/completions", `{"prompt":"The moon is","max_tokens":9,"temperature":0}`},
		{"/generate", `{"text":"The moon is","rid":"my-rid","sampling_params":{"max_new_tokens":9}}`},
	} {
		id := fmt.Sprintf("observe-%d", i)
		a := sendAs(t.Context(), id, f.router+c.path, []byte(c.body))
		check(t, c.path, a)
		if v := a.header.Get("X-Metronome-Timeline"); v != "" || a.header.Get("Trailer") != "" {
			t.Errorf("%s: the client sees %v", c.path, a.header)
		}
		f.idle(t)
		line := accessLine(t, f.log.String(), id)
		if line.Path != c.path || line.Code != "ok" || line.Status != 200 || line.Attempts != 1 || line.Prompt == 0 || line.Completion == 0 {
			t.Errorf("%s: %+v", c.path, line)
		}
		r, p, d := line.Line["router"], line.Line["prefill"], line.Line["decode"]
		r.inOrder(t, "router", "queued", "routed", "first_token", "last_token", "ended")
		d.inOrder(t, "decode", "queued", "resolved", "granted", "first_page", "last_page", "first_token", "last_token", "ended")
		p.inOrder(t, "prefill", "queued", "first_layer", "last_page", "received", "ended")
		p.inOrder(t, "prefill", "queued", "granted", "last_page")
		const rounding = 0.002
		if d["ended"] > r["ended"]-r["routed"]+rounding || d["first_token"] > r["first_token"]-r["routed"]+rounding {
			t.Errorf("%s: decode's stretches are longer than the router's around them: %v, %v", c.path, d, r)
		}
		for _, name := range []string{id, map[bool]string{true: "my-rid", false: id}[c.path == "/generate"]} {
			text := explained(t, f.router, name)
			for _, want := range []string{id + " " + c.path + ": ok (200) after ", "\nprefill " + f.prefill, "\ndecode " + f.decode,
				"queued", "routed", "resolved", "granted", "first layer", "last page", "first token", "last token"} {
				if !strings.Contains(text, want) {
					t.Errorf("explain %s lacks %q:\n%s", name, want, text)
				}
			}
		}
	}
	send(t.Context(), "POST", f.serve+"/generate", []byte(`{"text":"The moon is","rid":"alone","sampling_params":{"max_new_tokens":9}}`))
	var rows []metric.Report
	if a := send(t.Context(), "GET", f.serve+"/debug/requests?rid=alone", nil); json.Unmarshal(a.body, &rows) != nil || len(rows) != 1 || len(rows[0].Timeline.Moments()) != 5 {
		t.Errorf("serve says %v", a)
	}
}

// The log of a child of up says whose it is, and JSON stays JSON.
func TestChildLog(t *testing.T) {
	var out strings.Builder
	log := &childLog{to: &out, name: "prefill 1"}
	for _, part := range []string{`{"msg":"a`, `"}` + "\nplain", " words\n{\n", `{"x":{}}` + "\n"} {
		if n, err := log.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	want := `{"process":"prefill 1","msg":"a"}` + "\nprefill 1: plain words\nprefill 1: {\n" + `{"process":"prefill 1","x":{}}` + "\n"
	if out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

type accessLog struct {
	Path, Code       string
	Status, Attempts int
	Prompt           int              `json:"prompt_tokens"`
	Completion       int              `json:"completion_tokens"`
	Line             map[string]times `json:"timeline_ms"`
}

// accessLine is the one line of a log that tells of a request.
func accessLine(t *testing.T, log, id string) (line accessLog) {
	t.Helper()
	n := 0
	for l := range strings.Lines(log) {
		if strings.Contains(l, `"msg":"request"`) && strings.Contains(l, `"request":"`+id+`"`) {
			n++
			if err := json.Unmarshal([]byte(l), &line); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n != 1 {
		t.Fatalf("%d lines tell of %s:\n%s", n, id, log)
	}
	return line
}

// explained is what metronome explain prints.
func explained(t *testing.T, router, id string) string {
	t.Helper()
	base, err := url.Parse(router)
	if err != nil {
		t.Fatal(err)
	}
	body, err := (&explainCmd{RID: id, Router: router}).ask(t.Context(), base, "")
	var list []metric.Report
	if err != nil || json.Unmarshal(body, &list) != nil || len(list) != 1 {
		t.Fatalf("%s: %v, %s", id, err, body)
	}
	var out strings.Builder
	explain(&out, router, &list[0])
	return out.String()
}

// promise is one row of docs/metrics.md.
type promise struct {
	name, kind string
	labels     map[string][]string // with the values that are there from the start
	where      []string
}

var promiseRow = regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)(?:\\{([^}]*)\\})?` \\| (counter|gauge|histogram) \\| ([a-z, ]+) \\| .+ \\|$")

// promises reads docs/metrics.md.
func promises(t *testing.T) map[string]promise {
	t.Helper()
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]promise{}
	for _, m := range promiseRow.FindAllStringSubmatch(string(doc), -1) {
		p := promise{m[1], m[3], map[string][]string{}, strings.Split(m[4], ", ")}
		for l := range strings.SplitSeq(m[2], ",") {
			if name, values, _ := strings.Cut(l, "="); name != "" {
				p.labels[name] = strings.FieldsFunc(values, func(r rune) bool { return r == '|' || r == '\\' })
			}
		}
		all[p.name] = p
	}
	if rows := strings.Count(string(doc), "\n| `"); rows != len(all) || rows < 25 {
		t.Fatalf("%d rows are read of a table of %d", len(all), rows)
	}
	return all
}

// scraped is what a process serves: types by name, and series by name.
type scraped struct {
	kinds  map[string]string
	series map[string][]series
}

type series struct {
	labels map[string]string
	moved  bool
}

var (
	kindLine   = regexp.MustCompile(`(?m)^# TYPE metronome_(\S+) (\S+)$`)
	seriesLine = regexp.MustCompile(`(?m)^metronome_([a-z0-9_]+)(?:\{([^}]*)\})? (\S+)$`)
	label      = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)
)

func scrapeMetrics(t *testing.T, base string) scraped {
	t.Helper()
	a := send(context.Background(), "GET", base+"/metrics", nil)
	if a.status != 200 {
		t.Fatalf("%s: %v", base, a)
	}
	s := scraped{map[string]string{}, map[string][]series{}}
	for _, m := range kindLine.FindAllSubmatch(a.body, -1) {
		s.kinds[string(m[1])] = string(m[2])
	}
	for _, m := range seriesLine.FindAllSubmatch(a.body, -1) {
		name, one := string(m[1]), series{map[string]string{}, string(m[3]) != "0"}
		for _, l := range label.FindAllSubmatch(m[2], -1) {
			one.labels[string(l[1])] = string(l[2])
		}
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if base := strings.TrimSuffix(name, part); s.kinds[base] == "histogram" {
				name = base
			}
		}
		delete(one.labels, "le")
		s.series[name] = append(s.series[name], one)
	}
	return s
}

// unmoved are counters that need a fault, or a full machine, to move.
var unmoved = []string{"loop_overrun_total", "peer_evicted_total", "kv_frames_rejected_total", "preemptions_total", "retries_total", "migrations_total"}

// Each metric that docs/metrics.md names is served by every role, with that type
// and those labels, and no other one is; after some requests those have moved
// that the table says a role moves, and no others.
func TestMetricsAsDocumented(t *testing.T) {
	f := startRoles(t, nil)
	all := promises(t)
	bases := map[string]string{"router": f.router, "serve": f.serve, "prefill": f.prefill, "decode": f.decode, "registry": startRegistry(t)}
	for role, base := range bases {
		first := scrapeMetrics(t, base)
		for _, name := range slices.Sorted(maps.Keys(all)) {
			first.holds(t, role, all[name])
		}
		for name := range first.kinds {
			if _, ok := all[name]; !ok {
				t.Errorf("%s serves metronome_%s, of which docs/metrics.md knows nothing", role, name)
			}
		}
	}
	for range 2 { // the second one finds its prompt cached
		body := fmt.Appendf(nil, `{"prompt":%q,"max_tokens":6,"temperature":0,"stream":true,"ignore_eos":true}`, strings.Repeat("The moon is bright. ", 8))
		check(t, "serve", f.ask("serve", "/v1/completions", body))
		check(t, "router", f.ask("router", "/v1/completions", body))
	}
	f.idle(t)
	for role, base := range bases {
		then := scrapeMetrics(t, base)
		for name, p := range all {
			moved := slices.ContainsFunc(then.series[name], func(s series) bool { return s.moved })
			may := slices.Contains(p.where, role)
			switch {
			case moved && !may:
				t.Errorf("%s moves metronome_%s, and docs/metrics.md says that only %v do", role, name, p.where)
			case may && !moved && p.kind != "gauge" && !slices.Contains(unmoved, name):
				t.Errorf("%s has not moved metronome_%s", role, name)
			}
		}
	}
}

// startRegistry starts a registry alone, as a process, and gives its URL.
func startRegistry(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("metronome", "registry", "--listen=127.0.0.1:0", "--json")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	var line readyLine
	if err := json.NewDecoder(out).Decode(&line); err != nil || !line.Ready {
		t.Fatalf("the registry is not ready: %v", err)
	}
	return line.HTTP
}

// holds checks one promise against the first scrape of a role.
func (s scraped) holds(t *testing.T, role string, p promise) {
	t.Helper()
	if s.kinds[p.name] != p.kind {
		t.Errorf("%s: metronome_%s is a %q, want a %s", role, p.name, s.kinds[p.name], p.kind)
	}
	for _, one := range s.series[p.name] {
		if got, want := slices.Sorted(maps.Keys(one.labels)), slices.Sorted(maps.Keys(p.labels)); !slices.Equal(got, want) {
			t.Errorf("%s: metronome_%s has the labels %v, want %v", role, p.name, got, want)
		}
	}
	for label, values := range p.labels {
		for _, v := range values {
			if !slices.ContainsFunc(s.series[p.name], func(s series) bool { return s.labels[label] == v }) {
				t.Errorf("%s: no series metronome_%s{%s=%q} from the start", role, p.name, label, v)
			}
		}
	}
}
