#!/usr/bin/env bash
# Installs what the tests need beside Go: deps.sh VENV_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
fi
"$venv/bin/python" -c 'import openai' 2>/dev/null || "$venv/bin/pip" install --quiet 'openai>=1,<4'
# The chat templates' reference: the Jinja2 that testdata/jinja was recorded with.
"$venv/bin/python" -c 'import jinja2; assert jinja2.__version__ == "3.1.6"' 2>/dev/null || "$venv/bin/pip" install --quiet jinja2==3.1.6

# The openai client for Node, where there is a Node or may be one; version 7 wants a newer one than distributions have.
if ! command -v npm >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
fi
if command -v npm >/dev/null && [ ! -d .cache/node/node_modules/openai ]; then
  npm install --silent --no-fund --no-audit --prefix .cache/node 'openai@^6' >/dev/null
fi

# Network namespaces (Linux, as root; elsewhere those tests skip and say so), and an emulator for the engine's tests on arm64.
if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] && ! { command -v ip && command -v nft && command -v curl && command -v qemu-aarch64-static; } >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 nftables curl qemu-user-static >/dev/null
fi

echo "SmolLM2: $(go run ./cmd/metronome pull smollm2)"
