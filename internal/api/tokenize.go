//metronome:pure

package api

import (
	"encoding/json"
	"strconv"
)

// Tokenize is the body of POST /tokenize.
type Tokenize struct {
	Messages   []Message // nil: Text
	Text       string
	Special    bool // control tokens in the text are recognised
	Begin      bool // what the model puts before every text is there
	Generation bool // messages: the beginning of an answer follows them
}

// ParseTokenize parses the body of POST /tokenize. A text comes as `text`, ours,
// or as `prompt`, vLLM's, in which control tokens are recognised.
func ParseTokenize(body []byte) (*Tokenize, *Error) {
	t := &Tokenize{Begin: true, Generation: true}
	var inputs, special []string
	p := parser{r: &Request{Kind: Chat}}
	e := object(body, func(key string, val []byte) *Error {
		switch key {
		case "text", "prompt":
			inputs = append(inputs, key)
			return str(key, val, &t.Text)
		case "messages":
			inputs = append(inputs, key)
			return p.chatMessages(val)
		case "parse_special":
			special = append(special, key)
			return boolean(key, val, &t.Special)
		case "add_special_tokens":
			return boolean(key, val, &t.Begin)
		case "add_generation_prompt":
			return boolean(key, val, &t.Generation)
		}
		return nil
	})
	if e == nil && len(inputs) != 1 {
		e = Errorf(InvalidRequest, "/tokenize takes one of `text`, `messages` and `prompt`")
	}
	if e != nil {
		return nil, e
	}
	t.Messages = p.r.Messages
	t.Special = t.Special || inputs[0] == "prompt" && special == nil
	return t, nil
}

// ParseDetokenize parses the body of POST /detokenize for a vocabulary of so many tokens.
func ParseDetokenize(body []byte, vocab int) (tokens []int32, e *Error) {
	e = object(body, func(key string, val []byte) *Error {
		if key != "tokens" {
			return nil
		}
		tokens = []int32{}
		return ids(key, val, &tokens)
	})
	if e == nil && tokens == nil {
		e = wrongType("tokens", "a list of token ids")
	}
	for _, id := range tokens {
		if e == nil && int(id) >= vocab {
			e = wrongType("tokens", "made of ids below "+strconv.Itoa(vocab)+", the size of the vocabulary")
		}
	}
	return tokens, e
}

// ParseAbort parses the body of POST /abort_request: the request that is meant, or all.
func ParseAbort(body []byte) (rid string, all bool, e *Error) {
	e = object(body, func(key string, val []byte) *Error {
		switch key {
		case "rid":
			return str(key, val, &rid)
		case "abort_all":
			return boolean(key, val, &all)
		}
		return nil
	})
	if e == nil && (rid == "") == !all {
		e = Errorf(InvalidRequest, "/abort_request takes either `rid` or `abort_all`: true")
	}
	return rid, all, e
}

// object calls f for every field of a body; null is as good as absent.
func object(body []byte, f func(key string, val []byte) *Error) *Error {
	if !json.Valid(body) {
		return invalidJSON(body)
	}
	return eachField(body, "the body", func(key string, val []byte) *Error {
		if isNull(val) {
			return nil
		}
		return f(key, val)
	})
}
