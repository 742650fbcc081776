package schedtest

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/metronome-serve/metronome/internal/kv"
	"github.com/metronome-serve/metronome/internal/sched"
)

// Script runs the commands of one transcript. Each command is one turn (or
// more, until nobody has anything to say) and prints what the cores want done.
//
//	decode|prefill|serve pages=8 page-size=4 [flags]   new cores
//	peers obedient|manual                              who answers on the peer network
//	submit req=1 prompt=5 [from=1] max=3 [room=1] [addr=p:1] [deadline=5s] [stop=(7,8)]
//	        [index=0] [max-hit=n] [grant=9] [peer=1]   prompt: so many tokens from `from` on
//	landed grant=1 [first=7]     failed grant=1 [cause=…]     quiesced grant=1     heard grant=1
//	granted room=1 grant=9 [peer=1] [prefix=0] tokens=5       closed room=1 grant=9 [peer=1] [cause=…]
//	received req=1     send-failed req=1 [cause=…]     send-quiesced req=1
//	batch-done [core=prefill|decode] [tokens=(…)] [err=…] [id=1]
//	run batches=3                run batches until so many are done
//	peer-done id=3 [fault=peer|local|mismatch] [cause=…]      link-ended link=1 [cause=…]
//	abort req=1 [cause=…]        stop-at req=1 index=2
//	tick                         a turn without news
//	advance 5s                   time passes, with a turn at each deadline
//	sleep 5s                     the process is stopped: time passes without a turn
//	describe                     the state of the cores; deadline: the next one
type Script struct {
	env *Env
	td  *datadriven.TestData
}

// Run is one command; use it as the function of datadriven.RunTest.
func (s *Script) Run(t *testing.T, td *datadriven.TestData) string {
	t.Helper()
	s.td = td
	if td.Cmd != "decode" && td.Cmd != "prefill" && td.Cmd != "serve" && s.env == nil {
		td.Fatalf(t, "no core yet: begin with decode, prefill or serve")
	}
	if s.env != nil {
		s.env.out.Reset()
	}
	cmd, ok := commands[td.Cmd]
	if !ok {
		td.Fatalf(t, "unknown command %s", td.Cmd)
	}
	if err := cmd(s); err != nil {
		td.Fatalf(t, "%v\n%s", err, s.env.out.String())
	}
	if s.env.out.Len() == 0 {
		return "ok"
	}
	return s.env.out.String()
}

var commands = map[string]func(*Script) error{
	"decode": func(s *Script) error {
		s.env = NewDecode(s.decodeConfig(), s.pool())
		return nil
	},
	"prefill": func(s *Script) error {
		s.env = NewPrefill(s.prefillConfig(), s.pool())
		return nil
	},
	"serve": func(s *Script) error {
		s.env = NewServe(s.decodeConfig(), s.prefillConfig(), s.pool())
		return nil
	},
	"peers": func(s *Script) error {
		s.env.Answer = nil
		if s.td.HasArg("obedient") {
			s.env.Answer = Obey
		}
		return nil
	},
	"submit": (*Script).submit,
	"landed": func(s *Script) error {
		return s.decode(&sched.PagesLanded{Grant: s.grant(), First: int32(s.num("first", 7))})
	},
	"failed": func(s *Script) error {
		return s.decode(&sched.TransferFailed{Grant: s.grant(), Cause: s.cause(sched.KVTransferFailed)})
	},
	"quiesced": func(s *Script) error { return s.decode(&sched.TransferQuiesced{Grant: s.grant()}) },
	"heard":    func(s *Script) error { return s.decode(&sched.GrantHeard{Grant: s.grant()}) },
	"granted": func(s *Script) error {
		return s.prefill(&sched.RoomGranted{Key: s.key(), Room: s.room(), Digest: uint64(s.num("digest", 0)), Prefix: s.num("prefix", 0), Tokens: s.num("tokens", 0)})
	},
	"closed": func(s *Script) error {
		return s.prefill(&sched.RoomClosed{Key: s.key(), Room: s.room(), Cause: s.cause(sched.ClientGone)})
	},
	"queued":   func(s *Script) error { return s.prefill(&sched.RoomQueued{Room: s.room()}) },
	"received": func(s *Script) error { return s.prefill(&sched.Received{Req: s.req()}) },
	"send-failed": func(s *Script) error {
		return s.prefill(&sched.SendFailed{Req: s.req(), Cause: s.cause(sched.KVTransferFailed)})
	},
	"send-quiesced": func(s *Script) error { return s.prefill(&sched.SendQuiesced{Req: s.req()}) },
	"batch-done":    (*Script).batchDone,
	"run":           (*Script).run,
	"peer-done":     (*Script).peerDone,
	"link-ended": func(s *Script) error {
		return s.decode(&sched.LinkEnded{Link: sched.LinkID(s.num("link", 0)), Cause: s.str("cause", "reset")})
	},
	"abort": func(s *Script) error { return s.both(&sched.Abort{Req: s.req(), Cause: s.cause(sched.ClientGone)}) },
	"stop-at": func(s *Script) error {
		return s.both(&sched.StopAt{Req: s.req(), Index: s.num("index", 0)})
	},
	"tick":    func(s *Script) error { return s.env.Turn() },
	"advance": func(s *Script) error { return s.env.Advance(s.first()) },
	"sleep": func(s *Script) error {
		s.env.Now += s.first()
		return nil
	},
	"describe": func(s *Script) error {
		if s.env.P != nil {
			s.env.printf("%s", s.env.P.Describe())
		}
		if s.env.D != nil {
			s.env.printf("%s", s.env.D.Describe())
		}
		return nil
	},
	"deadline": func(s *Script) error {
		s.env.printf("%v\n", s.env.Deadline())
		return nil
	},
}

func (s *Script) decode(ev sched.Event) error {
	s.env.ToD(ev)
	return s.env.Turn()
}

func (s *Script) prefill(ev sched.Event) error {
	s.env.ToP(ev)
	return s.env.Turn()
}

func (s *Script) both(ev sched.Event) error {
	s.env.Both(ev)
	return s.env.Turn()
}

func (s *Script) submit() error {
	prompt := make([]int32, s.num("prompt", 1))
	for i := range prompt {
		prompt[i] = int32(s.num("from", 1) + i)
	}
	room := int64(s.num("room", int(s.req())))
	if s.env.D != nil {
		s.env.Submit(sched.Submit{Req: s.req(), Prompt: prompt, MaxTokens: s.num("max", 8), StopIDs: s.ids("stop"),
			Addr: s.str("addr", "p:1"), Room: room, Digest: uint64(s.num("digest", 0)), DPRank: -1, Deadline: s.until("deadline")})
		return s.env.Turn()
	}
	p := &sched.SubmitPrefill{Req: s.req(), Prompt: prompt, Room: room, Digest: uint64(s.num("digest", 0)), Index: s.num("index", 0),
		MaxHit: s.num("max-hit", len(prompt)), Deadline: s.until("deadline")}
	if s.td.HasArg("grant") {
		p.Grant = s.key()
	}
	p.Begun = s.td.HasArg("begun")
	return s.prefill(p)
}

func (s *Script) batchDone() error {
	b, to := s.env.DBatch, s.env.ToD
	if b == nil && s.env.PBatch != nil || s.env.D == nil || s.str("core", "") == "prefill" {
		b, to = s.env.PBatch, s.env.ToP
	}
	done := &sched.BatchDone{Batch: sched.BatchID(s.num("id", 0))}
	if b != nil {
		done = Done(b)
		done.Batch = sched.BatchID(s.num("id", int(b.ID)))
	}
	if s.td.HasArg("tokens") {
		done.Tokens = s.ids("tokens")
	}
	if s.td.HasArg("err") {
		done.Err = &sched.Error{Code: sched.Internal, Message: s.str("err", "")}
	}
	if s.td.HasArg("row-err") {
		row := s.num("row", 0)
		done.Errs = make([]*sched.Error, row+1)
		done.Errs[row] = &sched.Error{Code: sched.Internal, Message: s.str("row-err", "")}
	}
	to(done)
	return s.env.Turn()
}

// run completes batches, decode and prefill in turns as one engine would.
func (s *Script) run() error {
	e := s.env
	for range s.num("batches", 1) {
		switch {
		case e.PBatch != nil:
			e.ToP(Done(e.PBatch))
		case e.DBatch != nil:
			e.ToD(Done(e.DBatch))
		default:
			return fmt.Errorf("no batch is outstanding")
		}
		if e.PBatch != nil && e.DBatch != nil {
			e.ToD(Done(e.DBatch))
		}
		if err := e.Turn(); err != nil {
			return err
		}
	}
	return nil
}

// peerDone answers a peer action that was printed (peers manual).
func (s *Script) peerDone() error {
	a, ok := s.env.asked[uint64(s.num("id", 0))]
	if !ok {
		return fmt.Errorf("no peer action %d", s.num("id", 0))
	}
	done := Obey(a)
	faults := map[string]sched.Fault{"ok": sched.OK, "peer": sched.PeerFault, "local": sched.LocalFault, "mismatch": sched.MismatchFault}
	done.Fault, done.Cause = faults[s.str("fault", "ok")], s.str("cause", "")
	if done.Fault != sched.OK {
		*done = sched.PeerDone{Kind: a.Kind, ID: a.ID, Gen: a.Gen, Addr: a.Addr, Link: a.Link, Fault: done.Fault, Cause: done.Cause}
	}
	if done.Info != nil {
		done.Info.PageSize = s.num("page-size", 0)
		done.Info.Instance = s.str("instance", "")
	}
	return s.decode(done)
}

func (s *Script) pool() *kv.Pool { return kv.NewPool(s.num("pages", 8), s.num("page-size", 4), 1) }

func (s *Script) decodeConfig() sched.DecodeConfig {
	return sched.DecodeConfig{
		MaxRunning: s.num("max-running", 0), MaxQueued: s.num("max-queued", 0), MaxGrants: s.num("max-grants", 0),
		Context: s.num("context", 0), ReservedTokens: s.num("reserved", 0), Vocab: s.num("vocab", 0),
		KVTimeout: s.dur("kv-timeout", 0), PrefixCache: s.td.HasArg("prefix-cache"),
		Peers: sched.PeersConfig{
			Reject: s.str("on-mismatch", "fatal") == "reject", MaxPerAddr: s.num("max-per-addr", 0), Attempts: s.num("attempts", 0),
			Local: sched.ParallelInfo{PageSize: s.num("page-size", 4)},
		},
	}
}

func (s *Script) prefillConfig() sched.PrefillConfig {
	return sched.PrefillConfig{
		MaxRunning: s.num("max-running", 0), MaxQueued: s.num("max-queued", 0), MaxParked: s.num("max-parked", 0),
		Chunk: s.num("chunk", 0), Context: s.num("context", 0), BootstrapTimeout: s.dur("bootstrap-timeout", 0),
		PrefixCache: s.td.HasArg("prefix-cache"),
	}
}

// What the arguments of a command say. A value that does not parse is a fault
// of the transcript and panics.

func (s *Script) str(key, def string) string {
	a, ok := s.td.Arg(key)
	if !ok || len(a.Vals) == 0 {
		return def
	}
	return a.Vals[0]
}

func (s *Script) num(key string, def int) int {
	v := s.str(key, "")
	if v == "" {
		return def
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		panic(fmt.Sprintf("%s: %s: %v", s.td.Pos, key, err))
	}
	return n
}

func (s *Script) dur(key string, def time.Duration) time.Duration {
	v := s.str(key, "")
	if v == "" {
		return def
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		panic(fmt.Sprintf("%s: %s: %v", s.td.Pos, key, err))
	}
	return d
}

// until is a deadline so far from now, or Never.
func (s *Script) until(key string) time.Duration {
	if !s.td.HasArg(key) {
		return sched.Never
	}
	return s.env.Now + s.dur(key, 0)
}

// first is the duration that stands alone after the command.
func (s *Script) first() time.Duration {
	d, err := time.ParseDuration(s.td.CmdArgs[0].Key)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", s.td.Pos, err))
	}
	return d
}

func (s *Script) ids(key string) []int32 {
	a, ok := s.td.Arg(key)
	if !ok {
		return nil
	}
	var ids []int32
	for _, v := range a.Vals {
		if v == "" {
			continue // tokens=()
		}
		n, err := strconv.Atoi(strings.TrimSpace(v))
		if err != nil {
			panic(fmt.Sprintf("%s: %s: %v", s.td.Pos, key, err))
		}
		ids = append(ids, int32(n))
	}
	return ids
}

func (s *Script) req() sched.ReqID     { return sched.ReqID(s.num("req", 0)) }
func (s *Script) grant() sched.GrantID { return sched.GrantID(s.num("grant", 0)) }
func (s *Script) room() int64          { return int64(s.num("room", 0)) }
func (s *Script) key() sched.GrantKey {
	return sched.GrantKey{Peer: uint64(s.num("peer", 1)), Grant: s.grant()}
}

func (s *Script) cause(code sched.Code) *sched.Error {
	return &sched.Error{Code: code, Message: s.str("cause", "as the test wants it")}
}
