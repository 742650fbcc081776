//metronome:pure

package sched

import "fmt"

// maxRanks bounds each size that a registry may claim. A larger one is
// malformed: it would only make us ask for ranks that cannot exist.
const maxRanks = 1024

// malformed says what makes a registry's answer unusable, or "". Such an answer
// is a failed attempt, not a mismatch: nothing can be concluded from it.
func malformed(p *ParallelInfo) string {
	for _, s := range [...]struct {
		name string
		size int
	}{{"attn_tp_size", p.TP}, {"attn_cp_size", p.CP}, {"dp_size", p.DP}, {"pp_size", p.PP}} {
		if s.size < 1 || s.size > maxRanks {
			return fmt.Sprintf("malformed answer: %s is %d, it must be 1 … %d", s.name, s.size, maxRanks)
		}
	}
	if p.PageSize < 0 {
		return fmt.Sprintf("malformed answer: page_size is %d, it must be at least 1 or null", p.PageSize)
	}
	if ranks := p.TP * p.CP * p.PP; ranks > maxRanks {
		return fmt.Sprintf("malformed answer: %d ranks (tp %d, cp %d, pp %d), at most %d", ranks, p.TP, p.CP, p.PP, maxRanks)
	}
	return ""
}

// mismatch says why this decode worker cannot take KV from the prefill p behind
// addr, or nil. The texts begin as SGLang's where it has one, name both values
// and what to set. A value that one side does not tell matches anything.
func mismatch(local *ParallelInfo, dcp int, addr string, p *ParallelInfo) *Error {
	if err := mismatchPages(local, addr, p); err != nil {
		return err
	}
	if !same(local.KVLayout, p.KVLayout) {
		return errorf(PeerMismatch, "KV layout mismatch: prefill %s uses %q, this decode worker %q; run both with the same KV layout", addr, p.KVLayout, local.KVLayout)
	}
	if ours, theirs := orEarly(local.AllocationPolicy), orEarly(p.AllocationPolicy); ours != theirs {
		return errorf(PeerMismatch, "Decode allocation policy mismatch: prefill %s expects %q, this decode worker uses %q; set the prefill's decode allocation policy to %q", addr, theirs, ours, ours)
	}
	if err := mismatchSizes(local, dcp, addr, p); err != nil {
		return err
	}
	return mismatchModel(local, addr, p)
}

// mismatchPages judges what a registry answer and a WELCOME both tell.
func mismatchPages(local *ParallelInfo, addr string, p *ParallelInfo) *Error {
	if local.PageSize != 0 && p.PageSize != 0 && local.PageSize != p.PageSize {
		return errorf(PeerMismatch, "Page size mismatch: prefill %s has %d tokens a page, this decode worker %d; start both with the same --page-size", addr, p.PageSize, local.PageSize)
	}
	if ours, theirs := told(local.KVDType), told(p.KVDType); !same(ours, theirs) {
		return errorf(PeerMismatch, "KV cache dtype mismatch: prefill %s has %q, this decode worker %q; start both with the same --kv-dtype", addr, theirs, ours)
	}
	return nil
}

func mismatchSizes(local *ParallelInfo, dcp int, addr string, p *ParallelInfo) *Error {
	if dcp > 1 {
		why := "our KV pool would have to be MLA, and it is not"
		switch {
		case p.CP != 1:
			why = fmt.Sprintf("the prefill's cp size would have to be 1, and it is %d", p.CP)
		case p.KVSharding:
			why = "the prefill would have to run without KV cache sharding, and it shards"
		}
		return errorf(PeerMismatch, "Decode context parallel mismatch: this decode worker has dcp size %d with prefill %s (cp size %d): %s; set dcp to 1", dcp, addr, p.CP, why)
	}
	if local.CP != 1 {
		return errorf(PeerMismatch, "CP size mismatch: this decode worker has cp size %d, prefill %s cp size %d; decode must have cp size 1", local.CP, addr, p.CP)
	}
	if local.TP%p.TP != 0 && p.TP%local.TP != 0 {
		return errorf(PeerMismatch, "TP size mismatch: prefill %s has tp size %d, this decode worker %d, and neither divides the other; choose --tp so that one does", addr, p.TP, local.TP)
	}
	if local.PP != 1 && local.PP != p.PP {
		return errorf(PeerMismatch, "PP size mismatch: prefill %s has pp size %d, this decode worker %d; decode must have the same or 1", addr, p.PP, local.PP)
	}
	return nil
}

func mismatchModel(local *ParallelInfo, addr string, p *ParallelInfo) *Error {
	if !same(local.Fingerprint, p.Fingerprint) {
		return errorf(PeerMismatch, "Model fingerprint mismatch: prefill %s runs %s, this decode worker %s; start both with the same model file, version, --precision, --kv-dtype, --page-size and --context", addr, p.Fingerprint, local.Fingerprint)
	}
	return nil
}

// mismatchWelcome judges what a prefill says of itself in a link's handshake.
func mismatchWelcome(local *ParallelInfo, addr string, w *Welcome) *Error {
	p := ParallelInfo{PageSize: w.PageSize, KVDType: w.KVDType, Fingerprint: w.Fingerprint}
	if err := mismatchPages(local, addr, &p); err != nil {
		return err
	}
	return mismatchModel(local, addr, &p)
}

// same compares two words of which an absent one equals any.
func same(a, b string) bool { return a == "" || b == "" || a == b }

// told is the dtype word, or "" where it says nothing.
func told(dtype string) string {
	if dtype == "auto" {
		return ""
	}
	return dtype
}

func orEarly(policy string) string {
	if policy == "" {
		return "early"
	}
	return policy
}
