package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/metronome-serve/metronome/internal/model/modeltest"
)

// promptIDs are n token ids of a fixed sequence that avoids control tokens.
func promptIDs(n, vocab, seed int) []int32 {
	ids, x := make([]int32, n), uint32(seed)*2654435761+1
	for i := range ids {
		x = x*1664525 + 1013904223
		ids[i] = int32(20 + int(x>>8)%(vocab-20))
	}
	return ids
}

// tokenCase is one request whose answer must not depend on where it was computed.
type tokenCase struct {
	name string
	body map[string]any
}

func tokenCases(lengths []int, vocab, tokens int) []tokenCase {
	var list []tokenCase
	for i, n := range lengths {
		for _, seeded := range []bool{false, true} {
			params := map[string]any{"max_new_tokens": tokens, "temperature": 0, "ignore_eos": true}
			name := fmt.Sprintf("%d tokens greedy", n)
			if seeded {
				params = map[string]any{"max_new_tokens": tokens, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 41 + i, "ignore_eos": true}
				name = fmt.Sprintf("%d tokens seeded", n)
			}
			list = append(list, tokenCase{name, map[string]any{"input_ids": promptIDs(n, vocab, i), "sampling_params": params, "return_logprob": true, "top_logprobs_num": 3}})
		}
	}
	return list
}

// ask sends one case and checks that the answer is whole.
func ask(ctx context.Context, base string, c tokenCase) (*Answer, error) {
	a, err := Generate(ctx, base, c.body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.name, err)
	}
	if a.Error != nil || a.Status != 200 {
		return nil, fmt.Errorf("%s: status %d: %v", c.name, a.Status, a.Error)
	}
	return a, nil
}

// differ says how two answers differ in what must be equal bit for bit.
func differ(got, want *Answer) string {
	if !slices.Equal(got.IDs, want.IDs) {
		return fmt.Sprintf("ids %v, want %v", got.IDs, want.IDs)
	}
	if got.Text != want.Text || got.Finish != want.Finish {
		return fmt.Sprintf("text %q (%s), want %q (%s)", got.Text, got.Finish, want.Text, want.Finish)
	}
	equal := func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }
	if !slices.EqualFunc(got.Logprobs, want.Logprobs, equal) || !slices.EqualFunc(got.Top, want.Top, equal) {
		return fmt.Sprintf("logprobs %s %s, want %s %s", got.Logprobs, got.Top, want.Logprobs, want.Top)
	}
	return ""
}

// reference asks serve for every case, one after another.
func reference(t *testing.T, model string, cases []tokenCase, flags ...string) map[string]*Answer {
	t.Helper()
	r := newRig(t)
	s := r.start(t, append([]string{"serve", model, "--listen=127.0.0.1:0"}, flags...)...)
	want := map[string]*Answer{}
	for _, c := range cases {
		a, err := ask(within(t, 3*time.Minute), s.HTTP, c)
		if err != nil {
			t.Fatal(err)
		}
		if len(a.Logprobs) != len(a.IDs) || len(a.IDs) == 0 {
			t.Fatalf("%s: %d log-probabilities for %d tokens", c.name, len(a.Logprobs), len(a.IDs))
		}
		want[c.name] = a
	}
	r.Close()
	return want
}

// judge asks for the cases one after another, again when there is a prefix
// cache, which is warm then, and then n at once.
func judge(t *testing.T, base string, cases []tokenCase, want map[string]*Answer, cache bool, n int) {
	t.Helper()
	rounds := 1
	if cache {
		rounds = 2
	}
	for range rounds {
		for _, c := range cases {
			got, err := ask(within(t, 3*time.Minute), base, c)
			if err != nil {
				t.Error(err)
			} else if d := differ(got, want[c.name]); d != "" {
				t.Errorf("%s alone: %s", c.name, d)
			}
		}
	}
	together(t, base, cases, want, n)
}

// together asks n at once.
func together(t *testing.T, base string, cases []tokenCase, want map[string]*Answer, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			c := cases[i%len(cases)]
			got, err := ask(within(t, 5*time.Minute), base, c)
			if err != nil {
				t.Error(err)
			} else if d := differ(got, want[c.name]); d != "" {
				t.Errorf("%s among %d: %s", c.name, n, d)
			}
		})
	}
	wg.Wait()
}

// tinySetting is one fleet of TestRightTokensTiny.
type tinySetting struct {
	dtype   string
	chunk   int
	tp      [2]int // of prefill and of decode
	cache   bool
	threads int
}

// Right tokens: ids, text and log-probabilities through router, prefill and
// decode equal serve's, bit for bit, over the full product of settings: prefix
// cache cold, warm and off, alone and among seven others, and after preemption
// and recompute (decode's pool holds the longest request, and no three of the crowd).
// KV in q8_0 differs in how a row is rounded, so each value of each setting is enough.
func TestRightTokensTiny(t *testing.T) {
	t.Parallel()                         // beside others that measure no time
	lengths := []int{1, 15, 16, 17, 800} // one page is 16; 800 is more than three chunks of 256
	cases := tokenCases(lengths, 2048, 24)
	crowd := tokenCases([]int{33, 61}, 2048, 300) // three at once outgrow the pool
	settings := []tinySetting{{"q8_0", 16, [2]int{2, 1}, true, 2}, {"q8_0", 256, [2]int{1, 2}, false, 1}}
	for _, dtype := range []string{"f16", "f32"} {
		for _, chunk := range []int{16, 256} {
			for _, tp := range [][2]int{{1, 1}, {2, 1}, {1, 2}, {4, 2}} {
				for _, cache := range []bool{true, false} {
					for _, threads := range []int{1, 2} {
						settings = append(settings, tinySetting{dtype, chunk, tp, cache, threads})
					}
				}
			}
		}
	}
	want := map[string]map[string]*Answer{}
	for _, dtype := range []string{"f16", "f32", "q8_0"} {
		want[dtype] = reference(t, "tiny", append(crowd, cases...), "--kv-dtype="+dtype)
	}
	if name := cases[4].name; differ(want["q8_0"][name], want["f16"][name]) == "" {
		t.Error("q8_0 gives f16's log-probabilities: the flag does nothing")
	}
	for _, s := range settings {
		t.Run(fmt.Sprintf("kv %s chunk %d tp %d→%d cache %v threads %d", s.dtype, s.chunk, s.tp[0], s.tp[1], s.cache, s.threads), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			f := r.startPair(t, "tiny", []string{"--tp=" + strconv.Itoa(s.tp[0])}, []string{"--tp=" + strconv.Itoa(s.tp[1]), "--kv-pages=60", "--reserved-tokens=1"},
				[]string{"--kv-dtype=" + s.dtype, "--chunk=" + strconv.Itoa(s.chunk), "--prefix-cache=" + strconv.FormatBool(s.cache), "--threads=" + strconv.Itoa(s.threads)})
			// The long prompt takes its time: greedy with one thread, seeded with two.
			some := slices.Delete(slices.Clone(cases), len(cases)-s.threads, len(cases)-s.threads+1)
			judge(t, f.router.HTTP, some, want[s.dtype], s.cache, 8)
			preempt(t, f, crowd, want[s.dtype], 6)
		})
	}
}

// preempt asks for n at once until decode has preempted some: who meets whom
// is a matter of time, and a test that says it preempts must have done so.
func preempt(t *testing.T, f pair, cases []tokenCase, want map[string]*Answer, n int) {
	t.Helper()
	for range 10 {
		together(t, f.router.HTTP, cases, want, n)
		m, err := Metrics(t.Context(), f.decode.HTTP)
		if err != nil {
			t.Fatal(err)
		}
		if m["metronome_preemptions_total"] > 0 {
			return
		}
	}
	t.Error("nothing was preempted: the test does not show what it says")
}

// The same with a real model: each value of each setting at least once, the
// long prompt in few runs, since a CPU needs its time for it.
func TestRightTokensSmolLM2(t *testing.T) {
	t.Parallel() // beside others that measure no time
	path := modeltest.SmolLM2(t)
	short := tokenCases([]int{1, 15, 16, 17}, 49152, 8)
	long := tokenCases([]int{1600}, 49152, 4) // more than three chunks of 512
	crowd := tokenCases([]int{30}, 49152, 20) // two at once need 8 pages, and 4 until both are there
	for _, run := range []struct {
		dtype   string
		tp      [2]int
		cache   bool
		threads int
		pages   int // of decode; 0: plenty
		cases   []tokenCase
	}{
		{"f16", [2]int{1, 1}, true, 2, 0, append(append([]tokenCase{}, short...), long[0])},
		{"f16", [2]int{3, 1}, true, 1, 0, short},
		{"f16", [2]int{1, 3}, false, 2, 0, short},
		{"f32", [2]int{3, 1}, false, 2, 5, crowd},
		{"f32", [2]int{1, 3}, true, 1, 0, short},
	} {
		t.Run(fmt.Sprintf("kv %s tp %d→%d cache %v threads %d", run.dtype, run.tp[0], run.tp[1], run.cache, run.threads), func(t *testing.T) {
			want := reference(t, path, run.cases, "--kv-dtype="+run.dtype)
			r := newRig(t)
			if run.tp == [2]int{1, 1} { // the whole fleet as people start it
				judge(t, r.up(t, path, "--kv-dtype="+run.dtype, "--kv-memory=256MiB").Router, run.cases, want, true, 8)
				return
			}
			f := r.startPair(t, path, []string{"--tp=" + strconv.Itoa(run.tp[0])}, []string{"--tp=" + strconv.Itoa(run.tp[1]), "--kv-pages=" + strconv.Itoa(run.pages), "--reserved-tokens=1"},
				[]string{"--kv-dtype=" + run.dtype, "--prefix-cache=" + strconv.FormatBool(run.cache), "--threads=" + strconv.Itoa(run.threads), "--kv-memory=256MiB"})
			if run.pages > 0 {
				preempt(t, f, run.cases, want, 2)
				return
			}
			judge(t, f.router.HTTP, run.cases, want, run.cache, 8)
		})
	}
}

// Every weight format, each with one architecture and one KV dtype in turn.
func TestRightTokensFormats(t *testing.T) {
	t.Parallel() // beside others that measure no time
	byFormat := map[string][]modeltest.Model{}
	for _, m := range modeltest.Models() {
		byFormat[m.Format] = append(byFormat[m.Format], m)
	}
	if len(byFormat) != 11 {
		t.Errorf("%d formats, want 11", len(byFormat))
	}
	for i, format := range slices.Sorted(maps.Keys(byFormat)) {
		m, dtype := byFormat[format][i%len(byFormat[format])], []string{"q8_0", "f16", "f32"}[i/3%3]
		t.Run(m.Name+" kv "+dtype, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), m.Name+".gguf")
			if err := os.WriteFile(path, m.GGUF(), 0o600); err != nil {
				t.Fatal(err)
			}
			cases := tokenCases([]int{1, 40}, m.Vocab(), 12)
			want := reference(t, path, cases, "--kv-dtype="+dtype)
			f := newRig(t).startPair(t, path, nil, nil, []string{"--kv-dtype=" + dtype, "--chunk=16"})
			judge(t, f.router.HTTP, cases, want, false, 6)
		})
	}
}

// The reference mode holds the same promise, over up, which passes the flag on.
func TestRightTokensPrecisionF32(t *testing.T) {
	t.Parallel() // beside others that measure no time
	cases := tokenCases([]int{1, 17, 40}, 2048, 16)
	want := reference(t, "tiny", cases, "--precision=f32")
	native := reference(t, "tiny", cases)
	if name := cases[4].name; differ(want[name], native[name]) == "" {
		t.Error("f32 gives native's log-probabilities: the flag does nothing")
	}
	judge(t, newRig(t).up(t, "tiny", "--precision=f32").Router, cases, want, true, 4)
}

// A TP that does not divide the KV heads is a wrong flag.
func TestTPMustDivideHeads(t *testing.T) {
	r := newRig(t)
	for _, args := range [][]string{
		{"decode", "tiny", "--listen=127.0.0.1:0", "--tp=3"},
		{"prefill", "tiny", "--listen=127.0.0.1:0", "--bootstrap-listen=127.0.0.1:0", "--tp=8"},
	} {
		code, said, err := r.Fail(within(t, 20*time.Second), args...)
		if err != nil || code != 2 || bytes.Count([]byte(said), []byte("\n")) != 1 {
			t.Errorf("%v: exit %d, %q, %v; want one line and exit 2", args, code, said, err)
		}
	}
}
