package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"strings"
)

// Tokens are the bearer tokens that callers may present. The zero value holds
// none: then nobody has to present one.
type Tokens struct{ sums [][sha256.Size]byte }

// NewTokens keeps the digests of the given tokens.
func NewTokens(tokens ...string) Tokens {
	var t Tokens
	for _, s := range tokens {
		t.sums = append(t.sums, sha256.Sum256([]byte(s)))
	}
	return t
}

// Empty says that no token is configured.
func (t Tokens) Empty() bool { return len(t.sums) == 0 }

// Valid says whether the token is one of ours, in a time that does not depend
// on how much of it is right.
func (t Tokens) Valid(token string) bool {
	sum, ok := sha256.Sum256([]byte(token)), 0
	for i := range t.sums {
		ok |= subtle.ConstantTimeCompare(sum[:], t.sums[i][:])
	}
	return ok == 1
}

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
