package worker

import "sync"

// inbox carries messages of many producers to one loop. A push never waits and
// never drops. Its bound is kept where work is admitted: each open job, grant,
// link, try and batch sends only a few messages, and their numbers are bounded
// (Worker.Submit, PeersConfig, transfer's once-a-second rules).
type inbox struct {
	wake chan struct{} // capacity 1: waking is idempotent

	mu    sync.Mutex // held for an append or a swap only
	queue []any
	spare []any // the slice that the loop works on between two takes
}

func newInbox() *inbox { return &inbox{wake: make(chan struct{}, 1)} }

// push adds a message. Messages of one producer keep their order.
func (b *inbox) push(m any) {
	b.mu.Lock()
	b.queue = append(b.queue, m)
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take empties the inbox. The slice is valid until the next take.
func (b *inbox) take() []any {
	b.mu.Lock()
	clear(b.spare) // messages of the last turn may go
	b.queue, b.spare = b.spare[:0], b.queue
	m := b.spare
	b.mu.Unlock()
	return m
}
