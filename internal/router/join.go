package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// Membership is what a worker says of itself when it joins a router: PUT
// /members, again and again for as long as it lives, and DELETE /members when
// it goes. The answer to PUT is a Lease.
type Membership struct {
	Role          string `json:"role"` // prefill or decode
	URL           string `json:"url"`  // where it is reached
	BootstrapPort int    `json:"bootstrap_port,omitempty"`
	Instance      string `json:"instance"` // new at every start
}

// Lease is how long a Membership holds.
type Lease struct {
	LeaseMS int64 `json:"lease_ms"`
}

const (
	membersPath   = "/members"
	membershipMax = 4 << 10 // bytes of a Membership
	instanceMax   = 128     // bytes of an instance
	joinTimeout   = 3 * time.Second
	goodbyeTime   = time.Second
	joinWait      = 250 * time.Millisecond // after a first failure; doubles up to a third of the lease
	leaseCheck    = 250 * time.Millisecond // how late a lease may be found to be over
)

// members answers PUT and DELETE /members. Whoever may write here gets clients'
// requests and the token for workers, so it takes the secret that workers and
// router share, not one that clients have; without any it is for this machine
// only.
func (r *Router) members(w http.ResponseWriter, req *http.Request) {
	j, err := r.readMembership(req)
	if err != nil {
		api.WriteError(w, err)
		return
	}
	r.setting.Lock()
	defer r.setting.Unlock()
	changed := false
	if req.Method == http.MethodDelete {
		changed = r.leases.leave(r.now(), j)
	} else if changed, err = r.leases.renew(r.now(), j); err != nil {
		api.WriteError(w, err)
		return
	}
	if changed {
		r.setMembers()
	}
	writeJSON(w, Lease{r.cfg.Lease.Milliseconds()})
}

func (r *Router) readMembership(req *http.Request) (j joined, e *api.Error) {
	if r.cfg.JoinTokens.Empty() && !r.cfg.Insecure && !api.FromLoopback(req) {
		return j, api.Errorf(api.Forbidden, "workers of other machines join with a token (--token-file or --peer-token-file on the router)")
	}
	if e = r.cfg.JoinTokens.Authorize(req.Header.Get("Authorization")); e != nil {
		return j, e
	}
	bad := func(param, format string, args ...any) (joined, *api.Error) {
		return joined{}, &api.Error{Code: api.InvalidRequest, Param: param, Message: fmt.Sprintf(format, args...)}
	}
	body, err := io.ReadAll(io.LimitReader(req.Body, membershipMax+1))
	if err != nil {
		return joined{}, api.BodyError(err)
	}
	if len(body) > membershipMax {
		return joined{}, api.Errorf(api.BodyTooLarge, "a membership is at most %d bytes", membershipMax)
	}
	var m Membership
	if err := json.Unmarshal(body, &m); err != nil {
		return bad("", "not a membership like {\"role\":\"decode\",\"url\":\"http://10.0.0.5:30100\",\"instance\":\"…\"}: %s", api.JSONFault(err))
	}
	role := Decode
	if m.Role == Prefill.String() {
		role = Prefill
	} else if m.Role != Decode.String() {
		return bad("role", "the role is %.32q; it must be prefill or decode", m.Role)
	}
	if m.BootstrapPort < 0 || m.BootstrapPort > 65535 || role == Decode && m.BootstrapPort != 0 {
		return bad("bootstrap_port", "%d is no bootstrap port of a %s worker", m.BootstrapPort, role)
	}
	if !isInstance(m.Instance) {
		return bad("instance", "the instance is 1 to %d visible ASCII characters, new at every start", instanceMax)
	}
	u, err := parseBase(m.URL)
	if err != nil {
		return bad("url", "%.200q: %v", m.URL, err)
	}
	if ip := net.ParseIP(u.Hostname()); ip != nil && (ip.IsLoopback() || ip.IsUnspecified()) && !api.FromLoopback(req) {
		return bad("url", "%s is the worker's own machine, not reached from here; start it with --advertise HOST", u.Host)
	}
	return joined{role, *u, m.BootstrapPort, m.Instance}, nil
}

func isInstance(s string) bool {
	return s != "" && len(s) <= instanceMax && !slices.ContainsFunc([]byte(s), func(c byte) bool { return c <= ' ' || c > '~' })
}

// watchLeases takes out whose lease is over, until ctx ends.
func (r *Router) watchLeases(ctx context.Context) {
	tick := time.NewTicker(leaseCheck)
	defer tick.Stop()
	for last := r.now(); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := r.now()
		r.setting.Lock()
		r.leases.rest(now, now-last-leaseCheck)
		last = now
		gone := r.leases.expire(now)
		for _, j := range gone {
			r.cfg.Log.Warn("lease is over", "role", j.role.String(), "worker", j.url.String(), "instance", j.instance)
		}
		if len(gone) > 0 {
			r.setMembers()
		}
		r.setting.Unlock()
	}
}

// setMembers makes those that were named and those that joined the members of
// the pools. A worker that was named and joins is the one that was named. The
// caller holds r.setting.
func (r *Router) setMembers() {
	lists := r.table.given
	for _, l := range r.leases.held {
		list := &lists[l.role]
		if slices.ContainsFunc(*list, func(w *worker) bool { return w.url == l.url }) {
			continue
		}
		w := newWorker(l.role, l.url)
		w.bootstrapPort, w.instance = l.port, l.instance
		*list = append(slices.Clip(*list), w)
	}
	added, removed := r.table.set(r.now(), lists)
	for _, w := range added {
		r.cfg.Log.Info("worker is added", "role", w.role.String(), "worker", w.name)
	}
	for _, w := range removed {
		r.cfg.Log.Info("worker is removed", "role", w.role.String(), "worker", w.name)
	}
	r.startProbing(added)
}

// Joiner keeps one worker a member of one router. Run it on a goroutine of its
// own.
type Joiner struct {
	Router string // URL
	Token  *api.Secret
	Self   Membership
	Log    *slog.Logger
	Dial   func(ctx context.Context, network, addr string) (net.Conn, error) // nil: TCP; for tests
}

// CheckJoin refuses what is no router's URL.
func CheckJoin(router string) error {
	_, err := parseBase(router)
	return err
}

// Run says that the worker is there until ctx ends, and then goodbye. A third of
// the lease lies between two renewals, a bit more or less, so that two may be
// lost and many workers do not call in step. A router that cannot be reached or
// refuses is asked again, for it may be restarted or get its token yet; one that
// says that this instance is dead is not.
func (j *Joiner) Run(ctx context.Context) {
	tr := &http.Transport{DialContext: j.Dial, MaxIdleConns: 1, DisableCompression: true}
	defer tr.CloseIdleConnections()
	var told string
	wait, lease := joinWait, 10*time.Second
	for {
		got, status, err := j.call(ctx, tr, http.MethodPut, joinTimeout)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			if told != "ok" {
				told = "ok"
				j.Log.Info("joined", "router", j.Router, "lease", got)
			}
			lease = got
			wait = joinWait
		case told != err.Error():
			told = err.Error()
			j.Log.Warn("cannot join", "router", j.Router, "error", told)
		}
		if status == http.StatusConflict {
			return
		}
		pause := lease / 3
		if err != nil {
			pause = min(wait, pause)
			wait *= 2
		}
		select {
		case <-time.After(pause*4/5 + rand.N(pause*2/5)):
			continue
		case <-ctx.Done():
		}
		if _, _, err := j.call(context.WithoutCancel(ctx), tr, http.MethodDelete, goodbyeTime); err != nil {
			j.Log.Warn("no goodbye", "router", j.Router, "error", err)
		}
		return
	}
}

// call is one request; the error tells what the router said.
func (j *Joiner) call(ctx context.Context, tr http.RoundTripper, method string, limit time.Duration) (lease time.Duration, status int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %v", limit))
	defer cancel()
	u, err := parseBase(j.Router)
	if err != nil {
		return 0, 0, err
	}
	u.Path = membersPath
	body, err := json.Marshal(j.Self)
	if err != nil {
		return 0, 0, err
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	if t := j.Token.Value(); t != "" {
		req.Header.Set("Authorization", "Bearer "+t)
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return 0, 0, errors.New(plainCause(ctx, err))
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, membershipMax))
	if err != nil {
		return 0, 0, errors.New(plainCause(ctx, err))
	}
	if resp.StatusCode != http.StatusOK {
		return 0, resp.StatusCode, fmt.Errorf("%s %s answered %d: %.300s", method, membersPath, resp.StatusCode, bytes.TrimSpace(text))
	}
	var l Lease
	if err := json.Unmarshal(text, &l); err != nil || l.LeaseMS < leaseLeast.Milliseconds() || l.LeaseMS > leaseMost.Milliseconds() {
		return 0, resp.StatusCode, fmt.Errorf("%s %s answered no lease: %.300s", method, membersPath, bytes.TrimSpace(text))
	}
	return time.Duration(l.LeaseMS) * time.Millisecond, resp.StatusCode, nil
}
