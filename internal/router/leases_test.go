package router

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestLeaseTranscripts replays testdata/leases: each command is a worker's word,
// the output what the table makes of it and who holds a lease.
//
// Commands: new [lease=D]; renew ROLE HOST INSTANCE [port=N], leave ROLE HOST
// INSTANCE, flood N (renewals of so many other workers), wait D, which is also
// when leases are looked at, stand-still D, the same after we did not run.
func TestLeaseTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/leases", func(t *testing.T, path string) {
		var l *leases
		now := time.Hour
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var b strings.Builder
			who := func() joined {
				role := map[string]Leg{"prefill": Prefill, "decode": Decode}[d.CmdArgs[0].Key]
				j := joined{role, url.URL{Scheme: "http", Host: d.CmdArgs[1].Key + ":1"}, 0, d.CmdArgs[2].Key}
				if d.HasArg("port") {
					d.ScanArgs(t, "port", &j.port)
				}
				return j
			}
			switch d.Cmd {
			case "new":
				l = &leases{length: 10 * time.Second}
			case "renew":
				changed, err := l.renew(now, who())
				if err != nil {
					fmt.Fprintf(&b, "%d %s\n", err.HTTPStatus(), err.Message)
				} else if changed {
					b.WriteString("the members change\n")
				}
			case "leave":
				if l.leave(now, who()) {
					b.WriteString("the members change\n")
				}
			case "flood":
				var n int
				fmt.Sscan(d.CmdArgs[0].Key, &n)
				refused := 0
				for i := range n {
					if _, err := l.renew(now, joined{url: url.URL{Host: fmt.Sprint(i)}, instance: fmt.Sprint("x", i)}); err != nil {
						refused++
					}
				}
				return fmt.Sprintf("%d held, %d refused, %d dead", len(l.held), refused, len(l.dead))
			case "flood-dead":
				for i := range 2 * ghostsMost {
					l.leave(now, joined{instance: fmt.Sprint("y", i)})
				}
				return fmt.Sprintf("%d held, %d dead", len(l.held), len(l.dead))
			case "wait", "stand-still":
				wait, err := time.ParseDuration(d.CmdArgs[0].Key)
				if err != nil {
					t.Fatal(err)
				}
				if now += wait; d.Cmd == "stand-still" {
					l.rest(now, wait-leaseCheck)
				}
				for _, j := range l.expire(now) {
					fmt.Fprintf(&b, "%s %s: the lease of %s is over\n", j.role, j.url.Hostname(), j.instance)
				}
			default:
				t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
			}
			for _, h := range l.held {
				fmt.Fprintf(&b, "%s %s %s port=%d %v left\n", h.role, h.url.Hostname(), h.instance, h.port, h.until-now)
			}
			return b.String()
		})
	})
}
