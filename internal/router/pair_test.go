package router

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/metronome-serve/metronome/internal/api"
)

// TestPairTranscripts replays the dialogues of testdata/pair: each command is one
// event, the output is what the machine wants done. Rewrite them with
// -rewrite, and read the difference before committing it.
//
// Commands: new [retries=N] [migrations=N]; then the names of events (start, picked p=… d=…,
// none, data, ended, failed, out, gone, deadline, stop) with leg=, attempt=
// (default: the current one), and for failed kind=connect|cut|silent|status
// status= code= text=, for out spare, for both goes-on.
func TestPairTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/pair", func(t *testing.T, path string) {
		var p *pair
		now := time.Duration(0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			now += time.Second
			if d.Cmd == "new" {
				p = &pair{retries: 2, migrations: 1}
				if d.HasArg("migrations") {
					d.ScanArgs(t, "migrations", &p.migrations)
				}
				if d.HasArg("retries") {
					d.ScanArgs(t, "retries", &p.retries)
				}
				return describe(p)
			}
			p.Step(now, parseEvent(t, p, d))
			return describe(p)
		})
	})
}

func parseEvent(t *testing.T, p *pair, d *datadriven.TestData) event {
	ev := event{attempt: p.attempt}
	for k := evStart; k <= evLast; k++ {
		if k.String() == d.Cmd {
			ev.kind = k
		}
	}
	if ev.kind == 0 {
		t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
	if ev.kind == evData {
		ev.leg = Decode
	}
	if ev.kind == evNone {
		ev.err = api.Errorf(api.NoPrefill, "no usable prefill worker")
	}
	kinds := map[string]faultKind{"connect": faultConnect, "cut": faultCut, "silent": faultSilent, "status": faultStatus}
	for _, a := range d.CmdArgs {
		v := strings.Join(a.Vals, ",")
		switch a.Key {
		case "leg":
			ev.leg = map[string]Leg{"prefill": Prefill, "decode": Decode}[v]
		case "attempt":
			ev.attempt, _ = strconv.Atoi(v)
		case "p":
			ev.workers[Prefill] = v
		case "d":
			ev.workers[Decode] = v
		case "kind":
			ev.fault.kind = kinds[v]
		case "status":
			ev.fault.status, _ = strconv.Atoi(v)
		case "code":
			ev.fault.code = api.Code(v)
		case "text":
			ev.fault.text = v
		case "spare":
			ev.spare = true
		case "goes-on":
			ev.goesOn = true
		default:
			t.Fatalf("%s: unknown argument %s", d.Pos, a.Key)
		}
	}
	if ev.fault.kind == faultStatus && ev.fault.status < 500 {
		ev.fault.answer = &answer{status: ev.fault.status}
	}
	return ev
}

// describe prints where a request stands and what is to be done.
func describe(p *pair) string {
	var b strings.Builder
	for _, a := range p.Ready() {
		switch a.kind {
		case actPick:
			b.WriteString("pick a pair\n")
		case actSend:
			fmt.Fprintf(&b, "send both legs of attempt %d\n", p.attempt)
		case actEnd:
			fmt.Fprintf(&b, "end the %s leg", a.leg)
			if a.grace > 0 {
				fmt.Fprintf(&b, " after %v", a.grace)
			}
			fmt.Fprintf(&b, " (%v)\n", a.err)
		case actServed:
			fmt.Fprintf(&b, "praise %s\n", a.leg)
		case actBlame:
			fmt.Fprintf(&b, "blame %s", a.leg)
			if a.verdict.down {
				b.WriteString(", down")
			} else if !a.verdict.health {
				b.WriteString(", health untouched")
			}
			fmt.Fprintf(&b, "\n")
		case actRelay:
			b.WriteString("relay\n")
		case actFail:
			if a.verdict.pass != nil {
				fmt.Fprintf(&b, "fail: pass the worker's %d on unchanged\n", a.verdict.pass.status)
			} else {
				fmt.Fprintf(&b, "fail: %d %v\n", a.verdict.err.HTTPStatus(), a.verdict.err)
			}
		case actFinish:
			b.WriteString("finish\n")
		}
	}
	fmt.Fprintf(&b, "%v", p.phase)
	if p.attempt > 0 {
		fmt.Fprintf(&b, " attempt=%d prefill=%v decode=%v", p.attempt, p.legs[Prefill], p.legs[Decode])
	}
	return b.String() + "\n"
}

// at brings a machine to a phase, with the prefill leg in the given state.
func at(ph phase, prefill legState) *pair {
	p := &pair{retries: 1, migrations: 1}
	steps := map[phase][]event{
		phaseNew:      nil,
		phasePicking:  {{kind: evStart}},
		phaseOpen:     {{kind: evStart}, {kind: evPicked, workers: [2]string{"P1", "D1"}}},
		phaseRelaying: {{kind: evStart}, {kind: evPicked, workers: [2]string{"P1", "D1"}}, {kind: evData, attempt: 1, leg: Decode}},
		phaseEnded: {{kind: evStart}, {kind: evPicked, workers: [2]string{"P1", "D1"}}, {kind: evData, attempt: 1, leg: Decode},
			{kind: evEnded, attempt: 1, leg: Decode}},
	}[ph]
	for _, ev := range steps {
		p.Step(0, ev)
		if ev.kind == evPicked && prefill == legDone {
			p.Step(0, event{kind: evEnded, attempt: 1, leg: Prefill})
		}
	}
	return p
}

// TestPairTable enumerates phases × events: the table says what each does, and
// "-" that it is dropped without a trace.
func TestPairTable(t *testing.T) {
	names := map[string]event{
		"start": {kind: evStart}, "picked": {kind: evPicked, workers: [2]string{"P2", "D2"}}, "none": {kind: evNone, err: api.Errorf(api.NoDecode, "none")},
		"data D": {kind: evData, attempt: 1, leg: Decode}, "ended P": {kind: evEnded, attempt: 1, leg: Prefill}, "ended D": {kind: evEnded, attempt: 1, leg: Decode},
		"failed P": {kind: evFailed, attempt: 1, leg: Prefill, fault: fault{kind: faultCut}}, "failed D": {kind: evFailed, attempt: 1, leg: Decode, fault: fault{kind: faultCut}},
		"400 P":    {kind: evFailed, attempt: 1, leg: Prefill, fault: fault{kind: faultStatus, status: 400}},
		"out P":    {kind: evOut, attempt: 1, leg: Prefill, spare: true},
		"out D":    {kind: evOut, attempt: 1, leg: Decode, spare: true},
		"no spare": {kind: evOut, attempt: 1, leg: Decode},
		"goes on":  {kind: evFailed, attempt: 1, leg: Decode, fault: fault{kind: faultCut}, goesOn: true},
		"400, on":  {kind: evFailed, attempt: 1, leg: Decode, fault: fault{kind: faultStatus, status: 400}, goesOn: true},
		"out, on":  {kind: evOut, attempt: 1, leg: Decode, spare: true, goesOn: true},
		"P out,on": {kind: evOut, attempt: 1, leg: Prefill, spare: true, goesOn: true},
		"silent D": {kind: evFailed, attempt: 1, leg: Decode, fault: fault{kind: faultSilent}},
		"stale D":  {kind: evFailed, attempt: 7, leg: Decode, fault: fault{kind: faultCut}},
		"data P":   {kind: evData, attempt: 1, leg: Prefill},
		"gone":     {kind: evGone}, "deadline": {kind: evDeadline}, "stop": {kind: evStop},
	}
	columns := []struct {
		name    string
		phase   phase
		prefill legState
	}{{"new", phaseNew, legNone}, {"picking", phasePicking, legNone}, {"open", phaseOpen, legOpen}, {"open, P done", phaseOpen, legDone},
		{"relaying", phaseRelaying, legOpen}, {"relaying, P done", phaseRelaying, legDone}, {"ended", phaseEnded, legEnded}}
	// In the order of columns: the phase after the event, "-" for dropped.
	table := map[string][7]string{
		"start":    {"picking", "-", "-", "-", "-", "-", "-"},
		"picked":   {"-", "open", "-", "-", "-", "-", "-"},
		"none":     {"-", "ended", "-", "-", "-", "-", "-"},
		"data D":   {"-", "-", "relaying", "relaying", "-", "-", "-"},
		"data P":   {"-", "-", "-", "-", "-", "-", "-"},
		"ended P":  {"-", "-", "open", "-", "relaying", "-", "-"},
		"ended D":  {"-", "-", "picking", "picking", "ended", "ended", "-"},
		"failed P": {"-", "-", "picking", "-", "relaying", "-", "-"},
		"failed D": {"-", "-", "picking", "picking", "ended", "ended", "-"},
		"400 P":    {"-", "-", "ended", "-", "relaying", "-", "-"},
		"out P":    {"-", "-", "picking", "-", "-", "-", "-"},
		"out D":    {"-", "-", "picking", "picking", "-", "-", "-"},
		"no spare": {"-", "-", "-", "-", "-", "-", "-"},
		"goes on":  {"-", "-", "picking", "picking", "picking", "picking", "-"},
		"400, on":  {"-", "-", "ended", "ended", "ended", "ended", "-"},
		"out, on":  {"-", "-", "picking", "picking", "picking", "picking", "-"},
		"P out,on": {"-", "-", "picking", "-", "picking", "picking", "-"},
		"silent D": {"-", "-", "picking", "picking", "ended", "ended", "-"},
		"stale D":  {"-", "-", "-", "-", "-", "-", "-"},
		"gone":     {"ended", "ended", "ended", "ended", "ended", "ended", "-"},
		"deadline": {"ended", "ended", "ended", "ended", "ended", "ended", "-"},
		"stop":     {"ended", "ended", "ended", "ended", "ended", "ended", "-"},
	}
	if len(table) != len(names) {
		t.Fatalf("%d rows for %d events", len(table), len(names))
	}
	for name, row := range table {
		for i, c := range columns {
			p := at(c.phase, c.prefill)
			if p.phase != c.phase {
				t.Fatalf("cannot come to %s", c.name)
			}
			before := *p
			before.ready = nil
			p.Step(1, names[name])
			got := p.phase.String()
			after := *p
			after.ready = nil
			if len(p.Ready()) == 0 && fmt.Sprint(before) == fmt.Sprint(after) {
				got = "-"
			}
			if got != row[i] {
				t.Errorf("%s in %s: %s, want %s", name, c.name, got, row[i])
			}
			checkActions(t, name+" in "+c.name, names[name], &before, p)
		}
	}
}

// checkActions holds each step against the invariants of pair.
func checkActions(t *testing.T, what string, ev event, before, p *pair) {
	t.Helper()
	ends, endedLeg := 0, [2]bool{}
	for _, a := range p.Ready() {
		switch a.kind {
		case actFail, actFinish:
			ends++
		case actEnd:
			endedLeg[a.leg] = true
		}
	}
	ended := p.phase == phaseEnded && before.phase != phaseEnded
	if want := ended && (p.end == nil || p.end.Code != api.ClientGone); (ends == 1) != want || ends > 1 {
		t.Errorf("%s: %d ends", what, ends)
	}
	left := ended || p.phase == phasePicking && before.phase >= phaseOpen
	if left {
		for leg := range p.legs { // nobody else ends a leg that is still running
			itself := ev.leg == Leg(leg) && (ev.kind == evEnded || ev.kind == evFailed && ev.fault.kind != faultSilent)
			if before.legs[leg] == legOpen && !endedLeg[leg] && !itself {
				t.Errorf("%s: the %v leg runs on", what, Leg(leg))
			}
		}
	}
	for leg := range p.legs {
		if left && p.legs[leg] == legOpen {
			t.Errorf("%s: the %v leg is left open", what, Leg(leg))
		}
		if endedLeg[leg] && before.legs[leg] != legOpen {
			t.Errorf("%s: the %v leg is ended and was not open", what, Leg(leg))
		}
	}
}
