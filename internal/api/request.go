//metronome:pure

package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Kind is the path a request came in on.
type Kind uint8

// Kinds of requests.
const (
	Chat       Kind = iota + 1 // POST /v1/chat/completions
	Completion                 // POST /v1/completions
	Generate                   // POST /generate
)

// Message is one chat message.
type Message struct{ Role, Content string }

// Prompt is one input: text, or token ids when IDs is not nil.
type Prompt struct {
	Text string
	IDs  []int32
}

// Bias adds Value to the logit of token ID.
type Bias struct {
	ID    int32
	Value float32
}

// Pairing is what a router adds so that the two legs of an item find each other.
type Pairing struct {
	Host string
	Port int   // 0: the prefill's own setting, or the default
	Room int64 // 0 … 2^63-1; -1: none
}

// Request is a parsed and checked request of any of the three kinds.
type Request struct {
	Kind     Kind
	Model    string
	Messages []Message
	Prompts  []Prompt
	List     bool // the prompt came as a list: /generate answers with a list
	N        int  // choices for each prompt
	Echo     bool // /v1/completions: the answer begins with the prompt

	Sampling            // of every prompt,
	Each     []Sampling // unless /generate came with one for each

	Stream       bool
	IncludeUsage bool

	RIDs    []string  // /generate: one for each item, or one for all, or none
	Pairs   []Pairing // one for each item (prompt-major, then choice); nil: no room
	DPRank  int       // the prefill's DP rank, -1: not named
	ItemNum int       // len(Prompts) × N (chat: N)
	Journal *Journal  // what the stream has said already, elsewhere; nil: it is new
}

// Sampling is how the answers to one prompt are drawn and ended, and which
// log-probabilities come with them.
type Sampling struct {
	MaxTokens   int // -1: as many as fit; 0: none, the prompt is computed all the same
	Temperature float32
	TopP, MinP  float32
	TopK        int // 0: off
	Seed        *uint64
	Presence    float32
	Frequency   float32
	Repetition  float32
	LogitBias   []Bias
	Stop        []string
	KeepStop    bool // the stop string that ended the answer is part of it
	StopIDs     []int32
	IgnoreEOS   bool
	Logprobs    int // -1: none, else how many of the best beside the chosen one
	PromptFrom  int // first prompt token that is listed with log-probabilities; -1: none
}

// Of is the sampling of one prompt.
func (r *Request) Of(prompt int) *Sampling {
	if r.Each != nil {
		return &r.Each[prompt]
	}
	return &r.Sampling
}

// Limits of single fields, checked before anything is computed.
const (
	MaxChoices   = 128
	MaxItems     = 1024
	MaxStops     = 16
	MaxStopBytes = 1024
	MaxBiases    = 1024
)

// unsupported fields would change the answer, so they are refused by name
// unless they hold their default.
var unsupported = map[string]string{
	"tools": "[]", "tool_choice": `"none"`, "functions": "[]", "function_call": `"none"`, "response_format": `{"type":"text"}`,
	"best_of": "1", "suffix": `""`, "regex": "null", "json_schema": "null", "ebnf": "null", "structural_tag": "null",
	"guided_json": "null", "guided_regex": "null", "guided_choice": "null", "guided_grammar": "null", "structured_outputs": "null",
	"echo": "false", "audio": "null", "modalities": `["text"]`, "prediction": "null", "web_search_options": "null",
	"image_data": "[]", "video_data": "[]", "audio_data": "[]", "input_embeds": "null", "lora_path": "null", "session_params": "null",
	"return_hidden_states": "false", "custom_logit_processor": "null", "logits_processors": "[]", "min_tokens": "0", "min_new_tokens": "0",
	"prompt_logprobs": "null", "input_token_logprobs": "null", "top_logprobs_num_input": "0", "token_ids_logprob": "null",
	"continue_final_message": "false", "stop_regex": "[]", "reasoning_effort": "null", "verbosity": `"medium"`, "chat_template": "null",
	"chat_template_kwargs": "{}", "documents": "[]", "use_beam_search": "false", "length_penalty": "1", "truncate_prompt_tokens": "null",
	"allowed_token_ids": "null", "bad_words": "[]", "skip_special_tokens": "true", "add_special_tokens": "true", "add_generation_prompt": "true",
}

// ParseChat parses the body of POST /v1/chat/completions.
func ParseChat(body []byte) (*Request, *Error) { return parse(Chat, body) }

// ParseCompletion parses the body of POST /v1/completions.
func ParseCompletion(body []byte) (*Request, *Error) { return parse(Completion, body) }

// ParseGenerate parses the body of POST /generate.
func ParseGenerate(body []byte) (*Request, *Error) { return parse(Generate, body) }

func parse(kind Kind, body []byte) (*Request, *Error) {
	r := &Request{Kind: kind, N: 1, DPRank: -1, Sampling: Sampling{MaxTokens: -1, Temperature: 1, TopP: 1, Repetition: 1, Logprobs: -1, PromptFrom: -1}}
	if kind != Chat {
		r.MaxTokens = 16 // OpenAI's default for completions
	}
	if kind == Generate {
		r.MaxTokens = 128 // SGLang's
	}
	if !json.Valid(body) {
		return nil, invalidJSON(body)
	}
	p := parser{r: r, s: &r.Sampling}
	if err := eachField(body, "the body", p.field); err != nil {
		return nil, err
	}
	return r, p.finish()
}

func invalidJSON(body []byte) *Error {
	var v json.RawMessage
	err := json.Unmarshal(body, &v)
	return Errorf(InvalidRequest, "the body is not JSON: %v", err)
}

// JSONFault is what is wrong with JSON that did not fit a type of ours, whose
// name is nobody's business.
func JSONFault(err error) string {
	var t *json.UnmarshalTypeError
	switch {
	case !errors.As(err, &t):
		return err.Error()
	case t.Field == "":
		return "it is of type " + t.Value
	}
	return "`" + t.Field + "` is of type " + t.Value
}

// eachField calls f for every key of a JSON object, in order. The body has
// been checked by json.Valid. Keys match exactly: unlike encoding/json's
// structs, "Bootstrap_Room" is not "bootstrap_room".
func eachField(obj []byte, what string, f func(key string, val []byte) *Error) *Error {
	dec := json.NewDecoder(bytes.NewReader(obj))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return Errorf(InvalidRequest, "%s must be a JSON object", what)
	}
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return Errorf(InvalidRequest, "%s is not JSON: %v", what, err)
		}
		key := t.(string)
		if seen[key] {
			return twice(key)
		}
		seen[key] = true
		var val json.RawMessage
		if err := dec.Decode(&val); err != nil {
			return Errorf(InvalidRequest, "%s is not JSON: %v", what, err)
		}
		if e := f(key, val); e != nil {
			return e
		}
	}
	return nil
}

// twice refuses a field by its name, or the beginning of a long one: it stands in the log.
func twice(name string) *Error {
	name = name[:min(len(name), 64)]
	return &Error{Code: InvalidRequest, Message: "the field " + strconv.Quote(name) + " comes twice", Param: name}
}

// parser collects what needs more than one field to judge.
type parser struct {
	r              *Request
	s              *Sampling // where sampling parameters go
	choices        []int     // n of each entry of a list in sampling_params
	logprobs       bool      // chat: "logprobs": true
	topLogprobs    int       // chat
	messages, text bool
	hosts          []string
	ports          []int
	rooms          []int64
	journal        *string

	// /generate: one for all prompts, or one for each.
	returnLogprob []bool
	topNum, start []int
}

func wrongType(field, want string) *Error {
	return &Error{Code: InvalidRequest, Param: field, Message: "`" + field + "` must be " + want}
}

func isNull(val []byte) bool { return string(val) == "null" }

func (p *parser) field(key string, val []byte) *Error {
	if def, ok := unsupported[key]; ok && !(key == "echo" && p.r.Kind == Completion) {
		if isNull(val) || sameValue(compact(val), def) {
			return nil
		}
		return &Error{Code: Unsupported, Param: key, Message: "`" + key + "` is not supported; leave it out"}
	}
	if isNull(val) {
		return nil
	}
	switch key {
	case "model":
		return str(key, val, &p.r.Model)
	case "user":
		var s string
		return str(key, val, &s)
	case "stream":
		return boolean(key, val, &p.r.Stream)
	case "stream_options":
		return eachFieldIn(key, val, func(k string, v []byte) *Error {
			if k == "include_usage" && !isNull(v) {
				return boolean(key+".include_usage", v, &p.r.IncludeUsage)
			}
			return nil
		})
	case "messages", "prompt", "text", "input_ids":
		return p.input(key, val)
	case "sampling_params":
		if p.r.Kind != Generate {
			return nil
		}
		return p.samplingParams(val)
	case "return_logprob", "top_logprobs_num", "logprob_start_len":
		if p.r.Kind == Generate {
			return p.generateLogprobs(key, val)
		}
		return nil
	case "rid":
		return strs(key, val, MaxItems, 128, &p.r.RIDs)
	case "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank":
		return p.pairing(key, val)
	case JournalField:
		p.journal = new(string)
		return str(key, val, p.journal)
	}
	if p.r.Kind == Generate {
		return nil // SGLang keeps sampling in sampling_params
	}
	return p.openaiSampling(key, val)
}

// samplingParams takes SGLang's parameters: an object for all prompts, or a
// list with one for each.
func (p *parser) samplingParams(val []byte) *Error {
	if val[0] != '[' {
		return eachFieldIn("sampling_params", val, p.generateSampling)
	}
	var list []json.RawMessage
	if json.Unmarshal(val, &list) != nil || len(list) == 0 || len(list) > MaxItems {
		return wrongType("sampling_params", "an object, or a list with one for each prompt")
	}
	all, base := p.r, p.r.Sampling
	defer func() { p.s = &all.Sampling }()
	all.Each = make([]Sampling, len(list))
	for i, raw := range list {
		all.Each[i], all.N = base, 1
		p.s = &all.Each[i]
		if e := eachFieldIn("sampling_params", raw, p.generateSampling); e != nil {
			return e
		}
		p.choices = append(p.choices, all.N)
	}
	for _, n := range p.choices {
		if n != all.N {
			return wrongType("sampling_params.n", "the same for all prompts")
		}
	}
	return nil
}

// generateLogprobs takes what says which log-probabilities are wanted: one
// value for all prompts, or a list with one for each.
func (p *parser) generateLogprobs(key string, val []byte) *Error {
	raws := []json.RawMessage{val}
	if val[0] == '[' && (json.Unmarshal(val, &raws) != nil || len(raws) == 0 || len(raws) > MaxItems) {
		return wrongType(key, "one value, or a list with one for each prompt")
	}
	for _, raw := range raws {
		var e *Error
		switch {
		case isNull(raw):
			return wrongType(key, "without null in a list")
		case key == "return_logprob":
			var b bool
			e = boolean(key, raw, &b)
			p.returnLogprob = append(p.returnLogprob, b)
		case key == "top_logprobs_num":
			n := 0
			e = integer(key, raw, 0, MaxTopLogprobs, &n)
			p.topNum = append(p.topNum, n)
		default:
			n := 0
			e = integer(key, raw, -1, math.MaxInt32, &n)
			p.start = append(p.start, n)
		}
		if e != nil {
			return e
		}
	}
	return nil
}

func (p *parser) openaiSampling(key string, val []byte) *Error {
	switch key {
	case "max_tokens", "max_completion_tokens":
		return integer(key, val, 0, math.MaxInt32, &p.s.MaxTokens)
	case "echo":
		return boolean(key, val, &p.r.Echo)
	case "logprobs":
		if p.r.Kind == Chat {
			return boolean(key, val, &p.logprobs)
		}
		if string(val) == "false" {
			return nil
		}
		return integer(key, val, 0, MaxTopLogprobs, &p.s.Logprobs)
	case "top_logprobs":
		if p.r.Kind == Chat {
			return integer(key, val, 0, MaxTopLogprobs, &p.topLogprobs)
		}
		return nil
	case "n":
		return integer(key, val, 1, MaxChoices, &p.r.N)
	case "logit_bias":
		return p.logitBias(val)
	}
	return p.sampling(key, val)
}

func (p *parser) generateSampling(key string, val []byte) *Error {
	if isNull(val) {
		return nil
	}
	if _, ok := unsupported[key]; ok {
		return p.field(key, val)
	}
	switch key {
	case "max_new_tokens":
		return integer("sampling_params."+key, val, 0, math.MaxInt32, &p.s.MaxTokens)
	case "n":
		return integer("sampling_params."+key, val, 1, MaxChoices, &p.r.N)
	case "logit_bias":
		return p.logitBias(val)
	}
	return p.sampling(key, val)
}

// sampling takes the parameters that have one name in both dialects.
func (p *parser) sampling(key string, val []byte) *Error {
	r := p.s
	switch key {
	case "temperature":
		return number(key, val, 0, 100, &r.Temperature)
	case "top_p":
		if e := number(key, val, 0, 1, &r.TopP); e != nil {
			return e
		}
		if r.TopP == 0 {
			return wrongType(key, "above 0 and at most 1")
		}
	case "min_p":
		return number(key, val, 0, 1, &r.MinP)
	case "top_k":
		if string(val) == "-1" {
			r.TopK = 0
			return nil
		}
		return integer(key, val, 0, math.MaxInt32, &r.TopK)
	case "seed", "sampling_seed":
		if key == "sampling_seed" && p.r.Kind != Generate {
			return nil
		}
		var s int64
		if e := integer64(key, val, math.MinInt64, math.MaxInt64, &s); e != nil {
			return e
		}
		u := uint64(s)
		r.Seed = &u
	case "presence_penalty":
		return number(key, val, -2, 2, &r.Presence)
	case "frequency_penalty":
		return number(key, val, -2, 2, &r.Frequency)
	case "repetition_penalty":
		return number(key, val, 0.01, 2, &r.Repetition)
	case "stop":
		return strs(key, val, MaxStops, MaxStopBytes, &r.Stop)
	case "include_stop_str_in_output", "no_stop_trim":
		return boolean(key, val, &r.KeepStop)
	case "stop_token_ids":
		return ids(key, val, &r.StopIDs)
	case "ignore_eos":
		return boolean(key, val, &r.IgnoreEOS)
	}
	return nil
}

// input takes the prompt in each of its forms.
func (p *parser) input(key string, val []byte) *Error {
	r := p.r
	switch {
	case key == "messages" && r.Kind == Chat:
		return p.chatMessages(val)
	case key == "prompt" && r.Kind == Completion, (key == "text" || key == "input_ids") && r.Kind == Generate:
	default:
		return nil
	}
	if p.text {
		return wrongType(key, "given once: either `text` or `input_ids`")
	}
	p.text = true
	idsOnly, textOnly := key == "input_ids", key == "text"
	want := "a string, a list of strings, a list of token ids or a list of such lists"
	if textOnly {
		want = "a string or a list of strings"
	} else if idsOnly {
		want = "a list of token ids or a list of such lists"
	}
	if val[0] == '"' && !idsOnly {
		var s string
		if e := str(key, val, &s); e != nil {
			return e
		}
		r.Prompts = []Prompt{{Text: s}}
		return nil
	}
	var list []json.RawMessage
	if val[0] != '[' || json.Unmarshal(val, &list) != nil {
		return wrongType(key, want)
	}
	if len(list) == 0 {
		return wrongType(key, "a prompt or a list of at least one; it is an empty list")
	}
	switch first := list[0][0]; {
	case first == '"' && !idsOnly:
		return p.textList(key, list)
	case first == '[' && !textOnly:
		return p.idLists(key, list)
	case !textOnly:
		one := []int32{}
		if e := ids(key, val, &one); e != nil {
			return wrongType(key, want)
		}
		r.Prompts = []Prompt{{IDs: one}}
		return nil
	}
	return wrongType(key, want)
}

func (p *parser) textList(key string, list []json.RawMessage) *Error {
	if len(list) > MaxItems {
		return wrongType(key, "a list of at most "+strconv.Itoa(MaxItems)+" prompts")
	}
	p.r.List = true
	for _, raw := range list {
		var s string
		if e := str(key, raw, &s); e != nil {
			return wrongType(key, "a list of strings throughout")
		}
		p.r.Prompts = append(p.r.Prompts, Prompt{Text: s})
	}
	return nil
}

func (p *parser) idLists(key string, list []json.RawMessage) *Error {
	if len(list) > MaxItems {
		return wrongType(key, "a list of at most "+strconv.Itoa(MaxItems)+" prompts")
	}
	p.r.List = true
	for _, raw := range list {
		one := []int32{}
		if e := ids(key, raw, &one); e != nil {
			return wrongType(key, "a list of lists of token ids throughout")
		}
		p.r.Prompts = append(p.r.Prompts, Prompt{IDs: one})
	}
	return nil
}

func (p *parser) chatMessages(val []byte) *Error {
	var list []json.RawMessage
	if val[0] != '[' || json.Unmarshal(val, &list) != nil || len(list) == 0 {
		return wrongType("messages", "a list of at least one message")
	}
	p.messages = true
	for i, raw := range list {
		name := "messages[" + strconv.Itoa(i) + "]"
		var m Message
		hasRole, hasContent := false, false
		e := eachFieldIn(name, raw, func(k string, v []byte) *Error {
			switch k {
			case "role":
				hasRole = true
				return str(name+".role", v, &m.Role)
			case "content":
				hasContent = !isNull(v)
				return content(name+".content", v, &m.Content)
			case "tool_calls", "function_call", "tool_call_id":
				if !isNull(v) && string(compact(v)) != "[]" {
					return &Error{Code: Unsupported, Param: name + "." + k, Message: "`" + name + "." + k + "` is not supported; leave it out"}
				}
			}
			return nil
		})
		if e != nil {
			return e
		}
		if !hasRole || m.Role == "" || !hasContent {
			return wrongType(name, `an object with "role" and "content"`)
		}
		p.r.Messages = append(p.r.Messages, m)
	}
	return nil
}

// content is a string, or OpenAI's list of parts of which we take text.
func content(field string, val []byte, out *string) *Error {
	if isNull(val) {
		return nil
	}
	if val[0] == '"' {
		return str(field, val, out)
	}
	var parts []json.RawMessage
	if val[0] != '[' || json.Unmarshal(val, &parts) != nil {
		return wrongType(field, "a string or a list of text parts")
	}
	var b strings.Builder
	for _, raw := range parts {
		var kind, text string
		e := eachFieldIn(field, raw, func(k string, v []byte) *Error {
			switch k {
			case "type":
				return str(field+".type", v, &kind)
			case "text":
				return str(field+".text", v, &text)
			}
			return nil
		})
		if e != nil {
			return e
		}
		if kind != "text" {
			return &Error{Code: Unsupported, Param: field, Message: "`" + field + "` has a part that is not of type \"text\", the only one that is supported"}
		}
		b.WriteString(text)
	}
	*out = b.String()
	return nil
}

// pairing takes the router's fields: each a scalar or a list with one entry
// for each item.
func (p *parser) pairing(key string, val []byte) *Error {
	switch key {
	case "bootstrap_host":
		return strs(key, val, MaxItems*MaxChoices, 255, &p.hosts)
	case "disagg_prefill_dp_rank":
		return integer(key, val, 0, 1<<20, &p.r.DPRank)
	}
	raws := []json.RawMessage{val}
	if val[0] == '[' {
		raws = nil
		if json.Unmarshal(val, &raws) != nil || len(raws) == 0 {
			return wrongType(key, "an integer or a list of integers")
		}
	}
	for _, raw := range raws {
		if key == "bootstrap_port" {
			port := 0
			if !isNull(raw) {
				if e := integer(key, raw, 1, 65535, &port); e != nil {
					return e
				}
			}
			p.ports = append(p.ports, port)
			continue
		}
		var room int64
		if e := integer64(key, raw, 0, math.MaxInt64, &room); e != nil {
			return e
		}
		p.rooms = append(p.rooms, room)
	}
	return nil
}

// finish judges what needs the whole body.
func (p *parser) finish() *Error {
	r := p.r
	items := len(r.Prompts) * r.N
	switch {
	case r.Kind == Chat && !p.messages:
		return &Error{Code: InvalidRequest, Param: "messages", Message: "`messages` is missing"}
	case r.Kind == Completion && !p.text:
		return &Error{Code: InvalidRequest, Param: "prompt", Message: "`prompt` is missing"}
	case r.Kind == Generate && !p.text:
		return &Error{Code: InvalidRequest, Param: "text", Message: "`text` or `input_ids` is missing"}
	case r.Kind == Chat:
		items = r.N
	}
	if items > MaxItems {
		return Errorf(InvalidRequest, "%d answers asked for in one request; at most %d are given", items, MaxItems)
	}
	r.ItemNum = items
	if r.Kind == Chat && p.logprobs {
		r.Logprobs = p.topLogprobs
	} else if r.Kind == Chat && p.topLogprobs > 0 {
		return wrongType("top_logprobs", "given together with `logprobs`: true")
	}
	if r.Echo && r.Logprobs >= 0 {
		r.PromptFrom = 0
	}
	if e := p.perPrompt(); e != nil {
		return e
	}
	if len(r.RIDs) > 1 && len(r.RIDs) != items {
		return wrongType("rid", "one id, or a list with one for each of the "+strconv.Itoa(items)+" answers")
	}
	if p.journal != nil {
		var err *Error
		if r.Journal, err = ParseJournal(*p.journal, items); err != nil {
			return err
		}
	}
	return p.pairs(items)
}

// perPrompt spreads what /generate gave for each prompt.
func (p *parser) perPrompt() *Error {
	r := p.r
	n := len(r.Prompts)
	each := len(r.Each) > 0
	for _, f := range []struct {
		name string
		n    int
	}{{"sampling_params", len(r.Each)}, {"return_logprob", len(p.returnLogprob)}, {"top_logprobs_num", len(p.topNum)}, {"logprob_start_len", len(p.start)}} {
		if f.n > 1 && f.n != n {
			return wrongType(f.name, "one value, or a list with one for each of the "+strconv.Itoa(n)+" prompts")
		}
		each = each || f.n > 1
	}
	if len(r.Each) == 1 && n > 1 {
		r.Each = slices.Repeat(r.Each, n)
	} else if len(r.Each) == 0 && each {
		r.Each = slices.Repeat([]Sampling{r.Sampling}, n)
	}
	logprobs := func(s *Sampling, i int) {
		if len(p.returnLogprob) == 0 || !p.returnLogprob[min(i, len(p.returnLogprob)-1)] {
			return
		}
		s.Logprobs = 0
		if len(p.topNum) > 0 {
			s.Logprobs = p.topNum[min(i, len(p.topNum)-1)]
		}
		if len(p.start) > 0 {
			s.PromptFrom = p.start[min(i, len(p.start)-1)]
		}
	}
	if r.Each == nil && r.Kind == Generate {
		logprobs(&r.Sampling, 0)
	}
	for i := range r.Each {
		logprobs(&r.Each[i], i)
	}
	return nil
}

// pairs spreads the pairing fields over the items: a scalar room r becomes
// r, r+1, … as SGLang does; host and port are repeated.
func (p *parser) pairs(items int) *Error {
	if len(p.rooms) == 0 {
		return nil
	}
	at := func(n, i int) int { return min(i, n-1) }
	for _, f := range []struct {
		name string
		n    int
	}{{"bootstrap_host", len(p.hosts)}, {"bootstrap_port", len(p.ports)}, {"bootstrap_room", len(p.rooms)}} {
		if f.n > 1 && f.n != items {
			return Errorf(InvalidRequest, "`%s` has %d entries for %d answers", f.name, f.n, items)
		}
	}
	for i := range items {
		pair := Pairing{Room: p.rooms[at(len(p.rooms), i)]}
		if len(p.rooms) == 1 {
			if pair.Room > math.MaxInt64-int64(i) {
				return Errorf(InvalidRequest, "`bootstrap_room` %d leaves no room numbers for %d answers", pair.Room, items)
			}
			pair.Room += int64(i)
		}
		if len(p.hosts) > 0 {
			pair.Host = p.hosts[at(len(p.hosts), i)]
		}
		if len(p.ports) > 0 {
			pair.Port = p.ports[at(len(p.ports), i)]
		}
		p.r.Pairs = append(p.r.Pairs, pair)
	}
	return nil
}

func (p *parser) logitBias(val []byte) *Error {
	n := 0
	p.s.LogitBias = nil
	return eachFieldIn("logit_bias", val, func(k string, v []byte) *Error {
		id, err := strconv.ParseInt(k, 10, 32)
		var b Bias
		if n++; err != nil || id < 0 || n > MaxBiases {
			return wrongType("logit_bias", "an object of at most "+strconv.Itoa(MaxBiases)+" token ids with values from -100 to 100")
		}
		b.ID = int32(id)
		if e := number("logit_bias", v, -100, 100, &b.Value); e != nil {
			return e
		}
		p.s.LogitBias = append(p.s.LogitBias, b)
		return nil
	})
}

// sameValue tells whether a compact value says what def says: 1.0 is 1.
func sameValue(val []byte, def string) bool {
	if string(val) == def {
		return true
	}
	a, err := strconv.ParseFloat(string(val), 64)
	b, no := strconv.ParseFloat(def, 64)
	return err == nil && no == nil && a == b
}

func eachFieldIn(name string, val []byte, f func(key string, val []byte) *Error) *Error {
	var inner *Error
	e := eachField(val, "`"+name+"`", func(k string, v []byte) *Error {
		inner = f(k, v)
		return inner
	})
	if e != nil && (e != inner || e.Param == "") {
		e.Param = name
	}
	return e
}

func compact(val []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, val) != nil {
		return val
	}
	return b.Bytes()
}

func str(field string, val []byte, out *string) *Error {
	if json.Unmarshal(val, out) != nil || val[0] != '"' {
		return wrongType(field, "a string")
	}
	return nil
}

func boolean(field string, val []byte, out *bool) *Error {
	switch string(val) {
	case "true":
		*out = true
	case "false":
		*out = false
	default:
		return wrongType(field, "true or false")
	}
	return nil
}

func number(field string, val []byte, lo, hi float64, out *float32) *Error {
	f, err := strconv.ParseFloat(string(val), 64)
	if err != nil || val[0] == '"' || !(f >= lo && f <= hi) {
		return wrongType(field, "a number from "+strconv.FormatFloat(lo, 'g', -1, 64)+" to "+strconv.FormatFloat(hi, 'g', -1, 64))
	}
	*out = float32(f)
	return nil
}

func integer64(field string, val []byte, lo, hi int64, out *int64) *Error {
	n, err := strconv.ParseInt(string(val), 10, 64)
	if err != nil || n < lo || n > hi {
		return wrongType(field, "an integer from "+strconv.FormatInt(lo, 10)+" to "+strconv.FormatInt(hi, 10))
	}
	*out = n
	return nil
}

func integer(field string, val []byte, lo, hi int64, out *int) *Error {
	var n int64
	if e := integer64(field, val, lo, hi, &n); e != nil {
		return e
	}
	*out = int(n)
	return nil
}

// strs takes a string or a list of at most most strings of at most bytes bytes.
func strs(field string, val []byte, most, bytes int, out *[]string) *Error {
	var list []json.RawMessage
	if val[0] == '"' {
		list = []json.RawMessage{val}
	} else if val[0] != '[' || json.Unmarshal(val, &list) != nil {
		return wrongType(field, "a string or a list of strings")
	}
	if len(list) > most {
		return wrongType(field, "a list of at most "+strconv.Itoa(most)+" strings")
	}
	*out = nil
	for _, raw := range list {
		var s string
		if e := str(field, raw, &s); e != nil {
			return wrongType(field, "a string or a list of strings")
		}
		if s == "" || len(s) > bytes {
			return wrongType(field, "made of strings of 1 to "+strconv.Itoa(bytes)+" bytes")
		}
		*out = append(*out, s)
	}
	return nil
}

func ids(field string, val []byte, out *[]int32) *Error {
	var list []json.Number
	if val[0] != '[' || json.Unmarshal(val, &list) != nil {
		return wrongType(field, "a list of token ids")
	}
	for _, n := range list {
		id, err := strconv.ParseInt(n.String(), 10, 32)
		if err != nil || id < 0 {
			return wrongType(field, "a list of token ids, integers from 0")
		}
		*out = append(*out, int32(id))
	}
	return nil
}
