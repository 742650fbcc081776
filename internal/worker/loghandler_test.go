package worker

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// plug is a writer that blocks until it is pulled, like a full pipe.
type plug struct {
	pulled chan struct{}
	bytes.Buffer
}

func (p *plug) Write(b []byte) (int, error) {
	<-p.pulled
	return p.Buffer.Write(b)
}

func TestLogHandlerNeverBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &plug{pulled: make(chan struct{})}
		h, err := NewLogHandler(p, "json", slog.LevelInfo, 8)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(h).With("role", "decode").WithGroup("peer")
		begin := time.Now()
		for i := range 100 {
			log.Info("attempt failed", "n", i)
			log.Debug("not enabled")
			synctest.Wait()
		}
		if d := time.Since(begin); d != 0 {
			t.Errorf("logging to a full pipe took %v", d)
		}
		if n := h.Shed(); n != 100-8-1 { // one is with the writer, eight wait
			t.Errorf("%d shed, want 91", n)
		}
		close(p.pulled)
		h.Close(time.Second)
		h.Close(time.Second)
		log.Info("late") // after Close: shed
		lines := strings.Split(strings.TrimSpace(p.String()), "\n")
		if len(lines) != 10 {
			t.Fatalf("%d lines:\n%s", len(lines), p.String())
		}
		var first struct {
			Msg, Role string
			Peer      struct{ N int }
		}
		if err := json.Unmarshal([]byte(lines[0]), &first); err != nil || first.Msg != "attempt failed" || first.Role != "decode" || first.Peer.N != 0 {
			t.Errorf("%s: %+v, %v", lines[0], first, err)
		}
		if !strings.Contains(p.String(), "log records shed") || !strings.Contains(p.String(), `"records":91`) {
			t.Errorf("the log does not tell what it lost:\n%s", p.String())
		}
		if h.Shed() != 92 {
			t.Errorf("%d shed at the end", h.Shed())
		}
	})
}

// Close gives up on a writer that hangs.
func TestLogHandlerCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &plug{pulled: make(chan struct{})}
		h, err := NewLogHandler(p, "text", slog.LevelInfo, 8)
		if err != nil {
			t.Fatal(err)
		}
		slog.New(h).Info("x")
		begin := time.Now()
		h.Close(time.Second)
		if d := time.Since(begin); d != time.Second {
			t.Errorf("Close took %v", d)
		}
		close(p.pulled)
	})
}

func TestLogHandlerFormat(t *testing.T) {
	if _, err := NewLogHandler(&bytes.Buffer{}, "xml", slog.LevelInfo, 8); err == nil || !strings.Contains(err.Error(), "xml") {
		t.Errorf("got %v", err)
	}
}
