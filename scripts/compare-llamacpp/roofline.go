//go:build linux

package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Of the drawing.
const (
	width, height   = 720, 420
	left, top       = 70, 34
	right, bottom   = 20, 84
	firstX, decades = -0.3, 3.6 // of 10: operations a byte
)

var colors = []string{"#2471a3", "#c0392b", "#1e8449", "#7d3c98", "#b7950b"}

// roofline draws what was reached, at the most threads that were measured,
// below what the machine can do: memory's speed where little is done with each
// byte, that of int8 products where much is.
func (c *comparison) roofline() string {
	threads := slices.Max(slices.Collect(maps.Keys(c.Stream)))
	stream, peak := c.Stream[threads].Median, c.Int8[threads].Median
	for file := range c.Work {
		stream = max(stream, c.Reading[place(file, threads)].Median)
	}
	highest := math.Ceil(math.Log10(peak) + 0.1)
	x := func(intensity float64) float64 {
		return left + (math.Log10(intensity)-firstX)/decades*(width-left-right)
	}
	y := func(gops float64) float64 {
		return top + (highest-math.Log10(gops))/(highest-1)*(height-top-bottom)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%d" y="18" font-size="13">10⁹ operations a second on %d threads, by operations for each byte that must be read</text>`+"\n", left, threads)
	for e := 1.0; e <= highest; e++ {
		at := y(math.Pow(10, e))
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.0f</text>`+"\n", left, at, width-right, left-6, at+4, math.Pow(10, e))
	}
	for e := 0.0; e < firstX+decades; e++ {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.0f</text>`+"\n", x(math.Pow(10, e)), height-bottom+16, math.Pow(10, e))
	}
	low := math.Pow(10, firstX)
	low = max(low, 10/stream)
	fmt.Fprintf(&b, `<path fill="none" stroke="#555" stroke-width="1.5" d="M%.1f %.1fL%.1f %.1fH%d"/>`+"\n", x(low), y(low*stream), x(peak/stream), y(peak), width-right)
	fmt.Fprintf(&b, `<text x="%d" y="%.1f" text-anchor="end" fill="#555">%.0f GOPS of int8; reading %.0f GB/s</text>`+"\n", width-right, y(peak)-6, peak, stream)
	var names []string
	for _, m := range c.Lines {
		if m.Line.Threads != threads || m.Line.Neighbour {
			continue
		}
		i := slices.Index(names, m.Line.File)
		if i < 0 {
			i, names = len(names), append(names, m.Line.File)
		}
		color := colors[i%len(colors)]
		ops, intensity := c.ops(m.Line)
		at := x(intensity)
		fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"><title>%s, %s: Metronome</title></circle>`, at, y(ops*spreadOf(m.Ours).Median), color, m.Line.File, m.Line)
		fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="4" fill="none" stroke="%s"><title>%s, %s: llama.cpp</title></circle>`+"\n", at, y(ops*spreadOf(m.Theirs).Median), color, m.Line.File, m.Line)
	}
	for i, name := range names {
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", left+i%2*310, height-bottom+36+i/2*15, colors[i%len(colors)], name)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#555">filled: Metronome, hollow: llama.cpp; left: decode 1 to 16 sequences, right: prefill in chunks of at most 512</text>`+"\n", left, height-8)
	b.WriteString("</svg>\n")
	return b.String()
}

// ops is the 10⁹ operations for one token of a line, and how many there are for
// each byte that must be read.
func (c *comparison) ops(l line) (giga, intensity float64) {
	w := c.Work[l.File]
	if l.Prefill { // each chunk reads the weights
		return 2 * w.PrefillMacs / 1e9, 2 * w.PrefillMacs * float64(min(l.Size, 512)) / w.Weights
	}
	return 2 * w.DecodeMacs / 1e9, 2 * w.DecodeMacs * float64(l.Size) / (w.Weights + float64(l.Size)*w.KV)
}
