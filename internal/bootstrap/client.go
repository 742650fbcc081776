package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ClientConfig is what a Client needs to know. Zero takes the default in brackets.
type ClientConfig struct {
	// Token gives our bearer token, which may change. It goes with writes only (reads of a registry
	// need none) and only to loopback hosts and hosts that Allow lists. [none]
	Token func() string
	// Allow says whether a host (a name or an address, without port) may be
	// contacted, also by a redirect. [nil: any may be, none but loopback gets the token]
	Allow func(host string) bool
	// Dial makes the connections. [a net.Dialer with Go's own resolver]
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Limits of one answer.
const (
	answerMax      = 64 << 10 // bytes of body; real answers are below 1 KiB
	answerHeadMax  = 16 << 10 // bytes of header
	redirectsMax   = 3
	defaultTimeout = 5 * time.Second  // of a call whose context has no deadline
	idleConn       = 20 * time.Second // shorter than any registry keeps one, so ours closes first
	idleConns      = 8                // of one address and purpose; more are closed after their answer
	roomsPerQuery  = 1000             // the answer to so many rooms stays below answerMax
)

// Client asks bootstrap registries, SGLang's or ours. Each method is one try:
// the context's deadline bounds all of it (resolve, connect, redirects, head,
// body), and whatever the registry answers comes back as a value or an error.
// Safe for concurrent use; addresses share nothing with one another but idle
// connections' descriptors: no pool, no queue and no limit.
type Client struct {
	cfg ClientConfig
	// One transport per purpose. A fetch of parallel info uses a fresh
	// connection, so that it meets who listens now and not who did.
	fresh, query, probe *http.Transport
}

// NewClient makes a client. Close ends its idle connections.
func NewClient(cfg ClientConfig) *Client {
	if cfg.Dial == nil {
		// Go's resolver obeys the context; the C library's would hold one of a
		// bounded number of threads for each hung name.
		cfg.Dial = (&net.Dialer{Resolver: &net.Resolver{PreferGo: true}}).DialContext
	}
	transport := func(keep bool) *http.Transport {
		return &http.Transport{
			DialContext: cfg.Dial, DisableKeepAlives: !keep, DisableCompression: true,
			MaxIdleConnsPerHost: idleConns, IdleConnTimeout: idleConn, MaxResponseHeaderBytes: answerHeadMax,
		}
	}
	return &Client{cfg: cfg, fresh: transport(false), query: transport(true), probe: transport(true)}
}

// Close ends the idle connections; calls under way end with their contexts.
func (c *Client) Close() {
	for _, t := range []*http.Transport{c.fresh, c.query, c.probe} {
		t.CloseIdleConnections()
	}
}

// StatusError is an answer other than 200: the registry lives and says no.
type StatusError struct {
	Status int
	Text   string // the beginning of the body, on one line
}

func (e *StatusError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("status %d", e.Status)
	}
	return fmt.Sprintf("status %d: %s", e.Status, e.Text)
}

// FetchInfo asks for the parallel info of the prefill behind addr (host:port).
func (c *Client) FetchInfo(ctx context.Context, addr string) (Info, error) {
	body, head, err := c.do(ctx, c.fresh, call{method: http.MethodGet, addr: addr, path: "/route", query: rankQuery(Rank{-1, -1, -1, -1})})
	if err != nil {
		return Info{}, err
	}
	info, err := parseInfo(body)
	if err != nil {
		return Info{}, fmt.Errorf("malformed parallel info: %w", err)
	}
	info.Instance, info.Fingerprint = visible(head.Get(InstanceHeader)), visible(head.Get(FingerprintHeader))
	return info, nil
}

// LookupRank asks where one prefill rank listens: host:port, IPv6 in brackets.
func (c *Client) LookupRank(ctx context.Context, addr string, dp, cp, tp, pp int) (target string, err error) {
	body, _, err := c.do(ctx, c.query, call{method: http.MethodGet, addr: addr, path: "/route", query: rankQuery(Rank{DP: dp, CP: cp, TP: tp, PP: pp})})
	if err != nil {
		return "", err
	}
	ip, port, err := parseRank(body)
	if err != nil {
		return "", fmt.Errorf("malformed rank address: %w", err)
	}
	return net.JoinHostPort(ip, strconv.Itoa(port)), nil
}

// QueryRanks asks which DP rank holds each of the rooms. Unknown rooms are left out.
func (c *Client) QueryRanks(ctx context.Context, addr string, rooms []int64) (map[int64]int, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	ranks := make(map[int64]int, len(rooms))
	for len(rooms) > 0 {
		part := rooms[:min(len(rooms), roomsPerQuery)]
		rooms = rooms[len(part):]
		question, err := json.Marshal(map[string][]int64{"bootstrap_rooms": part})
		if err != nil {
			return nil, err
		}
		body, _, err := c.do(ctx, c.query, call{method: http.MethodPost, addr: addr, path: "/query_dp_ranks", body: question})
		if err != nil {
			return nil, err
		}
		answer, err := parseRanks(body)
		if err != nil {
			return nil, fmt.Errorf("malformed DP ranks: %w", err)
		}
		for _, room := range part {
			if dp, ok := answer[room]; ok {
				ranks[room] = dp
			}
		}
	}
	return ranks, nil
}

// Health asks whether the registry lives, and of which instance it speaks ("":
// it does not say).
func (c *Client) Health(ctx context.Context, addr string) (instance string, err error) {
	_, head, err := c.do(ctx, c.probe, call{method: http.MethodGet, addr: addr, path: "/health"})
	if err != nil {
		return "", err
	}
	return visible(head.Get(InstanceHeader)), nil
}

// Register registers one prefill rank.
func (c *Client) Register(ctx context.Context, addr string, r Registration) error {
	body, err := r.body()
	if err != nil {
		return err
	}
	head := http.Header{}
	if r.Instance != "" {
		head.Set(InstanceHeader, r.Instance)
	}
	if r.Fingerprint != "" {
		head.Set(FingerprintHeader, r.Fingerprint)
	}
	_, _, err = c.do(ctx, c.fresh, call{method: http.MethodPut, addr: addr, path: "/route", body: body, head: head, write: true})
	return err
}

// RegisterRank tells the registry which DP rank holds a room.
func (c *Client) RegisterRank(ctx context.Context, addr string, room int64, dp int) error {
	body := fmt.Appendf(nil, `{"bootstrap_room": %d, "dp_rank": %d}`, room, dp)
	_, _, err := c.do(ctx, c.query, call{method: http.MethodPost, addr: addr, path: "/register_dp_rank", body: body, write: true})
	return err
}

// call is one request to a registry.
type call struct {
	method, addr, path string
	query              string
	body               []byte
	head               http.Header
	write              bool // needs the token
}

func rankQuery(r Rank) string {
	return fmt.Sprintf("prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d", r.DP, r.CP, r.TP, r.PP)
}

// bounded gives the context a deadline if it has none: every wait has a bound.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, defaultTimeout)
}

// do makes one call and reads the whole answer; anything but 200 is an error.
func (c *Client) do(ctx context.Context, t *http.Transport, k call) (body []byte, head http.Header, err error) {
	host, err := splitAddr(k.addr)
	if err != nil {
		return nil, nil, err
	}
	if !c.allowed(host) {
		return nil, nil, fmt.Errorf("the host %s is not in the list of allowed bootstrap hosts", host)
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	u := url.URL{Scheme: "http", Host: k.addr, Path: k.path, RawQuery: k.query}
	req, err := http.NewRequestWithContext(ctx, k.method, u.String(), bytes.NewReader(k.body))
	if err != nil {
		return nil, nil, err
	}
	c.dress(req, &k, host)
	resp, err := (&http.Client{Transport: t, CheckRedirect: c.redirect}).Do(req)
	if err != nil {
		return nil, nil, cause(ctx, err)
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, answerMax+1))
	switch {
	case err != nil:
		return nil, nil, cause(ctx, err)
	case resp.StatusCode != http.StatusOK:
		return nil, nil, &StatusError{resp.StatusCode, short(string(body))}
	case len(body) > answerMax:
		return nil, nil, fmt.Errorf("the answer has more than %d bytes", answerMax)
	}
	return body, resp.Header, nil
}

func (c *Client) dress(req *http.Request, k *call, host string) {
	for name, values := range k.head {
		req.Header[name] = values
	}
	req.Header.Set("User-Agent", "metronome")
	if len(k.body) > 0 {
		req.Header.Set("Content-Type", "application/json")
		// All our calls may be sent twice: an empty value lets the transport
		// repeat one whose idle connection the registry had just closed.
		req.Header["Idempotency-Key"] = nil
	} else {
		req.Body, req.GetBody, req.ContentLength = nil, nil, 0
	}
	if k.write && c.cfg.Token != nil && (loopback(host) || c.cfg.Allow != nil && c.cfg.Allow(host)) {
		if token := c.cfg.Token(); token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
	}
}

func (c *Client) allowed(host string) bool { return c.cfg.Allow == nil || c.cfg.Allow(host) }

// redirect follows at most three, to allowed hosts, and leaves the token
// behind when another host or port is named.
func (c *Client) redirect(req *http.Request, via []*http.Request) error {
	if len(via) > redirectsMax {
		return fmt.Errorf("more than %d redirects", redirectsMax)
	}
	if req.URL.Scheme != "http" && req.URL.Scheme != "https" {
		return fmt.Errorf("redirected to the scheme %s", short(req.URL.Scheme))
	}
	if !c.allowed(req.URL.Hostname()) {
		return fmt.Errorf("redirected to the host %s, which is not in the list of allowed bootstrap hosts", short(req.URL.Hostname()))
	}
	if req.URL.Host != via[0].URL.Host {
		req.Header.Del("Authorization")
	}
	return nil
}

// splitAddr checks host:port and gives the host.
func splitAddr(addr string) (host string, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err == nil {
		host, err = CheckHost(host)
	}
	if err != nil {
		return "", fmt.Errorf("bootstrap address %s is not host:port: %w", short(strconv.Quote(addr)), err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("bootstrap address %s: the port is not 1 to 65535", short(strconv.Quote(addr)))
	}
	return host, nil
}

// cause strips what every error of a call would say (method, URL) and names
// the deadline; the error under it stays reachable.
func cause(ctx context.Context, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("no complete answer before the deadline: %w", context.DeadlineExceeded)
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Canceled
	}
	if text := err.Error(); len(text) > causeMost {
		return longError{text[:causeMost] + "…", err} // net/http quotes the whole line of what is no HTTP
	}
	return err
}

const causeMost = 400 // bytes of a cause's text

// longError is an error with what a peer sent in it cut short.
type longError struct {
	text string
	err  error
}

func (e longError) Error() string { return e.text }
func (e longError) Unwrap() error { return e.err }

// IsLocal says that the error is this process's own and tells nothing about
// the peer: no descriptor or port was left, or the caller cancelled. A passed
// deadline is the peer's.
func IsLocal(err error) bool {
	if errors.Is(err, context.Canceled) {
		return true
	}
	for _, own := range localErrnos {
		if errors.Is(err, own) {
			return true
		}
	}
	// The resolver tells its socket's errors as text only.
	var dns *net.DNSError
	return errors.As(err, &dns) && (strings.Contains(dns.Err, syscall.EMFILE.Error()) || strings.Contains(dns.Err, syscall.ENFILE.Error()))
}

// ParseAllow makes a ClientConfig.Allow of host names, addresses and CIDR
// blocks. A name is allowed only by its own text, whatever it resolves to.
// An empty list gives nil.
func ParseAllow(list []string) (func(host string) bool, error) {
	if len(list) == 0 {
		return nil, nil
	}
	var blocks []netip.Prefix
	names := map[string]bool{}
	for _, item := range list {
		if block, err := netip.ParsePrefix(item); err == nil {
			blocks = append(blocks, block.Masked())
		} else if ip, err := netip.ParseAddr(strings.Trim(item, "[]")); err == nil {
			ip = ip.Unmap()
			blocks = append(blocks, netip.PrefixFrom(ip, ip.BitLen()))
		} else if name, err := CheckHost(item); err == nil {
			names[strings.ToLower(name)] = true
		} else {
			return nil, fmt.Errorf("%q is no host name, address or CIDR block such as 10.1.0.0/16", item)
		}
	}
	return func(host string) bool {
		ip, err := netip.ParseAddr(host)
		if err != nil {
			return names[strings.ToLower(host)]
		}
		for _, block := range blocks {
			if block.Contains(ip.Unmap()) {
				return true
			}
		}
		return false
	}, nil
}
