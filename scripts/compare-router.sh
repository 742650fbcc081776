#!/usr/bin/env bash
# Measures our router and holds it to its rows on failures and fidelity (scripts/compare-router):
#   compare-router.sh [peers]     peers: beside sglang-router and smg from PyPI, and the results into docs/compare-router.md
set -euo pipefail
cd "$(dirname "$0")/.."
args=()
if [ "${1:-}" = peers ]; then
  for package in sglang-router==0.3.2 smg==1.13.0; do
    venv=.cache/${package%%=*}
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
    args+=("-${package%%[-=]*}" "$venv")
  done
  args+=(-out docs/compare-router.md)
fi
"${GO:-go}" build -o .cache/compare-router ./scripts/compare-router
exec .cache/compare-router "${args[@]}"
