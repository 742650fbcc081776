package bench

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"
)

// HTTP says what of one or two servers is measured: routers, workers or serve,
// anything that answers /generate.
type HTTP struct {
	URLs     []string // the second is measured beside the first, in turn
	Token    string   // bearer token; "": none
	Prompt   int      // tokens of a prompt; no two prompts are alike
	Tokens   int      // of an answer
	Rounds   int
	Silence  time.Duration // a server from which nothing comes for so long has failed, before its first byte too; 0: 60 s
	Progress io.Writer
}

// HTTPReport is what HTTP.Run found, for each URL. A ratio is that of the first
// to the second, of each round; there is one where there are two.
type HTTPReport struct {
	URLs           []string
	Prompt, Tokens int
	Rounds         int
	TTFT, ITL      []Rate // ms; ITL is the mean gap of an answer
	TTFTRatio      *Rate
	ITLRatio       *Rate
}

// Bounds of what is asked and of what is taken.
const (
	mostPrompt  = 1 << 20
	mostAnswer  = 1 << 20
	answerWait  = 10 * time.Minute // for the whole of one
	usualWait   = 60 * time.Second // for the next byte of it
	mostOfEvent = 16 << 20         // bytes of a stream's line: text and ids so far
	someIDs     = 200              // prompts are made of the ids below: every vocabulary has them
)

// Run sends one request after the other: the machine shall be idle beside it.
// After an error the report, if there is one, is of the rounds that were whole.
func (b *HTTP) Run(ctx context.Context) (*HTTPReport, error) {
	if err := b.fit(); err != nil {
		return nil, &UnfitError{err}
	}
	var rounds [][]answered
	for round := range b.Rounds + 1 {
		got, err := b.round(ctx, round)
		if err != nil {
			return b.report(rounds), err
		}
		if round == 0 {
			continue // it warms up: connections, links, memory
		}
		rounds = append(rounds, got)
		fmt.Fprintf(b.Progress, "round %d of %d: first token after %.1f ms, then one each %.2f ms", round, b.Rounds, got[0].first, got[0].gap)
		if len(got) == 2 {
			fmt.Fprintf(b.Progress, "; beside it %.1f ms, %.2f ms", got[1].first, got[1].gap)
		}
		fmt.Fprintln(b.Progress)
	}
	return b.report(rounds), nil
}

// answered is what one answer took, in ms: to the first token, and between
// those after it.
type answered struct{ first, gap float64 }

// round asks every server once, by URL; each goes first in turn.
func (b *HTTP) round(ctx context.Context, round int) ([]answered, error) {
	n := len(b.URLs)
	got := make([]answered, n)
	for k := range n {
		i := (k + round) % n
		var err error
		if got[i], err = b.ask(ctx, b.URLs[i]); err != nil {
			return nil, fmt.Errorf("%s: %w", b.URLs[i], err)
		}
	}
	return got, nil
}

// report sums up so many rounds, nil without any.
func (b *HTTP) report(rounds [][]answered) *HTTPReport {
	if len(rounds) == 0 {
		return nil
	}
	of := func(value func(round []answered) float64) Rate {
		var all []float64
		for _, round := range rounds {
			all = append(all, value(round))
		}
		return rate(all)
	}
	r := &HTTPReport{URLs: b.URLs, Prompt: b.Prompt, Tokens: b.Tokens, Rounds: len(rounds)}
	for i := range b.URLs {
		r.TTFT = append(r.TTFT, of(func(round []answered) float64 { return round[i].first }))
		r.ITL = append(r.ITL, of(func(round []answered) float64 { return round[i].gap }))
	}
	if len(b.URLs) == 2 {
		f := of(func(round []answered) float64 { return round[0].first / round[1].first })
		g := of(func(round []answered) float64 { return round[0].gap / round[1].gap })
		r.TTFTRatio, r.ITLRatio = &f, &g
	}
	return r
}

func (b *HTTP) fit() error {
	if len(b.URLs) < 1 || len(b.URLs) > 2 || b.Rounds < 1 || b.Prompt < 1 || b.Prompt > mostPrompt || b.Tokens < 2 || b.Tokens > mostAnswer {
		return fmt.Errorf("%d URLs, prompts of %d tokens, answers of %d, %d rounds: one or two, 1 to %d, 2 to %d, and a round would be right",
			len(b.URLs), b.Prompt, b.Tokens, b.Rounds, mostPrompt, mostAnswer)
	}
	for _, s := range b.URLs {
		if u, err := url.Parse(s); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("%s: a URL like http://127.0.0.1:8000 would be right", s)
		}
	}
	return nil
}

// ask has one prompt answered.
func (b *HTTP) ask(ctx context.Context, base string) (answered, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerWait, fmt.Errorf("the answer was not whole after %v", answerWait))
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	wait := cmp.Or(b.Silence, usualWait)
	watch := time.AfterFunc(wait, func() { end(fmt.Errorf("nothing came for %v", wait)) })
	defer watch.Stop()
	began := time.Now()
	first, last, err := b.stream(ctx, base, func() { watch.Reset(wait) })
	if ctx.Err() != nil {
		err = context.Cause(ctx) // not what it broke off
	}
	if err != nil {
		return answered{}, err
	}
	return answered{first.Sub(began).Seconds() * 1e3, last.Sub(first).Seconds() * 1e3 / float64(b.Tokens-1)}, nil
}

// stream sends one request and reads its answer; heard is called whenever
// something has come. It gives the times of the first and the last token.
func (b *HTTP) stream(ctx context.Context, base string, heard func()) (first, last time.Time, err error) {
	ids := make([]int, b.Prompt)
	for i := range ids {
		ids[i] = rand.IntN(someIDs)
	}
	body, err := json.Marshal(map[string]any{"input_ids": ids, "stream": true,
		"sampling_params": map[string]any{"max_new_tokens": b.Tokens, "temperature": 0, "ignore_eos": true}})
	if err != nil {
		return first, last, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(base, "/")+"/generate", bytes.NewReader(body))
	if err != nil {
		return first, last, err
	}
	req.Header.Set("Content-Type", "application/json")
	if b.Token != "" {
		req.Header.Set("Authorization", "Bearer "+b.Token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return first, last, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300)) // of whoever answers: it may be a page
		return first, last, fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	return b.events(hearing{resp.Body, heard})
}

// hearing calls heard after each read that brings something.
type hearing struct {
	io.Reader
	heard func()
}

func (h hearing) Read(b []byte) (int, error) {
	n, err := h.Reader.Read(b)
	if n > 0 {
		h.heard()
	}
	return n, err
}

// events reads a stream to its end. It gives the times of the first and the last token.
func (b *HTTP) events(body io.Reader) (first, last time.Time, err error) {
	in := bufio.NewScanner(body)
	in.Buffer(make([]byte, 64<<10), mostOfEvent)
	var newest []byte
	for in.Scan() {
		data, ok := bytes.CutPrefix(in.Bytes(), []byte("data: "))
		switch {
		case !ok:
		case string(data) == "[DONE]":
			return first, last, b.whole(newest)
		default:
			if last = time.Now(); first.IsZero() {
				first = last
			}
			newest = append(newest[:0], data...) // looked at when the time is taken
			if bytes.HasPrefix(data, []byte(`{"error"`)) {
				return first, last, errors.New(string(newest))
			}
		}
	}
	return first, last, errors.Join(errors.New("the stream broke off"), in.Err())
}

// whole tells whether a stream's last event is of an answer as it was asked for.
func (b *HTTP) whole(event []byte) error {
	var e struct {
		Meta struct {
			Prompt     int `json:"prompt_tokens"`
			Cached     int `json:"cached_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"meta_info"`
	}
	if err := json.Unmarshal(event, &e); err != nil {
		return fmt.Errorf("an event that is none: %w", err)
	}
	if m := e.Meta; m.Prompt != b.Prompt || m.Cached != 0 || m.Completion != b.Tokens {
		return fmt.Errorf("%d tokens for a prompt of %d, of which %d were cached: not what was asked for", m.Completion, m.Prompt, m.Cached)
	}
	return nil
}

// JSON is one object; times are medians in ms.
func (r *HTTPReport) JSON(w io.Writer) error {
	type server struct {
		URL  string  `json:"url"`
		TTFT float64 `json:"ttft_ms"`
		ITL  float64 `json:"itl_ms"`
	}
	out := struct {
		Servers []server `json:"servers"`
		TTFT    float64  `json:"ttft_ratio,omitempty"`
		ITL     float64  `json:"itl_ratio,omitempty"`
		Prompt  int      `json:"prompt"`
		Tokens  int      `json:"tokens"`
		Rounds  int      `json:"rounds"`
	}{Prompt: r.Prompt, Tokens: r.Tokens, Rounds: r.Rounds}
	for i, u := range r.URLs {
		out.Servers = append(out.Servers, server{u, tidy(r.TTFT[i].Median), tidy(r.ITL[i].Median)})
	}
	if r.TTFTRatio != nil {
		out.TTFT, out.ITL = tidy(r.TTFTRatio.Median), tidy(r.ITLRatio.Median)
	}
	return json.NewEncoder(w).Encode(out)
}

// Text is a table for people.
func (r *HTTPReport) Text(w io.Writer) error {
	fmt.Fprintf(w, "prompts of %d tokens, answers of %d, one after the other; medians of %d rounds\n\n", r.Prompt, r.Tokens, r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tfirst token\tleast\tmost\tbetween tokens\tleast\tmost")
	for i, u := range r.URLs {
		f, g := r.TTFT[i], r.ITL[i]
		fmt.Fprintf(t, "%s\t%.1f ms\t%.1f\t%.1f\t%.2f ms\t%.2f\t%.2f\n", u, f.Median, f.Low, f.High, g.Median, g.Low, g.High)
	}
	if f, g := r.TTFTRatio, r.ITLRatio; f != nil {
		fmt.Fprintf(t, "the first ÷ the second\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\n", f.Median, f.Low, f.High, g.Median, g.Low, g.High)
	}
	return t.Flush()
}
