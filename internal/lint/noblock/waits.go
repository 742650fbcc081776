package noblock

import (
	"go/token"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// waiters are functions that wait, or must be taken to; they are not looked
// into. The text says what they do.
var waiters = map[string]string{
	"time.Sleep":                             "sleeps",
	"(*sync.WaitGroup).Wait":                 "waits for other goroutines",
	"(*sync.Cond).Wait":                      "waits for other goroutines",
	"sync.runtime_Semacquire":                "waits for other goroutines",
	"sync.runtime_SemacquireRWMutex":         "waits for other goroutines",
	"sync.runtime_SemacquireRWMutexR":        "waits for other goroutines",
	"sync.runtime_SemacquireWaitGroup":       "waits for other goroutines",
	"sync.runtime_notifyListWait":            "waits for other goroutines",
	"internal/sync.runtime_SemacquireMutex":  "waits for other goroutines",
	"internal/poll.runtime_Semacquire":       "waits for another user of the file",
	"internal/poll.runtime_pollWait":         "waits in the poller",
	"internal/poll.runtime_pollWaitCanceled": "waits in the poller",
	"(*log/slog.Logger).log":                 "logs, and whoever takes the log may not",
	"(*log/slog.Logger).logAttrs":            "logs, and whoever takes the log may not",
	"(*log.Logger).output":                   "logs, and whoever takes the log may not",
	"reflect.chanrecv":                       "receives from a channel",
	"reflect.chansend0":                      "sends to a channel",
	"reflect.rselect":                        "selects",
	"os/signal.signal_recv":                  "waits for a signal",
	"os/signal.signalWaitUntilIdle":          "waits for a signal",
	"syscall.Syscall":                        "makes a system call",
	"syscall.Syscall6":                       "makes a system call",
	"syscall.RawSyscall":                     "makes a system call",
	"syscall.RawSyscall6":                    "makes a system call",
	"syscall.rawVforkSyscall":                "makes a system call",
	"golang.org/x/sys/unix.Syscall":          "makes a system call",
	"golang.org/x/sys/unix.Syscall6":         "makes a system call",
	"golang.org/x/sys/unix.RawSyscall":       "makes a system call",
	"golang.org/x/sys/unix.RawSyscall6":      "makes a system call",
}

// quick are functions that do not wait and are not looked into. Locks are
// taken in locks.go; giving back wakes others and waits for nobody.
var quick = map[string]bool{
	"(*sync.Mutex).Unlock": true, "(*sync.RWMutex).Unlock": true, "(*sync.RWMutex).RUnlock": true, "(*internal/sync.Mutex).Unlock": true,
	"(*sync.Mutex).TryLock": true, "(*sync.RWMutex).TryLock": true, "(*sync.RWMutex).TryRLock": true, "(*internal/sync.Mutex).TryLock": true,
	"(*sync.Cond).Signal": true, "(*sync.Cond).Broadcast": true,
	"(*sync.WaitGroup).Add": true, "(*sync.WaitGroup).Done": true,
	"(*sync.Pool).pinSlow": true, // GOMAXPROCS(0) stops nothing, and its lock is held for an append
	// A deadline tells the poller. Where it meets a close, it closes the socket, which does not wait either.
	"(*internal/poll.FD).SetDeadline": true, "(*internal/poll.FD).SetReadDeadline": true, "(*internal/poll.FD).SetWriteDeadline": true,
	"syscall.rawSyscallNoError":               true, // getpid and the like
	"golang.org/x/sys/unix.RawSyscallNoError": true,
	"golang.org/x/sys/unix.SyscallNoError":    true,
}

// quickRuntime are the functions of package runtime that neither stop the
// world nor wait. Every other one is a finding.
var quickRuntime = map[string]bool{
	"runtime.KeepAlive": true, "runtime.SetFinalizer": true, "runtime.AddCleanup": true, "(runtime.Cleanup).Stop": true,
	"runtime.Caller": true, "runtime.Callers": true, "runtime.CallersFrames": true, "runtime.FuncForPC": true, "(*runtime.Frames).Next": true,
	"(*runtime.Func).Name": true, "(*runtime.Func).FileLine": true, "(*runtime.Func).Entry": true,
	"runtime.Gosched": true, "runtime.Goexit": true, "runtime.NumCPU": true, "runtime.NumGoroutine": true, "runtime.GOROOT": true, "runtime.Version": true,
	"runtime.LockOSThread": true, "runtime.UnlockOSThread": true, "(*runtime.Pinner).Pin": true, "(*runtime.Pinner).Unpin": true,
}

// quickPackages are those whose functions without Go source (assembly, pieces
// of the runtime) do not wait, but for the waiters. A name that ends in a slash
// stands for all packages below it.
var quickPackages = []string{
	"bytes", "context", "crypto/", "errors", "hash/", "internal/", "iter", "maps", "math", "math/", "os", "os/signal", "reflect", "runtime/pprof", "runtime/debug",
	"runtime/metrics", "runtime/trace", "slices", "strconv", "strings", "sync", "sync/atomic", "syscall", "time", "unique", "weak", "vendor/", "golang.org/x/sys/cpu",
}

// waitsBySelf says what a function does that is a wait in itself, and whether
// it is a leaf: not to be looked into.
func waitsBySelf(f *ssa.Function) (what string, leaf bool) {
	if o := f.Origin(); o != nil {
		f = o
	}
	name, path := f.String(), pathOf(f)
	switch {
	case waiters[name] != "":
		return waiters[name], true
	case quick[name]:
		return "", true
	case path == "runtime" && f.Object() != nil && f.Object().Exported() && f.Signature.Recv() == nil && !quickRuntime[name]:
		return "is a part of the runtime that may stop the world", true
	case path == "runtime" || strings.HasPrefix(path, "internal/runtime/"):
		return "", true
	case f.Blocks != nil:
		return "", false
	}
	for _, p := range quickPackages {
		if path == p || strings.HasSuffix(p, "/") && strings.HasPrefix(path, p) {
			return "", true
		}
	}
	return "has no Go source, and is not known not to wait", true
}

// waitsHere says what one instruction waits for by itself, or "".
func waitsHere(in ssa.Instruction) string {
	switch in := in.(type) {
	case *ssa.Send:
		return "sends to a channel"
	case *ssa.UnOp:
		if in.Op == token.ARROW {
			return "receives from a channel"
		}
	case *ssa.Select:
		if in.Blocking {
			return "selects without default"
		}
	}
	return ""
}

// kinds tell what a call into a package is about, by the first that fits.
var kinds = []struct{ prefix, what string }{
	{"os/exec", "other processes"}, {"net", "network I/O"}, {"crypto/tls", "network I/O"}, {"log", "logging"},
	{"os", "file I/O"}, {"io/ioutil", "file I/O"}, {"path/filepath", "file I/O"}, {"syscall", "a system call"}, {"golang.org/x/sys", "a system call"},
}

// kind names what a call of f is about, where the package tells.
func kind(f *ssa.Function) string {
	path := pathOf(f)
	if strings.Contains(f.String(), "Resolver).") || strings.HasPrefix(f.String(), "net.Lookup") {
		return "DNS"
	}
	for _, k := range kinds {
		if path == k.prefix || strings.HasPrefix(path, k.prefix+"/") {
			return k.what
		}
	}
	return ""
}
