//go:build !amd64

package kernels

func detect() []*path { return nil }

// Pause waits for some tens of nanoseconds.
func Pause() {
	for range 64 {
	}
}
