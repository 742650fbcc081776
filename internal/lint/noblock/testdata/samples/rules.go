package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sort"
	"sync"
	"time"
)

// The one select of a loop may wait, a second one may not, and nothing else
// may touch a channel and wait.
//
//metronome:loop
func selectLoop(a, b chan int) {
	select {
	case <-a:
	case b <- 1:
	}
	select { // want: selects without default
	case <-a:
	case <-b:
	}
	select {
	case b <- 1:
	default:
	}
	b <- 2 // want: sends to a channel
	<-a    // want: receives from a channel
	close(b)
	wait(a)
}

func wait(a chan int) {
	select { // want: selects without default.*selectLoop .*→ .*wait
	case <-a:
	case <-time.After(time.Second):
	}
}

//metronome:loop
func rangeLoop(a chan int) {
	for range a { // want: receives from a channel
	}
}

//metronome:loop
func fileLoop() {
	data, _ := os.ReadFile("x") // want: file I/O: os\.ReadFile
	fmt.Println(len(data))      // want: fmt\.Println
}

//metronome:loop
func dnsLoop() {
	net.DefaultResolver.LookupHost(context.Background(), "x") // want: DNS
	net.JoinHostPort("x", "1")
}

//metronome:loop
func processLoop() {
	exec.Command("x").Run() // want: other processes.*\n?
}

//metronome:loop
func logLoop() {
	slog.Info("x") // want: logging
}

//metronome:loop
func groupLoop() {
	var g sync.WaitGroup
	g.Add(1)
	go time.Sleep(time.Second)
	g.Done()
	g.Wait() // want: waits for other goroutines
	c := sync.NewCond(new(sync.Mutex))
	c.Broadcast()
	c.Wait() // want: waits for other goroutines
}

//metronome:loop
func worldLoop() {
	runtime.GC() // want: stop the world
	runtime.NumGoroutine()
}

// A mutex that somebody else holds across a wait.

type table struct {
	mu   sync.RWMutex
	rows int
}

func (t *table) fill() {
	t.mu.Lock()
	defer t.mu.Unlock()
	time.Sleep(time.Second)
}

//metronome:loop
func lockLoop(t *table) {
	go t.fill()
	t.mu.RLock() // want: takes .*table\.mu, which is held where .*table\)\.fill .*time\.Sleep|sleeps
	t.rows++
	t.mu.RUnlock()
}

// The same with the lock taken by one function and the wait in another.

type ledger struct {
	sync.Mutex
	in chan int
}

func (l *ledger) open() { l.Lock() }

func (l *ledger) book() {
	l.open()
	l.next()
	l.Unlock()
}

func (l *ledger) next() int { return <-l.in }

//metronome:loop
func helperLockLoop(l *ledger) {
	go l.book()
	l.Lock() // want: takes .*ledger\.Mutex, which is held where .*ledger\)\.next .* receives
	l.Unlock()
}

// A mutex that is given back before the wait.

type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) report(to chan int) {
	c.mu.Lock()
	n := c.n
	c.mu.Unlock()
	to <- n
	if c.mu.TryLock() {
		c.n = 0
		c.mu.Unlock()
	}
}

//metronome:loop
func shortLockLoop(c *counter) {
	go c.report(make(chan int))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
}

// A mutex that is passed to a function, which waits with it or without.

type owner struct{ kept, given sync.Mutex }

func keeps(mu *sync.Mutex) {
	mu.Lock()
	time.Sleep(1)
	mu.Unlock()
}

func givesBack(mu *sync.Mutex) {
	mu.Unlock()
	time.Sleep(1)
	mu.Lock()
	mu.Unlock()
}

func (o *owner) work() {
	keeps(&o.kept)
	o.given.Lock()
	givesBack(&o.given)
}

//metronome:loop
func passedLockLoop(o *owner) {
	go o.work()
	o.kept.Lock() // want: takes .*owner\.kept, which is held where .*keeps
	o.kept.Unlock()
	o.given.Lock()
	o.given.Unlock()
}

var once, other sync.Once

//metronome:loop
func onceLoop() {
	once.Do(func() {
		time.Sleep(1) // want: sleeps
	})
	other.Do(func() {})
}

//metronome:loop
func deferLoop() {
	defer time.Sleep(1) // want: sleeps
}

// What another goroutine does is not the loop's wait.
//
//metronome:loop
func goLoop() {
	go fileLoop()
	time.AfterFunc(time.Second, dnsLoop)
}

// Formatting into memory is no I/O, though others format into files.
//
//metronome:loop
func formatLoop() {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%d", 1)
	fmt.Fprintln(os.Stderr, "x") // want: file I/O|system call|poller
	_ = fmt.Sprintf("%v %s", b.Len(), slow{})
}

type slow struct{}

func (slow) String() string {
	time.Sleep(1) // want: sleeps.*slow\)\.String
	return ""
}

//metronome:loop
func sortLoop(x []int) {
	sort.Slice(x, func(i, j int) bool {
		time.Sleep(1) // want: sleeps.*sort\.Slice
		return x[i] < x[j]
	})
}

// An exception needs a reason, and something that it allows.
//
//metronome:loop
func allowLoop() {
	//metronome:allow noblock this sample shows an exception
	time.Sleep(1)
	//metronome:allow noblock the whole call is allowed, with what is behind it
	hidden()
	//metronome:allow noblock nothing waits here // want: allows nothing
	_ = len(os.Args)
	//metronome:allow noblock
	time.Sleep(2)
}

func hidden() { time.Sleep(3) }

// A loop as it should be.
//
//metronome:loop
func sleeplessLoop(t *time.Timer, stop chan struct{}) {
	for {
		t.Reset(time.Second)
		select {
		case <-t.C:
		case <-stop:
			return
		}
		_ = fmt.Errorf("turn at %s: %w", time.Since(time.Time{}), context.Canceled)
	}
}
