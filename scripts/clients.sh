#!/usr/bin/env bash
# Runs the clients that people use against `up`: openai for Python and for Node, curl, a page in headless Chromium, and
# the load generator aiperf, whose report must agree with our metrics. Chromium comes from the system's packages (as
# root, on Debian), the rest from PyPI and npm into .cache; aiperf takes 1.1 GB. Notes the outcome in docs/runs.md.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/deps.sh .cache/venv
if ! command -v chromedriver >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
fi
aiperf=.cache/aiperf
[ -x "$aiperf/bin/aiperf" ] || { python3 -m venv "$aiperf" && "$aiperf/bin/python" -m pip install --quiet --disable-pip-version-check aiperf==0.13.0; }
verdict=ok out=$(mktemp)
METRONOME_BINARY=$PWD/bin/metronome METRONOME_VENV=$PWD/.cache/venv METRONOME_NODE=$PWD/.cache/node METRONOME_AIPERF=$PWD/$aiperf \
  "${GO:-go}" test -tags clients -count=1 -timeout 20m -run 'TestRealClients|TestBrowser|TestLoadGenerator' -v ./internal/chaos 2>&1 | tee "$out" || verdict=FAILED
scripts/record.sh clients $verdict "$out" '(PASS|FAIL|SKIP): Test[A-Za-z_/]+|Chromium [0-9.]+: .*|[a-z][a-z, -]+: aiperf [0-9.]+, metrics [0-9.]+'
rm -f "$out"
[ $verdict = ok ]
