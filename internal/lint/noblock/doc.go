// Package noblock proves that a loop never waits: no function that a loop can
// reach, in this module, in a library or in the standard library, can wait for
// a peer, a client, a disk, a log or another goroutine's wait.
//
// A loop is a function with the line //metronome:loop in its doc comment. It
// may wait in one place: its one blocking select. Load builds the whole program
// (golang.org/x/tools: SSA, call graph by RTA and then VTA, so that calls of
// interfaces, closures and method values are followed to what can really be
// there), and Check reports each call from which the loop can reach
//
//   - a channel send or receive, or a select without default,
//   - network and file I/O, DNS, other processes: all that ends in the poller
//     or in a system call,
//   - time.Sleep, sync.WaitGroup.Wait, sync.Cond.Wait, a stop of the world,
//   - a logging call, whatever handler is behind it,
//   - a mutex that anyone in the program holds across one of these; a mutex
//     that is only held for a short moment is no wait,
//   - a function without Go source that is not known to this package.
//
// It also reports a make whose length was decoded from bytes and is compared
// with nothing (sizes.go); such lengths are judged in the whole module, because
// the frames that a loop works on are read elsewhere.
//
// A function marked //metronome:baseline is a loop that waits, for comparisons:
// Check leaves it alone, and CheckBaselines must find something from it.
//
// A finding is told with the chain of calls from the loop to what waits. An
// exception is written at the place, with its reason:
//
//	//metronome:allow noblock the reason
//
// on the line of the call or above it. Calls from there are not followed.
// Program.Allowed lists the exceptions; one that allows nothing is a finding.
//
// # What it does not prove
//
// The call graph is sound for programs without reflection, unsafe and linkname
// tricks: a function called through reflect.Value.Call or from assembly is not
// followed. A wait that is no call is not seen: a busy loop, a page fault, the
// garbage collector, a goroutine that the system does not run. Work that is
// merely long is not waiting. A mutex is known by its field or variable, not by
// object: two objects of one type share the verdict. Locks that are passed
// around are followed through parameters and captured variables up to a depth;
// beyond it, they count as held across waits. Conditions are not understood: a
// lock taken under a condition counts as held until it is given back on that
// path. What a sync.Once runs is judged where it is run; that a second caller
// waits for the first adds nothing, since the same function was judged.
// Finalizers and the functions of sync.Pool are judged as if called in place.
package noblock
