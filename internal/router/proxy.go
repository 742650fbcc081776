package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

const (
	relayBuffer  = 32 << 10 // of one stream, and what a decode may be ahead of its client in our memory
	wholeAnswer  = 4 << 20  // an answer that is no stream is held back up to this size, so that a break can be retried
	errorAnswer  = 64 << 10 // bytes read of an error answer
	prefillDrain = 32 << 20 // bytes read of a prefill's answer
	scoredAnswer = 32 << 20 // of an answer, or an event of it, that the prompt's log-probabilities are put into
)

var relayBuffers = sync.Pool{New: func() any { return new([relayBuffer]byte) }}

// exchange drives one request: it owns the state machine, feeds it what
// happens and does what it says. The client's own goroutine runs the decode
// leg; the prefill leg has one of its own; timers and probes only feed events.
type exchange struct {
	r     *Router
	w     http.ResponseWriter
	rc    *http.ResponseController
	req   *http.Request
	path  string
	kind  api.Kind
	id    string
	began time.Duration
	until time.Duration // the request's deadline

	memory bodyMemory // the body's
	held   int64      // booked for it
	scan   api.Scanned
	items  int
	batch  bool
	wishes [2]wish
	header http.Header // what both legs get

	history *history

	// Under mu: the machine and what its actions touch.
	mu    sync.Mutex
	pair  pair
	cur   *attempt
	avoid [2][]*worker
	fail  verdict // what to tell the client, once ended

	journal journal

	watch     *time.Timer   // runs while there is an attempt; under mu
	lastLook  bool          // what it looks for is over unless the next look finds otherwise; under mu
	wellAt    time.Duration // when both workers of the attempt were last seen in rotation; under mu
	firstByte time.Duration // when the client's first byte was due, 0: not yet; set under mu

	timer  *time.Timer   // the deadline
	heard  atomic.Int64  // when the last write of decode's data was over, or writing
	armed  time.Duration // when the write deadline was set
	stream bool          // the answer is a stream
	headed bool          // the client has the answer's head
	abort  bool          // break the connection off
	sent   int64         // bytes to the client

	lastByte time.Duration // when the client had taken the last of them
}

// attempt is one try of a pair.
type attempt struct {
	n       int
	workers [2]*worker
	cost    [2]int64 // tokens booked on them
	ctx     [2]context.Context
	cancel  [2]context.CancelCauseFunc
	header  http.Header
	segs    [][]byte
	length  int
	claimed bool        // the client's goroutine has taken up the decode leg
	goesOn  bool        // it goes on with a stream
	taken   int         // from a journal of so many bytes
	late    *time.Timer // ends the prefill leg after its grace

	// The prompt's log-probabilities out of the prefill's answer, where the
	// request asks for them. scored is closed when they are there.
	scored  chan struct{}
	scores  *scores
	held    int64 // memory booked for them
	oneOver bool  // one of the legs is over; under mu
}

// step feeds one event to the machine and does what it says. Nothing in it
// waits, so any goroutine may call it.
func (x *exchange) step(ev event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stepLocked(ev)
}

func (x *exchange) stepLocked(ev event) {
	now := x.r.now()
	x.pair.Step(now, ev)
	for _, a := range x.pair.Ready() {
		switch a.kind {
		case actPick:
			x.stepLocked(x.pick(now)) // actPick comes last: what was Ready is done
			return
		case actSend:
			x.dispatch(now)
		case actEnd:
			x.endLeg(a)
		case actServed:
			x.r.table.served(now, x.cur.workers[a.leg])
		case actBlame:
			w := x.cur.workers[a.leg]
			x.avoid[a.leg] = append(x.avoid[a.leg], w)
			x.r.table.blamed(now, w, a.verdict)
			x.r.cfg.Log.Warn("leg failed", "request", x.id, "attempt", x.cur.n, "blamed", w.name, "cause", a.verdict.err.Message)
		case actFail:
			x.fail = a.verdict
			if x.firstByte != 0 {
				// A client that takes nothing must not hold up the end.
				x.rc.SetWriteDeadline(time.Now().Add(time.Second))
			}
		}
	}
}

// pick answers actPick. Further attempts are taken from a budget that all
// requests share, so that retries cannot multiply an overload; a move away from
// a worker that went out is free, for that worker does no work, and so is going
// on with a stream, which is bounded by itself.
func (x *exchange) pick(now time.Duration) event {
	x.dropUntaken()
	retry := x.pair.attempt > 0 && x.pair.moves == 0
	if retry && !x.pair.last.free && !x.r.mayRetry() {
		return event{kind: evNone}
	}
	got, cost, err := x.r.table.pickPair(now, &x.wishes, x.avoid)
	if err != nil {
		return event{kind: evNone, err: err}
	}
	if x.pair.attempt > 0 {
		x.history.over(now, x.pair.last.err)
	}
	if retry {
		x.r.metrics.Retries.Inc()
	}
	x.cur = &attempt{n: x.pair.attempt + 1, workers: got, cost: cost}
	return event{kind: evPicked, workers: [2]string{got[Prefill].name, got[Decode].name}}
}

// dropUntaken gives back the booking of a decode leg that was never taken up:
// its attempt was over before the client's goroutine came to it.
func (x *exchange) dropUntaken() {
	if x.cur != nil && !x.cur.claimed {
		x.cur.claimed = true
		x.cur.cancel[Decode](errLegOver)
		x.r.table.release(x.cur.workers[Decode], x.cur.cost[Decode])
		x.dropScoresLocked(x.cur)
	}
}

// dispatch sends both legs: it starts the prefill's goroutine; the client's
// goroutine takes up the decode leg when it next looks.
func (x *exchange) dispatch(now time.Duration) {
	a := x.cur
	p := a.workers[Prefill]
	in := api.Injection{Host: p.bootstrapHost, Port: p.bootstrapPort, Rooms: make([]int64, x.items), Batch: x.batch}
	for i := range in.Rooms {
		in.Rooms[i] = rand.Int64() // uniform in [0, 2^63-1], from the runtime's ChaCha8, seeded by the system
	}
	if a.n > 1 {
		x.header = x.header.Clone() // that of the attempt before may still be on its way
	}
	a.header = x.header
	a.header[api.TimelineHeader] = []string{"1"}
	x.askJournal(a, &in)
	x.history.routed(now, a, in.Rooms[0])
	a.segs, _, a.length = x.scan.Splice(make([][]byte, 0, 6), make([]byte, 0, 192), in)
	a.header[api.TimeoutHeader] = []string{strconv.FormatInt((x.until-now).Milliseconds(), 10) + "ms"}
	// The prefill's context does not end with the client's request: it may
	// outlive it by endGrace. The machine ends it.
	a.ctx[Prefill], a.cancel[Prefill] = context.WithCancelCause(x.r.base)
	a.ctx[Decode], a.cancel[Decode] = context.WithCancelCause(x.req.Context())
	if wanted, _ := x.scan.PromptScores(x.kind); wanted {
		a.scored = make(chan struct{})
	}
	x.wellAt = now
	x.watchOver(a, x.watchOpen)
	x.memory.use()
	x.r.legs.Go(func() { x.prefill(a) })
}

func (x *exchange) endLeg(a action) {
	cur := x.cur
	if a.grace == 0 {
		cur.cancel[a.leg](a.err)
		return
	}
	cur.late = time.AfterFunc(a.grace, func() { cur.cancel[a.leg](a.err) })
}

// run takes a request whose body is read to its end.
func (x *exchange) run() {
	x.history.mark(x.r.now(), metric.Queued)
	x.step(event{kind: evStart})
	for a := x.take(); a != nil; a = x.take() {
		x.decode(a)
		a.cancel[Decode](errLegOver)
		x.r.table.release(a.workers[Decode], a.cost[Decode])
		x.dropScores(a)
	}
	x.timer.Stop()
	if x.watch != nil {
		x.watch.Stop()
	}
	x.answer()
}

// take gives the attempt whose decode leg is to be run next, nil when the
// request has ended.
func (x *exchange) take() *attempt {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pair.phase == phaseEnded {
		x.dropUntaken()
		return nil
	}
	if x.cur.claimed {
		panic("router: a decode leg is over and the request neither ended nor tried again")
	}
	x.cur.claimed = true
	return x.cur
}

var errLegOver = errors.New("the leg is over")

// prefill runs the prefill leg of one attempt: its answer is read for how it
// ends, and for an error inside of it.
func (x *exchange) prefill(a *attempt) {
	w := a.workers[Prefill]
	defer x.memory.leave()
	defer x.history.leave(x.r.cfg.Log)
	defer x.dropScores(a)
	defer x.r.table.release(w, a.cost[Prefill])
	defer a.cancel[Prefill](errLegOver)
	resp, f := x.send(a, Prefill)
	if f == nil {
		if wanted, drawn := x.scan.PromptScores(x.kind); wanted {
			f = x.takeScores(a, resp, drawn)
		} else {
			f = drainPrefill(a.ctx[Prefill], resp, x.items)
		}
		x.history.answered(a.n, Prefill, resp)
		resp.Body.Close()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if a.late != nil {
		a.late.Stop()
	}
	if f != nil {
		x.history.failed(a.n, Prefill, f)
		x.stepLocked(x.failure(event{kind: evFailed, attempt: a.n, leg: Prefill, fault: *f}))
		return
	}
	x.stepLocked(event{kind: evEnded, attempt: a.n, leg: Prefill})
}

// failure is the event of a leg that failed. When the client has gone away it is
// just that: decode's leg ends with the client, and what prefill then says of
// decode is nobody's fault and nothing to try again.
func (x *exchange) failure(ev event) event {
	if x.req.Context().Err() != nil {
		return event{kind: evGone}
	}
	return ev
}

// drainPrefill reads a prefill's answer to its end. The first part of it is
// looked at for an error: an engine that has begun a stream can tell of one in
// no other way.
func drainPrefill(ctx context.Context, resp *http.Response, items int) *fault {
	buf := relayBuffers.Get().(*[relayBuffer]byte)
	defer relayBuffers.Put(buf)
	n, err := io.ReadFull(resp.Body, buf[:])
	if err == nil {
		_, err = io.CopyN(io.Discard, resp.Body, prefillDrain)
		if err == nil {
			return &fault{kind: faultCut, text: fmt.Sprintf("the answer is longer than %d bytes", prefillDrain)}
		}
	}
	if err != io.EOF && err != io.ErrUnexpectedEOF || errors.Is(err, io.ErrUnexpectedEOF) && n == 0 {
		return &fault{kind: faultCut, text: "the answer broke off: " + plainCause(ctx, err)}
	}
	if !isStream(resp.Header) {
		return bodyFault(buf[:n], items)
	}
	for head := buf[:n]; len(head) > 0; {
		line, rest, _ := bytes.Cut(head, []byte{'\n'})
		if f := bodyFault(api.EventData(line), items); f != nil {
			return f
		}
		head = rest
	}
	return nil
}

// decode runs the decode leg of one attempt and passes its answer on.
func (x *exchange) decode(a *attempt) {
	resp, f := x.send(a, Decode)
	if f != nil {
		x.decodeFailed(a, *f)
		return
	}
	defer resp.Body.Close()
	defer func() { x.history.answered(a.n, Decode, resp) }()
	if f := x.goesOn(a, resp); f != nil {
		x.decodeFailed(a, *f)
		return
	}
	if x.stream = isStream(resp.Header); x.stream {
		x.relayStream(a, resp)
	} else {
		x.relayWhole(a, resp)
	}
}

// decodeFailed tells the machine.
func (x *exchange) decodeFailed(a *attempt, f fault) {
	x.history.failed(a.n, Decode, &f)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stepLocked(x.failure(event{kind: evFailed, attempt: a.n, leg: Decode, fault: f, goesOn: x.journal.whole()}))
}

// mayRelay tells the machine that the first data is here and whether the
// client is to have it: the attempt may be over by now.
func (x *exchange) mayRelay(a *attempt, resp *http.Response) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stepLocked(event{kind: evData, attempt: a.n, leg: Decode})
	if x.pair.phase != phaseRelaying || x.pair.attempt != a.n {
		return false
	}
	now := x.r.now()
	x.heard.Store(int64(now))
	x.watchOver(a, x.watchIdle)
	x.journal.kept = resp.Header.Get(api.JournalHeader) != ""
	if a.goesOn {
		x.moved(a)
		return true
	}
	x.firstByte = now
	x.history.mark(now, metric.FirstToken)
	if x.stream { // a whole answer tells nothing of its first token
		x.r.metrics.TTFT.Observe((x.firstByte - x.began).Seconds())
	}
	return true
}

// relayStream passes a stream on event by event.
func (x *exchange) relayStream(a *attempt, resp *http.Response) {
	buf := relayBuffers.Get().(*[relayBuffer]byte)
	defer relayBuffers.Put(buf)
	events := api.NewEventReader(resp.Body, buf[:])
	var lead, run []byte
	var whole bool
	var err error
	for err == nil && api.EventData(run) == nil { // comments before the first event hold no token
		if len(lead) < relayBuffer {
			lead = append(lead, run...)
		}
		run, whole, err = events.Next()
	}
	f := bodyFault(api.EventData(run), x.items)
	if f == nil && err != nil && api.EventData(run) == nil {
		f = x.cut(a, err)
	}
	if f != nil {
		x.decodeFailed(a, *f)
		return
	}
	sc, f := x.awaitScores(a)
	if f != nil {
		x.decodeFailed(a, *f)
		return
	}
	if !x.mayRelay(a, resp) {
		return
	}
	x.head(resp, -1)
	if !a.goesOn && !x.write(lead) {
		return
	}
	if sc != nil {
		f = x.scoreEvents(a, sc, events, run, whole, err)
	} else {
		f = x.copyEvents(a, events, run, whole, err)
	}
	if f != nil {
		x.decodeFailed(a, *f)
		return
	}
	// The client has all and may leave. The worker's end is read so that its
	// connection can be used again.
	x.step(event{kind: evEnded, attempt: a.n, leg: Decode})
	late := time.AfterFunc(endGrace, func() { a.cancel[Decode](errLegOver) })
	io.CopyN(io.Discard, resp.Body, relayBuffer)
	late.Stop()
}

// copyEvents writes run and then what follows it: one read that waits, one
// write, for as many events as have come. Nothing is read while a write waits,
// so the client's pace is the worker's. It returns nil after [DONE]; a stream
// that ends without it was cut. Of an event that was broken off nothing is
// passed on.
func (x *exchange) copyEvents(a *attempt, events *api.EventReader, run []byte, whole bool, err error) *fault {
	for {
		if len(run) > 0 && (whole || err == nil || x.journal.mid) {
			events, f := x.admit(a, run, whole)
			if f != nil {
				return f
			}
			good, bad := splitError(events, x.items)
			if !x.write(good) {
				return errClient
			}
			if bad != nil {
				return bad
			}
			if whole && api.EndsDone(events) {
				return nil
			}
		}
		if err != nil {
			return x.cut(a, err)
		}
		run, whole, err = events.Next()
	}
}

// errClient is for a write that failed; write has told the machine, which drops
// what comes after.
var errClient = &fault{kind: faultCut, text: "the client takes nothing"}

func (x *exchange) cut(a *attempt, err error) *fault {
	return &fault{kind: faultCut, text: "the answer broke off: " + plainCause(a.ctx[Decode], err)}
}

// relayWhole passes on an answer that is no stream. It is held back until it is
// complete, so that a break can still be retried; a very long one flows.
func (x *exchange) relayWhole(a *attempt, resp *http.Response) {
	if wanted, _ := x.scan.PromptScores(x.kind); wanted {
		x.relayScored(a, resp)
		return
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, wholeAnswer))
	if err != nil {
		x.decodeFailed(a, *x.cut(a, err))
		return
	}
	long := len(body) == wholeAnswer
	if f := bodyFault(body, x.items); f != nil && !long {
		x.decodeFailed(a, *f)
		return
	}
	if !x.mayRelay(a, resp) {
		return
	}
	length := int64(len(body))
	if long {
		length = resp.ContentLength
	}
	x.head(resp, length)
	for err == nil {
		if !x.write(body) {
			return
		}
		if !long {
			break
		}
		var n int
		n, err = io.ReadAtLeast(resp.Body, body[:relayBuffer], 1)
		body = body[:n]
	}
	if err != nil && err != io.EOF {
		x.decodeFailed(a, *x.cut(a, err))
		return
	}
	x.step(event{kind: evEnded, attempt: a.n, leg: Decode})
}

// head begins the client's answer with decode's status and headers.
func (x *exchange) head(resp *http.Response, length int64) {
	if x.headed {
		return
	}
	x.headed = true
	copyHeader(x.w.Header(), resp.Header)
	if length >= 0 {
		x.w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	}
	x.w.WriteHeader(resp.StatusCode)
}

// write writes and flushes one run of an answer and tells whether the client
// took it. The write deadline is moved only when half of it is gone: that is
// cheaper than a timer for each event.
func (x *exchange) write(run []byte) bool {
	if len(run) == 0 {
		return true
	}
	x.heard.Store(writing)
	if now := x.r.now(); x.armed == 0 || now-x.armed > x.r.cfg.WriteTimeout/2 {
		x.arm(now)
	}
	n, err := x.w.Write(run)
	x.sent += int64(n)
	if err == nil {
		err = x.rc.Flush()
	}
	now := x.r.now()
	x.heard.Store(int64(now))
	if n > 0 {
		x.lastByte = now
	}
	if err != nil {
		x.step(event{kind: evGone}) // or so slow that it is the same
	}
	return err == nil
}

const writing = -1 // in exchange.heard: the client is being waited for, not decode

// arm sets the write deadline, unless the request has ended: then a shorter one
// holds.
func (x *exchange) arm(now time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pair.phase != phaseEnded {
		x.armed = now
		x.rc.SetWriteDeadline(time.Now().Add(x.r.cfg.WriteTimeout))
	}
}

// watchOver has look come again and again, until the next attempt or the end.
func (x *exchange) watchOver(a *attempt, look func(*attempt)) {
	if x.watch != nil {
		x.watch.Stop()
	}
	limit := x.r.cfg.IdleTimeout
	x.lastLook = false
	x.watch = time.AfterFunc(min(limit-api.LookOf(limit), x.r.cfg.HealthTimeout), func() { look(a) })
}

// isOver tells whether a wait that has so much left is over, or when to look
// again. It is not at the first look that finds so, see api.SecondLook.
func (x *exchange) isOver(left time.Duration) bool {
	end := api.LookOf(x.r.cfg.IdleTimeout)
	next := min(left-end, x.r.cfg.HealthTimeout)
	switch {
	case left > end:
		x.lastLook = false
	case !x.lastLook:
		x.lastLook, next = true, end
	case left > 0:
		next = left
	default:
		return true
	}
	x.watch.Reset(next)
	return false
}

// watchOpen looks after a request that has had nothing yet. While a worker of its
// pair is out it moves as soon as there is somewhere to move to; when there was
// nowhere for so long as a silent decode may take, it has failed.
func (x *exchange) watchOpen(a *attempt) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pair.phase != phaseOpen || x.pair.attempt != a.n {
		return
	}
	now, limit := x.r.now(), x.r.cfg.IdleTimeout
	over := x.isOver(limit - (now - x.wellAt))
	well := true
	for _, leg := range [...]Leg{Decode, Prefill} {
		if x.pair.attempt != a.n || x.pair.legs[leg] != legOpen || !x.r.table.out(a.workers[leg]) {
			continue
		}
		well = false
		x.out(now, leg)
		if over {
			x.stepLocked(event{kind: evFailed, attempt: a.n, leg: leg,
				fault: fault{kind: faultOut, text: fmt.Sprintf("its health probes have failed for %v", limit)}})
		}
	}
	if well {
		x.wellAt = now
	}
}

// watchIdle ends a decode that has begun to answer and fell silent, and sooner
// if a worker of its pair is out.
func (x *exchange) watchIdle(a *attempt) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pair.phase != phaseRelaying || x.pair.attempt != a.n {
		return
	}
	now, limit := x.r.now(), x.r.cfg.IdleTimeout
	if x.isOver(limit - x.quietFor(now)) {
		x.stepLocked(event{kind: evFailed, attempt: a.n, leg: Decode, goesOn: x.journal.whole(),
			fault: fault{kind: faultSilent, text: fmt.Sprintf("nothing came for %v", limit)}})
		return
	}
	for _, leg := range [...]Leg{Decode, Prefill} {
		if x.pair.attempt == a.n && x.r.table.out(x.cur.workers[leg]) {
			x.out(now, leg)
		}
	}
}

// send sends one leg and returns its answer's head, or what is wrong with it.
func (x *exchange) send(a *attempt, leg Leg) (*http.Response, *fault) {
	var resp *http.Response
	var err error
	u := a.workers[leg].url
	if a.workers[leg].plain {
		resp, err = x.r.pool.roundTrip(a.ctx[leg], &legRequest{u.Host, x.path, x.req.URL.RawQuery, a.header, a.segs, a.length})
	} else {
		u.Path, u.RawQuery = x.path, x.req.URL.RawQuery
		resp, err = x.r.transport.RoundTrip((&http.Request{
			Method: http.MethodPost, URL: &u, Header: a.header, ContentLength: int64(a.length), Body: x.segments(a),
			// For a second try on a new connection, as the pool's.
			GetBody: func() (io.ReadCloser, error) { return x.segments(a), nil },
		}).WithContext(a.ctx[leg]))
	}
	if err != nil {
		return nil, &fault{kind: faultConnect, text: plainCause(a.ctx[leg], err)}
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	x.history.answered(a.n, leg, resp)
	if text := noAnswer(resp.StatusCode); text != "" {
		return nil, &fault{kind: faultCut, text: text}
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, errorAnswer))
	if err != nil {
		return nil, &fault{kind: faultCut, text: plainCause(a.ctx[leg], err)}
	}
	return nil, statusFault(&answer{status: resp.StatusCode, header: resp.Header, body: body})
}

// segments reads a body from its pieces, for net/http, which may do so for
// longer than the leg runs, and closes it then.
type segments struct {
	segs  [][]byte
	off   int
	close func()
}

func (x *exchange) segments(a *attempt) *segments {
	x.memory.use()
	return &segments{segs: a.segs, close: sync.OnceFunc(x.memory.leave)}
}

func (s *segments) Read(p []byte) (n int, err error) {
	for n < len(p) && len(s.segs) > 0 {
		k := copy(p[n:], s.segs[0][s.off:])
		n += k
		if s.off += k; s.off == len(s.segs[0]) {
			s.segs, s.off = s.segs[1:], 0
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (s *segments) Close() error {
	s.close()
	return nil
}

// answer tells the client how a request ended that did not end well.
func (x *exchange) answer() {
	x.mu.Lock()
	v, end := x.fail, x.pair.end
	x.mu.Unlock()
	switch {
	case end == nil: // all is written
	case end.Code == api.ClientGone && !x.headed:
		api.WriteError(x.w, end) // who has only closed its sending side can still be told
	case end.Code == api.ClientGone:
		x.abort = true // and must not take what it has for the whole
	case x.firstByte == 0 && v.pass != nil:
		copyHeader(x.w.Header(), v.pass.header)
		x.w.Header().Set("Content-Length", strconv.Itoa(len(v.pass.body)))
		x.w.WriteHeader(v.pass.status)
		x.w.Write(v.pass.body)
	case x.firstByte == 0:
		api.WriteError(x.w, v.err)
	case x.stream:
		var b []byte
		if x.journal.mid {
			b = append(b, "\n\n"...)
		}
		x.w.Write(api.AppendErrorEvent(b, v.err))
		x.rc.Flush()
		closeAfter(x.req)
	default:
		x.abort = true // there is no other way to say that the rest is missing
	}
}
