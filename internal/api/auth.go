package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
)

// Tokens are the bearer tokens that callers may present. They can be replaced
// while they are in use; copies share them. The zero value holds none for good:
// then nobody has to present one.
type Tokens struct {
	sums *atomic.Pointer[[][sha256.Size]byte]
}

// NewTokens keeps the digests of the given tokens.
func NewTokens(tokens ...string) Tokens {
	t := Tokens{new(atomic.Pointer[[][sha256.Size]byte])}
	t.Replace(tokens...)
	return t
}

// Replace makes these the tokens from now on. t must come from NewTokens.
func (t Tokens) Replace(tokens ...string) {
	sums := make([][sha256.Size]byte, len(tokens))
	for i, s := range tokens {
		sums[i] = sha256.Sum256([]byte(s))
	}
	t.sums.Store(&sums)
}

// Empty says that no token is configured.
func (t Tokens) Empty() bool { return t.sums == nil || len(*t.sums.Load()) == 0 }

// Valid says whether the token is one of ours, in a time that does not depend
// on how much of it is right.
func (t Tokens) Valid(token string) bool {
	if t.sums == nil {
		return false
	}
	sum, ok := sha256.Sum256([]byte(token)), 0
	for _, s := range *t.sums.Load() {
		ok |= subtle.ConstantTimeCompare(sum[:], s[:])
	}
	return ok == 1
}

// Secret is a token that we present. It can be replaced while it is in use, and
// does not show itself in logs. A nil one is empty.
type Secret struct{ value atomic.Pointer[string] }

// NewSecret is a secret with this value.
func NewSecret(value string) *Secret {
	s := new(Secret)
	s.Replace(value)
	return s
}

// Replace makes this the value from now on.
func (s *Secret) Replace(value string) { s.value.Store(&value) }

// Value is the token, "" when there is none.
func (s *Secret) Value() string {
	if s == nil {
		return ""
	}
	if v := s.value.Load(); v != nil {
		return *v
	}
	return ""
}

// String tells only whether there is one.
func (s *Secret) String() string {
	if s.Value() == "" {
		return "no token"
	}
	return "a token"
}

// GoString keeps %#v from showing it.
func (s *Secret) GoString() string { return s.String() }

// Authorize judges an Authorization header: nil, unauthorized when there is no
// bearer token, forbidden when it is a wrong one.
func (t Tokens) Authorize(header string) *Error {
	if t.Empty() {
		return nil
	}
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return Errorf(Unauthorized, "a bearer token is needed: Authorization: Bearer TOKEN")
	}
	if !t.Valid(strings.TrimSpace(token)) {
		return Errorf(Forbidden, "the bearer token is not one of this server's")
	}
	return nil
}

// AuthorizeDebug judges a caller of a debug page: those on this machine are let
// in, others with a token only.
func (t Tokens) AuthorizeDebug(r *http.Request) *Error {
	if FromLoopback(r) {
		return nil
	}
	if t.Empty() {
		return Errorf(Forbidden, "this page is for callers on its own machine, or with a token (--token-file)")
	}
	return t.Authorize(r.Header.Get("Authorization"))
}

// FromLoopback tells whether the caller is on this machine.
func FromLoopback(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}
