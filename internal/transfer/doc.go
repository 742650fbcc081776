// Package transfer moves KV pages from prefill (Sender) to decode (Receiver)
// over TCP.
package transfer
