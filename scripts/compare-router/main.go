//go:build linux

// Command compare-router measures our router, and sglang-router and smg beside
// it when they are there, between stub workers, and holds ours to its goals.
//
//	compare-router                           ours alone: the rows on failures and fidelity are asserted
//	compare-router -sglang VENV -smg VENV    both others too, from Python environments that have them
//	compare-router -builds BINARY,…          figures beside other builds of ours
//
// Figures are medians of rounds in which the routers take turns, so that what
// else the machine does meets all of them; CPU is the router process's own, by
// the kernel's clock. Each row on failures has a fleet of its own, with every
// router's defaults. Exit status 1: a row on failures or fidelity does not hold
// for ours. With -out the results are written as a page.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"time"
)

var (
	stubAddr = flag.String("stub", "", "be a stub worker at this address")
	binary   = flag.String("binary", "bin/metronome", "our binary")
	sglang   = flag.String("sglang", "", "Python environment that has sglang-router")
	smg      = flag.String("smg", "", "Python environment that has smg")
	builds   = flag.String("builds", "", "further binaries of ours, by commas: the figures of each, in ratio to the first of them")
	rounds   = flag.Int("rounds", 5, "rounds of each measured figure; 0: none")
	only     = flag.String("only", "", "rows whose name this pattern matches")
	out      = flag.String("out", "", "write the results to this page")
)

func main() {
	flag.Parse()
	if *stubAddr != "" {
		if err := serveStub(*stubAddr, os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	ok, err := compare()
	if err != nil {
		fmt.Fprintln(os.Stderr, "compare-router:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// compare runs everything and tells whether ours holds its rows.
func compare() (bool, error) {
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return false, err
	}
	peers := []peer{ours(*binary)}
	for path := range strings.SplitSeq(*builds, ",") {
		if path != "" {
			p := ours(path)
			p.name = path
			peers = append(peers, p)
		}
	}
	for _, o := range [][3]string{{"sglang-router", "sglang_router.launch_router", *sglang}, {"smg", "smg.launch_router", *smg}} {
		if o[2] == "" {
			continue
		}
		p, err := other(o[0], o[1], o[2])
		if err != nil {
			return false, err
		}
		peers = append(peers, p)
	}
	log, err := os.CreateTemp("", "compare-router-*.log")
	if err != nil {
		return false, err
	}
	rep := &report{peers: peers}
	fmt.Println("logs of all processes:", log.Name())
	if err := rep.figures(log, pattern); err != nil {
		return false, err
	}
	holds, err := rep.rows(log, pattern)
	if err != nil {
		return false, err
	}
	if *out != "" {
		err = os.WriteFile(*out, []byte(rep.page()), 0o644)
	}
	return holds, err
}

// report gathers the lines of the two tables.
type report struct {
	peers    []peer
	measured []string
	shown    []string
	profile  string
}

// figures measures what pattern names.
func (rep *report) figures(log *os.File, pattern *regexp.Regexp) error {
	if *rounds == 0 {
		return nil
	}
	f, err := startStubs(log)
	if err != nil {
		return err
	}
	defer f.close()
	m := &meter{f, map[string]map[string][]float64{}}
	for _, p := range rep.peers {
		if _, err := f.start(p); err != nil {
			return err
		}
	}
	for _, fig := range figures() {
		if !pattern.MatchString(fig.name) {
			continue
		}
		if err := m.measure(fig, *rounds); err != nil {
			return err
		}
		rep.measured = append(rep.measured, m.line(fig))
		fmt.Println(m.line(fig))
	}
	memory := "| memory after these |"
	for i, r := range f.routers {
		cell := fmt.Sprintf("%d MB", r.resident()>>20)
		if i == 0 && r.resident()>>20 > 40 {
			cell = "**" + cell + "**"
		}
		memory += " " + cell + " |"
	}
	rep.measured = append(rep.measured, memory+" ≤ 40 MB |")
	fmt.Println(memory)
	rep.profile, err = m.profile()
	return err
}

// line is a figure's line of the table.
func (m *meter) line(f figure) string {
	v, base, judged := m.values[f.name], []float64(nil), !f.ratio
	if len(m.routers) > 1 {
		base = m.values[f.name][m.routers[1].name]
		judged = judged || m.routers[1].name == "sglang-router"
	}
	s := "| " + f.name + " |"
	for i, r := range m.routers {
		got := median(append([]float64{}, v[r.name]...))
		cell, goal := fmt.Sprintf("%.2f %s", got, f.unit), got
		if f.ratio && base != nil {
			var ratios []float64
			for i, x := range v[r.name] {
				ratios = append(ratios, x/base[i])
			}
			goal = median(ratios)
			cell += fmt.Sprintf(" (%.2f)", goal)
		}
		if i == 0 && judged && goal > f.must {
			cell = "**" + cell + "**"
		}
		s += " " + cell + " |"
	}
	unit := " " + f.unit
	if f.ratio {
		unit = " of sglang-router's"
	}
	return s + fmt.Sprintf(" ≤ %.2f%s |", f.must, unit)
}

// rows runs the rows on failures and fidelity that pattern names.
func (rep *report) rows(log *os.File, pattern *regexp.Regexp) (bool, error) {
	all := true
	for _, row := range rows(*binary) {
		if !pattern.MatchString(row.name) {
			continue
		}
		line := "| " + row.name + " |"
		for i, p := range rep.peers {
			if i == 0 {
				p = ours(*binary, row.flags...)
			}
			says, holds, err := row.on(p, log)
			if err != nil {
				return false, fmt.Errorf("%s, %s: %w", row.name, p.name, err)
			}
			if i == 0 && !holds {
				says, all = "**"+says+"**", false
			}
			line += " " + says + " |"
		}
		line += " " + row.must + " |"
		rep.shown = append(rep.shown, line)
		fmt.Println(line)
	}
	return all, nil
}

// on runs a row on one router, in a fleet of its own.
func (r row) on(p peer, log *os.File) (string, bool, error) {
	start := startStubs
	if r.fleet != nil {
		start = r.fleet
	}
	f, err := start(log)
	if err != nil {
		return "", false, err
	}
	defer f.close()
	router, err := f.start(p)
	if err != nil {
		return "", false, err
	}
	defer client.CloseIdleConnections()
	says, holds := r.run(f, router)
	return says, holds, nil
}

// profile is where our router's CPU goes under requests of 8 KB.
func (m *meter) profile() (string, error) {
	m.set(mode{}, 0, 1, 2, 3)
	ctx, cancel := context.WithCancel(context.Background())
	done := beside(func() {
		for ctx.Err() == nil {
			closed(m.routers[0].url, chatBody(8<<10, false), 8, 200)
		}
	})
	resp, err := http.Get(m.routers[0].url + "/debug/pprof/profile?seconds=5")
	cancel()
	if err != nil {
		<-done
		return "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	<-done
	if err != nil {
		return "", err
	}
	file, err := os.CreateTemp("", "compare-router-*.pprof")
	if err != nil {
		return "", err
	}
	defer os.Remove(file.Name())
	file.Write(data)
	file.Close()
	text, err := exec.Command("go", "tool", "pprof", "-top", "-cum", "-nodecount=45", file.Name()).Output()
	_, top, _ := bytes.Cut(text, []byte("Showing"))
	return "Showing" + string(top), err
}

func get(url, has string) bool {
	resp, err := http.Get(url)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return bytes.Contains(text, []byte(has))
}

// page is docs/compare-router.md.
func (rep *report) page() string {
	head, rule := "| |", "|---|"
	for _, p := range rep.peers {
		head, rule = head+" "+p.name+" "+p.version+" |", rule+"---|"
	}
	head, rule = head+" ours must |\n", rule+"---|\n"
	var b strings.Builder
	fmt.Fprintf(&b, "# The router beside others\n\nWritten by `make compare-router PEERS=1` (scripts/compare-router), %s, %s, %d cores, %s; not a part of CI.\n\n", time.Now().UTC().Format("2006-01-02"), cpuModel(), runtime.NumCPU(), runtime.Version())
	b.WriteString("Two prefill and two decode stubs, each a process; every router with its defaults, its log in a file; one client process; all on the same cores. A figure is the\n" +
		"median of " + fmt.Sprint(*rounds) + " rounds in which the routers take turns; in brackets the median of its ratio to sglang-router in the same round. The rows on failures are one run each: they\n" +
		"show that a thing happens, not how often. In those, a stub decode answers only when its prefill has done its part. **Bold**: a goal that is not met.\n\n")
	b.WriteString("## Measured\n\n" + head + rule + strings.Join(rep.measured, "\n") + "\n\n")
	b.WriteString("## Failures and fidelity\n\nFor ours these are asserted.\n\n" + head + rule + strings.Join(rep.shown, "\n") + "\n\n")
	b.WriteString("## Where our CPU goes\n\n`go tool pprof -top -cum` of our router under requests of 8 KB, 8 at a time.\n\n```\n" + rep.profile + "```\n")
	return b.String()
}

func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	_, line, _ := strings.Cut(string(text), "model name")
	line, _, _ = strings.Cut(strings.TrimLeft(line, "\t :"), "\n")
	return line
}
