#!/usr/bin/env bash
# Soaks a fleet of real processes in random faults for the given time (default 10m) and notes the outcome in
# docs/runs.md. METRONOME_BINARY is the binary (default: bin/metronome).
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-10m} verdict=ok out=$(mktemp)
METRONOME_SOAK=$time METRONOME_BINARY=${METRONOME_BINARY:-$PWD/bin/metronome} \
  go test -count=1 -timeout 2h -v -run '^TestSoak$' ./internal/chaos 2>&1 | tee "$out" || verdict=FAILED
scripts/record.sh soak $verdict "$out" '(seed [0-9]+, |soak: |(prefill|decode|router): [0-9.]+ MiB after).*'
rm -f "$out"
[ $verdict = ok ]
