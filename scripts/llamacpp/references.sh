#!/usr/bin/env bash
# Has llama.cpp compute the models that the engine's tests compare with, and writes testdata/llamacpp anew; tokenizers writes
# testdata/tokenizers. By hand: it builds llama.cpp once (10 minutes on two cores) and computes for some minutes more. Tests read only what it wrote.
#
#   scripts/llamacpp/references.sh [generated] [requantised] [tokenizers]      default: all
set -euo pipefail
cd "$(dirname "$0")/../.."
here=scripts/llamacpp work=.cache/llamacpp
python=${METRONOME_LLAMACPP_PYTHON:-$work/venv/bin/python}

if [ ! -x "$python" ]; then
  python3 -m venv "$work/venv"
fi
"$python" -c 'import llama_cpp' 2>/dev/null || "$python" -m pip install --quiet llama-cpp-python==0.3.36 numpy==2.4.6

mkdir -p testdata/llamacpp
for what in "${@:-generated requantised tokenizers}"; do
  for part in $what; do
    rm -rf "$work/$part"
    mkdir -p "$work/$part"
    case $part in
    generated)
      ${GO:-go} test -count=1 ./internal/model/modeltest -run '^TestModels$' -write "$PWD/$work/generated"
      ;;
    requantised)
      # K-quants need rows of 256, which SmolLM2 does not have.
      "$python" $here/requantise.py "$work/requantised" testdata/tiny-model/tiny-f16.gguf testdata/smollm2/perplexity-text.txt \
        F32 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K_M Q5_K_M Q6_K
      smol=$(${GO:-go} run ./cmd/metronome pull smollm2)
      "$python" $here/requantise.py "$work/requantised" "$smol" testdata/smollm2/perplexity-text.txt \
        F32 F16 BF16 Q8_0 Q4_0 Q5_0 Q5_1
      ;;
    tokenizers)
      "$python" -c 'import regex' 2>/dev/null || "$python" -m pip install --quiet regex==2026.11.19
      "$python" testdata/tokenizers/reference.py
      continue
      ;;
    *)
      echo "references: $part is none of generated, requantised and tokenizers" >&2
      exit 2
      ;;
    esac
    "$python" $here/record.py "testdata/llamacpp/$part.json" "$work/$part"/*.gguf
  done
done
