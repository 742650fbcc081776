package bench

import (
	"bufio"
	"bytes"
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
	answerWait  = 10 * time.Minute
	mostOfEvent = 16 << 20 // bytes of a stream's line: text and ids so far
	someIDs     = 200      // prompts are made of the ids below: every vocabulary has them
)

// Run sends one request after the other: the machine shall be idle beside it.
func (b *HTTP) Run(ctx context.Context) (*HTTPReport, error) {
	if err := b.fit(); err != nil {
		return nil, &UnfitError{err}
	}
	n := len(b.URLs)
	ttft, itl := make([][]float64, n), make([][]float64, n)
	var first, gap []float64
	for round := range b.Rounds + 1 {
		for k := range n {
			i := (k + round) % n // each goes first in turn
			f, g, err := b.ask(ctx, b.URLs[i])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", b.URLs[i], err)
			}
			if round > 0 { // the first warms up: connections, links, memory
				ttft[i], itl[i] = append(ttft[i], f), append(itl[i], g)
			}
		}
		if round > 0 {
			fmt.Fprintf(b.Progress, "round %d of %d: first token after %.1f ms, then one each %.2f ms", round, b.Rounds, ttft[0][round-1], itl[0][round-1])
			if n == 2 {
				fmt.Fprintf(b.Progress, "; beside it %.1f ms, %.2f ms", ttft[1][round-1], itl[1][round-1])
				first, gap = append(first, ttft[0][round-1]/ttft[1][round-1]), append(gap, itl[0][round-1]/itl[1][round-1])
			}
			fmt.Fprintln(b.Progress)
		}
	}
	r := &HTTPReport{URLs: b.URLs, Prompt: b.Prompt, Tokens: b.Tokens, Rounds: b.Rounds}
	for i := range n {
		r.TTFT, r.ITL = append(r.TTFT, rate(ttft[i])), append(r.ITL, rate(itl[i]))
	}
	if n == 2 {
		f, g := rate(first), rate(gap)
		r.TTFTRatio, r.ITLRatio = &f, &g
	}
	return r, nil
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

// ask has one prompt answered. It gives the time to the first token and the
// mean gap between those after it, in ms.
func (b *HTTP) ask(ctx context.Context, base string) (first, gap float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	ids := make([]int, b.Prompt)
	for i := range ids {
		ids[i] = rand.IntN(someIDs)
	}
	body, err := json.Marshal(map[string]any{"input_ids": ids, "stream": true,
		"sampling_params": map[string]any{"max_new_tokens": b.Tokens, "temperature": 0, "ignore_eos": true}})
	if err != nil {
		return 0, 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(base, "/")+"/generate", bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	if b.Token != "" {
		req.Header.Set("Authorization", "Bearer "+b.Token)
	}
	began := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return 0, 0, fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	at, last, err := b.events(resp.Body)
	if err != nil {
		return 0, 0, err
	}
	return at.Sub(began).Seconds() * 1e3, last.Sub(at).Seconds() * 1e3 / float64(b.Tokens-1), nil
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
