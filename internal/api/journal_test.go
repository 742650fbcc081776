package api

import (
	"bytes"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

// sample is a journal with everything in it, and its text.
func sample() (*Journal, string) {
	j := &Journal{Created: 1700000000, Usage: true, Items: []ItemJournal{
		{Begun: true, Seed: 1<<64 - 1, Cached: 16, Max: 3, Ended: true, Tokens: []JournalToken{
			{TokenLogprob: TokenLogprob{7, -0.5}, Top: []TokenLogprob{{7, -0.5}, {9, -1.25}}},
			{TokenLogprob: TokenLogprob{0, -3}},
		}},
		{},
		{Begun: true, Max: 1, Tokens: []JournalToken{{TokenLogprob: TokenLogprob{ID: 2}}}},
	}}
	b := AppendCreated(nil, j.Created)
	for i, it := range j.Items {
		if it.Begun {
			b = AppendBegun(b, i, it.Seed, it.Cached, it.Max)
		}
		for k := range it.Tokens {
			b = AppendToken(b, i, &it.Tokens[k], i == 0)
		}
		if it.Ended {
			b = AppendEnded(b, i)
		}
	}
	return j, string(AppendUsage(b))
}

func TestJournalRoundTrip(t *testing.T) {
	want, text := sample()
	want.Size = len(text)
	if got, err := ParseJournal(text, 3); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s\n got %+v %v\nwant %+v", text, got, err, want)
	}
	if text != "c 1700000000;b 0 18446744073709551615 16 3;t 0 7 bf000000 7 bf000000 9 bfa00000;t 0 0 c0400000;e 0;b 2 0 0 1;t 2 2;u;" {
		t.Errorf("the text has changed, and with it what a fleet of two versions understands:\n%s", text)
	}
}

// Whatever is no journal is refused: a peer's bytes are checked like a client's.
func TestJournalRefused(t *testing.T) {
	for _, text := range []string{
		"x", "c", "c ", "c 1", "c -1;", "c 1;c 2;", "b 0 1 2 3;", "u;",
		"c 1;b 0 1 2;", "c 1;b 0 1 2 3", "c 1;b 3 1 2 3;", "c 1;b 0 1 2 3 4;", "c 1;b 0 1 2 3;b 0 1 2 3;", "c 1;b 0 18446744073709551616 0 1;",
		"c 1;t 0 5;", "c 1;e 0;", "c 1;b 0 1 2 1;t 0 5;t 0 6;", "c 1;b 0 1 2 3;t 0;", "c 1;b 0 1 2 3;t 0 2147483648;", "c 1;b 0 1 2 3;t 0 5 ;",
		"c 1;b 0 1 2 3;t 0 5 7f800000;", "c 1;b 0 1 2 3;t 0 5 bf000000 1;", "c 1;b 0 1 2 3;t 0 5 BF000000;", "c 1;b 0 1 2 3;t 0 5 bf000000" + strings.Repeat(" 1 bf000000", 21) + ";",
		"c 1;b 0 1 2 3;e 0;t 0 5;", "c 1;b 0 1 2 3;e 0;e 0;", "c 1;u;u;", "c 1;u;b 0 1 2 3;", "c 1;;", "c 1; u;", "c 1;b 0 1 2 3;q 0;",
	} {
		if j, err := ParseJournal(text, 3); err == nil || err.Code != InvalidRequest || err.Param != JournalField {
			t.Errorf("%q is taken as %+v (%v)", text, j, err)
		}
	}
	if _, err := ParseJournal("c 1;b 0 1 2 3;", 0); err == nil {
		t.Error("an item of none is taken")
	}
}

func FuzzJournal(f *testing.F) {
	_, text := sample()
	f.Add(text)
	f.Add("c 1;b 0 1 2 3;t 0 5;")
	f.Fuzz(func(t *testing.T, text string) {
		j, err := ParseJournal(text, 3)
		if err != nil {
			return
		}
		for _, it := range j.Items {
			if len(it.Tokens) > it.Max || !it.Begun && (it.Ended || it.Tokens != nil) {
				t.Errorf("%q: %+v", text, it)
			}
		}
	})
}

// However a stream is cut into reads, and however small the buffer, the client
// gets the events and the router the records.
func TestJournalCut(t *testing.T) {
	long := `data: {"text":"` + strings.Repeat("x", 300) + "\"}\n\n"
	events := []string{"data: 1\n\n", long, "data: 2\n\n", "data: :j 5\n\n", ": hello\n\n", long, "data: [DONE]\n\n"}
	records := []string{"c 1;b 0 1 2 3;", "t 0 5;", "", "t 0 7;", "", "e 0;", ""}
	var in, want, journal []byte
	for i, e := range events {
		if records[i] != "" {
			in = JournalLine(in, []byte(records[i]))
		}
		in, want, journal = append(in, e...), append(want, e...), append(journal, records[i]...)
	}
	for _, size := range []int{64, 100, 305, 330, 4096} {
		for name, r := range map[string]io.Reader{"whole": bytes.NewReader(in), "one byte at a time": iotest.OneByteReader(bytes.NewReader(in)), "halves": iotest.HalfReader(bytes.NewReader(in))} {
			er, c := NewEventReader(r, make([]byte, size)), JournalCutter{}
			var got, j []byte
			for {
				run, _, err := er.Next()
				clean, grown, ok := c.Cut(run, j)
				if !ok {
					t.Fatalf("buffer of %d, %s: refused at %q", size, name, run)
				}
				got, j = append(got, clean...), grown
				if err != nil {
					break
				}
			}
			if string(got) != string(want) || string(j) != string(journal) {
				t.Errorf("buffer of %d, %s:\n got %q %q\nwant %q %q", size, name, got, j, want, journal)
			}
		}
	}
}

// What would break out of the JSON string that a journal becomes is no journal.
func TestJournalCutRefuses(t *testing.T) {
	for _, line := range []string{`t 0 5","n":3,"x":"`, `t 0 \u0022`, "t 0\r", "", "t 0 \xff", "unfinished"} {
		run := []byte(":j " + line + "\ndata: 1\n\n")
		if line == "unfinished" {
			run = []byte(":j t 0 5")
		}
		if _, _, ok := new(JournalCutter).Cut(run, nil); ok {
			t.Errorf("%q is taken", line)
		}
	}
}

func BenchmarkJournalCut(b *testing.B) {
	event := []byte(":j t 0 12345;\ndata: " + strings.Repeat("x", 250) + "\n\n")
	run := make([]byte, len(event))
	journal := make([]byte, 0, 64)
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		copy(run, event)
		var c JournalCutter
		c.Cut(run, journal)
	}
}
