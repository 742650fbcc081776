// Package sched holds the scheduler cores: [Decode], the heart of a decode
// worker, with [Peers], what it knows of each prefill; and [Prefill], the heart
// of a prefill worker. serve has both over one pool.
//
// A core decides and does nothing: no goroutine, channel, lock, clock, log,
// network or file. What happens outside comes in as an [Event]; what shall
// happen goes out as a value. The same events at the same times give the same
// actions, so a core can be tested by transcript, replayed and simulated.
//
// # The driver's duties
//
// A core belongs to one goroutine, its loop:
//
//		for {
//			ready := core.Ready()
//			hand out ready's actions          // none of which may wait
//			arm the timer for ready.Deadline
//			wait for inbox, timer or stop     // the only place
//			now := time since process start
//			for each event in the inbox { core.Step(now, event) }
//			core.Step(now, &Tick{})
//		}
//
//	 1. now never goes back, and is taken once a turn. The inbox is emptied before
//	    Tick, because only Tick judges deadlines: what has arrived is known by then.
//	    Every turn ends with Tick. A turn that comes late ([LateTurn]) is noticed
//	    and forgiven by the core.
//	 2. Actions are handed out in the order of the fields of [DecodeReady] and
//	    [PrefillReady]. Their slices belong to the core again at the next Step; what
//	    Batch points to, when the core is stepped with its BatchDone.
//	 3. Every action that completes later carries an id, and completes once, as an
//	    event with the same id: Batch by BatchDone; Grant by PagesLanded, or by
//	    TransferFailed and then TransferQuiesced; Revoke by TransferQuiesced; CloseSend by
//	    SendQuiesced; each try of [PeerAction] by PeerDone. What comes too late is
//	    dropped at the top of Step, so the driver need not know what is still wanted.
//	 4. At most one batch is outstanding at a core. The rows' tokens and block
//	    tables stay as they are until its BatchDone, also when requests end meanwhile.
//	 5. Mailboxes towards the network must have room for all that the configuration
//	    allows: MaxGrants grants and as many Revokes, one close for each send. An
//	    action is never put off and never dropped.
//	 6. Each request that was submitted ends in exactly one [Finish], after its last
//	    [Emit]; a refused one at once. A request that has ended is forgotten.
//	 7. Serve: both cores share one kv.Pool and one goroutine. Each turn the prefill
//	    core's Ready comes first; its HandOvers go to the decode core as Adopt, then
//	    comes the decode core's Ready, and its Preempts go back as SubmitPrefill. A
//	    request is in one core at a time and ends there; Abort, StopAt and Tick
//	    go to both. The ids of batches are those of their core.
//
// # Decode
//
//	Submit → pending → preallocate → transfer → waiting → running → Finish
//
// pending: Peers looks for parallel info, DP rank, rank addresses and links.
// preallocate: the links are up, the oldest gets pages first. transfer: a [Grant]
// is out. waiting: PagesLanded; the first token has been emitted. running: one
// row of each [Batch]. A request without a peer any more goes back to pending;
// so does one that was preempted, and comes by again with a Grant that says
// Recompute. Places in all queues are by arrival.
//
// A page that anything outside may still touch is in quarantine: those of a
// grant until TransferQuiesced, those of a batch until its BatchDone.
//
// # Prefill
//
//	SubmitPrefill → bootstrapping → queued → computing → in flight → Finish or HandOver
//
// bootstrapping: no decode worker has granted the room yet; it may compute all the
// same, in pages that no granted room waits for. queued: RoomGranted; waits for
// pages and its place. computing: [OpenSend] is out, chunks go through batches;
// [BindSend] joins it to the grant. in flight: the first token is drawn; pages are
// on their way, or wait for the grant. Received ends it.
//
// # Reading the state
//
// Describe prints a core, String its actions; transcripts in testdata are made of
// both. Builds with the race detector or the tag invariants call Check after
// every Step and Ready, and panic with what does not hold.
package sched
