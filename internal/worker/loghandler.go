package worker

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// LogHandler is a slog.Handler whose callers never wait for the writer behind
// it: records go through a bounded queue to one goroutine, and what does not
// fit is shed and counted. A full pipe behind the log thus stalls nothing but
// the log.
type LogHandler struct {
	sink *logSink
	with slog.Handler // formats into the sink's buffer; carries attributes and groups
}

// logSink is what all handlers derived from one NewLogHandler share.
type logSink struct {
	queue chan logLine
	done  chan struct{} // closed when the writer goroutine has returned
	shed  atomic.Uint64

	mu     sync.RWMutex // orders sends against the close of the queue; no I/O under it
	closed bool

	w   io.Writer
	buf bytes.Buffer // owned by the writer goroutine
}

type logLine struct {
	h slog.Handler
	r slog.Record
}

// NewLogHandler writes records of at least the level to w, as "json" or
// "text", through a queue of size records. Its goroutine ends with Close.
func NewLogHandler(w io.Writer, format string, level slog.Leveler, size int) (*LogHandler, error) {
	s := &logSink{queue: make(chan logLine, size), done: make(chan struct{}), w: w}
	opts := &slog.HandlerOptions{Level: level}
	var h slog.Handler
	switch format {
	case "text":
		h = slog.NewTextHandler(&s.buf, opts)
	case "json":
		h = slog.NewJSONHandler(&s.buf, opts)
	default:
		return nil, fmt.Errorf("log format %q is unknown: text or json", format)
	}
	go s.run()
	return &LogHandler{sink: s, with: h}, nil
}

// Enabled reports whether records of the level are written.
func (h *LogHandler) Enabled(ctx context.Context, l slog.Level) bool { return h.with.Enabled(ctx, l) }

// Handle queues the record or sheds it. It never blocks and never fails.
func (h *LogHandler) Handle(_ context.Context, r slog.Record) error {
	s := h.sink
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		s.shed.Add(1)
		return nil
	}
	select {
	case s.queue <- logLine{h.with, r}: // slog passes a record whose attributes nobody else writes
	default:
		s.shed.Add(1)
	}
	return nil
}

// WithAttrs is slog.Handler's.
func (h *LogHandler) WithAttrs(as []slog.Attr) slog.Handler {
	return &LogHandler{h.sink, h.with.WithAttrs(as)}
}

// WithGroup is slog.Handler's.
func (h *LogHandler) WithGroup(name string) slog.Handler {
	return &LogHandler{h.sink, h.with.WithGroup(name)}
}

// Shed is how many records were lost because the queue was full.
func (h *LogHandler) Shed() uint64 { return h.sink.shed.Load() }

// Close writes out what is queued and ends the goroutine. It waits at most the
// given time: a writer that hangs keeps its goroutine, never the process.
func (h *LogHandler) Close(wait time.Duration) {
	s := h.sink
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.queue)
	}
	s.mu.Unlock()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-s.done:
	case <-t.C:
	}
}

// run formats and writes; whole records only, one Write each.
func (s *logSink) run() {
	defer close(s.done)
	var told uint64
	for l := range s.queue {
		s.write(l)
		if n := s.shed.Load(); n != told {
			r := slog.NewRecord(time.Now(), slog.LevelWarn, "log records shed: the queue was full", 0)
			r.AddAttrs(slog.Uint64("records", n-told))
			told = n
			s.write(logLine{l.h, r})
		}
	}
}

func (s *logSink) write(l logLine) {
	s.buf.Reset()
	_ = l.h.Handle(context.Background(), l.r) // into memory
	_, _ = s.w.Write(s.buf.Bytes())           // nowhere else to tell it
}
