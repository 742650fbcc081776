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
	// event is one streamed event for the last token of c, with its new text.
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
		text := c.text.String()
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
	oc := openAIChoice{Index: c.item, Logprobs: o.logprobs(c, len(c.outs)-1)}
	if o.chat() {
		oc.Delta = &openAIMessage{Content: &delta}
		if len(c.outs) == 1 {
			oc.Delta.Role = "assistant"
		}
	} else {
		oc.Text = &delta
	}
	return o.body(true, oc)
}

func (o *openAI) last(c *choice, delta string) []any {
	oc := openAIChoice{Index: c.item, Finish: &c.finish}
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
	Top     []chatLogprob `json:"top_logprobs,omitempty"`
}

type completionLogprobs struct {
	Tokens  []string             `json:"tokens"`
	Values  []float32            `json:"token_logprobs"`
	Top     []map[string]float32 `json:"top_logprobs"`
	Offsets []int                `json:"text_offset"`
}

// logprobs are those of the choice's tokens from index from on.
func (o *openAI) logprobs(c *choice, from int) any {
	if o.req.Logprobs < 0 {
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
	lp := completionLogprobs{Tokens: []string{}, Values: []float32{}, Top: []map[string]float32{}, Offsets: []int{}}
	for i, out := range c.outs[from:] {
		lp.Tokens = append(lp.Tokens, o.token(out.Token))
		lp.Values = append(lp.Values, out.Logprob)
		lp.Offsets = append(lp.Offsets, c.offsets[from+i])
		top := map[string]float32{}
		for _, t := range out.Top {
			if _, taken := top[o.token(t.ID)]; !taken { // ids with one text: the better one stands
				top[o.token(t.ID)] = t.Logprob
			}
		}
		lp.Top = append(lp.Top, top)
	}
	return lp
}

func (o *openAI) token(id int32) string {
	s, _ := o.text.text(id)
	return s
}

func (o *openAI) chatLogprob(id int32, lp float32) chatLogprob {
	s := o.token(id)
	raw := make([]int, len(s))
	for i := range len(s) {
		raw[i] = int(s[i])
	}
	return chatLogprob{Token: s, Logprob: lp, Bytes: raw}
}

// sglang is the form of /generate.
type sglang struct {
	req    *api.Request
	ids    []string // one for each answer
	deltas bool     // stream deltas, not cumulative texts
	text   textCodec
}

type sglangBody struct {
	Text  string     `json:"text"`
	IDs   []int32    `json:"output_ids"`
	Meta  sglangMeta `json:"meta_info"`
	Index *int       `json:"index,omitempty"`
}

type sglangMeta struct {
	ID         string  `json:"id"`
	Prompt     int     `json:"prompt_tokens"`
	Completion int     `json:"completion_tokens"`
	Cached     int     `json:"cached_tokens"`
	Finish     any     `json:"finish_reason"`
	Logprobs   [][]any `json:"output_token_logprobs,omitempty"`
	Top        [][]any `json:"output_top_logprobs,omitempty"`
}

type sglangFinish struct {
	Type    string `json:"type"`
	Matched any    `json:"matched,omitempty"`
	Length  int    `json:"length,omitempty"`
}

// body describes the answer from its token from on, with this text.
func (s *sglang) body(c *choice, from int, text string) *sglangBody {
	b := &sglangBody{Text: text, IDs: []int32{}, Meta: sglangMeta{
		ID: s.ids[c.item], Prompt: c.promptTokens(), Completion: c.completion, Cached: c.cached}}
	for _, out := range c.outs[from:] {
		b.IDs = append(b.IDs, out.Token)
		if s.req.Logprobs >= 0 {
			b.Meta.Logprobs = append(b.Meta.Logprobs, s.triple(out.Token, out.Logprob))
		}
		if s.req.Logprobs > 0 {
			b.Meta.Top = append(b.Meta.Top, s.top(out))
		}
	}
	if c.done {
		f := sglangFinish{Type: c.finish, Matched: c.matched}
		if c.finish == EndLength {
			f.Length = c.completion
		}
		b.Meta.Finish = f
	}
	return b
}

func (s *sglang) triple(id int32, lp float32) []any {
	text, ok := s.text.text(id)
	if !ok {
		return []any{lp, id, nil}
	}
	return []any{lp, id, text}
}

func (s *sglang) top(out engine.Output) []any {
	list := []any{}
	for _, t := range out.Top {
		list = append(list, s.triple(t.ID, t.Logprob))
	}
	return list
}

func (s *sglang) whole(cs []*choice) any {
	var list []*sglangBody
	for _, c := range cs {
		list = append(list, s.body(c, 0, c.text.String()))
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
	b := s.body(c, from, text)
	s.number(b, c)
	return b
}

func (s *sglang) last(c *choice, delta string) []any {
	from, text := len(c.outs), delta
	if !s.deltas {
		from, text = 0, c.text.String()
	}
	b := s.body(c, from, text)
	s.number(b, c)
	return []any{b}
}

func (s *sglang) number(b *sglangBody, c *choice) {
	if s.req.ItemNum > 1 || s.req.List {
		b.Index = &c.item
	}
}

func (s *sglang) usage([]*choice) any { return nil }

// sse is one event: "data: ", the JSON, an empty line.
func sse(buf []byte, v any) ([]byte, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return buf, err
	}
	buf = append(buf, "data: "...)
	buf = append(buf, data...)
	return append(buf, "\n\n"...), nil
}
