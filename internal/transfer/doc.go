// Package transfer moves KV pages from prefill workers (P) to decode workers
// (D) over TCP, one link for each pair of ranks that share KV heads, many rooms
// over each link. docs/transfer.md is the protocol; the layout of every frame
// stands in frame.go beside its constant.
//
// D holds a [Receiver] for each decode core. Its driver
//
//  1. calls Dial for each link the core wants, on a goroutine of its own;
//  2. calls Open when the core grants pages, Revoke when it takes them back,
//     Notice when a room ends that was never granted: none of them waits;
//  3. turns events into the core's: Landed, Failed, Quiesced, GrantHeard,
//     LinkHeard, LinkEnded. Pages are the Receiver's from Open until Landed or
//     Quiesced.
//
// P holds a [Sender] for each prefill core, with a listener for each TP rank
// ([Sender.Serve]). Its driver
//
//  1. calls Open before a request's first batch, and LayerDone from the engine
//     whenever rows of a layer are final;
//  2. gets Granted when the room's GRANTs are all there, and answers, by what
//     the core decides, with Bind or Refuse;
//  3. calls First with the first token, after the last LayerDone;
//  4. gets Received, or Closed, SendFailed or a decision of its own and calls
//     CloseSend. Pages are the Sender's from Open until Received or SendQuiesced.
//
// Events are called in order, one at a time, with no lock held, from any
// goroutine (also from within a call); they must not block, and may call back.
//
// frame.go, window.go, share.go, table.go and rooms.go are pure: all that is
// decided is decided there. receiver.go, sender.go and wire.go carry it out,
// with one reader and one writer goroutine for each link. Only D's reader
// writes into D's pages, and only P's writer reads P's.
package transfer
