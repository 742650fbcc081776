// Package bootstrap is the registry through which a decode worker finds the
// ranks of a prefill worker, on both ends of the wire. The wire is SGLang's
// bootstrap protocol, field by field, so that its prefills can register with
// our Server and its decodes can read from it, and so that our Client can read
// from theirs.
//
//   - Table (table.go, pure) is what a registry knows: one prefill worker's
//     parallel info, the address of each of its ranks, and the room → DP rank map.
//   - Server (server.go) serves a Table over HTTP.
//   - Client (client.go) is every request to a registry, each one bounded try.
//     It keeps no state about an address: pace, budget and what is done with a
//     failure belong to the caller (a decode's peer records, a Registrar).
//   - Registrar (registrar.go) keeps one prefill worker registered.
//
// # Wire
//
//	PUT  /route             JSON, one prefill rank → 200 "OK"
//	GET  /route?prefill_dp_rank=&prefill_cp_rank=&target_tp_rank=&target_pp_rank=
//	                        all -1: parallel info; else {"rank_ip":…,"rank_port":…}; 400, 404, 503
//	POST /register_dp_rank  {"bootstrap_room":n,"dp_rank":n} → 200 "OK"
//	POST /query_dp_ranks    {"bootstrap_rooms":[n,…]} → {"n":dp_rank,…}, unknown rooms left out
//	GET  /health            200 "OK"
//
// Beyond SGLang's wire there are two headers, X-Metronome-Instance and
// X-Metronome-Fingerprint, on PUT /route and in the answers of GET /route and
// GET /health. They are headers because SGLang's decodes refuse a parallel
// info with a key that they do not know.
//
// # Driving it
//
// A prefill worker calls NewServer and Serve (or is told of a registry
// elsewhere), makes a Registrar with all its ranks and runs it until it stops;
// it is ready when Registrar.Ready says so. A decode worker makes one Client
// and calls it from goroutines of its own, with a context that ends each call;
// IsLocal tells a failure of this process from one of the peer.
package bootstrap
