package chaos

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// seen is what a client saw of one request, sent whole and as a stream.
type seen struct {
	Whole, Text, Finish string
	Events              int
	Order               []string // what came, one after another: role, text, finish, usage, done
	Usage               struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
	Browser string
	Reads   int
}

const clientBody = `{"model":"tiny","messages":[{"role":"user","content":"What is a bridge?"}],"temperature":0}`

// plainCurl is the answer that all clients must have seen: curl's, whole.
func plainCurl(t *testing.T, base string) (text, finish string) {
	t.Helper()
	var v struct {
		Choices []struct {
			Message struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
	}
	if out := curl(t, base, clientBody); json.Unmarshal(out, &v) != nil || len(v.Choices) != 1 || v.Choices[0].Message.Content == "" {
		t.Fatalf("curl: %s", out)
	}
	return v.Choices[0].Message.Content, v.Choices[0].Finish
}

func curl(t *testing.T, base, body string) []byte {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("there is no curl: make deps installs it")
	}
	return runClient(t, "", "curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer", "--max-time", "60", "--json", body, base+"/v1/chat/completions")
}

// runClient runs a client in a folder and gives its output.
func runClient(t *testing.T, dir, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(within(t, 2*time.Minute), name, args...)
	var errs bytes.Buffer
	cmd.Dir, cmd.Stderr = dir, &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, errs.Bytes())
	}
	return out
}

// check holds what a client saw against curl's whole answer.
func (s *seen) check(t *testing.T, base string) {
	t.Helper()
	text, finish := plainCurl(t, base)
	if s.Whole != text || s.Text != text || s.Finish != finish {
		t.Errorf("whole %q, streamed %q, %s; curl has %q, %s", s.Whole, s.Text, s.Finish, text, finish)
	}
	if want := []string{"role", "text", "finish", "usage", "done"}; !slices.Equal(s.Order, want) {
		t.Errorf("came in the order %v, want %v", s.Order, want)
	}
	if s.Usage.Prompt == 0 || s.Events != s.Usage.Completion+1 { // one event a token, and the role with the first or the last alone
		t.Errorf("%d events, usage %+v", s.Events, s.Usage)
	}
}

func decodeSeen(t *testing.T, out []byte) *seen {
	t.Helper()
	s := &seen{}
	if err := json.Unmarshal(out, s); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return s
}

// nodeDir is a folder beside which Node finds the openai client, or the reason
// to skip.
func nodeDir(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("node"); err != nil {
		t.Skip("there is no node")
	}
	dir := os.Getenv("METRONOME_NODE")
	if dir == "" {
		t.Skip("METRONOME_NODE is not set: make test sets it to a folder with the openai client for Node")
	}
	return dir
}

// The clients that people use see what they should: the same text whole and
// streamed, in the usual order, with counts that add up.
func TestRealClients(t *testing.T) {
	r := newRig(t)
	p := r.up(t)
	if p.Router == "" || len(p.Prefill) != 1 || len(p.Decode) != 1 || p.Prefill[0].PID == 0 || p.Decode[0].PID == 0 || p.Prefill[0].Bootstrap == "" {
		t.Fatalf("ready line: %+v", p)
	}
	t.Run("openai for Python", func(t *testing.T) {
		if out := runClient(t, "", venv(t), "testdata/openai_client.py", p.Router); !bytes.HasPrefix(out, []byte("ok 1 ")) {
			t.Fatalf("%s", out)
		}
	})
	t.Run("openai for Node", func(t *testing.T) {
		script, err := filepath.Abs("testdata/clients/openai.mjs")
		if err != nil {
			t.Fatal(err)
		}
		decodeSeen(t, runClient(t, nodeDir(t), "node", script, p.Router, clientBody)).check(t, p.Router)
	})
	t.Run("curl", func(t *testing.T) {
		out := curl(t, p.Router, strings.Replace(clientBody, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1))
		curlSeen(t, p.Router, out).check(t, p.Router)
	})
}

// curlSeen reads what curl printed of a stream, strictly: data lines, each
// followed by an empty one.
func curlSeen(t *testing.T, base string, out []byte) *seen {
	t.Helper()
	s := &seen{}
	s.Whole, _ = plainCurl(t, base)
	note := func(what string) {
		if len(s.Order) == 0 || s.Order[len(s.Order)-1] != what {
			s.Order = append(s.Order, what)
		}
	}
	text, ended := bytes.CutSuffix(out, []byte("\n\n"))
	if !ended {
		t.Fatalf("the stream does not end with an empty line: %q", out)
	}
	for event := range bytes.SplitSeq(text, []byte("\n\n")) {
		data, ok := bytes.CutPrefix(event, []byte("data: "))
		if !ok || bytes.ContainsAny(data, "\r\n") {
			t.Fatalf("no event of one data line: %q", event)
		}
		if string(data) == "[DONE]" {
			note("done")
			continue
		}
		var v struct {
			Choices []struct {
				Delta  struct{ Role, Content string }
				Finish string `json:"finish_reason"`
			}
			Usage *struct{}
		}
		if err := json.Unmarshal(data, &v); err != nil {
			t.Fatalf("%v: %q", err, data)
		}
		for _, c := range v.Choices {
			s.Events++
			if c.Delta.Role != "" {
				note("role")
			}
			if c.Delta.Content != "" {
				note("text")
			}
			s.Text += c.Delta.Content
			if c.Finish != "" {
				note("finish")
				s.Finish = c.Finish
			}
		}
		if v.Usage != nil {
			note("usage")
			json.Unmarshal(data, s)
		}
	}
	return s
}
