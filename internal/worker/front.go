package worker

import (
	"io"
	"net/http"

	"github.com/metronome-serve/metronome/internal/api"
)

// newFront makes the HTTP side.
func newFront(w *Worker) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "ok\n") })
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) {
		if err := w.Status(); err != nil {
			api.WriteError(rw, err)
			return
		}
		io.WriteString(rw, "ready\n")
	})
	mux.Handle("GET /metrics", w.metrics.Handler())
	return mux, nil
}
