package worker

import (
	"context"
	"fmt"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/model"
)

// ReadyLine is what a worker says of itself when it can serve.
type ReadyLine struct {
	Ready     bool     `json:"ready"`
	Role      Role     `json:"role"`
	HTTP      string   `json:"http"`
	Bootstrap string   `json:"bootstrap,omitempty"`
	KV        []string `json:"kv,omitempty"`
	PID       int      `json:"pid"`
	Instance  string   `json:"instance"`
}

// ExitError is why Run returned when the process must end with a status other
// than 0.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return fmt.Sprintf("exit %d: %v", e.Code, e.Err) }
func (e *ExitError) Unwrap() error { return e.Err }

// Worker is one prefill, decode or serve process.
type Worker struct{}

// New checks the configuration, loads the model, takes the memory and binds
// the listeners, so that an error is one of usage. Nothing runs before Run.
func New(cfg Config) (*Worker, error) { panic("being built") }

// Run serves until ctx ends, then drains: it takes no new jobs, waits for the
// open ones at most Config.Drain, ends the rest with a named error and
// returns when every goroutine has. A fatal mismatch ends it with *ExitError.
func (w *Worker) Run(ctx context.Context) error { panic("being built") }

// Ready receives one line when the worker can serve (a prefill: when it is registered).
func (w *Worker) Ready() <-chan ReadyLine { panic("being built") }

// Submit takes a job. nil: taken, and exactly one End follows in its Box.
func (w *Worker) Submit(j *Job) *api.Error { panic("being built") }

// Abort ends a taken job with this cause, in whatever phase it is. It never
// blocks; a job that has ended ignores it.
func (w *Worker) Abort(j *Job, cause *api.Error) { panic("being built") }

// StopAt is the verdict of a job's reader: the answer ends before output token
// index (a stop string was met). It never blocks.
func (w *Worker) StopAt(j *Job, index int) { panic("being built") }

// Config is what the worker runs with, defaults filled in.
func (w *Worker) Config() *Config { panic("being built") }

// Model is the model file, nil with the sim engine.
func (w *Worker) Model() *model.File { panic("being built") }

// RequestRow is one request in the live table.
type RequestRow struct {
	RID    string  `json:"rid"`
	Phase  string  `json:"phase"`
	Age    float64 `json:"age_seconds"`
	Prompt int     `json:"prompt_tokens"`
	Output int     `json:"output_tokens"`
	Room   int64   `json:"room"`
	DP     int     `json:"dp_rank"`
	Addr   string  `json:"bootstrap,omitempty"`
}

// PeerRow is one bootstrap address in the live table.
type PeerRow struct {
	Addr     string `json:"addr"`
	DP       int    `json:"dp_rank"`
	State    string `json:"state"`
	Attempts int    `json:"attempts"`
	InFlight bool   `json:"in_flight"`
	Waiting  int    `json:"waiting"`
	Instance string `json:"instance,omitempty"`
	Last     string `json:"last_error,omitempty"`
}

// Requests is the live table of requests. The loops answer between two turns;
// ctx bounds the wait.
func (w *Worker) Requests(ctx context.Context) ([]RequestRow, error) { panic("being built") }

// Peers is the live table of what the decode cores know of each prefill.
func (w *Worker) Peers(ctx context.Context) ([]PeerRow, error) { panic("being built") }

// Status says whether the worker can serve now: nil, or a starting, draining
// or internal error that says why not.
func (w *Worker) Status() *api.Error { panic("being built") }

// Ticked says whether every loop has turned within the health window.
func (w *Worker) Ticked() bool { panic("being built") }
