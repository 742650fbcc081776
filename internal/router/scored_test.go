package router

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
)

const scoredAsk = `{"text":"hi","return_logprob":true,"logprob_start_len":0}`

// Through foreign workers, which leave the prompt's log-probabilities to the
// router: the prefill's part once, in front of decode's, streamed and not.
func TestF63PromptLogprobsOfForeignWorkers(t *testing.T) {
	const lists = `"input_token_logprobs":[[null,1,"a"],[-1.5,2,null]],"input_top_logprobs":[null,[[-0.5,3,"c"]]]`
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hears("application/json", false, `{"text":"x","meta_info":{"id":"p",`, lists, `,"output_token_logprobs":[[-2,4,"d"]]}}`)
		f.d[0].serve = answers(`{"text":"xy","meta_info":{"input_token_logprobs":[],"input_top_logprobs":[],"output_token_logprobs":[[-2,4,"d"],[-3,5,"e"]]}}`)
		want := `{"text":"xy","meta_info":{` + lists + `,"output_token_logprobs":[[-2,4,"d"],[-3,5,"e"]]}}`
		if got := f.post("/generate", scoredAsk); got.body != want || got.header.Get("Content-Length") != fmt.Sprint(len(want)) {
			t.Errorf("%+v", got)
		}
		event := func(text, lists string) string {
			return `data: {"text":"` + text + `","meta_info":{"id":"d",` + lists + "}}\n\n"
		}
		f.p[0].serve = hears("text/event-stream", false, event("x", lists), "data: [DONE]\n\n")
		none := `"input_token_logprobs":[],"input_top_logprobs":[]`
		f.d[0].serve = stream(time.Millisecond, ": a comment\n\n", event("x", none), event("xy", none), "data: [DONE]\n\n")
		got := f.post("/generate", `{"text":"hi","return_logprob":true,"stream":true}`)
		if want := ": a comment\n\n" + event("x", lists) + event("xy", lists) + "data: [DONE]\n\n"; got.body != want {
			t.Errorf("%+v\nwant %s", got, want)
		}
		f.p[0].serve = hears("application/json", false, `{"choices":[{"index":0,"logprobs":{"tokens":["a","b","c"],"token_logprobs":[null,-1,-2],"top_logprobs":[null,null,null],"text_offset":[-1,-1,-1]}}]}`)
		f.d[0].serve = answers(`{"choices":[{"index":0,"logprobs":{"tokens":["c","d"],"token_logprobs":[-2,-3],"top_logprobs":[null,null],"text_offset":[-1,-1]}}]}`)
		want = `{"choices":[{"index":0,"logprobs":{"tokens":["a","b","c","d"],"token_logprobs":[null,-1,-2,-3],"top_logprobs":[null,null,null,null],"text_offset":[-1,-1,-1,-1]}}]}`
		if got := f.post("/v1/completions", `{"prompt":"ab","echo":true,"logprobs":0}`); got.body != want {
			t.Errorf("%+v", got)
		}
	})
}

// A prefill that fails before all of its answer is there has failed, although
// decode has what it needs: another pair is tried, and none is left waiting.
func TestPrefillFailsWithThePromptsLogprobs(t *testing.T) {
	inFleet(t, 2, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hears("application/json", true, `{"text":"x","meta_info":{"input_token`)
		f.p[1].serve = hears("application/json", false, `{"meta_info":{"input_token_logprobs":[7]}}`)
		f.d[0].serve = answers(`{"meta_info":{"input_token_logprobs":[]}}`)
		if got := f.post("/generate", scoredAsk); got.body != `{"meta_info":{"input_token_logprobs":[7]}}` || len(f.d[0].requests()) != 2 {
			t.Errorf("%+v after %d requests", got, len(f.d[0].requests()))
		}
	})
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hang // it has sent everything, and never says so
		got := f.post("/generate", scoredAsk, "X-Request-Timeout", "2s")
		if got.status != 504 || got.code(t) != "deadline_exceeded" {
			t.Errorf("%+v", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		f.do(ctx, "/generate", `{"text":"hi","return_logprob":true,"stream":true}`)
	})
}

// An event of 20 MiB takes the prompt's part; there is a limit, which is told.
func TestF53LongScoredEvents(t *testing.T) {
	inFleet(t, 1, 1, nil, func(t *testing.T, f *fleet) {
		f.p[0].serve = hears("application/json", false, `{"meta_info":{"input_token_logprobs":[7]}}`)
		one := `data: {"meta_info":{"input_token_logprobs":[]},"text":"` + strings.Repeat("x", 20<<20) + "\"}\n\n"
		f.d[0].serve = stream(0, one, "data: [DONE]\n\n")
		got := f.post("/generate", `{"text":"hi","return_logprob":true,"stream":true}`)
		if want := strings.Replace(one, "[]", "[7]", 1) + "data: [DONE]\n\n"; got.body != want {
			t.Errorf("got %d bytes, want %d", len(got.body), len(want))
		}
		f.d[0].serve = stream(0, one[:len(one)-4]+strings.Repeat("x", 20<<20)+"\"}\n\n", "data: [DONE]\n\n")
		if got := f.post("/generate", `{"text":"hi","return_logprob":true,"stream":true}`); got.code(t) != "decode_unreachable" || !strings.Contains(got.body, "longer than") {
			t.Errorf("%d %.300s", got.status, got.body)
		}
	})
}
