package worker

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// choice is one answer in the making: it turns a job's tokens into text, looks
// for stop strings, and keeps what the answer's form needs. It belongs to the
// request's handler.
type choice struct {
	job    *Job
	item   int // among all answers of the request, prompt-major
	index  int // choice number of its prompt
	prompt int // which prompt

	sampling  *api.Sampling // of its prompt
	echo      echo
	scores    *PromptScores // the prompt's, on the worker that computed it
	listed    []byte        // the prompt's part of /generate's lists, as JSON, once made
	listedTop []byte

	det   detok
	stops []string
	held  string // text that may turn out to be the beginning of a stop string

	text       strings.Builder
	runes      int   // code points in text
	offsets    []int // code points before each token
	outs       []engine.Output
	cached     int
	seed       uint64
	done       bool
	told       bool   // its last event went out before, from another worker
	rest       string // done before it began: the text of its last event
	finish     string // "stop", "length"
	matched    any    // the stop string or stop id, for /generate
	completion int
	err        *api.Error
}

// take adds one item of the job and returns the text that may go out.
// more is false when the answer has ended; then nothing is read any more.
func (c *choice) take(it Item) (delta string, stopAt int) {
	if it.Prompt != nil {
		c.scores = it.Prompt
	}
	if it.End != nil {
		if len(c.outs) == 0 {
			c.cached = it.Cached
		}
		return c.end(it.End), -1
	}
	if it.Index == 0 {
		c.cached, c.seed = it.Cached, it.Seed
	}
	c.offsets = append(c.offsets, c.runes+utf8.RuneCountInString(c.held))
	c.outs = append(c.outs, it.Out)
	c.completion = len(c.outs)
	if slices.Contains(c.job.StopIDs, it.Out.Token) {
		c.matched = it.Out.Token // the core ends the request with it; a stop id has no text
		return "", -1
	}
	return c.release(c.held+c.det.Push(it.Out.Token), it.Index+1)
}

// release lets text out up to the first stop string, or up to what may become one.
func (c *choice) release(pending string, tokens int) (delta string, stopAt int) {
	at, stop := -1, ""
	for _, s := range c.stops {
		if i := strings.Index(pending, s); i >= 0 && (at < 0 || i < at) {
			at, stop = i, s
		}
	}
	if at >= 0 {
		if c.sampling.KeepStop {
			at += len(stop)
		}
		c.held, c.done, c.finish, c.matched = "", true, EndStop, stop
		return c.write(pending[:at]), tokens
	}
	keep := len(pending) - c.mayStop(pending)
	c.held = pending[keep:]
	return c.write(pending[:keep]), -1
}

func (c *choice) write(s string) string {
	c.text.WriteString(s)
	c.runes += utf8.RuneCountInString(s)
	return s
}

// mayStop is the length of the longest end of s that begins a stop string.
func (c *choice) mayStop(s string) int {
	best := 0
	for _, stop := range c.stops {
		for n := min(len(stop)-1, len(s)); n > best; n-- {
			if strings.HasSuffix(s, stop[:n]) {
				best = n
				break
			}
		}
	}
	return best
}

func (c *choice) end(e *End) string {
	c.done = true
	if e.Reason == EndFailed {
		c.err = e.Err
		return ""
	}
	c.completion = e.Completion
	c.finish = EndLength
	if e.Reason == EndStop {
		c.finish = EndStop
	}
	rest := c.held + c.det.Flush()
	c.held = ""
	return c.write(rest)
}

// promptTokens is how long the prompt is without what has been said.
func (c *choice) promptTokens() int { return len(c.job.Prompt) - c.job.Said }
