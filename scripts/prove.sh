#!/usr/bin/env bash
# Runs what is too long for every test run and notes each outcome in testdata/proof-results.txt, which a test reads:
#   prove.sh mutations 250 7     so many random breakages of the cores, drawn by a seed
#   prove.sh baseline            a loop that waits beside ours, on real processes
#   prove.sh compare             the same in virtual time; draws docs/gaps.svg
#   prove.sh simulator 20000 S   so many seeds from S on
# METRONOME_BINARY is the binary (default: bin/metronome).
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 results=testdata/proof-results.txt verdict=ok said=
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
binary=${METRONOME_BINARY:-$PWD/bin/metronome}
out=$(mktemp)
trap 'rm -f "$out"' EXIT
case $what in
mutations)
  go test -count=1 -timeout 2h -v -run '^TestRandom$' ./internal/mutants -random "${2:-250}" -random-seed "${3:-1}" 2>&1 | tee "$out" || verdict=FAILED
  said=$(grep -oE 'seed [0-9]+: [0-9]+ mutations.*' "$out" || true) ;;
baseline)
  METRONOME_LONG=1 METRONOME_BINARY=$binary go test -count=1 -v -run '^TestBlockingBaseline$' ./internal/chaos 2>&1 | tee "$out" || verdict=FAILED
  said=$(grep -E 'longest gap: a loop' "$out" | sed -E 's/^ *[a-z_]+\.go:[0-9]+: //; s/  +/ /g' | paste -sd '|' | sed 's/|/ | /g' || true) ;;
compare)
  "$binary" sim --compare blocking --svg docs/gaps.svg | tee "$out" || verdict=FAILED
  said=$(grep -E '^ +[0-9]+ ' "$out" | sed -E 's/^ +//; s/  +/, /g' | paste -sd '|' | sed 's/|/ | /g' || true) ;;
simulator)
  "$binary" sim --seeds "$2" --seed "$3" | tee "$out" || verdict=FAILED
  said="from seed $3 on: $(grep -E '^[0-9]+ seeds in' "$out" || true)" ;;
*)
  echo "prove.sh: no such thing: $what" >&2
  exit 2 ;;
esac
echo "$(date -u +%Y-%m-%d) $commit $what: $verdict, $said" >>"$results"
tail -n 1 "$results"
[ "$verdict" = ok ]
