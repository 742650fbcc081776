package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"
)

// book has every answer that Generate and Stream got, by whom they asked, until
// the test ends and they are judged: I1, I4 and I6 as far as no knowledge of the
// test is needed. That a stream keeps its beat (I2) only its test can say: which
// one no fault touches.
var book struct {
	mu   sync.Mutex
	told map[part][]told
}

type told struct {
	body    string // as JSON
	overdue bool   // it was not over when requestBound was; who gives less time is one who leaves
	*Answer
}

// note is what Heard does.
func note(ctx context.Context, q Ask, a *Answer, err error) {
	until, bound := ctx.Deadline()
	overdue := err != nil && bound && until.Sub(q.Began) > requestBound-time.Second && errors.Is(ctx.Err(), context.DeadlineExceeded)
	if err != nil && !overdue { // the caller left, or there was no answer of ours
		return
	}
	text, _ := json.Marshal(q.Body)
	book.mu.Lock()
	defer book.mu.Unlock()
	if book.told == nil {
		book.told = map[part][]told{}
	}
	by := part{q.Base, q.Client}
	book.told[by] = append(book.told[by], told{string(text), overdue, a})
}

// strike takes what was told by one part out of the book.
func strike(by part) []told {
	book.mu.Lock()
	defer book.mu.Unlock()
	all := book.told[by]
	delete(book.told, by)
	return all
}

// greedy tells whether every answer to a body has the same tokens.
func greedy(body string) bool {
	var b struct {
		Sampling struct{ Temperature *float64 } `json:"sampling_params"`
	}
	return json.Unmarshal([]byte(body), &b) == nil && b.Sampling.Temperature != nil && *b.Sampling.Temperature == 0
}

// judgeTold (I1, I4, I6): each request ended in its time, with a whole answer
// whose usage is that of its tokens or with an error of a name; all whole answers
// to one body are the same; and the router, if it lives, has counted them.
func judgeTold(t *testing.T, p part, lives bool, all []told) {
	whole, codes := map[string]*Answer{}, map[string]float64{}
	for _, a := range all {
		switch {
		case a.overdue:
			t.Errorf("%s: a request had not ended in its time: %.200s", p.base, a.body)
		case a.Error != nil:
			codes[a.Error.Code]++
		case a.Completion != len(a.IDs) || a.Prompt == 0 || a.Finish == "":
			t.Errorf("%s: usage says %d + %d tokens, finish %q; the client has %d: %.200s", p.base, a.Prompt, a.Completion, a.Finish, len(a.IDs), a.body)
		default:
			codes["ok"]++
			if whole[a.body] == nil && greedy(a.body) {
				whole[a.body] = a.Answer
			}
		}
	}
	for _, a := range all {
		if want := whole[a.body]; want != nil && !a.overdue {
			trueOrError(t, a.Answer, want)
		} else if !a.overdue && a.Error != nil {
			trueOrError(t, a.Answer, a.Answer)
		}
	}
	if lives {
		p.hasCounted(t, codes)
	}
}

// hasCounted (I6): others may have asked as well, so it is these at the least.
func (p part) hasCounted(t *testing.T, codes map[string]float64) {
	got := map[string]float64{}
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		m, _ := p.held()
		got = byCode(m)
		if !slices.ContainsFunc(slices.Collect(maps.Keys(codes)), func(code string) bool { return got[code] < codes[code] }) {
			return
		}
	}
	t.Errorf("%s has counted %v, its clients at least %v", p.base, got, codes)
}
