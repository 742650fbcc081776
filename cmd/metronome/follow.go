package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"
)

const (
	followEvery = 250 * time.Millisecond
	followMost  = 1 << 20 // bytes of a file that is followed
)

// readBounded reads a small file.
func readBounded(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, followMost+1))
	if err == nil && len(data) > followMost {
		err = fmt.Errorf("%s is larger than %d bytes", file, followMost)
	}
	return data, err
}

// followed is a file whose changes are taken over while the process runs. It is
// read again and again rather than watched: that holds for every file system
// and for the symbolic links that Kubernetes swaps.
type followed struct {
	flag, file string
	apply      func([]byte) error
	used       []byte // what is in force
	seen       []byte // by the last look; a change counts when a second look finds the same: it may be half written
	told       string // the complaint that was made last
}

// follow reads the file for the first time; then it must be right.
func follow(flag, file string, apply func([]byte) error) (*followed, error) {
	f := &followed{flag: flag, file: file, apply: apply}
	data, err := readBounded(file)
	if err == nil {
		err = apply(data)
	}
	if err != nil {
		return nil, usagef("--%s %s: %v", flag, file, err)
	}
	f.used, f.seen = data, data
	return f, nil
}

// run looks until ctx ends. What is wrong is said once, and what was in force
// stays so.
func (f *followed) run(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			f.look(log)
		case <-ctx.Done():
			return
		}
	}
}

func (f *followed) look(log *slog.Logger) {
	data, err := readBounded(f.file)
	if err == nil && !bytes.Equal(data, f.seen) {
		f.seen = data
		return
	}
	changed := err == nil && !bytes.Equal(data, f.used)
	if changed {
		err = f.apply(data)
	}
	switch {
	case err != nil:
		if f.told != err.Error() {
			f.told = err.Error()
			log.Error("file not taken over, what was in force stays", "flag", "--"+f.flag, "file", f.file, "error", f.told)
		}
	case changed:
		f.used, f.told = data, ""
		log.Info("file taken over", "flag", "--"+f.flag, "file", f.file)
	default:
		f.told = ""
	}
}
