// Package worker drives the scheduler cores: it is a prefill, a decode or a
// serve process without its command line.
//
// The HTTP side makes a Job for each choice of a request, hands it over with
// Submit, and reads tokens and the one End from the Job's Box. Abort and
// StopAt send verdicts back. None of these waits for anything.
//
// Each DP rank has one loop. It hands out what its cores want done, waits in
// one place (inbox, timer, stop), and steps the cores with what arrived. All
// that could wait for a peer, a client, a disk or a log happens on goroutines
// of its own and comes back through the inbox:
//
//	engine     one goroutine a rank runs batches
//	peernet    one goroutine owns the tries of all decode cores, one more a try
//	transfer   its links
//	registrar  keeps a prefill registered
//	watcher    logs the stack of a loop that is stuck
package worker
