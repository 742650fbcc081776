package chaos

import "errors"

var errNoSignals = errors.New("this system has no stop signals")

// Stop freezes the process; not on Windows.
func (p *Proc) Stop() error { return errNoSignals }

// Continue lets a stopped process run on; not on Windows.
func (p *Proc) Continue() error { return errNoSignals }

// Terminate ends the process.
func (p *Proc) Terminate() error { return p.cmd.Process.Kill() }
