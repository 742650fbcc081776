package router

import (
	"io"
	"net/http"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// generate serves one of the paths that need a pair of workers.
func (r *Router) generate(kind api.Kind) http.HandlerFunc {
	path := [...]string{api.Chat: "/v1/chat/completions", api.Completion: "/v1/completions", api.Generate: "/generate"}[kind]
	return func(w http.ResponseWriter, req *http.Request) {
		x := &exchange{r: r, w: w, rc: http.NewResponseController(w), req: req, kind: kind, path: path, began: r.now(),
			id: req.Header["X-Request-Id"][0], pair: pair{retries: r.cfg.Retries, migrations: r.cfg.Migrations}}
		x.history = newHistory(x)
		err := x.open()
		if err == nil {
			x.run()
		} else if err.Code != api.ClientGone {
			api.WriteError(w, err)
		} else {
			x.abort = true // an answer that nobody wrote would be a 200
		}
		x.close(err)
		if x.abort {
			panic(http.ErrAbortHandler) // net/http closes the connection without a word
		}
	}
}

// open takes a request in: into the table of running ones, its body into
// memory, what has to be known of it out of the body.
func (x *exchange) open() *api.Error {
	r := x.r
	limit, err := api.TimeLimit(x.req.Header.Get(api.TimeoutHeader), r.cfg.RequestTimeout)
	if err != nil {
		return err
	}
	x.until = x.began + limit
	if err := r.enter(x); err != nil {
		return err
	}
	x.timer = time.AfterFunc(limit, func() { x.step(event{kind: evDeadline}) })
	if err := x.readBody(limit); err != nil {
		return err
	}
	if x.scan, err = api.Scan(x.memory.bytes); err != nil {
		return err
	}
	if x.items, x.batch, err = x.scan.Items(x.kind); err != nil {
		return err
	}
	x.wishes = r.table.wish(x)
	x.header = r.peerHeader(x.req)
	if x.header["Idempotency-Key"] == nil {
		// A worker may close a pooled connection as we write to it. A key without a
		// value is not sent, and lets the transport try again on a new one, if no
		// byte of an answer has come.
		x.header["Idempotency-Key"] = nil
	}
	return nil
}

// enter counts a request as running, unless there are too many or the router is
// stopping.
func (r *Router) enter(x *exchange) *api.Error {
	r.mu.Lock()
	n, draining := len(r.live), r.draining.Load()
	ok := n < r.cfg.MaxRequests && !draining
	if ok {
		r.live[x] = struct{}{}
		r.budget.earn()
	}
	r.mu.Unlock()
	if ok {
		return nil
	}
	if draining {
		x.w.Header().Set("Connection", "close")
		return api.Errorf(api.Draining, "the router is stopping; send the request again")
	}
	return r.overloaded("%d requests are running, which is the most this router takes (--max-requests)", n)
}

// firstRead is how much of a body must have come before memory for all of what
// it announces is taken.
const firstRead = 1 << 20

// readBody reads the whole body, within its bounds of size, time and memory.
func (x *exchange) readBody(limit time.Duration) *api.Error {
	most, n := x.r.cfg.MaxBody, x.req.ContentLength
	if n > most {
		return tooLarge(most)
	}
	if limit < x.r.cfg.BodyTimeout { // which BoundBody has set
		x.rc.SetReadDeadline(time.Now().Add(limit))
	}
	size := n
	if n < 0 {
		size = 4 << 10
	}
	first := memoryFor(min(size, firstRead))
	if err := x.hold(first); err != nil {
		return err
	}
	body := takeMemory(first)
	x.memory.use()
	defer func() { x.memory.bytes = body }()
	for n < 0 || int64(len(body)) < n {
		if len(body) == cap(body) {
			if n < 0 {
				size = memoryFor(min(2*int64(cap(body)), most+1))
			}
			if err := x.hold(size - int64(cap(body))); err != nil {
				return err
			}
			more := append(takeMemory(size), body...)
			giveMemory(body)
			body = more
		}
		k, err := x.req.Body.Read(body[len(body):cap(body)])
		body = body[:len(body)+k]
		if int64(len(body)) > most {
			return tooLarge(most)
		}
		if err == io.EOF && n <= int64(len(body)) {
			break
		}
		if err != nil {
			return api.BodyError(err)
		}
	}
	x.rc.SetReadDeadline(time.Time{})
	return nil
}

func tooLarge(most int64) *api.Error {
	return api.Errorf(api.BodyTooLarge, "the body is larger than %d bytes, which is the most this router takes (--max-body)", most)
}

// hold books memory for a body.
func (x *exchange) hold(n int64) *api.Error {
	x.held += n
	if x.r.bodies.Add(n) > x.r.cfg.MaxBodies {
		return x.r.overloaded("request bodies take up more than %d bytes, which is the most this router holds", x.r.cfg.MaxBodies)
	}
	return nil
}

// close takes a request out of the table and tells how it ended.
func (x *exchange) close(err *api.Error) {
	r := x.r
	if x.timer != nil {
		x.timer.Stop()
	}
	now := r.now()
	x.settle(now, err)
	r.mu.Lock()
	if _, ok := r.live[x]; ok {
		delete(r.live, x)
		r.pace.ended(now)
	}
	r.mu.Unlock()
	r.bodies.Add(-x.held)
	if x.memory.bytes != nil {
		x.memory.leave()
	}
	x.history.leave(r.cfg.Log)
}

// settle counts how the request ended, and keeps it among the ended ones.
func (x *exchange) settle(now time.Duration, err *api.Error) {
	r := x.r
	x.mu.Lock()
	defer x.mu.Unlock()
	if err == nil {
		err = x.pair.end
	}
	code := "ok"
	if err != nil {
		code = string(err.Code)
	} else {
		r.metrics.E2E.Observe((now - x.began).Seconds())
	}
	r.metrics.Requests.With(code).Inc()
	x.history.over(now, err)
	x.history.ended(x, now, x.status(err), err)
	r.ended.Add(x.history)
}

// status is the one that the client got; 499: it was not there any more.
func (x *exchange) status(err *api.Error) int {
	switch {
	case x.firstByte != 0 || err == nil:
		return http.StatusOK
	case x.fail.pass != nil:
		return x.fail.pass.status
	}
	return err.HTTPStatus()
}

// workerOut moves the request if it waits for w and there is somewhere to move.
func (x *exchange) workerOut(w *worker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cur == nil {
		return
	}
	if x.cur.workers[w.role] == w {
		x.out(x.r.now(), w.role)
	}
}
