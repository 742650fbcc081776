package sched

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// peersEnv is a Peers with a network of scripted peers in virtual time. It does
// what the decode core and its driver do: the inbox first, then the timer, then
// the actions are handed out.
type peersEnv struct {
	p      *Peers
	now    time.Duration
	wire   map[string]string // "addr kind" → what such a try comes to
	open   map[uint64]*openTry
	arrive []arrival // completions on their way, unordered
	links  map[LinkID]string
	quiet  map[string]bool // kinds of actions that are not printed
	out    strings.Builder
	// Of the random walk: it sees every action, completion and verdict.
	watch func(a PeerAction)
	comes func(a PeerAction)
	judge func(v Verdict)
}

// openTry is a try that the network has not answered yet.
type openTry struct {
	a      PeerAction
	manual bool
}

type arrival struct {
	at   time.Duration
	id   uint64
	done PeerDone
}

func newPeersEnv(cfg PeersConfig) *peersEnv {
	return &peersEnv{
		p: NewPeers(cfg), wire: map[string]string{}, open: map[uint64]*openTry{},
		links: map[LinkID]string{}, quiet: map[string]bool{},
	}
}

var kindNames = map[PeerKind]string{
	FetchInfo: "info", QueryRanks: "ranks", LookupRank: "lookup", DialLink: "dial",
	CloseLink: "close", ProbeHealth: "health", CancelTry: "cancel",
}

func (e *peersEnv) printf(format string, args ...any) {
	fmt.Fprintf(&e.out, "%-8v ", e.now)
	fmt.Fprintf(&e.out, format+"\n", args...)
}

// drain hands out verdicts and actions, as the decode core does after each call.
func (e *peersEnv) drain() {
	for _, v := range e.p.Verdicts() {
		if e.judge != nil {
			e.judge(v)
		}
		switch v.Kind {
		case Linked:
			e.printf("req %d linked %v", v.Req, v.Links)
		case Unlinked:
			e.printf("req %d unlinked", v.Req)
		case Lost:
			e.printf("req %d lost: %v", v.Req, v.Err)
		}
	}
	for _, a := range slices.Clone(e.p.Actions()) {
		if e.watch != nil {
			e.watch(a)
		}
		e.act(a)
	}
}

// act is the driver's hand: it prints the action and lets the scripted network
// answer it.
func (e *peersEnv) act(a PeerAction) {
	kind := kindNames[a.Kind]
	if !e.quiet[kind] {
		e.printf("%s", describeAction(a))
	}
	switch a.Kind {
	case CloseLink:
		delete(e.links, a.Link)
	case CancelTry:
		if t := e.open[a.ID]; t != nil && !t.manual {
			e.arrive = slices.DeleteFunc(e.arrive, func(x arrival) bool { return x.id == a.ID })
			e.reply(t.a, time.Millisecond, PeerDone{Fault: LocalFault, Cause: "cancelled"})
		}
	default:
		script := cmp.Or(e.wire[a.Addr+" "+kind], e.wire["* "+kind], "manual")
		t := &openTry{a: a, manual: script == "manual"}
		e.open[a.ID] = t
		if !t.manual {
			after, d := parseDone(a, strings.Fields(script))
			e.reply(a, after, d)
		}
	}
}

func (e *peersEnv) reply(a PeerAction, after time.Duration, d PeerDone) {
	d.Kind, d.ID, d.Gen, d.Addr, d.Link = a.Kind, a.ID, cmp.Or(d.Gen, a.Gen), a.Addr, a.Link
	e.arrive = append(e.arrive, arrival{at: e.now + after, id: a.ID, done: d})
}

func describeAction(a PeerAction) string {
	var b strings.Builder
	switch a.Kind {
	case CancelTry:
		return fmt.Sprintf("  cancel #%d", a.ID)
	case CloseLink:
		return fmt.Sprintf("  close link %d: %s", a.Link, a.Text)
	}
	fmt.Fprintf(&b, "  %s #%d %s gen=%d", kindNames[a.Kind], a.ID, a.Addr, a.Gen)
	if a.Attempt != 0 {
		fmt.Fprintf(&b, " attempt=%d", a.Attempt)
	}
	if a.First {
		b.WriteString(" first")
	}
	fmt.Fprintf(&b, " within=%v", a.Timeout)
	switch a.Kind {
	case QueryRanks:
		fmt.Fprintf(&b, " rooms=%v", a.Rooms)
	case LookupRank:
		fmt.Fprintf(&b, " %v", a.Rank)
	case DialLink:
		fmt.Fprintf(&b, " link=%d our-tp=%d %v at %s", a.Link, a.LocalTP, a.Rank, a.Target)
		if a.Instance != "" {
			fmt.Fprintf(&b, " instance=%s", a.Instance)
		}
	}
	return b.String()
}

// parseDone reads what a try comes to: a word, then key=value pairs.
//
//	ok | refuse | hang | local | mismatch | fail, after=1ms cause=some_words …
func parseDone(a PeerAction, words []string) (after time.Duration, d PeerDone) {
	after = time.Millisecond
	info := ParallelInfo{TP: 1, CP: 1, DP: 1, PP: 1, PageSize: 16, KVDType: "f16", FollowRoom: true}
	d.Target = fmt.Sprintf("10.0.0.1:%d", 7000+a.Rank.TP)
	d.Ranks = map[int64]int{}
	switch words[0] {
	case "ok":
	case "refuse":
		d.Fault, d.Cause = PeerFault, "connection refused"
	case "hang":
		d.Fault, d.Cause, after = PeerFault, fmt.Sprintf("no answer within %v", a.Timeout), a.Timeout
	case "local":
		d.Fault, d.Cause = LocalFault, "no free descriptor"
	case "mismatch":
		d.Fault = MismatchFault
	case "fail":
		d.Fault = PeerFault
	case "empty":
		d.Target = ""
		return after, d
	default:
		panic("unknown answer " + words[0])
	}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		num, _ := strconv.Atoi(v)
		switch k {
		case "after":
			after, _ = time.ParseDuration(v)
		case "cause":
			d.Cause = strings.ReplaceAll(v, "_", " ")
		case "target":
			d.Target = v
		case "gen":
			d.Gen = uint64(num)
		case "instance":
			info.Instance, d.Instance, d.Welcome.Instance = v, v, v
		case "room": // room=7:1
			room, dp, _ := strings.Cut(v, ":")
			r, _ := strconv.ParseInt(room, 10, 64)
			d.Ranks[r], _ = strconv.Atoi(dp)
		case "fingerprint":
			info.Fingerprint, d.Welcome.Fingerprint = v, v
		case "page":
			info.PageSize, d.Welcome.PageSize = num, num
		case "dtype":
			info.KVDType, d.Welcome.KVDType = v, v
		case "tp":
			info.TP, d.Welcome.TP = num, num
		case "dp":
			info.DP, d.Welcome.DP = num, num
		case "cp":
			info.CP = num
		case "pp":
			info.PP = num
		case "layout":
			info.KVLayout = v
		case "policy":
			info.AllocationPolicy = v
		case "follow":
			info.FollowRoom = v == "true"
		case "sharding":
			info.KVSharding = true
		case "layersplit":
			info.LayerSplit = true
		default:
			panic("unknown word " + w)
		}
	}
	if a.Kind == FetchInfo && d.Fault == OK {
		d.Info = &info
	}
	return after, d
}

// deliver puts one completion into Peers.
func (e *peersEnv) deliver(d PeerDone) {
	if o := e.open[d.ID]; o != nil && o.a.Gen == d.Gen {
		if e.comes != nil {
			e.comes(o.a)
		}
		delete(e.open, d.ID)
	}
	kind := kindNames[d.Kind]
	if !e.quiet[kind] {
		what := "answers"
		switch d.Fault {
		case PeerFault:
			what = "fails: " + d.Cause
		case LocalFault:
			what = "local fault: " + d.Cause
		case MismatchFault:
			what = "mismatch: " + d.Cause
		}
		e.printf("%s #%d %s", kind, d.ID, what)
	}
	if d.Kind == DialLink && d.Fault == OK {
		e.links[d.Link] = d.Addr
	}
	e.p.Step(e.now, &d)
	e.drain()
}

// deliverDue takes the completions that have arrived by now into the turn.
func (e *peersEnv) deliverDue() {
	slices.SortFunc(e.arrive, func(a, b arrival) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.id, b.id)) })
	for len(e.arrive) > 0 && e.arrive[0].at <= e.now {
		d := e.arrive[0].done
		e.arrive = slices.Delete(e.arrive, 0, 1)
		e.deliver(d)
	}
}

// next is when the next turn happens by itself.
func (e *peersEnv) next() time.Duration {
	at := e.p.Deadline()
	for _, x := range e.arrive {
		at = min(at, x.at)
	}
	return max(at, e.now)
}

// endTurn judges the timer last.
func (e *peersEnv) endTurn() {
	e.deliverDue()
	if e.p.Deadline() <= e.now {
		e.p.Tick(e.now)
		e.drain()
	}
}

func (e *peersEnv) runUntil(until time.Duration) {
	for at := e.next(); at <= until; at = e.next() {
		e.now = at
		e.endTurn()
	}
	e.now = until
}

// event is one line of a turn's inbox.
func (e *peersEnv) event(t *testing.T, line string) {
	f := strings.Fields(line)
	arg := func(key, def string) string {
		for _, w := range f {
			if k, v, ok := strings.Cut(w, "="); ok && k == key {
				return v
			}
		}
		return def
	}
	num := func(s string) int64 {
		n, err := strconv.ParseInt(strings.TrimPrefix(s, "#"), 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return n
	}
	switch f[0] {
	case "want": // want 1 p1 room=5 dp=0
		for req := ReqID(num(f[1])); req <= ReqID(num(arg("to", f[1]))); req++ {
			w := Want{Req: req, Addr: f[2], Room: num(arg("room", strconv.Itoa(int(req)))), DPRank: int(num(arg("dp", "-1")))}
			if err := e.p.Want(e.now, w); err != nil {
				e.printf("req %d refused: %v (retry after %v)", req, err, err.RetryAfter)
			}
			e.drain()
		}
	case "granted":
		e.p.Granted(e.now, ReqID(num(f[1])))
	case "landed":
		e.p.Landed(e.now, ReqID(num(f[1])))
	case "forget":
		e.p.Forget(e.now, ReqID(num(f[1])))
	case "heard":
		e.p.Step(e.now, &LinkHeard{Link: LinkID(num(f[1]))})
	case "ended":
		delete(e.links, LinkID(num(f[1])))
		e.p.Step(e.now, &LinkEnded{Link: LinkID(num(f[1])), Cause: strings.Join(f[2:], " ")})
	case "done": // done #3 ok …
		id := uint64(num(f[1]))
		o := e.open[id]
		if o == nil {
			t.Fatalf("%s: nothing in flight has this id", line)
		}
		_, d := parseDone(o.a, f[2:])
		e.reply(o.a, 0, d)
		e.deliverDue()
	default:
		t.Fatalf("unknown event %q", line)
	}
	e.drain()
}

// TestPeersTranscripts runs every file of testdata/peers:
//
//	new       attempts=3 interval=1s reject tp=2 …   a fresh Peers
//	net       one line per address and kind: what such a try comes to; "*" is any address
//	quiet     kinds of actions not to print from here on
//	turn      at=1s [late=5s]; the inbox, one event a line; then the timer
//	run       until=20s: every turn that comes by itself
//	describe, stats, fatal
//
// Go test -rewrite writes the goldens anew: read the diff before you commit it.
func TestPeersTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/peers", func(t *testing.T, path string) {
		if text, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(text), "# ") {
			t.Fatalf("%s must open with a sentence that says what it shows: %v", path, err)
		}
		e := newPeersEnv(PeersConfig{})
		datadriven.RunTest(t, path, func(t *testing.T, td *datadriven.TestData) string {
			e.out.Reset()
			switch td.Cmd {
			case "new":
				e = newPeersEnv(parsePeersConfig(t, td))
			case "net":
				for line := range strings.Lines(td.Input) {
					f := strings.Fields(line)
					e.wire[f[0]+" "+f[1]] = strings.Join(f[2:], " ")
				}
			case "quiet":
				for _, a := range td.CmdArgs {
					e.quiet[a.Key] = true
				}
			case "turn":
				e.turn(t, td)
			case "run":
				e.runUntil(durationArg(t, td, "until"))
			case "describe":
				e.out.WriteString(e.p.Describe())
			case "stats":
				fmt.Fprintf(&e.out, "%+v\n", e.p.Stats())
			case "fatal":
				fmt.Fprintf(&e.out, "%v\n", e.p.Fatal())
			default:
				t.Fatalf("unknown command %q", td.Cmd)
			}
			e.check(t)
			return e.out.String()
		})
	})
}

// TestPeersRulesAreShown: docs/peers.md names every transcript of Peers, and
// none that does not exist; every rule and every acceptance test has one.
func TestPeersRulesAreShown(t *testing.T) {
	text, err := os.ReadFile("../../docs/peers.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/peers/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	named := map[string]bool{}
	for _, word := range strings.FieldsFunc(string(text), func(r rune) bool { return strings.ContainsRune(" `,;()|\n", r) }) {
		if strings.HasPrefix(word, "rule") && strings.HasSuffix(word, ".txt") || strings.HasPrefix(word, "accept") && strings.HasSuffix(word, ".txt") {
			named[word] = true
			if _, err := os.Stat(filepath.Join("testdata/peers", word)); err != nil {
				t.Errorf("docs/peers.md names %s: %v", word, err)
			}
		}
	}
	shown := map[string]bool{}
	for _, f := range files {
		base := filepath.Base(f)
		if !named[base] {
			t.Errorf("docs/peers.md does not name %s", base)
		}
		what, _, _ := strings.Cut(base, "_")
		shown[what] = true
	}
	for i := 1; i <= 21; i++ {
		if !shown[fmt.Sprintf("rule%02d", i)] {
			t.Errorf("no transcript shows rule %d", i)
		}
		if i <= 17 && !shown[fmt.Sprintf("accept%02d", i)] {
			t.Errorf("no transcript is acceptance test %d", i)
		}
	}
}

func (e *peersEnv) turn(t *testing.T, td *datadriven.TestData) {
	at := e.now
	if td.HasArg("at") {
		at = durationArg(t, td, "at")
	}
	if !td.HasArg("late") && e.next() < at {
		e.runUntil(at - 1)
	}
	e.now = at
	if td.HasArg("late") {
		e.p.Late(e.now, durationArg(t, td, "late"))
	}
	for line := range strings.Lines(td.Input) {
		e.event(t, strings.TrimSpace(line))
	}
	e.endTurn()
	if next := e.p.Deadline(); next == Never {
		e.printf("next: never")
	} else {
		e.printf("next: %v", next)
	}
}

func durationArg(t *testing.T, td *datadriven.TestData, key string) time.Duration {
	var s string
	td.ScanArgs(t, key, &s)
	d, err := time.ParseDuration(s)
	if err != nil {
		td.Fatalf(t, "%v", err)
	}
	return d
}

func parsePeersConfig(t *testing.T, td *datadriven.TestData) PeersConfig {
	cfg := PeersConfig{Seed: 1, Local: ParallelInfo{TP: 1, PageSize: 16, KVDType: "f16"}}
	for _, a := range td.CmdArgs {
		v := strings.Join(a.Vals, "")
		num, _ := strconv.Atoi(v)
		dur, _ := time.ParseDuration(v)
		switch a.Key {
		case "attempts":
			cfg.Attempts = num
		case "interval":
			cfg.Interval = dur
		case "timeout":
			cfg.Timeout = dur
		case "heartbeat":
			cfg.HeartbeatInterval = dur
		case "failures":
			cfg.HeartbeatFailures = num
		case "resolve":
			cfg.ResolveTimeout = dur
		case "per-addr":
			cfg.MaxPerAddr = num
		case "unresolved":
			cfg.MaxUnresolved = num
		case "records":
			cfg.MaxRecords = num
		case "idle":
			cfg.IdleTTL = dur
		case "reject":
			cfg.Reject = true
		case "dcp":
			cfg.DCP = num
		case "tp":
			cfg.Local.TP = num
		case "cp":
			cfg.Local.CP = num
		case "pp":
			cfg.Local.PP = num
		case "layout":
			cfg.Local.KVLayout = v
		case "dtype":
			cfg.Local.KVDType = v
		case "fingerprint":
			cfg.Local.Fingerprint = v
		default:
			td.Fatalf(t, "unknown setting %s", a.Key)
		}
	}
	return cfg
}

// check compares what Peers believes with what it must add up to.
func (e *peersEnv) check(t interface {
	Helper()
	Fatalf(string, ...any)
}) {
	t.Helper()
	p := e.p
	unresolved, claims := 0, 0
	for i, pr := range p.all {
		if pr.index != i || p.peers[pr.addr] != pr {
			t.Fatalf("record %s: index %d at %d", pr.addr, pr.index, i)
		}
		var at [stageCount]int
		for c := pr.head; c != nil; c = c.next {
			claims++
			at[c.stage]++
			if p.claims[c.Req] != c || c.peer != pr || c.next == nil && pr.tail != c {
				t.Fatalf("request %d is not where it belongs", c.Req)
			}
			if c.stage.resolving() {
				unresolved++
			}
			if c.alarm.isSet() != c.stage.resolving() {
				t.Fatalf("request %d in stage %d: clock running %v", c.Req, c.stage, c.alarm.isSet())
			}
			if c.stage == isLinked && !c.set.complete() {
				t.Fatalf("request %d is linked, its links are not up", c.Req)
			}
			if c.stage == needLinks && c.set.complete() {
				t.Fatalf("request %d waits for links that are up", c.Req)
			}
		}
		if at != pr.at {
			t.Fatalf("record %s: claims by stage %v, counted %v", pr.addr, at, pr.at)
		}
		if pr.known && pr.bad != nil || (pr.known || pr.bad != nil) != pr.beat.alarm.isSet() {
			t.Fatalf("record %s: known %v, bad %v, heartbeat %v", pr.addr, pr.known, pr.bad, pr.beat.alarm.isSet())
		}
		if (at[needInfo] > 0) != pr.info.isOpen && p.fatal == nil {
			t.Fatalf("record %s: %d wait for its parallel info, episode open %v", pr.addr, at[needInfo], pr.info.isOpen)
		}
		// Whatever somebody waits for is on its way.
		coming := func(pc *pacer) bool { return p.fatal != nil || pc.isOpen && (pc.inFlight() || pc.alarm.isSet()) }
		if at[needInfo] > 0 && !coming(&pr.info.pacer) {
			t.Fatalf("record %s: nothing will ever come of its fetch", pr.addr)
		}
		if at[needRank] > 0 && !coming(&pr.query.pacer) {
			t.Fatalf("record %s: nothing will ever come of its query", pr.addr)
		}
		for _, s := range pr.sets {
			judged := slices.ContainsFunc(s.pairs, func(pa *pair) bool { return pa.spent >= p.cfg.Attempts && coming(&pa.pacer) })
			for _, pa := range s.pairs {
				if s.at[needLinks] > 0 && !judged && pa.link == 0 && !coming(&pa.pacer) && (pa.rank.target != "" || !coming(&pa.rank.pacer)) {
					t.Fatalf("record %s: nothing will ever come of our %d's link to %v", pr.addr, pa.local, pa.rank.key)
				}
			}
		}
	}
	if claims != len(p.claims) || unresolved != p.unresolved {
		t.Fatalf("%d claims (%d), %d unresolved (%d)", claims, len(p.claims), unresolved, p.unresolved)
	}
	if len(p.links) != len(e.links) && p.fatal == nil {
		t.Fatalf("Peers thinks %d links are up, the network has %d", len(p.links), len(e.links))
	}
	for i, en := range p.alarms.heap {
		if en.a.pos != i+1 || en.at != en.a.at || i > 0 && en.before(&p.alarms.heap[(i-1)/4]) {
			t.Fatalf("the alarm heap is out of order at %d", i)
		}
	}
}
