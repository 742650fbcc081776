# Few targets. `make test` is everything that CI runs.

GO ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
VENV := .cache/venv

# Every package but the real-process tests.
UNIT = $$($(GO) list ./... | grep -v internal/chaos)

QEMU := qemu-aarch64-static

.PHONY: build quick test long deps lint unit race sim process cross arm64 references clients compare compare-router clean

build:
	$(GO) build -o bin/metronome ./cmd/metronome

quick: ## vet and the fast tests
	$(GO) vet ./...
	$(GO) test -short $(UNIT)

test: deps lint unit race sim process cross arm64
	@echo "all tests passed"

deps: ## what the tests need beside Go, by the ordinary package managers
	scripts/deps.sh $(VENV)

lint:
	@bad=$$(gofmt -l cmd internal); [ -z "$$bad" ] || { echo "gofmt would change: $$bad"; exit 1; }
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...

unit: ## every package but the real-process tests; of each pure file 95 % of the statements run
	mkdir -p .cache
	METRONOME_VENV=$(CURDIR)/$(VENV) $(GO) test -coverprofile=.cache/unit.cover -coverpkg=$$(grep -rl '^//metronome:pure$$' --include=*.go internal | xargs -n 1 dirname | sort -u | sed 's,^,./,' | paste -sd, -) $$($(GO) list ./... | grep -v internal/chaos)
	$(GO) run ./internal/lint/cmd/purecover .cache/unit.cover
	cd internal/engine/kernels/gen && $(GO) vet . && $(GO) test .

race:
	$(GO) test -race -short $(UNIT)

sim: build ## a fixed set of seeds, then ever new ones for two minutes
	bin/metronome sim --seed 1 --seeds 500
	bin/metronome sim --for 2m

process: build ## real processes, real sockets, network namespaces
	METRONOME_BINARY=$(CURDIR)/bin/metronome METRONOME_VENV=$(CURDIR)/$(VENV) METRONOME_NODE=$(CURDIR)/.cache/node $(GO) test -count=1 -timeout 45m -v ./internal/chaos

cross:
	GOOS=linux GOARCH=arm64 $(GO) build -o /dev/null ./cmd/metronome
	GOOS=darwin GOARCH=arm64 $(GO) build -o /dev/null ./cmd/metronome
	GOOS=windows GOARCH=amd64 $(GO) build -o /dev/null ./cmd/metronome

arm64: ## the engine's bits on another processor, emulated: the goldens are those of amd64
	@if ! command -v $(QEMU) >/dev/null; then echo "skipped: $(QEMU) is not here (Debian: qemu-user-static)"; exit 0; fi; set -ex; \
	GOOS=linux GOARCH=arm64 $(GO) test -count=1 -exec $(QEMU) -short ./internal/engine/kernels; \
	GOOS=linux GOARCH=arm64 $(GO) test -count=1 -exec $(QEMU) -short -run 'TestGolden$$|TestPhilox|TestDraw' ./internal/engine

long: build ## every mutant, random ones, the baseline beside four hung peers, long fuzzing, a long hunt of the simulator, a soak in faults, an evaluation harness, and clients, by hand
	$(GO) test -timeout 60m -count=1 ./internal/mutants -all -rewrite
	scripts/prove.sh mutations 250 $$(date +%s)
	scripts/prove.sh baseline
	scripts/prove.sh compare
	scripts/prove.sh simulator 60000 $$(date +%s)0000
	scripts/fuzz.sh 10m
	scripts/soak.sh 10m
	scripts/lm-eval.sh
	scripts/clients.sh

references: ## by hand: has llama.cpp compute testdata/llamacpp anew, and compares all of it
	GO=$(GO) scripts/llamacpp/references.sh
	$(GO) test -count=1 -timeout 1h -tags references -run 'TestGenerated|TestRequantised|TestSmolLM2' -v ./internal/engine -nll-tokens 2012

clients: build ## by hand: real clients and a load generator against `up`, a browser among them
	GO=$(GO) scripts/clients.sh

compare: ## by hand: our engine beside llama.cpp on the same files, into docs/performance.md; ROUNDS, FILES and THREADS make it shorter
	GO=$(GO) scripts/compare-llamacpp.sh

compare-router: build ## by hand: our router's figures and its rows on failures; PEERS=1: beside sglang-router and smg, into docs/compare-router.md
	GO=$(GO) scripts/compare-router.sh $(if $(PEERS),peers)

clean:
	rm -rf bin .cache
