package worker

import (
	"encoding/json"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/engine"
)

// dialect writes one request's answer in the form of its path. Its two
// implementations are OpenAI's and SGLang's.
type dialect interface {
	// whole is the body of an answer that is not streamed.
	whole(cs []*choice) any
	// event is one streamed event for the last token of c, with its new text. It
	// is good until the next one: a stream makes them all in the same memory.
	event(c *choice, delta string) any
	// last are the events that end the stream of c, in order.
	last(c *choice, delta string) []any
	// usage is the event after all choices, or nil.
	usage(cs []*choice) any
}

type usage struct {
	Prompt     int           `json:"prompt_tokens"`
	Completion int           `json:"completion_tokens"`
	Total      int           `json:"total_tokens"`
	Details    *usageDetails `json:"prompt_tokens_details,omitempty"`
}

type usageDetails struct {
	Cached int `json:"cached_tokens"`
}

func usageOf(cs []*choice) usage {
	var u usage
	cached := 0
	for _, c := range cs {
		if c.index == 0 { // a prompt counts once, however many choices it has
			u.Prompt += c.promptTokens()
			cached += c.cached
		}
		u.Completion += c.completion
	}
	u.Total = u.Prompt + u.Completion
	u.Details = &usageDetails{cached}
	return u
}

// openAI is the form of /v1/chat/completions and /v1/completions.
type openAI struct {
	req     *api.Request
	id      string
	model   string
	created int64
	text    textCodec

	streamed *openAIBody // of event, and what it points to
	message  openAIMessage
	delta    string
}

type openAIBody struct {
	ID      string         `json:"id"`
	Object  string         `json:"object"`
	Created int64          `json:"created"`
	Model   string         `json:"model"`
	Choices []openAIChoice `json:"choices"`
	Usage   *usage         `json:"usage,omitempty"`
}

type openAIChoice struct {
	Index    int            `json:"index"`
	Message  *openAIMessage `json:"message,omitempty"`
	Delta    *openAIMessage `json:"delta,omitempty"`
	Text     *string        `json:"text,omitempty"`
	Logprobs any            `json:"logprobs"`
	Finish   *string        `json:"finish_reason"`
}

type openAIMessage struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

func (o *openAI) chat() bool { return o.req.Kind == api.Chat }

func (o *openAI) body(stream bool, choices ...openAIChoice) *openAIBody {
	b := &openAIBody{ID: "cmpl-" + o.id, Object: "text_completion", Created: o.created, Model: o.model, Choices: choices}
	if o.chat() {
		b.ID, b.Object = "chatcmpl-"+o.id, "chat.completion"
		if stream {
			b.Object = "chat.completion.chunk"
		}
	}
	if choices == nil {
		b.Choices = []openAIChoice{}
	}
	return b
}

func (o *openAI) whole(cs []*choice) any {
	var list []openAIChoice
	for _, c := range cs {
		text := c.echo.text + c.text.String()
		oc := openAIChoice{Index: c.item, Finish: &c.finish, Logprobs: o.logprobs(c, 0)}
		if o.chat() {
			oc.Message = &openAIMessage{Role: "assistant", Content: &text}
		} else {
			oc.Text = &text
		}
		list = append(list, oc)
	}
	b := o.body(false, list...)
	u := usageOf(cs)
	b.Usage = &u
	return b
}

func (o *openAI) event(c *choice, delta string) any {
	if o.streamed == nil {
		o.streamed = o.body(true, openAIChoice{})
	}
	o.delta = delta
	oc := &o.streamed.Choices[0]
	*oc = openAIChoice{Index: c.item, Logprobs: o.logprobs(c, len(c.outs)-1)}
	if o.chat() {
		o.message = openAIMessage{Content: &o.delta}
		if len(c.outs) == 1 {
			o.message.Role = "assistant"
		}
		oc.Delta = &o.message
	} else {
		if len(c.outs) == 1 {
			o.delta = c.echo.text + delta
		}
		oc.Text = &o.delta
	}
	return o.streamed
}

func (o *openAI) last(c *choice, delta string) []any {
	oc := openAIChoice{Index: c.item, Finish: &c.finish}
	if len(c.outs) == 0 { // nothing has been written yet
		delta = c.echo.text + delta
		if o.req.Echo {
			oc.Logprobs = o.logprobs(c, 0)
		}
	}
	if o.chat() {
		oc.Delta = &openAIMessage{}
		if delta != "" {
			oc.Delta.Content = &delta
		}
	} else {
		oc.Text = &delta
	}
	return []any{o.body(true, oc)}
}

func (o *openAI) usage(cs []*choice) any {
	if !o.req.IncludeUsage || o.req.Journal != nil && o.req.Journal.Usage {
		return nil
	}
	b := o.body(true)
	u := usageOf(cs)
	b.Usage = &u
	return b
}

type chatLogprob struct {
	Token   string        `json:"token"`
	Logprob float32       `json:"logprob"`
	Bytes   []int         `json:"bytes"`
	Top     []chatLogprob `json:"top_logprobs,omitzero"`
}

type completionLogprobs struct {
	Tokens  []string             `json:"tokens"`
	Values  []*float32           `json:"token_logprobs"`
	Top     []map[string]float32 `json:"top_logprobs"`
	Offsets []int                `json:"text_offset"`
}

// lowestLogprob stands for what JSON cannot say: minus infinity, of a token
// that can never come.
const lowestLogprob = -9999

func finite(lp float32) float32 {
	if lp-lp != 0 {
		return lowestLogprob
	}
	return lp
}

// logprobs are those of the choice's tokens from index from on. The prompt's
// come before index 0.
func (o *openAI) logprobs(c *choice, from int) any {
	if c.sampling.Logprobs < 0 {
		return nil
	}
	if o.chat() {
		content := []chatLogprob{}
		for _, out := range c.outs[from:] {
			lp := o.chatLogprob(out.Token, out.Logprob)
			lp.Top = []chatLogprob{}
			for _, t := range out.Top {
				lp.Top = append(lp.Top, o.chatLogprob(t.ID, t.Logprob))
			}
			content = append(content, lp)
		}
		return map[string]any{"content": content}
	}
	lp := completionLogprobs{Tokens: []string{}, Values: []*float32{}, Top: []map[string]float32{}, Offsets: []int{}}
	if from == 0 && c.scores != nil {
		o.promptLogprobs(&lp, c)
	}
	for i, out := range c.outs[from:] {
		o.add(&lp, out.Token, &out.Logprob, out.Top, c.echo.runes+c.offsets[from+i])
	}
	return lp
}

// promptLogprobs adds the prompt's tokens, of which nothing predicts the first.
func (o *openAI) promptLogprobs(lp *completionLogprobs, c *choice) {
	for i, id := range c.job.Prompt {
		if i == 0 {
			o.add(lp, id, nil, nil, c.echo.offsets[0])
			continue
		}
		var top []engine.TokenLogprob
		if c.scores.Top != nil {
			top = c.scores.Top[i-1]
		}
		o.add(lp, id, &c.scores.Logprobs[i-1], top, c.echo.offsets[i])
	}
}

// add lists one token; beside the most probable ones it stands itself. Of ids
// that have one text the most probable one counts.
func (o *openAI) add(lp *completionLogprobs, id int32, value *float32, top []engine.TokenLogprob, offset int) {
	lp.Tokens = append(lp.Tokens, o.token(id))
	lp.Offsets = append(lp.Offsets, offset)
	var list map[string]float32
	if value != nil {
		v := finite(*value)
		value, list = &v, map[string]float32{}
		for _, t := range append(top[:len(top):len(top)], engine.TokenLogprob{ID: id, Logprob: v}) {
			if _, taken := list[o.token(t.ID)]; !taken {
				list[o.token(t.ID)] = finite(t.Logprob)
			}
		}
	}
	lp.Values, lp.Top = append(lp.Values, value), append(lp.Top, list)
}

func (o *openAI) token(id int32) string {
	s, _ := o.text.text(id)
	return s
}

func (o *openAI) chatLogprob(id int32, lp float32) chatLogprob {
	raw := []int{}
	for _, b := range o.text.bytes(id) {
		raw = append(raw, int(b))
	}
	return chatLogprob{Token: o.token(id), Logprob: finite(lp), Bytes: raw}
}

// sglang is the form of /generate.
type sglang struct {
	req    *api.Request
	ids    []string // one for each answer
	deltas bool     // stream deltas, not cumulative texts
	text   textCodec

	streamed sglangBody // of event
}

type sglangBody struct {
	Text  string     `json:"text"`
	IDs   []int32    `json:"output_ids"`
	Meta  sglangMeta `json:"meta_info"`
	Index *int       `json:"index,omitempty"`
}

type sglangMeta struct {
	ID         string          `json:"id"`
	Prompt     int             `json:"prompt_tokens"`
	Completion int             `json:"completion_tokens"`
	Cached     int             `json:"cached_tokens"`
	Finish     any             `json:"finish_reason"`
	Input      json.RawMessage `json:"input_token_logprobs,omitempty"`
	InputTop   json.RawMessage `json:"input_top_logprobs,omitzero"`
	Logprobs   [][]any         `json:"output_token_logprobs,omitzero"`
	Top        [][]any         `json:"output_top_logprobs,omitzero"`
}

type sglangFinish struct {
	Type    string `json:"type"`
	Matched any    `json:"matched,omitempty"`
	Length  *int   `json:"length,omitempty"`
}

// body describes the answer from its token from on, with this text. lists says
// whether the prompt's log-probabilities belong into it.
func (s *sglang) body(c *choice, from int, text string, lists bool) *sglangBody {
	b := &sglangBody{IDs: []int32{}}
	s.fill(b, c, from, text, lists)
	return b
}

// fill is body in the memory of another one.
func (s *sglang) fill(b *sglangBody, c *choice, from int, text string, lists bool) {
	*b = sglangBody{Text: text, IDs: b.IDs[:0], Meta: sglangMeta{
		ID: s.ids[c.item], Prompt: c.promptTokens(), Completion: c.completion, Cached: c.cached}}
	if c.sampling.Logprobs >= 0 && lists {
		s.list(c)
		b.Meta.Input, b.Meta.InputTop = c.listed, c.listedTop
	}
	if c.sampling.Logprobs >= 0 {
		b.Meta.Logprobs = [][]any{}
	}
	if c.sampling.Logprobs > 0 {
		b.Meta.Top = [][]any{}
	}
	for _, out := range c.outs[from:] {
		b.IDs = append(b.IDs, out.Token)
		if c.sampling.Logprobs >= 0 {
			b.Meta.Logprobs = append(b.Meta.Logprobs, s.triple(out.Token, out.Logprob))
		}
		if c.sampling.Logprobs > 0 {
			b.Meta.Top = append(b.Meta.Top, s.top(out.Top))
		}
	}
	if c.done {
		f := sglangFinish{Type: c.finish, Matched: c.matched}
		if c.finish == EndLength {
			f.Length = &c.completion
		}
		b.Meta.Finish = f
	}
}

// list makes the prompt's lists: of the tokens from PromptFrom on, the first
// without a value, as in SGLang. They are empty where no prompt token is asked
// for, and on a decode worker: there the prefill's answer has them.
func (s *sglang) list(c *choice) {
	if c.listed != nil {
		return
	}
	values, tops := [][]any{}, []any{}
	if c.scores != nil {
		first := c.job.Prompt[c.job.ScoreFrom]
		values, tops = append(values, s.triple(first, nil)), append(tops, nil)
		for i, lp := range c.scores.Logprobs {
			values = append(values, s.triple(c.job.Prompt[c.job.ScoreFrom+1+i], lp))
			if c.scores.Top != nil {
				tops = append(tops, s.top(c.scores.Top[i]))
			}
		}
	}
	c.listed, _ = json.Marshal(values) // finite numbers and strings: no error is possible
	if c.sampling.Logprobs > 0 {
		c.listedTop, _ = json.Marshal(tops)
	}
}

// triple is [logprob, id, text]; lp is a float32 or nil.
func (s *sglang) triple(id int32, lp any) []any {
	if v, ok := lp.(float32); ok {
		lp = finite(v)
	}
	text, ok := s.text.text(id)
	if !ok {
		return []any{lp, id, nil}
	}
	return []any{lp, id, text}
}

func (s *sglang) top(list []engine.TokenLogprob) []any {
	out := []any{}
	for _, t := range list {
		out = append(out, s.triple(t.ID, t.Logprob))
	}
	return out
}

func (s *sglang) whole(cs []*choice) any {
	var list []*sglangBody
	for _, c := range cs {
		list = append(list, s.body(c, 0, c.text.String(), true))
	}
	if len(list) == 1 && !s.req.List {
		return list[0]
	}
	return list
}

func (s *sglang) event(c *choice, delta string) any {
	from, text := len(c.outs)-1, delta
	if !s.deltas {
		from, text = 0, c.text.String()
	}
	b := &s.streamed
	if b.IDs == nil {
		b.IDs = []int32{}
	}
	s.fill(b, c, from, text, from == 0)
	b.Meta.Finish = nil // last says it, once, also where a stop string ends the answer with this token
	s.number(b, c)
	return b
}

func (s *sglang) last(c *choice, delta string) []any {
	from, text := len(c.outs), delta
	if !s.deltas {
		from, text = 0, c.text.String()
	}
	b := s.body(c, from, text, from == 0)
	s.number(b, c)
	return []any{b}
}

func (s *sglang) number(b *sglangBody, c *choice) {
	if s.req.ItemNum > 1 || s.req.List {
		b.Index = &c.item
	}
}

func (s *sglang) usage([]*choice) any { return nil }
