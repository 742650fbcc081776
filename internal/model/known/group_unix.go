//go:build unix

package known

import (
	"os/exec"
	"syscall"
)

// endTogether has the end of its context end a command with all that it has
// started: a python3 on PATH may be a script (pyenv's are) that starts the real one.
func endTogether(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
