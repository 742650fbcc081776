#!/usr/bin/env bash
# Measures our engine beside llama.cpp's on the same files (scripts/compare-llamacpp), and writes the table and the
# roofline of docs/performance.md. By hand: the first run builds llama.cpp (10 minutes on two cores), each one measures
# for a quarter of an hour. Needs cmake and a C++ compiler. A short run:
#
#   ROUNDS=1 FILES="SmolLM2-Q4_1 llama-150M-Q8_0" THREADS=2 PAGE= scripts/compare-llamacpp.sh      PAGE=: nothing but a table on stdout
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36 work=$PWD/.cache/compare
models=$work/models go=${GO:-go} page=${PAGE-docs/performance.md}
mkdir -p "$models" docs

bin=$work/build/bin
if [ ! -x "$bin/llama-batched-bench" ] || [ ! -x "$bin/llama-quantize" ]; then
  echo "building llama.cpp of llama-cpp-python $version" >&2
  if [ ! -d "$work/llama.cpp" ]; then
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d "$work" llama-cpp-python==$version
    rm -rf "$work/unpacked"
    mkdir "$work/unpacked"
    tar -xzf "$work/llama_cpp_python-$version.tar.gz" -C "$work/unpacked" --strip-components=2 "llama_cpp_python-$version/vendor"
    mv "$work/unpacked/llama.cpp" "$work/llama.cpp"
  fi
  cmake -S "$work/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$work/build.log" 2>&1
  cmake --build "$work/build" --parallel "$(nproc)" --target llama-batched-bench llama-quantize >>"$work/build.log" 2>&1 ||
    { tail -n 20 "$work/build.log" >&2; exit 1; }
fi

mkdir -p bin
"$go" build -o bin/metronome ./cmd/metronome
"$go" build -o "$work/compare" ./scripts/compare-llamacpp

# make FILE COMMAND...: the command writes FILE.part, which becomes FILE.
make() {
  local file=$1
  shift
  [ -f "$file" ] || { echo "making $(basename "$file")" >&2; "$@" >"$work/make.log" 2>&1 || { cat "$work/make.log" >&2; exit 1; }; mv "$file.part" "$file"; }
}
smol=$(bin/metronome pull smollm2)
list=()
for name in ${FILES:-SmolLM2-Q4_1 SmolLM2-Q8_0 SmolLM2-Q4_0 llama-150M-Q8_0}; do
  file=$models/$name.gguf
  case $name in
  SmolLM2-Q4_1) ln -sf "$smol" "$file" ;;
  SmolLM2-*) make "$file" "$bin/llama-quantize" --allow-requantize "$smol" "$file.part" "${name#SmolLM2-}" ;;
  llama-150M-Q8_0) make "$file" "$work/compare" -generate "$file.part" ;;
  *) file=$name ;; # a path
  esac
  list+=("$file")
  # Out of the page cache: the first to map it, ours, asks for large pages, and so both have them.
  sync "$file"
  dd if="$file" iflag=nocache count=0 status=none
done
args=(-files "$(IFS=,; echo "${list[*]}")" -threads "${THREADS:-2,1}" -rounds "${ROUNDS:-5}" -llama "$bin/llama-batched-bench"
  -version "llama.cpp of llama-cpp-python $version (-march=native)" -json "$work/result.json")
[ -z "$page" ] || args+=(-page "$page" -plot docs/roofline.svg)
exec "$work/compare" "${args[@]}"
