package api

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"
	"unicode/utf8"
)

// AppendErrorJSON appends e as OpenAI's error body:
// {"error":{"message":…,"type":…,"code":…,"param":…}}.
func AppendErrorJSON(b []byte, e *Error) []byte {
	b = appendString(append(b, `{"error":{"message":`...), e.Message)
	b = appendString(append(b, `,"type":`...), errorType(e.HTTPStatus()))
	b = appendString(append(b, `,"code":`...), string(e.Code))
	b = append(b, `,"param":`...)
	if e.Param == "" {
		b = append(b, "null"...)
	} else {
		b = appendString(b, e.Param)
	}
	return append(b, "}}"...)
}

// errorType is OpenAI's word for the kind of an error with this status.
func errorType(status int) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status == http.StatusRequestTimeout, status == http.StatusGatewayTimeout:
		return "timeout_error"
	case status < 500:
		return "invalid_request_error"
	}
	return "server_error"
}

// retryAfter is the delay in whole seconds to be sent with e, 0 for none. The
// codes that mean "try again" always have one.
func (e *Error) retryAfter() int {
	d := e.RetryAfter
	switch e.Code {
	case Overloaded, NoPrefill, NoDecode, Draining, Starting:
		d = max(d, time.Second)
	}
	return int((d + time.Second - 1) / time.Second)
}

// WriteError answers a request with e. Nothing must have been written before.
// The time-out carries x-should-retry: false, because OpenAI's client repeats
// 408 and 5xx by itself, which would double the work of a request that nobody
// waits for any more.
func WriteError(w http.ResponseWriter, e *Error) {
	body := append(AppendErrorJSON(nil, e), '\n')
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if s := e.retryAfter(); s > 0 {
		h.Set("Retry-After", strconv.Itoa(s))
	}
	switch e.Code {
	case DeadlineExceeded:
		h.Set("X-Should-Retry", "false")
	case Unauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(e.HTTPStatus())
	w.Write(body) // an error here is the client's end of the connection, which the server notices
}

// appendString appends s as a JSON string; what is not UTF-8 becomes U+FFFD.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, `\n`...)
		case c < 0x20 || c == 0x7f:
			b = append(b, `\u00`...)
			b = append(b, hex[c>>4], hex[c&15])
		case c < utf8.RuneSelf:
			b = append(b, c)
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			b = utf8.AppendRune(b, r)
			i += n
			continue
		}
		i++
	}
	return append(b, '"')
}

// AppendErrorEvent appends e as an event, for a stream that has begun. The
// connection is closed after it, without Done.
func AppendErrorEvent(b []byte, e *Error) []byte {
	b = append(b, "data: "...)
	b = AppendErrorJSON(b, e)
	return append(b, "\n\n"...)
}

// BoundBody gives the body of a request so long to arrive. net/http reads what
// is left of a body before it answers, also where the answer is that of a wrong
// path or token; without a bound it would wait for ever.
func BoundBody(w http.ResponseWriter, r *http.Request, within time.Duration) {
	if r.ContentLength != 0 {
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(within))
	}
}

// BodyError says why a request's body could not be read.
func BodyError(err error) *Error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &Error{Code: DeadlineExceeded, Status: http.StatusRequestTimeout, Message: "the body did not arrive in time"}
	case errors.Is(err, io.ErrUnexpectedEOF): // who has only closed its sending side can still be told
		return Errorf(InvalidRequest, "the body did not arrive whole: %v", err)
	case isNetwork(err):
		return Errorf(ClientGone, "the body broke off: %v", err)
	}
	return Errorf(InvalidRequest, "the body cannot be read: %v", err) // a chunk without a length, say
}

// isNetwork says whether an error is the connection's, and not of what came.
func isNetwork(err error) bool {
	var network net.Error
	var system syscall.Errno
	return errors.As(err, &network) || errors.As(err, &system) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe)
}
