#!/usr/bin/env bash
# Runs fuzz targets for the given time each and notes the results in testdata/fuzz-results.txt:
#   fuzz.sh 10m                  every target
#   fuzz.sh 30m internal/model   those of one package: GGUF files, tokenizer, chat template and its injections, 2 hours
# FUZZ_WORKERS is how many run at once (default: all cores). New inputs are made smaller for 1 s at most: GGUF ones are
# large. Inputs that fail are kept in testdata/fuzz of the package.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-1m} under=${2:-internal} results=testdata/fuzz-results.txt bad=0
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
for dir in $(grep -rl --include='*_test.go' '^func Fuzz' "$under" | xargs -n1 dirname | sort -u); do
  for target in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/^func //' | sort -u); do
    echo "== $dir $target $time"
    out=$(mktemp)
    verdict=ok
    go test "./$dir" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 1s ${FUZZ_WORKERS:+-parallel "$FUZZ_WORKERS"} 2>&1 | tee "$out" || verdict=FAILED bad=1
    counts=$(grep -oE 'execs: [0-9]+|new interesting: [0-9]+ \(total: [0-9]+\)' "$out" | tail -2 | paste -sd ' ' - || true)
    echo "$(date -u +%Y-%m-%d) $commit $(go env GOVERSION) $dir $target $time: $verdict, $counts" >>"$results"
    rm -f "$out"
  done
done
tail -n 12 "$results"
exit $bad
