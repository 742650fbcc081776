package router

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// Memory for request bodies. A collector that has to find out by itself that a
// large body is done with lets several of them pile up, and each new one is
// cleared first. So large ones are given back by hand, when all who read them
// have said that they are through: up to 1 MiB for the next request, beyond that
// to the system.
const (
	ownLeast = 16 << 10 // smaller bodies are left to the collector
	ownMost  = 1 << 20  // larger ones come from the system, where it can be asked
)

var kept [21]sync.Pool // by the binary logarithm of the size

// spoil is called with what is given back, in tests.
var spoil func([]byte)

// memoryFor is how many bytes are taken for n.
func memoryFor(n int64) int64 {
	if n < ownLeast || n > ownMost {
		return n
	}
	return 1 << bits.Len64(uint64(n-1))
}

// takeMemory gives memoryFor(n) bytes of any content, as a slice's capacity.
func takeMemory(n int64) []byte {
	if n = memoryFor(n); n > ownMost {
		return mapMemory(n)
	}
	if n >= ownLeast {
		if b, ok := kept[bits.Len64(uint64(n-1))].Get().(*[]byte); ok {
			return *b
		}
	}
	return make([]byte, 0, n)
}

// giveMemory takes back what takeMemory gave.
func giveMemory(b []byte) {
	n := cap(b)
	if n < ownLeast {
		return
	}
	if spoil != nil {
		spoil(b[:n])
	}
	if n > ownMost {
		unmapMemory(b)
		return
	}
	b = b[:0]
	kept[bits.Len(uint(n-1))].Put(&b)
}

// bodyMemory is the body of one request, and how many read it: the client's
// goroutine, prefill legs, and whatever net/http still holds of them.
type bodyMemory struct {
	bytes []byte
	users atomic.Int32
}

func (m *bodyMemory) use() { m.users.Add(1) }

func (m *bodyMemory) leave() {
	switch n := m.users.Add(-1); {
	case n == 0:
		giveMemory(m.bytes)
		m.bytes = nil
	case n < 0:
		panic("router: a body was given back twice")
	}
}
