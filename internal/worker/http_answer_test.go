package worker

import (
	"encoding/json"
	"testing"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// OpenAI's token with log-probabilities always has its list of the most probable
// ones, an empty one where none was asked for; those in the list have none.
func TestChatLogprobsHaveTheirLists(t *testing.T) {
	for top, want := range map[int]string{
		0: `{"content":[{"token":"a","logprob":-1,"bytes":[97],"top_logprobs":[]}]}`,
		1: `{"content":[{"token":"a","logprob":-1,"bytes":[97],"top_logprobs":[{"token":"b","logprob":-0.5,"bytes":[98]}]}]}`,
	} {
		o := &openAI{req: &api.Request{Kind: api.Chat}, text: byteText{size: 256}}
		out := engine.Output{Token: 'a', Logprob: -1, Top: []engine.TokenLogprob{{ID: 'b', Logprob: -0.5}}[:top]}
		got, err := json.Marshal(o.logprobs(&choice{sampling: &api.Sampling{Logprobs: top}, outs: []engine.Output{out}}, 0))
		if err != nil || string(got) != want {
			t.Errorf("%d: %s, %v\nwant %s", top, got, err, want)
		}
	}
}
