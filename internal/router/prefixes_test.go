package router

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/metronome-serve/metronome/internal/api"
	"github.com/metronome-serve/metronome/internal/metric"
)

// asking is an exchange that has read this body.
func asking(t testing.TB, body string, header ...string) *exchange {
	t.Helper()
	s, err := api.Scan([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	x := &exchange{scan: s, items: 1, req: &http.Request{Header: http.Header{}}}
	for i := 0; i < len(header); i += 2 {
		x.req.Header.Set(header[i], header[i+1])
	}
	return x
}

// tableOf is a table whose workers are all in and warm.
func tableOf(t testing.TB, policy string, memory int64, prefill, decode []string) *table {
	t.Helper()
	cfg := Default()
	cfg.Policy, cfg.CacheMemory, cfg.Prefill, cfg.Decode = policy, memory, prefill, decode
	tab, err := newTable(&cfg, metric.New("router"))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range tab.all() {
		w.standing.up = true
	}
	return tab
}

// TestPickTranscripts replays testdata/pick against a table of workers.
//
// Commands: workers NAME… [policy=…] [memory=BYTES], which keeps who is there;
// out NAME, in NAME; send ID [key=…] [session=…] [user=…] with the prompt in the
// lines below, TEXT*N for a repetition; end ID. A decode stands behind the
// prefills; it is always the same. Costs are tokens: a quarter of the bytes of
// the prompt, and 16.
func TestPickTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/pick", func(t *testing.T, path string) {
		var tab *table
		open := map[string][2]int64{}
		by := map[string]*worker{}
		loads := func(who string) string {
			var b strings.Builder
			b.WriteString(who)
			for _, w := range tab.pools[Prefill].workers {
				fmt.Fprintf(&b, " %s:%d", w.url.Hostname(), w.load)
			}
			return strings.TrimSpace(b.String())
		}
		member := func(name string) *worker {
			for _, w := range tab.all() {
				if w.url.Hostname() == name {
					return w
				}
			}
			t.Fatalf("no worker %s", name)
			return nil
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(key string) (v string) {
				if d.HasArg(key) {
					d.ScanArgs(t, key, &v)
				}
				return v
			}
			name := func(i int) string { return d.CmdArgs[i].Key }
			switch d.Cmd {
			case "workers":
				var urls []string
				for _, a := range d.CmdArgs {
					if len(a.Vals) == 0 {
						urls = append(urls, "http://"+a.Key+":1")
					}
				}
				if policy := arg("policy"); policy != "" {
					memory, _ := strconv.ParseInt(cmp.Or(arg("memory"), "65536"), 10, 64)
					tab = tableOf(t, policy, memory, urls, []string{"http://d:1"})
					return loads("")
				}
				lists, err := parseWorkers(urls, []string{"http://d:1"})
				if err != nil {
					t.Fatal(err)
				}
				tab.set(1, lists)
				for _, w := range tab.all() {
					w.standing.up = true
				}
				tab.sweep(1)
				return loads("")
			case "out", "in":
				member(name(0)).standing.up = d.Cmd == "in"
				return loads("")
			case "send":
				text, times, ok := strings.Cut(strings.TrimSpace(d.Input), "*")
				if n, err := strconv.Atoi(times); ok && err == nil {
					text = strings.Repeat(text, n)
				}
				body := fmt.Sprintf(`{"prompt":%q`, text)
				if u := arg("user"); u != "" {
					body += fmt.Sprintf(`,"user":%q`, u)
				}
				wishes := tab.wish(asking(t, body+"}", "X-SMG-Routing-Key", arg("key"), "X-Session-Id", arg("session")))
				got, cost, e := tab.pickPair(0, &wishes, [2][]*worker{})
				if e != nil {
					return e.Message
				}
				open[name(0)], by[name(0)] = cost, got[Prefill]
				return loads(fmt.Sprintf("%s costs %d:", got[Prefill].url.Hostname(), cost[Prefill]))
			case "end":
				tab.release(by[name(0)], open[name(0)][Prefill])
				return loads("")
			}
			t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
			return ""
		})
	})
}

// What two prompts share is known to an eighth of its length.
func TestPrefixesFindWhatIsShared(t *testing.T) {
	seed := maphash.MakeSeed()
	r := rand.New(rand.NewPCG(11, 0))
	a := make([]byte, 300_000)
	for i := range a {
		a[i] = byte(r.Uint32())
	}
	all := prefixesOf(nil, seed, a)
	for range 300 {
		shared := r.IntN(len(a))
		b := slices.Clone(a)
		b[shared]++
		got, n := 0, 0
		for i, h := range prefixesOf(nil, seed, b) {
			if h == all[i] {
				got = nextMark(got)
				n++
			} else if slices.Contains(all, h) {
				t.Fatalf("prefix %d of one is another prefix of the other", i)
			}
		}
		if got > shared || shared-got > max(prefixUnit, shared/prefixStep+prefixUnit) {
			t.Errorf("they share %d bytes, known are %d", shared, got)
		}
	}
	if n := len(prefixesOf(nil, seed, a[:220<<10])); n > 57 {
		t.Errorf("a prompt of 220 KB takes %d entries", n)
	}
	if n := len(prefixesOf(nil, seed, a[:prefixUnit-1])); n != 0 {
		t.Errorf("a short prompt takes %d entries", n)
	}
}

// The memory is what was given, whatever comes: 1,700 unlike prompts of 220 KB.
func TestPrefixIndexIsBounded(t *testing.T) {
	const prompts, size = 1700, 220 << 10
	seed := maphash.MakeSeed()
	prompt := make([]byte, size)
	var scratch []uint64
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	index := newPrefixIndex(Default().CacheMemory)
	for i := range prompts {
		copy(prompt, strconv.Itoa(i)+" ")
		scratch = prefixesOf(scratch[:0], seed, prompt)
		index.note(scratch, i)
		if index.holders(scratch[len(scratch)-1])>>(i%64)&1 == 0 {
			t.Fatalf("prompt %d is not known right after", i)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > Default().CacheMemory+64<<10 {
		t.Errorf("took %d bytes, want %d", grown, Default().CacheMemory)
	}
	runtime.KeepAlive(index)
}

// When it is full, what is in use stays known and what is not goes.
func TestPrefixIndexKeepsWhatIsInUse(t *testing.T) {
	seed := maphash.MakeSeed()
	index := newPrefixIndex(64 << 10)
	used := prefixesOf(nil, seed, []byte(strings.Repeat("the system prompt of all", 1000)))
	prompt := make([]byte, 8<<10)
	first := prefixesOf(nil, seed, prompt)
	index.note(first, 5)
	for i := range 4000 { // 24 times what there is room for
		copy(prompt, strconv.Itoa(i)+" ")
		if index.note(prefixesOf(nil, seed, prompt), i); i%4 == 0 {
			index.note(used, 3)
		}
	}
	for _, h := range used {
		if index.holders(h) != 1<<3 {
			t.Error("a prefix in use is forgotten")
		}
	}
	for _, h := range first {
		if index.holders(h) != 0 {
			t.Error("a prefix that was of no use for long is still there")
		}
	}
}

// A key's worker: the same whatever the order of the pool, only the keys of one
// that goes move, and keys spread evenly.
func TestKeysMoveLittle(t *testing.T) {
	pool := func(names ...string) (c []candidate) {
		for _, n := range names {
			c = append(c, candidate{usable: true, name: hashKey("http://10.0.0." + n + ":30000")})
		}
		return c
	}
	where := func(key string, names ...string) string {
		p := newPicker(ConsistentHash, 1)
		return names[p.pick(pool(names...), wish{keyed: true, key: hashKey(key), cost: 1})]
	}
	counts := map[string]int{}
	moved := 0
	const keys = 8000
	for i := range keys {
		key := "session-" + strconv.Itoa(i)
		at := where(key, "1", "2", "3", "4", "5", "6", "7", "8")
		counts[at]++
		if other := where(key, "6", "8", "7", "1", "3", "2", "5", "4"); other != at {
			t.Fatalf("key %s: worker %s, and %s when the pool is listed otherwise", key, at, other)
		}
		if without := where(key, "1", "2", "3", "4", "5", "6", "7"); without != at {
			if moved++; at != "8" {
				t.Fatalf("key %s moved from %s to %s when 8 went", key, at, without)
			}
		}
	}
	for name, n := range counts {
		if n < keys/8*85/100 || n > keys/8*115/100 {
			t.Errorf("worker %s has %d keys of %d", name, n, keys)
		}
	}
	if moved != counts["8"] {
		t.Errorf("%d keys moved, 8 had %d", moved, counts["8"])
	}
}

// However many requests have one key, no worker has much more than its share.
func TestHotKeySinksNobody(t *testing.T) {
	p := newPicker(ConsistentHash, 1)
	pool := make([]candidate, 8)
	for i := range pool {
		pool[i] = candidate{usable: true, name: hashKey(strconv.Itoa(i))}
	}
	r := rand.New(rand.NewPCG(5, 0))
	var total int64
	for range 2000 {
		w := wish{keyed: true, key: hashKey("hot"), cost: 100 + r.Int64N(400)}
		i := p.pick(pool, w)
		pool[i].load += w.cost
		pool[i].legs++
		total += w.cost
	}
	for i, c := range pool {
		if c.load > total*130/100/8 {
			t.Errorf("worker %d has %d of %d tokens", i, c.load, total)
		}
	}
}

// What a pick costs, with what has to be known of the request for it.
func BenchmarkPick(b *testing.B) {
	var urls [8]string
	for i := range urls {
		urls[i] = fmt.Sprintf("http://10.0.0.%d:30000", i)
	}
	for _, policy := range []string{"least_load", "consistent_hash", "cache_aware"} {
		for _, size := range []int{200, 8 << 10, 220 << 10, 10 << 20} {
			b.Run(fmt.Sprintf("%s/%d", policy, size), func(b *testing.B) {
				tab := tableOf(b, policy, Default().CacheMemory, urls[:], urls[:])
				x := asking(b, fmt.Sprintf(`{"user":"u","prompt":"%s"}`, strings.Repeat("x", size)))
				b.ReportAllocs()
				for b.Loop() {
					wishes := tab.wish(x)
					got, cost, _ := tab.pickPair(0, &wishes, [2][]*worker{})
					tab.release(got[Prefill], cost[Prefill])
					tab.release(got[Decode], cost[Decode])
				}
			})
		}
	}
}
