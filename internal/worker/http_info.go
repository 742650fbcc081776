package worker

import (
	"context"
	"net/http"
	"os"
	"time"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/bootstrap"
)

func (h *httpSide) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": h.name, "object": "model", "created": h.started.Unix(), "owned_by": "metronome", "max_model_len": h.context}}})
}

func (h *httpSide) modelInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, map[string]any{"model_path": h.cfg.Model, "tokenizer_path": h.cfg.Model, "served_model_name": h.name,
		"is_generation": true, "context_length": h.context, "vocab_size": h.text.vocab(), "fingerprint": h.w.Fingerprint()})
}

func (h *httpSide) serverInfo(w http.ResponseWriter, _ *http.Request) {
	c := h.cfg
	writeJSON(w, map[string]any{"role": c.Role, "instance": h.w.Instance(), "pid": os.Getpid(), "model_path": c.Model, "served_model_name": h.name,
		"disaggregation_mode": map[Role]string{Prefill: "prefill", Decode: "decode", Serve: "null"}[c.Role],
		"engine":              c.Engine, "tp_size": c.TP, "dp_size": c.DP, "page_size": c.PageSize, "kv_cache_dtype": c.KVDType, "context_length": h.context,
		"max_total_num_tokens": h.poolTokens, "max_running_requests": c.MaxRunning, "chunked_prefill_size": c.Chunk, "uptime_seconds": time.Since(h.started).Seconds()})
}

// tokenizerInfo is what vLLM's path of this name tells: enough for a client
// that tokenises over HTTP, such as lm-eval's.
func (h *httpSide) tokenizerInfo(w http.ResponseWriter, _ *http.Request) {
	bos, eos := h.text.ends()
	writeJSON(w, map[string]any{"tokenizer_class": "metronome", "bos_token": bos, "eos_token": eos, "pad_token": nil,
		"vocab_size": h.text.vocab(), "model_max_length": h.context})
}

func (h *httpSide) tokenize(w http.ResponseWriter, r *http.Request) {
	data, e := body(w, r)
	var in *api.Tokenize
	if e == nil {
		in, e = api.ParseTokenize(data)
	}
	ids := []int32{}
	switch {
	case e != nil:
	case in.Messages != nil:
		ids, e = h.text.chat(in.Messages, in.Generation)
	default:
		ids = append(ids, h.text.encode(in.Text, in.Begin, in.Special)...)
	}
	if e == nil {
		e = writeJSON(w, map[string]any{"tokens": ids, "count": len(ids), "max_model_len": h.context})
	}
	if e != nil {
		api.WriteError(w, e)
	}
}

func (h *httpSide) detokenize(w http.ResponseWriter, r *http.Request) {
	data, e := body(w, r)
	var ids []int32
	if e == nil {
		ids, e = api.ParseDetokenize(data, h.text.vocab())
	}
	if e == nil {
		text := h.text.decode(ids)
		e = writeJSON(w, map[string]any{"text": text, "prompt": text})
	}
	if e != nil {
		api.WriteError(w, e)
	}
}

func (h *httpSide) abortRequest(w http.ResponseWriter, r *http.Request) {
	data, e := body(w, r)
	var rid string
	var all bool
	if e == nil {
		rid, all, e = api.ParseAbort(data)
	}
	if e != nil {
		api.WriteError(w, e)
		return
	}
	writeJSON(w, map[string]any{"aborted": h.abortRID(rid, all)})
}

// readyz says whether this worker can serve now, and if not, why.
func (h *httpSide) readyz(w http.ResponseWriter, _ *http.Request) {
	if err := h.healthy(); err != nil {
		api.WriteError(w, err)
		return
	}
	writeJSON(w, map[string]any{"ready": true})
}

// health is SGLang's: the loop and the engine have got on within the window, and
// the worker is neither starting nor draining.
func (h *httpSide) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(bootstrap.InstanceHeader, h.w.Instance())
	w.Header().Set(bootstrap.FingerprintHeader, h.w.Fingerprint())
	if err := h.healthy(); err != nil {
		api.WriteError(w, err)
	}
}

func (h *httpSide) healthy() *api.Error {
	if err := h.w.Status(); err != nil {
		return err
	}
	if h.w.Ticked() == nil {
		return nil
	}
	time.Sleep(api.SecondLook) // if all of this process stood still, the loop has its turn now
	return h.w.Ticked()
}

// healthGenerate proves that the loops turn by asking each for its table: that
// takes one turn, and none of the engine's time, however busy the worker is.
func (h *httpSide) healthGenerate(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), h.cfg.HealthWindow)
	defer cancel()
	if err := h.healthy(); err != nil {
		api.WriteError(w, err)
		return
	}
	if _, err := h.w.Requests(ctx); err != nil {
		api.WriteError(w, api.Errorf(api.Internal, "the loop has not turned for %v", h.cfg.HealthWindow).With(http.StatusServiceUnavailable))
	}
}

func (h *httpSide) debugPeers(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	h.debug(w, func() (any, error) { return h.w.Peers(ctx) })
}

func (h *httpSide) debug(w http.ResponseWriter, f func() (any, error)) {
	v, err := f()
	if err != nil {
		api.WriteError(w, api.Errorf(api.Internal, "the loop did not answer: %v", err))
		return
	}
	writeJSON(w, v)
}
