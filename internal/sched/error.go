//metronome:pure

package sched

import (
	"fmt"
	"time"
)

// Code is the stable word of a failure; the same words as on HTTP.
type Code string

// The codes a core ends requests with. The driver maps them to HTTP by name.
const (
	InvalidRequest        Code = "invalid_request"
	ContextLengthExceeded Code = "context_length_exceeded"
	DeadlineExceeded      Code = "deadline_exceeded"
	Overloaded            Code = "overloaded"
	ClientGone            Code = "client_gone"
	Aborted               Code = "aborted"
	Internal              Code = "internal"
	PrefillUnreachable    Code = "prefill_unreachable"
	DecodeUnreachable     Code = "decode_unreachable"
	KVTransferFailed      Code = "kv_transfer_failed"
	PeerMismatch          Code = "peer_mismatch"
	NoPrefill             Code = "no_prefill"
	Draining              Code = "draining"
)

// Error is why a request, a peer or the process ends.
type Error struct {
	Code       Code
	Message    string
	RetryAfter time.Duration // 0: none
	NoWork     bool          // DeadlineExceeded before any work was done (HTTP 408, else 504)
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

func errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// refused is an error that says: try again.
func refused(code Code, format string, args ...any) *Error {
	e := errorf(code, format, args...)
	e.RetryAfter = time.Second
	return e
}

// tooLong says that a request does not fit. A prefill core does not know maxTokens (0).
func tooLong(prompt, maxTokens int, what string, holds int) *Error {
	if maxTokens == 0 {
		return errorf(ContextLengthExceeded, "%d prompt tokens do not fit the %s of %d tokens", prompt, what, holds)
	}
	return errorf(ContextLengthExceeded, "%d prompt tokens and max_tokens %d do not fit the %s of %d tokens", prompt, maxTokens, what, holds)
}
