package bench

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/metronome-serve/metronome/internal/model"
)

// Machine is what the hardware gave in this run, on all threads at once.
type Machine struct {
	CPU     string  `json:"cpu"`
	Threads int     `json:"threads"`
	Kernels string  `json:"kernels"`
	Stream  float64 `json:"stream_gb_per_s"`     // memory read from one end to the other
	Weights float64 `json:"weights_gb_per_s"`    // the model's weights read so, again and again: faster where a cache keeps some of them
	Int8    float64 `json:"int8_gops,omitempty"` // products and sums of int8, each one operation; 0: there is no routine for this processor
}

// Reading is the faster of both ways: what decode is held against.
func (m *Machine) Reading() float64 { return max(m.Stream, m.Weights) }

// routines are how fast this processor can go at all.
type routines struct {
	read func(p *byte, n int) uint64 // reads n bytes, a multiple of readUnit
	dots func(n int)                 // n × macs products and sums; nil: none
	macs int
}

// machine measures one processor's limits.
type machine struct {
	routines
	threads int
	data    []byte
}

const (
	streamBytes = 256 << 20 // far beyond any cache
	streamPiece = 1 << 20   // one call: assembly cannot be preempted
	readUnit    = 256
	dotsCalls   = 1000
	dotsCall    = 4000 // some 10 µs
)

func newMachine(threads int) *machine {
	m := &machine{best(), threads, make([]byte, streamBytes)}
	const huge = 2 << 20 // what is asked for begins at a multiple of it
	first := -int(uintptr(unsafe.Pointer(&m.data[0]))) & (huge - 1)
	model.HugePages(m.data[first:])
	for i := range m.data { // every page is memory of its own
		m.data[i] = byte(i)
	}
	return m
}

// onAll runs do on all threads at once, and gives the time of the whole.
func (m *machine) onAll(do func(thread int)) time.Duration {
	var ready, done sync.WaitGroup
	gate := make(chan struct{})
	for t := range m.threads {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-gate
			do(t)
		})
	}
	ready.Wait()
	began := time.Now()
	close(gate)
	done.Wait()
	return time.Since(began)
}

// stream is the rate of reading memory, in GB/s.
func (m *machine) stream() float64 { return m.reading([][]byte{m.data}) }

// reading is the rate of reading parts one after the other, all threads a share
// of each, in GB/s. What is smaller than streamBytes is read more than once.
func (m *machine) reading(parts [][]byte) float64 {
	total := 0
	for _, p := range parts {
		total += len(p)
	}
	times := (streamBytes + total - 1) / total
	took := m.onAll(func(t int) {
		for range times {
			for _, p := range parts {
				m.readShare(p[len(p)*t/m.threads : len(p)*(t+1)/m.threads])
			}
		}
	})
	return float64(total) * float64(times) / 1e9 / took.Seconds()
}

func (m *machine) readShare(p []byte) {
	for len(p) >= readUnit {
		n := min(len(p), streamPiece) &^ (readUnit - 1)
		m.read(&p[0], n)
		p = p[n:]
	}
}

// int8 is the rate of products and sums of int8, in 10⁹ operations a second.
func (m *machine) int8() float64 {
	if m.dots == nil {
		return 0
	}
	took := m.onAll(func(int) {
		for range dotsCalls {
			m.dots(dotsCall)
		}
	})
	return 2 * float64(m.macs) * dotsCalls * dotsCall * float64(m.threads) / 1e9 / took.Seconds()
}

// readWords is the portable way to read.
func readWords(p *byte, n int) (sum uint64) {
	words := unsafe.Slice((*[8]uint64)(unsafe.Pointer(p)), n/64)
	for i := range words {
		w := &words[i]
		sum |= w[0] | w[1] | w[2] | w[3] | w[4] | w[5] | w[6] | w[7]
	}
	return sum
}

// processor is the name of the processor where the system tells it, else its architecture.
func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
