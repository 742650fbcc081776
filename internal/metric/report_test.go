package metric

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// A timeline goes to another process and back, in milliseconds and in order;
// what is no time is refused, what is not known left out.
func TestTimelineOnTheWire(t *testing.T) {
	var a, b Timeline
	a.Set(LastToken, 3*time.Second)
	a.Set(Queued, 0)
	a.Set(FirstToken, 1500*time.Microsecond)
	a.Set(FirstToken, time.Minute) // the first time counts
	a.Set(LastToken, 4*time.Second)
	text, err := json.Marshal(a)
	if want := `{"queued":0,"first_token":1.5,"last_token":4000}`; err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
	if err := json.Unmarshal([]byte(`{"later":1,`+string(text[1:])), &b); err != nil || fmt.Sprint(a.Moments()) != fmt.Sprint(b.Moments()) {
		t.Errorf("%v came back as %v, %v", a.Moments(), b.Moments(), err)
	}
	for _, bad := range []string{`{"queued":-1}`, `{"queued":1e300}`, `{"queued":"1"}`, `[1]`} {
		if json.Unmarshal([]byte(bad), &b) == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

func TestRing(t *testing.T) {
	r := NewRing[int](4)
	all := func(int) bool { return true }
	if got := r.Newest(9, all); got != nil {
		t.Error(got)
	}
	for i := range 10 {
		r.Add(i)
	}
	if got := fmt.Sprint(r.Newest(3, all), r.Newest(9, func(v int) bool { return v != 8 })); got != "[9 8 7] [9 7 6]" {
		t.Error(got)
	}
}

// A report keeps a bounded part of what clients and peers say.
func TestReportIsBounded(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	r := Report{Request: "q", RID: long, Error: long, Finish: long}
	r.Clip()
	if n := len(r.RID) + len(r.Error) + len(r.Finish); n > 2*maxID+maxText {
		t.Errorf("%d bytes are kept", n)
	}
	if !r.Is("q") || !r.Is(long) || r.Is("x") {
		t.Error("a report is found by its id and its rid, whole")
	}
}
