package worker

import (
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
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
	var cs []*choice
	for p, ids := range prompts {
		for n := range r.N {
			c := &choice{item: len(cs), index: n, prompt: p, det: h.text.detok(), stops: r.Stop}
			c.job = &Job{RID: itemRID(r, rid, c.item), Prompt: ids, MaxTokens: h.maxTokens(r, len(ids)), StopIDs: h.stopIDs(r),
				Sampling: sampling(r, n), SeedSet: r.Seed != nil, Room: -1, DPRank: r.DPRank, Deadline: deadline}
			if r.Pairs != nil && h.cfg.Role != Serve {
				pair := r.Pairs[c.item]
				c.job.Room, c.job.Addr = pair.Room, bootstrapAddr(pair)
			}
			if r.Journal != nil {
				if err := c.resume(&r.Journal.Items[c.item], h.text.vocab()); err != nil {
					return nil, err
				}
			}
			c.job.MaxTokens -= c.job.Said
			c.job.Box = NewBox(c.job.MaxTokens, wake)
			cs = append(cs, c)
		}
	}
	return cs, nil
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
		return [][]int32{ids}, h.checkPrompt("messages", ids)
	}
	field := "prompt"
	if r.Kind == api.Generate {
		field = "text"
	}
	var list [][]int32
	for _, p := range r.Prompts {
		ids, field := p.IDs, field
		if ids == nil {
			if err := h.checkBytes(field, len(p.Text)); err != nil {
				return nil, err
			}
			ids = h.text.encode(p.Text, true, false)
		} else if r.Kind == api.Generate {
			field = "input_ids"
		}
		if err := h.checkPrompt(field, ids); err != nil {
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

func (h *httpSide) checkPrompt(field string, ids []int32) *api.Error {
	if len(ids) == 0 {
		return &api.Error{Code: api.InvalidRequest, Param: field, Message: "`" + field + "` gives no token; a prompt has at least one"}
	}
	if len(ids) >= h.context {
		return &api.Error{Code: api.ContextLengthExceeded, Param: field, Message: "the prompt has " + strconv.Itoa(len(ids)) +
			" tokens; with at least one token of answer it must fit the context of " + strconv.Itoa(h.context) + " tokens"}
	}
	for _, id := range ids {
		if int(id) >= h.text.vocab() {
			return &api.Error{Code: api.InvalidRequest, Param: field, Message: "token id " + strconv.Itoa(int(id)) + " is not one of the model's " + strconv.Itoa(h.text.vocab())}
		}
	}
	return nil
}

// maxTokens is what the request allows, or as many as fit the context (chat
// without a limit). A limit that does not fit is refused by the core.
func (h *httpSide) maxTokens(r *api.Request, prompt int) int {
	if r.MaxTokens > 0 {
		return r.MaxTokens
	}
	return min(h.context, h.poolTokens) - prompt
}

func (h *httpSide) stopIDs(r *api.Request) []int32 {
	if r.IgnoreEOS {
		return r.StopIDs
	}
	return append(append([]int32(nil), h.text.eog()...), r.StopIDs...)
}

func sampling(r *api.Request, choice int) engine.Sampling {
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
