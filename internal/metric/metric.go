// Package metric holds every Prometheus metric of a Metronome process.
//
// A process makes one Set with New and serves Set.Handler at GET /metrics. All
// roles offer all names, so a dashboard never misses one; what a role does not
// do stays at zero. Names are a promise: metrics are added, never renamed. The
// part after "metronome_" is SGLang's where SGLang has the same thing.
//
// # On the loop
//
// Counters, gauges and histograms held in fields are atomics without a lock:
// Inc, Add, Set and Observe cost 10 to 60 ns each (BenchmarkLoopHooks) and may
// be called on a worker's loop. A scrape reads them without making writers
// wait. Labelled.With takes a lock and a map lookup: call it once, off the
// loop, and keep the counter or gauge that it returns.
//
// # Labels
//
// Label values are bounded: a Labelled takes at most maxValues words of
// [a-z0-9_], 40 bytes at most, and counts everything else under "other". No
// request id and no free text can become a series.
package metric

import (
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Set is the metrics of one process. The comments give the name after the
// prefix "metronome_".
type Set struct {
	// The decode loop.
	Beat        prometheus.Histogram           // beat_seconds: gap between two decode batches while any sequence runs
	LoopBusy    prometheus.Histogram           // loop_busy_seconds: time in one turn of the loop outside the batch
	LoopOverrun Labelled[prometheus.Counter]   // loop_overrun_total{where}: turns longer than their limit
	Running     prometheus.Gauge               // num_running_reqs: sequences in the running batch
	Queued      prometheus.Gauge               // num_queue_reqs: requests waiting to run
	Prealloc    prometheus.Gauge               // num_decode_prealloc_queue_reqs: not yet granted pages (resolving a peer or waiting for pages)
	Transfer    prometheus.Gauge               // num_decode_transfer_queue_reqs: granted, KV not complete
	Bootstrap   prometheus.Gauge               // num_prefill_bootstrap_queue_reqs: waiting for the decode leg
	Inflight    prometheus.Gauge               // num_prefill_inflight_queue_reqs: computed, KV not yet delivered
	Pages       Pages                          // kv_pages{state}
	Fetches     Labelled[prometheus.Counter]   // parallel_info_fetch_total{result}
	FetchFlying prometheus.Gauge               // parallel_info_fetch_in_flight
	Known       prometheus.Gauge               // parallel_info_known: prefills whose parallel info is in memory
	Evicted     Labelled[prometheus.Counter]   // peer_evicted_total{cause}
	KVBytes     prometheus.Counter             // kv_transfer_bytes_total: payload bytes received (decode) or sent (prefill)
	KVLatency   prometheus.Histogram           // kv_transfer_latency_ms: grant to last page of a room
	KVRejected  Labelled[prometheus.Counter]   // kv_frames_rejected_total{cause}
	TTFT        prometheus.Histogram           // time_to_first_token_seconds
	ITL         prometheus.Histogram           // inter_token_latency_seconds
	E2E         prometheus.Histogram           // e2e_request_latency_seconds
	Prompt      prometheus.Counter             // prompt_tokens_total
	Generation  prometheus.Counter             // generation_tokens_total
	Cached      prometheus.Counter             // cached_tokens_total: prompt tokens taken from the prefix cache
	Preemptions prometheus.Counter             // preemptions_total: running requests whose pages were taken, to be computed again
	Requests    Labelled[prometheus.Counter]   // requests_total{code}: "ok" or the error's code
	Retries     prometheus.Counter             // retries_total: requests sent to another pair before the first byte
	Migrations  prometheus.Counter             // migrations_total: streams continued on another pair
	Workers     func(role, state string) Gauge // workers{role,state}: what the router knows; off the loop only

	reg *prometheus.Registry
}

// Gauge and Counter are Prometheus's, so that users of this package need not
// import it for a field's type.
type (
	Gauge   = prometheus.Gauge
	Counter = prometheus.Counter
)

// Pages are the gauges of kv_pages{state}; together they are all pages.
type Pages struct{ Free, Owned, Quarantined, Cached Gauge }

// Buckets in seconds unless said otherwise. A beat is a few milliseconds on a
// healthy worker and 5 s is one fetch's deadline: the histogram must tell both.
var (
	beatBuckets  = []float64{.001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2, 5, 10}
	turnBuckets  = []float64{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, .001, .002, .005, .01, .1, 1, 5}
	ttftBuckets  = []float64{.005, .01, .02, .05, .1, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300}
	e2eBuckets   = []float64{.01, .05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600}
	kvMSBuckets  = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000} // milliseconds
	metricPrefix = "metronome_"
)

// New makes the metrics of one process with a registry of their own. role is
// prefill, decode, serve, router or registry; it is told by the series
// metronome_info{role}.
func New(role string) *Set {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s := &Set{reg: reg}
	s.newLoop()
	s.newKV()
	s.newRequests()
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricPrefix + "info", Help: "1; the label tells this process's role."}, []string{"role"})
	reg.MustRegister(info)
	info.WithLabelValues(word(role)).Set(1)
	return s
}

func (s *Set) newLoop() {
	s.Beat = s.histogram("beat_seconds", "Gap between two decode batches while any sequence runs.", beatBuckets)
	s.LoopBusy = s.histogram("loop_busy_seconds", "Time in one turn of the loop outside the batch.", turnBuckets)
	s.LoopOverrun = s.counters("loop_overrun_total", "Turns of the loop longer than their limit, by place.", "where", "turn")
	s.Running = s.gauge("num_running_reqs", "Sequences in the running batch.")
	s.Queued = s.gauge("num_queue_reqs", "Requests waiting to run.")
	s.Prealloc = s.gauge("num_decode_prealloc_queue_reqs", "Requests on decode that have no granted pages yet.")
	s.Transfer = s.gauge("num_decode_transfer_queue_reqs", "Requests on decode whose KV is being transferred.")
	s.Bootstrap = s.gauge("num_prefill_bootstrap_queue_reqs", "Requests on prefill that wait for the decode leg.")
	s.Inflight = s.gauge("num_prefill_inflight_queue_reqs", "Requests on prefill whose KV is not delivered yet.")
}

func (s *Set) newKV() {
	pages := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricPrefix + "kv_pages", Help: "KV pages by state; the sum is all pages."}, []string{"state"})
	s.reg.MustRegister(pages)
	s.Pages = Pages{
		Free: pages.WithLabelValues("free"), Owned: pages.WithLabelValues("owned"),
		Quarantined: pages.WithLabelValues("quarantined"), Cached: pages.WithLabelValues("cached"),
	}
	s.Fetches = s.counters("parallel_info_fetch_total", "Ended fetches of a prefill's parallel info, by result.", "result", "ok", "failed", "local", "canceled")
	s.FetchFlying = s.gauge("parallel_info_fetch_in_flight", "Fetches of parallel info under way.")
	s.Known = s.gauge("parallel_info_known", "Prefills whose parallel info is in memory.")
	s.Evicted = s.counters("peer_evicted_total", "Prefill records dropped, by cause.", "cause", "heartbeat", "replaced", "idle")
	s.KVBytes = s.counter("kv_transfer_bytes_total", "KV payload bytes received (decode) or sent (prefill).")
	s.KVLatency = s.histogram("kv_transfer_latency_ms", "From the grant to the last page of a room, in milliseconds.", kvMSBuckets)
	s.KVRejected = s.counters("kv_frames_rejected_total", "KV frames refused, by cause.", "cause", "crc", "unknown_grant")
}

func (s *Set) newRequests() {
	s.TTFT = s.histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", ttftBuckets)
	s.ITL = s.histogram("inter_token_latency_seconds", "Gap between two tokens of one request.", beatBuckets)
	s.E2E = s.histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", e2eBuckets)
	s.Prompt = s.counter("prompt_tokens_total", "Prompt tokens of accepted requests.")
	s.Generation = s.counter("generation_tokens_total", "Tokens generated and counted to a request.")
	s.Cached = s.counter("cached_tokens_total", "Prompt tokens taken from the prefix cache.")
	s.Preemptions = s.counter("preemptions_total", "Running requests whose pages were taken, to be computed again.")
	s.Requests = s.counters("requests_total", "Ended requests, by error code or ok.", "code", "ok")
	s.Retries = s.counter("retries_total", "Requests sent to another pair before their first byte.")
	s.Migrations = s.counter("migrations_total", "Streams continued on another pair.")
	workers := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metricPrefix + "workers", Help: "Workers that the router knows, by role and state."}, []string{"role", "state"})
	s.reg.MustRegister(workers)
	states := bounded(func(state string) [2]Gauge {
		return [2]Gauge{workers.WithLabelValues("prefill", state), workers.WithLabelValues("decode", state)}
	}, "ready")
	s.Workers = func(role, state string) Gauge {
		pair := states.With(state)
		if role == "prefill" {
			return pair[0]
		}
		return pair[1]
	}
}

// Handler serves the metrics. It gathers at most four scrapes at a time and
// answers 503 to a fifth, so that scrapers cannot pile up.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(s.reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 5 * time.Second})
}

// Registry is for metrics of a part of its own (an experiment, a test).
func (s *Set) Registry() *prometheus.Registry { return s.reg }

func (s *Set) counter(name, help string) Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: metricPrefix + name, Help: help})
	s.reg.MustRegister(c)
	return c
}

func (s *Set) gauge(name, help string) Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: metricPrefix + name, Help: help})
	s.reg.MustRegister(g)
	return g
}

func (s *Set) histogram(name, help string, buckets []float64) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: metricPrefix + name, Help: help, Buckets: buckets})
	s.reg.MustRegister(h)
	return h
}

// counters makes a counter with one label. The known values exist from the
// start, so that the name is in the first scrape and a rate starts at zero.
func (s *Set) counters(name, help, label string, known ...string) Labelled[Counter] {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: metricPrefix + name, Help: help}, []string{label})
	s.reg.MustRegister(v)
	return bounded(func(value string) Counter { return v.WithLabelValues(value) }, known...)
}

// maxValues bounds the values of one label; the API has some twenty codes.
const maxValues = 48

// Labelled is a metric with one label of bounded values.
type Labelled[M any] struct {
	mu   *sync.Mutex
	of   map[string]M
	make func(value string) M
}

func bounded[M any](make func(string) M, known ...string) Labelled[M] {
	l := Labelled[M]{mu: new(sync.Mutex), of: map[string]M{}, make: make}
	for _, v := range known {
		l.With(v)
	}
	return l
}

// With is the metric for one value of the label. A value that is no short word
// of [a-z0-9_], or one too many, is counted as "other".
func (l Labelled[M]) With(value string) M {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m, ok := l.of[value]; ok {
		return m
	}
	if len(l.of) >= maxValues {
		value = "other"
	}
	value = word(value)
	m, ok := l.of[value]
	if !ok {
		m = l.make(value)
		l.of[value] = m
	}
	return m
}

// word is the value itself if it may be a label's value, else "other".
func word(value string) string {
	if value == "" || len(value) > 40 {
		return "other"
	}
	for _, c := range []byte(value) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return "other"
		}
	}
	return value
}
