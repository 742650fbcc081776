package chaos

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// A real model, asked through the router in exact arithmetic, says what another
// engine's record says it says (testdata/smollm2).
func TestCapitalOfFrance(t *testing.T) {
	t.Parallel() // beside others that measure no time
	up := newRig(t).up(t, modeltest.SmolLM2(t), "--precision=f32", "--kv-memory=256MiB")
	status, _, b, err := Post(within(t, 2*time.Minute), up.Router+"/v1/chat/completions", map[string]any{
		"messages": []map[string]string{{"role": "user", "content": "What is the capital of France?"}}, "temperature": 0, "max_tokens": 20,
	})
	if err != nil || status != 200 {
		t.Fatalf("status %d, %v: %s", status, err, b)
	}
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.Unmarshal(b, &answer); err != nil {
		t.Fatal(err)
	}
	if len(answer.Choices) != 1 || answer.Choices[0].Message.Content != "The capital of France is Paris." {
		t.Errorf("the answer is %s", b)
	}
}
