package worker

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
	"github.com/metronome-serve/metronome/internal/engine"
)

// defaultBootstrapPort is where SGLang's and our registries listen when a
// request does not name the port.
const defaultBootstrapPort = 8998

// makeJobs makes one job for each answer that the request asks for.
func (h *httpSide) makeJobs(r *api.Request, rid string, deadline time.Time, wake chan struct{}) ([]*choice, *api.Error) {
	prompts, err := h.prompts(r)
	if err != nil {
		return nil, err
	}
	if err := h.needRoom(r); err != nil {
		return nil, err
	}
	// Nobody can wait for a place that there is not: this would be 429 for ever.
	if most := (h.cfg.MaxRunning + h.cfg.MaxQueued) * h.cfg.DP; r.ItemNum > most {
		return nil, api.Errorf(api.InvalidRequest, "%d answers asked for in one request; this worker has places for %d (--max-running and --max-queued)", r.ItemNum, most)
	}
	var cs []*choice
	for p, ids := range prompts {
		s := r.Of(p)
		echo := echo{}
		if r.Echo {
			echo = h.echo(&r.Prompts[p], ids)
		}
		for n := range r.N {
			c := &choice{item: len(cs), index: n, prompt: p, sampling: s, det: h.text.detok(), stops: s.Stop, echo: echo}
			c.job = &Job{RID: itemRID(r, rid, c.item), Prompt: ids, MaxTokens: h.maxTokens(s, len(ids)), StopIDs: h.stopIDs(s),
				Sampling: sampling(s, n), SeedSet: s.Seed != nil, Room: -1, DPRank: r.DPRank, Deadline: deadline}
			if s.PromptFrom >= 0 && h.cfg.Role != Decode { // decode computes no prompt: the prefill tells
				c.job.ScorePrompt, c.job.ScoreFrom, c.job.ScoreTop = true, s.PromptFrom, s.Logprobs
			}
			if r.Pairs != nil && h.cfg.Role != Serve {
				pair := r.Pairs[c.item]
				c.job.Room, c.job.Addr = pair.Room, bootstrapAddr(pair)
			}
			if r.Journal != nil {
				if err := c.resume(&r.Journal.Items[c.item], h.text.vocab()); err != nil {
					return nil, err
				}
			}
			if h.cfg.Role == Prefill {
				c.stops = nil // the one token that comes here must not end the job: decode needs the pages to see it
			}
			c.job.MaxTokens -= c.job.Said
			c.job.Box = NewBox(c.job.MaxTokens, wake)
			cs = append(cs, c)
		}
	}
	return cs, nil
}

// echo is a prompt at the beginning of its answer.
type echo struct {
	text    string
	runes   int
	offsets []int // of each prompt token in text, in code points
}

// echo is the prompt as it came, or what its ids stand for.
func (h *httpSide) echo(p *api.Prompt, ids []int32) echo {
	e := echo{text: p.Text}
	if p.IDs != nil {
		e.text = h.text.decode(ids)
	}
	e.runes = utf8.RuneCountInString(e.text)
	det, at := h.text.detok(), 0
	for _, id := range ids {
		e.offsets = append(e.offsets, at)
		at += utf8.RuneCountInString(det.Push(id))
	}
	// A space that the tokenizer put in front is in the tokens and not in the text.
	front := max(0, at+utf8.RuneCountInString(det.Flush())-e.runes)
	for i, o := range e.offsets {
		e.offsets[i] = min(max(0, o-front), e.runes)
	}
	return e
}

// needRoom refuses what cannot be paired. A prefill worker knows its own
// address, a decode worker needs the prefill's.
func (h *httpSide) needRoom(r *api.Request) *api.Error {
	if h.cfg.Role == Serve {
		return nil
	}
	if r.Pairs == nil {
		return &api.Error{Code: api.InvalidRequest, Param: "bootstrap_room",
			Message: "a " + string(h.cfg.Role) + " worker needs `bootstrap_room`: send requests to the router, or to metronome serve"}
	}
	for _, p := range r.Pairs {
		if h.cfg.Role == Decode && p.Host == "" {
			return &api.Error{Code: api.InvalidRequest, Param: "bootstrap_host", Message: "a decode worker needs `bootstrap_host`, the host of the prefill's bootstrap registry"}
		}
		if h.cfg.Role != Decode {
			continue
		}
		if _, err := bootstrap.CheckHost(p.Host); err != nil { // no attempt could ever reach it
			return &api.Error{Code: api.InvalidRequest, Param: "bootstrap_host", Message: "`bootstrap_host`: " + err.Error()}
		}
	}
	return nil
}

func bootstrapAddr(p api.Pairing) string {
	port := p.Port
	if port == 0 {
		port = defaultBootstrapPort
	}
	return net.JoinHostPort(strings.Trim(p.Host, "[]"), strconv.Itoa(port))
}

// itemRID is the request id of one answer.
func itemRID(r *api.Request, rid string, item int) string {
	switch {
	case len(r.RIDs) == r.ItemNum:
		return r.RIDs[item]
	case len(r.RIDs) == 1:
		rid = r.RIDs[0]
	}
	if r.ItemNum > 1 {
		return rid + "-" + strconv.Itoa(item)
	}
	return rid
}

// prompts are the token ids of each prompt, checked against the model.
func (h *httpSide) prompts(r *api.Request) ([][]int32, *api.Error) {
	if r.Kind == api.Chat {
		size := 0
		for _, m := range r.Messages {
			size += len(m.Content)
		}
		if err := h.checkBytes("messages", size); err != nil {
			return nil, err
		}
		ids, err := h.text.chat(r.Messages, true)
		if err != nil {
			return nil, err
		}
		return [][]int32{ids}, h.checkPrompt("messages", ids, r.Of(0))
	}
	field := "prompt"
	if r.Kind == api.Generate {
		field = "text"
	}
	var list [][]int32
	for i, p := range r.Prompts {
		ids, field := p.IDs, field
		if ids == nil {
			if err := h.checkBytes(field, len(p.Text)); err != nil {
				return nil, err
			}
			ids = h.text.encode(p.Text, true, false)
		} else if r.Kind == api.Generate {
			field = "input_ids"
		}
		if err := h.checkPrompt(field, ids, r.Of(i)); err != nil {
			return nil, err
		}
		list = append(list, ids)
	}
	return list, nil
}

// checkBytes refuses a text that cannot fit before memory is taken for its tokens.
func (h *httpSide) checkBytes(field string, n int) *api.Error {
	if most := h.text.maxBytes(h.context); n > most {
		return &api.Error{Code: api.ContextLengthExceeded, Param: field, Message: "a text of " + strconv.Itoa(n) +
			" bytes cannot fit the context of " + strconv.Itoa(h.context) + " tokens; at most " + strconv.Itoa(most) + " bytes can"}
	}
	return nil
}

func (h *httpSide) checkPrompt(field string, ids []int32, s *api.Sampling) *api.Error {
	bad := func(field, format string, args ...any) *api.Error {
		return &api.Error{Code: api.InvalidRequest, Param: field, Message: fmt.Sprintf(format, args...)}
	}
	n, vocab := len(ids), h.text.vocab()
	if n == 0 {
		return bad(field, "`%s` gives no token; a prompt has at least one", field)
	}
	if n > h.context || n == h.context && s.MaxTokens != 0 {
		return &api.Error{Code: api.ContextLengthExceeded, Param: field, Message: fmt.Sprintf("the prompt has %d"+
			" tokens; with at least one token of answer it must fit the context of %d tokens", n, h.context)}
	}
	for _, id := range ids {
		if int(id) >= vocab {
			return bad(field, "token id %d is not one of the model's %d", id, vocab)
		}
	}
	if s.PromptFrom >= n {
		return bad("logprob_start_len", "`logprob_start_len` is %d; the prompt has %d tokens", s.PromptFrom, n)
	}
	for _, b := range s.LogitBias {
		if int(b.ID) >= vocab {
			return bad("logit_bias", "`logit_bias` names token %d, which is not one of the model's %d", b.ID, vocab)
		}
	}
	return nil
}

// maxTokens is what the request allows, or as many as fit the context (chat
// without a limit). A limit that does not fit is refused by the core.
func (h *httpSide) maxTokens(s *api.Sampling, prompt int) int {
	if s.MaxTokens >= 0 {
		return s.MaxTokens
	}
	return min(h.context, h.poolTokens) - prompt
}

func (h *httpSide) stopIDs(s *api.Sampling) []int32 {
	if s.IgnoreEOS {
		return s.StopIDs
	}
	return append(append([]int32(nil), h.text.eog()...), s.StopIDs...)
}

func sampling(r *api.Sampling, choice int) engine.Sampling {
	s := engine.Sampling{Temperature: r.Temperature, TopP: r.TopP, MinP: r.MinP, TopK: r.TopK, Choice: choice,
		Presence: r.Presence, Frequency: r.Frequency, Repetition: r.Repetition, Logprobs: r.Logprobs}
	for _, b := range r.LogitBias {
		s.LogitBias = append(s.LogitBias, engine.Bias{ID: b.ID, Add: b.Value})
	}
	if r.Seed != nil {
		s.Seed = *r.Seed
	}
	return s
}
