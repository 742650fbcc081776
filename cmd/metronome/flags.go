package main

import "time"

// The flags of each role. The names are a promise (flags_test.go): flags are
// added, none is renamed. Each can also come from METRONOME_KEBAB_CASE or from
// the YAML file of --config, flag over environment over file.

type commonFlags struct {
	Advertise     string        `help:"Host that others shall reach this part by." placeholder:"HOST"`
	TokenFile     string        `help:"File with the bearer tokens that callers must present, one a line." placeholder:"FILE"`
	PeerTokenFile string        `help:"File with the bearer token that we present to peers; default: the first of --token-file." placeholder:"FILE"`
	Insecure      bool          `help:"Allow a bind that is not loopback without a token: the network is trusted."`
	LogLevel      string        `help:"Least level that is logged: debug, info, warn or error." default:"info" enum:"debug,info,warn,error"`
	LogFormat     string        `help:"Form of the log: text or json." default:"text" enum:"text,json"`
	Drain         time.Duration `help:"How long open requests may go on after SIGTERM." default:"20s"`
	JSON          bool          `help:"Print the ready line as JSON." name:"json"`
	Config        string        `help:"YAML file with settings, one for each flag." placeholder:"FILE"`
	ExitWithStdin bool          `hidden:"" help:"End when stdin closes (children of up)."`
}

type engineFlags struct {
	Engine          string        `help:"cpu computes the model, sim answers from a timing model." default:"cpu" enum:"cpu,sim"`
	Threads         int           `help:"Threads to compute with, divided among the schedulers of --dp (one each at least); 0 means one for each CPU that the process may use." default:"0"`
	Kernels         string        `help:"Instructions that the engine computes with; auto takes the best that this processor has. All give the same bits." default:"auto" enum:"auto,portable,avx2,avx512"`
	Precision       string        `help:"native computes on the weights as they are quantised, f32 on dequantised ones (slow, for reference)." default:"native" enum:"native,f32"`
	TP              int           `help:"Ranks that the KV heads are split over." name:"tp" default:"1"`
	DP              int           `help:"Independent schedulers over one copy of the weights." name:"dp" default:"1"`
	PageSize        int           `help:"Tokens in a page of KV." default:"16"`
	KVDType         string        `help:"Type of KV values: f16, f32 or q8_0; f32 too if --precision f32 and nothing else is chosen." name:"kv-dtype" default:"f16" enum:"f16,f32,q8_0"`
	KVMemory        Size          `help:"Memory for KV pages of one scheduler." name:"kv-memory" default:"512MiB"`
	KVPages         int           `help:"Number of KV pages of one scheduler, instead of --kv-memory." name:"kv-pages" default:"0"`
	Context         int           `help:"Longest prompt plus answer in tokens; 0 means the model's, at most 8192." default:"0"`
	MaxRunning      int           `help:"Sequences in one batch." default:"64"`
	ReservedTokens  int           `help:"Growth that admission to decode keeps free for each sequence ahead." default:"512"`
	MaxQueued       int           `help:"Requests that may wait." default:"512"`
	Chunk           int           `help:"Tokens of one prefill chunk." default:"512"`
	PrefixCache     bool          `help:"Keep finished prompts' pages for the next ones." default:"true" negatable:""`
	RequestTimeout  time.Duration `help:"Longest life of a request." default:"600s"`
	ServedName      string        `help:"Model name in answers; default: the model's own." placeholder:"NAME"`
	StreamOutput    bool          `help:"Stream deltas, not cumulative texts, on /generate."`
	HealthWindow    time.Duration `help:"A loop that has not turned, or an engine that has finished no layer of its batch, for so long is unhealthy." default:"20s"`
	SimPrefillRate  float64       `help:"Sim engine: prompt tokens per second." default:"20000"`
	SimDecodeBase   time.Duration `help:"Sim engine: time of one decode batch." default:"8ms"`
	SimDecodePerSeq time.Duration `help:"Sim engine: more time for each sequence of the batch." default:"100us"`
	SimKVBytes      int           `help:"Sim engine: bytes of KV for one token." name:"sim-kv-bytes" default:"2048"`
}

type prefillOnly struct {
	BootstrapListen  string        `help:"Address of the bootstrap registry inside this prefill worker." default:"${bootstrap_listen}"`
	Registry         string        `help:"Use the bootstrap registry at this address instead." placeholder:"ADDR"`
	AnnounceHTTP     bool          `help:"Add prefill_http_port to the registry's answer (SGLang decodes before 0.5.20 refuse it)." name:"announce-http"`
	KVListen         string        `help:"Address that decode workers' links are taken at, one port for each rank." name:"kv-listen" default:"127.0.0.1:0"`
	BootstrapTimeout time.Duration `help:"How long a request waits for its decode leg." default:"300s"`
}

type decodeOnly struct {
	ParallelInfoTimeout  time.Duration `help:"Total time of one attempt to learn a prefill's parallel info, rank or link." default:"5s"`
	ParallelInfoAttempts int           `help:"Attempts before the requests of an address end." default:"15"`
	ParallelInfoInterval time.Duration `help:"Time between the starts of two attempts." default:"1s"`
	HeartbeatInterval    time.Duration `help:"Time between two probes of a known prefill." default:"5s"`
	HeartbeatFailures    int           `help:"Failed probes in a row that evict a prefill." default:"2"`
	OnMismatch           string        `help:"On a layout mismatch: fatal ends the worker, reject ends that address's requests." default:"${on_mismatch}" enum:"fatal,reject"`
	ResolveTimeout       time.Duration `help:"Longest way from parallel info to a link, in all." default:"120s"`
	BootstrapAllow       []string      `help:"Bootstrap hosts or networks that may be dialled; default: any." placeholder:"HOST|CIDR" sep:","`
}

type kvTimeout struct {
	KVTimeout time.Duration `help:"Longest silence about a granted transfer." name:"kv-timeout" default:"30s"`
}

type joinFlags struct {
	Join []string `help:"Routers that this worker registers itself at, by lease." placeholder:"URL" sep:","`
}

type routerOnly struct {
	Lease          time.Duration `help:"How long a worker that has joined is a member unless it says so again." default:"10s"`
	Workers        string        `help:"File that names workers, taken over whenever it changes." placeholder:"FILE"`
	Policy         string        `help:"How a worker is chosen: least_load, cache_aware, consistent_hash, power_of_two, round_robin or random." default:"least_load"`
	PrefillPolicy  string        `help:"The same for prefill workers alone." placeholder:"POLICY"`
	DecodePolicy   string        `help:"The same for decode workers alone." placeholder:"POLICY"`
	CacheMemory    Size          `help:"Memory that cache_aware takes for what it knows of the prompts of one pool." default:"8MiB"`
	HealthInterval time.Duration `help:"Time between two probes of a worker." default:"500ms"`
	HealthTimeout  time.Duration `help:"Total time of one probe." default:"1s"`
	HealthFailures int           `help:"Failed probes in a row that take a worker out." default:"2"`
	Retries        int           `help:"Other pairs that are tried while no byte has gone to the client." default:"2"`
	Migrations     int           `help:"Times that a stream is moved to another pair after its first byte." default:"1"`
	MaxRequests    int           `help:"Requests that may run at a time; more are 429." default:"16384"`
	MaxBody        Size          `help:"Largest request body." default:"32MiB"`
	MaxEjected     Percent       `help:"Largest share of a pool that failing requests may take out." default:"50%"`
	RequestTimeout time.Duration `help:"Longest life of a request." default:"600s"`
	IdleTimeout    time.Duration `help:"Longest silence of a decode worker whose answer has begun." default:"60s"`
}

type routerCmd struct {
	Listen  string   `help:"Address for clients." default:"127.0.0.1:8000"`
	Prefill []string `help:"A prefill worker: URL, or URL,BOOTSTRAP_PORT." placeholder:"URL[,PORT]" sep:"none"`
	Decode  []string `help:"A decode worker's URL." placeholder:"URL" sep:"none"`
	commonFlags
	routerOnly
}

type prefillCmd struct {
	Model  string `arg:"" help:"Path of a GGUF file, a name that pull knows, tiny (built in), or sim with --engine sim."`
	Listen string `help:"Address for HTTP." default:"127.0.0.1:30000"`
	commonFlags
	engineFlags
	joinFlags
	prefillOnly `set:"bootstrap_listen=127.0.0.1:8998"`
	kvTimeout
}

type decodeCmd struct {
	Model  string `arg:"" help:"Path of a GGUF file, a name that pull knows, tiny (built in), or sim with --engine sim."`
	Listen string `help:"Address for HTTP." default:"127.0.0.1:30100"`
	commonFlags
	engineFlags
	joinFlags
	decodeOnly `set:"on_mismatch=fatal"`
	kvTimeout
}

// baselineCmd is a decode worker that must not be used but to be compared with.
type baselineCmd struct{ decodeCmd }

type serveCmd struct {
	Model  string `arg:"" help:"Path of a GGUF file, a name that pull knows, tiny (built in), or sim with --engine sim."`
	Listen string `help:"Address for HTTP." default:"127.0.0.1:8000"`
	commonFlags
	engineFlags
}

type registryCmd struct {
	Listen string `help:"Address for prefill and decode workers." default:"127.0.0.1:8998"`
	commonFlags
}

type upCmd struct {
	Model      string `arg:"" optional:"" default:"tiny" help:"Path of a GGUF file, a name that pull knows, tiny (built in), or sim with --engine sim."`
	Prefill    int    `help:"Number of prefill workers." default:"1"`
	Decode     int    `help:"Number of decode workers." default:"1"`
	Port       int    `help:"Port of the router." default:"8000"`
	Policy     string `help:"How the router chooses a worker: least_load, cache_aware, consistent_hash, power_of_two, round_robin or random." default:"least_load"`
	Retries    int    `help:"Other pairs that the router tries while no byte has gone to the client." default:"2"`
	Migrations int    `help:"Times that the router moves a stream to another pair after its first byte." default:"1"`
	commonFlags
	engineFlags
	joinFlags
	prefillOnly `set:"bootstrap_listen=127.0.0.1:0"`
	decodeOnly  `set:"on_mismatch=reject"`
	kvTimeout
}
