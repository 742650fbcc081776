//metronome:pure

package sched

import "github.com/metronome-serve/metronome/internal/kv"

// form builds the next batch of at most MaxRunning sequences.
func (d *Decode) form() {
	run, wait := &d.in[Running], &d.in[Waiting]
	d.collect()
	for run.len() < d.cfg.MaxRunning && wait.len() > 0 {
		d.collect() // somebody gave its place up to an older one that waits
	}
	if len(d.rows) > 0 {
		d.batch.ID++
		d.running = true
		d.ready.Batch = &d.batch
	}
}

// collect lets waiting requests join and gives each running one the page that
// its last token is written to. The oldest goes first, and only younger ones
// lose pages to it, so the oldest always advances.
func (d *Decode) collect() {
	run, wait := &d.in[Running], &d.in[Waiting]
	for run.len() < d.cfg.MaxRunning && wait.len() > 0 {
		d.becomeRunning(wait.first())
	}
	for _, r := range d.rows {
		r.row = -1
	}
	d.batch.Rows, d.rows = d.batch.Rows[:0], d.rows[:0]
	for i := 0; i < run.len(); {
		r := run.s[i]
		if d.room(r) {
			last := len(r.tokens) - 1
			r.row = len(d.rows)
			d.rows = append(d.rows, r)
			d.batch.Rows = append(d.batch.Rows, BatchRow{Req: r.id, Tokens: r.tokens[last:], Start: last,
				Pages: r.table.Pages(), Sample: true, Index: r.output()})
		}
		if r.phase == Running { // else it gave way itself
			i++
		}
	}
}

// room makes sure that the table of r covers its last token. When there is no
// page, the youngest request behind r is preempted; when r is the youngest, it
// leaves this batch out or gives its place up.
func (d *Decode) room(r *decodeReq) bool {
	for !d.pool.Extend(&r.table, len(r.tokens)) {
		v := d.youngest()
		if v.arrival <= r.arrival {
			d.squeezed(r)
			return false
		}
		d.preempt(v)
	}
	return true
}

// youngest is the last to arrive of those who hold pages that nothing outside touches.
func (d *Decode) youngest() *decodeReq {
	r, w := d.in[Running].last(), d.in[Waiting].last()
	if w != nil && w.arrival > r.arrival {
		return w
	}
	return r
}

// squeezed decides about r, for which there is no page although nobody younger
// runs or waits. Pages in quarantine come back without any peer's doing. Else a
// transfer has outlasted the growth that was reserved when it was admitted: the
// one that has been open longest gives its pages back, so that no slow peer
// delays those who run. Only when none is open r makes room for older ones.
func (d *Decode) squeezed(r *decodeReq) {
	if d.pool.Count()[kv.Quarantined] > 0 {
		return // r sits this batch out
	}
	if v := d.slowest(); v != nil {
		if v.output() > 0 {
			d.preempt(v)
			return
		}
		// P has a leg of its own for this room, which the Revoke ends: another pair may try.
		d.fail(v, refused(Overloaded, "the KV pages granted to room %d were needed by running requests", v.want.Room))
		return
	}
	if d.in[Running].first() != r || d.in[Waiting].len() > 0 { // all who wait are older
		d.preempt(r)
		return
	}
	if d.pool.Count()[kv.Owned] == r.table.Len() {
		d.fail(r, errorf(Internal, "%d tokens do not fit a KV pool of %d pages of %d tokens",
			len(r.tokens), d.pool.Total(), d.pool.PageSize()))
	}
	// Else (serve) the prefill core has the rest; it ends with a hand-over.
}

// slowest is the request whose grant has been open longest, or nil.
func (d *Decode) slowest() (v *decodeReq) {
	for _, r := range d.in[Transfer].s {
		if v == nil || r.grant.id < v.grant.id {
			v = r
		}
	}
	return v
}

// preempt takes the pages of r back. It will be prefilled anew, its output so
// far included, and keeps its place by arrival.
func (d *Decode) preempt(r *decodeReq) {
	d.yield(r)
	if d.cfg.Serve {
		d.ready.Preempts = append(d.ready.Preempts, Preempt{Req: r.id, Tokens: r.tokens, Index: r.output()})
		d.forget(r)
		return
	}
	d.becomePending(r)
	d.timers.set(&r.timer, d.due(r))
	d.peers.Forget(d.now, r.id)
	d.wanted(r)
}

// batchDone takes the tokens of a batch.
func (d *Decode) batchDone(ev *BatchDone) {
	d.running = false
	for i := range d.held {
		d.pool.Lift(&d.held[i])
	}
	d.held = d.held[:0]
	for i, r := range d.rows {
		if r == nil {
			continue // it ended meanwhile
		}
		r.row = -1
		if token, err := ev.token(i); err != nil {
			d.fail(r, err)
		} else {
			d.token(r, token, i)
		}
	}
	d.rows = d.rows[:0]
}
