package sim

import (
	"bytes"
	"fmt"
	"math"
	"time"

	"github.com/metronome-serve/metronome/internal/sched"
)

// A decode worker of a plan with Blocking does what SGLang's did before its
// topology fetch moved off the scheduler thread: it asks registries on its
// loop, one after the other, and waits for each answer up to 5 s. All else is
// as in Metronome: the same core decides what is asked and when.

// waits says whether the loop waits for a piece of peer work.
func (d *decode) waits(k sched.PeerKind) bool {
	return d.plan.Blocking && (k == sched.FetchInfo || k == sched.QueryRanks || k == sched.LookupRank)
}

// waitNext asks the next registry that the loop waits for. When there is none,
// the loop goes on.
func (d *decode) waitNext() {
	if len(d.waiting) == 0 {
		d.frozen = false
		d.wake(0)
		return
	}
	d.frozen = true
	t := d.waiting[0]
	d.waiting = d.waiting[1:]
	if t.over {
		d.waitNext()
		return
	}
	t.then = d.waitNext
	d.ask(t)
}

// Comparison is what a client of one healthy stream sees while others ask for
// prefills that hang, and how long a newcomer waits for its first token.
type Comparison struct {
	Hung     int
	Blocking bool
	Gaps     []Gap // of the stream, from the moment that the hung ones are asked for
	Longest  time.Duration
	Newcomer time.Duration // from its request to its first token; 0: none came
}

// Gap is the time between two tokens.
type Gap struct{ At, For time.Duration }

// The scene of a comparison.
const (
	sceneCalm = 5 * time.Second  // the stream runs alone
	sceneEnd  = 60 * time.Second // of what is looked at
	sceneBeat = 20 * time.Millisecond
)

// Compare plays one scene: a stream over a healthy prefill, then requests for
// so many prefills whose registries take the question and never answer, and a
// newcomer for another healthy one.
func Compare(hung int, blocking bool) *Comparison {
	p := Draw(1, Shape{Prefills: hung + 2, Decodes: 1})
	p.Faults, p.Requests, p.Blocking = nil, nil, blocking
	p.PrefillPages, p.DecodePages, p.PageSize, p.MaxRunning, p.MaxQueued, p.Reserved = 512, 512, 16, 32, 512, 16
	p.DecodeBase, p.Attempts, p.Interval, p.Timeout, p.ResolveTimeout = sceneBeat, 15, time.Second, 5*time.Second, 120*time.Second
	p.DP, p.FollowRoom, p.Boot, p.Probes = nil, true, 0, false
	p.Retries, p.Migrations, p.Calm = 0, 0, sceneEnd
	p.Net = NetPlan{Delay: 200 * time.Microsecond, Jitter: 200 * time.Microsecond, Bandwidth: 1e9}
	ask := func(at time.Duration, prefill, tokens int) {
		p.Requests = append(p.Requests, Request{ID: len(p.Requests) + 1, At: at, Length: 20, MaxTokens: tokens, Seed: 1, Prefill: prefill, Timeout: 200 * time.Second})
	}
	ask(0, 0, 3000)
	for i := range hung {
		p.Faults = append(p.Faults, Fault{Kind: Registry, For: sceneEnd, On: fmt.Sprintf("p%d", i+2), N: int(hangs)})
		ask(sceneCalm, i+2, 1)
	}
	ask(sceneCalm+100*time.Millisecond, 1, 1)
	c := &Comparison{Hung: hung, Blocking: blocking}
	f := newFleet(p, nil)
	last := time.Duration(0)
	f.front.heard = func(q *Request) {
		switch now := f.now; {
		case q.ID == 1:
			if last >= sceneCalm && now <= sceneEnd {
				c.Gaps = append(c.Gaps, Gap{last, now - last})
				c.Longest = max(c.Longest, now-last)
			}
			last = now
		case q.Prefill == 1:
			c.Newcomer = now - q.At
		}
	}
	f.schedule()
	f.world.run(sceneEnd)
	if silent := f.now - last; silent > c.Longest {
		c.Longest = silent
		c.Gaps = append(c.Gaps, Gap{last, silent})
	}
	return c
}

// Chart draws the gaps of two comparisons as an SVG: time from left to right,
// each gap as high as it is long, on a logarithmic scale.
func Chart(blocking, metronome *Comparison) []byte {
	const width, height, left, top = 720, 260, 70, 34
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%d" y="18" font-size="13">Time between two tokens of one stream while prefills hang that it does not need: %d</text>`+"\n", left, blocking.Hung)
	x := func(t time.Duration) float64 {
		return left + (t-sceneCalm).Seconds()/(sceneEnd-sceneCalm).Seconds()*(width-left-20)
	}
	y := func(d time.Duration) float64 { // 10 ms at the bottom, 100 s at the top
		return top + (height-top-40)*(1-math.Log10(max(d.Seconds(), 0.01)/0.01)/4)
	}
	for _, d := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second, 100 * time.Second} {
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%v</text>`+"\n", left, y(d), width-20, left-6, y(d)+4, d)
	}
	for at := sceneCalm; at <= sceneEnd; at += 10 * time.Second {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%v</text>`+"\n", x(at), height-22, at-sceneCalm)
	}
	for i, c := range []*Comparison{blocking, metronome} {
		color, name := "#c0392b", "fetches on the loop"
		if i == 1 {
			color, name = "#2471a3", "Metronome"
		}
		fmt.Fprintf(&b, `<path fill="none" stroke="%s" stroke-width="1.5" d="M%.1f %.1f`, color, x(sceneCalm), y(sceneBeat))
		for _, g := range c.Gaps {
			fmt.Fprintf(&b, "L%.1f %.1fL%.1f %.1f", x(g.At), y(g.For), x(g.At+g.For), y(g.For))
		}
		fmt.Fprintf(&b, `"/>`+"\n"+`<text x="%d" y="%d" fill="%s">%s: longest gap %v</text>`+"\n", left+i*330, height-6, color, name, c.Longest.Round(time.Millisecond))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
