//metronome:pure

// Package api holds what goes over HTTP between clients, router and workers:
// request and stream types, the error body, and the scanner that reads and
// splices a request body without decoding it.
package api

import (
	"fmt"
	"net/http"
	"time"
)

// Code is the stable word for a kind of failure. It is a promise to clients:
// codes are added, never renamed.
type Code string

// The codes of docs/http.md, each with its HTTP status.
const (
	InvalidRequest        Code = "invalid_request"         // 400
	ContextLengthExceeded Code = "context_length_exceeded" // 400
	Unsupported           Code = "unsupported"             // 400
	Unauthorized          Code = "unauthorized"            // 401
	Forbidden             Code = "forbidden"               // 403
	ModelNotFound         Code = "model_not_found"         // 404
	NotFound              Code = "not_found"               // 404
	MethodNotAllowed      Code = "method_not_allowed"      // 405
	DeadlineExceeded      Code = "deadline_exceeded"       // 408 before any work, 504 after
	BodyTooLarge          Code = "body_too_large"          // 413
	Overloaded            Code = "overloaded"              // 429, Retry-After
	ClientGone            Code = "client_gone"             // 499, log only
	Aborted               Code = "aborted"                 // 499: /abort_request named it
	Internal              Code = "internal"                // 500
	PrefillUnreachable    Code = "prefill_unreachable"     // 502
	DecodeUnreachable     Code = "decode_unreachable"      // 502
	KVTransferFailed      Code = "kv_transfer_failed"      // 502
	PeerMismatch          Code = "peer_mismatch"           // 502
	NoPrefill             Code = "no_prefill"              // 503, Retry-After
	NoDecode              Code = "no_decode"               // 503, Retry-After
	Draining              Code = "draining"                // 503, Retry-After
	Starting              Code = "starting"                // 503, Retry-After
)

// Error is the one error type that reaches clients, on every path.
type Error struct {
	Code       Code
	Status     int           // HTTP status; 0 means the code's own
	Message    string        // for people: what is wrong and what would be right
	Param      string        // the field at fault, or ""
	RetryAfter time.Duration // sent as Retry-After in whole seconds, at least 1; 0: none
}

// Errorf makes an Error with the code's own status.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// With sets another status than the code's own.
func (e *Error) With(status int) *Error {
	e.Status = status
	return e
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// HTTPStatus is the status to answer with.
func (e *Error) HTTPStatus() int {
	if e.Status != 0 {
		return e.Status
	}
	switch e.Code {
	case InvalidRequest, ContextLengthExceeded, Unsupported:
		return http.StatusBadRequest
	case Unauthorized:
		return http.StatusUnauthorized
	case Forbidden:
		return http.StatusForbidden
	case ModelNotFound, NotFound:
		return http.StatusNotFound
	case MethodNotAllowed:
		return http.StatusMethodNotAllowed
	case DeadlineExceeded:
		return http.StatusGatewayTimeout
	case BodyTooLarge:
		return http.StatusRequestEntityTooLarge
	case Overloaded:
		return http.StatusTooManyRequests
	case ClientGone, Aborted:
		return 499
	case PrefillUnreachable, DecodeUnreachable, KVTransferFailed, PeerMismatch:
		return http.StatusBadGateway
	case NoPrefill, NoDecode, Draining, Starting:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// Known tells whether c is one of the codes of this package.
func (c Code) Known() bool {
	switch c {
	case InvalidRequest, ContextLengthExceeded, Unsupported, Unauthorized, Forbidden, ModelNotFound, NotFound, MethodNotAllowed,
		DeadlineExceeded, BodyTooLarge, Overloaded, ClientGone, Aborted, Internal, PrefillUnreachable, DecodeUnreachable, KVTransferFailed,
		PeerMismatch, NoPrefill, NoDecode, Draining, Starting:
		return true
	}
	return false
}
