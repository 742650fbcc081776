package chaos

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// feature is one request of any of the three paths. The whole answer of router,
// prefill and decode must equal serve's, byte by byte.
type feature struct {
	name, path string
	body       map[string]any
}

func completion(name string, body map[string]any) feature {
	return feature{"completions " + name, "/v1/completions", body}
}
func chat(name string, body map[string]any) feature {
	body["messages"] = []map[string]string{{"role": "system", "content": "You count."}, {"role": "user", "content": "One, two"}}
	return feature{"chat " + name, "/v1/chat/completions", body}
}
func generate(name string, body map[string]any) feature {
	return feature{"generate " + name, "/generate", body}
}

type object = map[string]any

// features are all ways of drawing, ending and listing tokens, alone and together.
func features(base *Answer) []feature {
	const text = "The quick brown fox"
	params := func(kv ...any) object {
		p := object{"max_new_tokens": 12, "temperature": 0, "ignore_eos": true}
		for i := 0; i < len(kv); i += 2 {
			p[kv[i].(string)] = kv[i+1]
		}
		return p
	}
	list := []feature{
		completion("echo and logprobs", object{"prompt": text, "max_tokens": 5, "temperature": 0, "echo": true, "logprobs": 3}),
		completion("echo without output", object{"prompt": text, "max_tokens": 0, "temperature": 0, "echo": true, "logprobs": 1}),
		completion("echo alone", object{"prompt": text, "max_tokens": 5, "temperature": 0, "echo": true}),
		completion("echo of ids", object{"prompt": promptIDs(70, 2048, 3), "max_tokens": 1, "temperature": 0, "echo": true, "logprobs": 1, "seed": 1234}),
		completion("echo of a batch with choices", object{"prompt": []string{text, "a", "Ünïcode 🦊 text"}, "max_tokens": 6, "temperature": 0.8, "seed": 5, "n": 2, "echo": true, "logprobs": 2}),
		completion("no output", object{"prompt": text, "max_tokens": 0}),
		completion("a batch of ids", object{"prompt": [][]int32{promptIDs(3, 2048, 1), promptIDs(40, 2048, 2), promptIDs(17, 2048, 3)}, "max_tokens": 7, "temperature": 1, "seed": 6, "n": 2}),
		completion("logprobs 0", object{"prompt": text, "max_tokens": 5, "temperature": 0, "logprobs": 0}),
		completion("usage", object{"prompt": text, "max_tokens": 5, "temperature": 0, "stream_options": object{"include_usage": true}, "n": 2, "seed": 3}),
		chat("logprobs", object{"max_tokens": 6, "temperature": 0, "logprobs": true, "top_logprobs": 5}),
		chat("choices", object{"max_completion_tokens": 6, "temperature": 1.3, "seed": -7, "n": 3, "logprobs": true, "stream_options": object{"include_usage": true}}),
		chat("no output", object{"max_tokens": 0, "logprobs": true}),
		chat("a number beyond floats for a seed", object{"max_tokens": 6, "temperature": 1, "seed": int64(9007199254740993)}),
		chat("as many as fit", object{"temperature": 0, "stop": ",", "min_p": 0.1}),
		generate("prompt logprobs of a batch", object{"text": []string{text, "Hello there"}, "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 5, "sampling_params": params("max_new_tokens", 8)}),
		generate("prompt logprobs, one token", object{"text": text, "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 5, "sampling_params": params("max_new_tokens", 1)}),
		generate("prompt logprobs, no token", object{"text": text, "return_logprob": true, "logprob_start_len": 2, "sampling_params": params("max_new_tokens", 0)}),
		generate("one prompt token", object{"input_ids": []int{7}, "return_logprob": true, "logprob_start_len": 0, "sampling_params": params()}),
		generate("parameters for each prompt", object{"text": []string{text, "Hello", "x"}, "return_logprob": []bool{true, false, true}, "logprob_start_len": []int{0, 0, -1}, "top_logprobs_num": []int{0, 0, 2},
			"sampling_params": []object{params(), params("temperature", 1, "seed", 4, "max_new_tokens", 3), params("stop", "e")}}),
		generate("choices", object{"text": text, "sampling_params": params("n", 3, "temperature", 1, "seed", 8), "return_logprob": true}),
		generate("defaults", object{"text": text, "sampling_params": object{"temperature": 0}}),
	}
	for _, start := range []int{0, 1, 15, 16, 17, 31, 32, 63, 64, 99} {
		list = append(list, generate(fmt.Sprintf("prompt logprobs from %d", start), object{"input_ids": promptIDs(100, 2048, 9), "return_logprob": true, "logprob_start_len": start, "top_logprobs_num": start % 3, "sampling_params": params("max_new_tokens", 2)}))
	}
	for i, p := range []object{
		params("temperature", 1, "seed", 1), params("temperature", 0.7, "top_k", 5, "seed", 2), params("temperature", 1.5, "top_p", 0.8, "seed", 3),
		params("temperature", 1.5, "min_p", 0.05, "seed", 4), params("temperature", 2, "top_k", 40, "top_p", 0.9, "min_p", 0.01, "seed", 5), params("temperature", 1e-6, "seed", 6), params("temperature", 100, "seed", 7),
		params("repetition_penalty", 1.3), params("presence_penalty", 1.5), params("frequency_penalty", 0.9), params("frequency_penalty", -2, "temperature", 1, "seed", 8),
		params("repetition_penalty", 0.7, "presence_penalty", -1, "frequency_penalty", 0.5, "temperature", 0.9, "seed", 9, "n", 2),
		params("logit_bias", object{fmt.Sprint(base.IDs[0]): -100, fmt.Sprint(base.IDs[2]): 5}), params("logit_bias", object{"99": 100}, "max_new_tokens", 4),
		params("top_k", 1, "temperature", 1, "seed", 10), params("n", 4, "temperature", 1, "top_p", 0.5, "seed", 11),
	} {
		list = append(list, generate(fmt.Sprintf("sampling %d", i), object{"text": text, "sampling_params": p, "return_logprob": true, "top_logprobs_num": 20}))
	}
	return append(list, stops(base, params)...)
}

// stops end the answer of the base request at each kind of place. base is its
// greedy answer; its first token comes from the prefill.
func stops(base *Answer, params func(kv ...any) object) (list []feature) {
	const text = "The quick brown fox"
	t := base.Text
	runes := []rune(t)
	for name, stop := range map[string]any{
		"in the first token": string(runes[0]), "from the first token on": string(runes[:min(9, len(runes))]), "in the middle": string(runes[len(runes)/2 : len(runes)/2+2]),
		"at the end": string(runes[len(runes)-1:]), "overlapping": []string{t[3:9], t[3:6], t[4:7]}, "of which most never come": []string{"zzz", t[len(t)-4:], "\x00", "🦊"},
		"that almost comes": t[2:8] + "\x01", "none": []string{},
	} {
		for _, keep := range []bool{false, true} {
			list = append(list, generate(fmt.Sprintf("stop %s, kept %v", name, keep), object{"text": text, "sampling_params": params("stop", stop, "no_stop_trim", keep), "return_logprob": true}))
		}
		list = append(list, completion("stop "+name, object{"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "stop": stop, "logprobs": 1, "stream_options": object{"include_usage": true}}))
	}
	for name, p := range map[string]object{
		"the first token": params("stop_token_ids", []int32{base.IDs[0]}), "a later token": params("stop_token_ids", []int32{base.IDs[4], 1}),
		"the end token at once": {"max_new_tokens": 12, "temperature": 0, "logit_bias": object{"2": 100}}, "the end token, ignored": {"max_new_tokens": 5, "temperature": 0, "logit_bias": object{"2": 100}, "ignore_eos": true},
	} {
		list = append(list, generate("stop at "+name, object{"text": text, "sampling_params": p, "return_logprob": true}))
	}
	return list
}

var varying = regexp.MustCompile(`"(id|rid)":"[^"]*",?|"created":\d+,?|"cached_tokens":\d+,?`)
var indexed = regexp.MustCompile(`"index":(\d+)`)

// said is one answer without what may differ: a body, or the events of each
// choice in order, however they came mixed.
func said(t *testing.T, base string, f feature, stream bool) (map[string]string, error) {
	t.Helper()
	body := object{"stream": stream}
	for k, v := range f.body {
		body[k] = v
	}
	status, _, data, err := Post(within(t, time.Minute), base+f.path, body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	if status != 200 {
		return nil, fmt.Errorf("%s: status %d: %s", f.name, status, data)
	}
	data = varying.ReplaceAll(data, nil)
	if !stream {
		return map[string]string{"": string(data)}, nil
	}
	if !bytes.HasSuffix(data, []byte("data: [DONE]\n\n")) {
		return nil, fmt.Errorf("%s: the stream does not end with [DONE]: …%s", f.name, data[max(0, len(data)-300):])
	}
	out := map[string]string{}
	for event := range strings.SplitSeq(string(data), "\n\n") {
		index := ""
		if m := indexed.FindStringSubmatch(event); m != nil {
			index = m[1]
		}
		out[index] += event + "\n"
	}
	return out, nil
}

// The answer to every feature, streamed and not, is the same through router,
// prefill and decode as from serve, in each arithmetic.
func TestF63RightTokensFeatures(t *testing.T) {
	t.Parallel() // beside others that measure no time
	for name, s := range map[string]struct{ both, prefill, decode []string }{
		"defaults":        {},
		"kv f32, chunks":  {both: []string{"--kv-dtype=f32", "--chunk=16"}, prefill: []string{"--tp=2"}},
		"kv q8_0":         {both: []string{"--kv-dtype=q8_0", "--threads=1"}, decode: []string{"--tp=2"}},
		"reference, cold": {both: []string{"--precision=f32", "--prefix-cache=false"}, decode: []string{"--tp=4"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			serve := r.start(t, append([]string{"serve", "tiny", "--listen=127.0.0.1:0"}, s.both...)...)
			f := r.startPair(t, "tiny", s.prefill, s.decode, append([]string{"--kv-pages=600"}, s.both...))
			base, err := ask(within(t, time.Minute), serve.HTTP, tokenCase{"base", object{"text": "The quick brown fox", "sampling_params": object{"max_new_tokens": 12, "temperature": 0, "ignore_eos": true}}})
			if err != nil {
				t.Fatal(err)
			}
			compareFeatures(t, features(base), serve.HTTP, f.router.HTTP)
		})
	}
}

// difference shows where two texts part.
func difference(got, want string) string {
	n := 0
	for n < min(len(got), len(want)) && got[n] == want[n] {
		n++
	}
	part := func(s string) string { return s[max(0, n-100):min(len(s), n+200)] }
	return fmt.Sprintf("at byte %d got …%s…\nwant …%s…", n, part(got), part(want))
}

// compareFeatures asks both for each feature, cold, again, and some at once.
func compareFeatures(t *testing.T, list []feature, reference, base string) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 4)
	for _, f := range list {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			for _, stream := range []bool{false, true} {
				want, err := said(t, reference, f, stream)
				if err != nil {
					t.Error(err)
					continue
				}
				for range 2 {
					got, err := said(t, base, f, stream)
					if err != nil {
						t.Error(err)
						continue
					}
					for index := range want {
						if got[index] != want[index] || len(got) != len(want) {
							t.Errorf("%s (stream %v) choice %q differs:\n%s", f.name, stream, index, difference(got[index], want[index]))
						}
					}
				}
			}
		})
	}
	wg.Wait()
}
