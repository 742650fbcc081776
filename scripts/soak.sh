#!/usr/bin/env bash
# Soaks a fleet of real processes in random faults for the given time (default 10m) and notes the outcome in
# testdata/soak-results.txt. METRONOME_BINARY is the binary (default: bin/metronome).
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-10m} results=testdata/soak-results.txt verdict=ok
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
out=$(mktemp)
METRONOME_SOAK=$time METRONOME_BINARY=${METRONOME_BINARY:-$PWD/bin/metronome} \
  go test -count=1 -timeout 2h -v -run '^TestSoak$' ./internal/chaos 2>&1 | tee "$out" || verdict=FAILED
said=$(grep -oE '(seed [0-9]+, |soak: |(prefill|decode|router): [0-9.]+ MiB after).*' "$out" | paste -sd ';' | sed 's/;/; /g' || true)
echo "$(date -u +%Y-%m-%d) $commit $(go env GOVERSION): $verdict, $said" >>"$results"
rm -f "$out"
tail -n 1 "$results"
[ "$verdict" = ok ]
