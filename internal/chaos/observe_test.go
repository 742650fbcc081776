package chaos

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/metronome-serve/metronome/internal/metric"
)

// explainMoved holds what metronome explain tells of a stream whose decode was
// killed against what the test did: the dead one cannot tell, and another one
// went on.
func explainMoved(t *testing.T, router, dead *Proc, id string) {
	t.Helper()
	run := func(more ...string) string {
		out, err := exec.CommandContext(t.Context(), binary, append([]string{"explain", id, "--router", router.HTTP}, more...)...).Output()
		if err != nil {
			t.Fatalf("explain: %v", err)
		}
		return string(out)
	}
	var list []metric.Report
	if err := json.Unmarshal([]byte(run("--json")), &list); err != nil || len(list) == 0 {
		t.Fatalf("%d requests, %v", len(list), err)
	}
	r := list[0] // the newest of that id
	if r.Code != "ok" || len(r.Attempts) != 2 {
		t.Fatalf("%+v", r)
	}
	first, second := r.Attempts[0], r.Attempts[1]
	if first.Decode.Worker != dead.HTTP || first.Cause == "" || first.Decode.Fault == "" || first.Decode.Lost == "" || first.Moved {
		t.Errorf("the first attempt: %+v", first)
	}
	if !second.Moved || second.Prefill.Report == nil || second.Decode.Report == nil || second.Cause != "" {
		t.Fatalf("the second attempt: %+v", second)
	}
	line := &second.Decode.Report.Timeline
	for _, m := range []metric.Mark{metric.Queued, metric.Resolved, metric.Granted, metric.FirstPage, metric.LastPage, metric.FirstToken, metric.LastToken} {
		if _, ok := line.At(m); !ok {
			t.Errorf("the second decode has no %s: %v", m, line.Moments())
		}
	}
	for _, want := range []string{"2 attempts", "goes on with the stream", "decode_unreachable", "does not tell", dead.HTTP} {
		if text := run(); !strings.Contains(text, want) {
			t.Errorf("explain lacks %q:\n%s", want, text)
		}
	}
}

// No log of any process, at its most talkative, has a token, a prompt or an
// answer in it, whatever was asked and whatever went wrong.
func TestNoSecretsInLogs(t *testing.T) {
	const token, wrong, prompt = "token-of-the-callers", "token-of-a-stranger", "zebras of the moon"
	r, file := newRig(t), filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	talks := []string{"--token-file=" + file, "--log-level=debug", "--log-format=json"}
	p, d := r.startPrefill(t, "tiny", talks...), r.startDecode(t, "tiny", append(talks, "--on-mismatch=reject")...)
	router := r.startRouter(t, []*Proc{p}, []*Proc{d}, talks...)
	said := map[string]bool{} // statuses
	ask := func(bearer, url, body string) string {
		req, err := http.NewRequestWithContext(within(t, requestBound), "POST", url, strings.NewReader(strings.ReplaceAll(body, "PROMPT", prompt)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+bearer)
		answer := ""
		if resp, err := Client.Do(req); err == nil {
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			said[fmt.Sprint(resp.StatusCode)], answer = true, string(text)
		}
		return answer
	}
	var chat struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if text := ask(token, router.HTTP+"/v1/chat/completions", `{"messages":[{"role":"user","content":"PROMPT"}],"max_tokens":20,"temperature":0,"ignore_eos":true}`); json.Unmarshal([]byte(text), &chat) != nil || len(chat.Choices) != 1 {
		t.Fatal(text)
	}
	all := func(base string) {
		for _, body := range secretBodies {
			for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"} {
				ask(token, base+path, body)
			}
		}
		ask(wrong, base+"/generate", `{"text":"PROMPT"}`)
		ask(token, base+"/generate?token="+token, `{"text":"PROMPT"}`)
		ask(token, base+"/abort_request", `{"rid":"PROMPT"}`)
	}
	for _, base := range []string{router.HTTP, d.HTTP, p.HTTP} {
		all(base)
	}
	p.Kill()
	all(router.HTTP)
	d.Terminate()
	<-d.Done()
	router.Terminate()
	<-router.Done()
	for _, status := range []string{"200", "400", "403", "502"} {
		if !said[status] {
			t.Errorf("no answer was %s: %v", status, said)
		}
	}
	for _, proc := range []*Proc{p, d, router} {
		if !strings.Contains(proc.Log(), `"msg":"request"`) {
			t.Errorf("%s has logged no request", proc.Role)
		}
		for line := range strings.Lines(proc.Log()) {
			for _, secret := range []string{token, wrong, "zebras", chat.Choices[0].Message.Content} {
				if strings.Contains(line, secret) {
					t.Errorf("%s logs %q: %s", proc.Role, secret, line)
				}
			}
		}
	}
}

// secretBodies have their prompt where it belongs, and where it does not.
var secretBodies = []string{
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","max_tokens":3}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","stream":true,"max_tokens":3,"sampling_params":{"max_new_tokens":3}}`,
	`{"prompt":["PROMPT","PROMPT"],"text":["PROMPT","PROMPT"],"max_tokens":3,"n":2}`,
	`{"messages":"PROMPT","prompt":{"PROMPT":"PROMPT"},"text":{"PROMPT":1}}`,
	`{"messages":[{"role":"PROMPT","content":"PROMPT"}],"prompt":[1,"PROMPT"],"text":[["PROMPT"]]}`,
	`{"messages":[{"role":"user","content":"PROMPT"},{"role":"user","content":[{"type":"PROMPT","PROMPT":"PROMPT"}]}],"prompt":["PROMPT",{}],"text":["PROMPT",5]}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","max_tokens":"PROMPT","sampling_params":"PROMPT"}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","stop":{"PROMPT":"PROMPT"},"sampling_params":{"stop":{"PROMPT":"PROMPT"}}}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","stop":[5,"PROMPT"],"logit_bias":{"PROMPT":1}}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","PROMPT":"PROMPT","tools":["PROMPT"],"suffix":"PROMPT","regex":"PROMPT"}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","max_tokens":100000,"sampling_params":{"max_new_tokens":100000}}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT","n":1,"n":2}`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT"`,
	`{"messages":[{"role":"user","content":"PROMPT"}],"prompt":"PROMPT","text":"PROMPT" PROMPT}`,
	`PROMPT`, `"PROMPT"`, `["PROMPT"]`,
}
