// Package engine computes: the forward pass of Llama models over paged KV, the
// bytes of that KV, the sampler, and the sim engine.
//
// A driver makes one Engine and calls Run with one Batch after another. The
// caller owns pages and block tables; the engine owns the bytes behind them and
// hands them out through Memory, for transfer to read and write. It knows no
// request, no network and no clock (the sim engine has a clock: it sleeps).
//
// What a row yields has the same bits whatever else is in the batch, however
// its prompt was cut into chunks, whichever pages and page size hold its KV,
// with any number of threads or TP ranks, and on whatever machine. The rules
// that make it so are in docs/numerics.md; they hold for every change.
package engine
