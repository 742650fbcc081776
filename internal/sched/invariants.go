//metronome:pure

package sched

import (
	"fmt"
	"maps"
	"slices"

	"github.com/metronome-serve/metronome/internal/kv"
)

func mustHold(err error) {
	if err != nil {
		panic(err)
	}
}

// Check returns the first invariant that does not hold: each request in the
// one queue of its phase, by arrival; running within its limit; a grant open
// exactly while its request is in Transfer; pages in quarantine as long as a
// grant or the batch may touch them; and, when the pool is the core's alone,
// each page's references equal to its owners.
func (d *Decode) Check() error {
	n := 0
	for ph := range d.in {
		q := d.in[ph].s
		n += len(q)
		for i, r := range q {
			switch {
			case r.phase != Phase(ph) || d.reqs[r.id] != r:
				return fmt.Errorf("sched: request %d is %s and stands in queue %s", r.id, r.phase, Phase(ph))
			case i > 0 && q[i-1].arrival >= r.arrival:
				return fmt.Errorf("sched: queue %s is not by arrival at request %d", r.phase, r.id)
			case (r.grant != nil) != (r.phase == Transfer):
				return fmt.Errorf("sched: request %d is %s, grant %v", r.id, r.phase, r.grant)
			case (r.table.Len() > 0) != (r.phase >= Transfer):
				return fmt.Errorf("sched: request %d is %s and has %d pages", r.id, r.phase, r.table.Len())
			case r.row >= 0 && (!d.running || r.phase != Running || d.rows[r.row] != r):
				return fmt.Errorf("sched: request %d is %s with row %d", r.id, r.phase, r.row)
			case r.timer.pos == 0 && d.due(r) != Never || r.timer.pos > 0 && r.timer.due != d.due(r):
				return fmt.Errorf("sched: request %d is due at %v, its timer at %v", r.id, d.due(r), r.timer.due)
			}
		}
	}
	switch {
	case n != len(d.reqs):
		return fmt.Errorf("sched: %d requests, %d in queues", len(d.reqs), n)
	case d.in[Running].len() > d.cfg.MaxRunning:
		return fmt.Errorf("sched: %d run, the limit is %d", d.in[Running].len(), d.cfg.MaxRunning)
	case len(d.held) > 0 && !d.running:
		return fmt.Errorf("sched: %d tables are held for a batch that is not outstanding", len(d.held))
	}
	for _, id := range slices.Sorted(maps.Keys(d.grants)) {
		if g := d.grants[id]; g.req != nil && g.req.grant != g {
			return fmt.Errorf("sched: grant %d is open for request %d, which has another", id, g.req.id)
		}
	}
	if err := d.checkRows(); err != nil {
		return err
	}
	if d.cfg.Serve {
		return d.pool.Check()
	}
	return checkPages(d.pool, d.tables())
}

// checkRows: what a row writes, nobody else can read.
func (d *Decode) checkRows() error {
	if !d.running {
		return nil
	}
	return checkWritable(d.pool, &d.batch, func(i int) bool { return d.rows[i] == nil })
}

func checkWritable(pool *kv.Pool, b *Batch, ended func(row int) bool) error {
	for i := range b.Rows {
		if ended(i) {
			continue
		}
		row := &b.Rows[i]
		for at := row.Start; at < row.Start+len(row.Tokens); at++ {
			if g := row.Pages[at/pool.PageSize()]; !pool.Writable(g) {
				return fmt.Errorf("sched: request %d writes page %d, which is shared", row.Req, g)
			}
		}
	}
	return nil
}

func checkPages(pool *kv.Pool, tables []*kv.BlockTable) error {
	if err := pool.Check(); err != nil {
		return err
	}
	return pool.CheckOwners(tables)
}

// tables is every block table that accounts for pages.
func (d *Decode) tables() (all []*kv.BlockTable) {
	for _, r := range d.byArrival() {
		all = append(all, &r.table)
	}
	for _, id := range slices.Sorted(maps.Keys(d.grants)) {
		all = append(all, &d.grants[id].table)
	}
	for i := range d.held {
		all = append(all, &d.held[i])
	}
	return all
}

// Check returns the first invariant that does not hold, see [Decode.Check]. It
// looks at owners of pages only through CheckShared where a decode core shares the pool.
func (p *Prefill) Check() error {
	n := 0
	for ph := range p.in {
		q := p.in[ph].s
		n += len(q)
		for i, r := range q {
			switch {
			case r.phase != Phase(ph) || p.reqs[r.id] != r:
				return fmt.Errorf("sched: request %d is %s and stands in queue %s", r.id, r.phase, Phase(ph))
			case i > 0 && q[i-1].arrival >= r.arrival:
				return fmt.Errorf("sched: queue %s is not by arrival at request %d", r.phase, r.id)
			case (r.table.Len() > 0) != (r.phase >= Computing):
				return fmt.Errorf("sched: request %d is %s and has %d pages", r.id, r.phase, r.table.Len())
			case r.bound && !(r.granted && r.opened), r.opened && !r.known, r.granted && r.opened && !r.bound:
				return fmt.Errorf("sched: request %d: granted %v, opened %v, known %v, bound %v", r.id, r.granted, r.opened, r.known, r.bound)
			case r.row >= 0 && (!p.running || r.phase != Computing || p.rows[r.row] != r):
				return fmt.Errorf("sched: request %d is %s with row %d", r.id, r.phase, r.row)
			case r.phase == InFlight && r.computed != len(r.prompt):
				return fmt.Errorf("sched: request %d is in flight with %d of %d tokens", r.id, r.computed, len(r.prompt))
			}
		}
	}
	if n != len(p.reqs) || len(p.rooms) > n || len(p.keys) > n {
		return fmt.Errorf("sched: %d requests, %d in queues, %d rooms, %d keys", len(p.reqs), n, len(p.rooms), len(p.keys))
	}
	if len(p.held) > 0 && !p.running {
		return fmt.Errorf("sched: %d tables are held for a batch that is not outstanding", len(p.held))
	}
	if p.running {
		if err := checkWritable(p.pool, &p.batch, func(i int) bool { return p.rows[i] == nil }); err != nil {
			return err
		}
	}
	return p.pool.Check()
}

// tables is every block table that accounts for pages.
func (p *Prefill) tables() (all []*kv.BlockTable) {
	for _, r := range p.byArrival() {
		all = append(all, &r.table)
	}
	for _, id := range slices.Sorted(maps.Keys(p.closing)) {
		all = append(all, &p.closing[id].table)
	}
	for _, c := range p.held {
		if !c.sends { // else it is in closing
			all = append(all, &c.table)
		}
	}
	return all
}

// CheckShared returns the first invariant that does not hold for the cores over
// one pool, the owners of every page included. d is nil in a prefill worker. In
// serve it holds when no HandOver is on its way.
func CheckShared(d *Decode, p *Prefill) error {
	tables := p.tables()
	if d != nil {
		if err := d.Check(); err != nil {
			return err
		}
		tables = append(tables, d.tables()...)
	}
	if err := p.Check(); err != nil {
		return err
	}
	return p.pool.CheckOwners(tables)
}
