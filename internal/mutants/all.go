package mutants

// What the tests of one package are called.
func transcripts(run string) Test { return Test{"internal/sched", "TestTranscripts/" + run, ""} }
func peers(run string) Test       { return Test{"internal/sched", "TestPeersTranscripts/" + run, ""} }
func worker(run string) Test      { return Test{"internal/worker", run, ""} }
func transfer(run string) Test    { return Test{"internal/transfer", run, ""} }
func router(run string) Test      { return Test{"internal/router", run, ""} }

// All are the mutants.
var All = []Mutant{
	// How a decode worker learns its prefills.
	{
		Name: "second_fetch_in_flight",
		File: "internal/sched/peers_pacer.go",
		Why:  "a turn that finds a fetch in flight starts another",
		Edits: []Edit{
			{"!pc.isOpen || pc.inFlight() || pc.alarm.isSet()", "!pc.isOpen || pc.alarm.isSet()"},
			{"!pc.isOpen || pc.inFlight():", "!pc.isOpen:"},
			{"\tpc.owner.ask(now)\n", "\tpc.owner.ask(now)\n\tp.alarms.set(&pc.alarm, now, now+pc.gap)\n"},
			{"if t.inFlight() {\n\t\tpanic(", "if false {\n\t\tpanic("},
		},
		Test: peers("accept03_one_get"),
	},
	{
		Name:  "few_fetchers",
		File:  "internal/worker/peernet.go",
		Why:   "fetches share a pool of few fetchers, which hung addresses use up",
		Edits: []Edit{{"for n.pace.may(now) {", "for n.pace.may(now) && n.running < 16 {"}},
		Test:  worker("TestThousandHungAddresses"),
	},
	{
		Name:  "landed_waits_out_interval",
		File:  "internal/sched/peers_resolve.go",
		Why:   "a result that has landed is looked at when the next attempt would be due",
		Edits: []Edit{{"\tp.resolveAll(now, pr, needInfo)\n", "\tp.alarms.set(&alarm{due: func(now time.Duration) { p.resolveAll(now, pr, needInfo) }}, now, k.last+p.cfg.Interval)\n"}},
		Test:  peers("accept07"),
	},
	{
		Name: "attempt_per_turn",
		File: "internal/sched/peers_pacer.go",
		Why:  "a due turn that finds the fetch in flight counts as an attempt",
		Edits: []Edit{
			{"\tpc.owner.ask(now)\n", "\tpc.owner.ask(now)\n\tp.alarms.set(&pc.alarm, now, now+pc.gap)\n"},
			{"!pc.isOpen || pc.inFlight():", "!pc.isOpen:\n\tcase pc.inFlight():\n\t\tpc.spent++\n\t\tp.alarms.set(&pc.alarm, now, now+pc.gap)"},
		},
		Test: peers("accept09"),
	},
	{
		Name:  "budget_after_attempt",
		File:  "internal/sched/peers_pacer.go",
		Why:   "the budget is checked after the attempt was spent: the last one cannot succeed",
		Edits: []Edit{{"\tdefault:\n\t\tp.attempt(now, pc)\n\t}", "\tdefault:\n\t\tp.attempt(now, pc)\n\t\tif pc.spent >= p.cfg.Attempts {\n\t\t\tpc.owner.exhausted(now)\n\t\t}\n\t}"}},
		Test:  peers("accept10"),
	},
	{
		Name: "abort_without_recheck",
		File: "internal/sched/peers_pacer.go",
		Why:  "the turn that finds the budget spent ends everybody, though the last fetch may still succeed",
		Edits: []Edit{
			{"!pc.isOpen || pc.inFlight():", "!pc.isOpen || pc.inFlight() && pc.spent < p.cfg.Attempts:"},
			{"\tpc.owner.ask(now)\n", "\tpc.owner.ask(now)\n\tp.alarms.set(&pc.alarm, now, now+pc.gap)\n"},
		},
		Test: peers("accept10"),
	},
	{
		Name:  "in_flight_kept_on_failure",
		File:  "internal/sched/peers_pacer.go",
		Why:   "a fetch that failed leaves its in-flight mark, so none follows",
		Edits: []Edit{{"\tt.id = 0\n", "\tif d.Fault == OK {\n\t\tt.id = 0\n\t}\n"}},
		Test:  peers("rule08"),
	},
	{
		Name:  "mismatch_swallowed",
		File:  "internal/sched/peers_resolve.go",
		Why:   "the fetcher takes a mismatch for a failed fetch",
		Edits: []Edit{{"\t\tp.mismatched(now, pr, err)\n\t\treturn \"\"\n", "\t\treturn err.Message\n"}},
		Test:  peers("accept06"),
	},
	{
		Name:  "mismatch_exhausts",
		File:  "internal/sched/peers_resolve.go",
		Why:   "a mismatch that the last attempt brings is told as exhaustion",
		Edits: []Edit{{"\tp.succeed(&k.pacer)\n", "\tif err := mismatch(&p.cfg.Local, p.cfg.DCP, pr.addr, info); err != nil && k.spent >= p.cfg.Attempts {\n\t\treturn err.Message\n\t}\n\tp.succeed(&k.pacer)\n"}},
		Test:  peers("accept12"),
	},
	{
		Name:  "eviction_keeps_generation",
		File:  "internal/sched/peers_record.go",
		Why:   "an eviction begins no new generation",
		Edits: []Edit{{"\tp.lastGen++\n\tpr.gen = p.lastGen\n\tif pr.known {", "\tif pr.known {"}},
		Test:  peers("rule11"),
	},
	{
		Name:  "late_answer_publishes",
		File:  "internal/sched/peers_pacer.go",
		Why:   "what was asked for before an eviction is published after it",
		Edits: []Edit{{"\tcase t.gen != t.peer.gen:\n\t\to = void\n", ""}},
		Test:  peers("rule11"),
	},
	{
		Name:  "heartbeat_without_deadline",
		File:  "internal/worker/peernet.go",
		Why:   "a heartbeat has no deadline: one that hangs is never counted",
		Edits: []Edit{{"\tn.tries[tryKey{a.who, a.act.ID}] = f\n\tif shared {", "\tif a.act.Kind == sched.ProbeHealth {\n\t\tf.ctx, f.cancel = context.WithCancel(n.ctx)\n\t}\n\tn.tries[tryKey{a.who, a.act.ID}] = f\n\tif shared {"}},
		Test:  worker("TestHungTriesOfEachKind"),
	},
	{
		Name:  "old_heartbeat_counts",
		File:  "internal/sched/peers_pacer.go",
		Why:   "a heartbeat's result counts against a record of a later generation",
		Edits: []Edit{{"case t.gen != t.peer.gen:", "case t.gen != t.peer.gen && t.kind != ProbeHealth:"}},
		Test:  peers("rule15"),
	},
	{
		Name:  "replacement_is_mismatch",
		File:  "internal/sched/peers_pair.go",
		Why:   "another instance whose layout differs is judged as a mismatch",
		Edits: []Edit{{"\tcase pr.isOther(d.Welcome.Instance):\n", "\tcase d.Fault != MismatchFault && pr.isOther(d.Welcome.Instance):\n"}},
		Test:  peers("rule16"),
	},
	{
		Name:  "old_dp_rank",
		File:  "internal/sched/peers_claim.go",
		Why:   "a room keeps the DP rank that the prefill before the restart had for it",
		Edits: []Edit{{"fresh, needRank, needLinks, isLinked)\n\tc.dp = -1\n", "fresh, needRank, needLinks, isLinked)\n"}},
		Test:  peers("rule18"),
	},
	{
		Name:  "dp_rank_of_another_room",
		File:  "internal/sched/peers_resolve.go",
		Why:   "the answer to an older room's question is taken for the room that waits now",
		Edits: []Edit{{"\t\t\tif dp, ok := ranks[c.Room]; ok {\n", "\t\t\tdp, ok := ranks[c.Room]\n\t\t\tfor _, other := range ranks {\n\t\t\t\tif !ok {\n\t\t\t\t\tdp, ok = other, true\n\t\t\t\t}\n\t\t\t}\n\t\t\tif ok {\n"}},
		Test:  peers("rule18"),
	},
	{
		Name:  "late_turn_counted",
		File:  "internal/sched/decode.go",
		Why:   "a deadline that passed while the process was stopped counts",
		Edits: []Edit{{"if d.armed == Never || d.now-d.armed <= d.cfg.LateTurn {", "if d.armed == Never || d.now-d.armed <= Never {"}},
		Test:  transcripts("decode_late"),
	},
	{
		Name:  "hung_fill_the_queue",
		File:  "internal/sched/decode.go",
		Why:   "requests that wait for an address count as queued, so hung addresses use up the queue",
		Edits: []Edit{{"queued := d.in[Preallocate].len()", "queued := d.in[Pending].len() + d.in[Preallocate].len()"}},
		Test:  transcripts("decode_hung_queue"),
	},
	{
		Name: "timer_before_inbox",
		File: "internal/worker/loop.go",
		Why:  "deadlines are judged before what has arrived is known",
		Edits: []Edit{
			{"\t\tl.step(now, &l.tick) // last: what has arrived is known before a deadline is judged\n", ""},
			{"\t\tfor _, m := range l.in.take() {\n", "\t\tl.step(now, &l.tick)\n\t\tfor _, m := range l.in.take() {\n"},
		},
		Test: worker("TestArrivedBeforeJudged"),
	},

	{
		Name:  "turns_counted",
		File:  "internal/sched/peers.go",
		Why:   "every turn that finds an address unknown counts as an attempt, as it did in the original",
		Edits: []Edit{{"\tseq := p.alarms.seq\n", "\tfor _, pr := range p.all {\n\t\tif pr.info.isOpen {\n\t\t\tpr.info.spent++\n\t\t}\n\t}\n\tseq := p.alarms.seq\n"}},
		Test:  peers("accept09"),
	},
	{
		Name:  "turn_without_bound",
		File:  "internal/sched/peers.go",
		Why:   "one turn judges every deadline that has passed, however many there are",
		Edits: []Edit{{"n < tickMax && len(p.verdicts) < tickMax && p.fatal == nil", "p.fatal == nil"}},
		Test:  Test{"internal/sched", "TestTickIsBounded", ""},
	},
	{
		Name:  "own_faults_counted",
		File:  "internal/sched/peers_pacer.go",
		Why:   "an attempt that our own lack of descriptors has cut short is charged to the address",
		Edits: []Edit{{"\tif pc.charge {\n\t\tpc.spent--\n\t}\n", ""}},
		Test:  peers("rule14"),
	},
	{
		Name:  "cut_tries_counted",
		File:  "internal/sched/peers_pacer.go",
		Why:   "tries that failed because this process was stopped count against their peers",
		Edits: []Edit{{" || d.ID <= p.cut:\n\t\to = void", ":\n\t\to = void"}},
		Test:  peers("rule20"),
	},

	// Pages, batches and ends.
	{
		Name:  "freed_while_granted",
		File:  "internal/sched/decode.go",
		Why:   "pages are free at the end of their request, though links may still write them",
		Edits: []Edit{{"\t\td.pool.Quarantine(&r.table)\n\t\tg.table, r.table, g.req, r.grant = r.table, kv.BlockTable{}, nil, nil\n", "\t\td.pool.Release(&r.table)\n\t\tg.req, r.grant = nil, nil\n"}},
		Test:  transcripts("(decode_transfer|decode_abort)"),
	},
	{
		Name:  "freed_under_batch",
		File:  "internal/sched/decode.go",
		Why:   "an abort frees pages that the batch under way writes",
		Edits: []Edit{{"\td.pool.Quarantine(&r.table)\n\td.held = append(d.held, r.table)\n", "\td.pool.Release(&r.table)\n"}},
		Test:  transcripts("decode_abort"),
	},
	{
		Name:  "prompt_freed_under_batch",
		File:  "internal/sched/prefill.go",
		Why:   "an abort at the prefill frees pages that the batch under way writes",
		Edits: []Edit{{"if !r.known && r.row < 0 {", "if !r.known || r.row >= 0 {"}},
		Test:  transcripts("prefill_abort"),
	},
	{
		Name:  "bad_row_ends_batch",
		File:  "internal/sched/event.go",
		Why:   "what is wrong with one row ends every request of its batch",
		Edits: []Edit{{"i < len(b.Errs)", "len(b.Errs) > 0"}, {"return b.Errs[i]", "return b.Errs[0]"}},
		Test:  transcripts("(decode_batch_error|prefill_batch_error)"),
	},
	{
		Name:  "stale_grant_landed",
		File:  "internal/sched/decode.go",
		Why:   "pages that landed for a grant that was taken back make a request of it",
		Edits: []Edit{{"\tcase *PagesLanded:\n\t\treturn !open(ev.Grant)\n", "\tcase *PagesLanded:\n\t\treturn d.grants[ev.Grant] == nil\n"}},
		Test:  transcripts("decode_stale"),
	},
	{
		Name:  "stale_grant_accepted",
		File:  "internal/transfer/table.go",
		Why:   "DATA for a grant that was taken back is written into its pages",
		Edits: []Edit{{"\t\tdelete(p.l.parts, g.spec.Grant)\n", ""}},
		Test:  transfer("TestTableTranscripts"),
	},
	{
		Name:  "quiesced_while_writing",
		File:  "internal/transfer/table.go",
		Why:   "a grant counts as quiesced though a reader is still in its pages",
		Edits: []Edit{{"if g.over && g.writers == 0 && t.grants", "if g.over && t.grants"}},
		Test:  transfer("TestTableTranscripts"),
	},
	{
		Name:  "double_end",
		File:  "internal/sched/decode.go",
		Why:   "a request that was aborted ends again when its batch is done",
		Edits: []Edit{{"\td.rows[r.row], r.table, r.row = nil, kv.BlockTable{}, -1\n", "\tr.table, r.row = kv.BlockTable{}, -1\n"}},
		Test:  transcripts("decode_abort"),
	},
	{
		Name:  "full_pools_wait",
		File:  "internal/sched/prefill_batch.go",
		Why:   "a granted prompt waits for the pages of those that no decode worker has granted: two full pools wait for each other",
		Edits: []Edit{{"r.granted && v != nil {", "r.granted && v != nil && !r.granted {"}},
		Test:  transcripts("prefill_two_full_pools"),
	},
	{
		Name:  "drain_forgets_queue",
		File:  "internal/sched/decode.go",
		Why:   "a drain ends those who wait for their prefill at once",
		Edits: []Edit{{"\tcase *Drain:\n\t\td.draining = true\n", "\tcase *Drain:\n\t\td.draining = true\n\t\tfor _, r := range slices.Clone(d.in[Pending].s) {\n\t\t\td.fail(r, refused(Draining, \"this decode worker is draining\"))\n\t\t}\n"}},
		Test:  transcripts("decode_hung_queue"),
	},
	{
		Name:  "drain_forgets_recompute",
		File:  "internal/sched/prefill.go",
		Why:   "a draining prefill refuses to compute a preempted request anew, whose answer has begun",
		Edits: []Edit{{"\tcase again:\n\t\treturn nil", "\tcase again && !p.draining:\n\t\treturn nil"}},
		Test:  transcripts("(prefill_recompute|prefill_refusals)"),
	},
	{
		Name:  "drain_waits_once",
		File:  "internal/worker/worker.go",
		Why:   "a drain waits for the first sign that a loop is empty, which may be of long ago",
		Edits: []Edit{{"\tfor w.openJobs() > 0 {\n", "\tif w.openJobs() > 0 {\n"}},
		Test:  worker("TestDrain"),
	},
	{
		Name:  "room_in_use",
		File:  "internal/sched/prefill.go",
		Why:   "a second request takes the room of one that is under way",
		Edits: []Edit{{"\tcase !again && p.rooms[s.Room] != nil:\n", "\tcase !again && false:\n"}},
		Test:  transcripts("(prefill_refusals|prefill_grants)"),
	},

	// The transfer.
	{
		Name:  "checksum_ignored",
		File:  "internal/transfer/receiver.go",
		Why:   "a payload counts as good whatever its checksum says",
		Edits: []Edit{{"r.table.end(p, h, sound)", "r.table.end(p, h, true)"}},
		Test:  transfer("TestCorruptEverywhere"),
	},
	{
		Name:  "credit_leaked",
		File:  "internal/transfer/receiver.go",
		Why:   "the credit of payloads for grants that are over is not given back",
		Edits: []Edit{{"\t\terr = l.skip(size)\n", "\t\treturn l.skip(size)\n"}},
		Test:  transfer("TestCredit"),
	},
	{
		Name:  "pin_forgotten",
		File:  "internal/transfer/rooms.go",
		Why:   "a send counts as quiesced though a begun frame still names its pages",
		Edits: []Edit{{"if s.over && s.begun == 0 && t.sends", "if s.over && t.sends"}},
		Test:  transfer("TestRoomsTranscripts"),
	},
	{
		Name:  "received_too_early",
		File:  "internal/transfer/rooms.go",
		Why:   "a prefill's leg ends with the first RECEIVED, though other links of the room still owe theirs",
		Edits: []Edit{{"\t\tif !q.got {\n", "\t\tif !q.got && false {\n"}},
		Test:  transfer("TestRoomsTranscripts"),
	},

	// The router.
	{
		Name:  "leg_failure_not_passed",
		File:  "internal/router/pair.go",
		Why:   "a leg that failed leaves the other one running",
		Edits: []Edit{{"\tp.endLegs(v.err, 0)\n\tp.last = v\n", "\tp.last = v\n"}},
		Test:  router("TestPair"),
	},
	{
		Name:  "client_gone_not_passed",
		File:  "internal/router/pair.go",
		Why:   "a client that went away leaves both legs running",
		Edits: []Edit{{"p.fail(now, verdict{err: api.Errorf(api.ClientGone, \"the client went away\")})", "p.becomeEnded(now, api.Errorf(api.ClientGone, \"the client went away\"))"}},
		Test:  router("TestPair"),
	},
	{
		Name:  "retry_after_first_byte",
		File:  "internal/router/pair.go",
		Why:   "a stream that broke is begun anew on another pair, though the client has had a part of it",
		Edits: []Edit{{"if !goesOn || !v.retry || p.moves", "if !v.retry || p.moves"}},
		Test:  router("TestPair"),
	},
	{
		Name:  "answers_twice",
		File:  "internal/router/pair.go",
		Why:   "events after the end of a request are not dropped: it ends twice",
		Edits: []Edit{{"\tif p.phase == phaseEnded {\n\t\treturn\n\t}\n\tswitch ev.kind {\n\tcase evGone:", "\tswitch ev.kind {\n\tcase evGone:"}},
		Test:  router("TestPair"),
	},
	{
		Name: "room_reused",
		File: "internal/router/proxy.go",
		Why:  "a further attempt is sent with the rooms of the one before",
		Edits: []Edit{
			{"\tjournal journal\n\n\tidle ", "\tjournal journal\n\trooms   []int64\n\n\tidle "},
			{"\tfor i := range in.Rooms {\n", "\tif x.rooms != nil {\n\t\tin.Rooms = x.rooms\n\t}\n\tx.rooms = in.Rooms\n\tfor i := range in.Rooms[:len(in.Rooms)*(1-min(x.pair.attempt-1, 1))] {\n"},
		},
		Test: router("TestFaults|TestRetr"),
	},

	// Waits on a loop, each found by noblock.
	{
		Name: "fetch_on_loop",
		File: "internal/worker/decode.go",
		Why:  "the topology is fetched where it is needed: on the loop, with a timeout, as the original did",
		Edits: []Edit{{"\td.peers.do(d.loop, *a)\n", "\tif a.Kind == sched.FetchInfo {\n" +
			"\t\tctx, cancel := context.WithTimeout(context.Background(), a.Timeout)\n" +
			"\t\td.peers.registry.FetchInfo(ctx, a.Addr)\n" +
			"\t\tcancel()\n" +
			"\t}\n" +
			"\td.peers.do(d.loop, *a)\n"}},
		Waits: []string{"worker.loop).run", "worker.loop).handOut", "worker.decodeSide).handOut", "worker.decodeSide).peer", "FetchInfo", "net/http"},
	},
	{
		Name:  "send_that_can_block",
		File:  "internal/transfer/wire.go",
		Why:   "whoever puts a frame into a link's mailbox waits until the writer has noticed",
		Edits: []Edit{{"\tselect {\n\tcase w.wake <- struct{}{}:\n\tdefault:\n\t}\n", "\tw.wake <- struct{}{}\n"}},
		Waits: []string{"worker.loop).run", "wire).poke", "sends to a channel"},
	},
	{
		Name:  "log_on_loop",
		File:  "internal/worker/decode.go",
		Why:   "the loop itself logs that a try has ended",
		Edits: []Edit{{"\td.core.Step(now, m)\n\tif m.Kind != sched.DialLink {", "\td.loop.worker.log.Debug(\"a try has ended\", \"addr\", m.Addr)\n\td.core.Step(now, m)\n\tif m.Kind != sched.DialLink {"}},
		Waits: []string{"worker.loop).run", "decodeSide).peerDone", "slog"},
	},
	{
		Name:  "sleep_on_loop",
		File:  "internal/worker/loop.go",
		Why:   "the loop sleeps a moment, so that more messages come together",
		Edits: []Edit{{"\t\tnow = l.clock.now()\n\t\tl.turn.begin(now)\n", "\t\ttime.Sleep(time.Millisecond)\n\t\tnow = l.clock.now()\n\t\tl.turn.begin(now)\n"}},
		Waits: []string{"worker.loop).run", "time.Sleep"},
	},
	{
		Name:  "name_resolved_on_loop",
		File:  "internal/worker/decode.go",
		Why:   "a link's address is resolved before its dial is handed over",
		Edits: []Edit{{"\t\td.dialling[a.Link] = nil\n\t}\n", "\t\td.dialling[a.Link] = nil\n\t\tif tcp, err := net.ResolveTCPAddr(\"tcp\", a.Target); err == nil {\n\t\t\ta.Target = tcp.String()\n\t\t}\n\t}\n"}},
		Waits: []string{"worker.loop).run", "decodeSide).peer", "net.ResolveTCPAddr"},
	},
	{
		Name: "file_on_loop",
		File: "internal/worker/prefill.go",
		Why:  "a limit is read from its file for each grant",
		Edits: []Edit{
			{"import (\n\t\"fmt\"\n", "import (\n\t\"fmt\"\n\t\"os\"\n"},
			{"\tif g.Recompute != nil {\n\t\ts, err", "\tif limit, err := os.ReadFile(\"limit\"); err == nil && len(limit) > g.Tokens {\n\t\treturn\n\t}\n\tif g.Recompute != nil {\n\t\ts, err"},
		},
		Waits: []string{"worker.loop).run", "prefillSide).granted", "os.ReadFile"},
	},
	{
		Name:  "box_waits_for_reader",
		File:  "internal/worker/job.go",
		Why:   "a token waits until its reader has been woken",
		Edits: []Edit{{"\tselect {\n\tcase b.wake <- struct{}{}:\n\tdefault: // the reader has been woken already\n\t}\n", "\tb.wake <- struct{}{}\n"}},
		Waits: []string{"worker.loop).run", "worker.Box).put", "sends to a channel"},
	},
	{
		Name:  "closed_link_awaited",
		File:  "internal/transfer/receiver.go",
		Why:   "who closes a link waits for its goroutines",
		Edits: []Edit{{"\t\tl.kill(errors.New(cause))\n\t}\n\tr.settle()\n", "\t\tl.kill(errors.New(cause))\n\t}\n\tr.settle()\n\tr.wg.Wait()\n"}},
		Waits: []string{"worker.loop).run", "transfer.Receiver).CloseLink", "WaitGroup"},
	},
	{
		Name:  "batch_awaited",
		File:  "internal/worker/engine.go",
		Why:   "a batch is handed over on a queue that may be full, in place of one that is known to have room",
		Edits: []Edit{{"\tselect {\n\tcase b.queue <- p:\n\tdefault:\n\t\tpanic(\"worker: a core started a batch while its last one is outstanding\")\n\t}\n", "\tb.queue <- p\n"}},
		Waits: []string{"worker.loop).run", "worker.batcher).start", "sends to a channel"},
	},
	{
		Name:  "end_awaited",
		File:  "internal/worker/request.go",
		Why:   "the end of a request waits for the drain to notice it",
		Edits: []Edit{{"\tdefer l.release()\n\tif q.job == nil {", "\tdefer l.release()\n\t<-l.worker.ended\n\tif q.job == nil {"}},
		Waits: []string{"worker.loop).run", "worker.loop).finish", "receives from a channel"},
	},
	{
		Name:  "length_unchecked",
		File:  "internal/transfer/frame.go",
		Why:   "FIRST names a number of top tokens, and memory is made before it is compared with what came",
		Edits: []Edit{{"\tcase n > MaxTop || len(c.b) != 8*n:\n\t\tc.bad = fmt.Sprintf(\"%d top tokens in %d bytes\", n, len(c.b))\n\tcase n > 0:\n", "\tdefault:\n"}},
		Waits: []string{"First).parse", "compared with nothing"},
	},
}
