package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// stdout is where every command prints. It keeps what went wrong, so that none
// has to look after each line, and none ends well whose words nobody got.
var stdout = &output{to: os.Stdout}

// output is a writer that ends the command at its first error.
type output struct {
	to io.Writer

	mu   sync.Mutex
	err  error
	stop func() // ends the command
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.to.Write(b)
	if o.err = err; err != nil && o.stop != nil {
		o.stop()
	}
	return n, err
}

// onLoss says what ends the command once nobody can hear it any more.
func (o *output) onLoss(stop func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stop = stop
}

// judge is the error of a command that ended with err, if its output was lost:
// that, unless the command had a worse one of its own.
func (o *output) judge(err error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil && (err == nil || errors.Is(err, o.err) || errors.Is(err, context.Canceled)) {
		return fmt.Errorf("the output is lost: %w", o.err)
	}
	return err
}
