#!/usr/bin/env bash
# Writes the row of one run by hand in docs/runs.md anew: record.sh RUN VERDICT OUTPUT PATTERN
# What the run said are the matches of PATTERN (grep -E) in the file OUTPUT. A row that does not say ok fails CI.
set -euo pipefail
cd "$(dirname "$0")/.."
run=$1 verdict=$2 page=docs/runs.md
said=$(grep -oE -- "$4" "$3" | paste -sd ';' | sed 's/;/; /g; s/|/\\|/g' || true)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD -- ':!docs' 2>/dev/null || commit+=-dirty
row="| \`$run\` | $(date -u +%F) | $commit $(go env GOVERSION) | $verdict | $said |"
rows=$({ grep '^| `' "$page" | grep -vF "| \`$run\` |"; printf '%s\n' "$row"; } | sort || true)
head=$(grep -v '^| `' "$page")
printf '%s\n%s\n' "$head" "$rows" >"$page"
printf '%s\n' "$row"
