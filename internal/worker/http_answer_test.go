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

// A stream says once why an answer ended, in its last event, also where a stop
// string ended it with the token before.
func TestStreamEndsOnce(t *testing.T) {
	for _, deltas := range []bool{false, true} {
		s := &sglang{req: &api.Request{Kind: api.Generate, ItemNum: 1}, ids: []string{"r"}, deltas: deltas, text: byteText{size: 256}}
		c := &choice{job: &Job{}, sampling: &api.Sampling{Logprobs: -1}, stops: []string{"b"}, outs: []engine.Output{{Token: 'a'}, {Token: 'b'}}}
		delta, _ := c.release("b", 2)
		var ends []any
		for _, v := range append([]any{s.event(c, delta)}, s.last(c, "")...) {
			ends = append(ends, v.(*sglangBody).Meta.Finish)
		}
		if len(ends) != 2 || ends[0] != nil || ends[1] != (sglangFinish{Type: EndStop, Matched: "b"}) {
			t.Errorf("deltas %v: %v", deltas, ends)
		}
	}
}
