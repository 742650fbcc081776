package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
)

// ServerConfig is what a Server needs to know. Zero takes the default in brackets.
type ServerConfig struct {
	Bind            string                  // host or host:port that Serve's listener is bound to; "" is a wildcard
	Tokens          func(token string) bool // says whether a caller's bearer token may write [nil: no token is configured]
	AllowOpenWrites bool                    // without Tokens: serve writes on a bind that is not loopback (the network is trusted)
	AnnounceHTTP    bool                    // tell decodes the HTTP port of an SGLang prefill (decodes before 0.5.20 refuse the answer then)
	Metrics         http.Handler            // GET /metrics [404]
	Log             *slog.Logger            // [discard]
}

// Limits of a registry. Body and request line are SGLang's.
const (
	bodyMax        = 1 << 20          // bytes; 413 beyond
	requestLineMax = 8190             // bytes; 400 beyond
	headerMax      = 64 << 10         // bytes; 431 beyond
	headerTimeout  = 10 * time.Second // first byte of a connection to the end of the header
	readTimeout    = 20 * time.Second // header and body; a slower one is cut
	writeTimeout   = 30 * time.Second // from the header on
	idleTimeout    = 75 * time.Second // between two requests; SGLang's
	connsMax       = 4096             // open connections; the longest silent one makes room
)

// Server is a bootstrap registry over HTTP: SGLang's wire, with 400 and our
// error body where SGLang's answers 500. A refused request changes nothing.
// Safe for concurrent use.
type Server struct {
	cfg   ServerConfig
	open  bool // writes are allowed without a token
	start time.Time

	mu    sync.Mutex // held for microseconds, never over I/O
	table *Table
}

// NewServer makes a registry that knows nothing yet.
func NewServer(cfg ServerConfig) *Server {
	if host, _, err := net.SplitHostPort(cfg.Bind); err == nil {
		cfg.Bind = host
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{
		cfg:   cfg,
		open:  cfg.Tokens == nil && (cfg.AllowOpenWrites || loopback(cfg.Bind)),
		start: time.Now(),
		table: NewTable(TableConfig{Bind: cfg.Bind, AnnounceHTTP: cfg.AnnounceHTTP}),
	}
}

// Serve answers on the listener until ctx ends, then closes it and every
// connection and returns nil. It refuses to start where anybody on the network
// could write.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	host, _, err := net.SplitHostPort(ln.Addr().String())
	if s.cfg.Tokens == nil && !s.cfg.AllowOpenWrites && (err != nil || !loopback(host)) {
		ln.Close()
		return fmt.Errorf("bootstrap registry on %s without a token: anybody who reaches it could reroute KV; give a token file, listen on a loopback address, or pass --insecure", ln.Addr())
	}
	gate := newGate(api.LookingTwice(ln), connsMax)
	server := &http.Server{
		Handler: s, ConnState: gate.state,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: headerMax,
		ErrorLog:       slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(gate) }()
	select {
	case err = <-served:
		return fmt.Errorf("bootstrap registry on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	// Answers take microseconds: what is under way may end, what hangs is cut.
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 500*time.Millisecond)
	defer cancel()
	if server.Shutdown(grace) != nil {
		server.Close()
	}
	<-served
	return nil
}

// ServeHTTP answers one request. Where it is used without Serve, the deadlines
// of reading and writing are the caller's.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if n := len(r.Method) + len(r.RequestURI) + len(r.Proto) + 2; n > requestLineMax {
		w.Header().Set("Connection", "close")
		s.refuse(w, r, api.Errorf(api.InvalidRequest, "the request line has %d bytes, want at most %d", n, requestLineMax))
		return
	}
	switch r.URL.Path {
	case "/route":
		switch r.Method {
		case http.MethodGet:
			s.route(w, r)
		case http.MethodPut:
			s.write(w, r, s.register)
		default:
			w.Header().Set("Content-Type", "application/json; charset=utf-8")
			w.WriteHeader(http.StatusMethodNotAllowed)
			io.WriteString(w, "Method not allowed")
		}
	case "/register_dp_rank":
		if only(w, r, http.MethodPost) {
			s.write(w, r, s.setRank)
		}
	case "/query_dp_ranks":
		if only(w, r, http.MethodPost) {
			s.queryRanks(w, r)
		}
	case "/health":
		if only(w, r, http.MethodGet, http.MethodHead) {
			s.mu.Lock()
			info, _, _ := s.table.Info()
			s.mu.Unlock()
			identify(w, &info)
			text(w, http.StatusOK, "OK")
		}
	case "/livez", "/readyz":
		if only(w, r, http.MethodGet, http.MethodHead) {
			text(w, http.StatusOK, "OK")
		}
	case "/metrics":
		if s.cfg.Metrics == nil {
			text(w, http.StatusNotFound, "404: Not Found")
		} else if only(w, r, http.MethodGet, http.MethodHead) {
			s.cfg.Metrics.ServeHTTP(w, r)
		}
	default:
		text(w, http.StatusNotFound, "404: Not Found")
	}
}

// write answers a request that changes the table, if the caller may.
func (s *Server) write(w http.ResponseWriter, r *http.Request, change func(body []byte, r *http.Request) *api.Error) {
	if !s.authorized(r) {
		s.refuse(w, r, api.Errorf(api.Unauthorized, "Unauthorized: a write to the bootstrap registry needs its bearer token"))
		return
	}
	body, refusal := s.body(w, r)
	if refusal == nil {
		refusal = change(body, r)
	}
	if refusal != nil {
		s.refuse(w, r, refusal)
		return
	}
	text(w, http.StatusOK, "OK")
}

func (s *Server) authorized(r *http.Request) bool {
	if s.cfg.Tokens == nil {
		return s.open
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "Bearer") && s.cfg.Tokens(strings.TrimSpace(token))
}

// body reads a whole body within the limits. The deadline is the connection's.
func (s *Server) body(w http.ResponseWriter, r *http.Request) ([]byte, *api.Error) {
	if r.ContentLength > bodyMax {
		w.Header().Set("Connection", "close")
		return nil, api.Errorf(api.BodyTooLarge, "the body has %d bytes, want at most %d", r.ContentLength, bodyMax)
	}
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
	var large *http.MaxBytesError
	var late net.Error
	switch {
	case err == nil:
		return b, nil
	case errors.As(err, &large):
		return nil, api.Errorf(api.BodyTooLarge, "the body has more than %d bytes", bodyMax)
	case errors.As(err, &late) && late.Timeout():
		w.Header().Set("Connection", "close")
		return nil, &api.Error{Code: api.DeadlineExceeded, Status: http.StatusRequestTimeout, Message: fmt.Sprintf("the body was not complete within %s", readTimeout)}
	}
	w.Header().Set("Connection", "close")
	return nil, api.Errorf(api.InvalidRequest, "the body ended early: %v", err)
}

// register is PUT /route.
func (s *Server) register(body []byte, r *http.Request) *api.Error {
	reg, err := parseRegistration(body)
	if err != nil {
		return api.Errorf(api.InvalidRequest, "%v", err)
	}
	reg.Instance, reg.Fingerprint = r.Header.Get(InstanceHeader), r.Header.Get(FingerprintHeader)
	for name, value := range map[string]string{InstanceHeader: reg.Instance, FingerprintHeader: reg.Fingerprint} {
		if value != visible(value) {
			return api.Errorf(api.InvalidRequest, "the header %s is no word of at most %d visible ASCII bytes", name, maxWord)
		}
	}
	s.mu.Lock()
	refusal := s.table.Register(reg)
	_, registered, ready := s.table.Info()
	s.mu.Unlock()
	if refusal == nil {
		s.cfg.Log.Info("prefill rank registered", "rank", reg.Rank.String(), "addr", net.JoinHostPort(reg.IP, fmt.Sprint(reg.Port)),
			"instance", reg.Instance, "registered", registered, "ready", ready)
		return nil
	}
	e := api.Errorf(api.InvalidRequest, "%s", refusal.Text)
	if refusal.Kind == DeadInstance {
		e.Status = http.StatusConflict
	}
	return e
}

// setRank is POST /register_dp_rank.
func (s *Server) setRank(body []byte, _ *http.Request) *api.Error {
	room, dp, err := parseRoom(body)
	if err != nil {
		return api.Errorf(api.InvalidRequest, "%v", err)
	}
	s.mu.Lock()
	s.table.SetRank(time.Since(s.start), room, dp)
	s.mu.Unlock()
	return nil
}

func (s *Server) queryRanks(w http.ResponseWriter, r *http.Request) {
	body, refusal := s.body(w, r)
	if refusal != nil {
		s.refuse(w, r, refusal)
		return
	}
	rooms, err := parseRooms(body)
	if err != nil {
		s.refuse(w, r, api.Errorf(api.InvalidRequest, "%v", err))
		return
	}
	slices.Sort(rooms)
	rooms = slices.Compact(rooms)
	now := time.Since(s.start)
	s.mu.Lock()
	answer := appendRanks(nil, rooms, func(room int64) (int, bool) { return s.table.RankOf(now, room) })
	s.mu.Unlock()
	respond(w, http.StatusOK, "application/json; charset=utf-8", answer)
}

// route is GET /route: the topology query when all four ranks are -1, else the
// query of one rank.
func (s *Server) route(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	var raw [4]string
	var n [4]int64
	for i, key := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		if raw[i] = query.Get(key); raw[i] == "" {
			text(w, http.StatusBadRequest, "Missing inputs for bootstrap server.")
			return
		}
		var err error
		if n[i], err = decimal(raw[i]); err != nil && !errors.Is(err, strconv.ErrRange) {
			s.refuse(w, r, api.Errorf(api.InvalidRequest, "%s is %q, want an integer", key, short(raw[i])))
			return
		}
	}
	topology := n == [4]int64{-1, -1, -1, -1}
	rank := Rank{DP: int(n[0]), CP: int(n[1]), TP: int(n[2]), PP: int(n[3])}
	s.mu.Lock()
	info, registered, ready := s.table.Info()
	ip, port, found := s.table.Address(rank)
	s.mu.Unlock()

	identify(w, &info)
	switch {
	case !ready:
		text(w, http.StatusServiceUnavailable, fmt.Sprintf("Prefill server not fully registered yet (%d workers registered).", registered))
	case topology:
		answerJSON(w, info.body)
	case !found:
		text(w, http.StatusNotFound, fmt.Sprintf("Bootstrap info not found for dp_rank=%s cp_rank=%s tp_rank=%s pp_rank=%s", raw[0], raw[1], raw[2], raw[3]))
	default:
		answerJSON(w, rankBody{ip, port}.body)
	}
}

// refuse answers with our error body; SGLang's clients look at the status only.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, e *api.Error) {
	s.cfg.Log.Warn("bootstrap registry refused", "method", r.Method, "path", short(r.URL.Path), "from", r.RemoteAddr, "status", e.HTTPStatus(), "cause", e.Message)
	api.WriteError(w, e)
}

// only answers 405 unless the method is one of those.
func only(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if slices.Contains(methods, r.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ","))
	text(w, http.StatusMethodNotAllowed, "405: Method Not Allowed")
	return false
}

// identify tells who answers, as far as it is known.
func identify(w http.ResponseWriter, info *Info) {
	if info.Instance != "" {
		w.Header().Set(InstanceHeader, info.Instance)
	}
	if info.Fingerprint != "" {
		w.Header().Set(FingerprintHeader, info.Fingerprint)
	}
}

func text(w http.ResponseWriter, status int, s string) {
	respond(w, status, "text/plain; charset=utf-8", []byte(s))
}

func answerJSON(w http.ResponseWriter, body func() ([]byte, error)) {
	b, err := body()
	if err != nil {
		api.WriteError(w, api.Errorf(api.Internal, "%v", err))
		return
	}
	respond(w, http.StatusOK, "application/json; charset=utf-8", b)
}

func respond(w http.ResponseWriter, status int, contentType string, body []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	w.WriteHeader(status)
	w.Write(body)
}
