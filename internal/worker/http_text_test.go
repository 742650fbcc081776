package worker

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRefusedTemplate: a model whose chat template is not known in all its
// parts, or that has none, is served; only chat says why it cannot be, with
// line and construct.
func TestRefusedTemplate(t *testing.T) {
	tiny, err := os.ReadFile("../model/tiny-q8_0.gguf")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ old, new, want string }{
		"unknown statement": {"{% for message in messages %}", "\n{% call message() %}        ", "line 2: the statement 'call' is not supported"},
		"no template":       {"tokenizer.chat_template", "tokenizer.no__template_", "the model has no chat template"},
	} {
		t.Run(name, func(t *testing.T) {
			file := bytes.Replace(tiny, []byte(c.old), []byte(c.new), 1)
			if len(file) != len(tiny) || bytes.Equal(file, tiny) {
				t.Fatalf("%q does not replace %q", c.new, c.old)
			}
			path := filepath.Join(t.TempDir(), "m.gguf")
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			w := runWorker(t, Config{Role: Serve, Model: path})
			post := func(endpoint, body string) (int, string) {
				resp, err := http.Post(w.readyLine().HTTP+endpoint, "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				out, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				return resp.StatusCode, string(out)
			}
			status, out := post("/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}`)
			var body struct {
				Error struct{ Code, Message string }
			}
			if err := json.Unmarshal([]byte(out), &body); err != nil || status != 400 || body.Error.Code != "unsupported" ||
				!strings.Contains(body.Error.Message, c.want) || !strings.Contains(body.Error.Message, "/v1/completions and /generate work") {
				t.Errorf("chat: %d %s, want %s", status, out, c.want)
			}
			if status, out := post("/v1/completions", `{"prompt":"The king","max_tokens":2}`); status != 200 {
				t.Errorf("completions: %d %s", status, out)
			}
			if status, out := post("/generate", `{"text":"The king","sampling_params":{"max_new_tokens":2}}`); status != 200 {
				t.Errorf("generate: %d %s", status, out)
			}
		})
	}
}
