#!/usr/bin/env bash
# Runs every fuzz target for the given time: fuzz.sh 10m
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-1m}
for dir in $(grep -rl --include='*_test.go' '^func Fuzz' internal | xargs -n1 dirname | sort -u); do
  for target in $(grep -rhoE '^func Fuzz[A-Za-z0-9_]+' "$dir" | sed 's/^func //' | sort -u); do
    echo "== $dir $target $time"
    go test "./$dir" -run '^$' -fuzz "^$target\$" -fuzztime "$time"
  done
done
