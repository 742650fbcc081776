package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/metric"
)

type explainCmd struct {
	RID       string `arg:"" name:"rid" help:"The request's id: X-Request-Id, or the rid of /generate."`
	Router    string `help:"URL of the router that took it." default:"http://127.0.0.1:8000"`
	TokenFile string `help:"File with the bearer token that we present." placeholder:"FILE"`
	JSON      bool   `help:"Print what is known as JSON." name:"json"`
	Config    string `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
}

// How long the router may take, and how much it may say: it asks the workers.
const (
	explainWait = 10 * time.Second
	explainMost = 16 << 20
)

// Run prints what happened to one request, in every process that touched it.
func (c *explainCmd) Run(ctx context.Context, s *settings) error {
	if err := s.unknown(); err != nil {
		return err
	}
	base, err := url.Parse(c.Router)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return usagef("--router %s: a URL like http://127.0.0.1:8000 would be right", c.Router)
	}
	if c.RID == "" {
		return usagef("the request's id is empty; it is in the header X-Request-Id of each answer")
	}
	token, err := callersToken(c.TokenFile)
	if err != nil {
		return err
	}
	body, err := c.ask(ctx, base, token)
	if err != nil {
		return err
	}
	var list []metric.Report
	if err := json.Unmarshal(body, &list); err != nil {
		return fmt.Errorf("%s: the answer is not a router's: %v", c.Router, err)
	}
	if len(list) == 0 {
		return fmt.Errorf("the router at %s knows no request %q: it keeps the last %d that ended", c.Router, c.RID, metric.Kept)
	}
	if c.JSON {
		_, err = stdout.Write(body)
		return err
	}
	for i := range list {
		if i > 0 {
			fmt.Fprintln(stdout)
		}
		explain(stdout, c.Router, &list[i])
	}
	return nil
}

// callersToken is the first token of a file, or none without one.
func callersToken(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return "", usagef("--token-file: %v", err)
	}
	tokens, err := parseTokens(data)
	if err != nil {
		return "", usagef("--token-file %s: %v", file, err)
	}
	return tokens[0], nil
}

func (c *explainCmd) ask(ctx context.Context, base *url.URL, token string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, explainWait)
	defer cancel()
	u := base.JoinPath("/debug/requests")
	u.RawQuery = url.Values{"rid": {c.RID}}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("the router does not answer: %w", errors.Unwrap(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, explainMost))
	if err != nil {
		return nil, fmt.Errorf("the router's answer broke off: %w", err)
	}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		e.Error.Message = "no router that knows of requests"
	}
	return nil, fmt.Errorf("%s answers %d: %s", c.Router, resp.StatusCode, e.Error.Message)
}

// chart prints timelines on one scale. Those of the legs begin where the router
// sent them: no clock is compared with another.
type chart struct {
	w     io.Writer
	whole time.Duration
}

const barWidth = 40

// explain prints one request.
func explain(w io.Writer, router string, r *metric.Report) {
	fmt.Fprintf(w, "request %s %s: %s\n", r.Request, r.Path, verdict(r))
	if r.Error != "" {
		fmt.Fprintf(w, "%s: %s\n", r.Code, r.Error)
	}
	c := &chart{w: w, whole: length(r)}
	fmt.Fprintf(w, "\n%-20s %10s %10s\n", "", "at ms", "+ms")
	fmt.Fprintf(w, "router %s\n", router)
	c.marks(0, &r.Timeline)
	for i := range r.Attempts {
		a := &r.Attempts[i]
		at, _ := a.Timeline.At(metric.Routed)
		what := ""
		if a.Moved {
			what = ", goes on with the stream"
		}
		fmt.Fprintf(w, "\nattempt %d, sent at %.2f ms%s\n", a.Attempt, milliseconds(at), what)
		c.leg("prefill", at, &a.Prefill)
		c.leg("decode", at, &a.Decode)
		if end, ok := a.Timeline.At(metric.Ended); ok && a.Cause != "" {
			fmt.Fprintf(w, "over at %.2f ms: %s\n", milliseconds(end), a.Cause)
		}
	}
}

// verdict is how it went, in a few words.
func verdict(r *metric.Report) string {
	if r.Phase != "" {
		return "runs, phase " + r.Phase
	}
	took, _ := r.Timeline.At(metric.Ended)
	s := fmt.Sprintf("%s (%d) after %.1f ms", r.Code, r.Status, milliseconds(took))
	if r.Finish != "" {
		s += fmt.Sprintf(", %d tokens in (%d cached), %d out, finish %s", r.Prompt, r.Cached, r.Completion, r.Finish)
	}
	if n := len(r.Attempts); n > 1 {
		s += fmt.Sprintf(", %d attempts", r.Attempts[n-1].Attempt)
	}
	return s
}

// length is the time that the chart spans.
func length(r *metric.Report) (whole time.Duration) {
	reach := func(from time.Duration, t *metric.Timeline) {
		for _, m := range t.Moments() {
			whole = max(whole, from+m.At)
		}
	}
	reach(0, &r.Timeline)
	for i := range r.Attempts {
		a := &r.Attempts[i]
		at, _ := a.Timeline.At(metric.Routed)
		for _, l := range []*metric.Leg{&a.Prefill, &a.Decode} {
			if l.Report != nil {
				reach(at, &l.Report.Timeline)
			}
		}
	}
	return max(whole, 1)
}

func (c *chart) leg(role string, from time.Duration, l *metric.Leg) {
	fmt.Fprintf(c.w, "%s %s\n", role, l.Worker)
	switch {
	case l.Report != nil:
		c.marks(from, &l.Report.Timeline)
		if l.Report.Preempted > 0 {
			fmt.Fprintf(c.w, "  preemptions: %d\n", l.Report.Preempted)
		}
		if l.Report.Error != "" {
			fmt.Fprintf(c.w, "  %s: %s\n", l.Report.Code, l.Report.Error)
		}
	case l.Lost != "":
		fmt.Fprintf(c.w, "  does not tell: %s\n", l.Lost)
	}
	if l.Fault != "" {
		fmt.Fprintf(c.w, "  the router saw: %s\n", l.Fault)
	}
}

// marks prints a line for each mark, with the stretch since the one before.
func (c *chart) marks(from time.Duration, t *metric.Timeline) {
	last := time.Duration(0)
	for _, m := range t.ByTime() {
		name := strings.ReplaceAll(m.Mark.String(), "_", " ")
		fmt.Fprintf(c.w, "  %-18s %10.2f %10.2f  %s\n", name, milliseconds(m.At), milliseconds(m.At-last), c.bar(from+last, from+m.At))
		last = m.At
	}
}

// bar is a stretch of the whole; one that is too short to show is a line.
func (c *chart) bar(from, to time.Duration) string {
	a, b := int(from*barWidth/c.whole), int(to*barWidth/c.whole)
	if a == b {
		return strings.Repeat(" ", min(a, barWidth-1)) + "▏"
	}
	return strings.Repeat(" ", a) + strings.Repeat("█", b-a)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
