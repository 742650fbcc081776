//go:build !amd64

package bench

func best() routines { return routines{read: readWords} }
