// Package router is the HTTP front of a fleet of prefill and decode workers.
//
// # Life of a request
//
// The router reads the body, scans it without decoding it (api.Scan), picks a
// prefill worker and a decode worker, draws a fresh room for each item and
// sends both legs: the same body, the client's bytes untouched, with the
// pairing fields in front. The decode leg's answer goes to the client; the
// prefill leg's answer is read only to learn that it ended and how.
//
// # Parts
//
//   - pair.go is the state machine of one request over both legs, pure: events
//     in, actions out. Every rule about who is ended, blamed, retried and what
//     the client hears is there and nowhere else.
//   - fault.go judges one leg's failure: whose fault it is, whether another pair
//     may do better, what the client is told. Pure.
//   - pick.go chooses a worker, prefixes.go remembers who was sent what. Pure.
//   - members.go is the table of workers: addresses, load, in or out.
//   - leases.go is the table of workers that joined by themselves, pure; join.go
//     is both ends of that, the router's and the worker's.
//   - health.go probes them.
//   - proxy.go drives one request: it runs the decode leg on the client's own
//     goroutine and the prefill leg on one more, feeds the state machine and
//     does what it says.
//   - router.go is the HTTP server around them, and its end.
//
// # The driver's manual
//
//	r, err := router.New(cfg)      // refuses a wrong configuration
//	err = r.Run(ctx, listener)     // serves until ctx ends, drains, returns
//
// Goroutines: one per worker for its probes (at most three probes of it at a
// time), one for the leases, one per prefill leg in flight; all end with Run.
package router
