package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/model/known"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"metronome": main})
}

// TestScripts runs testdata/*.txtar: what a person sees of commands that need
// no fleet. $INDEX is a package index whose wheel is wrong; $ROUTER a router that
// knows one request, at the port $TAKEN; $HUNG a server that never answers; $SMOLLM2 is the real model, if it was pulled.
func TestScripts(t *testing.T) {
	lies := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m := known.Models[0]
		switch {
		case r.URL.Path == "/simple/"+m.Package+"/":
			fmt.Fprintf(w, `<a href="/%s">%s</a>`, m.Wheel.File, m.Wheel.File)
		case r.URL.Path == "/"+m.Wheel.File:
			w.Write([]byte("no wheel"))
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(lies.Close)
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	t.Cleanup(hung.Close)
	router := stubRouter(t)
	smol := ""
	if dir, err := known.Dir(); err == nil && known.Models[0].Here(dir) {
		smol = known.Models[0].Path(dir)
	}
	repo, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			for _, name := range []string{"HOME", "XDG_CACHE_HOME", "LocalAppData"} {
				e.Setenv(name, e.WorkDir)
			}
			e.Setenv("INDEX", lies.URL+"/simple")
			e.Setenv("ROUTER", router)
			e.Setenv("TAKEN", router[strings.LastIndex(router, ":")+1:])
			e.Setenv("HUNG", hung.URL)
			e.Setenv("SMOLLM2", smol)
			e.Setenv("SHA", known.Models[0].SHA256)
			e.Setenv("REPO", repo)
			return nil
		},
		Condition: func(name string) (bool, error) {
			if name == "smollm2" {
				return smol != "", nil
			}
			return false, fmt.Errorf("there is no condition %s", name)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits, "shown": shown},
	})
}

// stubRouter tells of the request of testdata/explain.json, to whom has its token.
func stubRouter(t *testing.T) string {
	known, err := os.ReadFile("testdata/explain.json")
	if err != nil {
		t.Fatal(err)
	}
	tokens := api.NewTokens("secret")
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch e := tokens.Authorize(r.Header.Get("Authorization")); {
		case e != nil:
			api.WriteError(w, e)
		case r.URL.Path == "/debug/requests" && r.URL.Query().Get("rid") == "req-17":
			w.Write(known)
		default:
			w.Write([]byte("[]\n"))
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// shown wants all of a file (stdout: of the last command) to stand in a page: shown FILE PAGE
func shown(ts *testscript.TestScript, _ bool, args []string) {
	if text, page := ts.ReadFile(args[0]), ts.ReadFile(args[1]); text == "" || !strings.Contains(page, text) {
		ts.Fatalf("%s does not show what is printed:\n%s", args[1], text)
	}
}

// README names the commands that are not built yet, and no others.
func TestNotBuilt(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := "Not built yet: `" + strings.Join(notBuilt, "`, `") + "`;"; !strings.Contains(string(text), want) {
		t.Errorf("README does not say %q", want)
	}
}

// exits runs metronome and wants an exit status: exits STATUS ARGS…
func exits(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	err = ts.Exec("metronome", args[1:]...)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("metronome %s: exit status %d, want %d", strings.Join(args[1:], " "), got, want)
	}
}

// The line of progress: all values on a terminal, every tenth elsewhere.
func TestProgress(t *testing.T) {
	for terminal, want := range map[bool]int{false: 11, true: 102} {
		var out strings.Builder
		bar := &progressBar{to: &out, name: "m", terminal: terminal}
		for done := int64(0); done <= 5000; done++ {
			bar.show(done, 5000)
		}
		bar.end()
		lines := strings.Count(out.String(), "\n") + strings.Count(out.String(), "\r")
		if lines != want || !strings.Contains(out.String(), "m: 0.0 of 0.0 MB, 100 %") {
			t.Errorf("terminal %v: %d lines, want %d: %q", terminal, lines, want, out.String())
		}
	}
}
