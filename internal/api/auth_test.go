package api

import (
	"fmt"
	"testing"
)

// Tokens may be replaced while they are in use: whoever holds a copy sees it.
func TestTokensAreReplaced(t *testing.T) {
	var none Tokens
	if !none.Empty() || none.Valid("") || none.Authorize("") != nil {
		t.Error("without tokens nobody has to present one, and none is valid")
	}
	a := NewTokens("old", "both")
	b := a
	see := func(token string, want Code) {
		t.Helper()
		got := Code("")
		if err := b.Authorize("Bearer " + token); err != nil {
			got = err.Code
		}
		if got != want {
			t.Errorf("%q: %q, want %q", token, got, want)
		}
	}
	see("old", "")
	see("both", "")
	see("new", Forbidden)
	see("", Unauthorized)
	a.Replace("both", "new")
	see("old", Forbidden)
	see("both", "")
	see("new", "")
	see("ne", Forbidden)
}

// A secret can be replaced, and no way of printing shows it.
func TestSecret(t *testing.T) {
	var none *Secret
	s := NewSecret("one")
	s.Replace("hunter2")
	if none.Value() != "" || s.Value() != "hunter2" {
		t.Errorf("%q, %q", none.Value(), s.Value())
	}
	if got := fmt.Sprintf("%v %+v %#v %s", s, s, s, s); got != "a token a token a token a token" {
		t.Error(got)
	}
}
