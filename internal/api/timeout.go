//metronome:pure

package api

import (
	"net/http"
	"strconv"
	"time"
)

// TimeoutHeader bounds the whole of a request.
const TimeoutHeader = "X-Request-Timeout"

// TimeLimit is what the value of TimeoutHeader allows, at most most: a duration
// like 30s, or a number of seconds. Whoever passes on what is left of a
// request's time may find that nothing is.
func TimeLimit(value string, most time.Duration) (time.Duration, *Error) {
	if value == "" {
		return most, nil
	}
	d, err := time.ParseDuration(value)
	if err != nil {
		if secs, e := strconv.ParseFloat(value, 64); e == nil && secs > -1e9 && secs < 1e9 {
			d, err = time.Duration(secs*float64(time.Second)), nil
		}
	}
	switch {
	case err != nil:
		return 0, &Error{Code: InvalidRequest, Param: TimeoutHeader,
			Message: TimeoutHeader + " " + strconv.Quote(value[:min(len(value), 64)]) + " is no duration like 30s or 500ms"}
	case d <= 0:
		return 0, &Error{Code: DeadlineExceeded, Status: http.StatusRequestTimeout, Message: "the request's time was over before any work"}
	}
	return min(d, most), nil
}
