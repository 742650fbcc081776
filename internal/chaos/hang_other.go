//go:build !linux

package chaos

import "errors"

func (h *Hang) fillBacklog(string) error {
	return errors.New("a full backlog is made on Linux only")
}
