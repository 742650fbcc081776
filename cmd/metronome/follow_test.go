package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestParseWorkers(t *testing.T) {
	const two = "[http://a:1,8998] [http://b:2]"
	for in, want := range map[string]string{
		"prefill:\n- http://a:1,8998\ndecode:\n- http://b:2\n":               two,
		"{\"prefill\": [\"http://a:1,8998\"], \"decode\": [\"http://b:2\"]}": two,
		"# ours\nprefill http://a:1,8998\n\n  decode\thttp://b:2 # new":      two,
		"prefill http://a:1,8998\ndecode http://b:2\n":                       two,
		"decode http://b:2\n":             "[] [http://b:2]",
		"decode: [http://b:2]":            "[] [http://b:2]",
		"":                                "names no worker",
		"prefill:\n":                      "names no worker",
		"prefil:\n- http://a:1\n":         "prefil",
		"prefill: http://a:1\n":           "lists prefill and decode",
		"http://a:1\n":                    "line 1 is neither",
		"prefill http://a:1\ndecode":      "line 2 is neither",
		"prefill http://a:1 http://b:1\n": "line 1 is neither",
		"\x00\x01":                        "line 1 is neither",
	} {
		w, err := parseWorkers([]byte(in))
		if got := fmt.Sprint(w.Prefill, " ", w.Decode); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s (%v), want %s", in, got, err, want)
		}
	}
}

// A changed file is taken over when two looks find the same; a bad one leaves
// what was in force, and is complained of once.
func TestFollow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "workers")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := ""
	apply := func(data []byte) error {
		if bytes.HasPrefix(data, []byte("bad")) {
			return errors.New("it is bad")
		}
		got = string(data)
		return nil
	}
	if _, err := follow("workers", file, apply); err == nil || !strings.Contains(err.Error(), "--workers "+file) {
		t.Errorf("a file that is not there: %v", err)
	}
	write("bad")
	if _, err := follow("workers", file, apply); err == nil || !strings.Contains(err.Error(), "it is bad") {
		t.Errorf("a bad file: %v", err)
	}
	write("one")
	f, err := follow("workers", file, apply)
	if err != nil || got != "one" {
		t.Fatal(got, err)
	}
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	look := func(wantGot string, wantErrors int) {
		t.Helper()
		f.look(log)
		if n := strings.Count(logged.String(), "level=ERROR"); got != wantGot || n != wantErrors {
			t.Errorf("%q is in force, %d complaints; want %q and %d", got, n, wantGot, wantErrors)
		}
	}
	write("tw") // half of it
	look("one", 0)
	write("two")
	look("one", 0)
	look("two", 0)
	write("bad")
	look("two", 0)
	look("two", 1)
	look("two", 1)
	os.Remove(file)
	look("two", 2)
	look("two", 2)
	write("two")
	look("two", 2)
	write(strings.Repeat("x", followMost+1))
	look("two", 3)
	write("three")
	look("two", 3)
	look("three", 3)
}

// The first token of the files is what we present; both follow their files, and
// no complaint shows a token.
func TestAuthFollows(t *testing.T) {
	dir := t.TempDir()
	c := commonFlags{TokenFile: filepath.Join(dir, "tokens")}
	write := func(file, s string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(c.TokenFile, "# ours\none\n\ntwo\n")
	a, err := c.auth()
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	see := func(valid, not, peer string) {
		t.Helper()
		for range 2 {
			for _, f := range a.files {
				f.look(log)
			}
		}
		if !a.accept.Valid(valid) || a.accept.Valid(not) || a.peer.Value() != peer {
			t.Errorf("%s: %v, %s: %v, we present %s; want true, false, %s", valid, a.accept.Valid(valid), not, a.accept.Valid(not), a.peer.Value(), peer)
		}
	}
	see("two", "three", "one")
	write(c.TokenFile, "three\ntwo\n")
	see("three", "one", "three")
	for _, bad := range []string{"", "# none", "hunter2 hunter2", "hunter2\x00", strings.Repeat("hunter2", 1000)} {
		write(c.TokenFile, bad)
		see("three", "hunter2", "three")
	}
	c.PeerTokenFile = filepath.Join(dir, "peer")
	write(c.TokenFile, "one")
	write(c.PeerTokenFile, "other")
	if a, err = c.auth(); err != nil {
		t.Fatal(err)
	}
	see("one", "other", "other")
	write(c.PeerTokenFile, "another")
	see("one", "other", "another")
	if strings.Contains(logged.String(), "hunter2") || strings.Count(logged.String(), "level=ERROR") != 2 { // the same complaint is made once
		t.Error(logged.String())
	}
}
