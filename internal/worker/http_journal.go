package worker

import (
	"net/http"
	"slices"
	"strconv"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// journal notes beside each event of a stream what another worker needs to go
// on after it. nil notes nothing.
type journal struct {
	created int64
	begun   bool // its first record is written, here or by the worker before
	records []byte
	line    []byte
}

// newJournal is the journal that a router asks for, nil when none does. A
// request that wants the prompt's log-probabilities has none: they come once,
// and from the prefill.
func newJournal(w http.ResponseWriter, r *http.Request, req *api.Request, created int64, cs []*choice) *journal {
	if r.Header.Get(api.JournalHeader) == "" || slices.ContainsFunc(cs, func(c *choice) bool { return c.sampling.PromptFrom >= 0 }) {
		return nil
	}
	taken := 0
	if req.Journal != nil {
		taken = req.Journal.Size
	}
	w.Header().Set(api.JournalHeader, strconv.Itoa(taken))
	return &journal{created: created, begun: req.Journal != nil}
}

// token is the comment line before the event of c's newest token.
func (j *journal) token(c *choice) []byte {
	if j == nil {
		return nil
	}
	b := j.first()
	n := len(c.outs)
	if n == 1 {
		b = api.AppendBegun(b, c.item, c.seed, c.cached, c.job.MaxTokens)
	}
	out := &c.outs[n-1]
	t := api.JournalToken{TokenLogprob: api.TokenLogprob{ID: out.Token, Logprob: out.Logprob}}
	for _, o := range out.Top {
		t.Top = append(t.Top, api.TokenLogprob(o))
	}
	return j.comment(api.AppendToken(b, c.item, &t, c.sampling.Logprobs >= 0))
}

// last is the line before the event that ends c.
func (j *journal) last(c *choice) []byte {
	if j == nil {
		return nil
	}
	return j.comment(api.AppendEnded(j.first(), c.item))
}

// usage is the line before the usage event.
func (j *journal) usage() []byte {
	if j == nil {
		return nil
	}
	return j.comment(api.AppendUsage(j.first()))
}

func (j *journal) first() []byte {
	b := j.records[:0]
	if !j.begun {
		j.begun = true
		b = api.AppendCreated(b, j.created)
	}
	return b
}

func (j *journal) comment(records []byte) []byte {
	j.records = records
	j.line = api.JournalLine(j.line[:0], records)
	return j.line
}

// mayResume refuses a journal that comes from anybody but a router: what it
// says is taken for the worker's own words.
func (h *httpSide) mayResume(r *http.Request, req *api.Request) *api.Error {
	if req.Journal == nil || r.Header.Get(api.JournalHeader) != "" && h.cfg.Role != Serve {
		return nil
	}
	return &api.Error{Code: api.InvalidRequest, Param: api.JournalField, Message: "`" + api.JournalField + "` is a router's, for its own workers; leave it out"}
}

// resume brings c to where the worker before has left it: text, stop strings
// and counts are those after the same tokens here. If that was the end, c is
// done, and c.rest is the text of its last event.
func (c *choice) resume(it *api.ItemJournal, vocab int) *api.Error {
	c.told = it.Ended
	if !it.Begun {
		return nil
	}
	j := c.job
	c.seed, j.SeedSet, j.Sampling.Seed = it.Seed, true, it.Seed
	j.Prompt, j.MaxTokens = slices.Clone(j.Prompt), it.Max
	for i := range it.Tokens {
		t := &it.Tokens[i]
		if c.done || c.matched != nil || int(t.ID) >= vocab {
			return badJournal(c, i)
		}
		out := engine.Output{Token: t.ID, Logprob: t.Logprob}
		for _, o := range t.Top {
			if int(o.ID) >= vocab {
				return badJournal(c, i)
			}
			out.Top = append(out.Top, engine.TokenLogprob(o))
		}
		c.take(Item{Out: out, Index: i, Cached: it.Cached, Seed: it.Seed})
		j.Prompt = append(j.Prompt, t.ID)
	}
	j.Said = len(it.Tokens)
	switch end := (&End{Reason: EndLength, Completion: j.Said}); {
	case c.done:
	case c.matched != nil:
		end.Reason = EndStop
		fallthrough
	case j.Said == it.Max:
		c.rest, _ = c.take(Item{End: end})
	case it.Ended:
		return badJournal(c, j.Said)
	}
	return nil
}

func badJournal(c *choice, token int) *api.Error {
	return &api.Error{Code: api.InvalidRequest, Param: api.JournalField,
		Message: "`" + api.JournalField + "` does not fit the request: answer " + strconv.Itoa(c.item) + ", token " + strconv.Itoa(token)}
}
