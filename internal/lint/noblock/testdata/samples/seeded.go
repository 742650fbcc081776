package main

import (
	"net"
	"time"
)

// An interface call: what is behind it dials.

type peer interface{ ask(addr string) error }

type dialer struct{}

func (dialer) ask(addr string) error {
	c, err := net.Dial("tcp", addr) // want: network I/O: net\.Dial .*→ \(.*dialer\)\.ask .*→ net\.Dial
	if err == nil {
		c.Close() // want: network I/O
	}
	return err
}

type cached struct{ known map[string]error }

func (c cached) ask(addr string) error { return c.known[addr] }

//metronome:loop
func interfaceLoop(p peer) {
	for _, p := range []peer{p, cached{}} {
		p.ask("127.0.0.1:1")
	}
}

// A closure that was stored in a field long before.

type hooks struct{ onLate func(string) }

func closureLoop(h *hooks) {
	addr := "127.0.0.1:1"
	h.onLate = func(string) {
		net.Listen("tcp", addr) // want: network I/O: net\.Listen .*turn .*→ .*closureLoop\$1 .*→ net\.Listen
	}
	h.run()
}

//metronome:loop
func (h *hooks) run() { h.turn() }

func (h *hooks) turn() {
	if h.onLate != nil {
		h.onLate("now")
	}
}

// A method value in a map.

type pacer struct{ every time.Duration }

func (p *pacer) pause() {
	time.Sleep(p.every) // want: time\.Sleep sleeps.*methodValueLoop .*→ \(\*.*pacer\)\.pause
}

//metronome:loop
func methodValueLoop() {
	p := &pacer{every: time.Second}
	table := map[string]func(){"pause": p.pause, "nothing": func() {}}
	for _, do := range table {
		do()
	}
}
