//metronome:pure

package sched

// form builds the next prefill batch of at most Chunk tokens: first the granted
// prompts that compute already, then granted ones that wait, and only when none
// of these waits for pages those that no decode worker has granted yet.
//
// A request gets the pages of its whole prompt when it starts, so whoever
// computes can finish. Since a granted room takes the pages of ungranted ones,
// and is itself delivered into pages that D holds for it already, a full pool
// here and a full pool there never wait for each other.
func (p *Prefill) form() {
	p.batch.Rows, p.rows = p.batch.Rows[:0], p.rows[:0]
	budget := p.chunks(true, p.cfg.Chunk)
	for p.in[Queued].len() > 0 && p.fits(budget) {
		r := p.in[Queued].first()
		if !p.start(r) {
			budget = 0 // nobody goes on before it in pages that it waits for
			break
		}
		budget = p.chunk(r, budget)
	}
	budget = p.chunks(false, budget)
	for p.in[Bootstrapping].len() > 0 && p.fits(budget) {
		r := p.in[Bootstrapping].first()
		if !p.start(r) {
			break
		}
		budget = p.chunk(r, budget)
	}
	if len(p.rows) > 0 {
		p.batch.ID++
		p.batch.Prefill = true
		p.running = true
		p.ready.Batch = &p.batch
	}
}

// fits says that the batch can take a row of at least a page.
func (p *Prefill) fits(budget int) bool {
	return budget >= p.pool.PageSize() && len(p.rows) < p.cfg.MaxRunning
}

// chunks goes on with the prompts that compute already.
func (p *Prefill) chunks(granted bool, budget int) int {
	for _, r := range p.in[Computing].s {
		if r.granted == granted && r.row < 0 && p.fits(budget) {
			budget = p.chunk(r, budget)
		}
	}
	return budget
}

// chunk adds the next tokens of r to the batch. A chunk that is not the last
// ends with a page, so that what is sent after it is whole pages.
func (p *Prefill) chunk(r *prefillReq, budget int) int {
	n := len(r.prompt) - r.computed
	if n > budget {
		n = budget - budget%p.pool.PageSize()
	}
	end := r.computed + n
	r.row = len(p.rows)
	p.rows = append(p.rows, r)
	p.batch.Rows = append(p.batch.Rows, BatchRow{Req: r.id, Tokens: r.prompt[r.computed:end], Start: r.computed,
		Pages: r.table.Pages(), Sample: end == len(r.prompt), Index: r.index})
	return budget - n
}

// start gives r the pages of its whole prompt, if there are enough beside the
// reserve. For a granted r, ungranted requests give theirs up, the youngest first.
func (p *Prefill) start(r *prefillReq) bool {
	if p.stuck == stuckAt(r, p.pool) {
		return false
	}
	if p.cfg.PrefixCache {
		p.pool.Match(&r.table, r.prompt[:max(0, min(r.maxHit, len(r.prompt)-1))])
	}
	need := p.pool.PagesFor(len(r.prompt)) - r.table.Len()
	for p.pool.Available()-need < p.pool.Reserved() {
		if v := p.youngestUngranted(); r.granted && v != nil {
			p.evict(v)
			continue
		}
		p.pool.Release(&r.table)
		p.stuck = stuckAt(r, p.pool)
		return false
	}
	p.pool.Extend(&r.table, len(r.prompt))
	r.cached = r.table.Shared() * p.pool.PageSize()
	r.computed = r.cached
	p.becomeComputing(r)
	if r.local() {
		return true
	}
	r.opened, r.known = true, true
	p.ready.Opens = append(p.ready.Opens, OpenSend{Req: r.id, Room: r.room, Tokens: len(r.prompt),
		Cached: r.cached, Pages: r.table.Pages()})
	if r.granted {
		p.bind(r)
	}
	return true
}

// youngestUngranted is the last to arrive of those who hold pages without a grant.
func (p *Prefill) youngestUngranted() *prefillReq {
	var v *prefillReq
	for _, ph := range [...]Phase{Computing, InFlight} {
		for _, r := range p.in[ph].s {
			if !r.granted && r.row < 0 && (v == nil || r.arrival > v.arrival) {
				v = r
			}
		}
	}
	return v
}

// evict takes the pages of an ungranted request back. Nothing outside names
// them: the sender moves no page of a request that is not bound. It starts anew
// later, with another OpenSend.
func (p *Prefill) evict(r *prefillReq) {
	p.becomeBootstrapping(r)
	p.pool.Release(&r.table)
	r.opened, r.cached, r.computed = false, 0, 0
}

// batchDone moves the prompts of a batch on.
func (p *Prefill) batchDone(ev *BatchDone) {
	p.running = false
	for _, c := range p.held {
		c.batch = false
		p.lift(c)
	}
	p.held = p.held[:0]
	for i, r := range p.rows {
		if r == nil {
			continue // it ended meanwhile
		}
		r.row = -1
		if err := ev.err(i); err != nil {
			p.fail(r, err)
			continue
		}
		r.computed += len(p.batch.Rows[i].Tokens)
		if p.cfg.PrefixCache {
			p.pool.Insert(&r.table, r.prompt[:r.computed])
		}
		if r.computed < len(r.prompt) {
			continue
		}
		if token, err := ev.token(i); err != nil {
			p.fail(r, err)
		} else {
			p.done(r, token, i)
		}
	}
	p.rows = p.rows[:0]
}

// done: the prompt of r is computed and its next token drawn.
func (p *Prefill) done(r *prefillReq, token int32, row int) {
	if !r.local() {
		p.becomeInFlight(r)
		p.ready.Firsts = append(p.ready.Firsts, Emit{Req: r.id, Token: token, Index: r.index, Row: row})
		return
	}
	h := HandOver{Req: r.id, Prompt: r.prompt, First: token, Index: r.index, Row: row, Cached: r.cached}
	h.Pages = r.table.Disown()
	p.forget(r)
	p.ready.HandOvers = append(p.ready.HandOvers, h)
}
