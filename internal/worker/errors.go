package worker

import (
	"net/http"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/sched"
	"github.com/metronome-serve/metronome/internal/transfer"
)

// The three error types carry the same codes, word for word.

func apiError(e *sched.Error) *api.Error {
	if e == nil {
		return nil
	}
	a := &api.Error{Code: api.Code(e.Code), Message: e.Message, RetryAfter: e.RetryAfter}
	if e.NoWork && e.Code == sched.DeadlineExceeded {
		a.Status = http.StatusRequestTimeout
	}
	return a
}

func schedError(e *api.Error) *sched.Error {
	if e == nil {
		return nil
	}
	return &sched.Error{Code: sched.Code(e.Code), Message: e.Message, RetryAfter: e.RetryAfter}
}

func fromCause(c *transfer.Cause) *sched.Error {
	if c == nil {
		return nil
	}
	return &sched.Error{Code: sched.Code(c.Code), Message: c.Message}
}

func toCause(e *sched.Error) *transfer.Cause {
	if e == nil {
		return nil
	}
	return &transfer.Cause{Code: string(e.Code), Message: e.Message}
}
